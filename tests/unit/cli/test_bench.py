"""bench: the real command on small models, in processes of its own, as it has to be. No figure is looked at."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import secure_loader
from secure_loader.bench import report
from secure_loader.bench.measure import Result, Sample
from secure_loader.bench.subject import check_memory, look
from secure_loader.config import LoaderConfig
from secure_loader.errors import OutOfMemoryError
from tests.models import tiny_model

ROOT = Path(secure_loader.__file__).parents[1]
RUN = "import sys; sys.modules |= dict.fromkeys({without!r}); from secure_loader.cli import main; sys.exit(main())"


@pytest.fixture
def bench(command, home, tmp_path):
    """Run ``bench`` in ``tmp_path``, without torch (whose import takes seconds) unless ``without`` says otherwise."""

    def run(*words, code=0, without=("torch",)):
        done = subprocess.run(
            [sys.executable, "-c", RUN.format(without=without), "bench", *map(str, words)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, (done.stdout, done.stderr)
        assert not list(tmp_path.glob(".*bench*"))
        return done

    return run


def document(done):
    assert done.stderr == ""
    return json.loads(done.stdout)


def error(done):
    return json.loads(done.stderr.splitlines()[-1])["error"]


def checksums(results):
    return {name: {s["checksum"] for s in result["samples"]} for name, result in results["raw"].items()}


def test_a_plain_folder_with_torch(bench, home, tmp_path):
    model = tiny_model(tmp_path / "tiny", shards=2)
    before = sorted(p.name for p in model.iterdir())
    doc = document(bench("tiny", "--repeat", 2, "--cold", "--json", without=()))
    assert (doc["temporary_copy"], doc["floor_reads"], doc["framework"]) == (True, "plain", "torch")
    assert (doc["weight_files"], doc["tensor_bytes"]) == (2, look(model).nbytes)
    assert doc["not_measured"] == {}
    names = ["secure", "floor", "safetensors", "safetensors-mapped", "cryptotensors"]
    for results in (doc["load"], doc["cold"]):
        assert [line["name"] for line in results["summary"]] == names
        assert [line["failure"] for line in results["summary"]] == [None] * len(names)
        assert len({frozenset(found) for found in checksums(results).values()}) == 1
        assert {len(result["samples"]) for result in results["raw"].values()} == {2}
    assert [line["name"] for line in doc["row"]["summary"]] == ["secure", "safetensors", "cryptotensors"]
    assert len({frozenset(found) for found in checksums(doc["row"]).values()}) == 1
    assert {s["evicted"][0] for r in doc["cold"]["raw"].values() for s in r["samples"]} == {"fadvise"}
    assert doc["machine"]["packages"]["torch"]
    # Neither the model nor the user's own home has learned anything of it.
    assert sorted(p.name for p in model.iterdir()) == before
    assert not home.exists()


def test_the_table(bench, model):
    done = bench(model, "--repeat", 1)
    for part in (
        "4 tensors, 33.9 kB, in 2 weight files",
        "throw-away keys",
        "huge pages: ",
        "tensors of numpy",
        "load all tensors, files in the page cache",
        "one row of embed.weight (25.6 kB)",
    ):
        assert part in done.stdout
    for label in ("secure_loader, encrypted", "floor: plain pread, ", "safetensors, owned", "cryptotensors, encrypted"):
        assert re.search(rf"^  {label}.* \d+\.\d\d +\d+\.\d\d +\d+\.\d\d ", done.stdout, re.MULTILINE), label
    assert "round 1: secure: open" in done.stderr
    assert bench(model, "--repeat", 1, "-q").stderr == ""


def test_an_encrypted_folder_alone(bench, encrypted):
    done = bench(encrypted, "--repeat", 1)
    assert "floor: pread of the ciphertext" in done.stdout
    assert "not measured: safetensors, cryptotensors: needs the model in clear" in done.stdout
    assert "throw-away" not in done.stdout + done.stderr


def test_an_encrypted_folder_beside_the_plain_one(bench, encrypted, model, tmp_path):
    (tmp_path / "work").mkdir()
    doc = document(bench(encrypted, "--plain", model, "--work", "work", "--repeat", 1, "--json"))
    assert (doc["temporary_copy"], doc["floor_reads"], doc["framework"]) == (False, "plain", "numpy")
    assert [line["name"] for line in doc["load"]["summary"]] == ["secure", "floor", "safetensors", "cryptotensors"]
    assert len({frozenset(found) for found in checksums(doc["load"]).values()}) == 1
    assert list((tmp_path / "work").iterdir()) == []


def test_single_files(bench, encrypted, model, tmp_path):
    plain, secure = model / "model-00002-of-00002.safetensors", encrypted / "model.secure-00002-of-00002.safetensors"
    doc = document(bench(secure, "--plain", plain, "--repeat", 1, "--json"))
    assert (doc["tensors"], doc["temporary_copy"]) == (3, False)
    assert len({frozenset(found) for found in checksums(doc["load"]).values()}) == 1
    doc = document(bench(plain, "--repeat", 1, "--json"))
    assert (doc["tensors"], doc["temporary_copy"]) == (3, True)
    assert len({frozenset(found) for found in checksums(doc["load"]).values()}) == 1
    assert doc["row"]["tensor"] == "layer.weight"


def test_clear_and_scalar_tensors(bench, cli, tmp_path):
    (tmp_path / "one").mkdir()
    tensors = {"scalar": np.array(1.5, "f4"), "none": np.zeros((0, 3), "f4"), "odd": np.arange(7, dtype="u1")}
    save_file(tensors | {"big": np.ones((300, 300), "f4")}, tmp_path / "one" / "model.safetensors")
    cli("keygen", "alice")
    cli("encrypt", "one", "enc", "--exclude", "big")
    doc = document(bench("enc", "--plain", "one", "--repeat", 1, "--json"))
    assert len({frozenset(found) for found in checksums(doc["load"]).values()}) == 1


@pytest.mark.parametrize("words", [("nowhere",), ("model", "--plain", "nowhere"), ("model", "--work", "nowhere")])
def test_wrong_paths(bench, model, words):
    assert error(bench(*words, "--json", code=7))["type"] == "MissingFileError"


def test_nothing_to_load(bench, tmp_path):
    (tmp_path / "empty").mkdir()
    assert error(bench("empty", "--json", code=6))["type"] == "FormatError"


@pytest.mark.parametrize("n", ["0", "-1", "x", "1001"])
def test_wrong_counts(cli, n):
    assert "--repeat" in cli("bench", "model", "--repeat", n, code=2).err


def test_keys_and_trust_are_the_users(bench, encrypted, home, tmp_path):
    shutil.move(home / "keys" / "alice.enc.jwk", tmp_path / "elsewhere.jwk")
    assert error(bench(encrypted, "--json", code=5))["type"] == "KeyAccessError"
    assert bench(encrypted, "--repeat", 1, "--keys", tmp_path / "elsewhere.jwk").stdout
    shutil.move(home / "trust" / "alice.json", tmp_path / "alice.json")
    assert error(bench(encrypted, "--json", code=3))["type"] == "UntrustedSignerError"
    words = ("--keys", tmp_path / "elsewhere.jwk", "--trust", tmp_path / "alice.json")
    assert bench(encrypted, "--repeat", 1, *words).stdout


def test_a_key_is_no_argument(bench, encrypted):
    key = "0123456789abcdef" * 4
    done = bench(encrypted, "--keys", key, code=2)
    assert key not in done.stdout + done.stderr


def test_a_tampered_model_is_refused(bench, encrypted):
    file = encrypted / "model.secure-00001-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    refused = error(bench(encrypted, "--json", code=3))
    assert (refused["type"], refused["tensor"]) == ("AuthenticationError", "embed.weight")


def test_plain_must_be_the_same_model(bench, encrypted, model, tmp_path):
    assert "is plain itself" in error(bench(model, "--plain", model, "--json", code=2))["message"]
    assert "is encrypted" in error(bench(encrypted, "--plain", encrypted, "--json", code=2))["message"]
    shard = model / "model-00001-of-00002.safetensors"
    tensors = load_file(shard)
    tensors["embed.weight"][7, 7] += 1
    save_file(tensors, shard)
    assert "other bytes" in error(bench(encrypted, "--plain", model, "--repeat", 1, "--json", code=2))["message"]
    save_file({"embed.weight": np.zeros((2, 2), "f4")}, shard)
    assert "same tensors" in error(bench(encrypted, "--plain", model, "--json", code=2))["message"]


def test_room_on_the_disk_is_looked_at_first(bench, tmp_path):
    free = shutil.disk_usage(tmp_path).free
    header = json.dumps({"x": {"dtype": "U8", "shape": [free], "data_offsets": [0, free]}}).encode()
    huge = tmp_path / "huge.safetensors"
    with huge.open("wb") as f:
        f.write(len(header).to_bytes(8, "little") + header)
        f.truncate(8 + len(header) + free)  # a hole: it takes no room
    before = sorted(tmp_path.iterdir())
    refused = error(bench("huge.safetensors", "--json", code=7))
    assert refused["type"] == "WriteError"
    assert "free" in refused["message"]
    assert "--work" in refused["hint"]
    assert sorted(tmp_path.iterdir()) == before


def test_room_in_memory_is_looked_at_first():
    check_memory(1 << 20)
    with pytest.raises(OutOfMemoryError, match="available"):
        check_memory(1 << 60)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to(bench, model, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    assert error(bench(model, "--work", "locked", "--json", code=7))["type"] == "WriteError"


def test_without_a_framework(bench, model):
    refused = error(bench(model, "--json", code=1, without=("torch", "numpy")))
    assert (refused["type"], refused["hint"]) == ("DeviceError", "pip install torch, or numpy")


def test_without_the_other_packages(bench, model):
    doc = document(bench(model, "--repeat", 1, "--json", without=("torch", "safetensors", "cryptotensors")))
    assert doc["not_measured"].keys() == {"safetensors", "cryptotensors"}
    assert [line["name"] for line in doc["load"]["summary"]] == ["secure", "floor"]


def test_bfloat16_without_torch(bench, tmp_path):
    tiny_model(tmp_path / "tiny")
    refused = error(bench("tiny", "--json", code=1, without=("torch", "ml_dtypes")))
    assert refused["type"] == "DeviceError"
    assert "BF16" in refused["message"]


@pytest.mark.parametrize("everybody", [True, False], ids=["the terminal", "the command alone"])
@pytest.mark.parametrize("moment", [b"encrypting a copy with throw", b"round 1: secure"])
def test_ctrl_c_leaves_nothing(home, model, tmp_path, everybody, moment):
    save_file({"big": np.zeros((6000, 6000), "f4")}, model / "more.safetensors")
    with subprocess.Popen(
        [sys.executable, "-c", RUN.format(without=("torch",)), "bench", str(model), "--repeat", "1000"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as running:
        try:
            for line in running.stderr:
                if line.startswith(moment):
                    break
            assert list(tmp_path.glob(".model.bench-*"))
            (os.killpg if everybody else os.kill)(running.pid, signal.SIGINT)
            _, rest = running.communicate(timeout=30)
        finally:
            running.kill()
        assert running.returncode == 130
    assert rest.endswith(b"secure-loader: interrupted\n")
    assert not list(tmp_path.glob(".*bench*"))
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:  # the group is empty as soon as init has buried who was killed
        try:
            os.killpg(running.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("a process is left")


def test_work_done_apart():
    code = """
        import os, pytest
        from secure_loader.bench.apart import apart
        from secure_loader.errors import AuthenticationError, OutOfMemoryError

        def fail(error):
            raise error

        assert apart(os.getpid) != os.getpid()
        with pytest.raises(AuthenticationError, match="wrong") as caught:
            apart(lambda: fail(AuthenticationError("wrong", tensor="x")))
        assert caught.value.tensor == "x"
        for error, kind in (
            (FileNotFoundError(2, "gone"), FileNotFoundError), (MemoryError(), OutOfMemoryError), (KeyError("x"), RuntimeError)
        ):
            with pytest.raises(kind):
                apart(lambda: fail(error))
        with pytest.raises(OutOfMemoryError, match="killed"):
            apart(lambda: os.kill(os.getpid(), 9))
        with pytest.raises(RuntimeError, match="ended with 3"):
            apart(lambda: os._exit(3))
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)], env=environment, check=True, timeout=60
    )


