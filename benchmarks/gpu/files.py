"""Files that are loaded: the same weights in clear, for us, and for cryptotensors; on the disk and in memory (tmpfs).

A process of its own makes them, before the stages that load them: ``python -m benchmarks.gpu.child files``.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.data import StateDict
from benchmarks.gpu.device import Bench
from benchmarks.gpu.stage import Context, SkippedError
from secure_loader.bench import machine
from secure_loader.bench.measure import digest

VARIANTS = ("plain", "secure", "cryptotensors")
_SPARE = 2 << 30  # bytes that stay free
_TMPFS = ("/dev/shm", "/run/shm", "/tmp", "/run")


@dataclass(frozen=True)
class Files:
    """One state dict.

    Attributes:
        name: Its own.
        nbytes: Of all its tensors.
        tensors: How many.
        cached: Whether what lies in ``memory`` is the file on the disk, in the page cache: there is no tmpfs with room for it.
        digest: Of the tensors, see :func:`secure_loader.bench.measure.digest`.
        paths: By place (``disk``, ``memory``) and variant.
        missing: Why, for what there is not.
    """

    name: str
    nbytes: int
    tensors: int
    cached: bool
    digest: str
    paths: Mapping[str, Mapping[str, str]]
    missing: Mapping[str, str]


def memory_folder(nbytes: int) -> Path | None:
    """A file system in memory with room for so many bytes, where this user may write."""
    for name in _TMPFS:
        place = Path(name)
        if not place.is_dir() or not os.access(place, os.W_OK):
            continue
        if machine.file_system(place) == "tmpfs" and shutil.disk_usage(place).free > nbytes:
            return place
    return None


def run(context: Context) -> None:
    """Make all that there is room and time for, and note it in ``files.json``; each size is noted when it is complete."""
    found: list[dict[str, Any]] = []
    rate = float("inf")
    for number, what in enumerate(context.sizes.loads):
        if what.nbytes / rate > context.left():
            context.tell(f"   {what.name}: not made: no time was left for it")
            break
        start = time.monotonic()
        made = _make(context, what, cryptotensors=number == 0)
        if isinstance(made, str):
            context.tell(f"   {what.name}: not made: {made}")
            break
        found.append(made)
        rate = what.nbytes / (time.monotonic() - start)
        (context.folder / "files.json").write_text(json.dumps(found))
        context.tell(f"   {what.name}: {what.nbytes / 1e9:.2f} GB, on the disk and {where(Files(**made), 'memory')}")
    if not found:
        raise SkippedError("there is room for none of the files")


def made(context: Context) -> list[Files]:
    """What :func:`run` made. Raises SkippedError where there is nothing."""
    note = context.folder / "files.json"
    if not note.exists():
        raise SkippedError("the files that it loads were not made")
    return [Files(**fields) for fields in json.loads(note.read_text())]


def _make(context: Context, what: StateDict, *, cryptotensors: bool) -> dict[str, Any] | str:
    count = 3 if cryptotensors else 2
    if shutil.disk_usage(context.folder).free < count * what.nbytes + _SPARE:
        return "not enough disk"
    if _available() < 4 * what.nbytes + _SPARE:
        return "not enough memory"
    if context.bench.free_memory() < 2 * what.nbytes + (1 << 28) and not context.bench.stand_in:
        return "not enough memory on the device"
    tensors = random_tensors(context.bench, what)
    paths: dict[str, dict[str, str]] = {"disk": {}}
    missing: dict[str, str] = {}
    for variant in VARIANTS[:count]:
        path = context.folder / f"{what.name}-{variant}.safetensors"
        try:
            write(path, tensors, variant)
            paths["disk"][variant] = str(path)
        except Exception as e:
            if variant != "cryptotensors":
                raise
            missing[variant] = f"{type(e).__name__}: {e}"[:300]
    total = digest(tensors)
    del tensors
    os.sync()
    room = 0 if context.memory_folder is None else shutil.disk_usage(context.memory_folder).free
    cached = min(room, _available() - _SPARE) < count * what.nbytes + (64 << 20)
    if context.memory_folder is None or cached:
        paths["memory"] = paths["disk"]
    else:
        paths["memory"] = {
            variant: shutil.copyfile(path, context.memory_folder / Path(path).name).as_posix()
            for variant, path in paths["disk"].items()
        }
    return {
        "name": what.name,
        "nbytes": what.nbytes,
        "tensors": len(what.shapes),
        "cached": cached,
        "digest": total,
        "paths": paths,
        "missing": missing,
    }


def random_tensors(bench: Bench, what: StateDict) -> dict[str, Any]:
    """Normally distributed bfloat16 weights in host memory, made on the device, which is faster."""
    import torch

    generator = torch.Generator(bench.torch_device).manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator, device=bench.torch_device, dtype=torch.bfloat16).mul_(0.02).cpu()
        for name, shape in what.shapes
    }


def write(path: Path, tensors: Mapping[str, Any], variant: str) -> None:
    """Write one variant."""
    if variant == "plain":
        from safetensors.torch import save_file

        save_file(dict(tensors), path, metadata={"format": "pt"})
    elif variant == "secure":
        from secure_loader.torch import save_file as save_secure

        save_secure(dict(tensors), path, metadata={"format": "pt"})
    else:
        from benchmarks import peers

        peers.save_cryptotensors(path, tensors, None)


def prepare(one: Files, place: str, path: str | Path) -> None:
    """Before a load: out of the page cache what is to come from the disk, and into it what stands for memory."""
    if place == "disk":
        machine.evict([path])
    elif one.cached:
        machine.warm([path])


def where(one: Files, place: str) -> str:
    """For readers."""
    if place == "disk":
        return "on the disk, not in the page cache"
    return "in the page cache (no tmpfs has room for it)" if one.cached else "in memory (tmpfs)"


def _available() -> int:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024
