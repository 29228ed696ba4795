"""Things that are timed by the device's own clock, in turn, as cases of a result document."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.stage import Context
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
        parameters: JSON-able; ``bytes`` are those that one ``run`` works on, ``predicted`` a pair of GB/s.
    """

    name: str
    label: str
    loader: str = OURS
    run: Callable[[], float]
    check: Callable[[], None] = lambda: None
    parameters: Mapping[str, Any] = field(default_factory=dict)


def measure(context: Context, name: str, title: str, works: Sequence[Work], *, cache: str = "as is") -> dict[str, Any]:
    """Time some works in turn; tell and emit the case.

    Every one is run :data:`WARM_UPS` times before its first round. One that fails is not tried again; the others go on.

    Returns:
        The case's document.
    """
    context.tell(f"-- {title}")
    by_name = {work.name: work for work in works}
    warm: set[str] = set()

    def take(task: Task, *, cache: str, watch: bool) -> Sample:
        del cache, watch
        context.insist_on_time()
        work = by_name[task.name]
        try:
            if work.name not in warm:
                for _ in range(WARM_UPS):
                    work.run()
                    work.check()
                warm.add(work.name)
            cpu = time.process_time()
            seconds = work.run()
            cpu = time.process_time() - cpu
            work.check()
        except (SecureLoaderError, RuntimeError, OSError, ValueError, MemoryError, ImportError) as e:
            raise MeasurementError(f"{type(e).__name__}: {str(e).partition(chr(10))[0]}"[:400]) from e
        return sample(seconds, cpu=cpu)

    tasks = [Task(name=work.name, phases={}) for work in works]
    results = compare(tasks, repetitions=context.sizes.repetitions, watch_memory=False, take=take)
    for result in results.values():
        _forgive_lateness(result)
    found = document(title, cache, works, results)
    for entry in found["entries"].values():
        context.tell(f"   {line(entry)}")
    context.emit(name, found)
    return found


def _forgive_lateness(result: Result) -> None:
    """Rounds that were done before the time was up count."""
    if result.failure == "no time was left for it" and result.samples:
        result.failure = None


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
    return text if predicted is None else f"{text}, predicted {predicted[0]:g}-{predicted[1]:g}"
