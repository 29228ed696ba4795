"""How cost grows: with size, number of tensors, threads, chunk size, and the share of tensors that is encrypted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.data import QWEN3_06B, QWEN3_4B_PART, StateDict, uniform
from benchmarks.loaders import entry
from benchmarks.model import Case, Entry, Size, Suite

MB = 1_000_000
REPETITIONS = 3
_EVERYBODY = ("secure", "safetensors-owned-thp", "cryptotensors")


def _by_size(size: Size) -> dict[float, StateDict]:
    """By GB."""
    if size == "tiny":
        return {0.002: uniform("size", 2 * MB, 4), 0.004: uniform("size", 4 * MB, 8)}
    return {
        0.1: uniform("size", 100 * MB, 12),
        0.4: uniform("size", 400 * MB, 50),
        1.2: QWEN3_06B,
        4.0: QWEN3_4B_PART,
        8.0: _biggest(),
    }


def _biggest() -> StateDict:
    return uniform("size", 8000 * MB, 1000)


def _case(axis: str, x: float, what: StateDict, entries: tuple[Entry, ...]) -> Case:
    return Case(name=f"{axis}:{x:g}", title=f"{axis} {x:g}", entries=entries, expected=what, repetitions=REPETITIONS)


def _entries(
    axis: str, x: float, what: StateDict, names: tuple[str, ...], variants: Mapping[str, str] | None = None, **more: Any
) -> tuple[Entry, ...]:
    variants = variants or {}
    return tuple(entry(what, name, variant=variants.get(name), **more, axis=axis, x=x) for name in names)


def _cases(size: Size) -> tuple[Case, ...]:
    full = size == "full"
    cases = []
    for x, what in _by_size(size).items():
        # Two files of 8 GB and 8 GB of tensors fill the memory; a third kind of file would fill the disk.
        names = _EVERYBODY[:2] if x > 4 else _EVERYBODY
        cases.append(_case("size", x, what, _entries("size", x, what, names)))
    for count in (100, 1_000, 10_000) if full else (10, 100):
        what = uniform(f"tensors-{count}", 512 << 20 if full else 1 << 20, count)
        cases.append(_case("tensors", count, what, _entries("tensors", count, what, _EVERYBODY)))
    what = QWEN3_06B if full else uniform("size", 4 * MB, 8)
    for count in (1, 2):
        settings = {"SECURE_LOADER_THREADS": str(count), "RAYON_NUM_THREADS": str(count)}
        chosen = _entries("threads", count, what, _EVERYBODY, environment=settings, threads=count)
        cases.append(_case("threads", count, what, chosen))
    what = uniform("chunks", 256 << 20 if full else 1 << 20, 4)
    for chunk in [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20] if full else [64 << 10, 256 << 10]:
        chosen = _entries("chunk", chunk, what, ("secure",), {"secure": f"secure:chunk={chunk}"})
        cases.append(_case("chunk", chunk, what, chosen))
    what = uniform("shares", 256 << 20 if full else 1 << 20, 64)
    for share in (0, 25, 50, 75, 100) if full else (0, 50):
        variants = {name: f"{name}:share={share}" for name in ("secure", "cryptotensors")}
        chosen = _entries("share", share, what, ("secure", "cryptotensors"), variants)
        cases.append(_case("share", share, what, chosen))
    return tuple(cases)


SUITE = Suite(
    name="scaling",
    title="How the cost of loading grows",
    cases=_cases,
    passing=lambda size: (_biggest(),) if size == "full" else (),
)
