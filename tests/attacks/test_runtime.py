"""Attacks 57 to 67: things go wrong half-way. Nothing half-done is seen, nothing is left, nothing is said too much."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import warnings
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from secure_loader import decrypt_model, encrypt_model, rewrap_model, verify
from secure_loader.core import archive, pipeline
from secure_loader.core.pool import set_threads
from secure_loader.errors import (
    AuthenticationError,
    ConfigError,
    KeyAccessError,
    OutOfMemoryError,
    ReadError,
    WriteError,
)
from tests.attacks.kit import (
    CHUNK,
    KEY,
    MALLORY_KEY,
    SIGN,
    Victim,
    arrays,
    assert_no_secret,
    build_file,
    build_folder,
    build_source,
    flip,
    master,
    refused,
    shard,
    tensor_offset,
    trust,
)

SEAL = {"key": KEY, "signing_key": SIGN, "model_id": "demo/model", "chunk_size": CHUNK}


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(params=[1, 4])
def threads(request):
    set_threads(request.param)
    yield request.param
    set_threads(None)


@pytest.fixture
def small_jobs(monkeypatch):
    """One chunk a job, so that a tensor of four chunks is spread over the pool."""
    monkeypatch.setattr(pipeline, "JOB_BYTES", CHUNK)


@pytest.mark.parametrize("name", ["big", "clear"])
@pytest.mark.parametrize("chunk", [0, 2, 3])
def test_a57_an_error_after_some_chunks(tmp_path, threads, small_jobs, name, chunk):
    path = build_file(tmp_path / "x.safetensors")
    flip(path, tensor_offset(path, name) + chunk * CHUNK)
    with Victim(clear_tensors="copy").open(path) as f:
        out = bytearray(b"\xaa" * 50 * 4096)
        with refused(AuthenticationError, f"tensor {name!r}", place=path):
            f.file.read_into(name, memoryview(out))
        assert not any(out)


def test_a57_a_read_error_after_some_chunks(tmp_path, threads, small_jobs, monkeypatch):
    path = build_file(tmp_path / "x.safetensors")
    with Victim().open(path) as f:
        f.file.unlock()
        bad = tensor_offset(path, "big") + 2 * CHUNK
        real = os.preadv

        def fails(fd, buffers, offset):
            if offset == bad:
                raise OSError(errno.EIO, "Input/output error")
            return real(fd, buffers, offset)

        monkeypatch.setattr("secure_loader.core.source.os.preadv", fails)
        out = bytearray(b"\xaa" * 50 * 4096)
        with refused(ReadError, "Input/output error", "tensor 'big'", place=path):
            f.file.read_into("big", memoryview(out))
        assert not any(out)


def test_a58_one_bad_tensor_of_many(tmp_path, threads):
    path = build_file(tmp_path / "x.safetensors")
    flip(path, tensor_offset(path, "small"))
    with Victim().open(path) as f, refused(AuthenticationError, "tensor 'small'", place=path):
        f.get_tensors()


def test_a58_one_bad_shard_of_many(tmp_path):
    folder = build_folder(tmp_path / "model")
    bad = shard(folder, 2)
    flip(bad, bad.stat().st_size - 1)
    with refused(AuthenticationError, "layer2", place=bad):
        Victim().load_folder(folder)
    with refused(AuthenticationError, "layer2", place=bad):
        decrypt_model(folder, tmp_path / "out", keys=KEY, trust=trust())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "model-plain"], "no half model in clear"


@pytest.mark.parametrize("where", ["caller", "helper"])
def test_a60_interrupted_in_a_job(tmp_path, small_jobs, monkeypatch, where):
    set_threads(3)
    path = build_file(tmp_path / "x.safetensors")
    real, main = pipeline.open_into, threading.main_thread()
    both = threading.Barrier(2, timeout=20)
    met = []

    def interrupts(cipher, nonce, sealed, out):
        real(cipher, nonce, sealed, out)
        mine = threading.current_thread() is main
        if len(met) < 2:
            met.append(mine)
            both.wait()
        if mine == (where == "caller"):
            raise KeyboardInterrupt
        time.sleep(0.05)

    try:
        with Victim().open(path) as f:
            f.file.unlock()
            monkeypatch.setattr(pipeline, "open_into", interrupts)
            out = bytearray(b"\xaa" * 50 * 4096)
            with pytest.raises(KeyboardInterrupt) as caught:
                f.file.read_into("big", memoryview(out))
            caught.value.__traceback__ = None
            assert not any(out)
            time.sleep(0.2)
            assert not any(out), "a straggler wrote after the wiping"
    finally:
        set_threads(None)


@pytest.mark.usefixtures("no_collections")
def test_a60_a_real_interrupt_while_waiting(tmp_path, small_jobs, monkeypatch):
    set_threads(4)
    path = build_file(tmp_path / "x.safetensors")
    real, main = pipeline.open_into, threading.main_thread()
    helping = threading.Event()

    def slow(cipher, nonce, sealed, out):
        if threading.current_thread() is main:
            helping.wait(20)
        else:
            helping.set()
            time.sleep(0.1)
            signal.pthread_kill(main.ident, signal.SIGINT)
            time.sleep(0.2)
        real(cipher, nonce, sealed, out)

    try:
        with Victim().open(path) as f:
            f.file.unlock()
            monkeypatch.setattr(pipeline, "open_into", slow)
            out = bytearray(b"\xaa" * 50 * 4096)
            with pytest.raises(KeyboardInterrupt) as caught:
                f.file.read_into("big", memoryview(out))
            caught.value.__traceback__ = None
            assert not any(out)
    finally:
        set_threads(None)


def test_a60_keys_go_with_the_file(tmp_path):
    import gc

    path = build_file(tmp_path / "x.safetensors")
    f = Victim().open(path)
    f.get_tensor("big")
    secrets = list(f.file._deks.values())
    views = [s.reveal() for s in secrets]
    assert all(any(v) for v in views)
    del secrets
    with f:
        pass
    del f
    gc.collect()
    assert not any(any(v) for v in views), "DEKs are wiped when the file closes"


def test_a60_an_interrupted_encryption_leaves_nothing_under_the_name(tmp_path, monkeypatch):
    source = build_source(tmp_path / "src")
    before = snapshot(source)
    from secure_loader.core import output

    calls = iter(range(1000))
    real = output.pwrite_all

    def interrupts(fd, data, offset):
        if next(calls) == 5:
            raise KeyboardInterrupt
        real(fd, data, offset)

    monkeypatch.setattr(output, "pwrite_all", interrupts)
    with pytest.raises(KeyboardInterrupt):
        encrypt_model(source, tmp_path / "dst", **SEAL)
    assert not (tmp_path / "dst").exists()
    assert snapshot(source) == before
    assert not list((tmp_path / ".dst.partial").glob(".*tmp*"))


MEASURE = """
import resource, sys
sys.path[:0] = {path!r}
from secure_loader import *
from tests.attacks.kit import *
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
from secure_loader.core.pool import set_threads
set_threads(2)
"""


def measured(code: str, *args: object) -> int:
    """Bytes by which a piece of code raised the peak of memory; it prints them."""
    text = MEASURE.format(path=[p for p in sys.path if p]) + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", text, *map(str, args)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


SIZE = 192 << 20


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large") / "src"
    folder.mkdir()
    save_file({"big": np.zeros(SIZE, dtype=np.uint8)}, folder / "model.safetensors")
    encrypt_model(folder, folder.parent / "enc", key=KEY, signing_key=SIGN)
    yield folder.parent
    import shutil

    shutil.rmtree(folder.parent)


def test_a61_encrypting_takes_bounded_memory(large, tmp_path):
    code = """
        before = peak()
        encrypt_model(sys.argv[1], sys.argv[2], key=KEY, signing_key=SIGN)
        print(peak() - before)
    """
    assert measured(code, large / "src", tmp_path / "dst") < 64 << 20


def test_a61_decrypting_a_folder_takes_bounded_memory(large, tmp_path):
    code = """
        before = peak()
        decrypt_model(sys.argv[1], sys.argv[2], keys=KEY, trust=trust())
        print(peak() - before)
    """
    assert measured(code, large / "enc", tmp_path / "dst") < 64 << 20


def test_a61_loading_takes_the_tensor_and_little_more(large):
    code = """
        import numpy
        before = peak()
        with safe_open(sys.argv[1], "numpy", keys=KEY, trust=trust()) as f:
            tensor = f.get_tensor("big")
        assert not tensor.any()
        print(peak() - before - tensor.nbytes)
    """
    assert measured(code, large / "enc" / "model.secure.safetensors") < 48 << 20


def test_a61_a_slice_takes_its_chunks(large):
    code = """
        import numpy
        before = peak()
        with safe_open(sys.argv[1], "numpy", keys=KEY, trust=trust()) as f:
            part = f.get_slice("big")[100_000_000:100_000_010]
        assert not part.any()
        print(peak() - before)
    """
    assert measured(code, large / "enc" / "model.secure.safetensors") < 32 << 20


def test_a61_out_of_memory_surfaces(tmp_path, monkeypatch):
    path = build_file(tmp_path / "x.safetensors")
    with Victim().open(path) as f:
        real = archive.empty
        monkeypatch.setattr(archive, "empty", lambda fw, nbytes: real(fw, nbytes << 42))
        with refused(OutOfMemoryError, "not to be had"):
            f.get_tensor("big")


def limited_run(source: Path, target: Path, limit: int) -> subprocess.CompletedProcess:
    code = """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
        try:
            encrypt_model(sys.argv[1], sys.argv[2], **json.loads(sys.argv[4]), key=KEY, signing_key=SIGN)
        except SecureLoaderError as e:
            print(type(e).__name__, e, sep="|")
    """
    text = MEASURE.format(path=[p for p in sys.path if p]) + textwrap.dedent(code)
    options = json.dumps({"model_id": "demo/model", "chunk_size": CHUNK})
    command = [sys.executable, "-c", text, str(source), str(target), str(limit), options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


def test_a62_a_file_that_may_not_grow(tmp_path):
    source = build_source(tmp_path / "src")
    before = snapshot(source)
    done = limited_run(source, tmp_path / "dst", 100_000)
    assert done.returncode == 0, done.stderr
    kind, _, text = done.stdout.partition("|")
    assert kind == "WriteError"
    assert "File too large" in text
    assert "free some space" in text
    assert str(tmp_path / ".dst.partial") in text
    assert not (tmp_path / "dst").exists()
    assert not list(tmp_path.glob("**/*.safetensors.tmp*")), "the half file is gone"
    assert snapshot(source) == before
    encrypt_model(source, tmp_path / "dst", **SEAL)
    assert verify(tmp_path / "dst", trust=trust(), full=True).tensors == 4


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("after", [0, 3, 9])
def test_a62_a_disk_that_is_full(tmp_path, monkeypatch, number, after):
    source = build_source(tmp_path / "src")
    before = snapshot(source)
    calls = iter(range(1000))
    real = os.pwrite

    def full(fd, data, offset):
        if next(calls) >= after:
            raise OSError(number, os.strerror(number))
        return real(fd, data, offset)

    with monkeypatch.context() as m:
        m.setattr("secure_loader.core.atomic.os.pwrite", full)
        with refused(WriteError, os.strerror(number), place=tmp_path):
            encrypt_model(source, tmp_path / "dst", **SEAL)
    assert snapshot(source) == before
    assert not (tmp_path / "dst").exists()
    assert encrypt_model(source, tmp_path / "dst", **SEAL).shards == 2


def test_a62_rewrapping_on_a_full_disk_keeps_the_model(tmp_path, monkeypatch):
    folder = build_folder(tmp_path / "model")
    before = snapshot(folder)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr("secure_loader.core.copying.os.copy_file_range", full)
        with refused(WriteError, "No space left", place=tmp_path):
            rewrap_model(folder, key=MALLORY_KEY, signing_key=SIGN, keys=KEY, trust=trust())
    assert snapshot(folder) == before
    assert Victim().load_folder(folder)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "model-plain"]


def test_a62_a_forced_replacement_that_fails_keeps_the_old_model(tmp_path, monkeypatch):
    folder = build_folder(tmp_path / "model")
    before = snapshot(folder)
    monkeypatch.setattr(
        "secure_loader.core.atomic.os.fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.EIO, "bad"))
    )
    with refused(WriteError, "bad", place=tmp_path):
        encrypt_model(tmp_path / "model-plain", folder, **SEAL, force=True)
    assert snapshot(folder) == before


KILLED = """
import os, signal
from secure_loader.core import atomic, writer
kill_after = int(sys.argv[3])
real = os.replace
renames = []
def replace(a, b):
    real(a, b)
    if str(b).endswith(".safetensors"):
        renames.append(b)
