"""Who may sign what: the local trust store, and the one door through which a header becomes a verified one.

Trust comes from the operator's own files only. What a header says about its signer is a hint which key to try.
"""

from __future__ import annotations

import datetime as dt
import fnmatch
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ..errors import (
    ConfigError,
    FormatError,
    KeyAccessError,
    MissingFileError,
    SignatureError,
    SourceError,
    UntrustedSignerError,
)
from . import strict_json
from .envelope import SIGNATURE, Envelope, metadata
from .header import LENGTH, Header, canonical_json, file_prefix
from .home import refuse_foreign
from .keys.jwk import VerifyKey, parse_key
from .source import read_small_file

MAX_TRUST_FILE = 64 * 1024


@dataclass(frozen=True, slots=True)
class TrustedSigner:
    """A signer that the operator trusts.

    Attributes:
        name: What the operator calls it.
        key: Its public key.
        models: Patterns (shell style, case-sensitive) of model ids it may sign.
        not_after: From when on it is not trusted any more, UTC.
    """

    name: str
    key: VerifyKey
    models: tuple[str, ...] = ("*",)
    not_after: dt.datetime | None = None

    def document(self) -> dict[str, Any]:
        """As JSON for a file of the trust store."""
        until = None if self.not_after is None else self.not_after.strftime("%Y-%m-%dT%H:%M:%SZ").rjust(20, "0")
        return {"name": self.name, "key": self.key.document(), "models": list(self.models), "not_after": until}


class TrustStore:
    """The signers that count.

    Args:
        signers: Trusted signers.
        where: Where they came from, for messages.
    """

    def __init__(self, signers: Iterable[TrustedSigner], where: str = "the trust store given") -> None:
        self.signers = tuple(signers)
        self.where = where

    @classmethod
    def from_paths(cls, paths: Iterable[str | os.PathLike[str]]) -> TrustStore:
        """Read trust files, and folders of them.

        Raises:
            ConfigError: A file is malformed, or others could have written it.
            SourceError: A file cannot be read.
        """
        named = [Path(p) for p in paths]
        signers = []
        for path in named:
            files = sorted(path.glob("*.json")) if path.is_dir() else [path]
            if path.is_dir():
                _check_ours(path, "trust folder")
            signers += [read_trust_file(file) for file in files]
        return cls(signers, ", ".join(map(str, named)) or "an empty trust store")

    def verify(self, message: bytes, signature: bytes, kid: str, model_id: str | None) -> TrustedSigner:
        """The trusted signer that signed ``message``.

        Args:
            message: What was signed.
            signature: 64 bytes of Ed25519.
            kid: The signer's key id as the document has it: a hint.
            model_id: Whose model it is about; None (files without profile) needs a signer for every model.

        Raises:
            UntrustedSignerError: No signer of that name, not for this model, or expired.
            SignatureError: The signature does not verify.
        """
        candidates = [s for s in self.signers if s.key.kid == kid]
        if not candidates:
            raise UntrustedSignerError(
                f"signed by {kid!r}, whom {self.where} does not name",
                hint="if you trust the publisher: secure-loader trust add PUBLIC_KEY_FILE",
            )
        if len({s.key.public for s in candidates}) > 1:
            raise UntrustedSignerError(f"two different trusted keys go by the kid {kid!r}", hint="remove one of them")
        try:
            Ed25519PublicKey.from_public_bytes(candidates[0].key.public).verify(signature, message)
        except InvalidSignature:
            raise SignatureError(f"the signature of {kid!r} does not match: altered after signing") from None
        return self._authorised(candidates, model_id)

    def _authorised(self, candidates: list[TrustedSigner], model_id: str | None) -> TrustedSigner:
        name = candidates[0].name
        for signer in candidates:
            allowed = any(
                pattern == "*" or (model_id is not None and fnmatch.fnmatchcase(model_id, pattern))
                for pattern in signer.models
            )
            if not allowed:
                continue
            if signer.not_after is not None and dt.datetime.now(dt.UTC) >= signer.not_after:
                raise UntrustedSignerError(f"signer {name!r} is trusted only until {signer.not_after:%Y-%m-%d}")
            return signer
        what = f"model {model_id!r}" if model_id is not None else "files that name no model"
        raise UntrustedSignerError(f"signer {name!r} is trusted, but not for {what}")


_DOOR = object()


