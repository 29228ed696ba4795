"""What the targets claim with, and what they share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from secure_loader.core.keys.fetch import reading
from secure_loader.core.keys.net import Response, Url
from secure_loader.errors import KeySourceResponseError

SEPARATOR = b"\xff"  # in no UTF-8 text
URL = Url("http", "localhost", 80, "/keys")


def check(claim: object, what: str) -> None:
    """As ``assert``, but of a kind that no handler in a target takes for a refusal."""
    if not claim:
        raise AssertionError(what)


def check_no_secret(data: bytes, message: str) -> None:
    """No message shows what stands in a private member, unless it stands in another one as well."""
    for secret in re.findall(rb'"(?:[kd]|priv|client_token|plaintext)"\s*:\s*"([A-Za-z0-9+/_=-]{20,})"', data):
        if data.count(secret) == 1:
            check(secret.decode() not in message, "a message shows key material")


def read(data: bytes, read: Callable[[bytearray], Any]) -> Any:
    """What is made of a body, or None where it is refused; the body is overwritten in any case."""
    response = Response(200, {}, bytearray(data))
    try:
        return reading(response, URL, read)
    except KeySourceResponseError as e:
        check_no_secret(data, f"{e}{e.__cause__ or ''}")
        return None
    finally:
        check(not any(response.body), "a body was not overwritten")
