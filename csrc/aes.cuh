// AES-128 and AES-256, forward only: counter mode needs no more. FIPS 197, on the state of bitslice.cuh.
#pragma once
#include "abi.cuh"
#include "bitslice.cuh"
#include "sbox.cuh"

// SubBytes, then ShiftRows: row r rotates by r columns.
static __device__ __forceinline__ void sl_sub_shift(u32 a[4][8]) {
#pragma unroll
  for (int row = 0; row < 4; ++row) sl_sbox(a[row]);
#pragma unroll
  for (int bit = 0; bit < 8; ++bit) {
    a[1][bit] = __byte_perm(a[1][bit], 0, 0x0321);
    a[2][bit] = __byte_perm(a[2][bit], 0, 0x1032);
    a[3][bit] = __byte_perm(a[3][bit], 0, 0x2103);
  }
}

// A whole round. MixColumns: row r becomes 2 a[r] + 3 a[r+1] + a[r+2] + a[r+3] = 2 (a[r] + a[r+1]) + a[r+1] + (a[r+2] +
// a[r+3]). Twice a byte is a shift by one bit; what falls out at the top, bit 7, comes back as x^4 + x^3 + x + 1.
static __device__ __forceinline__ void sl_round(u32 a[4][8], const u32 *key) {
  sl_sub_shift(a);
  u32 t[4][8], n[4][8];
#pragma unroll
  for (int row = 0; row < 4; ++row)
#pragma unroll
    for (int bit = 0; bit < 8; ++bit) t[row][bit] = a[row][bit] ^ a[(row + 1) & 3][bit];
#pragma unroll
  for (int row = 0; row < 4; ++row)
#pragma unroll
    for (int bit = 0; bit < 8; ++bit) {
      u32 v = t[row][(bit + 7) & 7] ^ a[(row + 1) & 3][bit] ^ t[(row + 2) & 3][bit];
      if (bit == 1 || bit == 3 || bit == 4) v ^= t[row][7];
      n[row][bit] = v ^ key[8 * row + bit];
    }
#pragma unroll
  for (int row = 0; row < 4; ++row)
#pragma unroll
    for (int bit = 0; bit < 8; ++bit) a[row][bit] = n[row][bit];
}

// The key stream of 8 blocks whose counters are `step` apart: words[c][k] = word c of block k.
// round_keys[0] has the nonce in it already (sl_stage_keys); it and the others are read at addresses that depend on the
// round alone.
static __device__ __forceinline__ void sl_keystream(
    const u32 (*round_keys)[32], u32 rounds, u32 counter, u32 step, u32 words[4][8]) {
  u32 a[4][8];
#pragma unroll
  for (int i = 0; i < 32; ++i) a[i >> 3][i & 7] = round_keys[0][i];
  sl_add_counters(a, counter, step);
#pragma unroll 1
  for (u32 r = 1; r < rounds; ++r) sl_round(a, round_keys[r]);
  sl_sub_shift(a);
#pragma unroll
  for (int i = 0; i < 32; ++i) a[i >> 3][i & 7] ^= round_keys[rounds][i];
  sl_unslice(a, words);
}

// Bring a schedule to shared memory, with a nonce in its first round key. The whole CTA takes part; barriers are the
// caller's.
static __device__ __forceinline__ void sl_stage_keys(u32 (*to)[32], const SlSchedule &schedule, const u32 nonce[3]) {
  const u32 *from = schedule.round_keys[0];
#pragma unroll 1
  for (u32 i = threadIdx.x; i < 32 * (SL_MAX_ROUNDS + 1); i += SL_THREADS) {
    const u32 word = from[i];
    to[i >> 5][i & 31] = i < 32 ? word ^ sl_slice(nonce, 3, i) : word;
  }
}
