"""What is wrapped for an identity (docs/format.md, B.5), spelt out: X-Wing, and HPKE in base mode on top of it.

Written from draft-connolly-cfrg-xwing-kem and RFC 9180; only ML-KEM-768, X25519, the hashes and AES-GCM are a library's.
"""

from __future__ import annotations

import hashlib
import hmac

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from .naive_json import KeyAccessError

LABEL = b"\\./" + b"/^\\"
SUITE = b"HPKE" + bytes.fromhex("647a 0001 0002")
MLKEM_PUBLIC, MLKEM_SEALED, POINT = 1184, 1088, 32


def halves(seed: bytes) -> tuple[MLKEM768PrivateKey, X25519PrivateKey]:
    expanded = hashlib.shake_256(seed).digest(96)
    return MLKEM768PrivateKey.from_seed_bytes(expanded[:64]), X25519PrivateKey.from_private_bytes(expanded[64:])


def public_of(seed: bytes) -> bytes:
    return b"".join(half.public_key().public_bytes_raw() for half in halves(seed))


def combine(quantum: bytes, classic: bytes, point: bytes, public_point: bytes) -> bytes:
    """The shared secret of X-Wing."""
    return hashlib.sha3_256(quantum + classic + point + public_point + LABEL).digest()


def extract(salt: bytes, label: bytes, ikm: bytes) -> bytes:
    return hmac.digest(salt, b"HPKE-v1" + SUITE + label + ikm, "sha256")


def expand(secret: bytes, label: bytes, info: bytes, length: int) -> bytes:
    """One block is enough for all that is asked for here."""
    text = length.to_bytes(2, "big") + b"HPKE-v1" + SUITE + label + info
    return hmac.digest(secret, text + b"\x01", "sha256")[:length]


def key_and_nonce(shared: bytes, info: bytes) -> tuple[bytes, bytes]:
    context = b"\0" + extract(b"", b"psk_id_hash", b"") + extract(b"", b"info_hash", info)
    secret = extract(shared, b"secret", b"")
    return expand(secret, b"key", context, 32), expand(secret, b"base_nonce", context, 12)


def open_wrapped(seed: bytes, wrapped: bytes, info: bytes) -> bytes:
    """What is wrapped for the identity with this seed."""
    sealed, point, text = wrapped[:MLKEM_SEALED], wrapped[MLKEM_SEALED:][:POINT], wrapped[MLKEM_SEALED + POINT :]
    quantum, classic = halves(seed)
    try:
        shared = combine(
            quantum.decapsulate(sealed),
            classic.exchange(X25519PublicKey.from_public_bytes(point)),
            point,
            classic.public_key().public_bytes_raw(),
        )
        key, nonce = key_and_nonce(shared, info)
        return AESGCM(key).decrypt(nonce, text, None)
    except (InvalidTag, ValueError):
        raise KeyAccessError("not wrapped for this identity in this context") from None


def wrap(public: bytes, plain: bytes, info: bytes, ephemeral: bytes) -> bytes:
    """Wrap for an identity; ``ephemeral`` is the private X25519 key. ML-KEM draws bytes of its own: never the same twice."""
    shared, sealed = MLKEM768PublicKey.from_public_bytes(public[:MLKEM_PUBLIC]).encapsulate()
    mine = X25519PrivateKey.from_private_bytes(ephemeral)
    point, theirs = mine.public_key().public_bytes_raw(), public[MLKEM_PUBLIC:]
    classic = mine.exchange(X25519PublicKey.from_public_bytes(theirs))
    key, nonce = key_and_nonce(combine(shared, classic, point, theirs), info)
    return sealed + point + AESGCM(key).encrypt(nonce, plain, None)
