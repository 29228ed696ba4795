"""Telling an encrypted file from a plain one, cheaply, at every open of any safetensors file in the process."""

from __future__ import annotations

import os
import re

from ..core.header import LENGTH

_MAX_HEADER = 100_000_000
# CryptoTensors' fields and ours, as JSON writes them. Any of them will do: a file from which some were cut is no plain
# file. Searching for them is far cheaper than parsing the header of every plain file.
_MARKER = re.compile(rb'"__(?:encryption|crypto_keys|signature|policy|secure_loader)__"')


# A signed file of which every tensor was left in clear: any reader reads it right.
_ALL_CLEAR = re.compile(rb'"__encryption__": ?"\{\}"')


def looks_encrypted(path: str | os.PathLike[str]) -> bool:
    """Whether a file carries the marks of encryption; False for what cannot be read, which is for others to report."""
    return _MARKER.search(_header_of(path)) is not None


def holds_ciphertext(path: str | os.PathLike[str]) -> bool:
    """Whether a reader that knows nothing of encryption would take ciphertext of this file for weights."""
    header = _header_of(path)
    return _MARKER.search(header) is not None and _ALL_CLEAR.search(header) is None


def _header_of(path: str | os.PathLike[str]) -> bytes:
    try:
        with open(path, "rb") as file:
            head = file.read(LENGTH.size)
            if len(head) < LENGTH.size:
                return b""
            (n,) = LENGTH.unpack(head)
            if n > min(_MAX_HEADER, os.fstat(file.fileno()).st_size - LENGTH.size):
                return b""
            return file.read(n)
    except (OSError, ValueError, TypeError):
        return b""


def bytes_look_encrypted(data: bytes | bytearray | memoryview) -> bool:
    """As :func:`looks_encrypted` for the bytes of a whole file."""
    view = memoryview(data)
    if view.nbytes < LENGTH.size:
        return False
    (n,) = LENGTH.unpack(view[: LENGTH.size])
    return n <= min(_MAX_HEADER, view.nbytes) and _MARKER.search(view[LENGTH.size : LENGTH.size + n]) is not None
