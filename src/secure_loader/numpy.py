"""safetensors' numpy functions, by the same names, over encrypted files; see :mod:`secure_loader.torch`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .core import single
from .core.aead import CHUNK_SIZE
from .core.keys.jwk import MasterKey, SigningKey
from .core.seal import seal_bytes, write_file
from .core.session import KeySources, TrustSources

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["load", "load_file", "save", "save_file"]


def save_file(
    tensor_dict: dict[str, Array],
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    *,
    key: str | MasterKey | None = None,
    signing_key: str | SigningKey | None = None,
    model_id: str | None = None,
    release: int = 1,
    version: str = "2",
    chunk_size: int = CHUNK_SIZE,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    recipients: Sequence[str] = (),
) -> None:
    """Write arrays to an encrypted, signed file, atomically; arguments and errors as in :mod:`secure_loader.torch`."""
    name = Path(filename).stem if model_id is None else model_id
    by = single.publication(
        key=key,
        signing_key=signing_key,
        model_id=name,
        release=release,
        version=version,
        chunk_size=chunk_size,
        recipients=recipients,
    )
    write_file(Path(filename), single.plain_tensors(tensor_dict, include, exclude), metadata or {}, by)


def save(
    tensor_dict: dict[str, Array],
    metadata: dict[str, str] | None = None,
    *,
    key: str | MasterKey | None = None,
    signing_key: str | SigningKey | None = None,
    model_id: str = "bytes",
    release: int = 1,
    recipients: Sequence[str] = (),
) -> bytes:
    """The bytes of an encrypted file; otherwise as :func:`save_file`."""
    by = single.publication(key=key, signing_key=signing_key, model_id=model_id, release=release, recipients=recipients)
    return seal_bytes(single.plain_tensors(tensor_dict, (), ()), metadata or {}, by)


def load_file(
    filename: str | os.PathLike[str],
    *,
    backend: str = "mmap",
    keys: KeySources | None = None,
    trust: TrustSources | None = None,
    strict: bool = False,
) -> dict[str, Array]:
    """All arrays of a file; arguments and errors as in :mod:`secure_loader.torch`."""
    del backend
    with single.open_path_or_bytes(Path(filename), "numpy", "cpu", keys=keys, trust=trust, strict=strict) as f:
        return f.get_tensors()


def load(
    data: bytes, *, keys: KeySources | None = None, trust: TrustSources | None = None, strict: bool = False
) -> dict[str, Array]:
    """All arrays of the bytes of a file; otherwise as :func:`load_file`."""
    with single.open_path_or_bytes(data, "numpy", "cpu", keys=keys, trust=trust, strict=strict) as f:
        return f.get_tensors()
