"""Every benchmark runs, tiny: the figures mean nothing, but that there are figures does."""

from __future__ import annotations

import copy
import importlib.util

import pytest

from benchmarks import cache, charts, report, schema
from benchmarks.data import TINY, path
from benchmarks.goals import evaluate
from benchmarks.model import Goal, Quantity
from benchmarks.run import write
from benchmarks.suites import NAMES, find

PNG = b"\x89PNG\r\n\x1a\n"
# Loaders that this environment need not have, by what they import; the bench environment has them all.
PEERS = {
    "tensorizer": "tensorizer",
    "fastsafetensors": "fastsafetensors",
    "instanttensor": "instanttensor",
    "runai-model-streamer": "runai_model_streamer",
    "cryptotensors": "cryptotensors",
}


def entries(results):
    for suite, document in results.items():
        for case, measured in document["cases"].items():
            for name, entry in measured["entries"].items():
                yield f"{suite}/{case}/{name}", entry


def test_every_suite_wrote_results_that_fit_the_schema(results):
    assert set(results) == set(NAMES)
    for document in results.values():
        assert document["size"] == "tiny"
        assert document["cases"]


def test_what_is_installed_ran_and_its_bytes_were_right(results):
    for where, entry in entries(results):
        needs = PEERS.get(entry["loader"])
        if needs is None or (importlib.util.find_spec(needs) and entry["loader"] != "instanttensor"):
            assert entry["failure"] is None, f"{where}: {entry['failure']}"
            assert entry["bytes_checked"], where


def test_what_is_missing_has_a_reason_and_is_told(tiny_run, results):
    failed = {where: entry["failure"] for where, entry in entries(results) if entry["failure"] is not None}
    assert any("instanttensor" in where for where in failed), "it runs on CUDA alone"
    for where, reason in failed.items():
        assert reason, where
        assert f"{where.rpartition('/')[2]}: FAILED: {reason}".splitlines()[0] in tiny_run[1]


def test_results_name_no_place_and_nobody(tiny_run):
    for file in tiny_run[0].glob("*.json"):
        text = file.read_text()
        assert str(cache.ROOT) not in text
        assert str(tiny_run[0].parent) not in text


def test_every_goal_of_a_case_that_ran_has_a_figure(results):
    for suite, document in results.items():
        goals = find(suite).goals
        assert len(document["goals"]) == len(goals)
        for goal, row in zip(goals, document["goals"], strict=True):
            if row["measured"] is None:
                assert row["reason"]
            elif goal.bound is not None:
                assert row["met"] is not None


def test_goals_name_cases_and_entries_that_exist_in_full_size():
    for name in NAMES:
        suite = find(name)
        cases = {case.name: {entry.name for entry in case.entries} for case in suite.cases("full")}
        for goal in suite.goals:
            for quantity in filter(None, (goal.measured, goal.reference)):
                wanted = (quantity.entry,) if isinstance(quantity.entry, str) else quantity.entry
                assert set(wanted) <= cases[quantity.case], goal.what


def test_a_row_is_read_and_no_whole_tensor(results):
    slice_of = results["slice"]["cases"]["row"]["entries"]
    ours, theirs = (slice_of[name]["samples"][0] for name in ("secure", "cryptotensors"))
    assert 0 < ours["checksum"]["bytes_read"] <= 2 * slice_of["secure"]["parameters"]["chunk_size"]
    # It decrypts the whole tensor for the first row, and keeps it.
    assert theirs["io"]["read_calls"] >= slice_of["cryptotensors"]["parameters"]["bytes"]


def test_tables_and_documents(results):
    for name in report.NAMES:
        table = report.table(name, results)
        assert table.startswith("| ")
        assert all(line == "" or (line.startswith("| ") and line.endswith(" |")) for line in table.splitlines())
    text = "before\n<!-- bench:goals -->\nstale table\n<!-- /bench -->\nbetween\n<!-- bench:load -->\n<!-- /bench -->\nafter\n"
    new = report.rewrite(text, results)
    assert "stale table" not in new
    assert "cryptotensors, encrypted" in new
    assert [line for line in new.splitlines() if line in ("before", "between", "after")] == [
        "before",
        "between",
        "after",
    ]
    assert report.rewrite(new, results) == new, "writing twice changes nothing"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("<!-- bench:goals -->\n", "no <!-- /bench -->"),
        ("<!-- bench:nothing -->\n<!-- /bench -->\n", "no table is called nothing"),
    ],
)
def test_documents_that_ask_for_what_there_is_not(results, text, why):
    with pytest.raises(report.ReportError, match=why):
        report.rewrite(text, results)


