// The field of GHASH, GF(2^128) modulo x^128 + x^7 + x^2 + x + 1, by integer multiplication: no table, no secret
// address.
//
// Order. In GCM the first bit of a block, the top bit of byte 0, is the coefficient of x^0. Read as one 128-bit
// integer, big-endian, bit 127 - i is the coefficient of x^i. w[3] holds bytes 0..3 (the top of the integer), w[0]
// bytes 12..15.
//
// Product. A carry-less product of two such integers has 255 bits; bit 254 - k is the coefficient of x^k. Read as if it
// had 256 bits in the same order (bit 255 - k for x^k), it is x times what it should be. So the second factor is kept
// divided by x ("prepared"), and nothing has to be shifted. Prepared factors multiply to prepared products: (a / x)
// times prepared b is (ab / x).
//
// Reduction. Bit p < 128 of the product is x^(255 - p) = x^128 x^(127 - p) = (1 + x + x^2 + x^7) x^(127 - p): it is
// added at p + 128, and 1, 2 and 7 places below that. What falls below bit 128 is folded with the next word, so words
// go from the lowest up.
#pragma once
#include "platform.cuh"

struct SlGf {
  u32 w[4];
};

static __device__ __forceinline__ SlGf sl_gf(uint4 v) {
  SlGf r;
  r.w[0] = v.x; r.w[1] = v.y; r.w[2] = v.z; r.w[3] = v.w;
  return r;
}

static __device__ __forceinline__ uint4 sl_gf_words(SlGf a) {
  uint4 r;
  r.x = a.w[0]; r.y = a.w[1]; r.z = a.w[2]; r.w = a.w[3];
  return r;
}

static __device__ __forceinline__ u32 sl_byteswap(u32 x) { return __byte_perm(x, 0, 0x0123); }

// From a block as it lies in memory, and back.
static __device__ __forceinline__ SlGf sl_gf_of_block(uint4 b) {
  SlGf r;
  r.w[0] = sl_byteswap(b.w); r.w[1] = sl_byteswap(b.z); r.w[2] = sl_byteswap(b.y); r.w[3] = sl_byteswap(b.x);
  return r;
}

static __device__ __forceinline__ uint4 sl_gf_to_block(SlGf a) {
  uint4 r;
  r.x = sl_byteswap(a.w[3]); r.y = sl_byteswap(a.w[2]); r.z = sl_byteswap(a.w[1]); r.w = sl_byteswap(a.w[0]);
  return r;
}

static __device__ __forceinline__ SlGf sl_gf_zero() {
  SlGf r;
  r.w[0] = r.w[1] = r.w[2] = r.w[3] = 0;
  return r;
}

static __device__ __forceinline__ SlGf sl_gf_add(SlGf a, SlGf b) {
  SlGf r;
#pragma unroll
  for (int i = 0; i < 4; ++i) r.w[i] = a.w[i] ^ b.w[i];
  return r;
}

// Carry-less 32 x 32 -> 64. With every fourth bit alone, at most 8 products meet in one place, so that the sum stays in
// the four bits up to the next place, and its lowest bit is their parity. Integer multiplies take the same time for all
// operands.
static __device__ __forceinline__ u64 sl_carryless(u32 x, u32 y) {
  const u64 x0 = x & 0x11111111u, x1 = x & 0x22222222u, x2 = x & 0x44444444u, x3 = x & 0x88888888u;
  const u64 y0 = y & 0x11111111u, y1 = y & 0x22222222u, y2 = y & 0x44444444u, y3 = y & 0x88888888u;
  const u64 z0 = (x0 * y0) ^ (x1 * y3) ^ (x2 * y2) ^ (x3 * y1);
  const u64 z1 = (x0 * y1) ^ (x1 * y0) ^ (x2 * y3) ^ (x3 * y2);
  const u64 z2 = (x0 * y2) ^ (x1 * y1) ^ (x2 * y0) ^ (x3 * y3);
  const u64 z3 = (x0 * y3) ^ (x1 * y2) ^ (x2 * y1) ^ (x3 * y0);
  const u64 m = 0x1111111111111111ull;
  return (z0 & m) | (z1 & (m << 1)) | (z2 & (m << 2)) | (z3 & (m << 3));
}

