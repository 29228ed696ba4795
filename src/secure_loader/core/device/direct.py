"""From the disk straight into the memory of a device: GPUDirect Storage, by way of NVIDIA's cuFile.

cuFile comes with torch, its Python side with ``cuda-bindings``; it takes an open descriptor, so what is read is the very
file whose header was verified. Nothing here is ordered by a stream: memory has to be free before a read begins, and is
filled when it returns.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from typing import Any, Protocol

from ...errors import DeviceError, ReadError
from ..source import FileSource
from .driver import Driver

# There while the kernel module is loaded.
_NVIDIA_FS = "/proc/driver/nvidia-fs"
# Bit of `dstatusflags`: NVMe by the kernel's own peer-to-peer DMA, without the module.
_P2P = 1 << 11


class DirectFile(Protocol):
    """A file that a device reads from. Any thread may read."""

    def read(self, place: int, nbytes: int, address: int) -> None:
        """Read into device memory; nothing is written there any more once this returns or raises.

        Args:
            place: Offset in the file, of any alignment.
            nbytes: How many bytes.
            address: Where they go.

        Raises:
            ReadError: The file ends early or cannot be read.
            DeviceError: The device failed.
        """
        ...

    def close(self) -> None:
        """Let go of it, once no read runs any more; harmless when done twice."""
        ...


class DirectReader(Protocol):
    """What reads files straight into one device."""

    def open(self, source: FileSource) -> DirectFile:
        """Prepare an open file. Raises DeviceError where it cannot be read directly."""
        ...


class _Properties(ctypes.Structure):
    """``CUfileDrvProps_t`` of cufile.h, as far as it is looked at."""

    _fields_ = (
        ("major", ctypes.c_uint),
        ("minor", ctypes.c_uint),
        ("poll_threshold", ctypes.c_size_t),
        ("max_direct_io", ctypes.c_size_t),
        ("status", ctypes.c_uint),
        ("control", ctypes.c_uint),
        ("rest", ctypes.c_uint * 64),
    )


class _Description(ctypes.Structure):
    """``CUfileDescr_t``: its union holds a pointer or a descriptor."""

    _fields_ = (("type", ctypes.c_int), ("fd", ctypes.c_int64), ("operations", ctypes.c_void_p))


_OPAQUE_FD = 1


def obstacle() -> str | None:
    """Why this machine reads nothing directly, as far as can be told without starting cuFile; None where it may."""
    try:
        from cuda.bindings import cufile
    except ImportError:
        return "cuda-bindings with cuFile is not installed"
    try:
        kinds = cufile.BoolConfigParameter
        if cufile.get_parameter_bool(kinds.FORCE_COMPAT_MODE):
            return "cuFile is set to its compatibility mode"
        p2p = cufile.get_parameter_bool(kinds.USE_PCIP2PDMA)
    except Exception as e:  # noqa: BLE001 - whatever the bindings raise where the library is missing or too old
        return f"no cuFile: {_first_line(e)}"
    # Not left to cuFile: without the module it writes a log into the working folder, and may not come back at all.
    if not p2p and not os.path.exists(_NVIDIA_FS):
        return "the kernel module nvidia-fs is not loaded"
    return None


class CuFile:
    """cuFile for one device, started with the first file; as :class:`DirectReader`.

    Args:
        ordinal: Of the device.
    """

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        self._lock = threading.Lock()
        self._started: tuple[Driver, Any, Any] | None = None
        self._why: str | None = None

    def open(self, source: FileSource) -> DirectFile:
        """As :meth:`DirectReader.open`."""
        driver, context, api = self._start()
        try:
            # One of its own for each load: cuFile registers a descriptor once.
            fd = source.reopen_directly()
        except OSError as e:
            raise DeviceError(f"its file system has no O_DIRECT: {e.strerror}", path=source.path) from None
        try:
            description = _Description(_OPAQUE_FD, fd, None)
            with driver.current(context):
                handle = api.handle_register(ctypes.addressof(description))
        except BaseException as e:
            os.close(fd)
            if not isinstance(e, api.cuFileError):
                raise
            raise DeviceError(f"cuFile does not take it: {_first_line(e)}", path=source.path) from None
        return _Registered(source.path, fd, handle, (driver, context, api))

    def _start(self) -> tuple[Driver, Any, Any]:
        with self._lock:
            if self._started is None and self._why is None:
                try:
                    self._started = self._begin()
                except DeviceError as e:
                    self._why = e.message
            if self._started is None:
                raise DeviceError(self._why or "cuFile was not started")
            return self._started

    def _begin(self) -> tuple[Driver, Any, Any]:
        if (why := obstacle()) is not None:
            raise DeviceError(why)
        from cuda.bindings import cufile

        driver, properties = Driver(), _Properties()
        # Both are kept until the process ends, as the engine is.
        context = driver.retain(self._ordinal)
        try:
            with driver.current(context):
                cufile.driver_open()
                cufile.driver_get_properties(ctypes.addressof(properties))
        except cufile.cuFileError as e:
            raise DeviceError(f"cuFile does not start: {_first_line(e)}") from None
        if not (properties.major or properties.minor or properties.status & _P2P):
            raise DeviceError("cuFile would copy through host memory: it runs in its compatibility mode")
        return driver, context, cufile


class _Registered:
    """A file that cuFile knows; as :class:`DirectFile`."""

    def __init__(self, path: str, fd: int, handle: int, by: tuple[Driver, Any, Any]) -> None:
        self._path, self._fd, self._by = path, fd, by
        self._handle: int | None = handle

    def read(self, place: int, nbytes: int, address: int) -> None:
        driver, context, api = self._by
        # Threads of the pool have no context of their own.
        with driver.current(context):
            while nbytes > 0:
                try:
                    n = api.read(self._handle, address, nbytes, place, 0)
                except (api.cuFileError, ValueError):  # the bindings take any `errno` for one of cuFile's codes
                    raise self._failed(place, "the system reports an error") from None
                if n < 0:
                    raise self._failed(place, f"cuFile's error {-n}")
                if n == 0:
                    raise ReadError(
                        f"ends at byte {place:,}, where more was due: truncated since it was opened", path=self._path
                    )
                place, nbytes, address = place + n, nbytes - n, address + n

    def _failed(self, place: int, why: str) -> ReadError:
        return ReadError(f"direct read failed at byte {place:,}: {why}", path=self._path)

    def close(self) -> None:
        # Forgotten first, as in FileSource.close.
        (handle, fd), self._handle, self._fd = (self._handle, self._fd), None, -1
        if handle is not None:
            driver, context, api = self._by
            try:
                # A driver that is lost has nothing to give back, and the load ends as it ends.
                with contextlib.suppress(DeviceError), driver.current(context):
                    api.handle_deregister(handle)
            finally:
                os.close(fd)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
