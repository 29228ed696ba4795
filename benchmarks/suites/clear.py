"""A plain file through us costs what it costs through safetensors."""

from __future__ import annotations

from benchmarks.data import QWEN3_06B, TINY
from benchmarks.loaders import entries
from benchmarks.model import Case, Goal, Quantity, Size, Suite


def _cases(size: Size) -> tuple[Case, ...]:
    what = QWEN3_06B if size == "full" else TINY
    chosen = entries(what, ("secure-clear", "safetensors-mapped"))
    return (Case(name="0.6b", title="Qwen3-0.6B, 1.2 GB, not encrypted", entries=chosen, expected=what),)


SUITE = Suite(
    name="clear",
    title="Loading and touching a plain file",
    cases=_cases,
    goals=(
        Goal(
            what="clear (unencrypted) file through us, touched",
            against="safetensors, touched",
            measured=Quantity("0.6b", "secure-clear", "seconds.touch"),
            reference=Quantity("0.6b", "safetensors-mapped", "seconds.touch"),
            bound=1.02,
        ),
    ),
)
