"""Whatever goes wrong, wherever: a typed error, memory that holds nothing, nobody left at work, and the next load works."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from secure_loader.core.aead import ALGORITHMS
from secure_loader.core.device.device import Memory
from secure_loader.core.device.plan import Part
from secure_loader.core.pipeline import Options, SealedBytes, Wanted
from secure_loader.core.pool import set_threads
from secure_loader.core.secrets import Secret
from secure_loader.core.source import FileSource
from secure_loader.errors import AuthenticationError, DeviceError, OutOfMemoryError, ReadError

from .fake import no_memory
from .files import CHUNK, DEVICE, Bench, interrupted_at, same, session, write

KIB = 1 << 10
OPTIONS = {"device_buffer_bytes": 4 * 64 * KIB}


@pytest.fixture(autouse=True)
def four_threads():
    set_threads(4)
    yield
    set_threads(None)


def small() -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(7)
    sizes = {"first": 3 * CHUNK + 5, "clear": 70_001, "empty": 0, "one": 1, "last": 2 * CHUNK + 1}
    return {name: torch.from_numpy(rng.integers(1, 256, n, np.uint8)) for name, n in sizes.items()}


TENSORS = small()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for version in ("1", "2"):
        write(folder / version, TENSORS, version=version, clear=("clear",))
    return folder


def whole(f):
    return f.get_tensors()


def part(f):
    return {"part": f.get_slice("first")[CHUNK - 9 : 2 * CHUNK + 9]}


WAYS = {"whole": whole, "part": part}


def load(path, way, **settings):
    with session(**OPTIONS, **settings).open(path, device=DEVICE) as f:
        return WAYS[way](f)


def calls(path, monkeypatch, way, *, kernels, seed) -> int:
    """How many calls of the device a load makes when nothing goes wrong."""
    bench = Bench(monkeypatch, kernels=kernels, seed=seed, slot=64 * KIB)
    load(path, way)
    bench.check_calm()
    return len(bench.device.log)


@pytest.mark.parametrize("error", [DeviceError, OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernels", [True, False])
def test_every_call_of_the_device_fails_once(folder, monkeypatch, way, version, kernels, error):
    path, seed = folder / version, 1
    raised = 0
    for at in range(1, calls(path, monkeypatch, way, kernels=kernels, seed=seed) + 1):
        bench = Bench(monkeypatch, kernels=kernels, seed=seed, slot=64 * KIB, fail_at=(at,), error=error)
        try:
            result = load(path, way)
        except error as e:
            assert "as the test wants it" in str(e)  # noqa: PT017 - it may also succeed
            raised += 1
            bench.check_wiped()
        else:
            # Only a ring that could not grow goes on, and a load that took fewer calls this time.
            assert at > len(bench.device.log) or (error is OutOfMemoryError and bench.device.log[at - 1] == "pin")
            if way == "whole":
                assert same(result, TENSORS)
        bench.device.fail_at = ()
        if way == "whole" and at % 7 == 0:
            assert same(load(path, way), TENSORS)
    assert raised >= (10 if kernels else 5)


@pytest.mark.parametrize("way", WAYS)
def test_a_second_interruption_does_not_stop_the_wiping(folder, monkeypatch, way):
    path, seed = folder / "2", 3
    for at in range(1, calls(path, monkeypatch, way, kernels=True, seed=seed) - 4):
        for more in (1, 2, 5):
            fail_at = (at, at + more)
            bench = Bench(monkeypatch, seed=seed, slot=64 * KIB, fail_at=fail_at, error=KeyboardInterrupt)
            with pytest.raises(KeyboardInterrupt):
                load(path, way)
            bench.check_wiped()


def test_a_device_that_is_lost_for_good(folder, monkeypatch, caplog):
    bench = Bench(monkeypatch, slot=64 * KIB, fail_at=tuple(range(40, 4000)))
    with pytest.raises(DeviceError, match="as the test wants it"):
        load(folder / "2", "whole")
    assert [r.levelname for r in caplog.records if "could not be overwritten" in r.message] == ["ERROR"]
    assert bench.device.hosts_are_empty()


@pytest.mark.parametrize("batch", [0, 1, -1])
def test_a_kernel_that_fails_while_it_runs(folder, monkeypatch, batch):
    bench = Bench(monkeypatch, slot=64 * KIB)
    load(folder / "2", "whole")
    number = len(bench.kernels.batches)
    bench = Bench(monkeypatch, slot=64 * KIB, late_error=batch % number)
    with pytest.raises(DeviceError, match="while it ran"):
        load(folder / "2", "whole")
    bench.check_wiped()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("slot", [16 * KIB, 64 * KIB, 1 << 20])
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("name", ["first", "clear", "one", "last"])
def test_a_byte_that_was_changed(folder, tmp_path, monkeypatch, name, version, kernels, slot, seed):
    path = Path(shutil.copy(folder / version, tmp_path / "x"))
    with session().open(path) as f:
        info, start = f.get_tensor_info(name), f.file.header.body_start
    # The very last byte of the tensor, and so of its last chunk.
    with path.open("r+b") as file:
        file.seek(start + info.stop - 1)
        byte = file.read(1)[0]
        file.seek(start + info.stop - 1)
        file.write(bytes([byte ^ 0x80]))
    bench = Bench(monkeypatch, kernels=kernels, slot=slot, seed=seed)
    with pytest.raises(AuthenticationError) as caught:
        load(path, "whole")
    assert caught.value.path == str(path)
    assert caught.value.tensor == name or f"{name!r}" in caught.value.message or "one of" in caught.value.message
    bench.check_wiped()


@pytest.mark.parametrize("kernels", [True, False])
def test_the_tag_of_an_empty_tensor(folder, monkeypatch, kernels):
    """CryptoTensors seals those as well, in version 2."""
    key, iv = Secret(bytes(range(32))), bytes(12)
    tag = AESGCM(bytes(range(32))).encrypt(iv, b"", None)
    bench = Bench(monkeypatch, kernels=kernels)
    with FileSource(folder / "2") as source:
        for tags, good in ((tag, True), (tag[:-1] + b"?", False)):
            stored = SealedBytes(source, 8, 0, ALGORITHMS["aes256gcm"].cipher(key), CHUNK, iv, tags)
            part = Part(Wanted("empty", stored, None, 0, 0), key)
            if good:
                assert [len(owner) for owner in bench.engine.load([part], Options(), 128 * KIB)] == [0]
                continue
            with pytest.raises(AuthenticationError) as caught:
                bench.engine.load([part], Options(), 128 * KIB)
            assert (caught.value.path, caught.value.tensor) == (str(folder / "2"), "empty")
    bench.check_calm()


@pytest.mark.parametrize("page_cache", ["keep", "drop", "bypass"])
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("integrity", ["tags", "full"])
def test_a_file_that_shrinks_meanwhile(folder, tmp_path, monkeypatch, integrity, kernels, page_cache):
    path = Path(shutil.copy(folder / "2", tmp_path / "x"))
    bench = Bench(monkeypatch, kernels=kernels, slot=64 * KIB)
    settings = {"integrity": integrity, "page_cache": page_cache}
    with session(**OPTIONS, **settings).open(path, device=DEVICE) as f:
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(ReadError, match="truncated"):
            f.get_tensors()
    bench.check_wiped()


@pytest.mark.parametrize("error", [ReadError("x"), MemoryError("x"), KeyboardInterrupt()])
@pytest.mark.parametrize("version", ["1", "2"])
def test_every_read_fails_once(folder, monkeypatch, version, error):
    real, lock = FileSource.read_into, threading.Lock()
    for at in range(40):
        seen = []

        def read_into(self, buffers, offset, *, at=at, seen=seen):
            with lock:
                seen.append(offset)
                mine = len(seen)
            if mine == at + 1:
                # Half of it has come.
                real(self, [buffers[0][: len(buffers[0]) // 2]], offset)
                raise error
            real(self, buffers, offset)

        bench = Bench(monkeypatch, slot=64 * KIB, seed=at)
        with session(**OPTIONS).open(folder / version, device=DEVICE) as f:
            f.file.unlock()
            monkeypatch.setattr(FileSource, "read_into", read_into)
            try:
                f.get_tensors()
            except type(error):
                bench.check_wiped()
            else:
                assert len(seen) <= at
                break
            finally:
                monkeypatch.setattr(FileSource, "read_into", real)
    assert at > 5


def test_no_pinned_memory_at_all(folder, monkeypatch):
    bench = Bench(monkeypatch)
    no_memory(bench.device, after=0)
    with pytest.raises(OutOfMemoryError):
        load(folder / "2", "whole")
    bench.check_wiped()


@pytest.mark.parametrize("after", [1, 2])
def test_little_pinned_memory(folder, monkeypatch, after):
    bench = Bench(monkeypatch, slot=64 * KIB)
    no_memory(bench.device, after=after)
    assert same(load(folder / "2", "whole"), TENSORS)
    bench.check_calm()
    assert len(bench.device.hosts) == after


def test_memory_of_somebody_else_loses_the_part_that_was_to_be_filled(folder, monkeypatch):
    bench = Bench(monkeypatch, fail_at=(30,), error=KeyboardInterrupt, slot=16 * KIB)
    parameter = torch.full((3 * CHUNK,), 0x77, dtype=torch.uint8)
    memory = Memory(parameter, parameter.data_ptr(), parameter.nbytes)
    bench.device.adopt(parameter, memory)
    with session(**OPTIONS).open(folder / "2", device=DEVICE) as f, pytest.raises(KeyboardInterrupt):
        bench.engine.fill([(f.file.part("first", 9, 2 * CHUNK), memory, 100)], f.file.read_options, 128 * KIB)
    end = 100 + 2 * CHUNK - 9
    assert (parameter[:100] == 0x77).all()
    assert (parameter[end:] == 0x77).all()
    assert not parameter[100:end].any()
    bench.check_wiped()


def test_neighbouring_numbers_are_not_neighbouring_memory(folder, monkeypatch):
    """One parameter is filled up to byte n, the next one from byte n on: they are wiped apart."""
    bench = Bench(monkeypatch, fail_at=(40,), slot=16 * KIB)
    half, parts = CHUNK, []
    for start, at in ((0, 0), (CHUNK, half)):
        parameter = torch.full((2 * half,), 0x77, dtype=torch.uint8)
        memory = Memory(parameter, parameter.data_ptr(), parameter.nbytes)
        bench.device.adopt(parameter, memory)
        parts.append((start, memory, at, parameter))
    with session(**OPTIONS).open(folder / "2", device=DEVICE) as f:
        todo = [(f.file.part("first", start, start + CHUNK), memory, at) for start, memory, at, _ in parts]
        with pytest.raises(DeviceError):
            bench.engine.fill(todo, f.file.read_options, 64 * KIB)
    for _, _, at, parameter in parts:
        assert not parameter[at : at + half].any()
        assert int((parameter == 0x77).sum()) == half
    bench.check_wiped()


def test_when_no_thread_comes_to_help(folder, monkeypatch):
    from secure_loader.core.device import transfer

    asked = []
    monkeypatch.setattr(transfer, "submit", lambda work, n, *, waiting: asked.append(n) or 0)
    bench = Bench(monkeypatch, slot=16 * KIB)
    assert same(load(folder / "2", "whole"), TENSORS)
    bench.check_calm()
    assert any(asked)


def test_helpers_that_come_too_late_keep_nothing_in_sight(folder, monkeypatch):
    import gc
    import weakref

    from secure_loader.core.device import transfer

    late = []
    monkeypatch.setattr(transfer, "submit", lambda work, n, *, waiting: late.append(work) or 0)
    bench = Bench(monkeypatch, slot=16 * KIB)
    gc.disable()
    try:
        with session(**OPTIONS).open(folder / "2", device=DEVICE) as f:
            f.get_tensors()
            source = weakref.ref(f.file.source)
        pinned = weakref.ref(bench.device.hosts[0].owner)
        del f
        bench.kernels.batches.clear()
        bench.device.hosts.clear()
        assert late
        assert (source(), pinned()) == (None, None)
    finally:
        gc.enable()
    for work in late:
        work()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernels", [True, False])
def test_an_interruption_between_any_two_lines(folder, monkeypatch, way, kernels):
    """As a signal would raise it: in the calling thread, at any line of the transfer."""
    rng = random.Random(11)

    def stop_at(line: int) -> int:
        bench = Bench(monkeypatch, kernels=kernels, slot=64 * KIB, seed=5)
        files = ("device/transfer.py", "device/plan.py", "device/ring.py")
        return interrupted_at(line, bench, files, lambda: load(folder / "2", way))

    count = stop_at(0)
    assert count > 300
    for line in sorted(rng.sample(range(1, count), 150)):
        stop_at(line)


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("presses", [1, 3])
def test_an_impatient_user(folder, monkeypatch, presses):
    """Real signals, while a reader is at work: it must be out before anything is wiped."""
    main, events = threading.main_thread(), []
    real, pressed = FileSource.read_into, threading.Event()

    def read_into(self, buffers, offset):
        if threading.current_thread() is not main and not pressed.is_set():
            pressed.set()
            for _ in range(presses):
                signal.pthread_kill(main.ident, signal.SIGINT)
                pressed.wait(0.05)
            threading.Event().wait(0.2)
            real(self, buffers, offset)
            events.append("read")
            return
        real(self, buffers, offset)

    bench = Bench(monkeypatch, slot=16 * KIB)
    wiped = bench.device.clear
    monkeypatch.setattr(bench.device, "clear", lambda *a: events.append("clear") or wiped(*a))
    with session(**OPTIONS).open(folder / "2", device=DEVICE) as f:
        f.file.unlock()
        monkeypatch.setattr(FileSource, "read_into", read_into)
        with pytest.raises(KeyboardInterrupt):
            f.get_tensors()
    assert events[0] == "read"
    assert "clear" in events
    bench.check_wiped()
