"""Every stage of ``make gpu`` runs, tiny, over host memory: what it writes has the right form, and is never published."""

from __future__ import annotations

import copy
import ctypes
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from benchmarks import cache, charts, report, schema
from benchmarks.gpu import NAMES, results, tables
from benchmarks.gpu.loader import LOADERS
from benchmarks.gpu.proof import ProofError, prove
from benchmarks.gpu.raw import Job, opened
from benchmarks.gpu.rounds import rate
from benchmarks.gpu.sizes import TINY_SIZES
from secure_loader.bench.measure import MeasurementError
from secure_loader.core.device import abi
from secure_loader.core.device.batch import Batch, Chunk
from secure_loader.errors import AuthenticationError

from . import gpu_stand_in
from .gpu_stand_in import StandIn, StandInDriver

BENCH = "tests.integration.bench.gpu_stand_in:make"
OTHERS = {"fastsafetensors": "fastsafetensors", "instanttensor": "instanttensor", "runai": "runai_model_streamer"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of results, what was printed, and the folder of data."""
    folder = tmp_path_factory.mktemp("gpu")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--bench", BENCH, "--size", "tiny", "--out", folder / "results"],
        env=os.environ | {"SECURE_LOADER_BENCH_DIR": str(folder / "data")},
        cwd=cache.ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "results", done.stdout, folder / "data"


@pytest.fixture(scope="module")
def documents(run):
    return {name: json.loads((run[0] / f"{name}.json").read_text()) for name in NAMES}


pytestmark = pytest.mark.slow


def test_every_stage_wrote_what_fits_the_schema_and_says_that_it_was_no_gpu(documents):
    for name, document in documents.items():
        schema.check(document)
        assert document["suite"] == name
        assert document["size"] == "tiny"
        assert document["gpu"]["stand_in"] is True
        assert document["failure"] is None, name
        assert document["cases"] or document["skipped"], name


def test_what_is_ours_ran_and_its_bytes_were_looked_at(documents):
    seen = set()
    for name, document in documents.items():
        for case, found in document["cases"].items():
            for entry in found["entries"].values():
                if entry["ours"]:
                    assert entry["failure"] is None, (name, case, entry["label"])
                    assert entry["bytes_checked"]
                    seen.add(name)
    assert seen >= set(NAMES) - {"gpu-copies", "gpu-sanitizer"}


def test_each_stage_measured_what_it_is_for(documents):
    cases = {name: set(document["cases"]) for name, document in documents.items()}
    assert cases["gpu-copies"] == {f"copy-{size}" for size in TINY_SIZES.copies}
    wanted = {"aes256", "aes128", "aes256-pieces", "aes128-pieces", "grids", "constant-time"}
    assert cases["gpu-kernels"] == wanted
    names = [what.name for what in TINY_SIZES.loads]
    files = {f"{place}-{name}" for place in ("memory", "disk") for name in names}
    assert cases["gpu-pipeline"] == {"pinned", *files}
    assert cases["gpu-load"] == {"memory", *files}
    start = documents["gpu-cold"]["cases"]["start"]["entries"]
    assert set(start) == {"cubin", "nvrtc", "nvrtc-cached", "triton", "triton-cached", "safetensors"}
    assert all(entry["parameters"]["steady_seconds"] > 0 for entry in start.values())
    kernels = documents["gpu-kernels"]["cases"]
    assert {"open", "ctr", "seal", "finish", "expand", "open-odd", "open-one", "batch"} <= set(
        kernels["aes256"]["entries"]
    )
    assert len(kernels["constant-time"]["entries"]) == 9
    assert kernels["constant-time"]["entries"]["random-random"]["parameters"]["spread"] >= 1


def test_loaders_that_are_missing_have_a_reason_and_fail_nobody(documents):
    entries = documents["gpu-load"]["cases"][f"disk-{TINY_SIZES.loads[0].name}"]["entries"]
    assert set(entries) == set(LOADERS)
    for name, module in OTHERS.items():
        if entries[name]["failure"] is not None and entries[name]["failure"].startswith("ModuleNotFoundError"):
            assert module in entries[name]["failure"]
    assert entries["safetensors"]["failure"] is None


def test_memory_is_that_of_one_load_in_a_fresh_process(documents):
    entry = documents["gpu-load"]["cases"]["memory"]["entries"]["secure"]
    assert entry["parameters"]["host_bytes"] >= entry["parameters"]["anonymous_bytes"] >= 0
    assert len(entry["samples"]) == 1


def test_results_name_no_place_and_nobody(run, documents):
    text = json.dumps(documents)
    for place in (cache.ROOT, run[0].parent, os.uname().nodename):
        assert f"{place}/" not in text
    assert not list(run[2].glob("gpu-*")), "files that were loaded are gone"


def test_goals_are_the_arithmetic_of_what_was_measured(documents):
    rows = {goal["what"]: goal for document in documents.values() for goal in document["goals"]}
    kernel = documents["gpu-kernels"]["cases"]["aes256"]["entries"]["open"]
    fused = rows["fused GCM kernel, AES-256, 1 GiB"]
    assert fused["measured"] == pytest.approx(rate(kernel))
    assert fused["measured"] == pytest.approx(TINY_SIZES.kernel / 1e9 / kernel["median_seconds"]["run"])
    assert fused["met"] is (fused["measured"] >= 150)
    pinned = documents["gpu-pipeline"]["cases"]["pinned"]["entries"]
    share = rows["from pinned memory to verified plaintext, 1 GiB"]
    medians = {name: entry["median_seconds"]["run"] for name, entry in pinned.items()}
    assert share["measured"] == pytest.approx(medians["bare"] / medians["secure"])
    assert share["met"] is (share["measured"] >= 0.97)
    larger = rows["encrypted file in memory to the device, 4.0 GB"]
    assert (larger["measured"], larger["met"]) == (None, None), "not measured in this size, and so left blank"
    assert larger["reason"]


def test_figures_of_a_stand_in_are_never_among_the_results(documents, tmp_path):
    before = sorted(results.RESULTS.iterdir())
    link = tmp_path / "link"
    link.symlink_to(results.RESULTS)
    for document in documents.values():
        for folder in (results.RESULTS, link, results.RESULTS / ".." / "results"):
            for size in ("tiny", "full"):
                with pytest.raises(results.NotPublishedError):
                    results.write(document | {"size": size}, folder)
        other = copy.deepcopy(document)
        other["gpu"]["stand_in"] = False
        with pytest.raises(results.NotPublishedError):
            results.write(other, results.RESULTS)  # a GPU, but not in earnest
        del other["gpu"]["stand_in"]
        with pytest.raises(schema.SchemaError, match="not said"):
            results.write(other, tmp_path)
    assert sorted(results.RESULTS.iterdir()) == before


def test_published_results_are_those_of_gpus():
    for name, document in tables.of_gpu(schema.read(results.RESULTS)).items():
        assert document["gpu"]["stand_in"] is False, name
        assert document["size"] == "full"


def test_tables_and_a_chart_are_made_of_them(documents, tmp_path):
    for name in ("gpu-goals", "gpu-machine", *NAMES):
        table = report.table(name, documents)
        assert all(not line or (line.startswith("| ") and line.endswith(" |")) for line in table.splitlines()), name
    assert "150-210" in report.table("gpu-kernels", documents)
    assert "≥ 0.97" in report.table("gpu-goals", documents)
    with pytest.raises(report.ReportError, match="make gpu"):
        report.table("gpu-goals", {})
    with pytest.raises(report.ReportError, match="make bench"):
        report.table("goals", documents)  # those of the other command are not mixed up with these
    pytest.importorskip("matplotlib")
    assert [path.name for path in charts.draw(documents, tmp_path)] == ["gpu.png"]


# --- what the stages stand on -------------------------------------------------------------------------------------


def test_raw_launches_are_those_of_the_real_kernels(tmp_path):
    from tests.unit.device import shim

    if shim.compiler() is None:
        pytest.skip("no g++: the kernels cannot be compiled for the CPU")
    import torch

    kernels = shim.Shim(shim.build(into=tmp_path))
    calls = {
        "sl_expand_keys": kernels.expand,
        "sl_gcm_open": kernels.open,
        "sl_gcm_seal": kernels.seal,
        "sl_ctr": kernels.ctr,
        "sl_gcm_finish": kernels.finish,
        "sl_gcm_tag": kernels.tag,
    }

    class Real(StandInDriver):
        def launch(self, function, blocks, threads, stream, *args):
            assert threads == abi.THREADS
            calls[function](*[a if isinstance(a, int) else a.value for a in args])

    memory = torch.arange(70_000, dtype=torch.int64).view(torch.uint8)[:300_000].clone()
    plain, start = memory.clone(), memory.data_ptr()
    sizes = (65_536, 65_537, 0, 100_001)
    chunks = [
        Chunk(start + sum(sizes[:n]) + n, size, n % 2, bytes([n] * 12), bytes(16)) for n, size in enumerate(sizes)
    ]
    with opened(StandIn(Real())) as raw:
        job = Job(raw, chunks, [bytes(range(32)), bytes(range(16))])
        job.seal()
        assert not torch.equal(memory, plain)
        sealed = memory.clone()
        job.open()
        assert torch.equal(memory, plain)
        memory.copy_(sealed)
        job.do(lambda: job.segments_by("sl_ctr"))
        assert torch.equal(memory, plain)
        memory.copy_(sealed)
        memory[70_000] ^= 1
        with pytest.raises(MeasurementError, match="1 of 4"):
            job.open()


class _Faulty:
    """Kernels with one fault in front of good ones."""

    def __init__(self, fault: str, driver: StandInDriver) -> None:
        self._good, self._fault = StandIn(driver).kernels("auto"), fault

    def open(self, batch: Batch, stream: int) -> _Faulty:
        self._batch = batch
        last = batch.chunks[-1]
        after = last.address + last.nbytes
        try:
            self._good.open(batch, stream).wait()
            self._refused = False
        except AuthenticationError:
            self._refused = True
        if self._fault == "overrun":
            ctypes.memset(after, 0, 1)
        if self._fault == "wrong" and not self._refused:
            ctypes.memset(after - 1, ctypes.string_at(after - 1, 1)[0] ^ 1, 1)
        if self._fault == "unwiped" and self._refused:
            ctypes.memset(after - 1, 7, 1)
        return self

    def wait(self) -> None:
        if self._refused and self._fault != "credulous":
            raise AuthenticationError("refused")


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("overrun", "outside of all chunks"),
        ("wrong", "opened: .* in a chunk"),
        ("unwiped", "refused .* in a chunk"),
        ("credulous", "nobody noticed"),
    ],
)
def test_the_proof_sees_faults(fault, why):
    driver = StandInDriver()
    prove(driver, 0, StandIn(driver).kernels("auto"), 100_000)
    with pytest.raises(ProofError, match=why):
        prove(driver, 0, _Faulty(fault, driver), 100_000)


def test_the_stand_in_says_what_it_is():
    assert StandIn.stand_in is True
    assert gpu_stand_in.make().stand_in is True
