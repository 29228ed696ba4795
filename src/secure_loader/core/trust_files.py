"""Changing the local trust store: one JSON file for each signer, named after it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, SecureLoaderError, WriteError
from .atomic import write_bytes
from .home import home, private_folder, trust_dir
from .trust import TrustedSigner, read_trust_file

# A file name everywhere, part of a kid, and never an option, a hidden file or a path.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


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


def check_name(name: str) -> str:
    """Returns a NAME of a key or signer.

    Raises:
        ConfigError: It could not be a file name everywhere.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "a NAME has 1 to 64 letters, digits, dots, dashes and underscores, and begins with a letter or digit"
        )
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


def add(signer: TrustedSigner, *, force: bool = False) -> Path:
    """Trust a signer from now on.

    Args:
        signer: Whom; its name becomes the file's.
        force: Replace another signer of that name.

    Raises:
        ConfigError: A bad name, or another key goes by the same kid, which would make both useless.
        WriteError: There is a signer of that name, or the file cannot be written.
    """
    path = trust_file(signer.name)
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


def document_bytes(signer: TrustedSigner) -> bytes:
    """The trust file of a signer: what is given to those who shall trust it."""
    return json.dumps(signer.document(), indent=2).encode() + b"\n"
