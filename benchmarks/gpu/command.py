"""All stages of ``make gpu``, one after the other, once everything that they need is there."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import cache, report, schema
from benchmarks.gpu import NAMES, chart, files, results, runner
from benchmarks.gpu.environment import NotReadyError
from benchmarks.gpu.sizes import SIZES
from benchmarks.gpu.stage import Stage
from benchmarks.gpu.stages import LIMIT, STAGES, find

_FACTS = 90.0  # seconds; a device that has not answered by then never will
_LOADING = {"pipeline", "load", "cold"}  # stages that load files


@dataclass
class _Run:
    """One call of the command.

    Attributes:
        options: Of the command line.
        out: Where results go.
        given: What every stage is told.
        facts: ``gpu`` and ``machine``.
        end: By :func:`time.monotonic`.
        tell: Called with lines about the progress.
        making: Seconds that files took.
    """

    options: argparse.Namespace
    out: Path
    given: dict[str, Any]
    facts: dict[str, Any]
    end: float
    tell: Callable[[str], None]
    making: float = 0.0

    def stage(self, chosen: Sequence[Stage], number: int) -> list[str]:
        """Run one, and write what it found; what is broken."""
        stage = chosen[number]
        self.tell(f"== {stage.title}")
        seconds = runner.allowed(chosen, number, self.end - time.monotonic())
        outcome = runner.run(stage.name, self.given, seconds, self.tell, os.environ)
        if outcome.skipped is not None:
            self.tell(f"   skipped: {outcome.skipped}")
        if outcome.failure is not None:
            self.tell(f"   FAILED: {outcome.failure}")
        if stage.name == "files":
            self.making = outcome.seconds
        if f"gpu-{stage.name}" in NAMES:
            document = results.document(
                stage,
                outcome.cases,
                gpu=self.facts["gpu"],
                machine=self.facts["machine"],
                size=self.options.size,
                repetitions=SIZES[self.options.size].repetitions,
                seconds=outcome.seconds,
                seconds_making_data=self.making if stage.name in _LOADING else 0.0,
                failure=outcome.failure,
                skipped=outcome.skipped,
            )
            target = results.write(document, self.out)
            self.tell(f"   {outcome.seconds:.0f} s, {target.name}")
            for goal in document["goals"]:
                self.tell(f"   {_verdict(goal)}")
        return [f"{stage.name}: {text}" for text in runner.broken(outcome)]


def run(options: argparse.Namespace, wheels: list[str]) -> int:
    """Run the stages that were chosen.

    Args:
        options: Of the command line.
        wheels: Names of the wheels that were installed for it.

    Returns:
        The exit code.

    Raises:
        NotReadyError: There is no such stage, or the device cannot be used at all.
    """
    start = time.monotonic()
    limit = options.seconds or LIMIT
    chosen = _chosen(options.only)
    out = options.out or results.RESULTS
    clean = cache.environment()  # without the settings of the person who runs it
    os.environ.clear()
    os.environ.update(clean)
    tell = partial(print, flush=True)
    with _folders(options) as (folder, memory):
        try:
            facts = runner.facts(options.bench, folder, os.environ, min(limit, _FACTS))
        except RuntimeError as e:
            raise NotReadyError(str(e)) from None
        facts["gpu"]["wheels"] = wheels
        tell(f"== {_title(facts['gpu'])}")
        given = {
            "bench": options.bench,
            "size": options.size,
            "folder": str(folder),
            "memory_folder": None if memory is None else str(memory),
        }
        one = _Run(options, out, given, facts, start + limit, tell)
        broken = [text for number in range(len(chosen)) for text in one.stage(chosen, number)]
    if options.size == "full":
        _show(out, tell)
    tell(f"== {time.monotonic() - start:.0f} s in all")
    for text in broken:
        print(f"FAILED: {text}", file=sys.stderr)
    return 1 if broken else 0


def _chosen(names: Sequence[str] | None) -> list[Stage]:
    known = [stage.name for stage in STAGES]
    if unknown := set(names or ()) - set(known):
        raise NotReadyError(f"no stage is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    wanted = set(names or known)
    if _LOADING & wanted:
        wanted.add("files")
    return [find(name) for name in known if name in wanted]


@contextlib.contextmanager
def _folders(options: argparse.Namespace) -> Iterator[tuple[Path, Path | None]]:
    """On the disk and in memory, for files; they go when all is done."""
    # Room for two variants of the second size; whether more fits, and whether these do, is asked when they are made.
    least = 2 * SIZES[options.size].loads[1].nbytes
    place = files.memory_folder(least)
    with tempfile.TemporaryDirectory(prefix="gpu-", dir=options.folder or cache.folder()) as folder:
        memory = None if place is None else Path(tempfile.mkdtemp(prefix="secure-loader-", dir=place))
        try:
            yield Path(folder), memory
        finally:
            if memory is not None:
                shutil.rmtree(memory, ignore_errors=True)


def _title(gpu: dict[str, Any]) -> str:
    kernels = "; ".join(f"{way}: {name}" for way, name in gpu["kernels"].items())
    if gpu["stand_in"]:
        return f"host memory in place of a GPU: the figures mean nothing ({kernels})"
    return f"{gpu['name']}, torch {gpu['torch']}, CUDA {gpu['cuda']} ({kernels})"


def _verdict(goal: dict[str, Any]) -> str:
    verdict = {True: "met", False: "MISSED", None: "-"}[goal["met"]]
    figure = goal["reason"] or f"{goal['measured']:.3f}{goal['unit']}, goal {goal['bound']}"
    return f"{verdict:6} {goal['what']} / {goal['against']}: {figure}"


def _show(out: Path, tell: Callable[[str], None]) -> None:
    """The chart, and the tables of documents that ask for them."""
    published = out.resolve() == results.RESULTS.resolve()
    found = schema.read(out)
    try:
        path = chart.draw(found, chart.IMAGES if published else out)
    except ImportError:
        tell("   no chart: matplotlib is not there; `python -m benchmarks.charts` draws it from the results")
    else:
        if path is not None:
            tell(f"   {path.name}")
    if published:
        report.write_documents(found)
