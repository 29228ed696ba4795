"""Measuring in forks: what is measured, and what becomes of tasks that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from secure_loader.bench import measure
from tests.integration.bench.measuring import SIZE

ROOT = Path(__file__).parents[3]
FILE_SIZE = 4 << 20


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    file = tmp_path_factory.mktemp("measure") / "file"
    file.write_bytes(os.urandom(FILE_SIZE))
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.bench.measuring", str(file)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_phases_add_up_and_every_repetition_is_kept(found):
    works = found["results"]["works"]
    assert works["failure"] is None
    assert len(works["samples"]) == 2
    for sample in works["samples"]:
        assert 0 < sample["seconds"]["first"] < sample["seconds"]["second"]
        assert sample["checksum"] == [SIZE, FILE_SIZE]
        assert sample["io"]["read_calls"] >= FILE_SIZE
        assert sample["peak"] is None
    firsts = [sample["seconds"]["first"] for sample in works["samples"]]
    assert works["min_seconds"]["first"] == min(firsts)
    assert works["median_seconds"]["first"] == pytest.approx(sum(firsts) / 2)


def test_memory_is_that_of_the_phases(found):
    watched = found["results"]["works"]["memory"]
    # data[:SIZE], its copy and the file's bytes; not the 2 * SIZE of prepare
    assert 2 * SIZE - (1 << 20) <= watched["memory"]["hwm"] <= 2 * SIZE + 3 * FILE_SIZE + (8 << 20)
    assert SIZE - (1 << 20) <= watched["peak"]["anon"] <= 2 * SIZE + 3 * FILE_SIZE + (8 << 20)


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ("raises", "ValueError: cannot read ~/model"),
        ("killed", "killed by SIGKILL"),
        ("exits", "ended with exit code 3 and no result: last words"),
        ("hangs", "not done after 0.5 s"),
        ("no file", "FileNotFoundError"),
    ],
)
def test_failures_are_results_and_told_at_once(found, task, why):
    result = found["results"][task]
    assert why in result["failure"]
    assert result["samples"] == []
    assert sum(line.startswith(f"{task}: FAILED") for line in found["lines"]) == 1, "tried once"


def test_modules_that_are_missing_have_a_reason(found):
    assert list(found["missing"]) == ["no_such_module"]
    assert "ModuleNotFoundError" in found["missing"]["no_such_module"]


def test_page_cache_is_emptied_and_filled(found):
    assert "fadvise" in found["evicted"]
    assert found["resident"] == [0.0, 1.0]


def test_process_with_threads_is_not_forked(found):
    assert "has started threads" in found["threaded"]


def test_facts_and_messages_tell_no_names(found):
    facts = found["facts"]
    assert facts["cores"] >= 1
    assert "safetensors" in facts["packages"]
    text = json.dumps(facts)
    assert f'"{os.uname().nodename}"' not in text
    assert str(Path.home()) not in text
    assert found["scrubbed"] == ".../x"


def _result(name, seconds, failure=None):
    samples = [measure.Sample({"load": s}, {"load": s}, {}, None, {}, None) for s in seconds]
    return measure.Result(name, samples, failure=failure)


def test_ratio_of_medians_and_of_rounds():
    found = measure.ratio(_result("a", [1.0, 2.0, 9.0]), _result("b", [2.0, 4.0, 3.0]), "load")
    assert found.of_medians == 2 / 3
    assert found.of_rounds == 0.5
    assert found.rounds == (0.5, 0.5, 3.0)


def test_no_ratio_with_a_task_that_failed():
    with pytest.raises(measure.MeasurementError, match="b: no such package"):
        measure.ratio(_result("a", [1.0]), _result("b", [1.0], "no such package"), "load")


def test_digest_tells_values_places_names_and_shapes_apart():
    import torch

    tensor = torch.arange(40_000, dtype=torch.int16)
    swapped = torch.cat([tensor[2048:4096], tensor[:2048], tensor[4096:]])  # two blocks of 4 KiB
    last = tensor.clone()
    last[-1] += 1
    digests = [
        measure.digest(state)
        for state in (
            {"a": tensor},
            {"b": tensor},
            {"a": tensor.view(200, 200)},
            {"a": tensor.view(torch.bfloat16)},
            {"a": swapped},
            {"a": last},
        )
    ]
    assert len(set(digests)) == len(digests)
    assert measure.digest({"a": tensor.clone()}) == digests[0]
    # The same bytes at an odd address, as in a mapped file.
    raw = torch.empty(80_001, dtype=torch.uint8)
    raw[1:] = tensor.view(torch.uint8)
    assert measure.digest({"a": raw[1:]}) == measure.digest({"a": tensor.view(torch.uint8)})
    assert measure.touch({"a": raw[1:]})["a"] is not None
