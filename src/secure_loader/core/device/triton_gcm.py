# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, N803 - Triton has a Python of its own
"""AES-GCM in Triton: the kernels that touch the chunks.

A chunk is cut into segments from its end: segment 0 holds the last blocks, and the first one is the one that may be short.
GHASH does not notice zeros in front, so every segment is as good as whole, and what it adds to the hash of its chunk is its
own hash times a power of H that depends on its number alone.

Inside a segment a lane takes every BLOCK-th block, eight at a time, by Horner's rule with H^BLOCK. The words that are hashed are
the ones that are decrypted; nothing comes between. A program is one warp, so that no secret ever lies in shared memory.

Addresses are numbers in a table, not arguments: they come from anywhere, and nothing is compiled anew for their alignment.
"""

import triton
import triton.language as tl

from .triton_aes import ENCRYPTED_WORDS, STARTED_WORDS, encrypt_counters, load_words
from .triton_ghash import POWERS, SQUARES, add, element, load_element, multiply, select, swap_bytes

TILES = tl.constexpr(2)  # of 8 blocks a lane, in a segment
# A row of the table of places (int64): address, size in bytes, key, number of its first segment in the launch, rounds
PLACE = tl.constexpr(5)
VERIFIED = tl.constexpr(1)
REJECTED = tl.constexpr(2)


@triton.jit
def load_cipher(at, offset, limit, inside, wide):
    """One word of each lane's block; bytes at ``limit`` and beyond are zeros, and not read.

    Args:
        at: Address that offsets count from.
        offset: Of the word.
        limit: Where the chunk ends; a multiple of four if ``wide``.
        inside: Lanes that have a block.
        wide: Whether all words lie at addresses that are multiples of four.
    """
    here = at + offset
    if wide:
        word = tl.load(here.to(tl.pointer_type(tl.uint32)), mask=inside & (offset < limit), other=0)
    else:
        word = offset.to(tl.uint32) & 0
        for b in range(4):
            byte = tl.load((here + b).to(tl.pointer_type(tl.uint8)), mask=inside & (offset + b < limit), other=0)
            word |= byte.to(tl.uint32) << (8 * b)
    return word


@triton.jit
def store_plain(at, word, offset, limit, inside, wide):
    """The counterpart of :func:`load_cipher`."""
    here = at + offset
    if wide:
        tl.store(here.to(tl.pointer_type(tl.uint32)), word, mask=inside & (offset < limit))
    else:
        for b in range(4):
            byte = (word >> (8 * b)).to(tl.uint8)
            tl.store((here + b).to(tl.pointer_type(tl.uint8)), byte, mask=inside & (offset + b < limit))


@triton.jit
def rotate(w):
    return w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[0]


