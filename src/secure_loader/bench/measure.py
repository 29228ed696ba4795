"""Callables measured in processes of their own, and compared.

Every repetition is a fork of a process that has imported what is needed and done nothing else: imports are not timed,
no repetition finds memory or threads of another one, and a crash is a result like any other. Candidates take turns, so
that whatever else the machine does hits all of them alike.

    tasks = [Task("ours", {"load": lambda _: load(path)}, check=digest, files=(path,), memory=size), ...]
    results = compare(tasks, repetitions=5)
    ratio(results["ours"], results["theirs"], "load").of_medians
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import json
import os
import resource
import select
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NoReturn

from . import machine
from .apart import forked

CacheState = Literal["warm", "cold", "as is"]
_SAMPLE_EVERY = 0.004  # seconds between two looks at a process's memory
_STATUS = {"VmHWM": "hwm", "VmRSS": "rss", "RssAnon": "anon", "RssFile": "file", "RssShmem": "shmem"}
_TAIL = 600  # characters of a failed process's output that are kept


@dataclass(frozen=True, kw_only=True)
class Task:
    """One way of doing something.

    Attributes:
        name: What results call it.
        phases: What is timed, by name, in order. Each is called with what the one before returned; the first one with
            what ``prepare`` returned.
        prepare: Called before the clock starts, in the process that is measured.
        check: Called after the clock has stopped, with what the last phase returned; gives a JSON-able checksum.
        files: Read (warm) or dropped from the page cache (cold) before each repetition.
        memory: Bytes that it will need: touched and freed before each repetition, see :func:`.machine.touch_memory`.
        timeout: Seconds after which a repetition has failed.
    """

    name: str
    phases: Mapping[str, Callable[[Any], Any]]
    prepare: Callable[[], Any] | None = None
    check: Callable[[Any], Any] | None = None
    files: Sequence[str | os.PathLike[str]] = ()
    memory: int = 0
    timeout: float = 120.0


@dataclass(frozen=True)
class Sample:
    """One repetition.

    Attributes:
        seconds: Wall time from the start to the end of each phase.
        cpu_seconds: Time of all processors of the process, user and system, likewise.
        memory: Bytes above the state before the first phase: ``hwm`` (peak resident), and ``anon`` and ``file`` (resident
            at the end of the last phase).
        peak: Highest ``anon``, ``file`` and ``shmem`` seen from outside, above the state before; None where nobody looked.
        io: Bytes asked for by read calls (``read_calls``) and fetched from disk (``disk``) during all phases.
        checksum: What ``check`` gave.
        imported: How many modules were imported while the clock ran. This process has imported them since, so that only
            the first repetition pays for them.
        evicted: By which means files were dropped from the page cache; empty for a warm one.
    """

    seconds: dict[str, float]
    cpu_seconds: dict[str, float]
    memory: dict[str, int]
    peak: dict[str, int] | None
    io: dict[str, int]
    checksum: Any
    imported: int = 0
    evicted: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


class MeasurementError(Exception):
    """A repetition failed; the text says why."""


@dataclass
class Result:
    """All repetitions of a task.

    Attributes:
        name: The task's.
        samples: By round; only those that were timed.
        memory: The one that was watched from outside instead of being timed, or None.
        failure: Why it does not run, or None. What it had measured before is kept, but means nothing.
    """

    name: str
    samples: list[Sample] = field(default_factory=list)
    memory: Sample | None = None
    failure: str | None = None

    def seconds(self, phase: str) -> list[float]:
        """Seconds to the end of a phase, by round."""
        return [sample.seconds[phase] for sample in self.samples]

    def median(self, phase: str) -> float:
        """Median of :meth:`seconds`."""
        return statistics.median(self.seconds(phase))

    def best(self, phase: str) -> float:
        """Minimum of :meth:`seconds`."""
        return min(self.seconds(phase))

    def document(self) -> dict[str, Any]:
        """As JSON, with medians and minima by phase beside the raw samples."""
        phases = list(self.samples[0].seconds) if self.samples else []
        return {
            "failure": self.failure,
            "median_seconds": {phase: self.median(phase) for phase in phases},
            "min_seconds": {phase: self.best(phase) for phase in phases},
            "median_cpu_seconds": {
                phase: statistics.median(s.cpu_seconds[phase] for s in self.samples) for phase in phases
            },
            "samples": [sample.document() for sample in self.samples],
            "memory": None if self.memory is None else self.memory.document(),
        }


@dataclass(frozen=True)
class Ratio:
    """How two results compare.

    Attributes:
        of_medians: Median of the one over the median of the other.
        of_rounds: Median of the ratios within each round: noise that lasts longer than a round cancels out.
        rounds: Those ratios.
    """

    of_medians: float
    of_rounds: float
    rounds: tuple[float, ...]


def ratio(one: Result, other: Result, phase: str, other_phase: str | None = None) -> Ratio:
    """``one`` divided by ``other``, in seconds to the end of a phase.

    Raises:
        MeasurementError: One of them failed or was not timed.
    """
    for result in (one, other):
        if result.failure is not None or not result.samples:
            raise MeasurementError(f"{result.name}: {result.failure or 'not measured'}")
    above, below = one.seconds(phase), other.seconds(other_phase or phase)
    rounds = tuple(a / b for a, b in zip(above, below, strict=False))
    return Ratio(statistics.median(above) / statistics.median(below), statistics.median(rounds), rounds)


def import_quietly(modules: Iterable[str]) -> dict[str, str]:
    """Import modules before the first fork, without the thread pool that numpy's linear algebra starts when imported.

    Returns:
        Why, for each module that cannot be imported.
    """
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    missing = {}
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as e:  # noqa: BLE001 - a peer may fail in any way, and the way is the result
            missing[module] = _describe(e)
    return missing


def compare(
    tasks: Sequence[Task],
    *,
    repetitions: int,
    cache: CacheState = "warm",
    watch_memory: bool = True,
    take: Callable[..., Sample] | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Result]:
    """Measure tasks in turn.

    Args:
        tasks: What is compared; names are unique.
        repetitions: Rounds. Each begins with another task.
        cache: State of the page cache before each repetition.
        watch_memory: One more round, watched from outside and not timed.
        take: What measures; None takes :func:`sample`.
        progress: Called with a line now and then.

    Returns:
        By task name, in their order. A task that fails is not tried again, and its result says why it failed.
    """
    take, tell = take or sample, progress or (lambda _: None)
    results = {task.name: Result(task.name) for task in tasks}
    if len(results) != len(tasks):
        raise ValueError("tasks must have names of their own")
    for number in range(repetitions + watch_memory):
        watching = number == repetitions
        first = number % max(1, len(tasks))
        for task in (*tasks[first:], *tasks[:first]):
            result = results[task.name]
            if result.failure is not None:
                continue
            try:
                one = take(task, cache=cache, watch=watching)
            except MeasurementError as e:
                result.failure = str(e)
                tell(f"{task.name}: FAILED: {e}")
                continue
            if watching:
                result.memory = one
            else:
                result.samples.append(one)
                times = ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in one.seconds.items())
                tell(f"round {number + 1}: {task.name}: {times}")
    return results


def sample(task: Task, *, cache: CacheState = "warm", watch: bool = False) -> Sample:
    """Measure one repetition in a fork of this process.

    Args:
        task: What to run.
        cache: State of the page cache before it.
        watch: Look at its memory every few milliseconds. This takes processor time: do not use its seconds.

    Raises:
        MeasurementError: It raised, was killed, or did not finish in time.
        RuntimeError: This process has several threads: a fork would inherit locks that nobody releases.
    """
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(
            "this process has started threads and can no longer be forked: import with import_quietly, "
            "and load and compute nothing before"
        )
    evicted: tuple[str, ...] = ()
    try:
        if cache == "warm":
            machine.warm(task.files)
        elif cache == "cold":
            evicted = machine.evict(task.files)
    except OSError as e:
        raise MeasurementError(_describe(e)) from e
    machine.touch_memory(task.memory)
    with tempfile.TemporaryFile() as output:
        done = _in_fork(task, output, watch=watch)
    modules = done.pop("modules")
    import_quietly(modules)
    return Sample(**done, imported=len(modules), evicted=evicted)


def _in_fork(task: Task, output: IO[bytes], *, watch: bool) -> dict[str, Any]:
    # A collection in the fork would write to the header of every object that was imported, and so copy all of their pages.
    gc.freeze()
    theirs, ours = os.pipe()
    with forked(lambda: _child(task, ours, output)) as process:
        os.close(ours)
        with open(theirs, "rb", buffering=0) as answers:
            lines, peak = _follow(process.pid, answers, task.timeout, watch=watch)
        status = process.wait()
    last = json.loads(lines[-1]) if lines else {}
    if status != 0 or "seconds" not in last:
        raise MeasurementError(last.get("error") or f"{_ending(status)}{_tail(output)}")
    before = last.pop("before")
    if peak is not None:
        end = last["memory"]  # a short peak may fall between two looks
        peak = {name: max(0, end.get(name, 0), peak[name] - before[name]) for name in ("anon", "file", "shmem")}
    return last | {"peak": peak}


def _follow(pid: int, answers: IO[bytes], timeout: float, *, watch: bool) -> tuple[list[bytes], dict[str, int] | None]:
    """Lines that a process sends until it closes its pipe; and its peak memory until the first of them ends."""
    received = b""
    peak: dict[str, int] = dict.fromkeys(_STATUS.values(), 0)
    deadline = time.monotonic() + timeout
    while True:
        looking = watch and received.count(b"\n") == 1  # between "the clock starts" and "it has stopped"
        left = deadline - time.monotonic()
        if left <= 0:
            raise MeasurementError(f"not done after {timeout:g} s")
        if select.select([answers], [], [], _SAMPLE_EVERY if looking else left)[0]:
            data = answers.read(1 << 16)
            if not data:
                return received.splitlines(), peak if watch else None
            received += data
        elif looking:
            with contextlib.suppress(OSError):
                now = _memory(pid)
                peak = {name: max(peak[name], now[name]) for name in peak}


def _child(task: Task, pipe: int, output: IO[bytes]) -> NoReturn:
    """The measured process: three lines at most go back (start, stop, result), or one with an error."""
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        _send(pipe, _measure(task, pipe))
        code = 0
    except BaseException as e:  # noqa: BLE001 - nothing may get out of the fork
        with contextlib.suppress(BaseException):
            traceback.print_exc()
            _send(pipe, {"error": _describe(e)})
    finally:
        os._exit(code)


def _measure(task: Task, pipe: int) -> dict[str, Any]:
    value = task.prepare() if task.prepare is not None else None
    seconds: dict[str, float] = {}
    cpu_seconds: dict[str, float] = {}
    with contextlib.suppress(OSError):  # the highest resident size so far is what prepare needed: forget it
        Path("/proc/self/clear_refs").write_text("5", "ascii")
    known = set(sys.modules)
    before, io = _memory("self"), _io()
    _send(pipe, {"now": "start"})
    cpu, start = _cpu_seconds(), time.perf_counter()
    for phase, function in task.phases.items():
        value = function(value)
        seconds[phase] = time.perf_counter() - start
        cpu_seconds[phase] = _cpu_seconds() - cpu
    after, io_after = _memory("self"), _io()
    _send(pipe, {"now": "stop"})
    modules = [name for name in sys.modules if name not in known]
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "before": before,
        "memory": {
            "hwm": max(0, after["hwm"] - before["hwm"]),
            "anon": after["anon"] - before["anon"],
            "file": after["file"] - before["file"],
        },
        "io": {name: io_after[name] - io[name] for name in io},
        "modules": modules,
        "checksum": task.check(value) if task.check is not None else None,
    }


def digest(tensors: Mapping[str, Any]) -> str:
    """Sixteen hex digits over names, dtypes, shapes and all bytes of torch tensors; a memory pass where they are, no real hash.

    The bytes enter as sums of 4 KiB blocks weighted by their place, so that blocks in the wrong place count as well.
    """
    import torch

    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        raw = tensor.contiguous().reshape(-1).view(torch.uint8)
        whole = raw.numel() // 4096 * 4096
        total = 0
        if whole:
            sums = _words(raw[:whole]).view(-1, 512).sum(1)
            total = int((sums * torch.arange(1, sums.numel() + 1, device=sums.device)).sum())
        found.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0{total}\0".encode())
        found.update(raw[whole:].cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def touch(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read every byte of torch tensors, as their first use would; gives the tensors back."""
    import torch

    for tensor in tensors.values():
        raw = tensor.detach().reshape(-1).view(torch.uint8)
        whole = raw.numel() // 8 * 8
        _words(raw[:whole]).sum()
        raw[whole:].sum()
    return tensors


