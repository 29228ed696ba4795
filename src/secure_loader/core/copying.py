"""Copying files and parts of files without passing the bytes through this process where the system can."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from .atomic import atomic_file, pwrite_all
from .output import start_writeback
from .source import FileSource

_COPY_STEP = 4 << 20
# Handed to the system at once: it copies while the disk writes what came before, and ^C is heard in between.
_SYSTEM_STEP = 32 << 20


def copy_file(source: Path, target: Path) -> None:
    """Copy a file atomically, by the system's own means where it has some."""
    with FileSource(source) as opened, atomic_file(target) as fd:
        copy_range(opened, fd, 0, 0, opened.size)


def copy_range(source: FileSource, fd: int, read_at: int, write_at: int, length: int) -> None:
    """Copy part of a file into another, sharing blocks where the file system can."""
    while length:
        try:
            n = os.copy_file_range(source.fileno(), fd, min(length, _SYSTEM_STEP), read_at, write_at)
        except OSError as e:
            if e.errno in (errno.ENOSPC, errno.EDQUOT):  # no other way will do better
                raise
            n = 0
        if n == 0:
            piece = source.read(read_at, min(length, _COPY_STEP))
            pwrite_all(fd, memoryview(piece), write_at)
            n = len(piece)
        start_writeback(fd, write_at, n)
        read_at, write_at, length = read_at + n, write_at + n, length - n
