// A block of a chunk, at any address, and a chunk's last block, which may be short.
//
// Only the bytes of the block itself are read and written, whatever their alignment: the words around an unaligned
// block belong to other threads, which change them at the same time.
#pragma once
#include "platform.cuh"

// 16, 4 or 1: what divides both addresses.
static __device__ __forceinline__ u32 sl_alignment(const u8 *in, const u8 *out) {
  const u64 bits = (u64)in | (u64)out;
  return (bits & 15) == 0 ? 16 : (bits & 3) == 0 ? 4 : 1;
}

static __device__ __forceinline__ u32 sl_load_word(const u8 *p) {
  return sl_read1(p) | sl_read1(p + 1) << 8 | sl_read1(p + 2) << 16 | sl_read1(p + 3) << 24;
}

static __device__ __forceinline__ void sl_store_word(u8 *p, u32 word) {
  sl_write1(p, word & 0xffu); sl_write1(p + 1, word >> 8 & 0xffu);
  sl_write1(p + 2, word >> 16 & 0xffu); sl_write1(p + 3, word >> 24);
}

static __device__ __forceinline__ uint4 sl_load_block(const u8 *p, u32 alignment) {
  uint4 v;
  if (alignment == 16) {
    v = sl_read16(p);
  } else if (alignment == 4) {
    v.x = sl_read4(p); v.y = sl_read4(p + 4); v.z = sl_read4(p + 8); v.w = sl_read4(p + 12);
  } else {
    v.x = sl_load_word(p); v.y = sl_load_word(p + 4); v.z = sl_load_word(p + 8); v.w = sl_load_word(p + 12);
  }
  return v;
}

static __device__ __forceinline__ void sl_store_block(u8 *p, uint4 v, u32 alignment) {
  if (alignment == 16) {
    sl_write16(p, v);
  } else if (alignment == 4) {
    sl_write4(p, v.x); sl_write4(p + 4, v.y); sl_write4(p + 8, v.z); sl_write4(p + 12, v.w);
  } else {
    sl_store_word(p, v.x); sl_store_word(p + 4, v.y); sl_store_word(p + 8, v.z); sl_store_word(p + 12, v.w);
  }
}

// The short one, zeros behind it, by way of a place in shared memory that is this thread's alone: registers cannot be
// indexed.
static __device__ __forceinline__ uint4 sl_load_short(const u8 *p, u32 nbytes, uint4 *place) {
  u8 *bytes = (u8 *)place;
#pragma unroll 1
  for (u32 i = 0; i < 16; ++i) bytes[i] = i < nbytes ? (u8)sl_read1(p + i) : 0;
  return *place;
}

static __device__ __forceinline__ void sl_store_short(u8 *p, uint4 v, u32 nbytes, uint4 *place) {
  const u8 *bytes = (const u8 *)place;
  *place = v;
#pragma unroll 1
  for (u32 i = 0; i < nbytes; ++i) sl_write1(p + i, bytes[i]);
}

static __device__ __forceinline__ uint4 sl_xor(uint4 a, uint4 b) {
  a.x ^= b.x; a.y ^= b.y; a.z ^= b.z; a.w ^= b.w;
  return a;
}

// All ones in the first `nbytes` of the four bytes that start at byte `first` of a block.
static __device__ __forceinline__ u32 sl_mask(u32 nbytes, u32 first) {
  return nbytes <= first ? 0u : nbytes >= first + 4 ? 0xffffffffu : (1u << (8 * (nbytes - first))) - 1u;
}

// The block with zeros behind its first `nbytes`.
static __device__ __forceinline__ uint4 sl_cut(uint4 v, u32 nbytes) {
  v.x &= sl_mask(nbytes, 0); v.y &= sl_mask(nbytes, 4); v.z &= sl_mask(nbytes, 8); v.w &= sl_mask(nbytes, 12);
  return v;
}
