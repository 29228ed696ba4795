"""The machine under a measurement: its page cache and memory put into a known state, and what is worth knowing about it.

Nothing here tells names of hosts or users, or paths.
"""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import importlib.metadata
import mmap
import os
import platform
import re
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_READ = 8 << 20
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_THP = Path("/sys/kernel/mm/transparent_hugepage")
# What decides the speed of AES-GCM and of copying: x86 names, then Arm's.
_FLAGS = ("aes", "pclmulqdq", "vaes", "vpclmulqdq", "avx2", "avx512f", "avx512vl", "sha_ni", "pmull", "sha2", "sve")


def warm(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Read files once, so that they are in the page cache: a host may have dropped them since they were last read."""
    scratch = mmap.mmap(-1, _READ)
    with scratch:
        for path in paths:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                offset = 0
                while count := os.preadv(fd, [scratch], offset):
                    offset += count
            finally:
                os.close(fd)


def evict(paths: Iterable[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Drop files from the page cache. What the disk, or the host of a virtual machine, keeps is out of reach.

    Returns:
        The means that were used: ``fadvise``, which needs no privilege; and ``drop_caches``, which empties the cache of the
        whole system, only where the first was not enough and the system permits it.
    """
    os.sync()  # dirty pages stay otherwise
    paths = list(paths)
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    if any(resident(path) for path in paths):
        with contextlib.suppress(OSError):
            _DROP_CACHES.write_text("1\n")
            return ("fadvise", "drop_caches")
    return ("fadvise",)


def resident(path: str | os.PathLike[str]) -> float:
    """The share of a file that is in the page cache, 0 to 1.

    Raises:
        OSError: The file cannot be mapped, or the system does not say.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        if size == 0:
            return 1.0
        # Writable and private only because ctypes wants a writable buffer to tell the address of.
        mapping = mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)
    pages = -(-size // mmap.PAGESIZE)
    states = (ctypes.c_ubyte * pages)()
    first = ctypes.c_char.from_buffer(mapping)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), states) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(state & 1 for state in states) / pages
    finally:
        del first
        mapping.close()


def touch_memory(nbytes: int) -> None:
    """Touch and free anonymous memory, in huge pages where the system has them.

    Memory that a virtual machine has not used for a second or two may have gone back to its host. The next one to touch
    it waits for it, and this should not be the loader that happens to be measured.
    """
    if nbytes <= 0:
        return
    size = -(-nbytes // (2 << 20)) * (2 << 20)
    with mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        first = ctypes.c_char.from_buffer(memory)
        ctypes.memset(ctypes.addressof(first), 1, size)
        del first


def facts(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What a reader must know to judge figures.

    Args:
        folder: Where the measured files lie; only its kind of file system is told.

    Returns:
        JSON-able: processor, memory, kernel, huge pages, file system, Python, and the versions of all packages.
    """
    cpu = _cpu()
    return {
        "cpu": cpu["model"],
        "cpu_flags": [flag for flag in _FLAGS if flag in cpu["flags"]],
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": f"{platform.system()} {platform.release()}",
        "huge_pages": {name: _chosen(_THP / name) for name in ("enabled", "defrag", "shmem_enabled")},
        "file_system": file_system(Path(folder)),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "openssl": _openssl(),
        "load_average": round(os.getloadavg()[0], 2),
        "packages": dict(
            sorted({(d.metadata["Name"] or "?").lower(): d.version for d in importlib.metadata.distributions()}.items())
        ),
    }


def scrub(text: str, *folders: str | os.PathLike[str]) -> str:
    """A message without this machine's folders, host name and user name, so that it can be published.

    Args:
        text: The message.
        *folders: More folders than the usual ones to take out.
    """
    places = {str(Path(folder).absolute()): "..." for folder in folders}
    places |= {str(Path.cwd()): ".", str(Path.home()): "~", tempfile.gettempdir(): "/tmp"}  # noqa: S108 - a name to show
    for place in sorted(places, key=len, reverse=True):
        if len(place) > 1:
            text = text.replace(place, places[place])
    names = [socket.gethostname()]
    with contextlib.suppress(KeyError, OSError):
        names.append(getpass.getuser())
    for name in names:
        if name not in ("", "root", "localhost"):
            text = re.sub(rf"\b{re.escape(name)}\b", "...", text)
    return text


def _cpu() -> dict[str, Any]:
    try:
        text = Path("/proc/cpuinfo").read_text("ascii", errors="replace")
    except OSError:
        text = ""
    model = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return {"model": model[1] if model else "unknown", "flags": set(flags[1].split()) if flags else set()}


def _chosen(path: Path) -> str | None:
    """The setting in brackets of a file such as ``always [madvise] never``."""
    try:
        found = re.search(r"\[(.*?)\]", path.read_text("ascii"))
    except OSError:
        return None
    return found[1] if found else None


def file_system(folder: Path) -> str:
    """Kind of the file system that a folder is on, from the mounts' device numbers: ``"ext4"``, or ``"unknown"``."""
    number = folder.stat().st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return "unknown"
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    return "unknown"


def _openssl() -> str:
    from cryptography.hazmat.backends.openssl.backend import backend

    return str(backend.openssl_version_text())
