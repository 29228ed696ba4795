// What the host hands to the kernels, and what it gets back. core/device/abi.py packs the same bytes; tests compare the
// two.
//
// A chunk is one AES-GCM message. A segment is SL_SEGMENT_BYTES of one chunk, the last one of a chunk may be shorter.
// One CTA works on one segment at a time. No table depends on the length of a chunk.
//
// Every kernel takes SL_THREADS threads a CTA, no dynamic shared memory, and a grid of one dimension:
//   sl_expand_keys(const SlKey *keys, SlSchedule *schedules, u32 nkeys)                a CTA for each key
//   sl_gcm_open(const SlChunk *chunks, const SlWork *work, u32 nwork,
//               const SlSchedule *schedules, uint4 *partial)                           any grid
//   sl_gcm_seal(the same)                                                              any grid
//   sl_ctr(const SlChunk *chunks, const SlWork *work, u32 nwork,
//          const SlSchedule *schedules)                                                any grid
//   sl_gcm_finish(const SlChunk *chunks, u32 nchunks, const SlSchedule *schedules,
//                 const uint4 *partial, u32 *verdicts)                                 a CTA for each chunk
//   sl_gcm_tag(const SlChunk *chunks, u32 nchunks, const SlSchedule *schedules,
//              const uint4 *partial, uint4 *tags)                                      a CTA for each chunk
//
// Secret, to be overwritten by the host behind the last use: keys, schedules, AND partial. A GHASH value beside the
// ciphertext that it was taken of gives an attacker H, and with H he forges tags.
#pragma once
#include "platform.cuh"

#define SL_THREADS 256                                     // a CTA
#define SL_TILES 2                                         // tiles of 8 blocks for each thread in a segment
#define SL_SEGMENT_BLOCKS (SL_TILES * 8 * SL_THREADS)      // 4096
#define SL_SEGMENT_BYTES (16 * SL_SEGMENT_BLOCKS)          // 64 KiB
#define SL_MAX_ROUNDS 14

#define SL_VERIFIED 1u    // anything else in a verdict is a failure: the host presets 0
#define SL_REJECTED 2u

// A raw key.
struct SlKey {
  u32 words[8];           // its bytes as they are; 16 of them for AES-128
  u32 nbytes;             // 16 or 32
  u32 reserved[3];
};

// What sl_expand_keys makes of a key; the host only gives the room, aligned to 16 bytes.
struct SlSchedule {
  u32 round_keys[SL_MAX_ROUNDS + 1][32];    // bitsliced, as the state is (bitslice.cuh)
  u32 rounds;                               // 10 or 14
  u32 reserved[3];
  uint4 power[SL_THREADS];                  // power[i] = H^(i + 1), prepared as gf128.cuh wants its second factor
  uint4 segment_power;                      // H^SL_SEGMENT_BLOCKS
};

// One message. Its bytes may lie at any address.
struct SlChunk {
  u64 in;                 // device address
  u64 out;                // equal to `in`, or without overlap
  u64 nbytes;             // 0 ... 2^36 - 32, without the tag
  u64 aad;                // device address
  u32 tag[4];             // the 16 bytes as they are in the file
  u32 nonce[3];           // the 12 bytes as they are in the file
  u32 aad_nbytes;
  u32 key;                // index of its schedule
  u32 first_segment;      // index in `partial` of its first segment
  u32 reserved[2];
};

// One segment of one chunk. A chunk without bytes has none; its tag is checked all the same.
struct SlWork {
  u32 chunk;
  u32 segment;            // counted from 0 in the chunk
};
