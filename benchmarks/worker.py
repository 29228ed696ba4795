"""A worker: imports what some entries of a suite need, and then only forks. ``python -m benchmarks.worker SUITE SIZE``.

One line of JSON on standard input is one request, one line on standard output its answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import cache
from secure_loader.bench.machine import scrub
from secure_loader.bench.measure import CacheState, MeasurementError, Sample, Task, import_quietly, sample


class Worker:
    """The other end: starts a worker, and measures through it.

    Args:
        suite: Name of the suite.
        size: Its size.
        modules: What the worker imports first.
        environment: Added to the environment of benchmarks.
    """

    def __init__(self, suite: str, size: str, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.worker", suite, size],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=cache.environment() | environment,
            cwd=cache.ROOT,
        )
        self._send({"import": list(modules)})
        self._missing: dict[str, str] | None = None

    def missing(self) -> dict[str, str]:
        """Why, for each module that cannot be imported. Waits until all others are."""
        if self._missing is None:
            self._missing = self._receive()["missing"]
        return self._missing

    def take(self, case: str, entry: str, cache_state: CacheState, *, watch: bool) -> Sample:
        """One repetition. Raises MeasurementError."""
        self.missing()
        self._send({"case": case, "entry": entry, "cache": cache_state, "watch": watch})
        answer = self._receive()
        if "error" in answer:
            raise MeasurementError(scrub(answer["error"], cache.folder()))
        return Sample(**answer["sample"])

    def close(self) -> None:
        """End it."""
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _send(self, request: dict[str, Any]) -> None:
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None

    def _receive(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise self._died()
        return dict(json.loads(line))

    def _died(self) -> MeasurementError:
        code = self._process.wait()
        self._log.seek(0)
        return MeasurementError(
            scrub(f"the worker ended with {code}: {self._log.read()[-600:].decode(errors='replace')}", cache.folder())
        )


def serve(suite_name: str, size: str) -> None:
    """Answer requests until there are no more."""
    from benchmarks.suites import find

    # What libraries print must not get among the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    suite = find(suite_name)
    cases = {case.name: {entry.name: entry for entry in case.entries} for case in suite.cases(size)}
    for line in sys.stdin:
        request = json.loads(line)
        if "import" in request:
            answer: dict[str, Any] = {"missing": import_quietly(request["import"])}
        else:
            entry = cases[request["case"]][request["entry"]]
            try:
                task: Task = entry.make()
                answer = {"sample": sample(task, cache=request["cache"], watch=request["watch"]).document()}
            except (MeasurementError, RuntimeError, ImportError, OSError) as e:
                answer = {"error": str(e)}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    serve(*sys.argv[1:])
