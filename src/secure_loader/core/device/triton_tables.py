"""What the Triton kernels are told of a batch: tables, laid out in one buffer that is copied to the device at once."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ...errors import DeviceError
from ..aead import MAX_SINGLE_SEAL, NONCE_BYTES, TAG_BYTES
from ..secrets import Secret
from .batch import Batch, Chunk

# These three are written again in triton_aes, triton_ghash and triton_gcm, as constants of their kernels; a test compares them.
TILES = 2
ENCRYPTED_WORDS = 36
POWERS = 640

ROUNDS = {16: 10, 32: 14}  # by the size of the key, in bytes
_PLACE = struct.Struct("=5q")  # address, size, key, number of the first segment, rounds
_BLOCK = struct.Struct("=16s4i")  # a block to encrypt, key, rounds, padding
_KEY_BYTES = 32
_ALIGNMENT = 16  # of every table: Triton compiles a kernel anew for pointers that are aligned in another way


def _lay_out(*sizes: int) -> tuple[list[slice], int]:
    """Tables of these sizes one behind the other, each aligned; and how many bytes they take."""
    sections, at = [], 0
    for nbytes in sizes:
        sections.append(slice(at, at + nbytes))
        at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return sections, at


class Tables:
    """The tables of one batch.

    Attributes:
        chunks: How many chunks there are.
        keys: How many keys.
        segments: How many segments the chunks are cut into.
        bits: How many bits the highest number of a segment in its chunk has.
        lanes: Of one program.
        stride: From one key schedule to the next, in words.
        shift: A segment has ``2**shift`` blocks.
        places, tags, blocks, sizes, counts, raw: Where the tables are in the upload; ``raw`` are the keys.
        upload_bytes: Size of the upload.
        schedules, encrypted, partials, sums: Where the results are in scratch memory; all of them are secret.
        encrypted_keys: Where those of the keys begin in ``encrypted``, behind those of the chunks; in words.
        scratch_bytes: Size of that memory.

    Args:
        batch: What to open.
        lanes: Of one program.

    Raises:
        DeviceError: The batch asks for what these kernels cannot do.
    """

    def __init__(self, batch: Batch, lanes: int) -> None:
        _check(batch)
        self._batch, self.lanes = batch, lanes
        blocks = TILES * 8 * lanes  # of a segment
        self.shift = blocks.bit_length() - 1
        self._counts = [-(-chunk.nbytes // (16 * blocks)) for chunk in batch.chunks]
        self.chunks, self.keys, self.segments = len(batch.chunks), len(batch.keys), sum(self._counts)
        self.bits = max(max(self._counts, default=0) - 1, 0).bit_length()
        self.stride = POWERS + 4 * lanes
        n, m = self.chunks, self.keys
        (self.places, self.tags, self.blocks, self.sizes, self.counts, self.raw), self.upload_bytes = _lay_out(
            n * _PLACE.size, n * TAG_BYTES, (n + m) * _BLOCK.size, m * 4, n * 4, m * _KEY_BYTES
        )
        (self.schedules, self.encrypted, self.partials, self.sums), self.scratch_bytes = _lay_out(
            m * self.stride * 4, (n + m) * ENCRYPTED_WORDS * 4, self.segments * 16, n * 16
        )
        self.encrypted_keys = n * ENCRYPTED_WORDS

    def fill(self, upload: memoryview) -> None:
        """Write everything, raw keys included, into ``upload``: ``upload_bytes`` bytes."""
        keys, first = self._batch.keys, 0
        for i, (chunk, count) in enumerate(zip(self._batch.chunks, self._counts, strict=True)):
            rounds = ROUNDS[len(keys[chunk.key])]
            place = (chunk.address, chunk.nbytes, chunk.key, first, rounds)
            _PLACE.pack_into(upload, self.places.start + i * _PLACE.size, *place)
            counter = chunk.nonce + b"\x00\x00\x00\x01"
            _BLOCK.pack_into(upload, self.blocks.start + i * _BLOCK.size, counter, chunk.key, rounds, 0, 0)
            first += count
        upload[self.tags] = b"".join(chunk.tag for chunk in self._batch.chunks)
        struct.pack_into(f"={self.chunks}i", upload, self.counts.start, *self._counts)
        struct.pack_into(f"={self.keys}i", upload, self.sizes.start, *(len(key) // 4 for key in keys))
        for i, key in enumerate(keys):
            block = self.blocks.start + (self.chunks + i) * _BLOCK.size
            _BLOCK.pack_into(upload, block, bytes(16), i, ROUNDS[len(key)], 0, 0)  # H is a block of zeros, encrypted
            at = self.raw.start + i * _KEY_BYTES
            upload[at : at + len(key)] = key.reveal()


def _check(batch: Batch) -> None:
    for key in batch.keys:
        if len(key) not in ROUNDS:
            raise DeviceError(f"AES keys have 16 or 32 bytes, not {len(key)}")
    for chunk in batch.chunks:
        _check_chunk(chunk, batch.keys)


def _check_chunk(chunk: Chunk, keys: Sequence[Secret]) -> None:
    if not 0 <= chunk.key < len(keys):
        raise DeviceError(f"a chunk is sealed with key {chunk.key} of {len(keys)}")
    if len(chunk.nonce) != NONCE_BYTES or len(chunk.tag) != TAG_BYTES:
        raise DeviceError(f"a chunk has a nonce of {len(chunk.nonce)} bytes, a tag of {len(chunk.tag)}")
    if not 0 <= chunk.nbytes <= MAX_SINGLE_SEAL:
        raise DeviceError(f"a chunk has {chunk.nbytes:,} bytes")
    if chunk.aad:
        raise DeviceError("the Triton kernels know no associated data")
