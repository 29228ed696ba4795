"""Private memory for plaintext and for ciphertext on its way, in huge pages where the system gives them.

First touch of new memory is a third of the cost of a load in pages of 2 MiB, which the kernel zeroes at 12 GB/s a thread,
and far more in pages of 4 KiB (docs/adr/0008). So memory is mapped on 2 MiB borders, advised, and touched by the
thread that is about to fill it. All of this is advice: where a system does not take it, loads are slower and the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence

from ..errors import OutOfMemoryError

HUGE_PAGE = 2 << 20
# Tensors that share a mapping share its life: small enough that a model that drops a layer gets its memory back.
_SLAB = 64 << 20
# Cache lines; frameworks ask for no more.
_ALIGN = 64
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14; older kernels say EINVAL, and the pages come one by one


class Region:
    """A mapping of its own: zeroed, private, not backed by a file.

    Args:
        nbytes: Its size; only as much as was touched takes up memory.

    Attributes:
        mapping: The Python object that frameworks keep alive.
        offset: Where the usable bytes begin in there.
        nbytes: Size.

    Raises:
        OutOfMemoryError: The system gives no more.
    """

    __slots__ = ("mapping", "nbytes", "offset")

    def __init__(self, nbytes: int) -> None:
        try:
            self.mapping = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, MemoryError, OverflowError, ValueError):
            raise OutOfMemoryError(
                f"{nbytes:,} bytes of memory are not to be had",
                hint="load on a larger machine, or fewer tensors at once",
            ) from None
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))
        self.offset, self.nbytes = -base % HUGE_PAGE, nbytes
        # Only the bytes that are used: a tail beyond them must not become a huge page of its own.
        _advise(base + self.offset, nbytes, _MADV_HUGEPAGE)

    def view(self, offset: int = 0, nbytes: int | None = None) -> memoryview:
        """Part of it as writable bytes."""
        start = self.offset + offset
        return memoryview(self.mapping)[start : start + (self.nbytes - offset if nbytes is None else nbytes)]


def lay_out(sizes: Sequence[int]) -> list[tuple[Region, int]]:
    """Memory for many tensors, a few of them to a region, in order.

    Args:
        sizes: Bytes per tensor, each at least 1.

    Returns:
        Region and offset in it for each, on borders of 64 bytes.

    Raises:
        OutOfMemoryError: The system gives no more.
    """
    groups: list[list[int]] = []
    room = 0
    for size in sizes:
        if not groups or size > room:
            groups.append([])
            room = max(_SLAB, size)
        groups[-1].append(size)
        room -= _aligned(size)
    places: list[tuple[Region, int]] = []
    for group in groups:
        region, at = Region(sum(map(_aligned, group))), 0
        for size in group:
            places.append((region, at))
            at += _aligned(size)
    return places


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def advise_huge(address: int, nbytes: int) -> None:
    """Ask for huge pages under memory that somebody else has allocated and nobody has touched yet."""
    start = -(-address // HUGE_PAGE) * HUGE_PAGE
    length = (address + nbytes) // HUGE_PAGE * HUGE_PAGE - start
    if length > 0:
        _advise(start, length, _MADV_HUGEPAGE)


def populate(view: memoryview) -> None:
    """Have the pages under a writable view made now, all with one system call, instead of one fault after the other."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    stop = -(-(address + view.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    _advise(start, stop - start, _MADV_POPULATE_WRITE)


def _advise(address: int, nbytes: int, advice: int) -> None:
    # Not mmap.madvise: that one keeps the interpreter lock while the kernel zeroes pages.
    if _madvise is not None:
        _madvise(address, nbytes, advice)


_madvise: ctypes._NamedFuncPointer | None = None
with contextlib.suppress(OSError, AttributeError, TypeError):
    _madvise = ctypes.CDLL(None).madvise
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
