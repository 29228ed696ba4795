"""All suites, run once in their tiny size, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import schema
from benchmarks.suites import NAMES

ROOT = Path(__file__).parents[3]
SLOW = ["vllm", "transformers", "header"]


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory) -> tuple[Path, str]:
    """The folder of results, and what was printed."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("bench")
    environment = os.environ | {"SECURE_LOADER_BENCH_DIR": str(folder / "data"), "PYTHONPATH": str(ROOT / "src")}
    runs = []
    for names in (SLOW, [name for name in NAMES if name not in SLOW]):  # side by side: nobody looks at the figures
        command = [sys.executable, "-m", "benchmarks", "--size", "tiny", "--reps", "1"]
        command += ["--out", str(folder / "results"), "--only", *names]
        log = (folder / f"{names[0]}.log").open("w+")
        runs.append((subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log), log))
    printed = ""
    try:
        for run, log in runs:
            code = run.wait(300)
            log.seek(0)
            printed += log.read()
            assert code == 0, printed[-4000:]
    finally:
        for run, log in runs:
            run.kill()
            run.wait()
            log.close()
    return folder / "results", printed


@pytest.fixture(scope="session")
def results(tiny_run):
    """Documents by suite, all of them checked against the schema."""
    return schema.read(tiny_run[0])