static __device__ __forceinline__ void sl_fold(u32 word, u32 &below, u32 &at) {
  below ^= (word << 31) ^ (word << 30) ^ (word << 25);
  at ^= word ^ (word >> 1) ^ (word >> 2) ^ (word >> 7);
}

// a times what `b` was prepared of. Karatsuba twice: 9 products of words in place of 16.
static __device__ __forceinline__ SlGf sl_gf_mul(SlGf a, SlGf b) {
  const u64 p00 = sl_carryless(a.w[0], b.w[0]), p11 = sl_carryless(a.w[1], b.w[1]);
  const u64 p22 = sl_carryless(a.w[2], b.w[2]), p33 = sl_carryless(a.w[3], b.w[3]);
  const u64 p01 = sl_carryless(a.w[0] ^ a.w[1], b.w[0] ^ b.w[1]) ^ p00 ^ p11;
  const u64 p23 = sl_carryless(a.w[2] ^ a.w[3], b.w[2] ^ b.w[3]) ^ p22 ^ p33;
  const u32 a0 = a.w[0] ^ a.w[2], a1 = a.w[1] ^ a.w[3], b0 = b.w[0] ^ b.w[2], b1 = b.w[1] ^ b.w[3];
  const u64 m00 = sl_carryless(a0, b0), m11 = sl_carryless(a1, b1), m01 = sl_carryless(a0 ^ a1, b0 ^ b1) ^ m00 ^ m11;
  // low half times low half, high half times high half, and what stands between them
  const u32 l0 = (u32)p00, l1 = (u32)(p00 >> 32) ^ (u32)p01, l2 = (u32)p11 ^ (u32)(p01 >> 32), l3 = (u32)(p11 >> 32);
  const u32 h0 = (u32)p22, h1 = (u32)(p22 >> 32) ^ (u32)p23, h2 = (u32)p33 ^ (u32)(p23 >> 32), h3 = (u32)(p33 >> 32);
  const u32 n0 = (u32)m00 ^ l0 ^ h0, n1 = (u32)(m00 >> 32) ^ (u32)m01 ^ l1 ^ h1;
  const u32 n2 = (u32)m11 ^ (u32)(m01 >> 32) ^ l2 ^ h2, n3 = (u32)(m11 >> 32) ^ l3 ^ h3;
  u32 v0 = l0, v1 = l1, v2 = l2 ^ n0, v3 = l3 ^ n1, v4 = h0 ^ n2, v5 = h1 ^ n3, v6 = h2, v7 = h3;
  sl_fold(v0, v3, v4);
  sl_fold(v1, v4, v5);
  sl_fold(v2, v5, v6);
  sl_fold(v3, v6, v7);
  SlGf r;
  r.w[0] = v4; r.w[1] = v5; r.w[2] = v6; r.w[3] = v7;
  return r;
}

// The same where speed does not matter but the size of the program does.
static __device__ __noinline__ SlGf sl_gf_mul_called(SlGf a, SlGf b) { return sl_gf_mul(a, b); }

// a / x. 1 / x = x^127 + x^6 + x + 1, which comes in where a has a coefficient of x^0.
static __device__ __forceinline__ SlGf sl_gf_prepare(SlGf a) {
  const u32 one = 0u - (a.w[3] >> 31);
  SlGf r;
  r.w[3] = ((a.w[3] << 1) | (a.w[2] >> 31)) ^ (one & 0xc2000000u);
  r.w[2] = (a.w[2] << 1) | (a.w[1] >> 31);
  r.w[1] = (a.w[1] << 1) | (a.w[0] >> 31);
  r.w[0] = (a.w[0] << 1) ^ (one & 1u);
  return r;
}

// base^exponent, both prepared. The exponent is a count of blocks: it may decide which way the program goes.
static __device__ __forceinline__ SlGf sl_gf_power(SlGf base, u32 exponent) {
  SlGf r;
  r.w[0] = 1; r.w[1] = r.w[2] = 0; r.w[3] = 0xc2000000u;  // 1, prepared
#pragma unroll 1
  for (; exponent; exponent >>= 1) {
    if (exponent & 1u) r = sl_gf_mul_called(r, base);
    base = sl_gf_mul_called(base, base);
  }
  return r;
}
