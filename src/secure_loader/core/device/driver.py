"""The part of NVIDIA's driver API that is used here, with one kind of error. No other module names it.

Handles are those of ``cuda.bindings`` and opaque to callers; addresses, sizes and streams are integers. Tests put
another class with these methods in its place, which runs the same kernels on the CPU and fails where it is told to.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple

from ...errors import DeviceError

# No timing: the records are cheaper. Blocking: whoever waits leaves the processor to the threads that read files.
_EVENT_FLAGS = 0x2 | 0x1
_MULTIPROCESSORS, _MAJOR, _MINOR = 16, 75, 76


class Gpu(NamedTuple):
    """A device that the driver knows.

    Attributes:
        ordinal: Its number in this process: that of ``torch.device("cuda", ordinal)``.
        name: As NVIDIA calls it.
        arch: Compute capability times ten: 90 for sm_90.
        multiprocessors: How many it has.
    """

    ordinal: int
    name: str
    arch: int
    multiprocessors: int


class Driver:
    """The driver of this machine, through ``cuda-bindings``.

    Apart from :meth:`gpus`, :meth:`retain` and :meth:`release`, every method works on the context that
    :meth:`current` made current in the calling thread.

    Raises:
        DeviceError: Here and in every method: the package or the driver is not there, or the call failed.
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as e:
            raise DeviceError("the package cuda-bindings is not installed", hint="pip install cuda-bindings") from e
        self._api = driver
        try:
            (code,) = driver.cuInit(0)
        except Exception as e:
            # Whatever cuda-bindings raises where there is no library; the class changed between releases.
            missing = "NotFound" in type(e).__name__
            reason = "libcuda.so.1 was not found" if missing else str(e).partition("\n")[0]
            raise DeviceError(f"no CUDA driver: {reason}") from e
        self._check("cuInit", code)

    def _check(self, what: str, code: Any) -> None:
        if code == self._api.CUresult.CUDA_SUCCESS:
            return
        _, text = self._api.cuGetErrorString(code)
        reason = text.decode(errors="replace") if text else ""
        raise DeviceError(f"{what}: {getattr(code, 'name', code)}{f' ({reason})' if reason else ''}")

    def _call(self, what: str, *args: Any) -> Any:
        """Call a function of the driver; its one result, or None."""
        code, *results = getattr(self._api, what)(*args)
        self._check(what, code)
        return results[0] if results else None

    def version(self) -> int:
        """The CUDA version of the driver: 12080 for 12.8."""
        return int(self._call("cuDriverGetVersion"))

    def gpus(self) -> list[Gpu]:
        """The devices this process may use, in order."""
        return [self.gpu(i) for i in range(self._call("cuDeviceGetCount"))]

    def gpu(self, ordinal: int) -> Gpu:
        """One device."""
        device = self._call("cuDeviceGet", ordinal)
        name = self._call("cuDeviceGetName", 128, device).split(b"\0")[0].decode(errors="replace")
        kinds = self._api.CUdevice_attribute
        major, minor, multiprocessors = (
            int(self._call("cuDeviceGetAttribute", kinds(which), device))
            for which in (_MAJOR, _MINOR, _MULTIPROCESSORS)
        )
        return Gpu(ordinal, name, 10 * major + minor, multiprocessors)

    def retain(self, ordinal: int) -> Any:
        """The primary context of a device, which frameworks use as well; :meth:`release` it."""
        return self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", ordinal))

    def release(self, ordinal: int) -> None:
        """Give back what :meth:`retain` took."""
        self._call("cuDevicePrimaryCtxRelease", self._call("cuDeviceGet", ordinal))

    @contextlib.contextmanager
    def current(self, context: Any) -> Iterator[None]:
        """Make a context current in this thread, and afterwards whichever was before."""
        self._call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def load(self, image: bytes) -> Any:
        """Load a cubin."""
        return self._call("cuModuleLoadData", image)

    def unload(self, module: Any) -> None:
        """Unload what :meth:`load` loaded."""
        self._call("cuModuleUnload", module)

    def function(self, module: Any, name: str) -> Any:
        """A kernel of a module."""
        return self._call("cuModuleGetFunction", module, name.encode())

    def residency(self, function: Any, threads: int) -> int:
        """How many blocks of this many threads one multiprocessor holds."""
        return int(self._call("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, threads, 0))

    def launch(self, function: Any, blocks: int, threads: int, stream: int, *args: int | ctypes.c_uint32) -> None:
        """Queue a kernel.

        Args:
            function: From :meth:`function`.
            blocks: Of the grid.
            threads: Of each block.
            stream: Handle.
            args: Its parameters: an int is an address, a ``c_uint32`` a number. Never anything secret: the driver keeps
                copies of parameters that nobody can wipe.
        """
        values = tuple(a if isinstance(a, int) else a.value for a in args)
        kinds = tuple(ctypes.c_void_p if isinstance(a, int) else ctypes.c_uint32 for a in args)
        self._call("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, stream, (values, kinds), 0)

    def allocate(self, nbytes: int) -> int:
        """Device memory, 256-aligned, of any content."""
        return int(self._call("cuMemAlloc", nbytes))

    def free(self, address: int) -> None:
        """Free device memory, once the device is done with it."""
        self._call("cuMemFree", address)

    def allocate_host(self, nbytes: int) -> int:
        """Pinned memory of the host, of any content."""
        return int(self._call("cuMemHostAlloc", nbytes, 0))

    def free_host(self, address: int) -> None:
        """Free pinned memory."""
        self._call("cuMemFreeHost", address)

    def upload(self, device: int, host: int, nbytes: int, stream: int) -> None:
        """Queue a copy from pinned memory to the device."""
        self._call("cuMemcpyHtoDAsync", device, host, nbytes, stream)

    def download(self, host: int, device: int, nbytes: int, stream: int) -> None:
        """Queue a copy from the device to pinned memory."""
        self._call("cuMemcpyDtoHAsync", host, device, nbytes, stream)

    def clear(self, device: int, nbytes: int, stream: int) -> None:
        """Queue the overwriting of device memory with zeros."""
        self._call("cuMemsetD8Async", device, 0, nbytes, stream)

    def event(self) -> Any:
        """An event without timing."""
        return self._call("cuEventCreate", _EVENT_FLAGS)

    def record(self, event: Any, stream: int) -> None:
        """Record an event behind what was queued."""
        self._call("cuEventRecord", event, stream)

    def reached(self, event: Any) -> bool:
        """Whether the device has come to an event; also true where it failed on the way, which :meth:`wait` tells."""
        (code,) = self._api.cuEventQuery(event)
        return bool(code != self._api.CUresult.CUDA_ERROR_NOT_READY)

    def wait(self, event: Any) -> None:
        """Wait for an event."""
        self._call("cuEventSynchronize", event)

    def destroy(self, event: Any) -> None:
        """Destroy an event."""
        self._call("cuEventDestroy", event)

    def synchronise(self, stream: int) -> None:
        """Wait for everything that was queued on a stream."""
        self._call("cuStreamSynchronize", stream)