def _words(raw: Any) -> Any:
    """Bytes as 64-bit words: a view, but a copy where the address or offset is odd (a mapped file may begin anywhere)."""
    import torch

    aligned = raw.storage_offset() % 8 == 0 and raw.data_ptr() % 8 == 0
    return (raw if aligned else raw.clone()).view(torch.int64)


def _memory(pid: int | str) -> dict[str, int]:
    """Resident memory of a process in bytes, by our names."""
    sizes = dict.fromkeys(_STATUS.values(), 0)
    for line in Path(f"/proc/{pid}/status").read_text("ascii", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name in _STATUS:
            sizes[_STATUS[name]] = int(value.split()[0]) * 1024
    return sizes


def _io() -> dict[str, int]:
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text("ascii").splitlines())
    return {"read_calls": int(counters["rchar"]), "disk": int(counters["read_bytes"])}


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _send(pipe: int, document: Any) -> None:
    line = json.dumps(document).encode() + b"\n"
    while line:
        line = line[os.write(pipe, line) :]


def _describe(error: BaseException) -> str:
    return machine.scrub(f"{type(error).__name__}: {error}".strip().rstrip(":"))[:_TAIL]


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with exit code {os.waitstatus_to_exitcode(status)} and no result"


def _tail(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _TAIL))
    text = output.read().decode(errors="replace").strip()
    return f": {machine.scrub(text)}" if text else ""
