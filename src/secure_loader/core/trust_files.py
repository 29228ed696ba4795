"""Changing the local trust store: one JSON file for each signer, named after it, and the list of what was revoked."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, FormatError, SecureLoaderError, WriteError
from .atomic import write_bytes, write_error
from .home import home, private_folder, trust_dir
from .trust import REVOKED, RULES, TrustedSigner, read_trust_file, revocations
from .trust_rules import THUMBPRINT, Revocation, Rules, parse_rules, read_rules

# A file name everywhere, part of a kid, and never an option, a hidden file or a path.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LIST_HEAD = """\
# What is not taken any more, whoever names it; docs/trust.md says what can stand here.
# Written by: secure-loader trust revoke. To take something again, delete its entry.
"""


@dataclass(frozen=True, slots=True)
class TrustFile:
    """One file of the trust store.

    Attributes:
        path: The file.
        signer: Whom it trusts, or None when it cannot be used.
        problem: Why it cannot be used, or None.
    """

    path: Path
    signer: TrustedSigner | None
    problem: SecureLoaderError | None


@dataclass(frozen=True, slots=True)
class RulesFile:
    """One file of rules or revocations.

    Attributes:
        path: The file.
        rules: What it says, or None when it cannot be read.
        problem: Why it, or a file that it names, cannot be used, or None.
    """

    path: Path
    rules: Rules | None
    problem: SecureLoaderError | None


def check_name(name: str) -> str:
    """Returns a NAME of a key or signer.

    Raises:
        ConfigError: It could not be a file name everywhere, or is spelt like a thumbprint.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "a NAME has 1 to 64 letters, digits, dots, dashes and underscores, and begins with a letter or digit"
        )
    if THUMBPRINT.fullmatch(name):
        # Rules and revocations take both, and files of others suggest names: nobody is called like somebody else's key.
        raise ConfigError("a NAME of 43 characters could be taken for the thumbprint of a key")
    return name


def trust_file(name: str) -> Path:
    """Where the signer of that name is kept."""
    return trust_dir() / f"{check_name(name)}.json"


def list_trusted() -> Iterator[TrustFile]:
    """Every file of the trust store, usable or not."""
    for path in sorted(trust_dir().glob("*.json"), key=lambda p: p.stem):
        try:
            yield TrustFile(path, read_trust_file(path), None)
        except SecureLoaderError as e:
            yield TrustFile(path, None, e)


def list_rules() -> Iterator[RulesFile]:
    """Every file of rules and revocations that the user's own trust store has, usable or not."""
    for path in (home() / RULES, trust_dir() / RULES, trust_dir() / REVOKED):
        if os.path.lexists(path):
            rules = None
            try:
                rules = read_rules(path)
                for authority in rules.authorities:
                    authority.read_roots()  # which a load reads when it has to
                yield RulesFile(path, rules, None)
            except SecureLoaderError as e:
                yield RulesFile(path, rules, e)


def add(signer: TrustedSigner, *, force: bool = False) -> Path:
    """Trust a signer from now on.

    Args:
        signer: Whom; its name becomes the file's.
        force: Replace another signer of that name.

    Raises:
        ConfigError: A bad name, another key goes by the same kid, which would make both useless, or the key was revoked.
        WriteError: There is a signer of that name, or the file cannot be written.
    """
    path = trust_file(signer.name)
    gone = revocations().revocation_of(signer.key.thumbprint())
    if gone is not None:
        raise ConfigError(
            f"the key of {signer.name!r} was revoked here on {gone.since:%Y-%m-%d}: {gone.reason}",
            hint=f"ask the publisher for the new key; if this one is good again, take its entry out of {gone.where}",
        )
    for other in list_trusted():
        if other.signer is None or other.path == path or other.signer.key.kid != signer.key.kid:
            continue
        if other.signer.key.public != signer.key.public:
            raise ConfigError(
                f"the signer {other.path.stem!r} has a different key with the same kid {signer.key.kid!r}",
                hint=f"find out which one is right; secure-loader trust remove {other.path.stem}",
            )
    if path.exists() and not force:
        raise WriteError(
            f"a signer named {signer.name!r} is trusted already", path=path, hint="take another --name, or say --force"
        )
    private_folder(home())
    private_folder(trust_dir())
    write_bytes(path, document_bytes(signer), mode=0o644, overwrite=force)
    return path


def remove(name: str) -> Path:
    """Trust a signer no more.

    Raises:
        ConfigError: Nobody of that name is trusted.
    """
    path = trust_file(name)
    try:
        path.unlink()
    except FileNotFoundError:
        raise ConfigError(
            f"no signer named {name!r} is trusted", hint="see who is with: secure-loader trust list"
        ) from None
    return path


def thumbprint_of(who: str) -> tuple[str, str | None]:
    """The thumbprint of a signer, and its name here.

    Args:
        who: The name of a signer in the trust store, or a thumbprint, whether it is in the store or not.

    Raises:
        ConfigError: Neither.
    """
    if not THUMBPRINT.fullmatch(who):
        if _NAME.fullmatch(who) and trust_file(who).exists():
            return read_trust_file(trust_file(who)).key.thumbprint(), who
        raise ConfigError(
            f"no signer named {who!r} is trusted, and it is no thumbprint",
            hint="see who is with: secure-loader trust list",
        )
    known = [f.path.stem for f in list_trusted() if f.signer is not None and f.signer.key.thumbprint() == who]
    return who, known[0] if known else None


def revoke(entry: Revocation) -> Path:
    """Take something no more, from now on.

    Args:
        entry: What, since when, and why.

    Returns:
        The revocation list.

    Raises:
        ConfigError: It is revoked already, a text that no entry can hold, or a list that cannot be read, or is a link.
        WriteError: The list cannot be written.
    """
    path = trust_dir() / REVOKED
    if path.is_symlink():
        raise ConfigError(f"is a link: add the entry to {path.resolve()}, where it leads to", path=path)
    lines = [
        f"{key} = {value if key in ('since', 'release') else json.dumps(value, ensure_ascii=False)}"
        for key, value in entry.document().items()
    ]
    with _locked_folder():
        known = revocations()
        for old in known.revoked:
            if (old.signer, old.model, old.release, old.file_id, old.sha256) == (
                entry.signer, entry.model, entry.release, entry.file_id, entry.sha256,
            ):  # fmt: skip
                raise ConfigError(f"that was revoked already, on {old.since:%Y-%m-%d}: {old.reason}", path=path)
        before = path.read_text("utf-8").rstrip("\n") + "\n" if path.exists() else _LIST_HEAD
        try:
            data = "\n".join([before, "[[revoked]]", *lines, ""]).encode("utf-8")
            parse_rules(data, str(path))
        except (FormatError, UnicodeError) as e:
            raise ConfigError(e.message if isinstance(e, FormatError) else "a text that is not UTF-8") from None
        write_bytes(path, data, mode=0o644, overwrite=True)
    return path


@contextlib.contextmanager
def _locked_folder() -> Iterator[None]:
    """The trust folder, ours alone for as long as the block runs. Raises WriteError."""
    folder = trust_dir()
    try:
        private_folder(home())
        private_folder(folder)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        raise write_error(e, folder) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Closing is not enough: a process that was forked meanwhile holds the same lock through its copy.
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def document_bytes(signer: TrustedSigner) -> bytes:
    """The trust file of a signer: what is given to those who shall trust it."""
    return json.dumps(signer.document(), indent=2).encode() + b"\n"
