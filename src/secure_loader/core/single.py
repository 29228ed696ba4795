"""One file of tensors from memory to disk and back, below the torch and numpy front ends."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .aead import CHUNK_SIZE
from .archive import Archive
from .keys.jwk import MasterKey, SigningKey
from .keys.recipients import targets, wrap_for
from .seal import PlainTensor, Publication
from .session import KeySources, Session, TrustSources
from .source import FileSource
from .tensors import bytes_of
from .writer import choose_master, resolve_signing


def publication(
    *,
    key: str | MasterKey | None,
    signing_key: str | SigningKey | None,
    model_id: str,
    release: int = 1,
    version: str = "2",
    chunk_size: int = CHUNK_SIZE,
    recipients: Sequence[str] = (),
) -> Publication:
    """Keys and names for a single file. Raises KeyAccessError and ConfigError."""
    for_whom = targets(recipients)
    master = choose_master(key, for_whom)
    signing = resolve_signing(signing_key, key)
    entries = wrap_for(for_whom, master, model_id)
    return Publication(master, signing, model_id, release, version, chunk_size, recipients=entries)


def plain_tensors(tensors: Mapping[str, Any], include: Sequence[str], exclude: Sequence[str]) -> list[PlainTensor]:
    """Tensors or arrays, ready to be written.

    Args:
        tensors: By name; torch tensors or numpy arrays.
        include: Encrypt only names that match one of these shell patterns; none means all.
        exclude: Leave matching names in clear.

    Raises:
        ConfigError: A pattern that matches nothing, or a value that cannot be saved.
    """
    for pattern in (*include, *exclude):
        if not fnmatch.filter(tensors, pattern):
            raise ConfigError(f"pattern {pattern!r} matches no tensor")
    out = []
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise ConfigError(f"tensor names are strings, not {type(name).__name__}")
        dtype, shape, view = bytes_of(tensor)
        seal = not include or any(fnmatch.fnmatchcase(name, p) for p in include)
        seal = seal and not any(fnmatch.fnmatchcase(name, p) for p in exclude)
        out.append(PlainTensor(name, dtype, shape, view.nbytes, view, encrypt=seal))
    return out


def open_path_or_bytes(
    what: str | Path | bytes | bytearray,
    framework: str,
    device: str | int,
    *,
    keys: KeySources | None,
    trust: TrustSources | None,
    strict: bool,
) -> Archive:
    """An archive over a file or over the bytes of one."""
    session = Session(keys=keys, trust=trust)
    if isinstance(what, (bytes, bytearray)):
        return Archive(session.accept(FileSource.from_bytes(what), strict=strict), framework, device)
    return session.open(what, framework, device, strict=strict)