@dataclass(frozen=True, slots=True)
class VerifiedHeader:
    """A header whose signature was checked. Only :func:`verify_header` makes one.

    Attributes:
        header: The header.
        envelope: What it says.
        signer: Who vouches for it.
        legacy_signature: True for files without profile 1, whose signature covers a re-serialisation of the header
            rather than its bytes.
    """

    header: Header
    envelope: Envelope
    signer: TrustedSigner
    legacy_signature: bool
    _door: object = None

    def __post_init__(self) -> None:
        if self._door is not _DOOR:
            raise TypeError("VerifiedHeader is made by verify_header() only")


def signed_bytes(header: Header) -> bytes:
    """What ``__signature__`` covers: the canonical header without it."""
    if header.canonical:
        # Cut out of the bytes as they are. Nothing else can look like it: inside a string the quotes would be escaped, and
        # what belongs to a tensor is no string.
        member = f',"{SIGNATURE}":"{header.metadata.get(SIGNATURE)}"'.encode()
        before, found, after = header.raw.rstrip(b" ").rpartition(member)
        if found:
            return before + after
    return header.canonical_json(without=[SIGNATURE])


def verify_header(header: Header, envelope: Envelope, trust: TrustStore) -> VerifiedHeader:
    """Check canonical form, signature and signer.

    Raises:
        SignatureError: The raw header is not the canonical form of itself (profile 1), or the signature is wrong.
        UntrustedSignerError: As :meth:`TrustStore.verify`.
    """
    profile = envelope.profile
    if profile is not None:
        _check_canonical(header, envelope)
    model_id = None if profile is None else profile.model_id
    signer = trust.verify(signed_bytes(header), envelope.signature, envelope.sign.kid, model_id)
    return VerifiedHeader(header, envelope, signer, profile is None, _DOOR)


def _check_canonical(header: Header, envelope: Envelope) -> None:
    """Under profile 1 everything is written in one way only, so the signature covers the bytes, not a reading of them."""
    canonical = header.canonical
    if not canonical:
        ordered = sorted(header.tensors.values(), key=lambda t: (t.start, t.stop, t.name))
        canonical = file_prefix(canonical_json(header.metadata, ordered))[LENGTH.size :] == header.raw
    if canonical and not envelope.canonical:
        canonical = all(header.metadata[name] == text for name, text in metadata(envelope).items())
    if not canonical:
        raise SignatureError("the header is not in canonical form: rewritten after signing")


def read_trust_file(path: Path) -> TrustedSigner:
    """One trusted signer from its file.

    Raises:
        ConfigError: Malformed, or others could have written it.
        SourceError: Not readable.
    """
    _check_ours(path, "trust file")
    try:
        doc = strict_json.loads(read_small_file(str(path), MAX_TRUST_FILE), what="trust file", scan=True)
        return parse_trusted(doc, path.stem)
    except (FormatError, KeyAccessError) as e:
        raise ConfigError(f"trust file: {e.message}", path=path) from None


def _check_ours(path: Path, what: str) -> None:
    try:
        info = os.stat(path)
    except FileNotFoundError:
        raise MissingFileError(f"no such {what}", path=path) from None
    except (OSError, ValueError) as e:
        raise SourceError(f"{what} cannot be read: {e}", path=path) from None
    refuse_foreign(info, path, what)


def parse_trusted(doc: Any, name: str) -> TrustedSigner:
    """A trusted signer from JSON: one of our trust files, or a bare public JWK.

    Raises:
        FormatError: Not such a document.
        KeyAccessError: A private key, or no Ed25519 key.
    """
    if not isinstance(doc, Mapping):
        raise FormatError("is not a JSON object")
    bare = "kty" in doc
    key = parse_key(doc if bare else doc.get("key"), "trust file")
    if not isinstance(key, VerifyKey):
        raise KeyAccessError("holds private key material; only the public half belongs here")
    if bare:
        return TrustedSigner(name, key)
    if not doc.keys() <= {"name", "key", "models", "not_after"}:
        raise FormatError("has unknown members")
    models = doc.get("models", ["*"])
    if not isinstance(models, list) or not models or not all(isinstance(m, str) and m for m in models):
        raise FormatError("models must be a list of patterns")
    return TrustedSigner(str(doc.get("name", name)), key, tuple(models), parse_time(doc.get("not_after")))


def parse_time(text: object) -> dt.datetime | None:
    """A UTC time from RFC 3339 text or a date; None stays None.

    Raises:
        FormatError: Neither.
    """
    if text is None:
        return None
    try:
        when = dt.datetime.fromisoformat(str(text))
        return when.replace(tzinfo=dt.UTC) if when.tzinfo is None else when.astimezone(dt.UTC)
    except (ValueError, OverflowError):
        raise FormatError(f"{text!r} is not a date or an RFC 3339 time") from None
