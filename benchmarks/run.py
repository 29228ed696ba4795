"""Runs one suite: makes its data, starts its workers, measures, judges, and writes its results."""

from __future__ import annotations

import datetime as dt
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import cache, data, goals, schema
from benchmarks.model import OURS, Case, Entry, Size, Suite
from benchmarks.worker import Worker
from secure_loader.bench import machine, measure
from secure_loader.bench.measure import MeasurementError, Result, Sample, Task

_FIRST = "benchmarks.sodium"  # must be imported before what it helps
_WRONG = "gave other bytes than were written"


def run_suite(suite: Suite, size: Size, repetitions: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure a suite.

    Args:
        suite: What to measure.
        size: ``tiny`` is for tests: it shows that everything runs, its figures mean nothing.
        repetitions: Rounds.
        tell: Called with lines about the progress.

    Returns:
        The result document; see :mod:`benchmarks.schema`.
    """
    cases = suite.cases(size)
    try:
        start = time.monotonic()
        made = data.ensure([pair for case in cases for entry in case.entries for pair in entry.data])
        making = time.monotonic() - start
        if making > 1:
            tell(f"{suite.name}: data made in {making:.0f} s")
        start = time.monotonic()
        facts = machine.facts(cache.folder())
        documents = _measure(suite, size, cases, made, repetitions, tell)
    finally:
        data.drop(suite.passing(size))
    return {
        "schema": schema.SCHEMA,
        "suite": suite.name,
        "title": suite.title,
        "size": size,
        "created": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - start, 1),
        "seconds_making_data": round(making, 1),
        "repetitions": repetitions,
        "machine": facts,
        "cases": documents,
        "goals": [goals.evaluate(goal, documents) for goal in suite.goals],
    }


def _measure(
    suite: Suite,
    size: Size,
    cases: Iterable[Case],
    made: dict[Any, str | None],
    repetitions: int,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    cases = list(cases)
    runnable = {
        case.name: [entry for entry in case.entries if all(made[pair] is None for pair in entry.data)] for case in cases
    }
    workers = _Workers(suite, size, [entry for entries in runnable.values() for entry in entries])
    try:
        documents = {}
        for case in cases:
            results = _measure_case(case, runnable[case.name], workers, repetitions, tell)
            for entry in case.entries:  # those that have no data: loudly, too
                if entry.name not in results:
                    reasons = [reason for pair in entry.data if (reason := made[pair]) is not None]
                    results[entry.name] = Result(entry.name, failure=f"its data cannot be made: {reasons[0]}")
                    tell(f"{entry.name}: FAILED: {results[entry.name].failure}")
            _check_bytes(case, results, tell)
            documents[case.name] = _document(case, results)
    finally:
        workers.close()
    return documents


class _Workers:
    """One for each environment; their imports run side by side."""

    def __init__(self, suite: Suite, size: Size, entries: Iterable[Entry]) -> None:
        modules: dict[tuple[tuple[str, str], ...], dict[str, None]] = {}
        for entry in entries:
            modules.setdefault(_key(entry), {}).update(dict.fromkeys(entry.modules))
        self._workers = {
            key: Worker(suite.name, size, sorted(names, key=lambda name: name != _FIRST), dict(key))
            for key, names in modules.items()
        }

    def take(self, case: Case, entry: Entry, *, watch: bool) -> Sample:
        worker = self._workers[_key(entry)]
        missing = worker.missing()
        for module in entry.modules:
            if module in missing:
                raise MeasurementError(missing[module])
        return worker.take(case.name, entry.name, case.cache, watch=watch)

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()


def _key(entry: Entry) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(entry.environment.items()))


def _measure_case(
    case: Case, entries: list[Entry], workers: _Workers, repetitions: int, tell: Callable[[str], None]
) -> dict[str, Result]:
    tell(f"-- {case.title}")
    os.sync()  # what was written before is not written while others are measured
    by_name = {entry.name: entry for entry in entries}

    def take(task: Task, *, cache: str, watch: bool) -> Sample:
        del cache  # the case's
        return workers.take(case, by_name[task.name], watch=watch)

    return measure.compare(
        [Task(name=name, phases={}) for name in by_name],
        repetitions=repetitions if case.repetitions is None else min(case.repetitions, repetitions),
        watch_memory=case.watch,
        take=take,
        progress=tell,
    )


def _check_bytes(case: Case, results: dict[str, Result], tell: Callable[[str], None]) -> None:
    """Fail every entry one of whose repetitions gave other bytes than the rest of the world knows."""
    if case.expected is not None:
        truth: Any = data.expected(case.expected)
    else:
        first = next((r for n, r in results.items() if n == case.reference and r.failure is None), None)
        samples = [] if first is None else [s for s in (*first.samples, first.memory) if s is not None]
        truth = _checksum(samples[0].checksum) if samples else None
    for result in results.values():
        if result.failure is not None:
            continue
        for sample in (*result.samples, result.memory):
            if sample is not None and (truth is None or _checksum(sample.checksum) != truth):
                result.failure = _WRONG if truth is not None else "there is nothing to compare its bytes with"
        if result.failure is not None:
            tell(f"{result.name}: FAILED: {result.failure}")


def _checksum(found: Any) -> Any:
    """A check may give more than the checksum: it is then called ``digest``."""
    return found["digest"] if isinstance(found, dict) else found


def _document(case: Case, results: dict[str, Result]) -> dict[str, Any]:
    return {
        "title": case.title,
        "cache": case.cache,
        "entries": {
            entry.name: {
                "label": entry.label,
                "loader": entry.loader,
                "ours": entry.loader == OURS,
                "environment": dict(entry.environment),
                "parameters": dict(entry.parameters),
                "bytes_checked": results[entry.name].failure is None,
            }
            | results[entry.name].document()
            for entry in case.entries
        },
    }


def write(document: dict[str, Any], folder: Path) -> Path:
    """Write results so that a reader sees the old file or the new one, and nothing between. Raises SchemaError."""
    schema.check(document)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{document['suite']}.json"
    work = target.with_name(f".{os.getpid()}-{target.name}")
    try:
        with work.open("w") as file:
            file.write(json.dumps(document, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        work.replace(target)
    finally:
        work.unlink(missing_ok=True)
    return target
