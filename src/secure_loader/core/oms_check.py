"""Whether a folder is the one that its ``model.sig`` signs, where there is one and the operator trusts a key for it."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Collection, Iterable
from pathlib import Path

from .. import config as cfg
from ..errors import ConfigError, ManifestError, SecureLoaderError
from . import manifest as mf
from . import oms
from .home import oms_dir
from .keys.ec import EcVerifyKey, read_verify_keys
from .manifest import MODEL_SIGNATURE, Manifest
from .pool import run_jobs
from .report import Advance, no_progress
from .source import FileSource, read_small_file

_log = logging.getLogger(__name__)
_PIECE = 1 << 20


def check(
    folder: Path,
    config: cfg.LoaderConfig,
    manifest: Manifest | None = None,
    *,
    may_lack: Collection[str] = (),
    advance: Advance = no_progress,
) -> EcVerifyKey | None:
    """Check a folder against its ``model.sig``.

    With a manifest, bodies of shards are not read: the manifest is among the files that are signed, it has the digest of
    each shard's header, and that has the digests of all tensors. So the bytes of a shard are bound to ``model.sig`` as
    firmly as to the manifest: by those digests, which ``integrity="full"`` compares, and by tags.

    Args:
        folder: The folder.
        config: Settings: which keys are trusted, and whether a ``model.sig`` must be there.
        manifest: The folder's manifest, which it was found to follow a moment ago; None hashes every file.
        may_lack: Files of the manifest that may be absent, as in a hub cache.
        advance: Called with the number of bytes just hashed.

    Returns:
        The key that signed; None where there is nothing to check: no ``model.sig``, or no key that is trusted.

    Raises:
        ManifestError: A file is altered, added or missing; or there is no ``model.sig``, and there must be one.
        UntrustedSignerError, SignatureError, FormatError: As :func:`core.oms.read`.
        ConfigError, SourceError: As :func:`core.keys.ec.read_verify_keys`.
    """
    path = folder / MODEL_SIGNATURE
    there = os.path.lexists(path)
    if not there and not config.require_oms:
        return None
    keys = trusted_keys(config)
    if not keys:
        if config.require_oms:
            raise ConfigError(
                f"require_oms is set, and no key is trusted for {MODEL_SIGNATURE}",
                hint=f"put public keys (PEM) into {oms_dir()}, or name them in oms_keys",
            )
        _log.debug("%s is not checked: no key is trusted for it", path)
        return None
    if not there:
        raise ManifestError(f"has no {MODEL_SIGNATURE}, which require_oms demands", path=folder)
    try:
        digests, key = oms.read(read_small_file(str(path), oms.MAX_SIZE), keys)
    except SecureLoaderError as e:
        raise type(e)(e.message, hint=e.hint, path=path) from None
    present = set(mf.list_files(folder)) - {MODEL_SIGNATURE}
    extra = sorted(present - digests.keys())
    if extra:
        raise ManifestError(
            f"{extra[0]} is not signed by {MODEL_SIGNATURE}" + (f" (and {len(extra) - 1} more)" if extra[1:] else ""),
            path=folder,
            hint="remove it, or sign the folder again with it",
        )
    # Hidden files are no part of a folder, and nobody reads them. A signature that lists some holds for those that are there.
    absent = sorted(
        n for n in digests.keys() - present - set(may_lack) if not os.path.lexists(folder / n) and not _hidden(n)
    )
    if absent:
        raise ManifestError(f"{absent[0]}, which {MODEL_SIGNATURE} signs, is missing", path=folder)
    _compare(folder, digests, manifest, advance)
    return key


def trusted_keys(config: cfg.LoaderConfig) -> list[EcVerifyKey]:
    """The keys that ``oms_keys`` names, else those in the home folder. Raises as :func:`core.keys.ec.read_verify_keys`."""
    if config.oms_keys is not None:
        return read_verify_keys(config.oms_keys)
    return read_verify_keys([oms_dir()]) if oms_dir().is_dir() else []


def hash_files(folder: Path, names: Iterable[str], advance: Advance = no_progress) -> dict[str, str]:
    """SHA-256, in hex, of whole files, several at a time. Raises SourceError for what is no readable regular file."""
    found: dict[str, str] = {}

    def job(name: str) -> None:
        sha, piece = hashlib.sha256(), memoryview(bytearray(_PIECE))
        with FileSource(folder / name) as source:
            source.read_ahead()
            for start in range(0, source.size, _PIECE):
                view = piece[: min(_PIECE, source.size - start)]
                source.read_into([view], start)
                sha.update(view)
                advance(len(view))
        found[name] = sha.hexdigest()

    run_jobs(job, sorted(names))
    return found


def _compare(folder: Path, digests: dict[str, str], manifest: Manifest | None, advance: Advance) -> None:
    """Raises ManifestError for a file that is not the one that was signed."""
    known: dict[str, str | None] = {}
    if manifest is not None:
        # None: a shard, which is bound by the manifest.
        known = {name: entry.sha256 for name, entry in manifest.files.items()}
        known[mf.MANIFEST] = _digest_of_manifest(folder, manifest)
    unknown = [n for n in digests.keys() - known.keys() if os.path.lexists(folder / n)]
    found = known | hash_files(folder, unknown, advance)
    for name, digest in digests.items():
        if found.get(name) not in (None, digest):
            raise ManifestError(f"{name} is not the file that {MODEL_SIGNATURE} signs", path=folder)


def _digest_of_manifest(folder: Path, manifest: Manifest) -> str:
    """SHA-256, in hex, of the manifest's file. Raises ManifestError where it is not the one that vouches for the shards."""
    data = read_small_file(str(folder / mf.MANIFEST), mf.MAX_MANIFEST)
    if mf.peek(data).payload() != manifest.payload():
        raise ManifestError(f"{mf.MANIFEST} changed while the folder was checked", path=folder)
    return hashlib.sha256(data).hexdigest()


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))
