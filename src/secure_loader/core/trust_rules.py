"""What narrows trust: the operator's rules for models, and what was revoked (docs/trust.md).

Both only ever refuse. Signers come from trust files; a rule, or an entry of the revocation list, takes away.
"""

from __future__ import annotations

import datetime as dt
import fnmatch
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import (
    ConfigError,
    FormatError,
    NotEncryptedError,
    PolicyDeniedError,
    RevokedError,
    RollbackError,
    UntrustedSignerError,
)
from . import trust_toml as toml
from .strict_json import is_count
from .trust_chain import Authority, parse_authority
from .trust_toml import read_own, time_text

_TOP = {"only_listed", "model", "revoked", "authority"}
_RULE = {"pattern", "signers", "min_release", "profile", "encrypted", "policies", "not_after", "post_quantum"}
_REVOKED = {"signer", "name", "model", "release", "file_id", "sha256", "since", "reason"}
_WHAT = ("signer", "model", "file_id", "sha256")
# Of a key: RFC 7638, SHA-256, base64url.
THUMBPRINT = re.compile(r"[A-Za-z0-9_-]{43}")
_SHAPES = {
    "signer": THUMBPRINT,
    "model": re.compile(r"[^\x00-\x1f\x7f]{1,256}"),
    "file_id": re.compile(r"[0-9a-f]{32}"),
    "sha256": re.compile(r"[0-9a-f]{64}"),
}
_REASON = re.compile(r"[^\x00-\x1f\x7f]{1,500}")


@dataclass(frozen=True, slots=True)
class Subject:
    """What a signature is about, as the signer says it.

    Attributes:
        model_id: Whose model; None for files that name none.
        release: Of the model, or None likewise.
        file_id: Of a file of profile 1, in hex.
        profile: Number of the profile, None for files without.
        created: When it was signed, RFC 3339, UTC.
        digest: Gives the SHA-256 by which it can be revoked, in hex. This and the next two are called only where
            something depends on them.
        clear: Gives the number of tensors whose bytes are not encrypted; None for manifests.
        policy: Gives the SHA-256 of the embedded local policy, in hex; None for manifests.
    """

    model_id: str | None
    release: int | None = None
    file_id: str | None = None
    profile: int | None = 1
    created: str | None = None
    digest: Callable[[], str] | None = None
    clear: Callable[[], int] | None = None
    policy: Callable[[], str] | None = None

    def __str__(self) -> str:
        if self.model_id is None:
            return "a file that names no model"
        return f"{self.model_id!r}" if self.release is None else f"release {self.release} of {self.model_id!r}"


@dataclass(frozen=True, slots=True)
class Revocation:
    """One entry of a revocation list. Exactly one of ``signer``, ``model``, ``file_id`` and ``sha256`` is there.

    Attributes:
        reason: Why, for whoever is refused.
        since: When it was revoked, UTC. It counts for everything, signed earlier or later.
        signer: Thumbprint of a signing key.
        name: What the signer was called here.
        model: A model id.
        release: The one release of the model; None revokes all of them.
        file_id: Of one file of profile 1.
        sha256: Of a header (``header_sha256`` of the manifest), of the payload of a manifest, or of a certificate (DER).
        where: The file that says so.
    """

    reason: str
    since: dt.datetime
    signer: str | None = None
    name: str | None = None
    model: str | None = None
    release: int | None = None
    file_id: str | None = None
    sha256: str | None = None
    where: str = "the revocation list"

    def document(self) -> dict[str, Any]:
        """As JSON, or as one table of TOML; absent members left out."""
        members = ("signer", "name", "model", "release", "file_id", "sha256")
        doc = {m: value for m in members if (value := getattr(self, m)) is not None}
        return doc | {"since": time_text(self.since), "reason": self.reason}

    def covers(self, subject: Subject, digest: str | None) -> bool:
        """Whether it is about this file or folder."""
        if self.model is not None:
            return self.model == subject.model_id and self.release in (None, subject.release)
        if self.file_id is not None:
            return self.file_id == subject.file_id
        return self.sha256 is not None and self.sha256 == digest

    def error(self, what: str, hint: str) -> RevokedError:
        """The refusal of ``what``."""
        return RevokedError(
            f"{what} was revoked on {self.since:%Y-%m-%d}: {self.reason}", hint=f"{hint}; {self.where} says so"
        )


