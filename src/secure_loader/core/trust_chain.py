"""Signers by certificate: a chain that a document carries (``x5c``), checked against roots that the operator chose.

A chain is never a reason to trust by itself. It counts where ``[[authority]]`` in the operator's ``trust.toml`` names a root
that it leads to, what the signer's certificate must say, and the models that such a signer may sign.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fnmatch
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, FormatError, UntrustedSignerError
from . import trust_toml as toml
from .envelope import MAX_CERTIFICATES, MAX_CHAIN_BYTES
from .keys.jwk import SigningKey
from .trust_toml import parse_time, read_own

if TYPE_CHECKING:
    from cryptography import x509

_KEYS = {"name", "roots", "models", "subject", "san", "not_after"}
_SUBJECT = {"CN", "O", "OU", "C", "L", "ST", "STREET", "DC", "UID", "emailAddress", "serialNumber"}
_OIDS = {"1.2.840.113549.1.9.1": "emailAddress", "2.5.4.5": "serialNumber"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SAN = ("email", "dns", "uri")


@dataclass(frozen=True, slots=True)
class Authority:
    """Whose certificates make signers.

    Attributes:
        name: What the operator calls those signers.
        roots: PEM files with root certificates, read when a chain has to be checked.
        models: Patterns of model ids that they may sign.
        subject: What the subject of the signer's certificate must say: attribute and pattern.
        san: Patterns, one of which one of its alternative names must match: ``email:…``, ``dns:…``, ``uri:…``.
        not_after: From when on it makes no signers any more, UTC.
        where: The file that says so.
    """

    name: str
    roots: tuple[Path, ...]
    models: tuple[str, ...]
    subject: tuple[tuple[str, str], ...] = ()
    san: tuple[str, ...] = ()
    not_after: dt.datetime | None = None
    where: str = "the rules given"

    def document(self) -> dict[str, Any]:
        """As JSON."""
        doc: dict[str, Any] = {"name": self.name, "roots": list(map(str, self.roots)), "models": list(self.models)}
        if self.subject:
            doc["subject"] = dict(self.subject)
        if self.san:
            doc["san"] = list(self.san)
        return doc if self.not_after is None else doc | {"not_after": toml.time_text(self.not_after)}

    def read_roots(self) -> list[x509.Certificate]:
        """The root certificates.

        Raises:
            ConfigError: No certificates, or others could have written the file.
            SourceError: Not readable.
        """
        return [root for path in self.roots for root in _read_pem(path, "file of root certificates")]

    def certify(self, chain: Chain, created: str | None) -> list[str]:
        """Whether a chain makes a signer.

        Args:
            chain: The chain.
            created: When the signature was made, as the signer says.

        Returns:
            SHA-256 of the certificates on the way to the root, in hex.

        Raises:
            UntrustedSignerError: It does not; says why.
            ConfigError, SourceError: As :meth:`read_roots`.
        """
        now = dt.datetime.now(dt.UTC)
        if self.not_after is not None and now >= self.not_after:
            raise UntrustedSignerError(f"it made signers only until {self.not_after:%Y-%m-%d}")
        with _readable():
            self._check_names(chain.leaf)
            begin = chain.leaf.not_valid_before_utc
        signed = parse_time(created)
        if signed is not None and signed < begin:
            raise UntrustedSignerError(f"the certificate is valid from {begin:%Y-%m-%d}, after it was used")
        return chain.verify(self.read_roots(), now)

    def _check_names(self, leaf: x509.Certificate) -> None:
        said: dict[str, list[str]] = {}
        for attribute in leaf.subject:
            name = _OIDS.get(attribute.oid.dotted_string, attribute.rfc4514_attribute_name)
            said.setdefault(name, []).append(str(attribute.value))
        for name, pattern in self.subject:
            values = said.get(name, [])
            # One value only: of several, another program may look at another one.
            if len(values) != 1 or not fnmatch.fnmatchcase(values[0], pattern):
                shown = ", ".join(map(repr, values)) or "nothing"
                raise UntrustedSignerError(f"{name} of its subject is {shown[:200]}, not {pattern!r}")
        if self.san and not any(fnmatch.fnmatchcase(n, p) for n in _alternative_names(leaf) for p in self.san):
            raise UntrustedSignerError(f"none of its alternative names matches {', '.join(self.san)}")


@dataclass(frozen=True, slots=True)
class Chain:
    """Certificates that a document carries. Nothing of it was verified.

    Attributes:
        leaf: The signer's.
        public: Its Ed25519 key, 32 bytes.
        others: Those that may lead to a root.
    """

    leaf: x509.Certificate
    public: bytes
    others: tuple[x509.Certificate, ...]

    @classmethod
    def parse(cls, ders: Sequence[bytes]) -> Chain:
        """From DER, the signer's certificate first.

        Raises:
            UntrustedSignerError: Not certificates, or the first is not for an Ed25519 key.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        with _readable():
            leaf, *others = (x509.load_der_x509_certificate(der) for der in ders)
            key = leaf.public_key()
        if not isinstance(key, Ed25519PublicKey):
            raise UntrustedSignerError("the certificate is not for an Ed25519 key")
        return cls(leaf, key.public_bytes_raw(), tuple(others))

    def verify(self, roots: Sequence[x509.Certificate], now: dt.datetime) -> list[str]:
        """Find a way to one of the roots; returns and raises as :meth:`Authority.certify`."""
        from cryptography.x509 import verification

        try:
            policy = verification.PolicyBuilder().store(verification.Store(list(roots))).time(now)
            verifier = policy.extension_policies(
                ca_policy=_ca_policy(), ee_policy=_leaf_policy()
            ).build_client_verifier()
            found = verifier.verify(self.leaf, list(self.others)).chain
        except (verification.VerificationError, ValueError, TypeError, Warning) as e:
            # A TypeError comes of names of types that names do not have.
            # What it was looking at follows in brackets, and is whatever the certificate says.
            raise UntrustedSignerError(
                f"the certificate does not hold: {str(e).partition(' (encountered')[0][:200]}"
            ) from None
        return [_digest(c) for c in found]


