"""``python -m benchmarks``: runs suites and writes ``results/*.json``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks import cache, data
from benchmarks.model import Size, Suite
from benchmarks.run import run_suite, write
from benchmarks.suites import NAMES, find

RESULTS = cache.ROOT / "benchmarks" / "results"
TINY_RESULTS = cache.ROOT / "build" / "benchmarks"


def make_data(suites: Sequence[Suite], size: Size) -> None:
    """All at once, but for what is too big to be kept: a suite makes that itself, and says what could not be made."""
    passing = {what for suite in suites for what in suite.passing(size)}
    wanted = [
        (what, variant)
        for suite in suites
        for case in suite.cases(size)
        for entry in case.entries
        for what, variant in entry.data
        if what not in passing
    ]
    data.ensure(wanted)


def main() -> int:
    """Run the chosen suites; 0 if all of them were measured, whatever their figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure secure_loader against others.")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--size", choices=("tiny", "full"), default="full", help="tiny only shows that everything runs")
    parser.add_argument("--reps", type=int, default=5, metavar="N", help="repetitions (default: 5)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where results go")
    parser.add_argument("--quiet", action="store_true", help="only one line for each suite")
    arguments = parser.parse_args()
    # Asked to stop, leave by way of the exceptions that stop workers and delete what is too big to be kept.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda signum, _: sys.exit(128 + signum))
    os.environ.update(cache.environment())
    tell = (lambda _: None) if arguments.quiet else partial(print, flush=True)
    out = arguments.out or (RESULTS if arguments.size == "full" else TINY_RESULTS)
    start = time.monotonic()
    suites = [find(name) for name in arguments.only or NAMES]
    make_data(suites, arguments.size)
    made = time.monotonic() - start
    for suite in suites:
        document = run_suite(suite, arguments.size, arguments.reps, tell)
        target = write(document, out)
        print(f"== {suite.name}: {document['seconds']:.0f} s, {target.name}", flush=True)
        for goal in document["goals"]:
            figure = goal["reason"] or f"{goal['measured']:.3f}{goal['unit']}, goal {goal['bound']}"
            verdict = {True: "met", False: "MISSED", None: "-"}[goal["met"]]
            print(f"   {verdict:6} {goal['what']} / {goal['against']}: {figure}", flush=True)
    print(f"{time.monotonic() - start:.0f} s in all, {made:.0f} s of them for making data")
    return 0


if __name__ == "__main__":
    sys.exit(main())
