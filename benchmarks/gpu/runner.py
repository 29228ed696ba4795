"""Runs stages, each in a process of its own and for no longer than it may, and keeps what they found, however they end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import cache
from benchmarks.gpu.stage import LATE, Stage

_GRACE = 5.0  # seconds that a stage has for itself between its own deadline and its end
_TAIL = 800


@dataclass
class Outcome:
    """What became of a stage.

    Attributes:
        cases: Documents by name, as far as it came.
        failure: Why it did not do what it should, or None.
        skipped: Why it could not be run here, or None.
        seconds: What it took.
    """

    cases: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None
    skipped: str | None = None
    seconds: float = 0.0


def allowed(stages: Sequence[Stage], number: int, left: float) -> float:
    """Seconds for a stage: its own, and what those before it left over; never what those behind it need."""
    return max(0.0, left - sum(stage.seconds for stage in stages[number + 1 :]))


def run(
    stage: str,
    options: Mapping[str, Any],
    seconds: float,
    tell: Callable[[str], None],
    environment: Mapping[str, str],
) -> Outcome:
    """Run one stage.

    Args:
        stage: Its name.
        options: As :func:`benchmarks.gpu.child.make_context` wants them, without ``seconds``.
        seconds: It is killed behind so many, with everything that it has started.
        tell: Called with lines about the progress.
        environment: Of the process.
    """
    from secure_loader.bench.machine import scrub

    outcome, start = Outcome(), time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.child", stage],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=dict(environment),
            cwd=cache.ROOT,
            start_new_session=True,  # a process group: whatever it starts can be ended with it
        )
        try:
            process.stdin.write(json.dumps({**options, "seconds": max(1.0, seconds - _GRACE)}).encode())
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            ended = _follow(process, start + seconds, outcome, tell)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            process.stdout.close()
        if not ended and outcome.failure is None and outcome.skipped is None:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL))
            tail = log.read().decode(errors="replace").strip()
            if time.monotonic() >= start + seconds:
                outcome.failure = f"not done after {seconds:.0f} s: {tail}"
            else:
                outcome.failure = f"its process ended with {code}: {tail}"
    if outcome.failure is not None:
        outcome.failure = scrub(outcome.failure, cache.folder())
    outcome.seconds = time.monotonic() - start
    return outcome


def _follow(process: subprocess.Popen[bytes], end: float, outcome: Outcome, tell: Callable[[str], None]) -> bool:
    """Take in what a stage says, until it has nothing more to say or its time is up; whether it said that it is done."""
    buffered, out = b"", process.stdout.fileno()
    while True:
        left = end - time.monotonic()
        if left <= 0 or not select.select([out], [], [], left)[0]:
            return False
        data = os.read(out, 1 << 16)
        if not data:
            return False
        *lines, buffered = (buffered + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "tell" in said:
                tell(said["tell"])
            elif "case" in said:
                outcome.cases[said["case"]] = said["document"]
            elif "done" in said:
                return True
            else:
                outcome.failure, outcome.skipped = said.get("failure"), said.get("skipped")


def broken(outcome: Outcome) -> list[str]:
    """What did not do what it should: the stage, or any of our own entries. Others' are results, and what came too late is told."""
    found = [] if outcome.failure is None else [outcome.failure]
    for name, case in outcome.cases.items():
        found += [
            f"{name}: {entry['label']}: {entry['failure']}"
            for entry in case["entries"].values()
            if entry["ours"] and entry["failure"] not in (None, LATE)
        ]
    return found


def facts(bench: str, folder: Path, environment: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """Facts about the device and the machine. Raises RuntimeError where the device cannot be used at all."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.facts", bench, str(folder)]
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            cwd=cache.ROOT,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the device did not answer within {seconds:.0f} s") from None
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        raise RuntimeError(f"the device cannot be used: {done.stderr.strip()[-_TAIL:]}") from None