def _leaf_policy() -> Any:
    """What a signer's certificate must be, beyond signature, validity and name constraints: made for signing, and no CA."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID
    from cryptography.x509.verification import Criticality, ExtensionPolicy

    def usage(_: Any, __: Any, extension: x509.ExtendedKeyUsage) -> None:
        _must(ExtendedKeyUsageOID.CODE_SIGNING in extension, "it is not for code signing")

    def constraints(_: Any, __: Any, extension: x509.BasicConstraints | None) -> None:
        _must(extension is None or not extension.ca, "it is that of an authority")

    def key_usage(_: Any, __: Any, extension: x509.KeyUsage | None) -> None:
        _must(extension is None or extension.digital_signature, "its key is not for signatures")

    return (
        ExtensionPolicy.permit_all()
        .require_present(x509.ExtendedKeyUsage, Criticality.AGNOSTIC, usage)
        .may_be_present(x509.BasicConstraints, Criticality.AGNOSTIC, constraints)
        .may_be_present(x509.KeyUsage, Criticality.AGNOSTIC, key_usage)
    )


def _ca_policy() -> Any:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID
    from cryptography.x509.verification import Criticality, ExtensionPolicy

    def usage(_: Any, __: Any, extension: x509.ExtendedKeyUsage | None) -> None:
        fits = (ExtendedKeyUsageOID.CODE_SIGNING, ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE)
        _must(extension is None or any(oid in extension for oid in fits), "its authority is not for code signing")

    def constraints(_: Any, __: Any, extension: x509.BasicConstraints) -> None:
        _must(extension.ca, "it was issued by a certificate that is no authority's")

    def key_usage(_: Any, __: Any, extension: x509.KeyUsage) -> None:
        _must(extension.key_cert_sign, "it was issued by a key that is not for certificates")

    return (
        ExtensionPolicy.permit_all()
        .require_present(x509.BasicConstraints, Criticality.CRITICAL, constraints)
        .require_present(x509.KeyUsage, Criticality.AGNOSTIC, key_usage)
        .may_be_present(x509.ExtendedKeyUsage, Criticality.AGNOSTIC, usage)
    )


def _must(condition: bool, what: str) -> None:  # noqa: FBT001 - an assertion that holds under -O as well
    if not condition:
        raise ValueError(what)


def _digest(certificate: x509.Certificate) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding

    return hashlib.sha256(certificate.public_bytes(Encoding.DER)).hexdigest()


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """Certificates are parsed piece by piece, whenever one is looked at. Raises UntrustedSignerError."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        yield
    except (
        ValueError,
        TypeError,
        UnsupportedAlgorithm,
        x509.InvalidVersion,
        x509.DuplicateExtension,
        x509.UnsupportedGeneralNameType,
        Warning,  # of the library, about what it will not read any longer, where warnings are errors
    ) as e:
        raise UntrustedSignerError(f"a certificate cannot be read: {str(e)[:200]}") from None


