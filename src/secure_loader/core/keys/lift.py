"""Secrets in a JSON text, out of it before a JSON parser makes strings of them that nobody can overwrite."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

from ..secrets import Secret

# As every writer has them. Anything else, such as an escaped slash, goes the way of ordinary text.
PRIVATE = re.compile(rb'"(?:[kd]|priv)"[ \t\r\n]*:[ \t\r\n]*"(?P<value>[A-Za-z0-9+/_=-]{16,128})"')
"""Private members of JWKs."""
QUOTED = re.compile(rb'(\\?)"(?:[kd]|priv)\1"[ \t\r\n]*:[ \t\r\n]*\1"(?P<value>[A-Za-z0-9+/_=-]{16,128})\1"')
"""The same, also in JWKs that are strings of another text."""

_DIGITS = bytearray(b"\xff" * 256)
for _i, _c in enumerate(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"):
    _DIGITS[_c] = _i
for _c, _i in zip(b"+/-_", (62, 63, 62, 63), strict=True):
    _DIGITS[_c] = _i
_BAD, _PAD = 0xFF, ord("=")


class Digits(Secret):
    """Base64 of a key."""

    __slots__ = ()

    def mixed(self) -> bool:
        """Whether both alphabets occur."""
        have = set(self.reveal())
        return bool(have & set(b"+/")) and bool(have & set(b"-_"))

    def decode(self) -> bytearray:
        """What the digits stand for.

        Raises:
            ValueError: Not base64.
        """
        view = self.reveal()
        count = len(view)
        while count and view[count - 1] == _PAD:
            count -= 1
        if count % 4 == 1:
            raise ValueError
        # Of its final size from the start: a buffer that grows leaves copies behind.
        out, at, bits, value = bytearray(count * 3 // 4), 0, 0, 0
        for i in range(count):
            digit = _DIGITS[view[i]]
            if digit == _BAD:
                raise ValueError
            value, bits = (value << 6 | digit) & 0xFFFF, bits + 6
            if bits >= 8:
                bits -= 8
                out[at] = value >> bits & 0xFF
                at += 1
        return out


def lift(text: bytearray, what: re.Pattern[bytes] = PRIVATE) -> dict[str, Digits]:
    """Replace secrets in a JSON text by stand-ins of the same length.

    Args:
        text: UTF-8; changed in place.
        what: Finds them, as group ``value``: 16 bytes or more, none of which JSON escapes.

    Returns:
        What stood there, by stand-in.
    """
    token, lifted = secrets.token_hex(6), {}
    for i, (start, stop) in enumerate([found.span("value") for found in what.finditer(text)]):
        name = f"@{token}{i:x}".ljust(stop - start, "@")
        lifted[name] = Digits(text[start:stop])
        text[start:stop] = name.encode()
    return lifted


def restore(doc: Any, lifted: Mapping[str, Digits]) -> Any:
    """The members of a JWK, with what was lifted in place of the stand-ins; anything else as it is."""
    if not isinstance(doc, Mapping) or not lifted:
        return doc
    return {name: lifted.get(value, value) if isinstance(value, str) else value for name, value in doc.items()}
