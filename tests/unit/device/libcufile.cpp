// Stands in for libcufile.so.0 under the real cuda-bindings: device memory is host memory. It demands what cuFile demands (an
// O_DIRECT descriptor that is registered once, a driver that was opened, a current context), and does what cuFile may do: short
// reads, and memory that is written by another thread until the call returns.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <thread>

struct Error { int error; int cuda; };
struct Properties { unsigned major, minor; size_t poll, direct; unsigned status, control, rest[6]; };
struct Description { int type; union { int fd; void *handle; }; const void *operations; };
enum { SUCCESS = 0, NOT_INITIALIZED = 5001, NO_DIRECT_IO = 5020, INVALID_VALUE = 5022, ALREADY_REGISTERED = 5028 };

static std::mutex lock;
static std::set<int> registered;
static bool opened;
// Contexts that are current in this thread, in libcuda.cpp.
static int contexts() {
  void *cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  return cuda ? reinterpret_cast<int (*)()>(dlsym(cuda, "stand_in_contexts"))() : 0;
}
static long number(const char *name) { const char *text = getenv(name); return text ? atol(text) : 0; }

extern "C" {
Error cuFileDriverOpen() { return opened = true, Error{contexts() ? SUCCESS : 5047, 0}; }
Error cuFileDriverGetProperties(Properties *p) {
  memset(p, 0, sizeof *p);
  p->major = number("NVFS"), p->status = number("STATUS");
  return {SUCCESS, 0};
}
Error cuFileGetParameterBool(int which, bool *value) {
  (void)which;  // USE_PCIP2PDMA and FORCE_COMPAT_MODE
  return *value = false, Error{SUCCESS, 0};
}
Error cuFileHandleRegister(void **handle, Description *d) {
  std::lock_guard<std::mutex> guard(lock);
  if (!opened || !contexts()) return {NOT_INITIALIZED, 0};
  if (d->type != 1 || d->operations) return {INVALID_VALUE, 0};
  if (!(fcntl(d->fd, F_GETFL) & O_DIRECT)) return {NO_DIRECT_IO, 0};
  if (!registered.insert(d->fd).second) return {ALREADY_REGISTERED, 0};
  return *handle = reinterpret_cast<void *>(intptr_t(d->fd + 1)), Error{SUCCESS, 0};
}
void cuFileHandleDeregister(void *handle) {
  std::lock_guard<std::mutex> guard(lock);
  registered.erase(int(reinterpret_cast<intptr_t>(handle)) - 1);
}
ssize_t cuFileRead(void *handle, void *base, size_t size, off_t offset, off_t at) {
  int fd = int(reinterpret_cast<intptr_t>(handle)) - 1;
  if (!contexts()) return -5047;
  if (long code = number("FAIL")) return errno = EIO, code;
  {
    std::lock_guard<std::mutex> guard(lock);
    if (!registered.count(fd)) return -5027;
  }
  size_t most = number("MOST");
  if (most && size > most) size = most;
  ssize_t got = -1;
  std::thread disk([&] {
    // As a disk: whole blocks, of which a part is wanted.
    off_t start = offset / 4096 * 4096, end = (offset + off_t(size) + 4095) / 4096 * 4096;
    char *block = static_cast<char *>(aligned_alloc(4096, end - start));
    ssize_t n = pread(fd, block, end - start, start) - (offset - start);
    got = n < 0 ? 0 : n > ssize_t(size) ? ssize_t(size) : n;
    memcpy(static_cast<char *>(base) + at, block + (offset - start), got);
    free(block);
  });
  disk.join();
  return got;
}
}
