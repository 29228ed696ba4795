"""What the targets claim with, and what they share."""

from __future__ import annotations

import re

SEPARATOR = b"\xff"  # in no UTF-8 text


def check(claim: object, what: str) -> None:
    """As ``assert``, but of a kind that no handler in a target takes for a refusal."""
    if not claim:
        raise AssertionError(what)


def check_no_secret(data: bytes, message: str) -> None:
    """No message shows what stands in a private member, unless it stands in another one as well."""
    for secret in re.findall(rb'"(?:[kd]|priv|client_token|plaintext)"\s*:\s*"([A-Za-z0-9+/_=-]{20,})"', data):
        if data.count(secret) == 1:
            check(secret.decode() not in message, "a message shows key material")
