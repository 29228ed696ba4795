"""What is wanted becomes jobs; whatever way the bytes come in, they are the same."""

from __future__ import annotations

import hashlib
import itertools
import os

import pytest

from secure_loader.core import pipeline
from secure_loader.core.aead import ALGORITHMS, chunk_nonce, seal_into
from secure_loader.core.pipeline import ClearBytes, Digests, Options, SealedBytes, Wanted, plan, read
from secure_loader.core.pool import WAITING_THREADS
from secure_loader.core.secrets import Secret
from secure_loader.core.source import FileSource
from secure_loader.errors import AuthenticationError, ReadError

CHUNK = 64 * 1024


class Sealed:
    """A file of sealed tensors, one after the other behind a header of odd length."""

    def __init__(self, path, sizes, chunk=CHUNK):
        self.path, self.plain, self.parts = path, [], []
        body, header = bytearray(), os.urandom(1003)
        cipher = ALGORITHMS["aes256gcm"].cipher(Secret(bytearray(os.urandom(32))))
        layout = []
        for size in sizes:
            plain, iv, tags, start = os.urandom(size), os.urandom(8).ljust(12, b"\0"), b"", len(body)
            for i, at in enumerate(range(0, size, chunk) or [0]):
                piece = plain[at : at + chunk]
                out = memoryview(bytearray(len(piece) + 16))
                seal_into(cipher, chunk_nonce(iv, i), memoryview(piece), out)
                body += out[:-16]
                tags += out[-16:]
            layout.append((start, size, iv, tags))
            self.plain.append(plain)
        path.write_bytes(header + body)
        self.source = FileSource(path)
        for start, size, iv, tags in layout:
            self.parts.append(SealedBytes(self.source, len(header) + start, size, cipher, chunk, iv, tags))

    def wanted(self):
        outs = [bytearray(b"\xaa" * p.nbytes) for p in self.parts]
        return outs, [
            Wanted(str(i), p, memoryview(o), 0, p.nbytes) for i, (p, o) in enumerate(zip(self.parts, outs, strict=True))
        ]


SIZES = [1, 5, 100_000, 0, CHUNK, 9 * CHUNK + 7, 3, 40 * CHUNK, 17]


@pytest.mark.parametrize("page_cache", ["keep", "drop", "bypass"])
@pytest.mark.parametrize("cold", [False, True])
def test_every_way_gives_the_same_bytes(tmp_path, page_cache, cold):
    sealed = Sealed(tmp_path / "x", SIZES * 3)
    if cold:
        os.sync()
        sealed.source.drop_cache(0, 0)
    outs, wanted = sealed.wanted()
    read(wanted, Options(page_cache=page_cache))
    assert [bytes(o) for o in outs] == sealed.plain


@pytest.mark.parametrize("page_cache", ["drop", "bypass"])
def test_nothing_stays_in_the_page_cache(tmp_path, page_cache):
    sealed = Sealed(tmp_path / "x", [64 * CHUNK])
    os.sync()
    read(sealed.wanted()[1])
    place = sealed.source.size // 2
    if not sealed.source.is_cached(place):
        pytest.skip("this file system does not tell what is cached")
    if page_cache == "bypass":
        sealed.source.drop_cache(0, 0)
    read(sealed.wanted()[1], Options(page_cache=page_cache))
    assert not sealed.source.is_cached(place)


def test_files_that_are_not_cached_are_read_by_many(tmp_path, monkeypatch):
    sealed = Sealed(tmp_path / "x", [64 * CHUNK] * 8)
    seen = []
    real = pipeline.run_jobs
    monkeypatch.setattr(pipeline, "run_jobs", lambda *a, **k: seen.append(k["waiting"]) or real(*a, **k))
    read(sealed.wanted()[1])
    monkeypatch.setattr(FileSource, "is_cached", lambda self, offset: False)
    outs, wanted = sealed.wanted()
    read(wanted)
    assert seen == [False, True]
    assert [bytes(o) for o in outs] == sealed.plain
    assert WAITING_THREADS >= 8


