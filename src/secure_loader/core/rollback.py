"""The rollback floor: the highest release of each model that was loaded here."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from pathlib import Path

from ..errors import FormatError, RollbackError, SourceError
from . import strict_json
from .home import private_folder, state_dir
from .source import read_small_file

_log = logging.getLogger(__name__)
_MAX_STATE = 16 << 20


def check_release(model_id: str, signer_thumbprint: str, release: int) -> None:
    """Refuse a release older than one seen before, and remember a newer one.

    The floor is kept per model and signer, so that nobody can raise the floor of somebody else's model.

    Raises:
        RollbackError: An older release, or the record of releases is damaged.
    """
    folder = state_dir()
    key = f"{model_id}@{signer_thumbprint}"
    floors = _read(folder)
    if release <= floors.get(key, -1):
        # Nothing to be written, so no lock: the record is replaced as a whole, and only ever rises.
        _check(floors, key, model_id, release)
        return
    try:
        private_folder(folder)
        with open(folder / "releases.lock", "a", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                floors = _read(folder)
                _check(floors, key, model_id, release)
                if release > floors.get(key, -1):
                    _write(folder, floors | {key: release})
            finally:
                # Closing is not enough: a process that was forked meanwhile holds the same lock through its copy.
                fcntl.flock(lock, fcntl.LOCK_UN)
    except OSError as e:
        # A read-only home (a container image) still enforces the floor it was built with.
        _check(_read(folder), key, model_id, release)
        _log.warning("cannot remember release %d of %s in %s: %s", release, model_id, folder, e.strerror or e)


def _check(floors: dict[str, int], key: str, model_id: str, release: int) -> None:
    floor = floors.get(key, -1)
    if release < floor:
        raise RollbackError(
            f"release {release} of {model_id!r} is older than release {floor}, which was loaded here before",
            hint="get the current release; if going back is intended, remove the model from state/releases.json",
        )


def _read(folder: Path) -> dict[str, int]:
    path = folder / "releases.json"
    if not path.exists():
        return {}
    try:
        doc = strict_json.loads(read_small_file(str(path), _MAX_STATE), what="record of releases", scan=True)
    except (FormatError, SourceError) as e:
        raise RollbackError(f"the record of releases cannot be used: {e.message}", path=path) from None
    if not isinstance(doc, dict) or not all(strict_json.is_count(v) for v in doc.values()):
        raise RollbackError("the record of releases is damaged", path=path)
    return doc


def _write(folder: Path, floors: dict[str, int]) -> None:
    temporary = folder / f"releases.json.tmp-{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as f:
        json.dump(floors, f, ensure_ascii=False, indent=1, sort_keys=True)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, folder / "releases.json")
