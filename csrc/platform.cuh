// What the source needs of its compiler. NVRTC and nvcc bring nearly all of it; the shim (shim/cuda_shim.h) brings its
// own.
#pragma once
#ifndef SL_SHIM
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// The one block of shared memory that a kernel has. The shim gives it poisoned, and looks whether it was wiped.
#define SL_SHARED(type, name) __shared__ type name

// Any function of three bits, for each of 32 bits on its own: bit (a << 2 | b << 1 | c) of the table.
template <int table>
static __device__ __forceinline__ u32 sl_lop3(u32 a, u32 b, u32 c) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(r) : "r"(a), "r"(b), "r"(c), "n"(table));
  return r;
}

// The bytes of chunks, which lie in global memory at addresses that are numbers to the compiler: it is told so here.
// The shim checks the alignment that a GPU insists on.
static __device__ __forceinline__ u32 sl_read1(const u8 *p) {
  u32 v;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

static __device__ __forceinline__ u32 sl_read4(const u8 *p) {
  u32 v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

static __device__ __forceinline__ uint4 sl_read16(const u8 *p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}

static __device__ __forceinline__ void sl_write1(u8 *p, u32 v) {
  asm volatile("st.global.u8 [%0], %1;" : : "l"(p), "r"(v) : "memory");
}

static __device__ __forceinline__ void sl_write4(u8 *p, u32 v) {
  asm volatile("st.global.u32 [%0], %1;" : : "l"(p), "r"(v) : "memory");
}

static __device__ __forceinline__ void sl_write16(u8 *p, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               : : "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
#endif
