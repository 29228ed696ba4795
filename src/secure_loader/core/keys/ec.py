"""EC keys in PEM files: what OpenSSF model signing signs with. Everything else here is signed with Ed25519."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from ...errors import ConfigError, KeyAccessError, MissingFileError, SignatureError, SourceError
from ..home import refuse_foreign
from ..secrets import Secret, wipe
from ..source import FileSource
from .local import read_private

_MAX_PEM = 64 * 1024
_WANTED = "an EC key on the curve P-256, P-384 or P-521"
# Each curve goes with one digest, in the peer's code as in the list of Sigstore's key kinds.
_CURVES: dict[str, tuple[str, hashes.HashAlgorithm]] = {
    "secp256r1": ("P-256", hashes.SHA256()),
    "secp384r1": ("P-384", hashes.SHA384()),
    "secp521r1": ("P-521", hashes.SHA512()),
}


@dataclass(frozen=True, slots=True)
class EcVerifyKey:
    """A public key that the operator trusts.

    Attributes:
        name: What the operator calls it: its file, without ``.pem``.
        public: The key.
    """

    name: str
    public: ec.EllipticCurvePublicKey

    @property
    def curve(self) -> str:
        """Its curve as NIST calls it."""
        return _CURVES[self.public.curve.name][0]

    def fingerprint(self) -> str:
        """SHA-256 of its PEM, in hex: what a bundle calls the hint."""
        from cryptography.hazmat.primitives import serialization  # 3 ms that only those who have such keys pay

        kind, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        return hashlib.sha256(self.public.public_bytes(kind, form)).hexdigest()

    def verify(self, signature: bytes, message: bytes) -> None:
        """Raises SignatureError unless this key made the signature (ASN.1 DER)."""
        try:
            self.public.verify(signature, message, ec.ECDSA(_CURVES[self.public.curve.name][1]))
        except InvalidSignature:
            raise SignatureError(f"the signature is not one of the key {self.name!r}: altered after signing") from None


class EcSigningKey:
    """A private key; its bytes are in the hands of OpenSSL alone."""

    __slots__ = ("_private",)

    def __init__(self, private: ec.EllipticCurvePrivateKey) -> None:
        self._private = private

    def sign(self, message: bytes) -> bytes:
        """A signature in ASN.1 DER."""
        return self._private.sign(message, ec.ECDSA(_CURVES[self._private.curve.name][1]))

    def verify_key(self, name: str) -> EcVerifyKey:
        """The public half."""
        return EcVerifyKey(name, self._private.public_key())

    def __repr__(self) -> str:
        return "<EC signing key>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a signing key is never pickled or copied")


def read_signing_key(path: Path, passphrase: Secret | None = None) -> EcSigningKey:
    """A private key from a PEM file that nobody else can read.

    Args:
        path: PKCS #8, or what ``openssl ecparam -genkey`` writes.
        passphrase: Of an encrypted file.

    Raises:
        KeyAccessError: Missing, kept carelessly, no such key, or not opened by this passphrase.
    """
    from cryptography.hazmat.primitives.serialization import load_pem_private_key  # as above

    data = read_private(path)
    try:
        opened = None if passphrase is None else passphrase.reveal()
        key = load_pem_private_key(data, opened)  # type: ignore[arg-type]  # it takes any buffer
    except TypeError:
        why = "is encrypted under a passphrase" if passphrase is None else "is not encrypted under a passphrase"
        hint = "say where it is: --passphrase-file FILE" if passphrase is None else None
        raise KeyAccessError(f"key file {why}", path=path, hint=hint) from None
    except (ValueError, UnsupportedAlgorithm):
        # What the library says of a broken file is not repeated: it may quote it.
        why = "cannot be opened: not a private key in PEM" + ("" if passphrase is None else ", or another passphrase")
        raise KeyAccessError(f"key file {why}", path=path) from None
    finally:
        wipe(data)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name not in _CURVES:
        raise KeyAccessError(
            f"key file does not hold {_WANTED}",
            path=path,
            hint="make one with: openssl ecparam -name prime256v1 -genkey -noout -out FILE",
        )
    return EcSigningKey(key)


def read_verify_keys(paths: Iterable[str | os.PathLike[str]]) -> list[EcVerifyKey]:
    """Trusted public keys, from PEM files and the ``*.pem`` files of folders.

    Raises:
        ConfigError: A file is malformed, holds another kind of key, or others could have written it.
        SourceError: A file cannot be read.
    """
    found = []
    for path in map(Path, paths):
        if path.is_dir():
            refuse_foreign(os.stat(path), path, "folder of trusted keys")
            found += [_read_verify_key(file) for file in sorted(path.glob("*.pem"))]
        else:
            found.append(_read_verify_key(path))
    return found


def _read_verify_key(path: Path) -> EcVerifyKey:
    from cryptography.hazmat.primitives.serialization import load_pem_public_key  # as above

    what = "file of a trusted key"
    try:
        with FileSource(path) as source:
            refuse_foreign(os.fstat(source.fileno()), path, what)
            data = source.read(0, min(source.size, _MAX_PEM))
    except SourceError as e:
        kind = MissingFileError if isinstance(e, MissingFileError) else SourceError
        raise kind(f"{what}: {e.message}", path=path) from None
    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        private = b"PRIVATE KEY" in data
        raise ConfigError(
            f"{what} holds {'a private key; only the public half belongs here' if private else 'no public key in PEM'}",
            path=path,
            hint=f"take the public half: openssl pkey -in {path} -pubout" if private else None,
        ) from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in _CURVES:
        raise ConfigError(f"{what} does not hold {_WANTED}", path=path)
    return EcVerifyKey(path.stem, key)
