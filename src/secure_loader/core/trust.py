"""Who may sign what: the local trust store, and the one door through which a header becomes a verified one.

Trust comes from the operator's own files only. What a header says about its signer is a hint which key to try.
"""

from __future__ import annotations

import datetime as dt
import fnmatch
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from .envelope import SECOND, SIGNATURE, Envelope, metadata
from .header import LENGTH, Header, canonical_json, file_prefix
from .home import home, refuse_foreign, trust_dir
from .keys.jwk import VerifyKey, parse_key, parse_second
from .trust_chain import Chain
from .trust_rules import Rules, Subject, read_rules
from .trust_toml import parse_time, read_own, time_text

MAX_TRUST_FILE = 64 * 1024
# In a trust folder, beside the signers: rules, and what ``secure-loader trust revoke`` writes.
RULES, REVOKED = "trust.toml", "revoked.toml"

Second = tuple[Callable[[], bytes], bytes]
"""A post-quantum signature: what gives its message, and 3,309 bytes."""


@dataclass(frozen=True, slots=True)
class TrustedSigner:
    """A signer that the operator trusts.

    Attributes:
        name: What the operator calls it.
        key: Its public key.
        models: Patterns (shell style, case-sensitive) of model ids it may sign.
        not_after: From when on it is not trusted any more, UTC.
        authority: Name of the authority whose certificate made it a signer; None where its key is in the store.
    """

    name: str
    key: VerifyKey
    models: tuple[str, ...] = ("*",)
    not_after: dt.datetime | None = None
    authority: str | None = None

    @property
    def identity(self) -> str:
        """Who it is over time: the key; of those with certificates, who have a new key often, the authority's name."""
        return self.key.thumbprint() if self.authority is None else f"authority {self.authority}"

    def document(self) -> dict[str, Any]:
        """As JSON for a file of the trust store."""
        until = None if self.not_after is None else time_text(self.not_after)
        second = {} if self.key.second is None else {"post_quantum": self.key.second.document()}
        return {
            "name": self.name,
            "key": self.key.document(),
            **second,
            "models": list(self.models),
            "not_after": until,
        }


