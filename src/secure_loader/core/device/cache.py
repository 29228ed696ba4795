"""Cubins compiled on this machine, kept for the next process.

What lies here is run next to the keys, so it matters who can write it. A folder or file is used only if it belongs to this user (or
root) and nobody else may write to it; otherwise the code is compiled again, which takes about a second. All checks are made on
descriptors that are already open, and no link is followed. The hash beside a cubin finds files that were damaged or cut short, and
those of another source, compiler or architecture. It does not, and cannot, stop somebody who may write here: he writes a fitting hash.
Nor would a key for a MAC, which would have to lie in a place that the same somebody can read. Whoever can write to a user's own private
files can replace the Python code that reads them just as well.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import stat
from pathlib import Path

from ...errors import DeviceError, SecureLoaderError
from ..atomic import write_bytes
from ..home import cache_dir, private_folder
from .nvrtc import OPTIONS, Nvrtc
from .sources import Sources

_log = logging.getLogger(__name__)
_DIGEST = 32
_MAX_BYTES = 16 << 20  # ours have about 50 KB
_KEPT = 32


def compiled(sources: Sources, arch: int, compiler: Nvrtc) -> bytes:
    """A cubin from the cache, or freshly compiled and then put there.

    A cache that cannot be used or trusted costs time, and a warning, and nothing else.

    Raises:
        DeviceError: It cannot be compiled.
    """
    key = name_of(sources.fingerprint, arch, compiler.version)
    folder = cache_dir() / "cubins"
    try:
        image = load(folder, key)
    except DeviceError as e:
        _log.warning("the cache of compiled device code is not used: %s", e)
        return compiler.compile(sources, arch)
    if image is None:
        image = compiler.compile(sources, arch)
        try:
            store(folder, key, image)
        except (SecureLoaderError, OSError) as e:
            _log.warning("compiled device code is not kept: %s", e)
    return image


def name_of(fingerprint: str, arch: int, version: str) -> str:
    """The name for everything that decides about the bytes of a cubin."""
    parts = json.dumps([fingerprint, arch, version, OPTIONS])
    return f"sm_{arch}-{hashlib.sha256(parts.encode()).hexdigest()}"


def load(folder: Path, key: str) -> bytes | None:
    """What is kept under a name; None where there is nothing, or nothing whole.

    Raises:
        DeviceError: The folder or file could have been written by somebody else.
    """
    path = folder / f"{key}.cubin"
    try:
        above = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _refuse_foreign(os.fstat(above), folder)
            # O_NONBLOCK: a FIFO must not hang before fstat can tell what it is.
            fd = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=above)
        finally:
            os.close(above)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_size > _MAX_BYTES:
                raise DeviceError("is no file of ours", path=path)
            _refuse_foreign(info, path)
            with open(fd, "rb", closefd=False) as f:
                data = f.read(_MAX_BYTES + 1)
        finally:
            os.close(fd)
    except FileNotFoundError:
        return None
    except OSError as e:
        raise DeviceError(f"cannot be read: {e.strerror}", path=path) from None
    digest, image = data[:_DIGEST], data[_DIGEST:]
    if not hmac.compare_digest(digest, _digest(key, image)):
        _log.warning("%s is damaged, and is made again", path)
        return None
    return image


def store(folder: Path, key: str, image: bytes) -> None:
    """Keep a cubin: a folder of mode 0700, a file of mode 0600 that appears when it is complete. The oldest go.

    Raises:
        DeviceError: The folder could be written by somebody else.
        WriteError: It cannot be written.
        OSError: The folder cannot be made.
    """
    private_folder(folder.parent)
    private_folder(folder)
    _refuse_foreign(os.lstat(folder), folder)
    write_bytes(folder / f"{key}.cubin", _digest(key, image) + image, mode=0o600)
    kept = sorted(folder.glob("sm_*.cubin"), key=lambda p: p.stat().st_mtime, reverse=True)
    for old in kept[_KEPT:]:
        old.unlink(missing_ok=True)


def _digest(key: str, image: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + image).digest()


def _refuse_foreign(info: os.stat_result, path: Path) -> None:
    if stat.S_ISLNK(info.st_mode):
        raise DeviceError("is a link", path=path)
    if info.st_uid not in (0, os.geteuid()):
        raise DeviceError("belongs to another user", path=path)
    if info.st_mode & 0o022:
        mode = stat.S_IMODE(info.st_mode)
        raise DeviceError(f"can be written by others (mode {mode:04o})", path=path, hint=f"chmod go-w {path}")