def test_large_tensors_are_split_and_small_ones_travel_together(tmp_path):
    sealed = Sealed(tmp_path / "x", [100] * 50 + [300 * CHUNK] + [100] * 50)
    jobs = plan(sealed.wanted()[1])
    assert sum(len(j) for j in jobs) == 100 + 300
    assert len(jobs) == -(-300 * CHUNK // pipeline.JOB_BYTES)
    for job in jobs:
        assert sum(p.nbytes for p in job) <= pipeline.JOB_BYTES
        assert all(a.place + a.nbytes == b.place for a, b in itertools.pairwise(job))


def test_only_what_is_wanted_is_read(tmp_path, monkeypatch):
    sealed = Sealed(tmp_path / "x", [300 * CHUNK])
    read_bytes = []
    real = FileSource.read_into
    monkeypatch.setattr(
        FileSource, "read_into", lambda self, b, o: read_bytes.append(sum(map(len, b))) or real(self, b, o)
    )
    out = bytearray(10)
    read([Wanted("x", sealed.parts[0], memoryview(out), 5 * CHUNK - 4, 5 * CHUNK + 6)])
    assert bytes(out) == sealed.plain[0][5 * CHUNK - 4 : 5 * CHUNK + 6]
    assert read_bytes == [2 * CHUNK]


@pytest.mark.parametrize("page_cache", ["keep", "bypass"])
@pytest.mark.parametrize("where", [0, 2, -1])
def test_a_wrong_tag_wipes_everything_and_says_where(tmp_path, page_cache, where):
    sealed = Sealed(tmp_path / "x", [*SIZES[:3], 40 * CHUNK])
    bad = sealed.parts[where]
    with sealed.path.open("r+b") as f:
        f.seek(bad.offset + bad.nbytes - 1)
        byte = f.read(1)
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte[0] ^ 1]))
    outs, wanted = sealed.wanted()
    with pytest.raises(AuthenticationError) as caught:
        read(wanted, Options(page_cache=page_cache))
    assert (caught.value.path, caught.value.tensor) == (str(sealed.path), wanted[where].name)
    assert not any(map(any, outs))


@pytest.mark.parametrize("page_cache", ["keep", "drop", "bypass"])
def test_a_file_that_shrinks_meanwhile(tmp_path, page_cache):
    sealed = Sealed(tmp_path / "x", [10 * CHUNK])
    os.truncate(sealed.path, sealed.source.size - 1)
    outs, wanted = sealed.wanted()
    with pytest.raises(ReadError, match="truncated"):
        read(wanted, Options(page_cache=page_cache))
    assert not any(map(any, outs))


def test_scratch_memory_holds_no_plaintext_afterwards(tmp_path):
    sealed = Sealed(tmp_path / "x", [CHUNK])
    out = bytearray(10)
    read([Wanted("x", sealed.parts[0], memoryview(out), 30_000, 30_010)])
    assert bytes(out) in sealed.plain[0]
    assert bytes(out) not in bytes(pipeline.scratch(pipeline.JOB_BYTES))


def test_clear_bytes_are_checked_whether_they_are_kept_or_not(tmp_path):
    data = os.urandom(3 * CHUNK + 5)
    (tmp_path / "x").write_bytes(data)
    values = b"".join(hashlib.sha256(data[i : i + CHUNK]).digest() for i in range(0, len(data), CHUNK))
    with FileSource(tmp_path / "x") as source:
        good = ClearBytes(source, 0, len(data), Digests(values, CHUNK))
        out = bytearray(len(data) - 2)
        read([Wanted("x", good, memoryview(out), 1, len(data) - 1), Wanted("x", good, None, 0, len(data))])
        assert bytes(out) == data[1:-1]
        bad = ClearBytes(source, 0, len(data), Digests(values[:-1] + b"?", CHUNK))
        read([Wanted("x", bad, None, 0, CHUNK)])
        for target in (None, memoryview(out)):
            with pytest.raises(AuthenticationError, match="digest"):
                read([Wanted("x", bad, target, 1, len(data) - 1)])
        assert not any(out)
