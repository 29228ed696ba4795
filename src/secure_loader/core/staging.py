"""A folder that appears under its name only when it is complete.

Everything is written into a hidden sibling, ``.NAME.partial``, which takes the final name in one rename. After a kill
the sibling is still there, and a second run with the same settings goes on where the first one stopped.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError, SecureLoaderError, WriteError
from . import strict_json
from .atomic import sync_folder, write_bytes, write_error
from .manifest import MANIFEST

_STATE = ".secure_loader_state.json"
_LOCK = ".secure_loader_lock"


class Staging:
    """The hidden folder in which a model folder is put together.

    Attributes:
        folder: Where to write.
        resumed: State that an interrupted run with the same fingerprint left, or None.
    """

    def __init__(self, target: Path, folder: Path, resumed: Mapping[str, Any] | None, fingerprint: str) -> None:
        self.target, self.folder, self.resumed, self._fingerprint = target, folder, resumed, fingerprint

    def remember(self, state: Mapping[str, Any]) -> None:
        """Keep what a resumed run must reuse."""
        doc = {"fingerprint": self._fingerprint, "state": dict(state)}
        write_bytes(self.folder / _STATE, strict_json.dumps(doc).encode(), mode=0o600)


@contextlib.contextmanager
def staged_folder(target: Path, *, fingerprint: Mapping[str, Any], force: bool = False) -> Iterator[Staging]:
    """Put a folder together out of sight; when the block ends well it takes the name ``target``.

    Args:
        target: Final path. It must not exist, or be empty, unless ``force``.
        fingerprint: What is being written, from what, how: only a run with an equal one resumes.
        force: Replace a model folder that is there. It stays until the new one is complete.

    Raises:
        ConfigError: The destination is in use.
        WriteError: It cannot be written, or another run is at it.
    """
    check_target(target, force=force)
    digest = hashlib.sha256(strict_json.dumps(fingerprint).encode()).hexdigest()
    folder = target.parent / f".{target.name}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_ours(folder)
        with open(folder / _LOCK, "a", encoding="ascii") as lock:
            _lock(lock.fileno(), folder)
            resumed = _resume(folder, digest)
            staging = Staging(target, folder, resumed, digest)
            yield staging
            sync_folder(folder)
            _swap(folder, target, force=force)
            for leftover in (_STATE, _LOCK):
                (target / leftover).unlink(missing_ok=True)
    except OSError as e:
        if isinstance(e, SecureLoaderError):  # a file that is missing, say; that is an OSError too
            raise
        raise write_error(e, target) from None


def check_target(target: Path, *, force: bool) -> None:
    """Refuse a destination that is in use. Raises ConfigError or WriteError."""
    if not target.name:
        raise ConfigError("is not a usable destination", path=target)
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not target.is_dir():
        raise WriteError("exists and is not a folder", path=target)
    entries = os.listdir(target)
    if not entries:
        return
    if not force:
        raise WriteError("the destination is not empty", path=target, hint="choose another, or say --force")
    if not any(name in (MANIFEST, "config.json") or name.endswith(".safetensors") for name in entries):
        raise WriteError("is not a model folder; --force replaces only those", path=target)


def _check_ours(folder: Path) -> None:
    # Where others may write the parent, they may have put a link here, and what is behind it would be cleared away.
    info = os.lstat(folder)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        raise WriteError("is not a folder of ours; remove it", path=folder)


def discard(target: Path) -> None:
    """Remove what an interrupted run left for ``target``."""
    shutil.rmtree(target.parent / f".{target.name}.partial", ignore_errors=True)


def _lock(fd: int, folder: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise WriteError("another run is writing this folder", path=folder) from None


def _resume(folder: Path, digest: str) -> Mapping[str, Any] | None:
    state = folder / _STATE
    if state.exists():
        try:
            doc = strict_json.loads(state.read_bytes(), what="state", scan=True)
        except Exception:  # noqa: BLE001 - a damaged state only means to start over
            doc = None
        if isinstance(doc, dict) and doc.get("fingerprint") == digest and isinstance(doc.get("state"), dict):
            # What was being written when the other run was killed is no use, and would be published with the rest.
            for half in folder.rglob(".*.tmp-*"):
                half.unlink()
            return dict(doc["state"])
    for entry in folder.iterdir():
        if entry.name == _LOCK:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    return None


def _swap(folder: Path, target: Path, *, force: bool) -> None:
    old = None
    if force and target.exists() and os.listdir(target):
        old = target.parent / f".{target.name}.old-{secrets.token_hex(4)}"
        os.rename(target, old)
    try:
        os.rename(folder, target)
    except OSError:
        if old is not None:
            os.rename(old, target)
        raise
    sync_folder(target.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
