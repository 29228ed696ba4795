"""The policy embedded in a file, decided before any key is asked for.

The trivial text, CryptoTensors' default, allows and needs no engine. Every other one is evaluated in a child process
(:mod:`core.policy_engine`), and whatever does not come out as exactly ``true`` denies the load.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import logging
import re
import time
from typing import Any

from ..errors import PolicyDeniedError
from .envelope import Policy
from .policy_clock import check_clock
from .policy_engine import check_text, decide
from .policy_input import describe, hides_environment
from .trust import VerifiedHeader

ALLOW_ALL = "package model\nallow = true"
# How long one file of a set speaks for the others, where the policy asks for nothing that differs between them.
REMEMBERED_SECONDS = 60.0
_TRIVIAL = re.compile(r"\s*package\s+model\s+(default\s+)?allow\s*:?=\s*true\s*")
# Any other mention of the input, in a comment even, may be about this file alone.
_THIS_FILE = re.compile(
    r"\binput\b(?!\s*\.\s*(?:time|loader|host|gpus|tee|env|claims)\b|\s*\.\s*file\s*\.\s*(?:model_id|release|signer)\b)"
)
_allowed: dict[bytes, float] = {}
_log = logging.getLogger(__name__)


def default_policy() -> Policy:
    """What CryptoTensors embeds when nobody asked for rules."""
    return Policy(ALLOW_ALL, ALLOW_ALL)


def is_trivial(text: str) -> bool:
    """Whether a local policy allows everything, by its spelling alone."""
    return _TRIVIAL.fullmatch(text) is not None


def enforce(verified: VerifiedHeader) -> None:
    """Let a load pass, or not. The remote text is for the key broker and is not looked at here.

    Args:
        verified: The file's header, whose signature was checked.

    Raises:
        PolicyDeniedError: The local policy says anything but true, cannot be evaluated, or the clock is wrong.
    """
    text = verified.envelope.policy.local
    if is_trivial(text):
        return
    started, now = time.monotonic(), dt.datetime.now(dt.UTC)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
    profile = verified.envelope.profile
    whose = "a file that names no model" if profile is None else f"{profile.model_id!r}, release {profile.release}"
    try:
        check_text(text)
        if (way := hides_environment(text)) is not None:
            raise PolicyDeniedError(
                f"data.model.allow is not decided: the policy may reach the environment by {way!r}, for names that nobody sees",
                hint="its publisher should write input.env.NAME, each time",
            )
        check_clock(now, None if profile is None else profile.created)
        given = describe(text, verified, now)
        key = None if _THIS_FILE.search(text) else _key(digest.digest(), given)
        if key is None or started - _allowed.get(key, -REMEMBERED_SECONDS) >= REMEMBERED_SECONDS:
            decide(text, json.dumps(given))
            if key is not None:
                _remember(key, started)
    except PolicyDeniedError as e:
        _log.info("policy %s denies %s: %s", digest.hexdigest()[:16], whose, e.message)
        raise PolicyDeniedError(f"{e.message} ({whose})", hint=e.hint) from None
    _log.info(
        "policy %s allows %s at %s by the %s clock, %.0f ms",
        digest.hexdigest()[:16],
        whose,
        given["time"]["rfc3339"],
        given["time"]["source"],
        1000 * (time.monotonic() - started),
    )


def _key(digest: bytes, given: dict[str, Any]) -> bytes:
    """What a decision depends on, but for the time, where no rule can tell the files of a set apart."""
    shared = {k: given["file"][k] for k in ("model_id", "release", "signer")}
    rest = {k: v for k, v in given.items() if k not in ("time", "file")}
    return hashlib.sha256(digest + json.dumps([shared, rest], sort_keys=True).encode()).digest()


def _remember(key: bytes, when: float) -> None:
    if len(_allowed) >= 64:
        _allowed.clear()
    _allowed[key] = when
