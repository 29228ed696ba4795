"""The one kind of JWE that a Trustee broker answers with: flattened, ECDH-ES+A256KW on P-256, A256GCM (RFC 7516, 7518).

Nothing else is opened. What a sender may choose is what attackers choose: other algorithms (RSA1_5 tells who asks often
enough what it decrypts to), compression (its length tells about the plaintext, and a small text may unfold to a huge
one), other curves, and points that are on none.
"""

from __future__ import annotations

import base64
import re
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.concatkdf import ConcatKDFHash
from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap

from ...errors import KeyAccessError
from .. import strict_json
from ..secrets import Secret, wipe, wipe_bytes
from .jwk import b64url

ALG, ENC = "ECDH-ES+A256KW", "A256GCM"
_COORDINATE, _KEY, _WRAPPED, _IV, _TAG = 32, 32, 40, 12, 16
_B64URL = re.compile(r"[A-Za-z0-9_-]*")
_MEMBERS = {"protected", "encrypted_key", "iv", "ciphertext", "tag"}
_HEAD = {"alg", "enc", "epk"}
_EPK = {"kty", "crv", "x", "y"}


def public_jwk(key: ec.EllipticCurvePublicKey) -> dict[str, str]:
    """What a broker is told to encrypt to: the public half of a P-256 key, as JWK."""
    numbers = key.public_numbers()
    x, y = (b64url(n.to_bytes(_COORDINATE, "big")) for n in (numbers.x, numbers.y))
    return {"kty": "EC", "crv": "P-256", "alg": ALG, "x": x, "y": y}


def open_jwe(text: bytes, key: ec.EllipticCurvePrivateKey) -> bytearray:
    """Decrypt.

    Args:
        text: JSON of a flattened JWE.
        key: The P-256 key that it was encrypted to.

    Returns:
        The plaintext; wipe it.

    Raises:
        FormatError: Not JSON as it has to be.
        KeyAccessError: Another kind of JWE, a part of the wrong length, a point that is not on the curve, or not encrypted
            to this key.
    """
    doc = _object(strict_json.loads(text, what="JWE", scan=True), _MEMBERS, "JWE")
    head = _object(
        strict_json.loads(_decode(doc, "protected"), what="header of the JWE", scan=True), _HEAD, "its header"
    )
    if head["alg"] != ALG or head["enc"] != ENC:
        raise KeyAccessError(f"the JWE is not encrypted by {ALG} and {ENC}, which are the only ones accepted")
    wrapped, iv, tag = (_decode(doc, *part) for part in (("encrypted_key", _WRAPPED), ("iv", _IV), ("tag", _TAG)))
    sealed = _decode(doc, "ciphertext") + tag
    plain = bytearray(len(sealed) - _TAG)
    with _content_key(wrapped, _agree(key, _point(head["epk"]))) as content_key:
        cipher = AESGCM(content_key.reveal())
        try:
            # What is authenticated is the text of the header, not what was made of it.
            cipher.decrypt_into(iv, sealed, doc["protected"].encode("ascii"), plain)
        except InvalidTag:
            wipe(plain)
            raise KeyAccessError("the JWE does not open: it was altered") from None
    return plain


def _object(doc: Any, members: set[str], what: str) -> dict[str, Any]:
    if not isinstance(doc, dict) or doc.keys() != members:
        odd = sorted(doc.keys() - members)[:1] if isinstance(doc, dict) else []
        named = f": it has {odd[0][:40]!r}" if odd else ""
        raise KeyAccessError(f"{what} does not have just the members {', '.join(sorted(members))}{named}")
    return doc


def _decode(doc: dict[str, Any], name: str, length: int | None = None) -> bytes:
    """A member in base64url without padding, of which each value has one spelling."""
    text = doc[name]
    if not isinstance(text, str) or not _B64URL.fullmatch(text) or len(text) % 4 == 1:
        raise KeyAccessError(f"member {name} of the JWE is not base64url")
    data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    if b64url(data) != text:
        raise KeyAccessError(f"member {name} of the JWE is not base64url")
    if length is not None and len(data) != length:
        raise KeyAccessError(f"member {name} of the JWE has {len(data)} bytes instead of {length}")
    return data


def _point(epk: Any) -> ec.EllipticCurvePublicKey:
    epk = _object(epk, _EPK, "its epk")
    if epk["kty"] != "EC" or epk["crv"] != "P-256":
        raise KeyAccessError("the epk of the JWE is not a P-256 key")
    x, y = (int.from_bytes(_decode(epk, name, _COORDINATE), "big") for name in "xy")
    try:
        return ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key()
    except ValueError:
        raise KeyAccessError("the epk of the JWE is not a point on P-256") from None


def _agree(key: ec.EllipticCurvePrivateKey, peer: ec.EllipticCurvePublicKey) -> Secret:
    """The key that the content key is wrapped with (RFC 7518, 4.6.2; apu and apv empty)."""
    shared = key.exchange(ec.ECDH(), peer)
    try:
        name = ALG.encode("ascii")
        info = len(name).to_bytes(4, "big") + name + bytes(4) + bytes(4) + (8 * _KEY).to_bytes(4, "big")
        derived = bytearray(_KEY)
        ConcatKDFHash(SHA256(), _KEY, info).derive_into(shared, derived)
        return Secret(derived)
    finally:
        wipe_bytes(shared)


def _content_key(wrapped: bytes, wrapping: Secret) -> Secret:
    with wrapping:
        try:
            found = aes_key_unwrap(wrapping.reveal(), wrapped)
        except InvalidUnwrap:
            raise KeyAccessError("the JWE does not open: it was encrypted to another key, or altered") from None
    secret = Secret(found)
    wipe_bytes(found)
    return secret
