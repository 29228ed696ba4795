"""An authority for tests: roots, authorities below them, and certificates for signing keys."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

from secure_loader import SigningKey

CODE_SIGNING = (ExtendedKeyUsageOID.CODE_SIGNING,)
SERVER = (ExtendedKeyUsageOID.SERVER_AUTH,)
UNKNOWN = x509.UnrecognizedExtension(ObjectIdentifier("1.2.3.4"), b"\x05\x00")


def subject(cn: str = "Release Signing", o: str = "Acme", **more: str) -> x509.Name:
    """A name: common name, organisation, and what else NameOID knows."""
    pairs = [(NameOID.ORGANIZATION_NAME, o), *((getattr(NameOID, k), v) for k, v in more.items())]
    return x509.Name([x509.NameAttribute(oid, value) for oid, value in (*pairs, (NameOID.COMMON_NAME, cn))])


@dataclass(frozen=True)
class Issuer:
    """An authority."""

    name: x509.Name
    key: Any
    certificate: x509.Certificate

    def issue(
        self,
        key: Any,
        name: x509.Name | None = None,
        *,
        ca: bool = False,
        usage: tuple[ObjectIdentifier, ...] | None = CODE_SIGNING,
        san: tuple[x509.GeneralName, ...] = (),
        days: tuple[float, float] = (-1, 30),
        extra: tuple[tuple[x509.ExtensionType, bool], ...] = (),
        path_length: int | None = None,
        signs: bool = True,
    ) -> x509.Certificate:
        """A certificate for a key (an authority's, where ``ca``)."""
        return issue(key, self, name or subject(), ca, usage, san, days, extra, path_length, signs)

    def below(self, cn: str = "Acme Signing CA", **options: Any) -> Issuer:
        """An authority below this one."""
        key, name = ec.generate_private_key(ec.SECP256R1()), subject(cn)
        options.setdefault("usage", None)
        return Issuer(name, key, self.issue(key, name, **({"ca": True} | options)))


def issue(key, issuer, name, ca, usage, san, days, extra, path_length, signs):
    now = dt.datetime.now(dt.UTC)
    public = (
        ed25519.Ed25519PublicKey.from_public_bytes(key.verify_key().public)
        if isinstance(key, SigningKey)
        else key.public_key()
    )
    by = issuer.key if issuer is not None else key
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.BasicConstraints(ca=ca, path_length=path_length), True),
        (x509.SubjectKeyIdentifier.from_public_key(public), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), False),
        (x509.KeyUsage(signs and not ca, False, False, False, False, signs and ca, ca, False, False), True),
    ]
    if usage:
        extensions.append((x509.ExtendedKeyUsage(usage), False))
    if san:
        extensions.append((x509.SubjectAlternativeName(san), False))
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer.name if issuer is not None else name)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + dt.timedelta(days=days[0]))
        .not_valid_after(now + dt.timedelta(days=days[1]))
    )
    for extension, critical in (*extensions, *extra):
        builder = builder.add_extension(extension, critical)
    return builder.sign(by, hashes.SHA256())


def root(cn: str = "Acme Root") -> Issuer:
    """A root."""
    key, name = ec.generate_private_key(ec.SECP256R1()), subject(cn)
    return Issuer(name, key, issue(key, None, name, True, None, (), (-10, 3650), (), None, True))


def ders(*certificates: x509.Certificate) -> tuple[bytes, ...]:
    """As x5c has them, before base64."""
    return tuple(c.public_bytes(Encoding.DER) for c in certificates)


def pem(path: Path, *certificates: x509.Certificate) -> Path:
    """A PEM file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(c.public_bytes(Encoding.PEM) for c in certificates))
    path.chmod(0o644)
    return path
