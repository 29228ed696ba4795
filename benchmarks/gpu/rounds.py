"""Things that are timed by the device's own clock, in turn, as cases of a result document."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.stage import LATE, Context
from benchmarks.model import OURS
from secure_loader.bench.measure import MeasurementError, Result, Sample, Task, compare
from secure_loader.errors import SecureLoaderError

WARM_UPS = 2


@dataclass(frozen=True, kw_only=True)
class Work:
    """One thing that is timed.

    Attributes:
        name: Unique in its case.
        label: What readers see.
        loader: The package that does it; ``none`` for a bare copy.
        run: Does it once, and gives seconds.
        check: Raises MeasurementError if it did something wrong. Called behind every ``run``, not timed.
        cpu: Processor time that it has taken so far.
        parameters: JSON-able; ``bytes`` are those that one ``run`` works on, ``predicted`` one or two GB/s.
    """

    name: str
    label: str
    loader: str = OURS
    run: Callable[[], float]
    check: Callable[[], None] = lambda: None
    cpu: Callable[[], float] = time.process_time
    parameters: Mapping[str, Any] = field(default_factory=dict)


def measure(
    context: Context,
    name: str,
    title: str,
    works: Sequence[Work],
    *,
    cache: str = "as is",
    warm_ups: int = WARM_UPS,
    repetitions: int | None = None,
    seconds: float | None = None,
) -> dict[str, Any]:
    """Time some works in turn; tell and emit the case. One that fails is not tried again; the others go on.

    Args:
        context: Of the stage.
        name: Of the case.
        title: What readers see.
        works: What is compared.
        cache: State of the page cache, for readers.
        warm_ups: How often each is run before its first round.
        repetitions: Rounds at most; None takes what the sizes say.
        seconds: No round is begun after so many; None leaves that to the stage's own deadline.

    Returns:
        The case's document.
    """
    context.tell(f"-- {title}")
    by_name = {work.name: work for work in works}
    warm: set[str] = set()
    end = time.monotonic() + (context.left() if seconds is None else seconds)

    def take(task: Task, *, cache: str, watch: bool) -> Sample:
        del cache, watch
        if time.monotonic() > end:
            raise MeasurementError(LATE)
        work = by_name[task.name]
        try:
            if work.name not in warm:
                for _ in range(warm_ups):
                    work.run()
                    work.check()
                warm.add(work.name)
            cpu = work.cpu()
            taken = work.run()
            cpu = work.cpu() - cpu
            work.check()
        except MeasurementError:
            raise
        except (SecureLoaderError, RuntimeError, OSError, ValueError, MemoryError, ImportError) as e:
            raise MeasurementError(f"{type(e).__name__}: {str(e).partition(chr(10))[0]}"[:400]) from e
        return sample(taken, cpu=cpu)

    if warm_ups == WARM_UPS:
        _spin(works[0], context.sizes.spin)
    tasks = [Task(name=work.name, phases={}) for work in works]
    rounds = min(repetitions or context.sizes.repetitions, context.sizes.repetitions)
    results = compare(tasks, repetitions=rounds, watch_memory=False, take=take)
    for result in results.values():
        _forgive_lateness(result)
    found = document(title, cache, works, results)
    for entry in found["entries"].values():
        context.tell(f"   {line(entry)}")
    context.emit(name, found)
    return found


def _spin(work: Work, seconds: float) -> None:
    """Keep the device busy for a while: idle, it runs at a fraction of its clock."""
    end = time.monotonic() + seconds
    with contextlib.suppress(Exception):  # it is told again when it is measured
        while time.monotonic() < end:
            work.run()


def _forgive_lateness(result: Result) -> None:
    """Rounds that were done before the time was up count."""
    if result.failure == LATE and result.samples:
        result.failure = None


def amend(context: Context, name: str, found: dict[str, Any], entry: str, **parameters: Any) -> None:
    """Add what could be told only afterwards to the parameters of an entry, and emit the case once more."""
    found["entries"][entry]["parameters"].update(parameters)
    context.emit(name, found)


def sample(seconds: float, *, cpu: float = 0.0, phase: str = "run", checksum: Any = None) -> Sample:
    """A sample of something that is no process of its own: nothing is known about its memory."""
    return Sample({phase: seconds}, {phase: cpu}, {}, None, {}, checksum)


def document(title: str, cache: str, works: Sequence[Work], results: Mapping[str, Result]) -> dict[str, Any]:
    """A case, as :mod:`benchmarks.schema` wants it."""
    return {
        "title": title,
        "cache": cache,
        "entries": {
            work.name: {
                "label": work.label,
                "loader": work.loader,
                "ours": work.loader == OURS,
                "environment": {},
                "parameters": dict(work.parameters),
                "bytes_checked": results[work.name].failure is None,
            }
            | results[work.name].document()
            for work in works
        },
    }


def rate(entry: Mapping[str, Any]) -> float | None:
    """GB/s by the median of its first phase; None where it has none."""
    nbytes, seconds = entry["parameters"].get("bytes"), entry["median_seconds"]
    if not nbytes or not seconds or entry["failure"] is not None:
        return None
    return float(nbytes) / 1e9 / float(next(iter(seconds.values())))


def line(entry: Mapping[str, Any]) -> str:
    """One line for the terminal: what, how fast, and what was predicted."""
    if entry["failure"] is not None:
        return f"{entry['label']}: FAILED: {entry['failure']}"
    found, predicted = rate(entry), entry["parameters"].get("predicted")
    seconds = next(iter(entry["median_seconds"].values()))
    text = f"{entry['label']}: {seconds * 1e3:.3f} ms"
    if found is not None:
        text += f", {found:.2f} GB/s"
    return text if predicted is None else f"{text}, predicted {span(predicted)}"


def span(numbers: Sequence[float]) -> str:
    """``150-210``, or one number."""
    return "-".join(f"{number:g}" for number in numbers)
