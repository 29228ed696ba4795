"""JSON Web Keys (RFC 7517): ours as RFC 8037 has them, and CryptoTensors' own spelling.

CryptoTensors writes ``kty`` ``okp``, ``alg`` ``ed25519`` and standard base64 with padding; the RFCs have ``OKP``,
``crv`` ``Ed25519`` and base64url without. Both are read; files of ours are written as the RFCs say.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ...errors import FormatError, KeyAccessError
from .. import strict_json
from ..aead import ALGORITHMS, Algorithm
from ..secrets import Secret
from .hybrid import JWK_ALG, PUBLIC_BYTES, SEED_BYTES, Identity, PublicIdentity
from .lift import Digits, lift, restore
from .mldsa import ALG as MLDSA
from .mldsa import PUBLIC_BYTES as MLDSA_PUBLIC
from .mldsa import SecondSigningKey, SecondVerifyKey

# RFC 7518 names of the content encryption, the key wrapping of the same name, and CryptoTensors' names.
_OCT_ALGS = {
    "a256gcm": "aes256gcm",
    "a256gcmkw": "aes256gcm",
    "a128gcm": "aes128gcm",
    "a128gcmkw": "aes128gcm",
    "c20p": "chacha20poly1305",
    "c20pkw": "chacha20poly1305",
} | {name: name for name in ALGORITHMS}
_JWK_ALGS = {"aes256gcm": "A256GCM", "aes128gcm": "A128GCM", "chacha20poly1305": "C20P"}
_KID = re.compile(r"[^\x00-\x1f\x7f/]{1,256}")
_ED25519 = 32


@dataclass(frozen=True)
class MasterKey:
    """A symmetric key that wraps the DEKs of files.

    Attributes:
        kid: Its name; files name it, and it is found by it.
        algorithm: The one AEAD it is for.
        secret: The key.

    Raises:
        KeyAccessError: A kid that no file can name, or a key of the wrong length.
    """

    kid: str
    algorithm: Algorithm
    secret: Secret = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        # AESGCM would take 16 bytes for AES-256 and quietly be AES-128.
        _check(self.kid, self.secret, self.algorithm.key_bytes)

    def document(self) -> dict[str, str]:
        """As a private JWK."""
        return {
            "kty": "oct",
            "kid": self.kid,
            "alg": _JWK_ALGS[self.algorithm.name],
            "use": "enc",
            "k": b64url(self.secret.reveal()),
        }


@dataclass(frozen=True)
class VerifyKey:
    """An Ed25519 public key.

    Attributes:
        kid: Its name, a hint only: identity is the key itself.
        public: 32 bytes.
        second: The post-quantum key that must have signed as well, if its owner has one.
    """

    kid: str
    public: bytes
    second: SecondVerifyKey | None = None

    def document(self) -> dict[str, str]:
        """As a public JWK (RFC 8037), without ``second``, which is a JWK of its own."""
        return {
            "kty": "OKP",
            "crv": "Ed25519",
            "kid": self.kid,
            "alg": "EdDSA",
            "use": "sig",
            "x": b64url(self.public),
        }

    def thumbprint(self) -> str:
        """RFC 7638 thumbprint, SHA-256, base64url."""
        text = strict_json.dumps({"crv": "Ed25519", "kty": "OKP", "x": b64url(self.public)})
        return b64url(hashlib.sha256(text.encode()).digest())


@dataclass(frozen=True)
class SigningKey:
    """An Ed25519 private key.

    Attributes:
        kid: Its name.
        secret: The 32-byte seed.
        second: A post-quantum key of the same kid, to sign with as well.
        chain: Certificates of the key that go into what it signs (``x5c``), DER, its own first.

    Raises:
        KeyAccessError: A kid that no file can name, or a seed of the wrong length.
    """

    kid: str
    secret: Secret = field(repr=False, compare=False)
    second: SecondSigningKey | None = field(default=None, repr=False, compare=False)
    chain: tuple[bytes, ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        _check(self.kid, self.secret, _ED25519)

    def _private(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.secret.reveal())

    def sign(self, message: bytes) -> bytes:
        """64 bytes of signature (RFC 8032)."""
        return self._private().sign(message)

    def verify_key(self) -> VerifyKey:
        """The public half."""
        second = None if self.second is None else self.second.verify_key()
        return VerifyKey(self.kid, self._private().public_key().public_bytes_raw(), second)

    def document(self) -> dict[str, str]:
        """As a private JWK (RFC 8037), without ``second``, which is a JWK of its own."""
        return self.verify_key().document() | {"d": b64url(self.secret.reveal())}


Jwk = MasterKey | SigningKey | VerifyKey | Identity | PublicIdentity
_Second = SecondSigningKey | SecondVerifyKey


def parse_keys(text: bytes | bytearray | str, what: str, lifted: Mapping[str, Digits] | None = None) -> list[Jwk]:
    """All keys of a JWK or JWK set.

    Args:
        text: The JSON. Of a bytearray no part of a private member is copied where it could not be overwritten; it is
            changed, and to be wiped by the caller.
        what: Where it came from, for messages; no key material.
        lifted: What was lifted out of the text before.

    Returns:
        The keys. A post-quantum signing key is part of the Ed25519 key of the same kid.

    Raises:
        KeyAccessError: Malformed, of a kind or algorithm that is not ours, one kid twice, or a post-quantum signing key
            without the other.
    """
    lifted = {**(lifted or {}), **(lift(text) if isinstance(text, bytearray) else {})}
    try:
        doc = strict_json.loads(bytes(text) if isinstance(text, bytearray) else text, what="JWK", scan=True)
    except FormatError as e:
        raise KeyAccessError(f"{what}: {e.message}") from None
    entries = doc.get("keys") if isinstance(doc, dict) and "keys" in doc else [doc]
    if not isinstance(entries, list) or not entries:
        raise KeyAccessError(f"{what}: holds no keys")
    found = [_parse(restore(entry, lifted), what) for entry in entries]
    keys = [key for key in found if not isinstance(key, SecondSigningKey | SecondVerifyKey)]
    seconds = [key for key in found if isinstance(key, SecondSigningKey | SecondVerifyKey)]
    for kids in ([key.kid for key in keys], [key.kid for key in seconds]):
        twice = sorted({kid for kid in kids if kids.count(kid) > 1})
        if twice:
            raise KeyAccessError(f"{what}: two keys share the kid {twice[0]!r}")
    return _pairs(keys, seconds, what)


def _pairs(keys: list[Jwk], seconds: list[_Second], what: str) -> list[Jwk]:
    """RFC 7517 lets two keys of different kinds share a kid where they stand for each other."""
    rest = {key.kid: key for key in seconds}
    out: list[Jwk] = []
    for key in keys:
        second = rest.pop(key.kid, None)
        if second is None:
            out.append(key)
        elif isinstance(key, SigningKey) and isinstance(second, SecondSigningKey):  # noqa: SIM114 - two types
            out.append(replace(key, second=second))
        elif isinstance(key, VerifyKey) and isinstance(second, SecondVerifyKey):
            out.append(replace(key, second=second))
        else:
            raise KeyAccessError(f"{what}: two keys share the kid {key.kid!r}")
    if rest:
        raise KeyAccessError(
            f"{what}: {MLDSA} key {next(iter(rest))!r} has no Ed25519 key of the same kid beside it, and signs nothing alone"
        )
    return out


def parse_key(doc: Any, what: str) -> Jwk:
    """One key from the parsed JSON of a JWK. Raises as :func:`parse_keys`."""
    key = _parse(doc, what)
    if isinstance(key, SecondSigningKey | SecondVerifyKey):
        raise KeyAccessError(f"{what}: {MLDSA} key {key.kid!r} signs nothing alone")
    return key


def parse_second(doc: Any, what: str) -> SecondVerifyKey:
    """A public post-quantum signing key from the parsed JSON of its JWK. Raises as :func:`parse_keys`."""
    key = _parse(doc, what)
    if not isinstance(key, SecondVerifyKey):
        raise KeyAccessError(f"{what}: key {key.kid!r} is not a public {MLDSA} key")
    return key


def _parse(doc: Any, what: str) -> Jwk | _Second:
    if not isinstance(doc, Mapping):
        raise KeyAccessError(f"{what}: is not a JWK")
    kid, kty = doc.get("kid"), doc.get("kty")
    if not isinstance(kid, str) or not _KID.fullmatch(kid):
        raise KeyAccessError(f"{what}: a key has no usable kid (1 to 256 characters, no '/', no controls)")
    alg = doc.get("alg")
    if not isinstance(alg, str):
        raise KeyAccessError(f"{what}: key {kid!r} names no alg")
    if kty == "oct":
        return _master(doc, kid, alg, what)
    if kty in ("OKP", "okp"):
        return _ed25519(doc, kid, alg, what)
    if kty == "AKP" and alg == MLDSA:
        return _second(doc, kid, what)
    if kty == "AKP":
        return _identity(doc, kid, alg, what)
    raise KeyAccessError(f"{what}: key {kid!r} has a kty that is none of oct, OKP and AKP")


def _master(doc: Mapping[str, Any], kid: str, alg: str, what: str) -> MasterKey:
    name = _OCT_ALGS.get(alg.replace("-", "").lower())
    if name is None:
        raise KeyAccessError(f"{what}: key {kid!r} is for {alg[:40]!r}; {', '.join(ALGORITHMS)} are supported")
    _check_use(doc, kid, "enc", {"wrapKey", "unwrapKey", "encrypt", "decrypt"}, what)
    algorithm = ALGORITHMS[name]
    secret = Secret(_decode(doc.get("k"), algorithm.key_bytes, f"{what}: member k of key {kid!r}"))
    return MasterKey(kid, algorithm, secret)


def _ed25519(doc: Mapping[str, Any], kid: str, alg: str, what: str) -> SigningKey | VerifyKey:
    if alg.lower() not in ("ed25519", "eddsa") or str(doc.get("crv", "Ed25519")) != "Ed25519":
        raise KeyAccessError(f"{what}: key {kid!r} is not an Ed25519 key")
    _check_use(doc, kid, "sig", {"sign", "verify"}, what)
    public = bytes(_decode(doc.get("x"), _ED25519, f"{what}: member x of key {kid!r}"))
    if "d" not in doc:
        return VerifyKey(kid, public)
    key = SigningKey(kid, Secret(_decode(doc["d"], _ED25519, f"{what}: member d of key {kid!r}")))
    if key.verify_key().public != public:
        raise KeyAccessError(f"{what}: key {kid!r}: x is not the public half of d")
    return key


def _identity(doc: Mapping[str, Any], kid: str, alg: str, what: str) -> Identity | PublicIdentity:
    if alg != JWK_ALG:
        raise KeyAccessError(f"{what}: key {kid!r} is for {alg[:40]!r}; {JWK_ALG} and {MLDSA} are supported")
    _check_use(doc, kid, "enc", {"wrapKey", "unwrapKey", "deriveKey", "deriveBits"}, what)
    public = bytes(_decode(doc.get("pub"), PUBLIC_BYTES, f"{what}: member pub of key {kid!r}"))
    if "priv" not in doc:
        try:
            return PublicIdentity(kid, public)
        except KeyAccessError as e:
            raise KeyAccessError(f"{what}: {e.message}") from None
    key = Identity(kid, Secret(_decode(doc["priv"], SEED_BYTES, f"{what}: member priv of key {kid!r}")))
    if key.public().public != public:
        raise KeyAccessError(f"{what}: key {kid!r}: pub is not the public half of priv")
    return key


def _second(doc: Mapping[str, Any], kid: str, what: str) -> _Second:
    _check_use(doc, kid, "sig", {"sign", "verify"}, what)
    public = bytes(_decode(doc.get("pub"), MLDSA_PUBLIC, f"{what}: member pub of key {kid!r}"))
    if "priv" not in doc:
        return SecondVerifyKey(kid, public)
    key = SecondSigningKey(kid, Secret(_decode(doc["priv"], SEED_BYTES, f"{what}: member priv of key {kid!r}")))
    if key.verify_key().public != public:
        raise KeyAccessError(f"{what}: key {kid!r}: pub is not the public half of priv")
    return key


def _check_use(doc: Mapping[str, Any], kid: str, use: str, ops: set[str], what: str) -> None:
    key_ops = doc.get("key_ops", [])
    if (
        doc.get("use", use) != use
        or not isinstance(key_ops, list)
        or not all(isinstance(op, str) and op in ops for op in key_ops)
    ):
        raise KeyAccessError(f"{what}: key {kid!r} is not meant for this use")


def _decode(text: Any, length: int, what: str) -> bytearray:
    if not isinstance(text, (str, Digits)):
        raise KeyAccessError(f"{what} is missing or not a string")
    if text.mixed() if isinstance(text, Digits) else set(text) & set("+/") and set(text) & set("-_"):
        raise KeyAccessError(f"{what} mixes the two alphabets of base64")
    try:
        data = text.decode() if isinstance(text, Digits) else _decode_text(text)
    except (binascii.Error, ValueError):
        raise KeyAccessError(f"{what} is not base64") from None
    if len(data) != length:
        raise KeyAccessError(f"{what} has {len(data)} bytes instead of {length}")
    return data


def _decode_text(text: str) -> bytearray:
    padded = text.rstrip("=").replace("-", "+").replace("_", "/")
    return bytearray(base64.b64decode(padded + "=" * (-len(padded) % 4), validate=True))


def _check(kid: object, secret: Secret, length: int) -> None:
    if not isinstance(kid, str) or not _KID.fullmatch(kid):
        raise KeyAccessError(f"a kid has 1 to 256 characters, no '/' and no controls, unlike {str(kid)[:40]!r}")
    if len(secret) != length:
        raise KeyAccessError(f"key {kid!r} has {len(secret)} bytes instead of {length}")


def b64url(data: bytes | memoryview) -> str:
    """The URL alphabet without padding (RFC 4648, section 5)."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")
