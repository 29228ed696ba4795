"""The stages of ``make gpu``, in order. What each may take adds up to less than ten minutes."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from benchmarks.gpu import goals
from benchmarks.gpu.stage import Context, Stage

LIMIT = 560.0
"""Seconds for everything."""


def _lazy(module: str, function: str = "run") -> Callable[[Context], None]:
    """The stage's function, imported in its own process: the command itself needs no torch."""

    def run(context: Context) -> None:
        getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)(context)

    return run


STAGES = (
    Stage("proof", "Known answers, tampering, and the tests that need a GPU", 80, _lazy("checks", "proof")),
    Stage("copies", "Copies", 20, _lazy("copies")),
    Stage("kernels", "Kernels", 70, _lazy("kernels"), goals.KERNELS),
    Stage("files", "Files to load", 70, _lazy("files")),
    Stage("pipeline", "The pipeline against the bare copy", 55, _lazy("pipeline"), goals.PIPELINE),
    Stage("load", "Loading to the device, by loader", 110, _lazy("loads"), goals.LOAD),
    Stage("cold", "First loads", 75, _lazy("cold"), goals.COLD),
    Stage("sanitizer", "compute-sanitizer", 45, _lazy("checks", "sanitizer")),
)


def find(name: str) -> Stage:
    """A stage by its name."""
    return next(stage for stage in STAGES if stage.name == name)