@triton.jit
def open_segments(places, encrypted, schedules, chunk_of, partials, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Hash and decrypt one segment, in place; a program a segment.

    Args:
        places: int64[chunks, PLACE].
        encrypted: int32[chunks, ENCRYPTED_WORDS]. What ``encrypt_blocks`` made of the chunks' first counters.
        schedules: int32[keys, STRIDE]. Round keys and powers of H.
        chunk_of: int32[segments]. To which chunk each belongs.
        partials: int32[segments, 4]. Gets the hash of each segment.
        STRIDE: From one schedule to the next, in words.
        BLOCK: Lanes.
    """
    segment = tl.program_id(0)
    chunk = tl.load(chunk_of + segment).to(tl.int64)
    place = places + chunk * PLACE
    address = tl.load(place)
    nbytes = tl.load(place + 1)
    schedule = schedules + tl.load(place + 2) * STRIDE
    number = segment - tl.load(place + 3)  # from the end of the chunk
    rounds = tl.load(place + 4).to(tl.int32)
    start = encrypted + chunk * ENCRYPTED_WORDS

    # Where the segment begins, in blocks: in the first one of a chunk, before the chunk.
    first = (nbytes + 15) // 16 - (number + 1) * (TILES * 8 * BLOCK)
    skip = tl.maximum(-first, 0).to(tl.int32)
    limit = tl.minimum(nbytes - first * 16, TILES * 8 * BLOCK * 16).to(tl.int32)
    at = address + first * 16
    wide = ((address | limit) & 3) == 0

    lane = tl.arange(0, BLOCK)
    none = tl.full([BLOCK], 0, tl.uint32)
    total = (none, none, none, none)
    stride = schedule + (POWERS + 4 * (BLOCK - 1))
    for tile in range(skip // (8 * BLOCK), TILES):
        position = tile * (8 * BLOCK) + lane
        # J0, which masks the tag, is counter 1. The sum is right modulo 2^32 where the block is not there at all, too.
        counter = (first + (position + 2)).to(tl.uint32)
        k0, k1, k2, k3 = encrypt_counters(counter, BLOCK, start, schedule, rounds)
        for _ in range(8):
            inside = position >= skip
            offset = position * 16
            c0 = load_cipher(at, offset, limit, inside, wide)
            c1 = load_cipher(at, offset + 4, limit, inside, wide)
            c2 = load_cipher(at, offset + 8, limit, inside, wide)
            c3 = load_cipher(at, offset + 12, limit, inside, wide)
            # Loaded anew for each block: kept, its 36 masked parts cost a quarter of the registers.
            total = add(multiply(total, load_element(stride)), element(c0, c1, c2, c3))
            store_plain(at, c0 ^ k0[0], offset, limit, inside, wide)
            store_plain(at, c1 ^ k1[0], offset + 4, limit, inside, wide)
            store_plain(at, c2 ^ k2[0], offset + 8, limit, inside, wide)
            store_plain(at, c3 ^ k3[0], offset + 12, limit, inside, wide)
            # Registers have no index: the key stream moves up by one.
            k0 = rotate(k0)
            k1 = rotate(k1)
            k2 = rotate(k2)
            k3 = rotate(k3)
            position += BLOCK
    total = multiply(total, load_element(schedule + POWERS + 4 * (BLOCK - 1 - lane)))
    for i in tl.static_range(4):
        tl.store(partials + segment.to(tl.int64) * 4 + i, tl.xor_sum(total[i], 0).to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["count", "bits"])
def sum_segments(
    places,
    schedules,
    chunk_of,
    partials,
    sums,
    count,
    bits,
    STRIDE: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the hashes of all segments to those of their chunks; a lane a segment.

    The exponents, and so what is multiplied and what is not, are public.

    Args:
        places: int64[chunks, PLACE].
        schedules: int32[keys, STRIDE]. Powers of H.
        chunk_of: int32[segments].
        partials: int32[segments, 4].
        sums: int32[chunks, 4], zeros. Gets the hash of each chunk.
        count: How many segments there are.
        bits: How many bits the highest number of a segment in its chunk has.
        STRIDE: From one schedule to the next, in words.
        SHIFT: A segment has 2^SHIFT blocks.
        BLOCK: Lanes.
    """
    segment = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = segment < count
    chunk = tl.load(chunk_of + segment, mask=inside, other=0).to(tl.int64)
    place = places + chunk * PLACE
    schedule = schedules + tl.load(place + 2) * STRIDE
    number = segment - tl.load(place + 3)
    at = partials + segment.to(tl.int64) * 4
    total = (
        tl.load(at, mask=inside, other=0).to(tl.uint32, bitcast=True),
        tl.load(at + 1, mask=inside, other=0).to(tl.uint32, bitcast=True),
        tl.load(at + 2, mask=inside, other=0).to(tl.uint32, bitcast=True),
        tl.load(at + 3, mask=inside, other=0).to(tl.uint32, bitcast=True),
    )
    power = schedule + (SQUARES + 4 * SHIFT)
    for bit in range(bits):
        total = select(((number >> bit) & 1) != 0, multiply(total, load_element(power + 4 * bit)), total)
    for i in tl.static_range(4):
        tl.atomic_xor(sums + chunk * 4 + i, total[i].to(tl.int32, bitcast=True), mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=["count"])
def judge(places, encrypted, schedules, sums, tags, verdicts, count, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Finish the tags and compare them, every bit of every one; a lane a chunk.

    Args:
        places: int64[chunks, PLACE].
        encrypted: int32[chunks, ENCRYPTED_WORDS].
        schedules: int32[keys, STRIDE].
        sums: int32[chunks, 4]. The hash of each ciphertext.
        tags: int32[chunks, 4]. As they came with the chunks.
        verdicts: int32[chunks]. Gets VERIFIED or REJECTED.
        count: How many chunks there are.
        STRIDE: From one schedule to the next, in words.
        BLOCK: Lanes.
    """
    chunk = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = chunk < count
    chunk = tl.where(inside, chunk, 0).to(tl.int64)
    place = places + chunk * PLACE
    bits = tl.load(place + 1).to(tl.uint64) * 8
    lengths = (
        bits.to(tl.uint32),
        (bits >> 32).to(tl.uint32),
        tl.full([BLOCK], 0, tl.uint32),
        tl.full([BLOCK], 0, tl.uint32),
    )
    schedule = schedules + tl.load(place + 2) * STRIDE
    total = multiply(add(load_element(sums + chunk * 4), lengths), load_element(schedule + SQUARES))
    mask = encrypted + chunk * ENCRYPTED_WORDS + STARTED_WORDS
    tag = tags + chunk * 4
    difference = tl.full([BLOCK], 0, tl.uint32)
    for i in tl.static_range(4):
        difference |= swap_bytes(total[3 - i]) ^ load_words(mask + i) ^ load_words(tag + i)
    tl.store(verdicts + chunk, tl.where(difference == 0, VERIFIED, REJECTED), mask=inside)


@triton.jit
def wipe_chunks(places, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """Overwrite all chunks with zeros; PROGRAMS programs a chunk.

    Args:
        places: int64[chunks, PLACE].
        PROGRAMS: How many share a chunk.
        BLOCK: Bytes that one of them writes at once.
    """
    place = places + tl.program_id(0).to(tl.int64) * PLACE
    address = tl.load(place)
    nbytes = tl.load(place + 1)
    zeros = tl.full([BLOCK], 0, tl.uint8)
    for start in range(tl.program_id(1).to(tl.int64) * BLOCK, nbytes, PROGRAMS * BLOCK):
        offset = start + tl.arange(0, BLOCK)
        tl.store((address + offset).to(tl.pointer_type(tl.uint8)), zeros, mask=offset < nbytes)