class TrustStore:
    """The signers that count.

    Args:
        signers: Trusted signers.
        where: Where they came from, for messages.
        rules: What narrows that trust.

    Raises:
        ConfigError: A rule names a signer by a name that two different keys have.
    """

    def __init__(
        self, signers: Iterable[TrustedSigner], where: str = "the trust store given", rules: Rules | None = None
    ) -> None:
        self.signers = tuple(signers)
        self.where = where
        self.rules = rules or Rules()
        for rule in self.rules.rules:
            for name in rule.signers or ():
                keys = {s.key.public for s in self.signers if s.name == name}
                if len(keys) + sum(a.name == name for a in self.rules.authorities) > 1:
                    raise ConfigError(f"{rule} names {name!r}, as two different keys are called: use a thumbprint")

    @classmethod
    def from_paths(cls, paths: Iterable[str | os.PathLike[str]]) -> TrustStore:
        """Read trust files, rules (``*.toml``), and folders of them.

        Raises:
            ConfigError: A file is malformed, or others could have written it.
            SourceError: A file cannot be read.
        """
        named = [Path(p) for p in paths]
        signers, rules = [], Rules()
        for path in named:
            if path.is_dir():
                _check_ours(path, "trust folder")
                # By the operator's names for them: what a file calls its signer is what a publisher wrote.
                files = sorted(path.glob("*.json"))
                signers += [replace(read_trust_file(file), name=file.stem) for file in files]
                for name in (RULES, REVOKED):
                    rules += read_rules(path / name, missing_ok=True)
            elif path.suffix == ".toml":
                rules += read_rules(path)
            else:
                signers.append(read_trust_file(path))
        return cls(signers, ", ".join(map(str, named)) or "an empty trust store", rules)

    def narrowed(self, rules: Rules) -> TrustStore:
        """The same signers, under further rules. Raises ConfigError as the constructor."""
        return self if rules == Rules() else TrustStore(self.signers, self.where, self.rules + rules)

    def verify(
        self,
        message: bytes,
        signature: bytes,
        kid: str,
        subject: Subject,
        *,
        chain: Sequence[bytes] = (),
        second: Second | None = None,
    ) -> TrustedSigner:
        """The trusted signer that signed ``message``.

        Args:
            message: What was signed.
            signature: 64 bytes of Ed25519.
            kid: The signer's key id as the document has it: a hint.
            subject: What it is about. Files without profile name no model, and need a signer for every model.
            chain: Certificates that the document carries: a hint, which counts only where an authority of the operator's
                vouches for it, and no trusted key has the kid.
            second: Its post-quantum signature, if it has one.

        Raises:
            UntrustedSignerError: No signer of that name, not for this model, expired, or the post-quantum signature is
                missing that its key in the trust store makes mandatory.
            SignatureError: A signature does not verify.
            RevokedError, RollbackError, NotEncryptedError, PolicyDeniedError: As :meth:`core.trust_rules.Rules.check`.
        """
        candidates = [s for s in self.signers if s.key.kid == kid]
        if not candidates and chain and self.rules.authorities:
            return self._verify_certified(Chain.parse(chain), message, signature, kid, subject, second)
        if not candidates:
            raise UntrustedSignerError(
                f"signed by {kid!r}, whom {self.where} does not name",
                hint="if you trust the publisher: secure-loader trust add PUBLIC_KEY_FILE",
            )
        if len({s.key.public for s in candidates}) > 1:
            raise UntrustedSignerError(f"two different trusted keys go by the kid {kid!r}", hint="remove one of them")
        key = candidates[0].key
        _check_signature(key.public, message, signature, kid)
        # The key itself counts: under whatever kid or name somebody may have put it into the store as well.
        same = [s for s in self.signers if s.key.public == key.public]
        thumbprints = [key.thumbprint(), *_check_second(same, kid, second)]
        self.rules.check([s.name for s in same], thumbprints, subject)
        return self._authorised(candidates, subject.model_id)

    def _verify_certified(
        self, chain: Chain, message: bytes, signature: bytes, kid: str, subject: Subject, second: Second | None
    ) -> TrustedSigner:
        _check_signature(chain.public, message, signature, kid)
        key, refusals = VerifyKey(kid, chain.public), []
        # A certificate for a key that is in the store under another kid is no way around its second key.
        same = [s for s in self.signers if s.key.public == chain.public]
        thumbprints = [key.thumbprint(), *_check_second(same, kid, second)]
        for authority in self.rules.authorities:
            signer = TrustedSigner(authority.name, key, authority.models, authority=authority.name)
            try:
                certificates = authority.certify(chain, subject.created)
            except UntrustedSignerError as e:
                refusals.append(f"{authority.name}: {e.message}")
                continue
            self.rules.check([authority.name], thumbprints, subject, certificates)
            if _allows(signer, subject.model_id):
                return signer
            refusals.append(f"{authority.name}: not for {subject}")
        raise UntrustedSignerError(
            f"signed by {kid!r}, whose certificate makes no signer here ({'; '.join(refusals)})",
            hint="secure-loader trust list shows the authorities",
        )

    def _authorised(self, candidates: list[TrustedSigner], model_id: str | None) -> TrustedSigner:
        name = candidates[0].name
        for signer in candidates:
            if not _allows(signer, model_id):
                continue
            if signer.not_after is not None and dt.datetime.now(dt.UTC) >= signer.not_after:
                raise UntrustedSignerError(f"signer {name!r} is trusted only until {signer.not_after:%Y-%m-%d}")
            return signer
        what = f"model {model_id!r}" if model_id is not None else "files that name no model"
        raise UntrustedSignerError(f"signer {name!r} is trusted, but not for {what}")


def _allows(signer: TrustedSigner, model_id: str | None) -> bool:
    return any(
        pattern == "*" or (model_id is not None and fnmatch.fnmatchcase(model_id, pattern)) for pattern in signer.models
    )


def _check_signature(public: bytes, message: bytes, signature: bytes, kid: str) -> None:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except InvalidSignature:
        raise SignatureError(f"the signature of {kid!r} does not match: altered after signing") from None


def _check_second(same: Sequence[TrustedSigner], kid: str, second: Second | None) -> list[str]:
    """Thumbprint of the post-quantum key, if the store has one for this signer: then its signature must be there."""
    keys = {s.key.second.public: s.key.second for s in same if s.key.second is not None}
    if not keys:
        return []
    if len(keys) > 1:
        raise UntrustedSignerError(f"the signer {kid!r} has two different post-quantum keys", hint="remove one of them")
    if second is None:
        raise UntrustedSignerError(
            f"{kid!r} has a post-quantum key in the trust store, and its signature is missing: stripped, or never made",
            hint="the publisher signs with both keys: secure-loader encrypt, or rewrap, with the key that keygen made",
        )
    message, signature = second
    (key,) = keys.values()
    key.verify(signature, message())
    return [key.thumbprint()]


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


