"""What the host packs is what the compiler lays out."""

from __future__ import annotations

import struct

import pytest

from secure_loader.core.device import abi
from secure_loader.core.device.batch import Chunk
from secure_loader.core.secrets import Secret

GOOD = Chunk(0x1122334455667788, 100, 3, bytes(range(12)), bytes(range(100, 116)))


def test_the_compiler_agrees(shim):
    (threads, segment, *sizes, verified, rejected), offsets = shim.layout()[:9], shim.layout()[9:]
    assert (threads, segment) == (abi.THREADS, abi.SEGMENT_BYTES)
    assert sizes == [abi.KEY_BYTES, abi.SCHEDULE_BYTES, abi.CHUNK_BYTES, abi.WORK_BYTES, abi.PARTIAL_BYTES]
    assert (verified, rejected) == (abi.VERIFIED, abi.REJECTED)
    # As the tests below read them: SlKey, SlChunk, SlWork.
    assert offsets == [0, 32, *(0, 8, 16, 24, 32, 48, 60, 64, 68), *(0, 4)]


def test_keys():
    keys = [Secret(bytes(range(32))), Secret(b"\xaa" * 16)]
    packed = abi.pack_keys(keys)
    assert isinstance(packed, bytearray)  # so that it can be wiped
    assert len(packed) == 2 * abi.KEY_BYTES
    assert packed[:36] == bytes(range(32)) + struct.pack("<I", 32)
    assert packed[48:84] == b"\xaa" * 16 + bytes(16) + struct.pack("<I", 16)


@pytest.mark.parametrize("size", [0, 15, 24, 33])
def test_keys_of_other_sizes(size):
    with pytest.raises(ValueError, match=f"key 1 has {size} bytes"):
        abi.pack_keys([Secret(bytes(16)), Secret(bytes(size))])


def test_chunks():
    second = GOOD._replace(address=0x1000, nbytes=2 * abi.SEGMENT_BYTES + 1, aad=b"some", key=7)
    third = GOOD._replace(nbytes=0, aad=b"more of it")
    packed = abi.pack_chunks([GOOD, second, third], aad=0x2000)
    assert len(packed) == 3 * abi.CHUNK_BYTES
    assert packed[:32] == struct.pack("<QQQQ", GOOD.address, GOOD.address, 100, 0x2000)
    assert packed[32:48] == GOOD.tag
    assert packed[48:60] == GOOD.nonce
    assert struct.unpack_from("<IIIQ", packed, 60) == (0, 3, 0, 0)
    assert struct.unpack_from("<QQQQ", packed, 80) == (0x1000, 0x1000, second.nbytes, 0x2000)
    assert struct.unpack_from("<III", packed, 80 + 60) == (4, 7, 1)
    assert struct.unpack_from("<QQQQ", packed, 160) == (GOOD.address, GOOD.address, 0, 0x2004)
    assert struct.unpack_from("<III", packed, 160 + 60) == (10, 3, 4)
    assert abi.pack_aad([GOOD, second, third]) == b"somemore of it"


def test_chunks_that_are_read_elsewhere():
    packed = abi.pack_chunks([GOOD], sources=[0x3000])
    assert struct.unpack_from("<QQ", packed) == (0x3000, GOOD.address)


@pytest.mark.parametrize(
    "bad",
    [
        {"nonce": bytes(11)},
        {"nonce": bytes(13)},
        {"tag": bytes(15)},
        {"tag": b""},
        {"nbytes": -1},
        {"nbytes": 2**36 - 31},
    ],
)
def test_chunks_that_are_none(bad):
    with pytest.raises(ValueError, match="chunk 1"):
        abi.pack_chunks([GOOD, GOOD._replace(**bad)])


@pytest.mark.parametrize(
    ("nbytes", "count"), [(0, 0), (1, 1), (65535, 1), (65536, 1), (65537, 2), (abi.MAX_CHUNK_BYTES, 2**20)]
)
def test_segments(nbytes, count):
    assert abi.segments(nbytes) == count


def test_work():
    sizes = [1, 0, 3 * abi.SEGMENT_BYTES, abi.SEGMENT_BYTES + 1]
    work = abi.pack_work([GOOD._replace(nbytes=n) for n in sizes])
    assert list(struct.iter_unpack("<II", work)) == [(0, 0), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1)]
    assert abi.pack_work([]) == b""
