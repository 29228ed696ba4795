"""The fuzz targets over the test vectors and over damaged copies of them, the same ones every time, without a fuzzer."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.every import TARGETS, by_target

SEEDS = by_target()
_TOKENS = (
    b'"',
    b"\\",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\xff",
    b"\0",
    b"\\ud800",
    b"1e5",
    b"-1",
    b"null",
    b"true",
    b"=",
)
_DAMAGED = 1200  # inputs a target: a quarter of a second


def damaged(data: bytes, rng: random.Random) -> bytes:
    """One to four edits of the kinds that a fuzzer makes."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randint(0, len(out)), rng.randint(1, 16)
        match rng.randrange(5):
            case 0:
                out[at:at] = rng.choice(_TOKENS)
            case 1:
                del out[at : at + length]
            case 2:
                out[at:at] = out[at : at + length]
            case 3:
                out[at : at + 1] = bytes([rng.randrange(256)])
            case 4:
                del out[at + 1 :]
    return bytes(out)


@pytest.mark.parametrize("name", TARGETS)
def test_seeds(name: str) -> None:
    assert len(SEEDS[name]) > 5
    for seed in SEEDS[name]:
        TARGETS[name](seed)


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_seeds(name: str) -> None:
    rng = random.Random(name)
    for _ in range(_DAMAGED):
        TARGETS[name](damaged(rng.choice(SEEDS[name]), rng))


@pytest.mark.parametrize("data", [b"", b"\0" * 8, b"{}", b"[]", b"null", b'"', b"\xff" * 9, b"{" * 5000, b"[" * 5000])
@pytest.mark.parametrize("name", TARGETS)
def test_oddities(name: str, data: bytes) -> None:
    TARGETS[name](data)
