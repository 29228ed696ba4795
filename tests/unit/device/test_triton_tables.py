"""What the Triton kernels are told; needs neither Triton nor PyTorch."""

from __future__ import annotations

import struct

import pytest

from secure_loader.core.device.batch import Batch, Chunk
from secure_loader.core.device.triton_tables import Tables
from secure_loader.core.secrets import Secret
from secure_loader.errors import DeviceError

GOOD = Chunk(0x7F00_0000_0003, 5, 0, bytes(12), bytes(16))
SEGMENT = 2 * 8 * 32 * 16


def tables(*chunks: Chunk, keys: tuple[int, ...] = (32,)) -> Tables:
    return Tables(Batch([Secret(bytes(range(n))) for n in keys], chunks), lanes=32)


def test_upload():
    key = bytes(range(16))
    told = tables(
        GOOD._replace(nbytes=2 * SEGMENT + 1, nonce=b"n" * 12, tag=b"t" * 16),
        GOOD._replace(nbytes=0, key=1),
        GOOD._replace(nbytes=SEGMENT, key=1),
        keys=(32, 16),
    )
    upload = bytearray(b"\xff" * told.upload_bytes)
    told.fill(memoryview(upload))
    assert (told.segments, told.bits, told.shift) == (4, 2, 9)
    places = struct.unpack("=15q", upload[told.places])
    assert places[::5] == (0x7F00_0000_0003,) * 3
    assert places[1::5] == (2 * SEGMENT + 1, 0, SEGMENT)
    assert places[2::5] == (0, 1, 1)
    assert places[3::5] == (0, 3, 3)  # the first segment of each
    assert places[4::5] == (14, 10, 10)
    assert struct.unpack("=3i", upload[told.counts]) == (3, 0, 1)
    assert struct.unpack("=2i", upload[told.sizes]) == (8, 4)
    assert upload[told.tags] == b"t" * 16 + bytes(32)
    blocks = upload[told.blocks]
    assert blocks[:24] == b"n" * 12 + b"\0\0\0\1" + struct.pack("=2i", 0, 14)
    assert blocks[4 * 32 : 4 * 32 + 24] == bytes(16) + struct.pack("=2i", 1, 10)
    assert upload[told.raw][:48] == bytes(range(32)) + key
    everything = (told.places, told.tags, told.blocks, told.sizes, told.counts, told.raw)
    assert all(table.start % 16 == 0 for table in everything)


@pytest.mark.parametrize(
    ("chunk", "what"),
    [
        (GOOD._replace(aad=b"x"), "associated data"),
        (GOOD._replace(key=1), "key 1 of 1"),
        (GOOD._replace(key=-1), "key -1 of 1"),
        (GOOD._replace(nonce=bytes(16)), "nonce of 16 bytes"),
        (GOOD._replace(tag=bytes(12)), "tag of 12"),
        (GOOD._replace(nbytes=2**36 - 31), "68,719,476,705 bytes"),
        (GOOD._replace(nbytes=-1), "-1 bytes"),
    ],
)
def test_refused(chunk, what):
    with pytest.raises(DeviceError, match=what):
        tables(chunk)


def test_the_longest_chunk():
    told = tables(GOOD._replace(nbytes=2**36 - 32))
    assert (told.segments, told.bits) == (2**23, 23)
    assert told.shift + told.bits <= 32  # as many squares of H as there are


@pytest.mark.parametrize("size", [0, 24, 31])
def test_keys_of_other_sizes(size):
    with pytest.raises(DeviceError, match=f"not {size}"):
        tables(GOOD, keys=(size,))
