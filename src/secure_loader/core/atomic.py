"""Files that appear under their name only when they are complete and on disk."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from ..errors import SecureLoaderError, WriteError
from .source import is_out_of_space


@contextlib.contextmanager
def atomic_file(path: Path, *, mode: int | None = None, overwrite: bool = True) -> Iterator[int]:
    """A descriptor to write a file through; it takes the name ``path`` when the block ends well.

    Args:
        path: Final name. Whatever is there stays until the new file is complete.
        mode: Permissions; None takes those that the umask gives.
        overwrite: Replace an existing file.

    Yields:
        A descriptor, open for writing, of a temporary file in the same folder that only the owner can read.

    Raises:
        WriteError: Disk full, no permission, or the file exists and ``overwrite`` is False.
    """
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(6)}")
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as e:
        raise write_error(e, path) from None
    try:
        try:
            yield fd
            os.fchmod(fd, 0o666 & ~_umask() if mode is None else mode)
            os.fsync(fd)
        finally:
            os.close(fd)
        if overwrite:
            os.replace(temporary, path)
        else:
            os.link(temporary, path)
            os.unlink(temporary)
        sync_folder(path.parent)
    except BaseException as e:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(e, FileExistsError):
            raise WriteError("exists already", path=path) from None
        if isinstance(e, OSError) and not isinstance(e, SecureLoaderError):
            raise write_error(e, path) from None
        raise


def write_bytes(path: Path, data: bytes | bytearray, *, mode: int | None = None, overwrite: bool = True) -> None:
    """Write a small file atomically; as :func:`atomic_file`."""
    with atomic_file(path, mode=mode, overwrite=overwrite) as fd:
        pwrite_all(fd, memoryview(data), 0)


def pwrite_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    while data.nbytes:
        n = os.pwrite(fd, data, offset)
        data, offset = data[n:], offset + n


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_error(error: OSError, path: Path) -> WriteError:
    """The typed error for a failed write."""
    if is_out_of_space(error):
        return WriteError(f"cannot be written: {error.strerror}", path=path, hint="free some space and run it again")
    return WriteError(f"cannot be written: {error.strerror or error}", path=path)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
