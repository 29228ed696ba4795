// From the sums of a chunk's segments to its tag.
//
// GHASH of AAD, ciphertext and length block is Horner's scheme over all of them. Let A be the AAD's own sum, P[0] ...
// P[m-1] those of the segments, all but the last one S = SL_SEGMENT_BLOCKS long, n the blocks of the last, L the length
// block:
//   (((A H^(S (m-1)) + P[0] H^(S (m-2)) + ... + P[m-2]) H^n + P[m-1]) + L) H,   and the tag is that plus E(nonce, 1).
// The threads share P[0] ... P[m-2]: each takes a run of neighbours, then one power for what lies behind its run.
#pragma once
#include "abi.cuh"
#include "aes.cuh"
#include "cta.cuh"
#include "gf128.cuh"

struct SlFinishShared {
  u32 round_keys[SL_MAX_ROUNDS + 1][32];
  uint4 sums[SL_THREADS / 32];
  uint4 pad;  // E(nonce, 1)
};

// The sum of the AAD alone; zeros fill up its last block.
static __device__ __forceinline__ SlGf sl_hash_aad(const u8 *aad, u32 nbytes, SlGf h) {
  SlGf hash = sl_gf_zero();
#pragma unroll 1
  for (u64 start = 0; start < nbytes; start += 16) {
#pragma unroll
    for (u32 i = 0; i < 16; ++i) {
      const u32 byte = start + i < nbytes ? sl_read1(aad + start + i) : 0;
      hash.w[3 - i / 4] ^= byte << (24 - 8 * (i % 4));
    }
    hash = sl_gf_mul_called(hash, h);
  }
  return hash;
}

// The tag, in thread 0; nothing of use in the others.
static __device__ __forceinline__ uint4 sl_chunk_tag(
    const SlChunk &chunk, const SlSchedule &schedule, const uint4 *partial, SlFinishShared &shared) {
  const u32 tid = threadIdx.x;
  sl_stage_keys(shared.round_keys, schedule, chunk.nonce);
  __syncthreads();
  if (tid == SL_THREADS - 1) {  // a thread in another warp than thread 0, which has enough to do
    u32 words[4][8];
    sl_keystream(shared.round_keys, schedule.rounds, 1, 0, words);
    uint4 v;
    v.x = words[0][0]; v.y = words[1][0]; v.z = words[2][0]; v.w = words[3][0];
    shared.pad = v;
  }

  const u32 nblocks = (u32)((chunk.nbytes + 15) / 16);
  const u32 nsegments = (nblocks + SL_SEGMENT_BLOCKS - 1) / SL_SEGMENT_BLOCKS;
  const u32 whole = nsegments ? nsegments - 1 : 0, run = (whole + SL_THREADS - 1) / SL_THREADS;
  const u32 first = tid * run, end = first + run < whole ? first + run : whole;
  const SlGf stride = sl_gf(schedule.segment_power);
  const uint4 *sums = partial + chunk.first_segment;
  SlGf hash = sl_gf_zero();
  if (first < end) {
#pragma unroll 1
    for (u32 i = first; i < end; ++i) hash = sl_gf_add(sl_gf_mul_called(hash, stride), sl_gf(sums[i]));
    hash = sl_gf_mul_called(hash, sl_gf_power(stride, whole - end));
  }
  hash = sl_cta_sum(hash, shared.sums);  // its barrier stands behind the pad as well

  uint4 tag;
  tag.x = tag.y = tag.z = tag.w = 0;
  if (tid == 0) {
    const SlGf h = sl_gf(schedule.power[0]);
    if (chunk.aad_nbytes) {
      const SlGf aad = sl_hash_aad((const u8 *)chunk.aad, chunk.aad_nbytes, h);
      hash = sl_gf_add(hash, sl_gf_mul_called(aad, sl_gf_power(stride, whole)));
    }
    if (nsegments) {
      const u32 rest = nblocks - whole * SL_SEGMENT_BLOCKS;  // H^rest = (H^T)^((rest - 1) / T) times one of the table
      hash = sl_gf_mul_called(hash, sl_gf_power(sl_gf(schedule.power[SL_THREADS - 1]), (rest - 1) / SL_THREADS));
      hash = sl_gf_mul_called(hash, sl_gf(schedule.power[(rest - 1) % SL_THREADS]));
      hash = sl_gf_add(hash, sl_gf(sums[whole]));
    }
    const u64 aad_bits = (u64)chunk.aad_nbytes * 8, bits = chunk.nbytes * 8;
    SlGf lengths;
    lengths.w[3] = (u32)(aad_bits >> 32); lengths.w[2] = (u32)aad_bits;
    lengths.w[1] = (u32)(bits >> 32); lengths.w[0] = (u32)bits;
    hash = sl_gf_mul_called(sl_gf_add(hash, lengths), h);
    const uint4 block = sl_gf_to_block(hash);
    tag.x = block.x ^ shared.pad.x; tag.y = block.y ^ shared.pad.y;
    tag.z = block.z ^ shared.pad.z; tag.w = block.w ^ shared.pad.w;
  }
  return tag;
}
