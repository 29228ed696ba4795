"""Loading all tensors of a file from a warm page cache."""

from __future__ import annotations

from benchmarks.data import QWEN3_06B, QWEN3_4B_PART, TINY, TINY_BIG
from benchmarks.loaders import LOADERS, entries
from benchmarks.model import Case, Goal, Quantity, Size, Suite

SMALL, LARGE = "0.6b", "4b-part"
_ALL = [name for name in LOADERS if name not in ("floor-cold", "secure-bypass", "secure-clear")]
_INTERESTING = (
    "secure",
    "floor",
    "safetensors-owned-thp",
    "safetensors-owned",
    "safetensors-mapped",
    "cryptotensors",
    "tensorizer-encrypted",
    "runai",
)
_OWNED = ("safetensors-owned-thp", "safetensors-owned")


def _cases(size: Size) -> tuple[Case, ...]:
    small, large = (QWEN3_06B, QWEN3_4B_PART) if size == "full" else (TINY, TINY_BIG)
    return (
        Case(name=SMALL, title="Qwen3-0.6B, 1.2 GB", entries=entries(small, _ALL), expected=small),
        Case(name=LARGE, title="Part of Qwen3-4B, 4 GB", entries=entries(large, _INTERESTING), expected=large),
    )


def _goals(case: str, title: str) -> tuple[Goal, ...]:
    def ours(phase: str) -> Quantity:
        return Quantity(case, "secure", f"seconds.{phase}")

    return (
        Goal(
            what=f"load all tensors, owned, {title}",
            against="safetensors plain, owned copies (its fastest setting)",
            measured=ours("load"),
            reference=Quantity(case, _OWNED, "seconds.load"),
            bound=0.6,
        ),
        Goal(
            what=f"load all tensors, owned, {title}",
            against="floor: plain pread into huge pages, two threads",
            measured=ours("load"),
            reference=Quantity(case, "floor", "seconds.load"),
            bound=1.35,
        ),
        *(
            Goal(
                what=f"load all tensors and touch them, {title}",
                against=f"{peer} encrypted",
                measured=ours("touch"),
                reference=Quantity(case, entry, "seconds.touch"),
                compare="speedup",
                bound=5.0,
            )
            for entry, peer in (("cryptotensors", "cryptotensors"), ("tensorizer-encrypted", "tensorizer"))
        ),
        Goal(
            what=f"load all tensors and touch them, {title}",
            against="safetensors plain, mapped and touched (zero copy)",
            measured=ours("touch"),
            reference=Quantity(case, "safetensors-mapped", "seconds.touch"),
            bound=4.0,
        ),
    )


SUITE = Suite(
    name="load",
    title="Loading all tensors, warm page cache",
    cases=_cases,
    goals=(*_goals(SMALL, "1.2 GB"), *_goals(LARGE, "4 GB")),
)
