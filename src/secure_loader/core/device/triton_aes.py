# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, N803, PLR1714, RUF005 - Triton has a Python of its own
"""AES in Triton, bitsliced: eight blocks a lane, in four rows of eight words.

Word ``i`` of row ``r`` holds bit ``i`` of the bytes of row ``r``: byte ``c`` of the word is column ``c``, and its bit ``k`` is
block ``k``. So ShiftRows is a rotation, MixColumns plain XOR, and no lane ever needs what another one holds.

One key schedule in device memory is ``SCHEDULE_WORDS`` words of 32 bits, and behind them the powers that GHASH needs.
"""

import triton
import triton.language as tl

from .triton_sbox import sub_bytes

ROUND_WORDS = tl.constexpr(32)  # a round key, as a state: 4 rows of 8 words
SCHEDULE_WORDS = tl.constexpr(16 * 32)  # AES-256 has 15 round keys; its expansion makes them in pairs
# What a block to encrypt leaves behind: the state before round 1, and its ciphertext
STARTED_WORDS = tl.constexpr(32)
ENCRYPTED_WORDS = tl.constexpr(32 + 4)


@triton.jit
def swap_bits(a, b, SHIFT: tl.constexpr, MASK: tl.constexpr):
    """Exchange the upper bits of ``a`` (those outside of MASK) with the lower ones of ``b``."""
    return (a & MASK) | ((b << SHIFT) & (0xFFFFFFFF ^ MASK)), ((a >> SHIFT) & MASK) | (b & (0xFFFFFFFF ^ MASK))


@triton.jit
def transpose_bits(w):
    """In each of the four byte positions: bit ``k`` of word ``i`` from bit ``i`` of word ``k``. Its own inverse."""
    w0, w1, w2, w3, w4, w5, w6, w7 = w
    w0, w1 = swap_bits(w0, w1, 1, 0x55555555)
    w2, w3 = swap_bits(w2, w3, 1, 0x55555555)
    w4, w5 = swap_bits(w4, w5, 1, 0x55555555)
    w6, w7 = swap_bits(w6, w7, 1, 0x55555555)
    w0, w2 = swap_bits(w0, w2, 2, 0x33333333)
    w1, w3 = swap_bits(w1, w3, 2, 0x33333333)
    w4, w6 = swap_bits(w4, w6, 2, 0x33333333)
    w5, w7 = swap_bits(w5, w7, 2, 0x33333333)
    w0, w4 = swap_bits(w0, w4, 4, 0x0F0F0F0F)
    w1, w5 = swap_bits(w1, w5, 4, 0x0F0F0F0F)
    w2, w6 = swap_bits(w2, w6, 4, 0x0F0F0F0F)
    w3, w7 = swap_bits(w3, w7, 4, 0x0F0F0F0F)
    return w0, w1, w2, w3, w4, w5, w6, w7


@triton.jit
def transpose_columns(rows):
    """Four rows of words to four columns of words: byte ``c`` of row ``r`` becomes byte ``r`` of column ``c``."""
    c0 = ()
    c1 = ()
    c2 = ()
    c3 = ()
    for i in tl.static_range(8):
        a0, a1 = swap_bits(rows[0][i], rows[1][i], 8, 0x00FF00FF)
        a2, a3 = swap_bits(rows[2][i], rows[3][i], 8, 0x00FF00FF)
        a0, a2 = swap_bits(a0, a2, 16, 0x0000FFFF)
        a1, a3 = swap_bits(a1, a3, 16, 0x0000FFFF)
        c0 = c0 + (a0,)
        c1 = c1 + (a1,)
        c2 = c2 + (a2,)
        c3 = c3 + (a3,)
    return c0, c1, c2, c3


@triton.jit
def load_words(at):
    """Words of memory as unsigned numbers; PyTorch's arithmetic knows signed ones only, so all tables are signed."""
    return tl.load(at).to(tl.uint32, bitcast=True)


@triton.jit
def shift_row(row, COLUMNS: tl.constexpr):
    """SubBytes and ShiftRows of one row."""
    out = sub_bytes(row)
    if COLUMNS > 0:
        s = out
        out = ()
        for i in tl.static_range(8):
            out = out + ((s[i] >> (8 * COLUMNS)) | (s[i] << (32 - 8 * COLUMNS)),)
    return out