def signed_bytes(header: Header, without: Sequence[str] = (SIGNATURE,)) -> bytes:
    """What a signature covers: the canonical header without some strings of metadata, which stand side by side in it."""
    if header.canonical:
        # Cut out of the bytes as they are. Nothing else can look like it: inside a string the quotes would be escaped, and
        # what belongs to a tensor is no string.
        members = "".join(f',"{name}":"{header.metadata.get(name)}"' for name in without).encode()
        before, found, after = header.raw.rstrip(b" ").rpartition(members)
        if found:
            return before + after
    return header.canonical_json(without=list(without))


def verify_header(header: Header, envelope: Envelope, trust: TrustStore) -> VerifiedHeader:
    """Check canonical form, signature and signer.

    Raises:
        SignatureError: The raw header is not the canonical form of itself (profile 1), or the signature is wrong.
        UntrustedSignerError: As :meth:`TrustStore.verify`, which can also raise others.
    """
    profile = envelope.profile
    if profile is not None:
        _check_canonical(header, envelope)
    second = envelope.second
    signer = trust.verify(
        signed_bytes(header),
        envelope.signature,
        envelope.sign.kid,
        _subject(header, envelope),
        chain=envelope.sign.x5c,
        second=None if second is None else (lambda: signed_bytes(header, (SIGNATURE, SECOND)), second),
    )
    return VerifiedHeader(header, envelope, signer, profile is None, _DOOR)


def header_digest(header: Header) -> str:
    """SHA-256 of a file's first 8 + N bytes, in hex: ``header_sha256`` of a manifest."""
    digest = hashlib.sha256(LENGTH.pack(len(header.raw)))
    digest.update(header.raw)
    return digest.hexdigest()


def _subject(header: Header, envelope: Envelope) -> Subject:
    profile = envelope.profile
    return Subject(
        model_id=None if profile is None else profile.model_id,
        release=None if profile is None else profile.release,
        file_id=None if profile is None else profile.file_id.hex(),
        profile=None if profile is None else 1,
        created=None if profile is None else profile.created,
        digest=lambda: header_digest(header),
        clear=lambda: sum(t.nbytes > 0 and name not in envelope.records for name, t in header.tensors.items()),
        policy=lambda: hashlib.sha256(envelope.policy.local.encode("utf-8", "surrogatepass")).hexdigest(),
    )


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
    data = read_own(path, "trust file", MAX_TRUST_FILE)
    try:
        doc = strict_json.loads(data, what="trust file", scan=True)
        return parse_trusted(doc, path.stem)
    except (FormatError, KeyAccessError) as e:
        raise ConfigError(f"trust file: {e.message}", path=path) from None


def own_store() -> TrustStore:
    """The user's own signers, rules and revocations: ``trust/`` and ``trust.toml`` in the home folder.

    Raises:
        ConfigError, SourceError: As :meth:`TrustStore.from_paths`.
    """
    folder, rules = trust_dir(), read_rules(home() / RULES, missing_ok=True)
    store = TrustStore.from_paths([folder]) if folder.is_dir() else TrustStore([], f"the trust store {folder}")
    return store.narrowed(rules)


def revocations() -> Rules:
    """What the user revoked, whichever signers a load names. Raises as :func:`own_store`."""
    folder = trust_dir()
    if not os.path.lexists(folder):
        return Rules()
    _check_ours(folder, "trust folder")
    # Only that: signers and rules of another store are not this one's.
    return Rules(revoked=read_rules(folder / REVOKED, missing_ok=True).revoked)


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
    if not doc.keys() <= {"name", "key", "post_quantum", "models", "not_after"}:
        raise FormatError("has unknown members")
    if "post_quantum" in doc:
        second = parse_second(doc["post_quantum"], "trust file")
        if second.kid != key.kid:
            raise FormatError("post_quantum must be a key of the same kid")
        key = replace(key, second=second)
    models = doc.get("models", ["*"])
    if not isinstance(models, list) or not models or not all(isinstance(m, str) and m for m in models):
        raise FormatError("models must be a list of patterns")
    return TrustedSigner(str(doc.get("name", name)), key, tuple(models), parse_time(doc.get("not_after")))
