"""Loading all tensors when nothing is in the page cache. What the host of a virtual machine caches is out of reach."""

from __future__ import annotations

from benchmarks.data import QWEN3_06B, TINY
from benchmarks.loaders import entries
from benchmarks.model import Case, Goal, Quantity, Size, Suite

_PEERS = ("runai", "fastsafetensors", "fastsafetensors-buffered", "tensorizer")


def _cases(size: Size) -> tuple[Case, ...]:
    what = QWEN3_06B if size == "full" else TINY
    chosen = entries(what, ("secure", "secure-bypass", "floor-cold", "safetensors-owned", *_PEERS))
    return (Case(name="0.6b", title="Qwen3-0.6B, 1.2 GB, cold", entries=chosen, expected=what, cache="cold"),)


def _goal(
    against: str, reference: str | tuple[str, ...], bound: float | None, ours: str = "secure", how: str = ""
) -> Goal:
    return Goal(
        what="load all tensors, cold page cache" + how,
        against=against,
        measured=Quantity("0.6b", ours, "seconds.load"),
        reference=Quantity("0.6b", reference, "seconds.load"),
        bound=bound,
    )


SUITE = Suite(
    name="cold",
    title="Loading all tensors, cold page cache",
    cases=_cases,
    goals=(
        _goal("safetensors plain, cold", "safetensors-owned", 0.6),
        _goal("the fastest plain peer, cold", _PEERS, 1.1),
        _goal("safetensors plain, cold", "safetensors-owned", 0.6, "secure-bypass", ', page_cache="bypass"'),
        _goal("the fastest plain peer, cold", _PEERS, 1.1, "secure-bypass", ', page_cache="bypass"'),
        _goal("floor: plain pread, 16 in flight", "floor-cold", None),
    ),
)
