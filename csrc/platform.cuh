// What the source needs from its compiler: NVRTC and nvcc bring it along, the shim (shim/cuda_shim.h) brings its own.
#pragma once
#ifndef SL_SHIM
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
// The one block of shared memory that a kernel has. The shim gives it poisoned, and looks whether it was wiped.
#define SL_SHARED(type, name) __shared__ type name
#endif
