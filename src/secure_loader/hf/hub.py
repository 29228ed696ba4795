"""From a path or a Hub repo id to a folder whose manifest was checked, before anything in it is believed."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core import manifest as mf
from ..core.checkpoint import Checkpoint
from ..errors import ManifestError, MissingFileError, OfflineError, SourceError
from .context import Context, in_hub_cache, manifest_folder

VARIANT = "secure"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SECURE_WEIGHTS, SECURE_INDEX = "model.secure.safetensors", "model.safetensors.index.secure.json"


def checked(context: Context, name: str | os.PathLike[str], arguments: Mapping[str, Any]) -> Checkpoint:
    """The checked folder behind a model's name.

    Args:
        context: Keys, trust and settings.
        name: A folder, a file in one, or a repo id.
        arguments: The caller's keyword arguments; those about the Hub and ``subfolder`` count.

    Raises:
        MissingFileError: There is no such folder, and it is no repo id either.
        OfflineError: The Hub cannot be asked, and the cache does not have it.
        SecureLoaderError: As :class:`core.checkpoint.Checkpoint`.
    """
    path = os.fspath(name)
    if os.path.isdir(path):
        folder = os.path.join(path, arguments.get("subfolder") or "")
        local = manifest_folder(folder) or folder
    elif os.path.isfile(path):
        local = manifest_folder(os.path.dirname(path)) or os.path.dirname(os.path.abspath(path))
    else:
        return context.checkpoint(_fetch(context, path, arguments))
    if in_hub_cache(local):
        _complete(context, Path(local), arguments)
    return context.checkpoint(local)


def has_manifest(name: str | os.PathLike[str], arguments: Mapping[str, Any]) -> bool:
    """Whether a path or repo has a manifest at all: a signed, encrypted model, or what is left of one."""
    path = os.fspath(name)
    if os.path.isdir(path):
        folder = os.path.join(path, arguments.get("subfolder") or "")
        return manifest_folder(folder) is not None or any(
            os.path.exists(os.path.join(folder, n)) for n in (SECURE_WEIGHTS, SECURE_INDEX)
        )
    if os.path.exists(path):
        return manifest_folder(os.path.dirname(path)) is not None
    try:
        _download(path, mf.MANIFEST, arguments)
    except (SourceError, ManifestError):
        return False
    return True


def variant_of(checkpoint: Checkpoint, subfolder: str) -> str | None:
    """The ``variant`` under which upstream finds the weights: ours, or none where the folder kept plain names."""
    folder = checkpoint.folder / subfolder
    return VARIANT if any((folder / n).exists() for n in (SECURE_WEIGHTS, SECURE_INDEX)) else None


def commit_of(checkpoint: Checkpoint) -> str | None:
    """The commit, when the folder is a snapshot in the Hub's cache."""
    return checkpoint.folder.name if in_hub_cache(checkpoint.folder) else None


def _fetch(context: Context, repo: str, arguments: Mapping[str, Any]) -> Path:
    config = context.session.config
    try:
        folder = _download(repo, mf.MANIFEST, arguments).parent
    except ManifestError:
        if not (config.insecure_allow_legacy or config.insecure_allow_plaintext):
            raise
        return _download(repo, "config.json", arguments).parent
    _complete(context, folder, arguments, repo=repo)
    return folder


def _complete(context: Context, folder: Path, arguments: Mapping[str, Any], repo: str | None = None) -> None:
    """Fetch what the manifest lists and the snapshot does not have yet."""
    if not (folder / mf.MANIFEST).exists():
        return
    manifest, _ = mf.read(folder, context.session.trust)
    absent = [name for name in manifest.files if not (folder / name).exists()]
    if not absent or _offline(arguments):
        return
    from huggingface_hub import snapshot_download

    where: dict[str, Any] = {"cache_dir": folder.parents[2], "token": arguments.get("token")}
    name = repo or folder.parents[1].name.removeprefix("models--").replace("--", "/", 1)
    with _hub_errors(name, "files of the model"):
        # No manifest lists model.sig, and not every model has one.
        patterns = [mf.MODEL_SIGNATURE, *(glob.escape(n) for n in absent)]
        snapshot_download(name, revision=folder.name, allow_patterns=patterns, **where)


def _download(repo: str, filename: str, arguments: Mapping[str, Any]) -> Path:
    from huggingface_hub import hf_hub_download

    with _hub_errors(repo, filename):
        return Path(
            hf_hub_download(
                repo,
                filename,
                revision=arguments.get("revision"),
                cache_dir=arguments.get("cache_dir"),
                token=arguments.get("token"),
                force_download=bool(arguments.get("force_download")),
                local_files_only=_offline(arguments),
            )
        )


def _offline(arguments: Mapping[str, Any]) -> bool:
    from huggingface_hub import constants

    return bool(arguments.get("local_files_only")) or bool(constants.HF_HUB_OFFLINE)


class _hub_errors:  # noqa: N801 - used as a function
    """The Hub client's exceptions as ours."""

    def __init__(self, repo: str, what: str) -> None:
        self._repo, self._what = repo, what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> None:
        if error is None:
            return
        from huggingface_hub import errors

        repo, what = self._repo, self._what
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise OfflineError(
                f"{what} of {repo!r} is not in the cache, and the Hub is not to be asked or cannot be reached",
                hint="fetch the whole repository once while online",
            ) from error
        if isinstance(error, errors.EntryNotFoundError):
            raise ManifestError(
                f"{repo!r} has no {what}: not encrypted by secure-loader, or the manifest was removed",
            ) from None
        if isinstance(error, errors.HFValidationError):
            raise MissingFileError("no such folder, and not a repo id", path=repo) from None
        if isinstance(error, (errors.HfHubHTTPError, OSError)):
            raise SourceError(f"{what} of {repo!r} cannot be fetched: {error}") from error
