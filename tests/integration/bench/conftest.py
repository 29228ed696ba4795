"""All suites, run once in their tiny size, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import schema

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory) -> tuple[Path, str]:
    """The folder of results, and what was printed."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("bench")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--size", "tiny", "--reps", "1", "--out", str(folder / "results")],
        env=os.environ | {"SECURE_LOADER_BENCH_DIR": str(folder / "data"), "PYTHONPATH": str(ROOT / "src")},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "results", done.stdout


@pytest.fixture(scope="session")
def results(tiny_run):
    """Documents by suite, all of them checked against the schema."""
    return schema.read(tiny_run[0])
