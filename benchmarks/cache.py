"""The folder that benchmark data is kept in, outside the checkout. ``python -m benchmarks.cache --remove`` deletes it."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def folder() -> Path:
    """``$SECURE_LOADER_BENCH_DIR``, or a folder of ours in the user's cache; made when it is first needed."""
    chosen = os.environ.get("SECURE_LOADER_BENCH_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(chosen) if chosen else Path(base) / "secure_loader" / "bench"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


@contextmanager
def locked() -> Iterator[None]:
    """Of several benchmark processes, one at a time makes keys or data."""
    with (folder() / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def home() -> Path:
    """``SECURE_LOADER_HOME`` of the benchmarks, with throw-away keys."""
    path = folder() / "home"
    if not path.exists():
        with locked():
            if not path.exists():
                _make_keys(path)
    return path


def _make_keys(path: Path) -> None:
    work = path.with_name(".home")
    shutil.rmtree(work, ignore_errors=True)
    subprocess.run(
        [sys.executable, "-m", "secure_loader", "keygen", "bench", "--quiet"],
        env=os.environ | {"SECURE_LOADER_HOME": str(work), "PYTHONPATH": _python_path()},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    peers = {name: secrets.token_hex(32) for name in ("master", "signing", "tensorizer")}
    (work / "peers.json").touch(mode=0o600)
    (work / "peers.json").write_text(json.dumps(peers))
    work.rename(path)


def _python_path() -> str:
    """This clone, before what is there already: packages may lie in a folder that only the variable names."""
    return os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def peer_keys() -> dict[str, str]:
    """Throw-away keys of the other loaders, 32 random bytes each, as hex."""
    return dict(json.loads((home() / "peers.json").read_text()))


def environment() -> dict[str, str]:
    """Settings of every process that measures or makes data: ours alone, offline, and quiet."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith("SECURE_LOADER_")}
    for name in ("VLLM_PLUGINS", "TORCH_DEVICE_BACKEND_AUTOLOAD", "HF_TOKEN"):
        settings.pop(name, None)
    return settings | {
        "SECURE_LOADER_HOME": str(home()),
        "SECURE_LOADER_BENCH_DIR": str(folder()),
        "PYTHONPATH": _python_path(),
        "HF_HOME": str(folder() / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }


def main() -> None:
    """Delete the folder, or say how much is in it."""
    parser = argparse.ArgumentParser(description="Data of the benchmarks.")
    parser.add_argument("--remove", action="store_true", help="delete it all")
    arguments = parser.parse_args()
    size = sum(file.stat().st_size for file in folder().rglob("*") if file.is_file())
    if arguments.remove:
        shutil.rmtree(folder())
    print(f"{size / 1e9:.1f} GB of benchmark data{' removed' if arguments.remove else ''}")


if __name__ == "__main__":
    main()
