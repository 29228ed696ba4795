// Enough of CUDA to run the kernels on a CPU, for tests: one fiber for each thread of a CTA, one CTA after the other.
//
// It is stricter than a GPU. A fiber runs until it has to wait, so that threads are as far apart as barriers allow, in
// an order that the caller chooses; a barrier that only some threads reach, or a shuffle that only some lanes of a warp
// reach, is an error. Chunks are read and written through sl_read* and sl_write*, which check alignment and every byte
// against the chunks of the launch. Shared memory starts out poisoned, and has to be all zeros when its CTA has ended.
#pragma once
#define SL_SHIM 1
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

typedef uint8_t u8;
typedef uint32_t u32;
typedef unsigned long long u64;
struct alignas(16) uint4 {
  u32 x, y, z, w;
};
struct SlDim {
  u32 x;
};

#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define SL_SHARED(type, name) type &name = *static_cast<type *>(sl_shim.shared(sizeof(type)))

// Bytes from `begin` to `end`, which a launch may touch.
struct SlRange {
  u64 begin, end;
};

struct SlShim {
  enum State { READY, AT_BARRIER, AT_SHUFFLE, DONE };
  struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    State state;
    u32 shuffles;
  };
  static constexpr size_t STACK = 256 * 1024;
  static constexpr u32 THREADS = 256;

  Fiber fibers[THREADS];
  ucontext_t main;
  u32 current = 0;                    // the thread that runs
  u32 exchange[2][THREADS];           // of shuffles, by turns: a lane may be one ahead of another
  SlDim block, grid;
  std::vector<u8> memory;             // shared memory of the CTA
  size_t used = 0;
  const std::function<void()> *kernel = nullptr;
  std::vector<SlRange> reads, writes;
  char error[256];
  u32 random = 1;

  void fail(const char *what, u64 where = 0) {
    if (!error[0]) snprintf(error, sizeof error, "%s (CTA %u, thread %u, %#llx)", what, block.x, current, where);
  }

  void *shared(size_t size) {
    used = size;
    return reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(memory.data()) + 127) / 128 * 128);
  }

  void wait(State state) {
    const u32 me = current;
    fibers[me].state = state;
    swapcontext(&fibers[me].context, &main);
  }

  u32 shuffle(u32 value, u32 lane_mask) {
    Fiber &me = fibers[current];
    u32 *slots = exchange[me.shuffles++ & 1];
    slots[current] = value;
    wait(AT_SHUFFLE);
    return slots[current ^ lane_mask];
  }

  static void entry();

  void resume(u32 thread) {
    current = thread;
    swapcontext(&main, &fibers[thread].context);
  }

  // The threads of one warp, until none of them can go on without the others.
  void run_warp(u32 warp, int order) {
    u32 lanes[32];
    for (;;) {
      bool any = false;
      for (u32 i = 0; i < 32; ++i) lanes[i] = order == 1 ? 31 - i : i;
      if (order == 2)
        for (u32 i = 31; i; --i) std::swap(lanes[i], lanes[next() % (i + 1)]);
      for (u32 lane : lanes)
        if (fibers[32 * warp + lane].state == READY) resume(32 * warp + lane), any = true;
      u32 shuffling = 0;
      for (u32 lane = 0; lane < 32; ++lane) shuffling += fibers[32 * warp + lane].state == AT_SHUFFLE;
      if (shuffling == 32)
        for (u32 lane = 0; lane < 32; ++lane) fibers[32 * warp + lane].state = READY;
      else if (shuffling)
        return fail("only some lanes of a warp take part in a shuffle");
      else if (!any)
        return;
    }
  }

  u32 next() { return random ^= random << 13, random ^= random >> 17, random ^= random << 5; }

  void run_cta(int order) {
    const u32 warps = THREADS / 32;
    memory.assign(65536 + 128, 0xA5);
    used = 0;
    for (u32 t = 0; t < THREADS; ++t) {
      Fiber &f = fibers[t];
      if (!f.stack) f.stack.reset(new char[STACK]);
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack.get();
      f.context.uc_stack.ss_size = STACK;
      f.context.uc_link = nullptr;
      f.state = READY;
      f.shuffles = 0;
      makecontext(&f.context, &SlShim::entry, 0);
    }
    for (;;) {
      u32 turn[THREADS / 32];
      for (u32 i = 0; i < warps; ++i) turn[i] = order == 1 ? warps - 1 - i : i;
      if (order == 2)
        for (u32 i = warps - 1; i; --i) std::swap(turn[i], turn[next() % (i + 1)]);
      for (u32 warp : turn) run_warp(warp, order);
      u32 done = 0, waiting = 0;
      for (Fiber &f : fibers) done += f.state == DONE, waiting += f.state == AT_BARRIER;
      if (error[0] || done == THREADS) break;
      if (waiting != THREADS) return fail("only some threads reach a barrier");
      for (Fiber &f : fibers) f.state = READY;
    }
    const u8 *bytes = static_cast<const u8 *>(shared(used));
    for (size_t i = 0; i < used; ++i)
      if (bytes[i]) return fail("shared memory was not wiped", i);
  }

  // Returns whether all was well; `error` says what was not.
  bool launch(u32 ctas, int order, const std::function<void()> &body) {
    error[0] = 0;
    random = 0x9e3779b9u;
    kernel = &body;
    grid.x = ctas;
    for (u32 cta = 0; cta < ctas && !error[0]; ++cta) {
      block.x = cta;
      run_cta(order);
    }
    reads.clear();
    writes.clear();
    return !error[0];
  }

  // Whether [p, p + size) lies in one of the ranges, which are sorted by begin. Ranges may touch but not overlap.
  void check(const std::vector<SlRange> &ranges, const void *p, u32 size, const char *what) {
    const u64 at = reinterpret_cast<u64>(p);
    if (at % size) fail("unaligned access", at);
    auto before = [](u64 a, const SlRange &r) { return a < r.begin; };
    auto after = std::upper_bound(ranges.begin(), ranges.end(), at, before);
    if (after == ranges.begin() || at + size > std::prev(after)->end) fail(what, at);
  }

  // What an access outside of its chunk reads: the launch has failed, but no test process ends over it.
  const void *readable(const void *p, u32 size) {
    static const uint4 nothing = {0, 0, 0, 0};
    check(reads, p, size, "read outside of all chunks");
    return error[0] ? &nothing : p;
  }

  void *writable(void *p, u32 size) {
    static uint4 nothing;
    check(writes, p, size, "write outside of all chunks");
    return error[0] ? &nothing : p;
  }
};

