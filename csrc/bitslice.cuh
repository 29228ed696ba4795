// 8 blocks in 32 registers, and back.
//
// state[row][bit]: the AES state has 4 rows and 4 columns of bytes. One register holds one bit of all bytes of one row:
// its byte c belongs to column c, and in that byte bit k belongs to block k. So the S-box works on the 8 registers of a
// row, ShiftRows rotates registers by whole bytes, MixColumns combines registers, and no thread needs anything of
// another.
#pragma once
#include "platform.cuh"

// Exchange the bits of `a` that are not in `mask` with those of `b` that are.
template <int shift, u32 mask>
static __device__ __forceinline__ void sl_swap(u32 &a, u32 &b) {
  const u32 low = (a & mask) | ((b << shift) & ~mask), high = ((a >> shift) & mask) | (b & ~mask);
  a = low;
  b = high;
}

// Afterwards bit k of each byte of w[j] is what was bit j of the same byte of w[k]. Its own inverse.
static __device__ __forceinline__ void sl_transpose(u32 w[8]) {
  sl_swap<1, 0x55555555u>(w[0], w[1]); sl_swap<1, 0x55555555u>(w[2], w[3]);
  sl_swap<1, 0x55555555u>(w[4], w[5]); sl_swap<1, 0x55555555u>(w[6], w[7]);
  sl_swap<2, 0x33333333u>(w[0], w[2]); sl_swap<2, 0x33333333u>(w[1], w[3]);
  sl_swap<2, 0x33333333u>(w[4], w[6]); sl_swap<2, 0x33333333u>(w[5], w[7]);
  sl_swap<4, 0x0f0f0f0fu>(w[0], w[4]); sl_swap<4, 0x0f0f0f0fu>(w[1], w[5]);
  sl_swap<4, 0x0f0f0f0fu>(w[2], w[6]); sl_swap<4, 0x0f0f0f0fu>(w[3], w[7]);
}

// The register of one row and bit (slice = 8 * row + bit) for `columns` columns that are the same in all 8 blocks.
// A column is a word of the block as it lies in memory: its lowest byte is row 0.
static __device__ __forceinline__ u32 sl_slice(const u32 *words, int columns, u32 slice) {
  u32 out = 0;
  for (int c = 0; c < columns; ++c) out |= ((words[c] >> slice) & 1u) * (0xffu << (8 * c));
  return out;
}

// Counters counter, counter + step, ... of 8 blocks, XORed into column 3 of the state (a counter is big-endian).
static __device__ __forceinline__ void sl_add_counters(u32 state[4][8], u32 counter, u32 step) {
  u32 t[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) t[k] = counter + k * step;
  sl_transpose(t);
#pragma unroll
  for (int row = 0; row < 4; ++row)
#pragma unroll
    for (int bit = 0; bit < 8; ++bit)  // byte 3 - row, moved to 3
      state[row][bit] ^= __byte_perm(t[bit], 0, ((3 - row) << 12) | 0x444);
}

// words[c][k] = word c of block k, as it lies in memory.
static __device__ __forceinline__ void sl_unslice(const u32 state[4][8], u32 words[4][8]) {
#pragma unroll
  for (int bit = 0; bit < 8; ++bit) {  // from (row; byte = column) to (column; byte = row)
    const u32 a = __byte_perm(state[0][bit], state[1][bit], 0x5140);
    const u32 b = __byte_perm(state[0][bit], state[1][bit], 0x7362);
    const u32 c = __byte_perm(state[2][bit], state[3][bit], 0x5140);
    const u32 d = __byte_perm(state[2][bit], state[3][bit], 0x7362);
    words[0][bit] = __byte_perm(a, c, 0x5410);
    words[1][bit] = __byte_perm(a, c, 0x7632);
    words[2][bit] = __byte_perm(b, d, 0x5410);
    words[3][bit] = __byte_perm(b, d, 0x7632);
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) sl_transpose(words[c]);
}
