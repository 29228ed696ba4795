"""Peak memory of the same loads: each is run once, watched from outside every few milliseconds, and not timed."""

from __future__ import annotations

from benchmarks.data import QWEN3_06B, TINY
from benchmarks.loaders import LOADERS, entries
from benchmarks.model import Case, Goal, Quantity, Size, Suite


def _cases(size: Size) -> tuple[Case, ...]:
    what = QWEN3_06B if size == "full" else TINY
    names = [name for name in LOADERS if name not in ("floor-cold", "secure-clear")]
    return (
        Case(
            name="0.6b",
            title="Qwen3-0.6B, 1.2 GB",
            entries=entries(what, names),
            expected=what,
            repetitions=0,
            watch=True,
        ),
    )


SUITE = Suite(
    name="memory",
    title="Peak memory of loading all tensors",
    cases=_cases,
    goals=(
        Goal(
            what="anonymous memory at peak, less 64 MB",
            against="size of the tensors loaded",
            measured=Quantity("0.6b", "secure", "peak.anon", plus=-64e6),
            reference=Quantity("0.6b", "secure", "parameters.bytes"),
            bound=1.03,
        ),
    ),
)