def _alternative_names(leaf: x509.Certificate) -> list[str]:
    from cryptography import x509

    try:
        found = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    kinds: tuple[type[x509.RFC822Name | x509.DNSName | x509.UniformResourceIdentifier], ...] = (
        x509.RFC822Name,
        x509.DNSName,
        x509.UniformResourceIdentifier,
    )
    return [f"{_SAN[kinds.index(type(n))]}:{n.value}" for n in found if isinstance(n, kinds)]


def _read_pem(path: Path, what: str) -> list[x509.Certificate]:
    from cryptography import x509

    data = read_own(path, what)
    try:
        return x509.load_pem_x509_certificates(data)
    except (ValueError, TypeError) as e:
        raise ConfigError(f"{what} cannot be used: {str(e)[:200]}", path=path) from None


def describe(ders: Sequence[bytes]) -> str:
    """What the certificate of a signer says, for a person; nothing of it was verified."""
    try:
        leaf = Chain.parse(ders).leaf
        with _readable():
            names = [leaf.subject.rfc4514_string(), *_alternative_names(leaf)]
            return f"{', '.join(filter(None, names))}; until {leaf.not_valid_after_utc:%Y-%m-%d}"
    except UntrustedSignerError as e:
        return e.message


def request(key: SigningKey, name: str) -> str:
    """A request for a certificate (PKCS #10, PEM), which an authority signs.

    Args:
        key: Whose certificate it will be.
        name: Its subject, as RFC 4514 has it: ``CN=Release Signing,O=Acme GmbH``.

    Raises:
        ConfigError: No such name.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding
    from cryptography.x509.oid import ExtendedKeyUsageOID

    try:
        subject = x509.Name.from_rfc4514_string(name)
    except ValueError:
        raise ConfigError(f"{name!r} is no name such as CN=Release Signing,O=Acme") from None
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING])
    private = Ed25519PrivateKey.from_private_bytes(key.secret.reveal())
    return builder.add_extension(usage, critical=False).sign(private, None).public_bytes(Encoding.PEM).decode()


def certified(key: SigningKey, path: Path) -> SigningKey:
    """A signing key with its certificates, which go into whatever it signs.

    Args:
        key: The key.
        path: PEM file: its certificate first, then those that lead to a root, which itself may be left out.

    Raises:
        ConfigError: For another key, not for code signing, not valid now, or too many of them.
        SourceError: Not readable.
    """
    from cryptography.hazmat.primitives.serialization import Encoding

    certificates = _read_pem(path, "certificate chain")
    ders = tuple(c.public_bytes(Encoding.DER) for c in certificates)
    if len(ders) > MAX_CERTIFICATES or sum(map(len, ders)) > MAX_CHAIN_BYTES:
        raise ConfigError(f"more than {MAX_CERTIFICATES} certificates, or more than 64 KiB of them", path=path)
    try:
        chain = Chain.parse(ders)
        if chain.public != key.verify_key().public:
            raise ConfigError("the first certificate is not that of the signing key", path=path)
        # As its own root: what is left to be seen is the certificate itself.
        chain.verify([chain.leaf], dt.datetime.now(dt.UTC))
    except UntrustedSignerError as e:
        raise ConfigError(e.message, path=path) from None
    return replace(key, chain=ders)


def parse_authority(doc: Mapping[str, Any], where: str) -> Authority:
    """An authority from a table of TOML.

    Raises:
        FormatError: An unknown key, or a value that cannot be.
    """
    toml.only(doc, _KEYS, "[[authority]]")
    name, subject = doc.get("name"), doc.get("subject", {})
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise FormatError("[[authority]] needs a name: letters, digits, dots, dashes and underscores")
    roots, models, san = (toml.texts(doc, key) for key in ("roots", "models", "san"))
    if roots is None or models is None:
        raise FormatError("[[authority]] needs roots, PEM files, and models, patterns")
    if not isinstance(subject, dict) or not all(isinstance(v, str) and v for v in subject.values()):
        raise FormatError("subject must be a table of patterns")
    toml.only(subject, _SUBJECT, "subject")
    if not subject and san is None:
        # An authority may certify the whole world for code signing.
        raise FormatError("[[authority]] needs subject or san: what a signer's certificate must say")
    if not all(pattern.partition(":")[0] in _SAN and pattern.partition(":")[2] for pattern in san or ()):
        raise FormatError("san takes patterns such as email:*@example.org, dns:… and uri:…")
    try:
        paths = tuple(Path(where).parent / Path(root).expanduser() for root in roots)
    except RuntimeError as e:
        raise FormatError(f"roots: {e}") from None
    return Authority(name, paths, models, tuple(subject.items()), san or (), toml.time(doc, "not_after"), where)
