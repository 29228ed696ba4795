"""From the disk straight to a device, past the pinned ring: the same bytes, only where it may be, and none before its verdict."""

from __future__ import annotations

import itertools
import logging
import os
import random
import shutil
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from secure_loader.core.device import transfer
from secure_loader.core.device.device import Memory
from secure_loader.core.device.engine import Engine
from secure_loader.core.pool import set_threads
from secure_loader.core.source import FileSource
from secure_loader.errors import AuthenticationError, DeviceError, OutOfMemoryError, ReadError

from .fake import COPIED, VERIFIED
from .files import CHUNK, DEVICE, Bench, content, interrupted_at, same, session, write
from .test_transfer import CLEAR, INDEXES
from .test_transfer_faults import TENSORS, WAYS

KIB = 1 << 10
ON = {"gpu_direct": "on", "device_buffer_bytes": 4 * 64 * KIB}


@pytest.fixture(autouse=True)
def four_threads():
    set_threads(4)
    yield
    set_threads(None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One file of each kind."""
    folder = tmp_path_factory.mktemp("files")
    for algorithm, version in itertools.product(("aes256gcm", "aes128gcm", "chacha20poly1305"), ("1", "2")):
        write(folder / f"{algorithm}-{version}", content(), algorithm, version)
    write(folder / "mixed", content(), clear=CLEAR)
    write(folder / "wide", content(), chunk_size=4 * CHUNK)
    for version in ("1", "2"):
        write(folder / version, TENSORS, version=version, clear=("clear",))
    return folder


def load(path, way, algorithm="aes256gcm", **settings):
    with session(algorithm, **ON | settings).open(path, device=DEVICE) as f:
        return WAYS[way](f)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("slot", [16 * KIB, 256 * KIB])
@pytest.mark.parametrize("name", ["aes256gcm-1", "aes256gcm-2", "aes128gcm-2", "mixed", "wide"])
def test_the_same_bytes_without_the_ring(folder, monkeypatch, name, slot, seed):
    bench = Bench(monkeypatch, seed=seed, slot=slot, direct={})
    algorithm = name.partition("-")[0] if "-" in name else "aes256gcm"
    assert same(load(folder / name, "whole", algorithm, device_buffer_bytes=4 * slot), content())
    bench.check_calm()
    states = {state for block in bench.device.blocks for state in np.unique(block.state)}
    assert VERIFIED in states
    assert states <= ({0, COPIED, VERIFIED} if name == "mixed" else {0, VERIFIED})
    assert bench.direct.reads
    # What is clear, and checked by the host, comes by the ring; so does the tag of an empty tensor, which has no bytes.
    assert ("copy_in" in bench.device.log) == (name == "mixed")


@pytest.mark.parametrize("name", ["aes256gcm-1", "aes256gcm-2", "mixed"])
def test_slices_and_single_tensors(folder, monkeypatch, name):
    bench = Bench(monkeypatch, slot=64 * KIB, direct={})
    tensors = content()
    with session(**ON).open(folder / name, device=DEVICE) as f:
        for index in INDEXES:
            assert torch.equal(f.get_slice("matrix")[index], tensors["matrix"][index]), index
        assert torch.equal(f.get_slice("n327687")[CHUNK - 1 : CHUNK + 1], tensors["n327687"][CHUNK - 1 : CHUNK + 1])
        assert same(
            {n: f.get_tensor(n) for n in ("n1", "n65537", "empty")}, {n: tensors[n] for n in ("n1", "n65537", "empty")}
        )
    bench.check_calm()


@pytest.mark.parametrize("span", [(0, 3 * CHUNK + 5), (5, 17), (CHUNK - 1, 3 * CHUNK + 1)])
@pytest.mark.parametrize("version", ["1", "2"])
def test_a_part_into_memory_that_is_there(folder, monkeypatch, version, span):
    bench = Bench(monkeypatch, slot=16 * KIB, direct={})
    start, stop = span
    parameter = torch.full((stop - start + 33,), 0x77, dtype=torch.uint8)
    memory = Memory(parameter, parameter.data_ptr(), parameter.nbytes)
    bench.device.adopt(parameter, memory)
    with session(**ON).open(folder / version, device=DEVICE) as f:
        bench.engine.fill([(f.file.part("first", start, stop), memory, 16)], f.file.read_options, 128 * KIB)
    assert torch.equal(parameter[16 : 16 + stop - start], TENSORS["first"][start:stop])
    assert (parameter[:16] == 0x77).all()
    assert (parameter[16 + stop - start :] == 0x77).all()
    bench.check_calm()
    assert "copy_in" not in bench.device.log


def test_reads_end_on_blocks_of_the_file_and_cover_each_byte_once(folder, monkeypatch):
    bench = Bench(monkeypatch, slot=4 << 20, direct={})
    with session(gpu_direct="on").open(folder / "wide", device=DEVICE) as f:
        f.get_tensor("n1310720")
        first = f.file.header.body_start + f.get_tensor_info("n1310720").start
    trial, *reads = bench.direct.reads
    assert trial == (first, 4096, min(address for _, _, address in reads))
    place, address = trial[0], trial[2]
    for read in sorted(reads):
        assert (read[0], read[2]) == (place, address)
        assert place == first or place % 4096 == 0
        place, address = place + read[1], address + read[1]
    assert place == first + 20 * CHUNK
    assert len(reads) > 2


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("aes256gcm-2", {"integrity": "full"}),
        ("aes256gcm-2", {"gpu_direct": "off", "page_cache": "bypass"}),
        ("aes256gcm-2", {"gpu_direct": "auto"}),
        ("chacha20poly1305-2", {}),
    ],
)
def test_everything_else_stays_on_the_ring(folder, monkeypatch, name, settings):
    """What the host has to check or decrypt, what it has in its page cache, and where nobody wants it."""
    bench = Bench(monkeypatch, direct={})
    assert same(load(folder / name, "whole", name.partition("-")[0], **settings), content())
    bench.check_calm()
    assert bench.direct.files == []


def test_without_kernels_nothing_comes_directly(folder, monkeypatch):
    bench = Bench(monkeypatch, kernels=False, direct={})
    assert same(load(folder / "2", "whole"), TENSORS)
    bench.check_calm()
    assert bench.direct.files == []


def test_auto_takes_it_past_the_page_cache_and_for_cold_files(folder, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, "secure_loader.core.device.transfer")
    bench = Bench(monkeypatch, direct={})
    assert same(load(folder / "2", "whole", gpu_direct="auto", page_cache="bypass"), TENSORS)
    assert len(bench.direct.files) == 1
    assert caplog.records == []
    monkeypatch.setattr(transfer, "_SAMPLE_EVERY", 16 * KIB)
    assert same(load(folder / "2", "whole", gpu_direct="auto"), TENSORS)
    assert len(bench.direct.files) == 1
    assert "page cache" in caplog.text
    monkeypatch.setattr(FileSource, "is_cached", lambda self, offset: False)
    assert same(load(folder / "2", "whole", gpu_direct="auto"), TENSORS)
    assert len(bench.direct.files) == 2
    bench.check_calm()


@pytest.mark.parametrize("how", [{"refuse": "no such disk"}, {"fail_at": 1, "error": ReadError("no such disk")}])
def test_where_it_is_impossible(folder, monkeypatch, caplog, how):
    """The file cannot be registered, or this memory cannot be read into, which its first block shows."""
    caplog.set_level(logging.DEBUG, "secure_loader.core.device.straight")
    bench = Bench(monkeypatch, direct=how)
    assert same(load(folder / "2", "whole", gpu_direct="auto", page_cache="bypass"), TENSORS)
    bench.check_calm()
    (line,) = caplog.records
    assert (line.levelname, line.getMessage()) == ("DEBUG", f"{folder / '2'} comes by way of the host: no such disk")
    bench = Bench(monkeypatch, direct=how)
    with pytest.raises(DeviceError, match="cannot be read directly: no such disk") as caught:
        load(folder / "2", "whole")
    assert caught.value.path == str(folder / "2")
    bench.check_wiped()
    assert "copy_in" not in bench.device.log


def test_demanded_where_there_is_nothing_to_read_with(folder, monkeypatch):
    bench = Bench(monkeypatch)
    with pytest.raises(DeviceError, match="nothing reads files directly for fake:0"):
        load(folder / "2", "whole")
    bench.check_wiped()


def test_the_engine_of_a_gpu_has_a_reader(monkeypatch):
    made = {}
    monkeypatch.setattr(Engine, "__init__", lambda self, device, kernels, **options: made.update(options))
    from secure_loader.core.device import choice, engine, torch_device

    monkeypatch.setattr(torch_device, "index_of", lambda device: 3)
    monkeypatch.setattr(torch_device, "TorchDevice", lambda index: None)
    monkeypatch.setattr(engine, "choose", lambda *a, **k: choice.Choice(None, "CPU", ()))
    monkeypatch.setattr(engine, "_engines", {})
    engine.engine_for("cuda:3")
    assert made["direct"]._ordinal == 3


@pytest.mark.parametrize(
    "error", [ReadError("x"), DeviceError("x"), OSError("x"), MemoryError("x"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("version", ["1", "2"])
def test_every_read_fails_once(folder, monkeypatch, version, way, error):
    bench = Bench(monkeypatch, slot=64 * KIB, direct={})
    load(folder / version, way)
    number = len(bench.direct.reads)
    assert number > 3
    for at in range(1, number + 1):
        bench = Bench(monkeypatch, slot=64 * KIB, seed=at, direct={"fail_at": at, "error": error})
        first = at == 1 and isinstance(error, (ReadError, DeviceError))
        with pytest.raises(DeviceError if first else type(error)):
            load(folder / version, way)
        bench.check_wiped()


@pytest.mark.parametrize("error", [DeviceError, OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("way", WAYS)
def test_every_call_of_the_device_fails_once(folder, monkeypatch, way, error):
    bench = Bench(monkeypatch, seed=1, slot=64 * KIB, direct={})
    load(folder / "2", way)
    raised = 0
    for at in range(1, len(bench.device.log) + 1):
        bench = Bench(monkeypatch, seed=1, slot=64 * KIB, direct={}, fail_at=(at,), error=error)
        try:
            load(folder / "2", way)
        except error:
            raised += 1
            bench.check_wiped()
        else:
            bench.check_calm()
    assert raised >= 8


@pytest.mark.parametrize("way", WAYS)
def test_an_interruption_between_any_two_lines(folder, monkeypatch, way):
    rng = random.Random(12)

    def bench():
        return Bench(monkeypatch, slot=64 * KIB, seed=5, direct={})

    files = ("device/transfer.py", "device/plan.py", "device/straight.py")
    count = interrupted_at(0, bench(), files, lambda: load(folder / "2", way))
    assert count > 300
    for stop_at in sorted(rng.sample(range(1, count), 100)):
        interrupted_at(stop_at, bench(), files, lambda: load(folder / "2", way))


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("presses", [1, 3])
def test_an_impatient_user_while_a_disk_writes(folder, monkeypatch, presses):
    """Real signals, while a thread waits for its read: the disk must be done before anything is overwritten."""
    main, pressed = threading.main_thread(), threading.Event()

    def before(number):
        if number > 1 and threading.current_thread() is not main and not pressed.is_set():
            pressed.set()
            for _ in range(presses):
                signal.pthread_kill(main.ident, signal.SIGINT)
                threading.Event().wait(0.05)
            threading.Event().wait(0.2)

    for _ in range(20):
        bench = Bench(monkeypatch, slot=16 * KIB, direct={"before": before})
        monkeypatch.setattr(transfer, "_SAMPLE_EVERY", 16 * KIB)
        try:
            load(folder / "2", "whole")
        except KeyboardInterrupt:
            break
        # The calling thread was faster than its helpers.
        assert not pressed.is_set()
    assert pressed.is_set()
    bench.check_wiped()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("slot", [16 * KIB, 1 << 20])
@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("name", ["first", "one", "last"])
def test_a_byte_that_changes_during_the_load(folder, tmp_path, monkeypatch, name, version, slot, seed):
    """Between the trial and the reads: the tag is compared to what came, not to what was there."""
    path = Path(shutil.copy(folder / version, tmp_path / "x"))
    with session().open(path) as f:
        info, start = f.get_tensor_info(name), f.file.header.body_start

    def before(number):
        if number == 2:
            with path.open("r+b") as file:
                file.seek(start + info.stop - 1)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 1]))

    bench = Bench(monkeypatch, seed=seed, slot=slot, direct={"before": before})
    # One read after the other, so that the change comes before that of the byte.
    monkeypatch.setattr(transfer, "submit", lambda work, n, *, waiting: 0)
    with pytest.raises(AuthenticationError):
        load(path, "whole")
    bench.check_wiped()


def test_a_file_that_shrinks_meanwhile(folder, tmp_path, monkeypatch):
    path = Path(shutil.copy(folder / "2", tmp_path / "x"))
    bench = Bench(monkeypatch, slot=64 * KIB, direct={"before": lambda n: os.truncate(path, 5000) if n == 2 else None})
    with pytest.raises(ReadError, match="truncated"):
        load(path, "whole")
    bench.check_wiped()
