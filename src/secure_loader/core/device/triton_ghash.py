# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, N803 - Triton has a Python of its own
"""GHASH in Triton: multiplication in GF(2^128) from integer multiplication, in constant time.

An element is four words, the highest first in memory and last in the tuple: bit 31 of word 3 is the coefficient of x^0, bit 0 of
word 0 that of x^127. In this order a carry-less product of two elements is their product in the field, but for a factor of x
and the reduction. The factor is taken care of beforehand: one operand of every product is a *key power*, stored times x^-1.
"""

import triton
import triton.language as tl

from .triton_aes import ENCRYPTED_WORDS, SCHEDULE_WORDS, STARTED_WORDS, load_words

SQUARES = tl.constexpr(SCHEDULE_WORDS)  # H^(2^j), j = 0 … 31: a chunk has less than 2^32 blocks
POWERS = tl.constexpr(SCHEDULE_WORDS + 32 * 4)  # H^e, e = 1 … lanes


@triton.jit
def multiply_wide(a, b):
    return a.to(tl.uint64) * b.to(tl.uint64)


@triton.jit
def low_word(z):
    return z.to(tl.uint32)


@triton.jit
def high_word(z):
    return (z >> 32).to(tl.uint32)


@triton.jit
def pick(a, b, c, d):
    """From each class of every fourth bit those bits that no carry has reached."""
    return (a & 0x11111111) | (b & 0x22222222) | (c & 0x44444444) | (d & 0x88888888)


@triton.jit
def multiply_words(x, y):
    """The carry-less product of two words, as its low and its high word.

    With only every fourth bit set in both operands, at most eight ones meet in one bit of an integer product: their sum needs
    four bits, so it never carries into the next bit of its class, and its lowest bit is their XOR.
    """
    x0 = x & 0x11111111
    x1 = x & 0x22222222
    x2 = x & 0x44444444
    x3 = x & 0x88888888
    y0 = y & 0x11111111
    y1 = y & 0x22222222
    y2 = y & 0x44444444
    y3 = y & 0x88888888
    z0 = multiply_wide(x0, y0) ^ multiply_wide(x1, y3) ^ multiply_wide(x2, y2) ^ multiply_wide(x3, y1)
    z1 = multiply_wide(x0, y1) ^ multiply_wide(x1, y0) ^ multiply_wide(x2, y3) ^ multiply_wide(x3, y2)
    z2 = multiply_wide(x0, y2) ^ multiply_wide(x1, y1) ^ multiply_wide(x2, y0) ^ multiply_wide(x3, y3)
    z3 = multiply_wide(x0, y3) ^ multiply_wide(x1, y2) ^ multiply_wide(x2, y1) ^ multiply_wide(x3, y0)
    return (
        pick(low_word(z0), low_word(z1), low_word(z2), low_word(z3)),
        pick(high_word(z0), high_word(z1), high_word(z2), high_word(z3)),
    )


@triton.jit
def multiply_pairs(a0, a1, b0, b1):
    """The carry-less product of two words by two, by Karatsuba: four words."""
    low0, low1 = multiply_words(a0, b0)
    high0, high1 = multiply_words(a1, b1)
    mid0, mid1 = multiply_words(a0 ^ a1, b0 ^ b1)
    return low0, low1 ^ mid0 ^ low0 ^ high0, high0 ^ mid1 ^ low1 ^ high1, high1


@triton.jit
def reduce_word(w, low, high):
    """Take the lowest word off a product: x^128 = x^7 + x^2 + x + 1, in reversed bits."""
    return low ^ (w << 31) ^ (w << 30) ^ (w << 25), high ^ w ^ (w >> 1) ^ (w >> 2) ^ (w >> 7)


@triton.jit
def multiply(a, b):
    """The product of an element and a key power; if both are key powers, so is the product."""
    l0, l1, l2, l3 = multiply_pairs(a[0], a[1], b[0], b[1])
    h0, h1, h2, h3 = multiply_pairs(a[2], a[3], b[2], b[3])
    m0, m1, m2, m3 = multiply_pairs(a[0] ^ a[2], a[1] ^ a[3], b[0] ^ b[2], b[1] ^ b[3])
    v2 = l2 ^ m0 ^ l0 ^ h0
    v3 = l3 ^ m1 ^ l1 ^ h1
    v4 = h0 ^ m2 ^ l2 ^ h2
    v5 = h1 ^ m3 ^ l3 ^ h3
    v3, v4 = reduce_word(l0, v3, v4)
    v4, v5 = reduce_word(l1, v4, v5)
    v5, v6 = reduce_word(v2, v5, h2)
    v6, v7 = reduce_word(v3, v6, h3)
    return v4, v5, v6, v7


@triton.jit
def swap_bytes(w):
    return (w << 24) | ((w & 0xFF00) << 8) | ((w >> 8) & 0xFF00) | (w >> 24)


@triton.jit
def element(w0, w1, w2, w3):
    """The element of a block whose words in memory are these."""
    return swap_bytes(w3), swap_bytes(w2), swap_bytes(w1), swap_bytes(w0)


@triton.jit
def add(a, b):
    return a[0] ^ b[0], a[1] ^ b[1], a[2] ^ b[2], a[3] ^ b[3]


@triton.jit
def select(condition, a, b):
    """Element by element of a tensor; both are there, none is branched to."""
    return (
        tl.where(condition, a[0], b[0]),
        tl.where(condition, a[1], b[1]),
        tl.where(condition, a[2], b[2]),
        tl.where(condition, a[3], b[3]),
    )


@triton.jit
def load_element(at):
    return load_words(at), load_words(at + 1), load_words(at + 2), load_words(at + 3)


@triton.jit
def store_element(at, a):
    for i in tl.static_range(4):
        tl.store(at + i, a[i].to(tl.int32, bitcast=True))


@triton.jit
def key_power(h):
    """An element times x^-1."""
    one = h[3] >> 31  # the coefficient of x^0, which comes out as x^127 + x^6 + x + 1
    return (
        (h[0] << 1) | one,
        (h[1] << 1) | (h[0] >> 31),
        (h[2] << 1) | (h[1] >> 31),
        ((h[3] << 1) | (h[2] >> 31)) ^ (one << 31) ^ (one << 30) ^ (one << 25),
    )


@triton.jit
def raise_key(encrypted, schedules, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Make the powers of H; a program a key.

    Args:
        encrypted: int32[keys, ENCRYPTED_WORDS]. What ``encrypt_blocks`` made of a block of zeros, under each key.
        schedules: int32[keys, STRIDE]. Gets the powers from SQUARES on.
        STRIDE: From one schedule to the next, in words.
        BLOCK: Lanes; the powers up to H^BLOCK are kept.
    """
    key = tl.program_id(0).to(tl.int64)
    block = encrypted + key * ENCRYPTED_WORDS + STARTED_WORDS
    at = schedules + key * STRIDE
    square = key_power(element(load_words(block), load_words(block + 1), load_words(block + 2), load_words(block + 3)))
    exponent = tl.arange(0, BLOCK) + 1
    none = tl.full([BLOCK], 0, tl.uint32)
    power = (none + 0x1, none, none, none + 0xC2000000)  # 1, times x^-1
    for j in range(32):
        store_element(at + SQUARES + 4 * j, square)
        power = select(((exponent >> j) & 1) != 0, multiply(power, square), power)
        square = multiply(square, square)
    store_element(at + POWERS + 4 * (exponent - 1), power)
