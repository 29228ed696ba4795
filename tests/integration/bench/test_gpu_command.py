"""``make gpu`` itself: what it needs, stages that fail, hang or crash, and what is kept of them. No GPU, and no torch here."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from benchmarks import cache
from benchmarks.gpu import NAMES, environment, runner, stages
from benchmarks.gpu.environment import NotReadyError
from benchmarks.gpu.stage import LATE

STAND_IN = "tests.integration.bench.gpu_stand_in"


def _no_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return False


@pytest.mark.skipif(not _no_driver(), reason="there is an NVIDIA driver on this machine")
def test_without_a_gpu_it_ends_at_once_and_says_so(tmp_path):
    start = (
        "import runpy, sys; sys.path[:0] = [sys.argv.pop(1)]; runpy.run_module('benchmarks.gpu', run_name='__main__')"
    )
    # -I -S: a Python that has nothing installed at all.
    command = [sys.executable, "-I", "-S", "-c", start, str(cache.ROOT), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    assert done.returncode == 2
    assert "error: there is no NVIDIA driver on this machine" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_stages_fit_into_ten_minutes():
    assert sum(stage.seconds for stage in stages.STAGES) + 30 <= stages.LIMIT < 600
    assert [f"gpu-{stage.name}" for stage in stages.STAGES if stage.name != "files"] == list(NAMES)


def test_a_stage_gets_what_those_before_it_left_over_and_never_what_others_need():
    chosen, whole = stages.STAGES, sum(stage.seconds for stage in stages.STAGES)
    assert runner.allowed(chosen, 0, whole) == chosen[0].seconds
    assert runner.allowed(chosen, 1, whole - chosen[0].seconds + 7) == chosen[1].seconds + 7
    assert runner.allowed(chosen, len(chosen) - 1, 33.0) == 33.0
    assert runner.allowed(chosen, 0, 1.0) == 0.0


def _run(make: str, tmp_path, seconds: float = 60.0, stage: str = "copies") -> tuple[runner.Outcome, list[str]]:
    lines: list[str] = []
    options = {"bench": f"{STAND_IN}:{make}", "size": "tiny", "folder": str(tmp_path), "memory_folder": None}
    path = os.pathsep.join([str(cache.ROOT / "src"), str(cache.ROOT)])
    return runner.run(stage, options, seconds, lines.append, os.environ | {"PYTHONPATH": path}), lines


def test_a_stage_that_fails_is_recorded_with_its_error(tmp_path):
    outcome, _ = _run("broken", tmp_path)
    assert outcome.failure == "DeviceError: there was a device, and now there is none"
    assert outcome.cases == {}
    assert runner.broken(outcome) == [outcome.failure]


def test_a_stage_that_crashes_keeps_what_it_had_measured(tmp_path):
    outcome, lines = _run("dying", tmp_path)
    assert "ended with 3" in outcome.failure
    assert "illegal address" in outcome.failure
    assert list(outcome.cases) == ["copy-4096"]
    assert all(entry["failure"] is None for entry in outcome.cases["copy-4096"]["entries"].values())
    assert any("pinned to device" in line for line in lines)


def test_a_stage_that_hangs_is_ended(tmp_path):
    outcome, _ = _run("stuck", tmp_path, seconds=5.0)
    assert "not done after 5 s" in outcome.failure
    assert 5 <= outcome.seconds < 20


def test_a_stage_that_cannot_be_run_here_is_skipped_and_breaks_nothing(tmp_path):
    outcome, _ = _run("make", tmp_path, stage="load")
    assert outcome.skipped == "the files that it loads were not made"
    assert runner.broken(outcome) == []


def test_what_is_ours_breaks_the_run_and_what_is_others_is_a_result():
    def entry(*, ours: bool, failure: str | None) -> dict[str, object]:
        return {"label": "it", "ours": ours, "failure": failure}

    entries = {"a": entry(ours=True, failure=None), "b": entry(ours=False, failure="not installed")}
    outcome = runner.Outcome(cases={"case": {"entries": entries}})
    assert runner.broken(outcome) == []
    entries["late"] = entry(ours=True, failure=LATE)
    assert runner.broken(outcome) == [], "left blank, and told, but nothing is wrong with it"
    entries["c"] = entry(ours=True, failure="gave other bytes")
    assert runner.broken(outcome) == ["case: it: gave other bytes"]


def test_an_unknown_stage_is_no_traceback(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--bench", f"{STAND_IN}:make", "--only", "copys", "--out", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        cwd=cache.ROOT,
    )
    assert done.returncode == 2
    assert "no stage is called copys" in done.stderr


def test_what_is_missing_is_taken_from_the_lock_with_its_hashes():
    lock = environment.LOCK.read_text()
    for name in environment.NEEDED:
        parts = environment.locked(lock, [name])  # several where the version depends on Python's
        assert parts
        for part in parts:
            assert part.startswith(f"{name}==")
            assert "--hash=sha256:" in part
            versions = [line for line in part.splitlines() if line[:1].isalnum()]
            assert len(versions) == 1, "nothing of the package behind it"
    assert environment.locked(lock, ["no-such-package"]) == []


def test_a_folder_without_wheels_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "SITE", tmp_path / "site")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    with pytest.raises(NotReadyError, match="there are no wheels in"):
        environment.complete(tmp_path)


def test_what_a_machine_without_network_has_to_bring_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "SITE", tmp_path / "site")
    monkeypatch.setattr(environment, "NEEDED", {"no-such-package": (1,), "pytest": (1,)})
    monkeypatch.setattr(environment, "_install_wheels", lambda folder, site: [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    with pytest.raises(NotReadyError, match=r"lacks no-such-package\.\n.*pip download .* no-such-package"):
        environment.complete(tmp_path)