@triton.jit
def mix_row(a, b, c, d):
    """One row of MixColumns, 2a + 3b + c + d, as 2(a + b) + b + (c + d).

    Doubling moves every bit one up; the highest one comes back into bits 0, 1, 3 and 4.
    """
    top = a[7] ^ b[7]
    out = ()
    for i in tl.static_range(8):
        if i == 0:
            doubled = top
        elif i == 1 or i == 3 or i == 4:
            doubled = a[i - 1] ^ b[i - 1] ^ top
        else:
            doubled = a[i - 1] ^ b[i - 1]
        out = out + (doubled ^ b[i] ^ (c[i] ^ d[i]),)
    return out


@triton.jit
def add_key(row, key):
    out = ()
    for i in tl.static_range(8):
        out = out + (row[i] ^ load_words(key + i),)
    return out


@triton.jit
def encrypt_state(r0, r1, r2, r3, schedule, rounds):
    """Rounds 1 to ``rounds`` of a state that round key 0 was added to.

    Args:
        r0, r1, r2, r3: The rows.
        schedule: Where the schedule is.
        rounds: 10 or 14.

    Returns:
        Four columns of eight words: word ``k`` of column ``c`` is the ``c``-th word, as it lies in memory, of block ``k``.
    """
    for n in range(1, rounds + 1):
        r0 = shift_row(r0, 0)
        r1 = shift_row(r1, 1)
        r2 = shift_row(r2, 2)
        r3 = shift_row(r3, 3)
        if n < rounds:
            s0 = mix_row(r0, r1, r2, r3)
            s1 = mix_row(r1, r2, r3, r0)
            s2 = mix_row(r2, r3, r0, r1)
            s3 = mix_row(r3, r0, r1, r2)
        else:  # the last round does without; one circuit for all rounds is one that compiles in a second, not in minutes
            s0 = r0
            s1 = r1
            s2 = r2
            s3 = r3
        key = schedule + n * ROUND_WORDS
        r0 = add_key(s0, key)
        r1 = add_key(s1, key + 8)
        r2 = add_key(s2, key + 16)
        r3 = add_key(s3, key + 24)
    c0, c1, c2, c3 = transpose_columns((r0, r1, r2, r3))
    return transpose_bits(c0), transpose_bits(c1), transpose_bits(c2), transpose_bits(c3)


@triton.jit
def counter_row(start, w, ROW: tl.constexpr):
    """One row of the first states of eight blocks: they differ from ``start`` in a byte of the counter, in column 3."""
    out = ()
    for i in tl.static_range(8):
        out = out + (((w[i] << (8 * ROW)) & 0xFF000000) ^ load_words(start + 8 * ROW + i),)
    return out


@triton.jit
def encrypt_counters(first, STEP: tl.constexpr, start, schedule, rounds):
    """The key stream of counters ``first``, ``first + STEP``, … (eight of them): see :func:`encrypt_state`.

    Args:
        first: One counter for each lane.
        STEP: From one block of a lane to the next.
        start: The state before round 1 with a counter of 1, as ``encrypt_blocks`` left it.
        schedule: The key schedule.
        rounds: 10 or 14.
    """
    w0 = first ^ 1
    w1 = (first + STEP) ^ 1
    w2 = (first + 2 * STEP) ^ 1
    w3 = (first + 3 * STEP) ^ 1
    w4 = (first + 4 * STEP) ^ 1
    w5 = (first + 5 * STEP) ^ 1
    w6 = (first + 6 * STEP) ^ 1
    w7 = (first + 7 * STEP) ^ 1
    w = transpose_bits((w0, w1, w2, w3, w4, w5, w6, w7))
    r0 = counter_row(start, w, 0)  # the highest byte of a counter comes first in memory
    r1 = counter_row(start, w, 1)
    r2 = counter_row(start, w, 2)
    r3 = counter_row(start, w, 3)
    return encrypt_state(r0, r1, r2, r3, schedule, rounds)


@triton.jit
def slice_word(w0, w1, w2, w3, BIT: tl.constexpr):
    """Bit ``BIT`` of four columns as a word of a state, the same in all eight blocks."""
    return (
        ((w0 >> BIT) & 1) * 0xFF
        | ((w1 >> BIT) & 1) * 0xFF00
        | ((w2 >> BIT) & 1) * 0xFF0000
        | ((w3 >> BIT) & 1) * 0xFF000000
    )


@triton.jit
def store_word(at, word):
    tl.store(at, word.to(tl.int32, bitcast=True))


