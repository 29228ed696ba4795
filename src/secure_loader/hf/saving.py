"""Saving a model encrypted, with no plaintext copy on disk at any time."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core import index
from ..core import manifest as mf
from ..core.keys.jwk import MasterKey, SigningKey
from ..core.session import Session
from ..core.single import publication
from ..core.source import FileSource, read_header
from ..core.staging import staged_folder
from ..core.survey import PLAINTEXT_WEIGHTS
from ..core.trust import TrustedSigner, TrustStore
from ..core.writer import write_manifest
from ..errors import ConfigError
from .context import Context, Writer, is_encrypted, use
from .hub import SECURE_WEIGHTS, VARIANT, WEIGHTS

# Upstream ignores arguments that it does not know; these would leave weights in clear, or publish half a folder.
_REFUSED = {
    "loader": 'is for loading; this function encrypts anyway, and PreTrainedModel.save_pretrained takes saver="secure"',
    "push_to_hub": "would upload a folder that is not complete yet: save, then upload the folder",
    "distributed_checkpoint": "writes weights in a format that is not encrypted",
    "variant": 'is always "secure"',
}


def save_pretrained(
    model: Any,
    folder: str | os.PathLike[str],
    *,
    key: str | MasterKey | None = None,
    signing_key: str | SigningKey | None = None,
    model_id: str | None = None,
    release: int = 1,
    recipients: Sequence[str] = (),
    tokenizer: Any = None,
    max_shard_size: int | str | None = None,
    force: bool = False,
    **kwargs: Any,
) -> None:
    """Save a model as an encrypted and signed folder.

    Tensors are encrypted as they are written. The folder appears under its name when it is complete; it loads with
    ``from_pretrained(folder, loader="secure")``.

    Args:
        model: A ``PreTrainedModel``, or anything else whose ``save_pretrained`` writes safetensors files (a peft model).
        folder: The new folder.
        key: Master key: a NAME given to ``keygen``, a kid, or the key; None takes the only one in the home folder.
        signing_key: Likewise; None takes the one that goes with ``key``, or the only one.
        model_id: What the trust store matches; None takes the folder's name.
        release: Grows with every publication; loading remembers the highest and refuses older ones.
        recipients: Whom to wrap the master key for, as :func:`secure_loader.encrypt_model`; without ``key`` it is a new one.
        tokenizer: Tokenizer or processor to be saved and signed along with the model.
        max_shard_size: As upstream.
        force: Replace a model folder that is there.
        **kwargs: Handed to the model's own ``save_pretrained``.

    Raises:
        ConfigError: An argument that cannot be honoured, or a model that does not write safetensors files.
        KeyAccessError: No key, or several to choose from.
        WriteError: Destination in use, disk full.
    """
    from .hook import install

    install()
    target = Path(folder).absolute()
    for name, why in _REFUSED.items():
        if kwargs.get(name):
            raise ConfigError(f"{name} {why}")
    name = target.name if model_id is None else model_id
    by = publication(key=key, signing_key=signing_key, model_id=name, release=release, recipients=recipients)
    if max_shard_size is not None:
        kwargs["max_shard_size"] = max_shard_size
    if _takes_variant(model):
        kwargs["variant"] = VARIANT
    # Nothing of an earlier attempt can be used again: every run has a fingerprint of its own.
    with staged_folder(target, fingerprint={"save": secrets.token_hex(16)}, force=force) as staging:
        trust = TrustStore([TrustedSigner("self", by.signing.verify_key())])
        context = Context(Session(keys=by.master, trust=trust), writer=Writer(by))
        with use(context):
            model.save_pretrained(os.fspath(staging.folder), **kwargs)
            if tokenizer is not None:
                tokenizer.save_pretrained(os.fspath(staging.folder))
        write_manifest(staging.folder, _weights(staging.folder), by)


def _takes_variant(model: Any) -> bool:
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)


def _weights(folder: Path) -> dict[str, str]:
    """Tensor to shard of the root checkpoint; refuses a folder with anything in clear."""
    root = []
    for name in mf.list_files(folder):
        if Path(name).suffix in PLAINTEXT_WEIGHTS:
            raise ConfigError(f"{name} was written, which is not encrypted; only safetensors files are", path=folder)
        if name.endswith(".safetensors"):
            with FileSource(folder / name) as source:
                if not is_encrypted(source):
                    raise ConfigError(f"{name} was written in clear, past the routed safetensors", path=folder)
            if "/" not in name:
                root.append(name)
    if not root:
        raise ConfigError("the model wrote no safetensors files", path=folder)
    found = index.find(folder, root)
    if found is not None:
        return found[1]
    main = next((n for n in (SECURE_WEIGHTS, WEIGHTS) if n in root), root[0] if len(root) == 1 else None)
    if main is None:
        return {}
    with FileSource(folder / main) as source:
        return dict.fromkeys(read_header(source).tensors, main)
