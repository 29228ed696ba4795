"""Makes data sets: ``python -m benchmarks.make_data``, with what to make on standard input; :func:`data.ensure` calls it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import cache, data, peers
from benchmarks.data import DataSet, Model, StateDict
from secure_loader.bench.measure import digest

_SPARE = 4 << 30  # bytes of disk that stay free


class CannotMakeError(Exception):
    """Why a variant cannot be made here."""


def make(what: DataSet, variant: str) -> None:
    """Write a variant, and the plain one before all others."""
    if variant != "plain":
        make(what, "plain")
    target = data.path(what, variant)
    note = cache.folder() / f"{what.name}.{data.RECIPE}" / "expected.json"
    if not target.exists():
        if shutil.disk_usage(cache.folder()).free < what.nbytes + _SPARE:
            raise CannotMakeError(f"not enough disk for {what.nbytes / 1e9:.1f} GB")
        if _available_memory() < 2 * what.nbytes:  # the tensors, and the file in the page cache
            raise CannotMakeError(f"not enough memory for {what.nbytes / 1e9:.1f} GB")
        target.parent.mkdir(exist_ok=True)
        if isinstance(what, Model):
            _make_model(what, variant, target)
        else:
            _make_file(what, variant, target)
    if variant == "plain" and not note.exists():
        note.parent.mkdir(exist_ok=True)
        note.write_text(json.dumps({"digest": digest(peers.load_plain(data.weight_files(what, "plain")))}))


def _available_memory() -> int:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def random_tensors(shapes: data.Shapes) -> dict[str, torch.Tensor]:
    """Normally distributed bfloat16 weights."""
    import numpy as np

    source = np.random.default_rng(0)
    tensors = {}
    for name, shape in shapes:
        tensor = torch.empty(shape, dtype=torch.bfloat16)
        flat = tensor.view(-1)
        for start in range(0, flat.numel(), 1 << 24):
            part = flat[start : start + (1 << 24)]
            part.copy_(torch.from_numpy(source.standard_normal(part.numel(), dtype=np.float32)).mul_(0.02))
        tensors[name] = tensor
    return tensors


def _make_file(what: StateDict, variant: str, target: Path) -> None:
    if variant == "plain":
        tensors: Mapping[str, torch.Tensor] = random_tensors(what.shapes)
    else:
        tensors = peers.load_plain([data.path(what, "plain")])
    with _finished(target) as work:
        write(work, tensors, variant)


def write(target: Path, tensors: Mapping[str, torch.Tensor], variant: str) -> None:
    """Write tensors in the format of a variant."""
    kind, *settings = variant.split(":")
    options = {name: int(value) for name, _, value in (setting.partition("=") for setting in settings)}
    share = options.get("share", 100)
    clear = _left_clear(tensors, share)
    if kind == "plain":
        from safetensors.torch import save_file

        save_file(dict(tensors), target, metadata={"format": "pt"})
    elif kind == "secure":
        from secure_loader.torch import save_file as save_secure

        more = {"chunk_size": options["chunk"]} if "chunk" in options else {}
        save_secure(dict(tensors), target, metadata={"format": "pt"}, exclude=clear, **more)
    elif kind == "cryptotensors":
        peers.save_cryptotensors(target, tensors, None if not clear else [n for n in tensors if n not in set(clear)])
    elif kind in ("tensorizer", "tensorizer-encrypted"):
        peers.save_tensorizer(target, tensors, encrypted=kind.endswith("encrypted"))
    else:
        raise CannotMakeError(f"no such variant: {variant}")


def _left_clear(tensors: Mapping[str, torch.Tensor], share: int) -> list[str]:
    """Names to leave in clear so that ``share`` percent of the bytes are encrypted, spread over the file."""
    clear, sealed, seen = [], 0, 0
    for name, tensor in tensors.items():
        seen += tensor.nbytes
        if sealed + tensor.nbytes / 2 <= seen * share / 100 and share > 0:
            sealed += tensor.nbytes
        else:
            clear.append(name)
    return clear if share < 100 else []


def _make_model(what: Model, variant: str, target: Path) -> None:
    source = data.path(what, "plain")
    with _finished(target) as work:
        if variant == "plain":
            _write_model(what, work)
        elif variant == "secure":
            from secure_loader import encrypt_model

            encrypt_model(source, work, progress=False)
        elif variant == "cryptotensors":
            shutil.copytree(source, work)
            for file in work.glob("*.safetensors"):
                peers.save_cryptotensors(file, peers.load_plain([source / file.name]), None)
        else:
            raise CannotMakeError(f"no such variant: {variant}")


def _write_model(what: Model, target: Path) -> None:
    if what.kind.startswith("shards-"):
        _write_shards(what, target)
        return
    from tests.models import byte_tokenizer, tiny_model

    if what.kind == "tiny":
        tiny_model(target)
        return
    import transformers

    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(target)
    config = transformers.Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(config)
    shapes = tuple((name, tuple(tensor.shape)) for name, tensor in model.state_dict().items())
    model = model.to(torch.bfloat16)
    model.load_state_dict(random_tensors(shapes), assign=True)
    model.save_pretrained(target, max_shard_size="8GB")


def _write_shards(what: Model, target: Path) -> None:
    from safetensors.torch import save_file

    count = int(what.kind.rpartition("-")[2])
    shape = (what.nbytes // count // 2 // 128, 128)
    tensors = random_tensors(tuple((f"layers.{number:05}.weight", shape) for number in range(count)))
    places = {name: f"model-{1 + number * 4 // count:05}-of-00004.safetensors" for number, name in enumerate(tensors)}
    target.mkdir()
    for file in sorted(set(places.values())):
        here = {name: tensor for name, tensor in tensors.items() if places[name] == file}
        save_file(here, target / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": what.nbytes}, "weight_map": places}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    (target / "config.json").write_text("{}")


@contextmanager
def _finished(target: Path) -> Iterator[Path]:
    """A name to write to; it becomes the target when nothing went wrong, with its bytes on disk."""
    work = target.with_name(f".{os.getpid()}-{target.name}")
    try:
        yield work
        os.sync()
        work.rename(target)
    finally:
        if work.is_dir():
            shutil.rmtree(work)
        else:
            work.unlink(missing_ok=True)


def _parse(kind: str, fields: dict[str, Any]) -> DataSet:
    if kind == "Model":
        return Model(**fields)
    return StateDict(fields["name"], tuple((name, tuple(shape)) for name, shape in fields["shapes"]))


def main() -> None:
    """Print why each could not be made, or null, as JSON on the last line."""
    reasons: list[str | None] = []
    with cache.locked():
        for kind, fields, variant in json.load(sys.stdin):
            try:
                make(_parse(kind, fields), variant)
                reasons.append(None)
            except Exception as e:  # noqa: BLE001 - a peer may fail in any way, and the way is the result
                reasons.append(f"{type(e).__name__}: {e}"[:600])
    print(json.dumps(reasons))


if __name__ == "__main__":
    main()
