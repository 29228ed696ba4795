"""One model: a folder, its manifest, its shards."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from ..errors import FormatError, ManifestError, MissingFileError, RollbackError, SecureLoaderError
from . import index, oms_check
from . import manifest as mf
from .archive import TensorFile
from .audit import Opening
from .header import LENGTH
from .keys.ec import EcVerifyKey
from .pipeline import annotate
from .rollback import check_release
from .session import Session
from .trust import TrustedSigner

_log = logging.getLogger(__name__)


class Checkpoint:
    """A model folder whose manifest and small files were checked against the publisher's signature.

    Shards are checked when they are opened: their headers against the manifest, their bytes by their tags.

    Args:
        folder: The model folder.
        session: Keys, trust and settings.
        partial: Accept that files which no loader needs are absent, as in a hub cache.

    Raises:
        ManifestError: A file is missing, extra or altered; or there is no manifest at all. Likewise for ``model.sig``, where
            a key is trusted for it (:func:`core.oms_check.check`).
        RollbackError: An older release than one loaded before.
        SignatureError, UntrustedSignerError, FormatError, SourceError: As they say.
    """

    def __init__(self, folder: str | os.PathLike[str], session: Session, *, partial: bool = False) -> None:
        self.folder = Path(folder)
        self.session = session
        self.manifest: mf.Manifest | None = None
        self.signer: TrustedSigner | None = None
        self.model_signer: EcVerifyKey | None = None  # whose model.sig was checked
        self._places: dict[int, str] = {}
        self._members: dict[str, set[str]] = {}  # tensors of the root checkpoint by shard
        # What is refused is on record; what is not has a record of every shard.
        with Opening(str(self.folder)).part():
            self._check(session, partial=partial)

    def _check(self, session: Session, *, partial: bool) -> None:
        if not self.folder.is_dir():
            raise MissingFileError("no such folder", path=self.folder)
        config = session.config
        unsigned_allowed = config.insecure_allow_legacy or config.insecure_allow_plaintext
        if unsigned_allowed and not (self.folder / mf.MANIFEST).exists():
            self.model_signer = oms_check.check(self.folder, session.config)
            if self.model_signer is None:
                _log.warning(
                    "%s has no %s: its file set, config and tokenizer are unprotected", self.folder, mf.MANIFEST
                )
            return
        self.manifest, self.signer = mf.read(self.folder, session.trust)
        try:
            check_release(self.manifest.model_id, self.signer.identity, self.manifest.release)
        except RollbackError as e:
            raise annotate(e, str(self.folder)) from None
        mf.check_files(self.folder, self.manifest, partial=partial)
        self._check_index(self.manifest)
        absent = [n for n, e in self.manifest.files.items() if not mf.is_needed(n, e)] if partial else ()
        self.model_signer = oms_check.check(self.folder, session.config, self.manifest, may_lack=absent)
        for name, shard in self.manifest.weights.items():
            self._members.setdefault(shard, set()).add(name)

    def shards(self) -> list[str]:
        """Relative paths of the safetensors files, sorted."""
        if self.manifest is None:
            return [name for name in mf.list_files(self.folder) if name.endswith(".safetensors")]
        return sorted(name for name, entry in self.manifest.files.items() if entry.header_sha256 is not None)

    def weights(self) -> Mapping[str, str]:
        """Tensor name to shard, for the checkpoint in the folder's root.

        Raises:
            FormatError: A folder without manifest has a malformed index.
        """
        if self.manifest is not None:
            return self.manifest.weights
        root = [s for s in self.shards() if "/" not in s]
        found = index.find(self.folder, root)
        return found[1] if found else dict.fromkeys(self.open(index.only(self.folder, root)).header.tensors, root[0])

    def open(self, shard: str) -> TensorFile:
        """Open a shard.

        Args:
            shard: Its path relative to the folder.

        Raises:
            ManifestError: Not part of the folder, or not the file that was signed.
            SecureLoaderError: As :meth:`core.session.Session.open_file`.
        """
        if self.manifest is None:
            return self.session.open_file(self.folder / mf.check_relative(shard))
        entry = self.manifest.files.get(shard)
        if entry is None or entry.header_sha256 is None:
            raise ManifestError(f"{shard} is not a shard of the signed folder", path=self.folder)
        file = self.session.open_file(self.folder / shard)
        try:
            with Opening(str(self.folder / shard)).part():
                self._check_shard(file, shard, entry)
        except SecureLoaderError as e:
            file.source.close()
            raise annotate(e, str(self.folder)) from None
        return file

    def _check_index(self, manifest: mf.Manifest) -> None:
        """What frameworks read is the index, what is signed tensor by tensor is the manifest: they must agree."""
        try:
            found = index.find(self.folder, set(manifest.weights.values()))
        except FormatError as e:
            raise ManifestError(f"the index: {e.message}", path=e.path or self.folder) from None
        if found is None:
            if len(set(manifest.weights.values())) > 1:
                raise ManifestError("several shards, and no index that says which holds what", path=self.folder)
        elif found[1] != manifest.weights:
            raise ManifestError("its weight_map differs from the signed manifest", path=found[0])

    def _check_shard(self, file: TensorFile, shard: str, entry: mf.FileEntry) -> None:
        assert self.manifest is not None  # noqa: S101 - only called with one
        # The folder was checked by path a moment ago; what counts is the file that is open now.
        raw = file.header.raw
        digest = hashlib.sha256(LENGTH.pack(len(raw)) + raw).hexdigest()
        if digest != entry.header_sha256 or file.source.size != entry.nbytes:
            raise ManifestError(f"{shard} is not the file that was signed")
        profile = file.profile
        if profile is None or (profile.model_id, profile.release) != (self.manifest.model_id, self.manifest.release):
            raise ManifestError(f"{shard} belongs to another model or release")
        mine = self._members.get(shard)
        if mine is None:
            return  # not of the root checkpoint
        if mine != file.header.tensors.keys():
            raise ManifestError(f"{shard} does not hold the tensors that the manifest says")
        place, number = profile.shard
        if number != len(self._members) or self._places.setdefault(place, shard) != shard:
            raise ManifestError(f"{shard} calls itself number {place} of {number}, which does not fit the other shards")
