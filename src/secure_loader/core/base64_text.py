"""Base64 as CryptoTensors writes it, read in one spelling only (docs/format.md)."""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from functools import partial
from typing import Any

from ..errors import FormatError

_b2a = partial(binascii.b2a_base64, newline=False)


def base64_text(data: bytes) -> str:
    """Standard alphabet with padding, as CryptoTensors writes it."""
    return _b2a(data).decode("ascii")


def unbase64(text: object, length: int | None, what: str) -> bytes:
    """Decode strictly: standard alphabet, padding, no other character, canonical, of exactly ``length`` bytes."""
    if not isinstance(text, str):
        raise FormatError(f"{what} is not a string")
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except ValueError:  # binascii.Error, or characters beyond ASCII
        raise FormatError(f"{what} is not base64") from None
    if base64_text(data) != text:
        raise FormatError(f"{what} is not canonical base64")
    if length is not None and len(data) != length:
        raise FormatError(f"{what} has {len(data)} bytes instead of {length}")
    return data


def unbase64_all(texts: Mapping[str, Any], lengths: list[int], what: str) -> list[bytes]:
    """:func:`unbase64` for a text of each tensor, by name. Loops in C; what is wrong is looked for only if something is."""
    try:
        if len(set(lengths)) == 1:
            return _unbase64_even(list(texts.values()), lengths[0])
        data = list(map(binascii.a2b_base64, texts.values()))
        if list(map(len, data)) == lengths and list(map(_b2a, data)) == list(map(str.encode, texts.values())):
            return data
    except (TypeError, ValueError):
        pass  # not text, or not base64
    return [
        unbase64(text, length, f"{what} of tensor {name[:200]!r}")
        for (name, text), length in zip(texts.items(), lengths, strict=True)
    ]


def _unbase64_even(texts: list[str], n: int) -> list[bytes]:
    """Decode texts of ``n`` bytes each as one.

    Raises:
        TypeError: One of them is no string.
        ValueError: One of them is not canonical base64 of ``n`` bytes.
    """
    joined, pad = "".join(texts), -n % 3
    step = n + pad
    size = step // 3 * 4
    # The digit "A" is six zero bits. In place of the padding it makes each text end in ``pad`` bytes more, which are zero if
    # the unused bits of the last digit are.
    data = binascii.a2b_base64(joined.replace("=", "A"), strict_mode=True)
    if (
        {*map(len, texts)} != {size}
        or joined.count("=") != pad * len(texts)
        or any(joined[size - k :: size].strip("=") or any(data[step - k :: step]) for k in range(1, pad + 1))
    ):
        raise ValueError
    return [data[i : i + n] for i in range(0, len(data), step)]
