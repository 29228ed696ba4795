"""From what the user calls the model to a folder on this machine: local, from the Hub, or from ModelScope.

The signed manifest comes first. It says what else to fetch, so a repository that is not trusted costs one small file.
"""

from __future__ import annotations

import glob
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from vllm.model_executor.model_loader import weight_utils
from vllm.transformers_utils.repo_utils import hf_api

from ..core import manifest as mf
from ..core import oms_check
from ..core.checkpoint import Checkpoint
from ..core.rollback import check_release
from ..core.session import Session
from ..errors import OfflineError, SourceError

if TYPE_CHECKING:
    from collections.abc import Iterable

_PLAIN_CHECKPOINT = ("*.safetensors", "*.safetensors.index*.json")
_SNAPSHOT = re.compile(r"(models|datasets|spaces)--.+")


@dataclass(frozen=True, slots=True)
class Model:
    """A model as the user named it.

    Attributes:
        name: Folder, or repository id.
        revision: Of the repository.
        download_dir: Cache to download to; None takes the Hub's own.
    """

    name: str
    revision: str | None = None
    download_dir: str | None = None

    def open(self, session: Session) -> Checkpoint:
        """The whole checkpoint, fetched where needed; its manifest and small files are verified.

        Raises:
            OfflineError: It is neither here nor may be fetched.
            SecureLoaderError: As :class:`core.checkpoint.Checkpoint`.
        """
        folder, partial = self._local()
        if folder is None:
            folder, partial = self._snapshot([mf.MANIFEST]), True
            if (folder / mf.MANIFEST).exists():
                manifest, _ = mf.read(folder, session.trust)
                folder = self._snapshot([*_small(manifest), *_shards(manifest)])
            elif session.config.insecure_allow_plaintext or session.config.insecure_allow_legacy:
                folder = self._snapshot(_PLAIN_CHECKPOINT)
        return Checkpoint(folder, session, partial=partial)

    def verify_settings(self, session: Session) -> tuple[Path, mf.Manifest | None]:
        """Verify the manifest, and the files that vLLM reads before any weight: config, tokenizer, code, templates.

        Shards need not be there yet. A folder without manifest passes where the settings allow that.

        Returns:
            The folder and its manifest, or None.

        Raises:
            OfflineError: It is neither here nor may be fetched.
            SecureLoaderError: As :class:`core.checkpoint.Checkpoint`.
        """
        folder, partial = self._local()
        if folder is None:
            folder, partial = self._snapshot([mf.MANIFEST]), True
        unsigned_allowed = session.config.insecure_allow_legacy or session.config.insecure_allow_plaintext
        if unsigned_allowed and not (folder / mf.MANIFEST).exists():
            return folder, None
        manifest, signer = mf.read(folder, session.trust)
        check_release(manifest.model_id, signer.identity, manifest.release)
        if self._local()[0] is None:
            folder = self._snapshot(_small(manifest))
        here = {n: e for n, e in manifest.files.items() if e.sha256 is not None or (folder / n).exists()}
        mf.check_files(folder, replace(manifest, files=here), partial=partial)
        absent = [n for n, e in manifest.files.items() if e.sha256 is None or (partial and not mf.is_needed(n, e))]
        oms_check.check(folder, session.config, manifest, may_lack=absent)
        return folder, manifest

    def _local(self) -> tuple[Path | None, bool]:
        """The folder, where it is one, and whether it may hold only part of the model."""
        if Path(self.name).is_dir():
            return Path(self.name), is_snapshot(Path(self.name))
        # ModelScope has a cache of its own; vLLM's helper answers None where it is not in use.
        found = weight_utils.maybe_download_from_modelscope(self.name, self.revision, self.download_dir)
        return (None, False) if found is None else (Path(found), True)

    def _snapshot(self, patterns: Iterable[str]) -> Path:
        offline = huggingface_hub.constants.HF_HUB_OFFLINE
        arguments: dict[str, Any] = {
            "revision": self.revision,
            "allow_patterns": list(patterns),
            "cache_dir": self.download_dir,
            "tqdm_class": weight_utils.DisabledTqdm,
            "local_files_only": offline,
        }
        try:
            # The lock is vLLM's own, so that the ranks of one machine fetch once.
            with weight_utils.get_lock(self.name, self.download_dir):
                return Path(hf_api().snapshot_download(self.name, **arguments))
        except LocalEntryNotFoundError:
            why = "and HF_HUB_OFFLINE forbids to fetch it" if offline else "and the hub cannot be reached"
            raise OfflineError(f"is not in the cache, {why}", path=self.name) from None
        except huggingface_hub.errors.HFValidationError:
            raise SourceError("is neither a folder nor the name of a repository", path=self.name) from None
        except HfHubHTTPError as e:
            raise SourceError(f"cannot be fetched: {e}", path=self.name) from None


def is_snapshot(folder: Path) -> bool:
    """Whether a folder is part of a hub cache, which holds only what somebody asked for.

    With HF_HUB_OFFLINE vLLM replaces repository ids by such folders before any loader sees them.
    """
    folder = folder.absolute()
    return folder.parent.name == "snapshots" and _SNAPSHOT.fullmatch(folder.parent.parent.name) is not None


def _small(manifest: mf.Manifest) -> list[str]:
    """Patterns of everything but shards, and of ``model.sig``, which no manifest lists and not every model has."""
    small = [glob.escape(name) for name, entry in manifest.files.items() if entry.sha256 is not None]
    return [mf.MANIFEST, mf.MODEL_SIGNATURE, *small]


def _shards(manifest: mf.Manifest) -> list[str]:
    return [glob.escape(name) for name, entry in manifest.files.items() if entry.sha256 is None]
