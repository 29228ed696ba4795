"""The stages that prove instead of measuring: the proof at several sizes, the tests in ``tests/gpu``, compute-sanitizer."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import cache
from benchmarks.gpu.copies import size_text
from benchmarks.gpu.proof import prove
from benchmarks.gpu.rounds import Work, document, sample
from benchmarks.gpu.stage import Context, SkippedError, StageError
from secure_loader.bench.machine import scrub
from secure_loader.bench.measure import Result

TESTS = cache.ROOT / "tests" / "gpu"
TOOLS = ("memcheck", "racecheck", "initcheck")
_FAULTS = 9  # exit code of compute-sanitizer where it found something
_TAIL = 800


def proof(context: Context) -> None:
    """Both implementations against ``cryptography``, and the tests that need a GPU. Raises StageError."""
    bench = context.bench
    wrong: list[str] = []
    ways = ("auto", "triton") if importlib.util.find_spec("triton") is not None else ("auto",)
    for size in context.sizes.proofs:
        for way in ways:
            if way == "triton" and size > context.sizes.proofs[0]:
                continue

            def attempt(way: str = way, size: int = size) -> list[str]:
                return prove(bench.driver(), bench.ordinal, bench.kernels(way), size)

            wrong += _report(context, f"{way}-{size}", f"{way}, {size_text(size)}", attempt)
    if not bench.stand_in:
        wrong += _report(context, "tests", "tests/gpu", lambda: run_tests(context, TESTS))
    if wrong:
        raise StageError("; ".join(wrong))


def _report(context: Context, name: str, label: str, attempt: Callable[[], list[str]]) -> list[str]:
    """Emit one attempt as a case; what is wrong, if anything is."""
    start, failure, proven = time.perf_counter(), None, []
    try:
        context.insist_on_time()
        proven = attempt()
    except SkippedError:
        raise
    except Exception as e:  # noqa: BLE001 - whatever a device comes up with is the result
        failure = scrub(f"{type(e).__name__}: {e}", cache.folder())[:_TAIL]
    seconds = time.perf_counter() - start
    context.tell(f"   {label}: {f'FAILED: {failure}' if failure else f'{len(proven)} proven'} ({seconds:.1f} s)")
    work = Work(name="proof", label=label, run=lambda: seconds, parameters={"proven": proven})
    result = Result("proof", [] if failure else [sample(seconds)], failure=failure)
    context.emit(name, document(label, "as is", [work], {"proof": result}))
    return [f"{label}: {failure}"] if failure else []


def run_tests(context: Context, folder: Path) -> list[str]:
    """``pytest`` in a process of its own. None may fail, and one at least has to pass.

    Raises:
        StageError: Otherwise.
    """
    if not any(folder.glob("test_*.py")):
        raise StageError("there are no tests in tests/gpu")
    if importlib.util.find_spec("pytest") is None:
        raise StageError("pytest is missing: put its wheels among those of WHEELS, with iniconfig and pluggy")
    report = context.folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", str(folder), "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    # Warnings are errors in the project's own environment; here the versions of everything are the machine's.
    done = _run([*command, "-W", "default"], context.left())
    try:
        cases = list(ET.parse(report).getroot().iter("testcase"))
    except (OSError, ET.ParseError):
        raise StageError(f"pytest ended with {done.returncode}: {done.stdout[-_TAIL:]}") from None
    report.unlink()
    bad = [
        case.get("name", "?") for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = [case.get("name", "?") for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(bad) - len(skipped)
    if bad or done.returncode or not passed:
        raise StageError(
            f"{len(bad)} failed ({', '.join(bad[:8])}), {passed} passed, {len(skipped)} skipped: {done.stdout[-_TAIL:]}"
        )
    return [f"{passed} tests passed", *(f"skipped: {name}" for name in skipped)]


def sanitizer(context: Context) -> None:
    """memcheck, racecheck and initcheck over the proof at a small size. Raises StageError where one finds something."""
    tool = find_sanitizer()
    if tool is None:
        raise SkippedError(
            "compute-sanitizer was not found: it is part of the CUDA toolkit (PATH, CUDA_HOME, /usr/local)"
        )
    wrong: list[str] = []
    size = str(context.sizes.sanitized)
    for name in TOOLS:

        def attempt(name: str = name) -> list[str]:
            options = ["--tool", name, "--error-exitcode", str(_FAULTS), "--print-limit", "5"]
            command = [str(tool), *options, sys.executable, "-m", "benchmarks.gpu.proof", size]
            done = _run(command, context.left())
            if "Device not supported" in done.stdout:
                raise SkippedError("compute-sanitizer does not support this device, or not on this kind of machine")
            if done.returncode:
                kind = "found faults" if done.returncode == _FAULTS else f"ended with {done.returncode}"
                raise StageError(f"{name} {kind}: {done.stdout[-_TAIL:]}")
            return [line for line in done.stdout.splitlines() if "SUMMARY" in line]

        wrong += _report(context, name, f"compute-sanitizer, {name}", attempt)
    if wrong:
        raise StageError("; ".join(wrong))


def find_sanitizer() -> Path | None:
    """Where compute-sanitizer is, if it is there."""
    homes = [
        os.environ.get("CUDA_HOME"),
        os.environ.get("CUDA_PATH"),
        *sorted(map(str, Path("/usr/local").glob("cuda*"))),
    ]
    places = [shutil.which("compute-sanitizer")]
    places += [f"{home}/{sub}/compute-sanitizer" for home in homes if home for sub in ("bin", "compute-sanitizer")]
    return next(
        (Path(place) for place in places if place and os.access(place, os.X_OK) and Path(place).is_file()), None
    )


def _run(command: Sequence[str], seconds: float) -> Any:
    try:
        return subprocess.run(
            command,
            cwd=cache.ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=max(1.0, seconds),
            check=False,
        )
    except subprocess.TimeoutExpired as e:
        tail = (e.stdout or b"")[-_TAIL:]
        raise StageError(
            f"not done in time: {tail.decode(errors='replace') if isinstance(tail, bytes) else tail}"
        ) from e