pwrites = []
def pwrite(fd, data, offset, real=os.pwrite):
    if len(renames) == kill_after and len(pwrites) > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if len(renames) == kill_after:
        pwrites.append(offset)
    return real(fd, data, offset)
atomic.os.replace, atomic.os.pwrite = replace, pwrite
encrypt_model(sys.argv[1], sys.argv[2], key=KEY, signing_key=SIGN, model_id="demo/model", chunk_size=CHUNK)
"""


def kill_while_encrypting(source: Path, target: Path, finished: int) -> None:
    text = MEASURE.format(path=[p for p in sys.path if p]) + KILLED
    command = [sys.executable, "-c", text, str(source), str(target), str(finished)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("finished", [0, 1, 2])
def test_a63_killed_while_encrypting_then_completed(tmp_path, finished):
    source = build_source(tmp_path / "src", shards=3)
    before = snapshot(source)
    kill_while_encrypting(source, tmp_path / "dst", finished)
    assert not (tmp_path / "dst").exists(), "nothing under the final name"
    partial = tmp_path / ".dst.partial"
    kept = {p.name: p.stat().st_ino for p in partial.glob("*.safetensors")}
    assert len(kept) == finished
    assert not (partial / "secure_manifest.json").exists()
    report = encrypt_model(source, tmp_path / "dst", **SEAL)
    assert report.reused_shards == finished
    assert {n: (tmp_path / "dst" / n).stat().st_ino for n in kept} == kept, "finished shards were not written again"
    assert not partial.exists()
    assert snapshot(source) == before
    files = sorted(p.name for p in (tmp_path / "dst").rglob("*"))
    assert [f for f in files if f.startswith(".")] == []
    assert verify(tmp_path / "dst", trust=trust(), full=True).tensors == 6
    found = Victim().load_folder(tmp_path / "dst")
    for path in source.glob("*.safetensors"):
        for name, array in load_file(path).items():
            assert (found[name] == array).all()


@pytest.mark.parametrize("change", ["key", "signer", "source", "settings"])
def test_a63_what_an_interrupted_run_left_is_not_mixed_with_another(tmp_path, change):
    source = build_source(tmp_path / "src", shards=2)
    kill_while_encrypting(source, tmp_path / "dst", 1)
    options = dict(SEAL)
    if change == "key":
        options["key"] = master(KEY.kid, 0x42)  # another key that goes by the same name
    elif change == "signer":
        from tests.attacks.kit import signing

        options["signing_key"] = signing(SIGN.kid, 0x43)
    elif change == "source":
        os.utime(shard(source, 1), ns=(1, 1))
    else:
        options["chunk_size"] = 2 * CHUNK
    report = encrypt_model(source, tmp_path / "dst", **options)
    assert report.reused_shards == 0
    victim = Victim(keys=(options["key"],), store=trust(options["signing_key"]))
    assert len(victim.load_folder(tmp_path / "dst")) == 4


def test_a63_a_half_file_in_the_hidden_folder_is_not_taken_for_a_shard(tmp_path):
    source = build_source(tmp_path / "src", shards=2)
    kill_while_encrypting(source, tmp_path / "dst", 1)
    (done,) = (tmp_path / ".dst.partial").glob("*.safetensors")
    os.truncate(done, done.stat().st_size - 1)
    assert encrypt_model(source, tmp_path / "dst", **SEAL).reused_shards == 0
    assert verify(tmp_path / "dst", trust=trust(), full=True).tensors == 4


@pytest.mark.parametrize("option", ["include", "exclude"])
@pytest.mark.parametrize("pattern", ["layer1.c", "Layer1.*", "", "layer1.a "])
def test_a65_a_pattern_that_matches_nothing(tmp_path, option, pattern):
    source = build_source(tmp_path / "src")
    with refused(ConfigError, f"pattern {pattern!r} matches no tensor", "layer1.a"):
        encrypt_model(source, tmp_path / "dst", **SEAL, **{option: ["layer1.a", pattern]})
    assert not (tmp_path / "dst").exists()


def test_a65_nothing_left_to_encrypt(tmp_path):
    with refused(ConfigError, "nothing is left to encrypt"):
        encrypt_model(build_source(tmp_path / "src"), tmp_path / "dst", **SEAL, exclude=["*"])


def test_a67_no_key_in_logs_reprs_errors_or_tracebacks(tmp_path, caplog):
    path = build_file(tmp_path / "x.safetensors")
    flip(path, tensor_offset(path, "big"))
    said = []
    with caplog.at_level(logging.DEBUG), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for keys, kind in (
            ((KEY,), AuthenticationError),
            ((master(KEY.kid, 0x12),), KeyAccessError),
            ((), KeyAccessError),
        ):
            victim = Victim(keys=keys)
            with victim.open(path) as f:
                said += [repr(x) for x in (victim.session, victim.ring, f, f.file, *keys, victim.session.config)]
                with pytest.raises(kind) as caught:
                    f.get_tensor("big")
                said += [repr(s) for s in (f.file._deks or {}).values()]
            shown = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
            said += ["".join(shown.format()), repr(caught.value), str(caught.value), repr(pickle.dumps(caught.value))]
            caught.value.__traceback__ = None
            caught.value.__context__ = None
            del shown
    said += [caplog.text, *(str(w.message) for w in warned)]
    text = "\n".join(said)
    assert "<Secret>" in text or "MasterKey" in text
    assert_no_secret(text)


def test_a67_no_key_in_what_is_written(tmp_path):
    folder = build_folder(tmp_path / "model")
    for name, data in snapshot(folder).items():
        assert_no_secret(name + data.decode("latin-1"))


def test_errors_cross_processes(tmp_path):
    path = build_file(tmp_path / "x.safetensors")
    flip(path, tensor_offset(path, "big"))
    with pytest.raises(AuthenticationError) as caught, Victim().open(path) as f:
        f.get_tensor("big")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.path, again.tensor) == (
        AuthenticationError,
        str(caught.value),
        str(path),
        "big",
    )
    caught.value.__traceback__ = None


def test_a_file_that_is_open_in_many_threads(tmp_path):
    path = build_file(tmp_path / "x.safetensors")
    expected = arrays()
    victim = Victim()
    errors: list[Exception] = []
    with victim.open(path) as f:

        def reader():
            try:
                for _ in range(20):
                    for name, array in expected.items():
                        assert (f.get_tensor(name) == array).all()
                        assert (f.get_slice(name)[1:3] == array[1:3]).all()
            except Exception as e:  # noqa: BLE001 - looked at below
                errors.append(e)

        readers = [threading.Thread(target=reader) for _ in range(6)]
        for r in readers:
            r.start()
        for r in readers:
            r.join()
    assert not errors
    assert len(victim.ring.asked) == 1
