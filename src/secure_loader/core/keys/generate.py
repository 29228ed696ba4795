"""Making keys: a master key, a signing key, and local trust in the latter."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError, KeyAccessError, WriteError
from ..aead import ALGORITHMS
from ..atomic import write_bytes, write_error
from ..home import home, keys_dir, private_folder, recipients_dir, trust_dir
from ..secrets import Secret, wipe
from ..trust import TrustedSigner
from ..trust_files import check_name, document_bytes, trust_file
from .hybrid import SEED_BYTES, Identity
from .jwk import MasterKey, SigningKey, b64url
from .mldsa import SecondSigningKey
from .scrypt_file import seal


@dataclass(frozen=True, slots=True)
class NewKeys:
    """What :func:`generate_keys` made. Holds no key material.

    Attributes:
        name: As given.
        algorithm: AEAD of the master key.
        key_id: kid of the master key.
        signing_key_id: kid of the signing key.
        thumbprint: RFC 7638 thumbprint of the public signing key.
        models: Patterns of the model ids that the signing key is trusted with here.
        key_file: Private JWK of the master key, encrypted where a passphrase was given.
        signing_key_file: Private JWK of the signing key.
        trust_file: Public half of the signing key, for everybody.
        replaced: Where the files of an earlier pair of that name were put.
        encrypted: Whether the master key is under a passphrase.
        post_quantum: Whether there is a second signing key, ML-DSA-65, in the same files.
    """

    name: str
    algorithm: str
    key_id: str
    signing_key_id: str
    thumbprint: str
    models: tuple[str, ...]
    key_file: Path
    signing_key_file: Path
    trust_file: Path
    replaced: tuple[Path, ...]
    encrypted: bool
    post_quantum: bool = False


def generate_keys(
    name: str,
    *,
    algorithm: str = "aes256gcm",
    models: tuple[str, ...] = ("*",),
    passphrase: Secret | None = None,
    post_quantum: bool = False,
    force: bool = False,
) -> NewKeys:
    """Make a master key and a signing key, and trust the latter on this machine.

    All three files appear, or none. With ``force`` the files of an earlier pair are kept under names at which no
    loader looks: a key that is gone takes every model encrypted with it along.

    Args:
        name: Names the files; part of the kids, which are unique all the same.
        algorithm: AEAD of the master key.
        models: Patterns of model ids that the new signer may sign, for this machine's trust store.
        passphrase: Encrypt the master key's file under it.
        post_quantum: Make a second signing key, ML-DSA-65, that signs beside the first.
        force: Put an earlier pair of that name aside.

    Raises:
        ConfigError: A bad name, algorithm or pattern.
        KeyAccessError: Others can enter the keys folder.
        WriteError: There is a key of that name, or the files cannot be written.
    """
    check_name(name)
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"algorithm must be one of {', '.join(ALGORITHMS)}, not {algorithm!r}")
    if not models or not all(models):
        raise ConfigError("a model pattern must not be empty")
    # kids are what files name for ever: two pairs of one name must not share them.
    token = secrets.token_hex(4)
    master = MasterKey(f"{name}-enc-{token}", ALGORITHMS[algorithm], _random(ALGORITHMS[algorithm].key_bytes))
    kid = f"{name}-sign-{secrets.token_hex(4)}"
    signing = SigningKey(kid, _random(32), SecondSigningKey(kid, _random(32)) if post_quantum else None)
    signer = TrustedSigner(name, signing.verify_key(), models)
    plain_file, sealed_file = keys_dir() / f"{name}.enc.jwk", keys_dir() / f"{name}.enc.jwk.age"
    key_file, other_file = (plain_file, sealed_file) if passphrase is None else (sealed_file, plain_file)
    signing_file = keys_dir() / f"{name}.sign.jwk"
    files = [
        (key_file, _private_json(master, passphrase), 0o600),
        (other_file, None, 0o600),
        (signing_file, _private_json(signing), 0o600),
        (trust_file(name), bytearray(document_bytes(signer)), 0o644),
    ]
    try:
        with _locked_folder():
            _refuse_existing(name, [path for path, _, _ in files], force=force)
            replaced = _write_all(files, token)
    finally:
        for _, data, _ in files:
            wipe(data or bytearray())
    return NewKeys(
        name=name,
        algorithm=algorithm,
        key_id=master.kid,
        signing_key_id=signing.kid,
        thumbprint=signer.key.thumbprint(),
        models=models,
        key_file=key_file,
        signing_key_file=signing_file,
        trust_file=trust_file(name),
        replaced=replaced,
        encrypted=passphrase is not None,
        post_quantum=post_quantum,
    )


@dataclass(frozen=True, slots=True)
class NewIdentity:
    """What :func:`generate_identity` made. Holds no key material.

    Attributes:
        name: As given.
        key_id: kid of the identity.
        thumbprint: SHA-256 of the public half, hexadecimal.
        key_file: Private JWK.
        public_file: Public JWK, for those who shall encrypt for it.
        replaced: Where the files of an earlier one of that name were put.
    """

    name: str
    key_id: str
    thumbprint: str
    key_file: Path
    public_file: Path
    replaced: tuple[Path, ...]


def generate_identity(name: str, *, force: bool = False) -> NewIdentity:
    """Make an identity, which others encrypt models for: ML-KEM-768 and X25519 (:mod:`core.keys.hybrid`).

    Args:
        name: Names the files; part of the kid, which is unique all the same.
        force: Put an earlier one of that name aside.

    Raises:
        ConfigError: A bad name.
        KeyAccessError: Others can enter the keys folder.
        WriteError: There is one of that name, or the files cannot be written.
    """
    check_name(name)
    token = secrets.token_hex(4)
    identity = Identity(f"{name}-id-{token}", _random(SEED_BYTES))
    public = identity.public()
    key_file, public_file = keys_dir() / f"{name}.id.jwk", recipients_dir() / f"{name}.jwk"
    files: list[tuple[Path, bytearray | None, int]] = [
        (key_file, _json(identity.document(b64url)), 0o600),
        (public_file, _json(public.document(b64url)), 0o644),
    ]
    try:
        with _locked_folder():
            private_folder(recipients_dir())
            _refuse_existing(name, [path for path, _, _ in files], force=force)
            replaced = _write_all(files, token)
    finally:
        for _, data, _ in files:
            wipe(data or bytearray())
    return NewIdentity(name, identity.kid, public.thumbprint(), key_file, public_file, replaced)


def _random(length: int) -> Secret:
    return Secret(bytearray(os.urandom(length)))


def _json(document: Mapping[str, Any]) -> bytearray:
    return bytearray(json.dumps(document, indent=2).encode() + b"\n")


def _private_json(key: MasterKey | SigningKey, passphrase: Secret | None = None) -> bytearray:
    if isinstance(key, SigningKey) and key.second is not None:
        text = _json({"keys": [key.document(), key.second.document()]})
    else:
        text = _json(key.document())
    if passphrase is None:
        return text
    try:
        return bytearray(seal(text, passphrase))
    finally:
        wipe(text)


@contextlib.contextmanager
def _locked_folder() -> Iterator[None]:
    """The keys folder, ours alone for as long as the block runs. Raises KeyAccessError or WriteError."""
    folder = keys_dir()
    try:
        for needed in (home(), folder, trust_dir()):
            private_folder(needed)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        raise write_error(e, folder) from None
    try:
        info = os.fstat(fd)
        if info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise KeyAccessError(
                f"the keys folder is not yours alone (mode {stat.S_IMODE(info.st_mode):04o}, owner {info.st_uid})",
                path=folder,
                hint=f"chmod 700 {folder}",
            )
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Closing is not enough: a process that was forked meanwhile holds the same lock through its copy.
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def _refuse_existing(name: str, paths: list[Path], *, force: bool) -> None:
    there = [path for path in paths if os.path.lexists(path)]
    if there and not force:
        raise WriteError(
            f"there is a key or signer named {name!r} already",
            path=there[0],
            hint="take another NAME; --force puts the old files aside, and models made with them no longer load",
        )


def _write_all(files: list[tuple[Path, bytearray | None, int]], token: str) -> tuple[Path, ...]:
    """Write all files or leave everything as it was; returns where earlier ones were put.

    Files without data are put aside, and nothing takes their place.
    """
    aside: dict[Path, Path] = {}
    written: list[Path] = []
    try:
        for path, data, mode in files:
            if os.path.lexists(path):
                kept = path.with_name(f"{path.name}.replaced-by-{token}")
                # A second name first, then the exchange: the old key is never without a name.
                os.link(path, kept, follow_symlinks=False)
                aside[path] = kept
                if data is None:
                    path.unlink()
            if data is not None:
                write_bytes(path, data, mode=mode)
                written.append(path)
    except BaseException as e:
        for path in {*written, *aside}:
            if path in aside:
                aside[path].replace(path)
                aside[path].unlink(missing_ok=True)  # two names of one file: rename(2) did nothing
            else:
                path.unlink(missing_ok=True)
        if isinstance(e, OSError) and not isinstance(e, WriteError):
            raise write_error(e, files[0][0]) from None
        raise
    return tuple(aside.values())
