// The kernels as a shared library for the CPU. Functions return null, or what went wrong.
#include "cuda_shim.h"

#include "../gcm.cu"

#include <cstddef>

static_assert(SlShim::THREADS == SL_THREADS, "the shim has one fiber for each thread");
static std::mutex busy;
static thread_local char message[256];

static const char *result(bool fine) {
  if (fine) return nullptr;
  memcpy(message, sl_shim.error, sizeof message);
  return message;
}

static void sort(std::vector<SlRange> &ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const SlRange &a, const SlRange &b) { return a.begin < b.begin; });
}

static void allow(const SlChunk *chunks, const SlWork *work, u32 nwork) {
  for (u32 i = 0; i < nwork; ++i) {
    if (i && work[i].chunk == work[i - 1].chunk) continue;
    const SlChunk &c = chunks[work[i].chunk];
    sl_shim.reads.push_back({c.in, c.in + c.nbytes});
    sl_shim.writes.push_back({c.out, c.out + c.nbytes});
  }
  sort(sl_shim.reads);
  sort(sl_shim.writes);
}

static void allow_aad(const SlChunk *chunks, u32 nchunks) {
  for (u32 i = 0; i < nchunks; ++i)
    if (chunks[i].aad_nbytes) sl_shim.reads.push_back({chunks[i].aad, chunks[i].aad + chunks[i].aad_nbytes});
  sort(sl_shim.reads);
}

extern "C" {

const char *shim_expand_keys(const SlKey *keys, SlSchedule *schedules, u32 nkeys, u32 grid, int order) {
  std::lock_guard<std::mutex> lock(busy);
  return result(sl_shim.launch(grid, order, [&] { sl_expand_keys(keys, schedules, nkeys); }));
}

const char *shim_open(
    const SlChunk *chunks, const SlWork *work, u32 nwork, const SlSchedule *schedules, uint4 *partial,
    u32 grid, int order) {
  std::lock_guard<std::mutex> lock(busy);
  allow(chunks, work, nwork);
  return result(sl_shim.launch(grid, order, [&] { sl_gcm_open(chunks, work, nwork, schedules, partial); }));
}

const char *shim_seal(
    const SlChunk *chunks, const SlWork *work, u32 nwork, const SlSchedule *schedules, uint4 *partial,
    u32 grid, int order) {
  std::lock_guard<std::mutex> lock(busy);
  allow(chunks, work, nwork);
  return result(sl_shim.launch(grid, order, [&] { sl_gcm_seal(chunks, work, nwork, schedules, partial); }));
}

const char *shim_ctr(const SlChunk *chunks, const SlWork *work, u32 nwork, const SlSchedule *schedules,
                     u32 grid, int order) {
  std::lock_guard<std::mutex> lock(busy);
  allow(chunks, work, nwork);
  return result(sl_shim.launch(grid, order, [&] { sl_ctr(chunks, work, nwork, schedules); }));
}

const char *shim_finish(
    const SlChunk *chunks, u32 nchunks, const SlSchedule *schedules, const uint4 *partial, u32 *verdicts,
    u32 grid, int order) {
  std::lock_guard<std::mutex> lock(busy);
  allow_aad(chunks, nchunks);
  return result(sl_shim.launch(grid, order, [&] { sl_gcm_finish(chunks, nchunks, schedules, partial, verdicts); }));
}

const char *shim_tag(
    const SlChunk *chunks, u32 nchunks, const SlSchedule *schedules, const uint4 *partial, uint4 *tags,
    u32 grid, int order) {
  std::lock_guard<std::mutex> lock(busy);
  allow_aad(chunks, nchunks);
  return result(sl_shim.launch(grid, order, [&] { sl_gcm_tag(chunks, nchunks, schedules, partial, tags); }));
}

// Sizes and constants, in the order of tests/unit/device/test_abi.py.
void shim_layout(u32 *out) {
  const u32 values[] = {SL_THREADS, SL_SEGMENT_BYTES, sizeof(SlKey), sizeof(SlSchedule), sizeof(SlChunk),
                        sizeof(SlWork), sizeof(uint4), SL_VERIFIED, SL_REJECTED,
                        offsetof(SlKey, words), offsetof(SlKey, nbytes),
                        offsetof(SlChunk, in), offsetof(SlChunk, out), offsetof(SlChunk, nbytes),
                        offsetof(SlChunk, aad),
                        offsetof(SlChunk, tag),
                        offsetof(SlChunk, nonce), offsetof(SlChunk, aad_nbytes),
                        offsetof(SlChunk, key),
                        offsetof(SlChunk, first_segment),
                        offsetof(SlWork, chunk), offsetof(SlWork, segment)};
  memcpy(out, values, sizeof values);
}

// One product of the field: a times what b is once prepared.
void shim_gf_mul(const u32 *a, const u32 *b, u32 *out) {
  SlGf x, y;
  memcpy(x.w, a, 16);
  memcpy(y.w, b, 16);
  memcpy(out, sl_gf_mul(x, sl_gf_prepare(y)).w, 16);
}
}
