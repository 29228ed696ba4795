"""Files filled from several threads: bounded buffers, wiped in the end; room on disk asked for first; no half files."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from secure_loader.core import output
from secure_loader.core.copying import copy_range
from secure_loader.core.output import Output, reserve, start_writeback
from secure_loader.core.pool import run_jobs, set_threads
from secure_loader.core.seal import PlainTensor, Publication, seal_bytes, write_file
from secure_loader.core.source import FileSource, memory_file
from secure_loader.errors import ReadError, WriteError
from tests.attacks.kit import CHUNK, KEY, SIGN, Victim

PUBLICATION = Publication(KEY, SIGN, "demo/model", chunk_size=CHUNK)


@pytest.fixture(autouse=True)
def two_threads():
    set_threads(2)
    yield
    set_threads(None)


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def tensor(name: str, data: object, nbytes: int, *, encrypt: bool = True) -> PlainTensor:
    return PlainTensor(name, "U8", (nbytes,), nbytes, data, encrypt=encrypt)


def test_buffers_are_used_again_and_wiped():
    with memory_file() as file:
        with Output(file.fileno()) as out:
            with out.buffer(1000) as first:
                first[:] = b"x" * 1000
                with out.buffer(1000) as second:
                    second[:] = b"y" * 1000
            with out.buffer(10) as again:
                assert address(again) in (address(first), address(second))
                assert len(again) == 10
            with out.buffer(2000) as larger:
                larger[:] = b"z" * 2000
            assert b"z" in bytes(larger)
        assert not any(first)
        assert not any(second)
        assert not any(larger)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_buffers_are_wiped_when_something_fails(error):
    def failing(out, held):
        with out.buffer(100) as buffer:
            buffer[:] = b"x" * 100
            held.append(buffer)
            raise error

    held: list[memoryview] = []
    with memory_file() as file, pytest.raises(error), Output(file.fileno()) as out:
        failing(out, held)
    assert not any(held[0])


@pytest.mark.parametrize("advice", [True, False])
def test_pieces_from_several_threads(tmp_path, monkeypatch, advice):
    """With and without what the system may or may not have."""
    if not advice:
        monkeypatch.setattr(output, "_fallocate", None)
        monkeypatch.setattr(output, "_sync_file_range", None)
    data, step = os.urandom(1_000_003), 4099

    def job(start):
        piece = data[start : start + step]
        with out.buffer(len(piece)) as buffer:
            buffer[:] = piece
            out.write(buffer, start)

    with (tmp_path / "x").open("w+b") as file:
        reserve(file.fileno(), len(data))
        assert os.fstat(file.fileno()).st_size == len(data)
        with Output(file.fileno()) as out:
            run_jobs(job, range(0, len(data), step))
    assert (tmp_path / "x").read_bytes() == data


def test_reserving_room(tmp_path):
    with (tmp_path / "x").open("w+b") as file:
        reserve(file.fileno(), 1 << 20)
        assert os.fstat(file.fileno()).st_blocks * 512 >= 1 << 20, "blocks, not a hole"
        reserve(file.fileno(), 1 << 20)
        with pytest.raises(OSError, match="File too large") as caught:
            reserve(file.fileno(), (1 << 63) - 1)
        assert caught.value.errno == errno.EFBIG
    with memory_file() as file:
        reserve(file.fileno(), 0)
        reserve(file.fileno(), 5000)
        assert os.fstat(file.fileno()).st_size == 5000


def test_write_back_is_only_advice():
    """Where it cannot be had nothing happens: a pipe has no disk, and a closed descriptor is found out by others."""
    r, w = os.pipe()
    os.write(w, b"x")
    start_writeback(w, 0, 1)
    os.close(w)
    start_writeback(w, 0, 1)
    assert os.read(r, 2) == b"x"
    os.close(r)


class Untouched:
    def read_into(self, out, start):
        pytest.fail("read")


def test_a_disk_without_room_says_so_before_anything_is_read():
    shm = Path("/dev/shm")
    if not shm.is_dir() or shutil.disk_usage(shm).total == 0:
        pytest.skip("needs a file system in memory")
    nbytes = shutil.disk_usage(shm).total + (1 << 30)
    path = shm / f"secure-loader-test-{os.getpid()}"
    with pytest.raises(WriteError, match="No space left on device") as caught:
        write_file(path, [tensor("huge", Untouched(), nbytes)], {}, Publication(KEY, SIGN, "m", chunk_size=16 << 20))
    assert caught.value.hint == "free some space and run it again"
    assert not list(shm.glob(f"*secure-loader-test-{os.getpid()}*"))


class Failing:
    """Plaintext until a certain byte is asked for; remembers where it was written."""

    def __init__(self, error: BaseException, at: int) -> None:
        self.error, self.at = error, at
        self.seen: list[memoryview] = []

    def read_into(self, out, start):
        self.seen.append(out)
        out[:] = b"p" * out.nbytes
        if start == self.at:
            raise self.error


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("encrypt", [True, False])
@pytest.mark.parametrize("error", [ReadError("x"), KeyboardInterrupt(), MemoryError()])
def test_a_failure_leaves_no_file_and_no_plaintext(tmp_path, threads, encrypt, error):
    set_threads(threads)
    path, source = tmp_path / "x", Failing(error, 9 * CHUNK)
    path.write_bytes(b"old")
    with pytest.raises(type(error)):
        write_file(path, [tensor("t", source, 20 * CHUNK + 5, encrypt=encrypt)], {}, PUBLICATION)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert source.seen
    assert not any(any(view) for view in source.seen)
    good = memoryview(os.urandom(3 * CHUNK))
    write_file(path, [tensor("t", good, good.nbytes)], {}, PUBLICATION)
    assert Victim().load(path)["t"].tobytes() == good, "the threads are usable afterwards"


def test_a_source_that_shrinks(tmp_path):
    class Shrinking:
        def __init__(self, source):
            self.source = source

        def read_into(self, out, start):
            if start >= 5 * CHUNK:
                os.truncate(tmp_path / "src", 4 * CHUNK)
            self.source.read_into([out], start)

    (tmp_path / "src").write_bytes(os.urandom(40 * CHUNK))
    with FileSource(tmp_path / "src") as source, pytest.raises(ReadError, match="truncated") as caught:
        write_file(tmp_path / "x", [tensor("t", Shrinking(source), 40 * CHUNK)], {}, PUBLICATION)
    assert caught.value.tensor == "t"
    assert [p.name for p in tmp_path.iterdir()] == ["src"]


def test_no_more_buffers_than_threads(tmp_path):
    source = Failing(ValueError(), -1)
    write_file(tmp_path / "x", [tensor("t", source, 200 * CHUNK)], {}, PUBLICATION)
    assert len(source.seen) == 200
    # Wiped they are all the same; where they lie tells them apart.
    assert len({address(view) for view in source.seen}) <= 2


@pytest.mark.parametrize("version", ["1", "2"])
def test_memory_is_sealed_from_where_it_lies(tmp_path, version):
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.integers(0, 256, n, dtype=np.uint8) for name, n in (("a", 3 * CHUNK + 7), ("b", 5), ("c", CHUNK))
    }
    views = {name: memoryview(a).toreadonly() for name, a in arrays.items()}
    before = {name: bytes(v) for name, v in views.items()}
    tensors = [tensor(name, v, v.nbytes, encrypt=name != "c") for name, v in views.items()]
    by = Publication(KEY, SIGN, "demo/model", chunk_size=CHUNK, version=version)
    write_file(tmp_path / "x", tensors, {}, by)
    (tmp_path / "y").write_bytes(seal_bytes(tensors, {}, by))
    for path in (tmp_path / "x", tmp_path / "y"):
        found = Victim(integrity="full").load(path)
        assert {name: a.tobytes() for name, a in found.items()} == before
        stored = path.read_bytes()
        assert before["c"] in stored
        assert before["a"][:64] not in stored
    assert {name: bytes(v) for name, v in views.items()} == before


def test_copying_in_steps(tmp_path, monkeypatch):
    monkeypatch.setattr("secure_loader.core.copying._SYSTEM_STEP", 10_000)
    data = os.urandom(123_457)
    (tmp_path / "a").write_bytes(data)
    with FileSource(tmp_path / "a") as source, (tmp_path / "b").open("w+b") as target:
        copy_range(source, target.fileno(), 1000, 77, len(data) - 1000)
    assert (tmp_path / "b").read_bytes() == bytes(77) + data[1000:]
