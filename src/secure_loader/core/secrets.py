"""Key material that does not leak by accident.

A :class:`Secret` has no repr, str, pickle or equality of its own, and is wiped when its owner is done. The promise is
modest: Python, OpenSSL and the operating system keep copies of their own; docs/format.md and SECURITY.md say which.
"""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import NoReturn, Self


class Secret:
    """Bytes of a key, in memory that is overwritten by :meth:`wipe`.

    Args:
        data: Copied; a bytearray is wiped after the copy.
    """

    __slots__ = ("_data",)

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = bytearray(data)
        if isinstance(data, bytearray):
            wipe(data)

    def reveal(self) -> memoryview:
        """A read-only view of the bytes; empty once wiped. Do not keep it."""
        return memoryview(self._data).toreadonly()

    def wipe(self) -> None:
        """Overwrite the bytes, then forget them."""
        wipe(self._data)
        self._data = bytearray()

    def __len__(self) -> int:
        return len(self._data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.wipe()

    def __del__(self) -> None:
        # During interpreter shutdown module globals may be gone already.
        if getattr(self, "_data", None) and wipe is not None:
            wipe(self._data)

    def __repr__(self) -> str:
        return "<Secret>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Secret is never pickled or copied; pass a key reference instead")

    __copy__ = __deepcopy__ = __reduce_ex__ = __reduce__  # type: ignore[assignment]


def wipe(buffer: bytearray | memoryview) -> None:
    """Overwrite a writable buffer with zeros, in place.

    Args:
        buffer: A bytearray, or a writable contiguous memoryview of any format.
    """
    view = memoryview(buffer)
    if view.nbytes == 0:
        return
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(view)), 0, view.nbytes)
