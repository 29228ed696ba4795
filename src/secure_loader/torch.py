"""safetensors' torch functions, by the same names, over encrypted files.

Signatures are those of safetensors 0.8; what is added comes as keyword arguments. Reading opens plain safetensors files
as well unless ``strict=True``; writing always encrypts and signs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Names that safetensors does not document but other packages import too; tests/contract pins them.
from safetensors.torch import _find_shared_tensors, _remove_duplicate_names

from .core import single
from .core.aead import CHUNK_SIZE
from .core.keys.jwk import MasterKey, SigningKey
from .core.seal import seal_bytes, write_file
from .core.session import KeySources, TrustSources
from .errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["load", "load_file", "load_model", "save", "save_file", "save_model"]


def save_file(
    tensors: dict[str, torch.Tensor],
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
    """Write tensors to an encrypted, signed file, atomically.

    Args:
        tensors: By name; no two may share memory (see :func:`save_model`).
        filename: The file.
        metadata: Free-form strings; names that begin with ``__`` are reserved.
        key: Master key: a NAME given to ``keygen``, a kid, or the key; None takes the only one there is.
        signing_key: Likewise.
        model_id: What the trust store matches; None takes the file's name without suffix.
        release: Grows with every publication of the model.
        version: CryptoTensors version.
        chunk_size: Bytes per chunk.
        include: Encrypt only names that match one of these shell patterns.
        exclude: Leave matching names in clear (signed all the same).
        recipients: Whom to wrap the master key for, as :func:`secure_loader.encrypt_model`; without ``key`` it is a new one.

    Raises:
        ConfigError: Shared memory, a pattern that matches nothing, a dtype that the format does not have.
        KeyAccessError: No key, or several to choose from.
        WriteError: The file cannot be written; an old one stays.
    """
    _refuse_shared(tensors)
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
    write_file(Path(filename), single.plain_tensors(tensors, include, exclude), metadata or {}, by)


def save(
    tensors: dict[str, torch.Tensor],
    metadata: dict[str, str] | None = None,
    *,
    key: str | MasterKey | None = None,
    signing_key: str | SigningKey | None = None,
    model_id: str = "bytes",
    release: int = 1,
    recipients: Sequence[str] = (),
) -> bytes:
    """The bytes of an encrypted file; otherwise as :func:`save_file`."""
    _refuse_shared(tensors)
    by = single.publication(key=key, signing_key=signing_key, model_id=model_id, release=release, recipients=recipients)
    return seal_bytes(single.plain_tensors(tensors, (), ()), metadata or {}, by)


def load_file(
    filename: str | os.PathLike[str],
    device: str | int = "cpu",
    *,
    backend: str = "mmap",
    keys: KeySources | None = None,
    trust: TrustSources | None = None,
    strict: bool = False,
) -> dict[str, torch.Tensor]:
    """All tensors of a file.

    Args:
        filename: The file.
        device: Where tensors go.
        backend: Accepted for safetensors' sake; it changes nothing here.
        keys: As for :func:`secure_loader.safe_open`.
        trust: As for :func:`secure_loader.safe_open`.
        strict: Refuse plain files.

    Raises:
        SecureLoaderError: The subclass says what was refused, and why.
    """
    del backend
    with single.open_path_or_bytes(Path(filename), "pt", device, keys=keys, trust=trust, strict=strict) as f:
        return f.get_tensors()


def load(
    data: bytes, *, keys: KeySources | None = None, trust: TrustSources | None = None, strict: bool = False
) -> dict[str, torch.Tensor]:
    """All tensors of the bytes of a file; otherwise as :func:`load_file`."""
    with single.open_path_or_bytes(data, "pt", "cpu", keys=keys, trust=trust, strict=strict) as f:
        return f.get_tensors()


def save_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    force_contiguous: bool = True,
    **options: Any,
) -> None:
    """Write a module's state, shared tensors once, and note the other names in the metadata as safetensors does.

    Args:
        model: The module.
        filename: The file.
        metadata: Free-form strings.
        force_contiguous: Accepted for safetensors' sake: tensors are written contiguously in any case.
        **options: Keyword arguments of :func:`save_file`.

    Raises:
        ConfigError, KeyAccessError, WriteError: As :func:`save_file`.
    """
    del force_contiguous
    state = model.state_dict()
    notes = dict(metadata or {})
    for kept, dropped in _remove_duplicate_names(state).items():
        for name in dropped:
            notes.setdefault(name, kept)
            del state[name]
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, filename, notes, **options)


def load_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    strict: bool = True,
    device: str | int = "cpu",
    *,
    backend: str = "mmap",
    keys: KeySources | None = None,
    trust: TrustSources | None = None,
) -> tuple[list[str], list[str]]:
    """Load a file into a module.

    Args:
        model: The module; changed only after every tensor of the file was verified.
        filename: The file.
        strict: Missing or unexpected names are an error, as in safetensors.
        device: Where tensors are loaded to.
        backend: Accepted for safetensors' sake.
        keys: As for :func:`secure_loader.safe_open`.
        trust: As for :func:`secure_loader.safe_open`.

    Returns:
        Missing and unexpected names.

    Raises:
        RuntimeError: Names differ and ``strict`` is set, as safetensors does.
        SecureLoaderError: As :func:`load_file`.
    """
    state = load_file(filename, device=device, backend=backend, keys=keys, trust=trust)
    shared = _remove_duplicate_names(model.state_dict(), preferred_names=list(state))
    result = model.load_state_dict(state, strict=False)
    missing, unexpected = set(result.missing_keys), list(result.unexpected_keys)
    for names in shared.values():
        for name in names:
            if name in missing:
                missing.remove(name)
            else:
                unexpected.append(name)
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(model).__name__}: "
            f"missing {sorted(missing)}, unexpected {sorted(unexpected)}"
        )
    return sorted(missing), sorted(unexpected)


def _refuse_shared(tensors: dict[str, torch.Tensor]) -> None:
    if not isinstance(tensors, dict):
        raise ConfigError(f"expected a dict of tensors, not {type(tensors).__name__}")
    for name, tensor in tensors.items():
        if not hasattr(tensor, "untyped_storage"):
            raise ConfigError(f"is not a torch tensor but {type(tensor).__name__}", tensor=str(name))
        if str(tensor.layout) != "torch.strided":
            # Said before safetensors' own helper trips over it.
            raise ConfigError("sparse tensors cannot be saved; make it dense first", tensor=name)
    shared = [sorted(group) for group in _find_shared_tensors(tensors) if len(group) > 1]
    if shared:
        raise ConfigError(
            f"tensors share memory: {', '.join(shared[0][:4])}; saving would store it more than once",
            hint="use save_model, or clone them",
        )
