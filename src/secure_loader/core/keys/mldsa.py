"""ML-DSA-65 (FIPS 204): second signatures, for when Ed25519 is broken by a quantum computer.

JWKs are as RFC 9964 has them: ``kty`` ``AKP``, ``alg`` ``ML-DSA-65``, ``pub``, and ``priv``, the 32-byte seed.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

from ...errors import DeviceError, SignatureError
from .. import strict_json
from ..secrets import Secret

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA65PrivateKey

ALG = "ML-DSA-65"
PUBLIC_BYTES, SEED_BYTES, SIGNATURE_BYTES = 1952, 32, 3309


@dataclass(frozen=True)
class SecondVerifyKey:
    """An ML-DSA-65 public key.

    Attributes:
        kid: Its name, that of the Ed25519 key beside which it signs.
        public: 1,952 bytes.
    """

    kid: str
    public: bytes

    def document(self) -> dict[str, str]:
        """As a public JWK."""
        return {"kty": "AKP", "alg": ALG, "kid": self.kid, "use": "sig", "pub": _b64url(self.public)}

    def thumbprint(self) -> str:
        """RFC 7638 thumbprint, SHA-256, base64url."""
        text = strict_json.dumps({"alg": ALG, "kty": "AKP", "pub": _b64url(self.public)})
        return _b64url(hashlib.sha256(text.encode()).digest())

    def verify(self, signature: bytes, message: bytes) -> None:
        """Raises SignatureError unless the key signed the message, DeviceError where the library has no ML-DSA."""
        from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA65PublicKey

        try:
            MLDSA65PublicKey.from_public_bytes(self.public).verify(signature, message)
        except UnsupportedAlgorithm:
            raise _missing() from None
        except (InvalidSignature, ValueError):
            raise SignatureError(
                f"the post-quantum signature of {self.kid!r} does not match: altered after signing"
            ) from None


@dataclass(frozen=True)
class SecondSigningKey:
    """An ML-DSA-65 private key.

    Attributes:
        kid: As :class:`SecondVerifyKey` has it.
        secret: The 32-byte seed.
    """

    kid: str
    secret: Secret = field(repr=False, compare=False)

    def _private(self) -> MLDSA65PrivateKey:
        from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA65PrivateKey

        try:
            return MLDSA65PrivateKey.from_seed_bytes(self.secret.reveal())
        except UnsupportedAlgorithm:
            raise _missing() from None

    def sign(self, message: bytes) -> bytes:
        """3,309 bytes of signature, with an empty context."""
        return self._private().sign(message)

    def verify_key(self) -> SecondVerifyKey:
        """The public half."""
        return SecondVerifyKey(self.kid, self._private().public_key().public_bytes_raw())

    def document(self) -> dict[str, str]:
        """As a private JWK."""
        return self.verify_key().document() | {"priv": _b64url(self.secret.reveal())}


def _b64url(data: bytes | memoryview) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def _missing() -> DeviceError:
    return DeviceError("the installed cryptography has no ML-DSA", hint="install its wheel from PyPI")
