"""No bit of a signed file can be changed, dropped or added without a refusal when the file is read."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from secure_loader import SecureLoaderError, Session
from secure_loader.core.source import FileSource

from .files import CHUNK, header_bytes, read_all, refusal, seal, session

SMALL = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "clear": np.arange(5, dtype=np.int64),
    "none": np.zeros((0, 2), np.float32),
    "s": np.array(7, dtype=np.int16),
}
LARGE = {
    "big": np.random.default_rng(1).integers(0, 256, 200 * 1024 + 5, dtype=np.uint8),
    "clear": np.random.default_rng(2).integers(0, 256, 2 * CHUNK + 9, dtype=np.uint8),
    "last": np.arange(3, dtype=np.float64),
}
# Version, what lies in clear. A file that is wholly clear has no tags at all, only digests.
KINDS = {"v2": ("2", ("clear",)), "v1": ("1", ("clear",)), "clear": ("2", ("a", "clear", "s"))}


@pytest.fixture(params=KINDS)
def small(request: pytest.FixtureRequest) -> bytes:
    version, clear = KINDS[request.param]
    return seal(SMALL, version=version, clear=clear, created="2026-01-01T00:00:00Z")


@pytest.fixture(params=["2", "1"], ids=["v2", "v1"])
def large(request: pytest.FixtureRequest) -> bytes:
    return seal(LARGE, version=request.param, clear=["clear"], created="2026-01-01T00:00:00Z")


@pytest.fixture
def reader() -> Session:
    return session()


def flipped(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def same(loaded: dict[str, np.ndarray], tensors: dict[str, np.ndarray]) -> bool:
    return loaded.keys() == tensors.keys() and all(
        loaded[n].dtype == t.dtype and np.array_equal(loaded[n], t) for n, t in tensors.items()
    )


def opened(data: bytes, by: Session) -> None:
    by.accept(FileSource.from_bytes(data), strict=True)


def check_refused(changed: dict[object, bytes], by: Session, read: Callable[[bytes, Session], Any] = read_all) -> None:
    """Each is refused, by an error that says which kind of thing is wrong."""
    outcome = {what: refusal(data, by, read) for what, data in changed.items()}
    assert changed
    assert [what for what, kind in outcome.items() if kind is None] == []
    assert [what for what, kind in outcome.items() if kind is SecureLoaderError] == []


def test_the_untouched_files_are_read(small: bytes, large: bytes, reader: Session) -> None:
    """Without this every refusal below might be for another reason."""
    assert same(read_all(small, reader), SMALL)
    assert same(read_all(large, reader), LARGE)


def test_a_flipped_bit_anywhere_in_the_header_is_refused_at_opening(small: bytes, reader: Session) -> None:
    # Not one tensor is asked for: a header is right as a whole before anything in it is believed.
    check_refused({at: flipped(small, at, at % 8) for at in range(header_bytes(small))}, reader, read=opened)


def test_every_bit_of_a_small_body_counts(small: bytes, reader: Session) -> None:
    start = header_bytes(small)
    check_refused({(at, b): flipped(small, at, b) for at in range(start, len(small)) for b in range(8)}, reader)


def places(data: bytes) -> list[int]:
    """First and last byte of every chunk and of every tensor, and some between."""
    start = header_bytes(data)
    edges = {start, len(data)}
    at = start
    for tensor in LARGE.values():
        edges |= {*range(at, at + tensor.nbytes, CHUNK), at + tensor.nbytes}
        at += tensor.nbytes
    sample = random.Random(5).sample(range(start, len(data)), 60)
    return sorted({p for e in edges for p in (e - 1, e, e + 1) if start <= p < len(data)} | set(sample))


def test_a_flipped_bit_in_a_large_body_is_refused(large: bytes, reader: Session) -> None:
    check_refused({at: flipped(large, at, at % 8) for at in places(large)}, reader)


def test_chunks_cannot_change_places(reader: Session) -> None:
    """Every chunk is genuine, and sealed under the same key: only its place is wrong."""
    data = seal(LARGE, clear=["clear"])
    changed: dict[object, bytes] = {}
    for tensor, first in (("big", header_bytes(data)), ("clear", header_bytes(data) + LARGE["big"].nbytes)):
        a, b = data[first : first + CHUNK], data[first + CHUNK : first + 2 * CHUNK]
        changed[tensor, "swapped"] = data[:first] + b + a + data[first + 2 * CHUNK :]
        changed[tensor, "twice"] = data[:first] + a + a + data[first + 2 * CHUNK :]
    check_refused(changed, reader)


def test_the_body_of_one_file_does_not_fit_the_header_of_another(reader: Session) -> None:
    """The same tensors under the same keys: each file has DEKs, and a signature, of its own."""
    one, two = seal(LARGE), seal(LARGE)
    check_refused({"mixed": one[: header_bytes(one)] + two[header_bytes(two) :]}, reader)


def test_a_truncated_small_file_is_refused_wherever_it_ends(small: bytes, reader: Session) -> None:
    check_refused({n: small[:n] for n in range(len(small))}, reader)


def test_a_truncated_large_file_is_refused(large: bytes, reader: Session) -> None:
    check_refused({n: large[:n] for n in places(large)}, reader)


def test_appended_bytes_are_refused(small: bytes, large: bytes, reader: Session) -> None:
    changed: dict[object, bytes] = {("small", n): small + bytes([n]) for n in range(256)}
    changed |= {("large", n): large + b"\0" * n for n in (1, 7, 4096, CHUNK, 2 * CHUNK)}
    changed["twice"] = small + small
    changed["in front"] = b"\0" + small
    check_refused(changed, reader)
