"""Master keys that the parent process hands over through an inherited file descriptor."""

from __future__ import annotations

import fcntl
import os
import select
import stat
import time
from pathlib import Path

from ...errors import KeyAccessError
from ..secrets import wipe
from .held import held
from .jwk import Jwk
from .local import MAX_KEY_FILE, LocalProvider, check_private_info, parse

# How long the parent may take to write and to close its end, in seconds.
DEADLINE = 10.0


class DescriptorProvider(LocalProvider):
    """A JWK or JWK set in an open file descriptor: a pipe, or a file.

    The descriptor is read to its end and closed; this process remembers the key. Child processes do not inherit it.
    """

    def keys(self, reference: str) -> list[Jwk]:
        """See :meth:`LocalProvider.keys`; ``reference`` is the descriptor's number."""
        fd, name = descriptor_number(reference), f"fd:{reference}"
        with held() as table:
            if name not in table:
                table[name] = parse(read_descriptor(fd), f"file descriptor {fd}")
            keys = table[name]
        if not isinstance(keys, list):
            raise KeyAccessError(f"file descriptor {fd} was read before, and its key was forgotten")
        return keys


def descriptor_number(reference: str) -> int:
    """The number in an ``fd:`` reference.

    Raises:
        KeyAccessError: No number, or the number of standard output or standard error.
    """
    if not (reference.isascii() and reference.isdecimal() and len(reference) <= 6 and str(int(reference)) == reference):
        raise KeyAccessError(f"key reference fd:{reference[:20]}: a descriptor is a number")
    if reference in ("1", "2"):
        raise KeyAccessError(f"key reference fd:{reference}: that is where output goes")
    return int(reference)


def read_descriptor(fd: int) -> bytearray:
    """The bytes behind an inherited pipe or file, up to its end; closes it, also when these cannot be used.

    Any other descriptor, and one that this process opened by itself, is neither read nor closed: it belongs to somebody.

    Raises:
        KeyAccessError: Not open, not inherited, neither pipe nor private file, longer than 64 KiB, or it has no end
            within ten seconds.
    """
    what = f"file descriptor {fd}"
    try:
        own = fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        info = os.fstat(fd)
    except OSError:
        raise KeyAccessError(
            f"{what} is not open",
            hint="a descriptor is read once and not passed on to child processes; those need a file",
        ) from None
    if own:
        # Every descriptor of Python is closed by exec: what has crossed one was not opened here.
        raise KeyAccessError(f"{what} was not inherited: this process has opened it for something else")
    if not (stat.S_ISFIFO(info.st_mode) or stat.S_ISREG(info.st_mode)):
        raise KeyAccessError(f"{what} is neither a pipe nor a file")
    try:
        # What has no name any more (a memfd, a here-document) nobody else can open.
        if stat.S_ISREG(info.st_mode) and info.st_nlink:
            check_private_info(info, Path(f"/dev/fd/{fd}"), "key file")
        return _read_all(fd, what)
    finally:
        _close(fd)


def _read_all(fd: int, what: str) -> bytearray:
    data, size, end = bytearray(MAX_KEY_FILE + 1), 0, time.monotonic() + DEADLINE
    view, poll = memoryview(data), select.poll()
    poll.register(fd, select.POLLIN)
    blocking = os.get_blocking(fd)
    try:
        # poll says that there was something to read; another reader of the same pipe may have been quicker.
        os.set_blocking(fd, False)
        while size < len(data):
            left = end - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise KeyAccessError(
                    f"{what} did not end within {DEADLINE:g} seconds", hint="whoever writes the key must close its end"
                )
            try:
                n = os.readv(fd, [view[size:]])
            except BlockingIOError:
                continue
            if not n:
                return data[:size]
            size += n
    except OSError as e:
        raise KeyAccessError(f"{what} cannot be read: {e.strerror}") from None
    finally:
        view.release()
        wipe(data)
        # That is a setting of the open pipe, and other processes may have the same one.
        os.set_blocking(fd, blocking)
    raise KeyAccessError(f"{what} holds more than {MAX_KEY_FILE} bytes")


def _close(fd: int) -> None:
    if fd == 0:
        # Left free, 0 would go to the next file that is opened, and be read as standard input.
        with open(os.devnull, "rb") as null:
            os.dup2(null.fileno(), 0)
    else:
        os.close(fd)
