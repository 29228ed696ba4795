// One pass over the segments of many chunks: decrypt and hash, encrypt and hash, or decrypt alone.
//
// Thread t takes blocks t, t + T, t + 2T, ... of a segment, T = SL_THREADS: neighbours read neighbouring blocks. 8 of
// them make a tile, for which it prepares the key stream in one go. Its part of the hash is Horner's scheme with H^T,
// but for its last block, which counts the power of H that is due to it. So a segment's sum is what GHASH would make of
// the segment alone, wherever it lies in its chunk; the last block counts H^1. finish.cuh puts the segments together.
//
// A block is read once: the register that is hashed is the one that is decrypted, nothing can change between the two.
#pragma once
#include "abi.cuh"
#include "aes.cuh"
#include "block.cuh"
#include "cta.cuh"
#include "gf128.cuh"

enum SlMode { SL_OPEN, SL_SEAL, SL_CTR };

struct SlSegmentShared {
  u32 round_keys[SL_MAX_ROUNDS + 1][32];
  uint4 stream[8][SL_THREADS];  // each thread has a column of its own, so that these need no barrier
  uint4 sums[SL_THREADS / 32];
};

template <int mode>
static __device__ __forceinline__ void sl_segments(
    const SlChunk *chunks, const SlWork *work, u32 nwork, const SlSchedule *schedules, uint4 *partial) {
  SL_SHARED(SlSegmentShared, shared);
  const u32 tid = threadIdx.x;
#pragma unroll 1
  for (u32 item = blockIdx.x; item < nwork; item += gridDim.x) {
    const SlChunk &chunk = chunks[work[item].chunk];
    const SlSchedule &schedule = schedules[chunk.key];
    const u32 segment = work[item].segment;
    const u64 start = (u64)segment * SL_SEGMENT_BYTES, left = chunk.nbytes - start;
    const u32 nbytes = left < SL_SEGMENT_BYTES ? (u32)left : SL_SEGMENT_BYTES, nblocks = (nbytes + 15) / 16;
    const u8 *in = (const u8 *)(chunk.in + start);
    u8 *out = (u8 *)(chunk.out + start);
    const u32 alignment = sl_alignment(in, out);
    const u32 counter = 2 + segment * SL_SEGMENT_BLOCKS + tid;  // 1 is the tag's; it never wraps, see SlChunk::nbytes

    __syncthreads();  // the last segment's keys and sums are in use no more
    sl_stage_keys(shared.round_keys, schedule, chunk.nonce);
    __syncthreads();

    SlGf hash = sl_gf_zero();
#pragma unroll 1
    for (u32 tile = 0; tile < nblocks; tile += 8 * SL_THREADS) {
      {
        u32 words[4][8];
        sl_keystream(shared.round_keys, schedule.rounds, counter + tile, SL_THREADS, words);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          uint4 v;
          v.x = words[0][k]; v.y = words[1][k]; v.z = words[2][k]; v.w = words[3][k];
          shared.stream[k][tid] = v;
        }
      }
#pragma unroll 1
      for (u32 k = 0; k < 8; ++k) {
        const u32 block = tile + k * SL_THREADS + tid;
        if (block >= nblocks) break;
        const u32 offset = 16 * block, length = nbytes - offset;  // of this block and all behind it
        uint4 *place = &shared.stream[k][tid];
        const uint4 stream = *place;
        const uint4 before =
            length >= 16 ? sl_load_block(in + offset, alignment) : sl_load_short(in + offset, length, place);
        const uint4 after = sl_xor(before, stream);
        if (mode == SL_OPEN) hash = sl_gf_add(hash, sl_gf_of_block(before));
        if (mode == SL_SEAL) hash = sl_gf_add(hash, sl_gf_of_block(length >= 16 ? after : sl_cut(after, length)));
        if (length >= 16)
          sl_store_block(out + offset, after, alignment);
        else
          sl_store_short(out + offset, after, length, place);
        if (mode != SL_CTR) {  // H^T leads to the thread's next block; if there is none, H^(blocks behind + 1) is due
          const u32 behind = nblocks - 1 - block;
          hash = sl_gf_mul(hash, sl_gf(schedule.power[behind < SL_THREADS ? behind : SL_THREADS - 1]));
        }
      }
    }
    if (mode != SL_CTR) {
      hash = sl_cta_sum(hash, shared.sums);
      if (tid == 0) partial[chunk.first_segment + segment] = sl_gf_words(hash);
    }
  }
  sl_wipe(shared);
}