def test_importing_the_package_imports_no_measuring():
    code = (
        "import sys, secure_loader.cli.arguments as a; a.make_parser(); sys.exit('secure_loader.bench' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, timeout=60)


def sample(seconds, anon=0, **phases):
    peak = {"anon": anon, "file": 0, "shmem": 0}
    times = phases | {"load": seconds}
    return Sample(times, times, {}, peak, {"read_calls": 0, "disk": 0}, "x")


def test_lines_are_ratios_of_medians():
    results = {
        "secure": Result("secure", [sample(t, open=0.5) for t in (3, 2, 100)], memory=sample(9, anon=1200)),
        "floor": Result("floor", [sample(t) for t in (1, 2, 2)]),
        "safetensors": Result("safetensors", [sample(6)] * 3, memory=sample(9, anon=900)),
        "cryptotensors": Result("cryptotensors", failure="no"),
    }
    ours, floor, owned, peer = report.load_lines(results, 1000)
    assert (ours.opening, ours.seconds, ours.bytes_per_second) == (0.5, 3, 1000 / 3)
    assert (ours.over_floor, ours.over_safetensors, ours.memory_above) == (1.5, 0.5, 200)
    assert (floor.opening, floor.over_floor, floor.memory_above) == (None, 1, None)
    assert owned.memory_above == 0
    assert (peer.failure, peer.seconds) == ("no", None)


GOOD = {
    "cores": 2,
    "cpu": "some",
    "cpu_flags": ["aes"],
    "huge_pages": {"enabled": "madvise"},
    "load_average": 0.1,
}


@pytest.mark.parametrize(
    ("facts", "config", "others", "said"),
    [
        ({}, {}, {}, None),
        ({"huge_pages": {"enabled": None}}, {}, {}, None),
        ({"huge_pages": {"enabled": "never"}}, {}, {}, "Huge pages are switched off"),
        ({"cores": 1}, {}, {"threads": 1}, "one processor"),
        ({"cores": 8}, {}, {}, "2 of 8 processors"),
        ({"cpu_flags": []}, {}, {}, "no AES instructions"),
        ({"cpu_flags": []}, {}, {"algorithm": "chacha20poly1305"}, None),
        ({"cpu_flags": [], "cpu": "unknown"}, {}, {}, None),
        ({}, {}, {"resident": 0.4}, "Only 40%"),
        ({}, {}, {"resident": None}, None),
        ({}, {"page_cache": "drop"}, {"resident": 0.0}, "page_cache is 'drop'"),
        ({}, {"integrity": "full"}, {}, "integrity is 'full'"),
        ({}, {}, {"whole_tensors": True}, "--format-version 2"),
        ({"load_average": 1.5}, {}, {}, "load average 1.5"),
        ({}, {}, {"secure": Result("secure", [sample(1), sample(2)])}, "between 1.000 and 2.000 s"),
    ],
)
def test_hints_follow_facts(facts, config, others, said):
    usual = {"threads": 2, "algorithm": "aes256gcm", "whole_tensors": False, "resident": 1.0}
    usual["secure"] = Result("secure", [sample(1), sample(1.2)])
    found = report.hints(GOOD | facts, LoaderConfig(**config), **(usual | others))
    assert len(found) == (said is not None)
    assert said is None or said in found[0]
