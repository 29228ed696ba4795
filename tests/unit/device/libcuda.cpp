// Stands in for libcuda.so.1 under the real cuda-bindings: device memory is host memory, commands run at once, and kernels are those
// of csrc/, from the shim library that SHIM names. One device, of the architecture that ARCH names.
#include <dlfcn.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

typedef uint64_t u64;
typedef uint32_t u32;
enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_IMAGE = 200, NOT_FOUND = 500, LAUNCH_FAILED = 719 };
static const char *const KERNELS[] = {"sl_expand_keys", "sl_gcm_open", "sl_gcm_finish", "sl_ctr"};
static const char *const SHIMS[] = {"shim_expand_keys", "shim_open", "shim_finish", "shim_ctr"};

template <class T> static T argument(void **parameters, int i) { return *static_cast<T *>(parameters[i]); }

template <class... A> static int run(int kernel, A... arguments) {
  static void *shim = dlopen(getenv("SHIM"), RTLD_NOW);
  auto function = reinterpret_cast<const char *(*)(A...)>(dlsym(shim, SHIMS[kernel]));
  const char *error = function(arguments...);
  if (error) fprintf(stderr, "%s: %s\n", KERNELS[kernel], error);
  return error ? LAUNCH_FAILED : SUCCESS;
}

extern "C" {
int cuInit(unsigned) { return SUCCESS; }
int cuDriverGetVersion(int *version) { return *version = 12080, SUCCESS; }
int cuDeviceGetCount(int *count) { return *count = 1, SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal ? INVALID_VALUE : SUCCESS; }
int cuDeviceGetName(char *name, int size, int) { return snprintf(name, size, "Stand-in"), SUCCESS; }
int cuDeviceGetAttribute(int *value, int which, int) {
  int arch = atoi(getenv("ARCH"));
  return *value = which == 75 ? arch / 10 : which == 76 ? arch % 10 : 2, SUCCESS;
}
int cuDevicePrimaryCtxRetain(void **context, int) { return *context = &context, SUCCESS; }
int cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
static thread_local int contexts;
int stand_in_contexts() { return contexts; }  // for libcufile.cpp
int cuCtxPushCurrent_v2(void *context) { return context ? (++contexts, SUCCESS) : INVALID_VALUE; }
int cuCtxPopCurrent_v2(void **context) { return --contexts, *context = nullptr, SUCCESS; }
int cuModuleLoadData(void **module, const void *image) {
  *module = const_cast<void *>(image);
  return memcmp(image, "\x7f" "ELF", 4) ? INVALID_IMAGE : SUCCESS;
}
int cuModuleUnload(void *) { return SUCCESS; }
int cuModuleGetFunction(void **function, void *, const char *name) {
  for (intptr_t i = 0; i < 4; ++i)
    if (!strcmp(name, KERNELS[i])) return *function = reinterpret_cast<void *>(i + 1), SUCCESS;
  return NOT_FOUND;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *, int, size_t) { return *blocks = 1, SUCCESS; }
int cuMemAlloc_v2(u64 *address, size_t n) { return *address = reinterpret_cast<u64>(aligned_alloc(256, (n + 255) / 256 * 256)), SUCCESS; }
int cuMemFree_v2(u64 address) { return free(reinterpret_cast<void *>(address)), SUCCESS; }
int cuMemHostAlloc(void **address, size_t n, unsigned) { return *address = malloc(n), SUCCESS; }
int cuMemFreeHost(void *address) { return free(address), SUCCESS; }
int cuMemcpyHtoDAsync_v2(u64 device, const void *host, size_t n, void *) { return memcpy(reinterpret_cast<void *>(device), host, n), SUCCESS; }
int cuMemcpyDtoHAsync_v2(void *host, u64 device, size_t n, void *) { return memcpy(host, reinterpret_cast<void *>(device), n), SUCCESS; }
int cuMemsetD8Async(u64 device, unsigned char value, size_t n, void *) { return memset(reinterpret_cast<void *>(device), value, n), SUCCESS; }
int cuEventCreate(void **event, unsigned) { return *event = &event, SUCCESS; }
int cuEventRecord(void *, void *) { return SUCCESS; }
int cuEventQuery(void *) { return SUCCESS; }
int cuEventSynchronize(void *) { return SUCCESS; }
int cuEventDestroy_v2(void *) { return SUCCESS; }
int cuStreamSynchronize(void *) { return SUCCESS; }
int cuGetExportTable(const void **table, const void *) { return *table = nullptr, NOT_FOUND; }  // NVRTC asks for it
int cuGetErrorString(int, const char **text) { return *text = "the stand-in says no", SUCCESS; }
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *,
                   void **p, void **extra) {
  if (gy != 1 || gz != 1 || bx != 256 || by != 1 || bz != 1 || shared || extra) return INVALID_VALUE;
  switch (reinterpret_cast<intptr_t>(function)) {
    case 1: return run(0, argument<void *>(p, 0), argument<void *>(p, 1), argument<u32>(p, 2), gx, 0);
    case 2: return run(1, argument<void *>(p, 0), argument<void *>(p, 1), argument<u32>(p, 2), argument<void *>(p, 3), argument<void *>(p, 4), gx, 0);
    case 3: return run(2, argument<void *>(p, 0), argument<u32>(p, 1), argument<void *>(p, 2), argument<void *>(p, 3), argument<void *>(p, 4), gx, 0);
    case 4: return run(3, argument<void *>(p, 0), argument<void *>(p, 1), argument<u32>(p, 2), argument<void *>(p, 3), gx, 0);
  }
  return NOT_FOUND;
}
int cuGetProcAddress_v2(const char *name, void **address, int, u64, int *status) {
  static void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  char versioned[128];
  snprintf(versioned, sizeof versioned, "%s_v2", name);
  *address = dlsym(self, versioned);
  if (!*address) *address = dlsym(self, name);
  if (status) *status = *address ? 0 : 1;
  return *address ? SUCCESS : NOT_FOUND;
}
int cuGetProcAddress(const char *name, void **address, int version, u64 flags) { return cuGetProcAddress_v2(name, address, version, flags, nullptr); }
}