static SlShim sl_shim;
inline void SlShim::entry() {
  (*sl_shim.kernel)();
  sl_shim.wait(DONE);
}

#define threadIdx (SlDim{sl_shim.current})
#define blockIdx (sl_shim.block)
#define gridDim (sl_shim.grid)
static inline void __syncthreads() { sl_shim.wait(SlShim::AT_BARRIER); }
static inline u32 __shfl_xor_sync(u32, u32 value, int lane_mask) { return sl_shim.shuffle(value, lane_mask); }

static inline u32 __byte_perm(u32 x, u32 y, u32 selector) {
  const u64 bytes = (u64)y << 32 | x;
  u32 r = 0;
  for (int i = 0; i < 4; ++i) r |= (u32)(bytes >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
  return r;
}

// A function of two bits; the table has bit (b << 1 | c).
template <int table>
static __forceinline__ u32 sl_lop2(u32 b, u32 c) {
  if (table & 8) return ~sl_lop2<~table & 15>(b, c);
  switch (table) {
    case 1: return ~(b | c);
    case 2: return ~b & c;
    case 3: return ~b;
    case 4: return b & ~c;
    case 5: return ~c;
    case 6: return b ^ c;
    case 7: return ~(b & c);
    default: return 0;
  }
}

template <int table>
static __forceinline__ u32 sl_lop3(u32 a, u32 b, u32 c) {
  constexpr int zero = table & 15, one = table >> 4 & 15;  // what is left of the table where a is 0, and where it is 1
  if (zero == one) return sl_lop2<zero>(b, c);
  if (zero == (~one & 15)) return a ^ sl_lop2<zero>(b, c);
  return (~a & sl_lop2<zero>(b, c)) | (a & sl_lop2<one>(b, c));
}

static __forceinline__ u32 sl_read1(const u8 *p) { return *static_cast<const u8 *>(sl_shim.readable(p, 1)); }
static __forceinline__ u32 sl_read4(const u8 *p) { return *static_cast<const u32 *>(sl_shim.readable(p, 4)); }
static __forceinline__ uint4 sl_read16(const u8 *p) { return *static_cast<const uint4 *>(sl_shim.readable(p, 16)); }
static __forceinline__ void sl_write1(u8 *p, u32 v) { *static_cast<u8 *>(sl_shim.writable(p, 1)) = (u8)v; }
static __forceinline__ void sl_write4(u8 *p, u32 v) { *static_cast<u32 *>(sl_shim.writable(p, 4)) = v; }
static __forceinline__ void sl_write16(u8 *p, uint4 v) { *static_cast<uint4 *>(sl_shim.writable(p, 16)) = v; }
