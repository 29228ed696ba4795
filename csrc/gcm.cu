// The kernels. abi.cuh says what they take.
#include "abi.cuh"
#include "finish.cuh"
#include "keys.cuh"
#include "segment.cuh"

extern "C" __global__ void __launch_bounds__(SL_THREADS)
sl_expand_keys(const SlKey *keys, SlSchedule *schedules, u32 nkeys) {
  SL_SHARED(SlExpandShared, shared);
  if (blockIdx.x >= nkeys) return;
  sl_expand_key(keys[blockIdx.x], schedules[blockIdx.x], shared);
  sl_wipe(shared);
}

extern "C" __global__ void __launch_bounds__(SL_THREADS)
sl_gcm_open(const SlChunk *chunks, const SlWork *work, u32 nwork, const SlSchedule *schedules, uint4 *partial) {
  sl_segments<SL_OPEN>(chunks, work, nwork, schedules, partial);
}

extern "C" __global__ void __launch_bounds__(SL_THREADS)
sl_gcm_seal(const SlChunk *chunks, const SlWork *work, u32 nwork, const SlSchedule *schedules, uint4 *partial) {
  sl_segments<SL_SEAL>(chunks, work, nwork, schedules, partial);
}

// Key stream only: for those who have checked the tag elsewhere.
extern "C" __global__ void __launch_bounds__(SL_THREADS)
sl_ctr(const SlChunk *chunks, const SlWork *work, u32 nwork, const SlSchedule *schedules) {
  sl_segments<SL_CTR>(chunks, work, nwork, schedules, 0);
}

extern "C" __global__ void __launch_bounds__(SL_THREADS)
sl_gcm_finish(const SlChunk *chunks, u32 nchunks, const SlSchedule *schedules, const uint4 *partial, u32 *verdicts) {
  SL_SHARED(SlFinishShared, shared);
  if (blockIdx.x >= nchunks) return;
  const SlChunk &chunk = chunks[blockIdx.x];
  const uint4 tag = sl_chunk_tag(chunk, schedules[chunk.key], partial, shared);
  if (threadIdx.x == 0) {  // all 16 bytes are looked at, however early they differ
    const u32 differ =
        (tag.x ^ chunk.tag[0]) | (tag.y ^ chunk.tag[1]) | (tag.z ^ chunk.tag[2]) | (tag.w ^ chunk.tag[3]);
    verdicts[blockIdx.x] = differ == 0 ? SL_VERIFIED : SL_REJECTED;
  }
  sl_wipe(shared);
}

extern "C" __global__ void __launch_bounds__(SL_THREADS)
sl_gcm_tag(const SlChunk *chunks, u32 nchunks, const SlSchedule *schedules, const uint4 *partial, uint4 *tags) {
  SL_SHARED(SlFinishShared, shared);
  if (blockIdx.x >= nchunks) return;
  const SlChunk &chunk = chunks[blockIdx.x];
  const uint4 tag = sl_chunk_tag(chunk, schedules[chunk.key], partial, shared);
  if (threadIdx.x == 0) tags[blockIdx.x] = tag;
  sl_wipe(shared);
}
