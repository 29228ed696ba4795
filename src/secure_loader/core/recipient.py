"""A master key wrapped for somebody: an entry of the signed list of recipients (docs/format.md, B.5).

Nothing here knows a key. Who wraps and who unwraps is for :mod:`core.keys`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import FormatError
from . import strict_json

MAX_RECIPIENTS = 64
MAX_WRAPPED = 8192
_ALG = re.compile(r"[a-z0-9][a-z0-9.-]{0,31}")
_KID = re.compile(r"[^\x00-\x1f\x7f]{1,512}")


@dataclass(frozen=True, slots=True, order=True)
class Recipient:
    """One who can unwrap the master key of a file.

    Attributes:
        alg: How it is wrapped: ``mlkem768-x25519``, or the service that does it (``vault-transit``, ``aws-kms``, …).
        kid: Name of the recipient's key; of a service's, without host and credentials: everybody can read it.
        wrapped: The master key for the recipient, 1 to 8,192 bytes.

    Raises:
        FormatError: Outside these bounds.
    """

    alg: str
    kid: str
    wrapped: bytes

    def __post_init__(self) -> None:
        if not _ALG.fullmatch(self.alg):
            raise FormatError("alg of a recipient is not 1 to 32 small letters, digits, dots and dashes")
        if not _KID.fullmatch(self.kid):
            raise FormatError("kid of a recipient is not 1 to 512 characters without controls")
        if not 1 <= len(self.wrapped) <= MAX_WRAPPED:
            raise FormatError(f"the wrapped key of recipient {self.kid[:80]!r} is not 1 to {MAX_WRAPPED:,} bytes")

    @property
    def name(self) -> tuple[str, str]:
        """What tells recipients apart."""
        return self.alg, self.kid

    @property
    def shown(self) -> str:
        """How messages name it: publishers choose names, and nobody writes lines into the logs of others by one."""
        return self.kid if self.kid.isprintable() else ascii(self.kid)


@dataclass(frozen=True, slots=True)
class WrapContext:
    """What a wrapped master key is bound to, so that an entry cannot be moved to another model or another key.

    Attributes:
        kid: Name of the master key.
        algorithm: AEAD that it is for, as CryptoTensors writes it.
        model_id: The model.
    """

    kid: str
    algorithm: str
    model_id: str

    def fields(self) -> dict[str, str]:
        """For services that take names and values (AWS KMS)."""
        return {"alg": self.algorithm, "kid": self.kid, "model_id": self.model_id}

    def encode(self) -> bytes:
        """For all others: associated data."""
        return b"secure_loader recipient v1\0" + strict_json.dumps(self.fields()).encode()


def check_recipients(recipients: tuple[Recipient, ...]) -> tuple[Recipient, ...]:
    """Returns a list as it may stand in a file: sorted, nobody twice, at most 64.

    Raises:
        FormatError: It may not.
    """
    names = [r.name for r in recipients]
    if len(names) > MAX_RECIPIENTS:
        raise FormatError(f"a file has at most {MAX_RECIPIENTS} recipients, not {len(names)}")
    if names != sorted(set(names)):
        raise FormatError("recipients are sorted by alg and kid, each of them once")
    return recipients
