"""What a suite consists of, as data: cases, the entries that are compared in each, and goals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.data import DataSet
from secure_loader.bench.measure import CacheState, Task

Size = Literal["tiny", "full"]
OURS = "secure_loader"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One bar of a chart.

    Attributes:
        name: Unique in its case.
        label: What readers see.
        loader: The package that does the work; :data:`OURS` is highlighted.
        make: Makes the task, in the worker, after ``modules`` were imported.
        modules: Imported before the first fork.
        environment: Variables that must be set before that; entries that differ here get workers of their own.
        data: Pairs of data set and variant that it reads.
        parameters: What distinguishes it within a scaling curve, and sizes that goals need. JSON-able.
    """

    name: str
    label: str
    loader: str
    make: Callable[[], Task]
    modules: Sequence[str] = ("torch",)
    environment: Mapping[str, str] = field(default_factory=dict)
    data: Sequence[tuple[DataSet, str]] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Entries that are compared with each other, in turn.

    Attributes:
        name: Unique in its suite.
        title: What readers see.
        entries: In the order of tables and charts.
        expected: The data set whose digest every checksum must be; else that of the entry ``reference``.
        reference: See ``expected``; an entry's name.
        cache: State of the page cache.
        repetitions: At most so many; None takes what was asked for.
        watch: Whether one more repetition is watched for its memory.
    """

    name: str
    title: str
    entries: Sequence[Entry]
    expected: DataSet | None = None
    reference: str | None = None
    cache: CacheState = "warm"
    repetitions: int | None = None
    watch: bool = False


@dataclass(frozen=True)
class Quantity:
    """A number in a suite's results.

    Attributes:
        case: Its case.
        entry: Its entry; of several, the one with the smallest number.
        path: ``seconds.PHASE`` (the median, from the start to its end), ``phase.PHASE`` (that phase alone), ``peak.anon`` and the like (of the watched repetition), ``io.read_calls``
            (the median), ``rate.PHASE`` (GB/s of the parameter ``bytes``), ``check.NAME`` (a number that the check gave, the median), or ``parameters.NAME``.
        scale: What it is multiplied with.
        plus: What is added then.
    """

    case: str
    entry: str | tuple[str, ...]
    path: str
    scale: float = 1.0
    plus: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What is to be reached.

    Attributes:
        what: The row's first column.
        against: What it is compared with.
        measured: Ours.
        reference: Theirs, or None where the bound is absolute.
        compare: ``ratio`` divides ``measured`` by ``reference``, ``speedup`` the other way round, and so does ``share``, which
            is a share of the other's rate; ``difference`` subtracts, ``value`` and ``least`` take ``measured`` as it is.
        bound: The goal: an upper bound, but a lower one for ``speedup``, ``share`` and ``least``; None states the figure only.
        unit: Of the figure, empty for ratios.
    """

    what: str
    against: str
    measured: Quantity
    reference: Quantity | None = None
    compare: Literal["ratio", "speedup", "share", "difference", "value", "least"] = "ratio"
    bound: float | None
    unit: str = ""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A file of ``suites/``.

    Attributes:
        name: Name of the module and of the result file.
        title: What readers see.
        cases: Cases by size.
        goals: Rows of the goals table.
        passing: Data sets that are too big to be kept after the run, by size.
    """

    name: str
    title: str
    cases: Callable[[Size], Sequence[Case]]
    goals: Sequence[Goal] = ()
    passing: Callable[[Size], Sequence[DataSet]] = lambda _: ()
