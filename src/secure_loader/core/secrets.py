"""Key material that does not leak by accident.

A :class:`Secret` has no repr, str, pickle or equality of its own, and is wiped when its owner is done. The promise is
modest: Python, OpenSSL and the operating system keep copies of their own; docs/format.md and SECURITY.md say which.
"""

from __future__ import annotations

import ctypes
import re
from types import TracebackType
from typing import NoReturn, Self

# A key as people paste it: JSON, or 16, 24, 32, 48 or 64 bytes (keys, seeds, pairs) in hex, base64 or base64url.
_HEX = re.compile(r"(0x)?([0-9a-fA-F]{32}|[0-9a-fA-F]{48}|[0-9a-fA-F]{64}|[0-9a-fA-F]{96}|[0-9a-fA-F]{128})")
_BASE64 = re.compile(r"[\w+/-]{22}(==)?|[\w+/-]{32}|[\w+/-]{43}=?|[\w+/-]{64}|[\w+/-]{86}(==)?", re.ASCII)
_ARMOUR = ("-----BEGIN", "PRIVATE KEY", "AGE-SECRET-KEY")
_SCHEME = re.compile(r"(file|env|fd|passphrase|age):")
# Vault's, and URLs that hold a password or, it may be, a token: whatever is not a version of a secret.
_TOKEN = re.compile(r"(hv[sbr]|[sbr])\.[\w-]{24,}", re.ASCII)
_LOADED_URL = re.compile(r"((\w+:)?https?|kbs)://([^/?#]*@|[^?#]*\?(?!version=\d+$))", re.IGNORECASE)
# RFC 7512 lets a reference hold the PIN.
_PIN = re.compile(r"pkcs11:.*[?&]pin-value=", re.IGNORECASE)
_SMALL = 256
# So many capitals are not the beginnings of words.
_CAPITALS = 6


def looks_like_key(text: str) -> bool:
    """Whether a text may be key material where the name of a key or the way to one is expected.

    It is then refused without being shown, with or without a scheme before it; so are tokens and passwords. Names and paths that people make up are
    not mistaken: what is random holds small letters, capitals and digits all together, or a great many capitals.
    """
    text = text.strip()
    text = text[len(found[0]) :] if (found := _SCHEME.match(text)) else text
    if text.startswith(("{", "[")) or "\n" in text or '"k"' in text or '"d"' in text or any(a in text for a in _ARMOUR):
        return True
    if _HEX.fullmatch(text) or _TOKEN.fullmatch(text) or _LOADED_URL.match(text) or _PIN.search(text):
        return True
    capitals = len(re.findall(r"[A-Z]", text))
    random = re.search(r"[a-z]", text) and capitals and (re.search(r"[0-9+]", text) or capitals >= _CAPITALS)
    return bool(random) and not text.startswith("/") and _BASE64.fullmatch(text) is not None


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

    @classmethod
    def owning(cls, data: bytearray) -> Self:
        """A secret that takes over a buffer, which nobody else keeps, instead of copying it."""
        secret = cls.__new__(cls)
        secret._data = data  # noqa: SLF001 - our own
        return secret

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
        # During interpreter shutdown globals may be gone already, ours and those of ctypes.
        if getattr(self, "_data", None) and getattr(ctypes, "c_char", None) is not None and wipe is not None:
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
    if view.nbytes <= _SMALL:
        view.cast("B")[:] = bytes(view.nbytes)  # a model has hundreds of keys, and this takes a fifth of the time
        return
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(view)), 0, view.nbytes)


def wipe_bytes(data: bytes) -> None:
    """Overwrite bytes that a library returned and nobody else has: such objects cannot be changed, only forgotten.

    Args:
        data: Not used any more by anybody.
    """
    if len(data) > 1:  # shorter ones are shared by the whole interpreter
        # CPython keeps the bytes at the end of the object, and counts one more for a NUL.
        ctypes.memset(id(data) + bytes.__basicsize__ - 1, 0, len(data))