@triton.jit
def store_round_key(at, w0, w1, w2, w3, fold):
    """Store four words as a round key, with 0x63 (bits 0, 1, 5 and 6) added where ``fold`` is all ones."""
    for r in tl.static_range(4):
        for i in tl.static_range(8):
            word = slice_word(w0, w1, w2, w3, 8 * r + i)
            if i == 0 or i == 1 or i == 5 or i == 6:
                word = word ^ fold
            store_word(at + (8 * r + i), word)


@triton.jit
def sub_word(w):
    """SubWord of the key expansion."""
    x = ()
    for i in tl.static_range(8):
        x = x + ((w >> i) & 0x01010101,)
    s = sub_bytes(x)
    out = tl.full((), 0x63636363, tl.uint32)
    for i in tl.static_range(8):
        out = out ^ ((s[i] & 0x01010101) << i)
    return out


@triton.jit
def expand_keys(keys, sizes, schedules, STRIDE: tl.constexpr):
    """Make the key schedule of one key; a program a key, all of its lanes alike.

    Args:
        keys: int32[keys, 8]. Raw keys.
        sizes: int32[keys]. How many words each has: 4 or 8.
        schedules: int32[keys, STRIDE]. Gets 11 round keys, or 16, of which the last is not used.
        STRIDE: From one schedule to the next, in words.
    """
    key = tl.program_id(0).to(tl.int64)
    raw = keys + key * 8
    at = schedules + key * STRIDE
    factor = tl.full((), 1, tl.uint32)  # Rcon
    # Round key 0 is added before any SubBytes; the others make up for what sub_bytes leaves out.
    fold = tl.full((), 0, tl.uint32)
    a0 = load_words(raw)
    a1 = load_words(raw + 1)
    a2 = load_words(raw + 2)
    a3 = load_words(raw + 3)
    if tl.load(sizes + key) == 8:
        a4 = load_words(raw + 4)
        a5 = load_words(raw + 5)
        a6 = load_words(raw + 6)
        a7 = load_words(raw + 7)
        for _ in range(8):
            store_round_key(at, a0, a1, a2, a3, fold)
            fold = tl.full((), 0xFFFFFFFF, tl.uint32)
            store_round_key(at + ROUND_WORDS, a4, a5, a6, a7, fold)
            at += 2 * ROUND_WORDS
            a0 ^= sub_word((a7 >> 8) | (a7 << 24)) ^ factor
            a1 ^= a0
            a2 ^= a1
            a3 ^= a2
            a4 ^= sub_word(a3)
            a5 ^= a4
            a6 ^= a5
            a7 ^= a6
            factor = factor << 1  # seven steps do not reach the reduction
    else:
        for _ in range(11):
            store_round_key(at, a0, a1, a2, a3, fold)
            fold = tl.full((), 0xFFFFFFFF, tl.uint32)
            at += ROUND_WORDS
            a0 ^= sub_word((a3 >> 8) | (a3 << 24)) ^ factor
            a1 ^= a0
            a2 ^= a1
            a3 ^= a2
            factor = (factor << 1) ^ ((factor >> 7) * 0x11B)


@triton.jit
def encrypt_blocks(blocks, schedules, out, STRIDE: tl.constexpr):
    """Encrypt single blocks; a program a block, all of its lanes alike.

    Args:
        blocks: int32[blocks, 8]. The block, the index of its key, the rounds of that key, and two words of padding.
        schedules: int32[keys, STRIDE].
        out: int32[blocks, ENCRYPTED_WORDS]. Gets the state before round 1, then the block, encrypted.
        STRIDE: From one schedule to the next, in words.
    """
    number = tl.program_id(0).to(tl.int64)
    block = blocks + number * 8
    w0 = load_words(block)
    w1 = load_words(block + 1)
    w2 = load_words(block + 2)
    w3 = load_words(block + 3)
    schedule = schedules + tl.load(block + 4).to(tl.int64) * STRIDE
    at = out + number * ENCRYPTED_WORDS
    rows = ()
    for r in tl.static_range(4):
        row = ()
        for i in tl.static_range(8):
            word = slice_word(w0, w1, w2, w3, 8 * r + i) ^ load_words(schedule + (8 * r + i))
            store_word(at + (8 * r + i), word)
            row = row + (word,)
        rows = rows + (row,)
    c0, c1, c2, c3 = encrypt_state(rows[0], rows[1], rows[2], rows[3], schedule, tl.load(block + 5))
    at += STARTED_WORDS
    store_word(at, c0[0])
    store_word(at + 1, c1[0])
    store_word(at + 2, c2[0])
    store_word(at + 3, c3[0])
