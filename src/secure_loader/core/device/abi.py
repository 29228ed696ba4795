"""The bytes that kernels read and write: the host's side of ``csrc/abi.cuh``.

Keys, schedules and partial sums are secrets: whoever puts them on a device overwrites them there after the last use.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

from ..secrets import Secret
from .batch import Chunk

THREADS = 256
"""Threads of a CTA, for every kernel."""
SEGMENT_BYTES = 65536
"""What one CTA works on at a time: this much of one chunk, or its rest."""
MAX_CHUNK_BYTES = 2**36 - 32
"""The limit of AES-GCM: a counter of 32 bits, two values of which are taken."""

KEY_BYTES = 48
SCHEDULE_BYTES = 6048
CHUNK_BYTES = 80
WORK_BYTES = 8
PARTIAL_BYTES = 16
"""For each segment of a batch. It has to be aligned to 16 bytes on the device, as all else here."""
TAG_BYTES = 16
VERDICT_BYTES = 4

VERIFIED = 1
"""The one verdict that is good. The host presets 0."""
REJECTED = 2

_KEY = struct.Struct("<32sI12x")
_CHUNK = struct.Struct("<QQQQ16s12sIIII4x")


def segments(nbytes: int) -> int:
    """Into how many segments a chunk of this size falls: none, if it is empty."""
    return -(-nbytes // SEGMENT_BYTES)


def pack_keys(keys: Sequence[Secret]) -> bytearray:
    """``SlKey`` for every key, in order. The caller wipes it.

    Raises:
        ValueError: A key has neither 16 nor 32 bytes.
    """
    packed = bytearray(KEY_BYTES * len(keys))
    for index, key in enumerate(keys):
        if len(key) not in (16, 32):
            raise ValueError(f"key {index} has {len(key)} bytes; AES-GCM on a device takes 16 or 32")
        # Straight into the buffer: struct would want a copy as bytes, which nobody can wipe.
        offset = KEY_BYTES * index
        packed[offset : offset + len(key)] = key.reveal()
        struct.pack_into("<I", packed, offset + 32, len(key))
    return packed


def pack_aad(chunks: Sequence[Chunk]) -> bytes:
    """Associated data of all chunks, one behind the other."""
    return b"".join([chunk.aad for chunk in chunks])


def pack_chunks(chunks: Sequence[Chunk], *, aad: int = 0, sources: Sequence[int] | None = None) -> bytes:
    """``SlChunk`` for every chunk, in order; their segments are numbered as :func:`pack_work` counts them.

    Args:
        chunks: What to open or to seal.
        aad: Device address of what :func:`pack_aad` made of the same chunks; not looked at where that is empty.
        sources: Device address to read each chunk from; by default it is changed in place. No part of a source lies in
            a chunk, other than at the very address of its own.

    Raises:
        ValueError: A nonce, a tag or a size is not what AES-GCM has.
    """
    packed = bytearray(CHUNK_BYTES * len(chunks))
    first = offset = 0
    for index, chunk in enumerate(chunks):
        if len(chunk.nonce) != 12 or len(chunk.tag) != 16 or not 0 <= chunk.nbytes <= MAX_CHUNK_BYTES:
            raise ValueError(
                f"chunk {index}: a nonce of {len(chunk.nonce)} bytes, a tag of {len(chunk.tag)}, {chunk.nbytes} bytes of data"
            )
        _CHUNK.pack_into(
            packed,
            offset,
            chunk.address if sources is None else sources[index],
            chunk.address,
            chunk.nbytes,
            aad,
            chunk.tag,
            chunk.nonce,
            len(chunk.aad),
            chunk.key,
            first,
            0,
        )
        first += -(-chunk.nbytes // SEGMENT_BYTES)
        aad += len(chunk.aad)
        offset += CHUNK_BYTES
    return bytes(packed)


def pack_work(chunks: Sequence[Chunk]) -> bytes:
    """``SlWork`` for every segment of every chunk, in order: as many as there are partial sums."""
    work = array("I")
    for index, chunk in enumerate(chunks):
        if 0 < chunk.nbytes <= SEGMENT_BYTES:  # most of them
            work.append(index)
            work.append(0)
        else:
            count = segments(chunk.nbytes)
            pairs = array("I", bytes(WORK_BYTES * count))
            pairs[::2] = array("I", (index,)) * count
            pairs[1::2] = array("I", range(count))
            work.extend(pairs)
    return work.tobytes()
