// From a raw key to everything that is the same for all chunks under it: bitsliced round keys and powers of H.
#pragma once
#include "abi.cuh"
#include "aes.cuh"
#include "cta.cuh"
#include "gf128.cuh"

struct SlExpandShared {
  u32 words[4 * (SL_MAX_ROUNDS + 1)];  // FIPS 197's w[], a word as it lies in memory: its lowest byte is row 0
  u32 round_keys[SL_MAX_ROUNDS + 1][32];
  uint4 power[SL_THREADS];
};

// The S-box on the four bytes of a word: bit i of each byte in a register of its own, the other 28 bits idle.
static __device__ __forceinline__ u32 sl_sub_word(u32 word) {
  u32 bits[8], out = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) bits[i] = (word >> i) & 0x01010101u;
  sl_sbox(bits);
#pragma unroll
  for (int i = 0; i < 8; ++i) out |= (bits[i] & 0x01010101u) << i;
  return out;
}

// FIPS 197, 5.2, by one thread: each word needs the one before it. `size` is 4 or 8 words; it decides which way the
// program goes, key bytes do not.
static __device__ __forceinline__ void sl_expand_words(const SlKey &key, u32 size, u32 rounds, u32 *words) {
#pragma unroll 1
  for (u32 i = 0; i < size; ++i) words[i] = key.words[i];
  u32 constant = 1;
#pragma unroll 1
  for (u32 i = size; i < 4 * (rounds + 1); ++i) {
    u32 t = words[i - 1];
    const u32 at = i % size;
    if (at == 0 || (size == 8 && at == 4)) {
      if (at == 0) t = (t >> 8) | (t << 24);  // RotWord: byte 0 goes last
      t = sl_sub_word(t);
      if (at == 0) {
        t ^= constant;
        constant = (constant << 1) ^ ((constant >> 7) * 0x11bu);
      }
    }
    words[i] = words[i - size] ^ t;
  }
}

static __device__ __forceinline__ void sl_expand_key(const SlKey &key, SlSchedule &schedule, SlExpandShared &shared) {
  const u32 tid = threadIdx.x, size = key.nbytes / 4, rounds = size + 6;
  if (tid == 0) sl_expand_words(key, size, rounds, shared.words);
  __syncthreads();
#pragma unroll 1
  for (u32 i = tid; i < 32 * (SL_MAX_ROUNDS + 1); i += SL_THREADS) {
    const u32 round = i / 32, slices = round <= rounds ? sl_slice(shared.words + 4 * round, 4, i % 32) : 0;
    shared.round_keys[round][i % 32] = slices;
    schedule.round_keys[round][i % 32] = slices;
  }
  __syncthreads();
  if (tid == 0) {  // H = E(0)
    u32 words[4][8];
    sl_keystream(shared.round_keys, rounds, 0, 0, words);
    uint4 v;
    v.x = words[0][0]; v.y = words[1][0]; v.z = words[2][0]; v.w = words[3][0];
    shared.power[0] = sl_gf_words(sl_gf_prepare(sl_gf_of_block(v)));
    schedule.rounds = rounds;
    schedule.reserved[0] = schedule.reserved[1] = schedule.reserved[2] = 0;
  }
  for (u32 known = 1; known < SL_THREADS; known *= 2) {  // the known powers times the highest of them: twice as many
    __syncthreads();
    if (tid < known) {
      const SlGf power = sl_gf_mul_called(sl_gf(shared.power[known - 1]), sl_gf(shared.power[tid]));
      shared.power[known + tid] = sl_gf_words(power);
    }
  }
  __syncthreads();
  schedule.power[tid] = shared.power[tid];
  if (tid == 0) {
    const SlGf highest = sl_gf(shared.power[SL_THREADS - 1]);
    schedule.segment_power = sl_gf_words(sl_gf_power(highest, SL_SEGMENT_BLOCKS / SL_THREADS));
  }
}
