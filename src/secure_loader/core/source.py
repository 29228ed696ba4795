"""Where bytes come from: a regular file, read by ``pread`` into memory that is ours.

Bytes are authenticated only after they were copied into private memory. A mapping that another process can write may
change between the check and the use: that was reproduced against AES-GCM (docs/adr/0002).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import BinaryIO, Self

from ..errors import FormatError, MissingFileError, ReadError, SourceError
from . import header as hdr
from . import strict_json

# Blocks of any disk in use divide this.
DIRECT_ALIGN = 4096
_PIECE = 1 << 20
# A header beyond this is scanned once before any of it is kept, so that a hostile one costs time but no memory.
_KEEP_UNSCANNED = 8 << 20


class FileSource:
    """A regular file, open for positioned reads from any thread.

    Symbolic links are followed (the hub cache is made of them), once, at opening; what is then open stays open.

    Args:
        path: The file.
        follow: Follow a symbolic link as the last part of the path.

    Raises:
        MissingFileError: No such file.
        SourceError: Not a regular file, or not readable.
    """

    _direct_fd: int | None

    def __init__(self, path: str | os.PathLike[str], *, follow: bool = True) -> None:
        self.path = os.fspath(path)
        self._fd, self._direct_fd, self._lock = -1, None, threading.Lock()
        try:
            # O_NONBLOCK: opening a FIFO must not hang before fstat can tell what it is.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
            self._fd = os.open(self.path, flags)
            info = os.fstat(self._fd)
        except (FileNotFoundError, NotADirectoryError):
            raise MissingFileError("no such file", path=self.path) from None
        except ValueError:
            raise SourceError("is not a usable path", path=repr(self.path)) from None
        except OSError as e:
            raise SourceError(f"cannot be opened: {e.strerror}", path=self.path) from None
        if not stat.S_ISREG(info.st_mode):
            self.close()
            raise SourceError("is not a regular file", path=self.path)
        self.size = info.st_size

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview, name: str = "<bytes>") -> Self:
        """A file in memory with a copy of ``data``, so that nobody can change it while it is being checked.

        Raises:
            SourceError: The system gives no descriptor or no memory for it.
        """
        source = cls.__new__(cls)
        source.path, source._direct_fd, source._lock = name, -1, threading.Lock()  # noqa: SLF001 - a constructor
        try:
            with memory_file() as file:
                file.write(data)
                file.flush()
                source.size = file.tell()
                source._fd = os.dup(file.fileno())  # noqa: SLF001 - a constructor
        except OSError as e:
            raise SourceError(f"cannot be kept in memory: {e.strerror}", path=name) from None
        return source

    def fileno(self) -> int:
        """The descriptor, for mapping."""
        return self._fd

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill ``buffers``, one after the other, from ``offset`` on.

        Raises:
            ReadError: The file ends early (it shrank since it was opened), or the system reports an error.
        """
        todo = list(buffers)
        while todo:
            try:
                n = os.preadv(self._fd, todo[:512], offset)
            except OSError as e:
                raise ReadError(f"read failed at byte {offset:,}: {e.strerror}", path=self.path) from None
            if n == 0 and any(len(b) for b in todo):
                raise ReadError(
                    f"ends at byte {offset:,}, where more was due: truncated since it was opened", path=self.path
                )
            offset += n
            while todo and n >= len(todo[0]):
                n -= len(todo.pop(0))
            if n:
                todo[0] = todo[0][n:]

    def is_cached(self, offset: int) -> bool:
        """Whether reading the byte at ``offset`` would not wait for a disk, as far as the system tells.

        A system that has to say no starts to read ahead there.
        """
        try:
            os.preadv(self._fd, [bytearray(1)], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except (OSError, AttributeError):
            pass  # a file system or a system without the flag; the read itself will complain where it has to
        return True

    def read_ahead(self) -> None:
        """Tell the system that the file is read from one end to the other."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def read_directly(self, memory: memoryview, offset: int, length: int) -> int:
        """Read past the page cache where the file system can (O_DIRECT), otherwise through it.

        Args:
            memory: On a page border, and at least two pages larger than ``length``: whole blocks are read.
            offset: First byte wanted.
            length: Bytes wanted.

        Returns:
            Where the first byte wanted is in ``memory``.

        Raises:
            ReadError: As :meth:`read_into`.
        """
        start = offset // DIRECT_ALIGN * DIRECT_ALIGN
        stop = -(-(offset + length) // DIRECT_ALIGN) * DIRECT_ALIGN
        fd = self._direct()
        try:
            # Another file offset than asked for, or fewer bytes, is the end of the file or a short read: done again below.
            n = os.preadv(fd, [memory[: stop - start]], start) if fd >= 0 and length else 0
        except OSError:
            n = 0
        done = max(0, min(n - (offset - start), length))
        if done < length:
            at = offset - start + done
            self.read_into([memory[at : at + length - done]], offset + done)
        return offset - start

    def _direct(self) -> int:
        with self._lock:
            if self._direct_fd is None:
                self._direct_fd = -1
                with contextlib.suppress(OSError):
                    self._direct_fd = self.reopen_directly()
            return self._direct_fd

    def reopen_directly(self) -> int:
        """Another descriptor of the file, past the page cache (O_DIRECT), for the caller to close.

        Raises:
            OSError: The file system, or the system, has no such.
        """
        if not hasattr(os, "O_DIRECT"):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        # By way of the descriptor: the very same file, whatever its name means by now.
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)

    def drop_cache(self, offset: int, length: int) -> None:
        """Let the system forget its copy of a range; it is advice, and whole pages only."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._fd, offset, length, os.POSIX_FADV_DONTNEED)

    def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset``."""
        data = bytearray(length)
        self.read_into([memoryview(data)], offset)
        return bytes(data)

    def close(self) -> None:
        """Close the file; harmless when done twice."""
        # Forgotten first: a number that is closed twice, because a signal came between, may be another file's by then.
        fds, self._fd, self._direct_fd = (self._fd, self._direct_fd), -1, -1
        for fd in fds:
            if fd is not None and fd >= 0:
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0 and os is not None:
            self.close()


def read_header(source: FileSource) -> hdr.Header:
    """Read and parse the header of an open file.

    Raises:
        FormatError: As :func:`core.header.parse_length` and :func:`core.header.parse`.
        ReadError: As :meth:`FileSource.read_into`.
    """
    try:
        n = hdr.parse_length(source.read(0, min(hdr.LENGTH.size, source.size)), source.size)
        if n > _KEEP_UNSCANNED:
            _scan(source, n)
        raw = source.read(hdr.LENGTH.size, n)
        scanner = _scanner()
        scanner.feed(raw)
        scanner.finish()
        return hdr.parse(raw, source.size - hdr.LENGTH.size - n, scanner)
    except FormatError as e:
        if e.path is not None:
            raise
        raise type(e)(e.message, hint=e.hint, path=source.path, tensor=e.tensor) from None


def _scan(source: FileSource, n: int) -> None:
    scanner = _scanner()
    for start in range(0, n, _PIECE):
        scanner.feed(source.read(hdr.LENGTH.size + start, min(_PIECE, n - start)))
    scanner.finish()


def _scanner() -> strict_json.Scanner:
    # An entry has seven commas when its tensor has four dimensions; metadata are few. Without the bound millions of
    # tiny strings or numbers would be built before anything could refuse them.
    return strict_json.Scanner(max_items=100_000, per_object=16)


def memory_file() -> BinaryIO:
    """An anonymous file, in memory where the system has such."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("secure_loader", os.MFD_CLOEXEC), "w+b")
    return tempfile.TemporaryFile()


def read_small_file(path: str, limit: int) -> bytes:
    """The bytes of a small regular file.

    Raises:
        MissingFileError: No such file.
        SourceError: Not a regular file, not readable, or larger than ``limit`` bytes.
    """
    with FileSource(path) as source:
        if source.size > limit:
            raise SourceError(f"is {source.size:,} bytes long; at most {limit:,} are allowed", path=path)
        return source.read(0, source.size)


def is_out_of_space(error: OSError) -> bool:
    """Whether a write failed because the disk, quota or file size limit is used up."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
