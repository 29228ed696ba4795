"""Master keys in files that are encrypted to an age identity of this machine (package ``pyrage``)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ConfigError, KeyAccessError
from ..home import home
from ..secrets import wipe, wipe_bytes
from .jwk import Jwk
from .local import LocalProvider, parse, path_of, read_private

if TYPE_CHECKING:
    from pyrage.ssh import Identity as SshIdentity
    from pyrage.x25519 import Identity as AgeIdentity

VARIABLE = "SECURE_LOADER_AGE_IDENTITY"
_SSH = b"-----BEGIN OPENSSH PRIVATE KEY-----"
_MAX_IDENTITIES = 100


class AgeProvider(LocalProvider):
    """A JWK or JWK set in an age file, armoured or not, that was encrypted to an identity of ours.

    The identity file is what ``age-keygen`` writes, or an OpenSSH key (Ed25519, RSA) without a passphrase.
    """

    def keys(self, reference: str) -> list[Jwk]:
        """See :meth:`LocalProvider.keys`; ``reference`` is a path or the rest of a file URI."""
        import_pyrage()
        path = path_of(reference)
        data = read_private(path)
        return parse(_decrypt(bytes(data), path), str(path))


def import_pyrage() -> None:
    """Import ``pyrage``.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import pyrage  # noqa: F401 - to be told here, before anything is read
    except ImportError:
        raise ConfigError("age: references need the package pyrage", hint="pip install 'secure-loader[age]'") from None


def identity_path() -> Path:
    """The identity file: ``$SECURE_LOADER_AGE_IDENTITY``, or ``age-identity.txt`` in the home folder."""
    named = os.environ.get(VARIABLE)
    return path_of(named) if named else home() / "age-identity.txt"


def _decrypt(data: bytes, path: Path) -> bytearray:
    import pyrage

    identities = _identities(identity_path())
    try:
        found = pyrage.decrypt(data, identities)
    except pyrage.DecryptError:
        found = None
    if found is None:
        # pyrage's own words tell a file for others from a damaged one; nobody needs to know but its sender.
        raise KeyAccessError(
            f"key file cannot be opened with the identity in {identity_path()}: it is encrypted to others, or was altered",
            path=path,
        )
    text = bytearray(found)
    wipe_bytes(found)
    return text


def _identities(path: Path) -> list[AgeIdentity | SshIdentity]:
    data = read_private(path, "age identity file")
    try:
        found = _parse_identities(data)
    finally:
        wipe(data)
    if not found:
        raise KeyAccessError(
            "age identity file holds no identity that can be used: age-keygen makes one; an OpenSSH key must be of "
            "kind ssh-ed25519 or ssh-rsa, without a passphrase",
            path=path,
        )
    return found


def _parse_identities(data: bytearray) -> list[AgeIdentity | SshIdentity] | None:
    """None for anything malformed: what is wrong with a secret is not repeated."""
    import pyrage

    try:
        if data.lstrip().startswith(_SSH):
            return [pyrage.ssh.Identity.from_buffer(bytes(data))]
        lines = [line.strip() for line in data.decode("ascii").splitlines()]
        wanted = [line for line in lines if line and not line.startswith("#")]
        if len(wanted) > _MAX_IDENTITIES:
            return None
        return [pyrage.x25519.Identity.from_str(line) for line in wanted]
    except (pyrage.IdentityError, ValueError):
        return None