@dataclass(frozen=True, slots=True)
class Rule:
    """What models that match a pattern must fulfil, beyond being signed by a signer trusted for them.

    Attributes:
        patterns: Shell patterns of model ids, case-sensitive.
        signers: Names or thumbprints, one of which must have signed; None: any that is trusted.
        min_release: Lowest release.
        profile: Profile that files must have; None: whatever the settings demand.
        encrypted: Whether every tensor must be encrypted.
        policies: SHA-256 of local policies, one of which must be embedded; None: any.
        not_after: From when on these models are not loaded any more, UTC.
        post_quantum: Whether the signer must have a second, post-quantum key, and have signed with it.
        where: The file that says so.
    """

    patterns: tuple[str, ...]
    signers: tuple[str, ...] | None = None
    min_release: int = 0
    profile: int | None = None
    encrypted: bool = False
    policies: tuple[str, ...] | None = None
    not_after: dt.datetime | None = None
    post_quantum: bool = False
    where: str = "the rules given"

    def matches(self, model_id: str | None) -> bool:
        """Whether it is about this model. A file that names no model could be any, so every rule is about it."""
        return model_id is None or any(fnmatch.fnmatchcase(model_id, p) for p in self.patterns)

    def document(self) -> dict[str, Any]:
        """As JSON; what it does not demand is left out."""
        doc: dict[str, Any] = {"pattern": list(self.patterns)}
        if self.signers is not None:
            doc["signers"] = list(self.signers)
        if self.policies is not None:
            doc["policies"] = list(self.policies)
        demands = {
            "min_release": self.min_release,
            "profile": self.profile,
            "encrypted": self.encrypted,
            "post_quantum": self.post_quantum,
        }
        doc |= {name: value for name, value in demands.items() if value}
        return doc if self.not_after is None else doc | {"not_after": time_text(self.not_after)}

    def __str__(self) -> str:
        return f"the rule for {', '.join(map(repr, self.patterns))} in {self.where}"


@dataclass(frozen=True, slots=True)
class Rules:
    """Everything that narrows trust, and the authorities, which stand in the same file.

    Attributes:
        rules: All that match a model apply.
        revoked: The revocation list.
        only_listed: Refuse models that no rule is about.
        authorities: Whose certificates make signers.
    """

    rules: tuple[Rule, ...] = ()
    revoked: tuple[Revocation, ...] = ()
    only_listed: bool = False
    authorities: tuple[Authority, ...] = ()

    def __add__(self, other: Rules) -> Rules:
        return Rules(
            self.rules + other.rules,
            self.revoked + other.revoked,
            self.only_listed or other.only_listed,
            self.authorities + other.authorities,
        )

    def check(
        self, names: Sequence[str], thumbprints: Sequence[str], subject: Subject, certificates: Sequence[str] = ()
    ) -> None:
        """Refuse what was revoked, and what a rule does not allow.

        Args:
            names: What the operator calls the signer.
            thumbprints: Of its key, which counts, whatever the key is called, and of its post-quantum key, if it has one.
            subject: What it signed.
            certificates: SHA-256 of the certificates that made it a signer, in hex.

        Raises:
            RevokedError: The signer, the release or the file.
            UntrustedSignerError: Another signer than a rule allows, its time is over, or no rule is about the model.
            RollbackError: An older release than a rule allows.
            NotEncryptedError: Without the profile or the encryption that a rule demands.
            PolicyDeniedError: Another policy than those that a rule allows.
        """
        if self.revoked:
            self._check_revoked(names[0], thumbprints, subject, certificates)
        matching = [rule for rule in self.rules if rule.matches(subject.model_id)]
        if self.only_listed and (not matching or subject.model_id is None):
            raise UntrustedSignerError(
                f"no rule is about {subject}, and only_listed is set",
                hint="add a [[model]] to trust.toml if it is wanted",
            )
        for rule in matching:
            _check_rule(rule, names, thumbprints, subject)

    def _check_revoked(
        self, name: str, thumbprints: Sequence[str], subject: Subject, certificates: Sequence[str]
    ) -> None:
        for entry in self.revoked:
            if entry.signer in thumbprints or (entry.sha256 is not None and entry.sha256 in certificates):
                raise entry.error(
                    f"the signer {name!r} ({entry.signer or f'certificate {entry.sha256}'})",
                    "the publisher has to sign a new release with another key",
                )
        digest = None
        if subject.digest is not None and any(e.sha256 is not None for e in self.revoked):
            digest = subject.digest()
        for entry in self.revoked:
            if entry.covers(subject, digest):
                what = str(subject) if entry.model is not None else f"this very file, of {subject},"
                raise entry.error(what, "get another release from the publisher")

    def revocation_of(self, thumbprint: str) -> Revocation | None:
        """The entry about a signer, or None."""
        return next((e for e in self.revoked if e.signer == thumbprint), None)