def test_no_results_no_table():
    with pytest.raises(report.ReportError, match="no results of load"):
        report.table("load", {})


def test_charts_are_drawn_from_results_alone(results, tmp_path):
    pytest.importorskip("matplotlib")
    written = charts.draw(results, tmp_path / "one")
    assert {file.name for file in written} == {
        "load.png",
        "load-cold.png",
        "memory.png",
        "scaling.png",
        "frameworks.png",
    }
    for file in written:
        assert file.read_bytes().startswith(PNG)
    for first, second in zip(written, charts.draw(results, tmp_path / "two"), strict=True):
        assert first.read_bytes() == second.read_bytes(), "the same results, the same picture"


def _without(document, *path):
    changed = copy.deepcopy(document)
    at = changed
    for step in path[:-1]:
        at = at[step]
    del at[path[-1]]
    return changed


def test_results_that_lack_something_are_refused(results, tmp_path):
    good = results["clear"]
    entry = ("cases", "0.6b", "entries", "safetensors-mapped")
    schema.check(good)
    for bad, why in [
        (_without(good, "machine", "cpu"), "cpu is missing"),
        (_without(good, *entry, "failure"), "failure is missing"),
        (_without(good, *entry, "samples", 0), "neither figures nor a reason"),
        (good | {"more": 1}, "more is unknown"),
        (good | {"seconds": "1"}, "seconds is str"),
        (good | {"schema": 0}, "schema 0"),
    ]:
        with pytest.raises(schema.SchemaError, match=why):
            write(bad, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_goals_are_judged_by_medians(results):
    cases = {
        "case": {"entries": {name: _entry(name, seconds) for name, seconds in (("a", [3, 1, 2]), ("b", [4, 4, 1]))}}
    }

    def row(bound, compare="ratio", entry="b"):
        measured, reference = Quantity("case", "a", "seconds.load"), Quantity("case", entry, "seconds.load")
        return evaluate(
            Goal(what="", against="", measured=measured, reference=reference, compare=compare, bound=bound), cases
        )

    assert row(0.5)["measured"] == 0.5
    assert row(0.5)["of_rounds"] == 0.75
    assert row(0.5)["met"]
    assert not row(0.4)["met"]
    assert row(2, "speedup")["measured"] == 2
    assert row(2, "speedup")["met"]
    assert not row(2.1, "speedup")["met"]
    assert row(-2, "difference")["measured"] == -2
    assert row(None)["met"] is None
    assert row(0.5, entry=("b", "c"))["measured"] == 0.5
    missing = row(0.5, entry="c")
    assert (missing["met"], missing["reason"]) == (None, "c: not in this run")


def _entry(name, seconds):
    return {
        "label": name,
        "failure": None,
        "parameters": {},
        "samples": [{"seconds": {"load": float(value)}} for value in seconds],
        "memory": None,
    }


def test_data_lies_outside_the_checkout(monkeypatch, tmp_path):
    monkeypatch.setenv("SECURE_LOADER_BENCH_DIR", str(tmp_path / "chosen"))
    assert path(TINY, "secure:chunk=65536").is_relative_to(tmp_path / "chosen")
    monkeypatch.delenv("SECURE_LOADER_BENCH_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache.folder() == tmp_path / "cache" / "secure_loader" / "bench"


def test_documents_show_the_committed_results():
    committed = schema.read(report.RESULTS)
    assert all(document["size"] == "full" for document in committed.values())
    for document in report.DOCUMENTS:
        if document.exists():
            text = document.read_text()
            assert report.rewrite(text, committed) == text, "python -m benchmarks.report --write"
