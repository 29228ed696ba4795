"""Filling a file from several threads: few reused buffers, the disk at work from the first byte.

What was measured, and what it gains, is in docs/performance.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from .atomic import pwrite_all
from .pool import CLEANING_TRIES, insist
from .secrets import wipe

_SYNC_FILE_RANGE_WRITE = 2


class Output:
    """A file that threads fill piece by piece, through buffers that are used again.

    Used as a context manager; all buffers are wiped when it ends, well or not, and by then no thread may hold one.

    Args:
        fd: Open for writing.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._free: list[memoryview] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # They held plaintext for a moment, or still do where something failed.
        insist(self._wipe, CLEANING_TRIES)

    def _wipe(self) -> None:
        for buffer in self._free:
            wipe(buffer)

    @contextlib.contextmanager
    def buffer(self, nbytes: int) -> Iterator[memoryview]:
        """``nbytes`` bytes of this thread's own while the block lasts; what is in them is undefined.

        There are as many buffers as threads held one at the same time, each as large as the largest that it served.
        """
        try:
            found = self._free.pop()
        except IndexError:
            found = memoryview(bytearray(nbytes))
        if found.nbytes < nbytes:
            wipe(found)
            found = memoryview(bytearray(nbytes))
        try:
            yield found[:nbytes]
        finally:
            self._free.append(found)

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``, and have the disk begin with it. Raises OSError."""
        pwrite_all(self._fd, data, offset)
        start_writeback(self._fd, offset, data.nbytes)


def reserve(fd: int, nbytes: int) -> None:
    """Give a file its size, and its place on disk where the system can say at once whether there is room.

    Blocks that are allocated in one go also cost less than those allocated write by write.

    Raises:
        OSError: No room.
    """
    # Not posix_fallocate: where a file system knows no such thing, glibc writes to every block instead.
    if nbytes and _fallocate is not None and _fallocate(fd, 0, 0, nbytes):
        number = ctypes.get_errno()
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(number, os.strerror(number))
    os.ftruncate(fd, nbytes)


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Have the system begin to write a range to disk, without waiting for it; the bytes stay in the page cache.

    Advice only: it may not be had, and errors of the disk are reported by the fsync that follows in any case.
    """
    if nbytes and _sync_file_range is not None:
        _sync_file_range(fd, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


_fallocate: Any = None
_sync_file_range: Any = None
with contextlib.suppress(OSError, AttributeError, TypeError):
    # Python has neither of these two.
    _libc = ctypes.CDLL(None, use_errno=True)
    _fallocate = _libc.fallocate64
    _fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    _sync_file_range = _libc.sync_file_range
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
