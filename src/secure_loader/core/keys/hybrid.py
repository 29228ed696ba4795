"""Identities: key pairs that master keys are wrapped for, hybrid of ML-KEM-768 and X25519.

A published model is something to be harvested now and decrypted when there are quantum computers, so an identity is
broken only if both are. HPKE (RFC 9180) in base mode with the KEM of draft-ietf-hpke-pq (MLKEM768-X25519, known as
X-Wing), HKDF-SHA256 and AES-256-GCM, by ``cryptography``. The private key is the 32-byte seed of X-Wing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import (
    AEAD,
    KDF,
    KEM,
    MLKEM768X25519PrivateKey,
    MLKEM768X25519PublicKey,
    Suite,
)

from ...errors import KeyAccessError
from ..recipient import Recipient, WrapContext
from ..secrets import Secret, wipe_bytes

ALG = "mlkem768-x25519"
JWK_ALG = "MLKEM768-X25519"
SEED_BYTES = 32
_MLKEM_SEED, _MLKEM_PUBLIC = 64, 1184
PUBLIC_BYTES = _MLKEM_PUBLIC + 32
_ANYBODY = X25519PrivateKey.from_private_bytes(bytes(32))


def _suite() -> Suite:
    return Suite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)


@dataclass(frozen=True)
class PublicIdentity:
    """The public half of an identity, which others wrap master keys for.

    Attributes:
        kid: Its name.
        public: 1,216 bytes: ML-KEM-768 encapsulation key, then X25519.

    Raises:
        KeyAccessError: Not such a key.
    """

    kid: str
    public: bytes

    def __post_init__(self) -> None:
        self._key()

    def _key(self) -> MLKEM768X25519PublicKey:
        try:
            point = X25519PublicKey.from_public_bytes(self.public[_MLKEM_PUBLIC:])
            # A point of low order would give the same secret to everybody; whoever meets one refuses, so here already.
            _ANYBODY.exchange(point)
            return MLKEM768X25519PublicKey(MLKEM768PublicKey.from_public_bytes(self.public[:_MLKEM_PUBLIC]), point)
        except ValueError:
            raise KeyAccessError(f"key {self.kid!r} is not a public key of {JWK_ALG}") from None

    def wrap(self, master: Secret, context: WrapContext) -> Recipient:
        """An entry for the list of recipients."""
        return Recipient(ALG, self.kid, _suite().encrypt(master.reveal(), self._key(), context.encode()))

    def thumbprint(self) -> str:
        """SHA-256 of the public key, hexadecimal: what two people compare."""
        return hashlib.sha256(self.public).hexdigest()

    def document(self, encode: Callable[[bytes | memoryview], str]) -> dict[str, Any]:
        """As a public JWK (``kty`` ``AKP``, RFC 9964), with ``encode`` for base64url."""
        return {"kty": "AKP", "kid": self.kid, "alg": JWK_ALG, "use": "enc", "pub": encode(self.public)}


@dataclass(frozen=True)
class Identity:
    """A private identity.

    Attributes:
        kid: Its name.
        secret: The 32-byte seed.
    """

    kid: str
    secret: Secret = field(repr=False, compare=False)

    def _halves(self) -> tuple[MLKEM768PrivateKey, X25519PrivateKey]:
        expanded = hashlib.shake_256(self.secret.reveal()).digest(_MLKEM_SEED + 32)
        first, second = expanded[:_MLKEM_SEED], expanded[_MLKEM_SEED:]
        try:
            return MLKEM768PrivateKey.from_seed_bytes(first), X25519PrivateKey.from_private_bytes(second)
        finally:
            for part in (expanded, first, second):
                wipe_bytes(part)

    def public(self) -> PublicIdentity:
        """The public half."""
        halves = [half.public_key().public_bytes_raw() for half in self._halves()]
        return PublicIdentity(self.kid, b"".join(halves))

    def unwrap(self, entry: Recipient, context: WrapContext) -> Secret:
        """The master key in an entry for this identity.

        Raises:
            KeyAccessError: It was wrapped for another key of that name, or for another model.
        """
        try:
            found = _suite().decrypt(entry.wrapped, MLKEM768X25519PrivateKey(*self._halves()), context.encode())
        except (InvalidTag, ValueError):
            raise KeyAccessError(
                f"what is wrapped for {self.kid!r} does not open with this identity",
                hint="another key goes by the same name; ask the publisher whom the model was encrypted for",
            ) from None
        secret = Secret(found)
        wipe_bytes(found)
        return secret

    def document(self, encode: Callable[[bytes | memoryview], str]) -> dict[str, Any]:
        """As a private JWK."""
        return self.public().document(encode) | {"priv": encode(self.secret.reveal())}
