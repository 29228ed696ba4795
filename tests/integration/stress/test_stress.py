"""More than a thousand loads, most of them with something going wrong: the right bytes or a typed error, and nothing left.

``STRESS_LOADS=20000 STRESS_SEED=42 pytest tests/integration/stress`` runs longer, and draws otherwise; the seed is in
the name of the test, and what is drawn depends on it alone. When faults strike depends on the machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
# Read at import: the tests' own environment has no settings in it.
LOADS = int(os.environ.get("STRESS_LOADS", "1100"))
SEED = int(os.environ.get("STRESS_SEED", "1"))
PROCESSES = 2
# Per fault and process: of the draws, so many must have struck during the load.
FIRED = 1 / 8


def stress(folder: Path, seed: int, loads: int, *faults: str) -> dict[str, Any]:
    """Run loads in a process of their own; it must end well."""
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "tests.integration.stress.worker",
        str(folder),
        str(seed),
        str(loads),
    ]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [*command, *faults],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=60 + loads,
    )
    assert done.returncode == 0, f"seed {seed}: exit status {done.returncode}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout)


def judge(report: dict[str, Any], seed: int, loads: int) -> None:
    """No load has left anything, and there were as many as there should be."""
    assert not report["problems"], f"seed {seed}:\n" + "\n".join(report["problems"])
    assert report["loads"] == loads
    assert report["growth"]["resident"] < 48 << 20, report["growth"]
    # Stacks and heaps of threads come and go; one mapping left per load would be more than this.
    assert report["growth"]["maps"] < 200, report["growth"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEED, SEED + PROCESSES), ids=lambda seed: f"seed-{seed}")
def test_loads_with_faults(tmp_path, seed):
    from tests.integration.stress.faults import FAULTS, USUAL

    loads = LOADS // PROCESSES
    report = stress(tmp_path, seed, loads)
    judge(report, seed, loads)
    for name in USUAL:
        seen, raised = report["faults"][name], [kind.__name__ for kind in FAULTS[name].allowed]
        assert seen["runs"] >= loads // len(USUAL)
        assert seen.get("fired", 0) >= max(1, seen["runs"] * FIRED), (name, seen)
        # A fault that may be an error must have been one now and then.
        assert not raised or seen["runs"] > seen.get("none", 0), (name, seen)
    assert min(report["ways"].values()) >= loads // 50
    assert report["failed_reads_looked_at"] >= loads // 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", [SEED], ids=lambda seed: f"seed-{seed}")
def test_loads_without_memory(tmp_path, seed):
    """The limit of address space is a real one, and holds for every thread and library of the process."""
    loads = max(60, LOADS // 10)
    report = stress(tmp_path, seed, loads, "out_of_address_space", "none")
    judge(report, seed, loads)
    assert report["faults"]["out_of_address_space"].get("OutOfMemoryError", 0) >= loads // 8, report["faults"]


FORKS = """
import os, signal, sys, threading, time
from secure_loader.core import rollback
read, inside = rollback._read, threading.Event()
def slow(folder):
    inside.set()
    time.sleep(0.2)
    return read(folder)
rollback._read = slow
thread = threading.Thread(target=rollback.check_release, args=("model", "signer", 1))
thread.start()
inside.wait()
child = os.fork()
rollback._read = read
if child == 0:
    signal.alarm(5)
    rollback.check_release("model", "signer", 1)
    os._exit(0)
thread.join()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_while_another_thread_opens_a_file():
    path = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    assert subprocess.run([sys.executable, "-c", FORKS], env=path, check=False, timeout=60).returncode == 0
