"""What a stage is, and what it gets to work with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.device import Bench
from benchmarks.gpu.sizes import Sizes
from benchmarks.model import Goal
from secure_loader.bench.measure import MeasurementError

LATE = "no time was left for it"


class StageError(Exception):
    """A stage cannot be run, or found something wrong; the text says what."""


class SkippedError(StageError):
    """A stage cannot be run on this machine, through no fault of what is measured; the text says why."""


class OutOfTimeError(MeasurementError):
    """There was no time left for one more measurement."""


@dataclass
class Context:
    """What a stage works with.

    Attributes:
        make_bench: Opens the device; not called by stages that leave it to processes of their own.
        bench_name: By which those open it.
        sizes: How much is measured.
        folder: For files on the disk.
        memory_folder: For files in memory (tmpfs), or None.
        deadline: By :func:`time.monotonic`: nothing is begun behind it.
        tell: Called with lines about the progress.
        emit: Called with the name and document of every case, as soon as it is done.
    """

    make_bench: Callable[[], Bench]
    bench_name: str
    sizes: Sizes
    folder: Path
    memory_folder: Path | None
    deadline: float
    tell: Callable[[str], None]
    emit: Callable[[str, dict[str, Any]], None]
    _bench: Bench | None = field(default=None, repr=False)

    @property
    def bench(self) -> Bench:
        """The device, opened at its first use."""
        if self._bench is None:
            self._bench = self.make_bench()
        return self._bench

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def insist_on_time(self) -> None:
        """Raise OutOfTimeError where none is left."""
        if self.left() <= 0:
            raise OutOfTimeError(LATE)


@dataclass(frozen=True)
class Stage:
    """One part of ``make gpu``.

    Attributes:
        name: Of the stage; ``gpu-NAME`` are its results.
        title: What readers see.
        seconds: What it may take. What stages before it left over comes on top.
        run: Measures, and emits cases. Raises StageError, or whatever goes wrong.
        goals: Rows of the goals table that its results fill.
    """

    name: str
    title: str
    seconds: float
    run: Callable[[Context], None]
    goals: Sequence[Goal] = ()