def _check_rule(rule: Rule, names: Sequence[str], thumbprints: Sequence[str], subject: Subject) -> None:
    # What is spelt like a thumbprint is one: names come from files that publishers hand out.
    called = [n for n in names if not THUMBPRINT.fullmatch(n)]
    if rule.signers is not None and not {*called, *thumbprints} & set(rule.signers):
        raise UntrustedSignerError(f"{subject} is signed by {names[0]!r}; {rule} allows {', '.join(rule.signers)}")
    if rule.post_quantum and len(thumbprints) == 1:
        raise UntrustedSignerError(f"{names[0]!r}, who signed {subject}, has no post-quantum key; {rule} demands one")
    if rule.not_after is not None and dt.datetime.now(dt.UTC) >= rule.not_after:
        raise UntrustedSignerError(f"{rule} lets {subject} load only until {rule.not_after:%Y-%m-%d}")
    if rule.min_release > (0 if subject.release is None else subject.release):
        raise RollbackError(
            f"{subject} is older than release {rule.min_release}, the least that {rule} allows",
            hint="get the current release",
        )
    if rule.profile is not None and rule.profile != subject.profile:
        raise NotEncryptedError(f"{subject} has no profile {rule.profile}, which {rule} demands")
    if rule.encrypted and subject.clear is not None and (clear := subject.clear()):
        raise NotEncryptedError(f"{subject} holds {clear} tensors in clear; {rule} demands that all are encrypted")
    if rule.policies is not None and subject.policy is not None and (found := subject.policy()) not in rule.policies:
        raise PolicyDeniedError(
            f"{subject} embeds a policy that {rule} does not allow (SHA-256 {found})",
            hint="read it with: secure-loader inspect --json; if it is right, add its digest to the rule",
        )


def read_rules(path: str | os.PathLike[str], *, missing_ok: bool = False) -> Rules:
    """Rules, authorities and revocations from a TOML file.

    Args:
        path: The file.
        missing_ok: A file that is not there is an empty one.

    Raises:
        ConfigError: Malformed, or others could have written it.
        SourceError: Not readable.
    """
    named = Path(path)
    # A link that leads nowhere is not an absent file: somebody wanted something to be there.
    if missing_ok and not os.path.lexists(named):
        return Rules()
    data = read_own(named, "trust configuration")
    try:
        return parse_rules(data, str(named))
    except FormatError as e:
        raise ConfigError(f"trust configuration: {e.message}", path=named) from None


def parse_rules(data: bytes, where: str) -> Rules:
    """Rules, authorities and revocations from the text of a TOML file.

    Raises:
        FormatError: Not TOML, an unknown key, or a value that cannot be.
    """
    doc = toml.parse(data)
    toml.only(doc, _TOP, "the top level")
    return Rules(
        tuple(_rule(table, where) for table in toml.tables(doc, "model")),
        tuple(_revocation(table, where) for table in toml.tables(doc, "revoked")),
        toml.flag(doc, "only_listed"),
        tuple(parse_authority(table, where) for table in toml.tables(doc, "authority")),
    )


def _rule(doc: Mapping[str, Any], where: str) -> Rule:
    toml.only(doc, _RULE, "[[model]]")
    patterns, release, profile = doc.get("pattern"), doc.get("min_release", 0), doc.get("profile")
    if not is_count(release):
        raise FormatError("min_release must be a whole number")
    if profile is not None and (type(profile) is not int or profile != 1):
        raise FormatError("profile must be 1, the only one there is")
    policies = toml.texts(doc, "policies")
    if policies is not None and not all(_SHAPES["sha256"].fullmatch(p) for p in policies):
        raise FormatError("policies must be SHA-256 digests, 64 lower-case hex digits each")
    patterns = toml.texts({"pattern": [patterns] if isinstance(patterns, str) else patterns}, "pattern")
    if patterns is None:
        raise FormatError("[[model]] needs a pattern")
    return Rule(
        patterns,
        toml.texts(doc, "signers"),
        release,
        profile,
        toml.flag(doc, "encrypted"),
        policies,
        toml.time(doc, "not_after"),
        toml.flag(doc, "post_quantum"),
        where,
    )


def _revocation(doc: Mapping[str, Any], where: str) -> Revocation:
    toml.only(doc, _REVOKED, "[[revoked]]")
    kinds = [k for k in _WHAT if k in doc]
    if len(kinds) != 1:
        raise FormatError(f"[[revoked]] needs exactly one of {', '.join(_WHAT)}")
    kind = kinds[0]
    if not isinstance(doc[kind], str) or not _SHAPES[kind].fullmatch(doc[kind]):
        raise FormatError(f"{kind} {str(doc[kind])[:80]!r} cannot be")
    if "release" in doc and (kind != "model" or not is_count(doc["release"])):
        raise FormatError("release must be a whole number, and goes with model")
    name = doc.get("name")
    if name is not None and (kind != "signer" or not isinstance(name, str) or not _REASON.fullmatch(name)):
        raise FormatError("name must be a text, and goes with signer")
    reason = doc.get("reason")
    if not isinstance(reason, str) or not _REASON.fullmatch(reason):
        raise FormatError("[[revoked]] needs a reason: 1 to 500 characters, no controls")
    since = toml.time(doc, "since")
    if since is None:
        raise FormatError("[[revoked]] needs since, a date")
    return Revocation(reason, since, name=name, release=doc.get("release"), where=where, **{kind: doc[kind]})
