"""Secrets that travel as base64 in the JSON of a service, there and back, without a string of them on the way."""

from __future__ import annotations

import base64
import re
from typing import Any

from ...errors import KeyAccessError
from .. import strict_json
from ..secrets import Secret
from .lift import lift

_STANDARD = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_URL = _STANDARD[:-2] + b"-_"


def with_secret(before: bytes, secret: Secret, after: bytes, *, url: bool = False) -> bytearray:
    """The body of a request: a secret in base64 between two texts.

    Args:
        before: Up to the quote before the digits.
        secret: What is sent.
        after: From the quote behind them on.
        url: The alphabet of URLs, without padding.

    Returns:
        To be wiped by the caller.
    """
    with secret_digits(secret, url=url) as digits:
        # Of its final size from the start: a buffer that grows leaves copies behind.
        return bytearray().join([before, digits.reveal(), after])


def secret_digits(secret: Secret, *, url: bool = False) -> Secret:
    """A secret in base64. The module of the standard library would leave it in bytes that nobody can overwrite."""
    alphabet, data = _URL if url else _STANDARD, secret.reveal()
    out = bytearray(-(-len(data) // 3) * 4)
    for i in range(0, len(data), 3):
        piece = data[i : i + 3]
        bits = sum(byte << shift for byte, shift in zip(piece, (16, 8, 0), strict=False))
        for j, shift in enumerate((18, 12, 6, 0)):
            out[i // 3 * 4 + j] = alphabet[bits >> shift & 63] if j <= len(piece) else ord("=")
    digits = Secret(out)
    if url:
        with digits:
            return Secret(digits.reveal()[: -(-len(data) * 4 // 3)])
    return digits


def secret_in(body: bytearray, *path: str) -> tuple[dict[str, Any], Secret]:
    """What an answer says, and the secret in it.

    Args:
        body: UTF-8; the secret is taken out of it, and it is to be wiped by the caller.
        path: Where in the answer its base64 is: names of members, one inside the other.

    Returns:
        The answer, with a stand-in where the secret was; and the secret.

    Raises:
        FormatError: Not JSON.
        KeyAccessError: No base64 of 12 bytes or more is there.
    """
    pattern = rb'"%b"[ \t\r\n]*:[ \t\r\n]*"(?P<value>[A-Za-z0-9+/_=-]{16,16384})"' % re.escape(path[-1].encode())
    lifted = lift(body, re.compile(pattern))
    answer = found = strict_json.loads(bytes(body), what="answer", scan=True, any_number=True)
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    digits = lifted.get(found) if isinstance(found, str) else None
    if digits is None:
        raise KeyAccessError(f"the answer holds no {'.'.join(path)} in base64")
    try:
        if not digits.mixed():
            return answer, Secret(digits.decode())
    except ValueError:
        pass
    raise KeyAccessError(f"{'.'.join(path)} of the answer is not base64")


def bytes_in(answer: dict[str, Any], name: str) -> bytes:
    """What a member of an answer holds in base64, and is no secret.

    Raises:
        KeyAccessError: It holds something else.
    """
    text = answer.get(name)
    try:
        if isinstance(text, str):
            return base64.b64decode(text, validate=True)
    except ValueError:  # binascii.Error is one, and not the only one
        pass
    raise KeyAccessError(f"{name} of the answer is not base64")
