"""Writing tensors that are in memory to one file, and flushing file and folder to disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks import cache, data, peers
from benchmarks.data import QWEN3_06B, TINY, StateDict
from benchmarks.loaders import LOADERS, ready
from benchmarks.model import Case, Entry, Goal, Quantity, Size, Suite
from secure_loader.bench.measure import Task, digest

# Entry: the loader that reads the file back.
_ENTRIES = {
    "secure": ("secure_loader, encrypted", "secure"),
    "safetensors": ("safetensors, plain", "safetensors-owned"),
    "cryptotensors": ("cryptotensors, encrypted", "cryptotensors"),
    "tensorizer-encrypted": ("tensorizer, encrypted", "tensorizer-encrypted"),
}


def flush(path: Path) -> None:
    """The same for everybody: the file's bytes and its name are on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    data.sync_folder(path.parent)


def _entry(what: StateDict, name: str) -> Entry:
    label, reader = _ENTRIES[name]
    loader = LOADERS[reader]

    def make() -> Task:
        from benchmarks.make_data import write

        plain = data.path(what, "plain")
        target = cache.folder() / f"written-{name}{data.path(what, loader.variant).suffix}"

        def prepare() -> Any:
            ready()
            target.unlink(missing_ok=True)
            tensors = {key: tensor.clone() for key, tensor in peers.load_plain([plain]).items()}
            os.sync()  # nobody flushes what another one has written
            return tensors

        def written(tensors: Any) -> Any:
            write(target, tensors, loader.variant)
            return tensors

        def synced(tensors: Any) -> Any:
            flush(target)
            return tensors

        def check(tensors: Any) -> str:
            tensors.clear()
            try:
                return digest(loader.load(target))
            finally:
                target.unlink()

        return Task(
            name=name,
            prepare=prepare,
            phases={"write": written, "sync": synced},
            check=check,
            files=(plain,),
            memory=2 * what.nbytes + (64 << 20),
        )

    return Entry(
        name=name,
        label=label,
        loader=loader.package,
        make=make,
        modules=(*loader.modules, "safetensors.torch", "benchmarks.make_data"),
        data=((what, "plain"),),
        parameters={"bytes": what.nbytes},
    )


def _cases(size: Size) -> tuple[Case, ...]:
    what = QWEN3_06B if size == "full" else TINY
    entries = tuple(_entry(what, name) for name in _ENTRIES)
    return (Case(name="0.6b", title="Qwen3-0.6B, 1.2 GB, fsync", entries=entries, expected=what, watch=True),)


SUITE = Suite(
    name="save",
    title="Encrypting and saving",
    cases=_cases,
    goals=(
        Goal(
            what="encrypt and save",
            against="safetensors plain save of the same, same fsync",
            measured=Quantity("0.6b", "secure", "seconds.sync"),
            reference=Quantity("0.6b", "safetensors", "seconds.sync"),
            bound=1.15,
        ),
        Goal(
            what="encrypt and save: memory at peak above the tensors",
            against="safetensors plain save",
            measured=Quantity("0.6b", "secure", "peak.anon", scale=1e-6),
            reference=Quantity("0.6b", "safetensors", "peak.anon", scale=1e-6),
            compare="difference",
            bound=64.0,
            unit=" MB",
        ),
    ),
)
