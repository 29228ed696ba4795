// What the threads of one CTA do together.
#pragma once
#include "abi.cuh"
#include "gf128.cuh"

// The sum over the CTA, in thread 0; nothing of use in the others. `sums` has a place for every warp. The caller sees
// to it that nobody reads `sums` any more from the last time.
static __device__ __forceinline__ SlGf sl_cta_sum(SlGf a, uint4 *sums) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int lane = 16; lane; lane >>= 1) a.w[i] ^= __shfl_xor_sync(0xffffffffu, a.w[i], lane);
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = sl_gf_words(a);
  __syncthreads();
  if (threadIdx.x == 0)
    for (u32 warp = 1; warp < SL_THREADS / 32; ++warp) a = sl_gf_add(a, sl_gf(sums[warp]));
  return a;
}

// Overwrite shared memory at the end of a kernel. The barrier: some thread may still be reading. `volatile`: nobody
// reads it again, so that a compiler might leave the stores out.
template <class Shared>
static __device__ __forceinline__ void sl_wipe(Shared &shared) {
  __syncthreads();
  volatile u32 *words = (volatile u32 *)&shared;
#pragma unroll 1
  for (u32 i = threadIdx.x; i < sizeof(Shared) / 4; i += SL_THREADS) words[i] = 0;
}
