"""End to end: an encrypted file on the device, beside every other loader that is here, each in a process of its own."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import cache
from benchmarks.gpu import files
from benchmarks.gpu.device import Bench
from benchmarks.gpu.loader import LOADERS, Loader
from benchmarks.gpu.rounds import Work, amend, measure
from benchmarks.gpu.stage import Context, StageError
from benchmarks.model import OURS
from secure_loader.bench import machine
from secure_loader.bench.measure import MeasurementError

_SAMPLE_EVERY = 0.003  # seconds between two looks at memory
_TIMEOUT = 120.0
_STATUS = {"RssAnon": "anon", "RssFile": "file", "RssShmem": "shmem"}


def run(context: Context) -> None:
    """All loaders over all files; then one load of each again, alone, with an eye on its memory."""
    found = files.made(context)
    cases = [(place, one) for one in found for place in ("memory", "disk")]
    workers: dict[str, Worker | str] = {}
    started: dict[str, Worker] = {}
    try:
        for name in LOADERS:  # side by side: imports take seconds
            started[name] = Worker(name, context)
        for name, worker in started.items():
            workers[name] = _ready(worker)
        for number, (place, one) in enumerate(cases):
            share = 0.75 * context.left() / (len(cases) - number)
            _case(context, workers, place, one, share)
    finally:
        for worker in started.values():
            worker.close()
    if isinstance(workers["secure"], str):
        raise StageError(workers["secure"])
    one = found[min(1, len(found) - 1)]
    ready = [name for name, worker in workers.items() if isinstance(worker, Worker)]
    _memory(context, one, ready)


def _ready(worker: Worker) -> Worker | str:
    """The worker when it is ready, or why it never will be."""
    try:
        worker.ready()
    except MeasurementError as e:
        worker.close()
        return str(e)
    return worker


def _path(one: files.Files, place: str, loader: Loader) -> str:
    try:
        return one.paths[place][loader.variant]
    except KeyError:
        raise MeasurementError(one.missing.get(loader.variant, f"there is no such file of {one.name}")) from None


def _case(context: Context, workers: Mapping[str, Worker | str], place: str, one: files.Files, seconds: float) -> None:
    firsts: dict[str, float] = {}

    def work(name: str, loader: Loader) -> Work:
        worker = workers[name]
        last: list[dict[str, Any]] = [{}]

        def load() -> float:
            if isinstance(worker, str):
                raise MeasurementError(worker)
            path = _path(one, place, loader)
            files.prepare(one, place, path)
            last[0] = worker.load(path)
            taken = float(last[0]["seconds"])
            firsts.setdefault(name, taken)
            return taken

        def check() -> None:
            _check(last[0], one)

        return Work(
            name=name,
            label=loader.label,
            loader=_package(loader),
            run=load,
            check=check,
            cpu=lambda: worker.cpu if isinstance(worker, Worker) else 0.0,
            parameters={"bytes": one.nbytes, "tensors": one.tensors},
        )

    # What has no file of this size is not compared in this one.
    works = [work(n, loader) for n, loader in LOADERS.items() if loader.variant in one.paths[place]]
    title, name = f"{one.nbytes / 1e9:.1f} GB {files.where(one, place)}", f"{place}-{one.name}"
    state = "cold" if place == "disk" else "as is"
    found = measure(context, name, title, works, cache=state, warm_ups=1, seconds=seconds)
    for entry, first in firsts.items():
        amend(context, name, found, entry, first_seconds=first)


def _package(loader: Loader) -> str:
    return OURS if loader.package == "secure_loader" else loader.package.replace("_", "-")


def _check(answer: Mapping[str, Any], one: files.Files) -> None:
    if answer.get("digest") != one.digest:
        raise MeasurementError("gave other bytes than were written")


def _memory(context: Context, one: files.Files, ready: list[str]) -> None:
    """Memory of the first load in a process, of one loader after the other.

    Host memory is what the process owns (anonymous) and what is pinned. Pinned memory counts as shared in the system's books
    or not at all; torch tells what it pinned itself: the larger of the two is taken.
    """
    watched: dict[str, dict[str, int]] = {}

    def work(name: str, loader: Loader) -> Work:
        last: list[dict[str, Any]] = [{}]

        def load() -> float:
            path = _path(one, "memory", loader)
            files.prepare(one, "memory", path)
            worker = Worker(name, context)
            try:
                worker.ready()
                before = worker.look(context.bench)
                peak = dict(before)
                last[0] = worker.load(path, lambda: _higher(peak, worker.look(context.bench)))
            finally:
                worker.close()
            grown = {kind: max(0, peak[kind] - before[kind]) for kind in peak}
            pinned = max(int(last[0].get("pinned") or 0), grown["shmem"])
            watched[name] = {
                "host_bytes": grown["anon"] + pinned,
                "anonymous_bytes": grown["anon"],
                "pinned_bytes": pinned,
                "mapped_bytes": grown["file"],
                "device_above_bytes": grown["device"] - one.nbytes,
            }
            return float(last[0]["seconds"])

        return Work(
            name=name,
            label=loader.label,
            loader=_package(loader),
            run=load,
            check=lambda: _check(last[0], one),
            cpu=lambda: 0.0,
            parameters={"bytes": one.nbytes},
        )

    works = [work(n, LOADERS[n]) for n in ready if LOADERS[n].variant in one.paths["memory"]]
    title = f"Memory of the first load of {one.nbytes / 1e9:.1f} GB in a process"
    # One round: the first would be the only one that is a first load.
    found = measure(context, "memory", title, works, warm_ups=0, repetitions=1)
    for name, figures in watched.items():
        amend(context, "memory", found, name, **figures)


def _higher(peak: dict[str, int], now: Mapping[str, int]) -> None:
    peak.update({kind: max(peak[kind], now[kind]) for kind in peak})


class Worker:
    """A process of :mod:`benchmarks.gpu.loader`.

    Args:
        name: Of the loader.
        context: Of the stage.
    """

    def __init__(self, name: str, context: Context) -> None:
        self._left, bench_name = context.left, context.bench_name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        # Where the CPU decrypts, the figures are not those of the device path: then there are none.
        ours = {"SECURE_LOADER_REQUIRE_DEVICE_KERNELS": "1"} if bench_name == "cuda" else {}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.loader", name, bench_name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | ours,
            cwd=cache.ROOT,
        )
        self.cpu = 0.0

    def ready(self) -> dict[str, Any]:
        """Wait until its imports are done and the device is open. Raises MeasurementError."""
        return self._receive(None)

    def load(self, path: str | Path, watch: Callable[[], None] | None = None) -> dict[str, Any]:
        """One load. Raises MeasurementError.

        Args:
            path: The file.
            watch: Called every few milliseconds meanwhile.
        """
        try:
            self._process.stdin.write(json.dumps({"path": str(path)}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        answer = self._receive(watch)
        self.cpu += float(answer["cpu"])
        return answer

    def look(self, bench: Bench) -> dict[str, int]:
        """Bytes of its host memory by kind, and of device memory that anybody has."""
        found = dict.fromkeys(_STATUS.values(), 0)
        for line in Path(f"/proc/{self._process.pid}/status").read_text("ascii", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name in _STATUS:
                found[_STATUS[name]] = int(value.split()[0]) * 1024
        return found | {"device": -bench.free_memory()}

    def _receive(self, watch: Callable[[], None] | None) -> dict[str, Any]:
        patience = max(1.0, min(_TIMEOUT, self._left()))
        end = time.monotonic() + patience
        out = self._process.stdout
        while not select.select([out], [], [], _SAMPLE_EVERY if watch else 1.0)[0]:
            if time.monotonic() > end:
                raise MeasurementError(f"not done after {patience:.0f} s")
            if watch:
                watch()
        line = out.readline()
        if not line:
            raise self._died()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise MeasurementError(machine.scrub(answer["error"], cache.folder())[:400])
        return answer

    def _died(self) -> MeasurementError:
        code = self._process.wait()
        self._log.seek(0)
        tail = self._log.read()[-400:].decode(errors="replace")
        return MeasurementError(machine.scrub(f"the process ended with {code}: {tail}", cache.folder()))

    def close(self) -> None:
        """End it, if it has not ended."""
        if self._log.closed:
            return
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()
