"""The policy embedded in a file, decided before any key is asked for.

This release evaluates exactly one local policy: CryptoTensors' default, which allows. Any other Rego text is denied,
because a rule that nobody evaluates must not count as met.
"""

from __future__ import annotations

import re

from ..errors import PolicyDeniedError
from .envelope import Policy

ALLOW_ALL = "package model\nallow = true"
_TRIVIAL = re.compile(r"\s*package\s+model\s+(default\s+)?allow\s*:?=\s*true\s*")


def default_policy() -> Policy:
    """What CryptoTensors embeds when nobody asked for rules."""
    return Policy(ALLOW_ALL, ALLOW_ALL)


def enforce(policy: Policy) -> None:
    """Let a load pass, or not. The remote text is for the key broker and is not looked at here.

    Raises:
        PolicyDeniedError: The local policy is anything but ``allow = true``.
    """
    if not _TRIVIAL.fullmatch(policy.local):
        raise PolicyDeniedError(
            "the file carries a local policy that this release cannot evaluate (data.model.allow)",
            hint="only 'package model; allow = true' is evaluated yet; ask the publisher for a file without rules",
        )
