"""Writing ``model.sig``, so that the tools of OpenSSF model signing can check a folder of ours."""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, ManifestError, WriteError
from . import inspection, oms
from . import manifest as mf
from .atomic import write_bytes
from .keys.ec import EcSigningKey
from .manifest import MODEL_SIGNATURE
from .oms_check import hash_files
from .report import progress_bar
from .session import TrustSources

# What git and the Hub's client keep in a folder. The peer passes over the first four by itself; the last is where
# ``hf download`` remembers what it fetched, in the very folder.
_IGNORED = (".git", ".gitattributes", ".github", ".gitignore", ".cache")


@dataclass(frozen=True, slots=True)
class OmsReport:
    """What was signed.

    Attributes:
        path: The new ``model.sig``.
        model_id: As the folder's manifest says.
        release: As the folder's manifest says.
        files: Number of files that it signs.
        nbytes: Their size.
        curve: Of the key.
        fingerprint: SHA-256 of the public key in PEM, in hex.
        not_signed: Hidden files and folders, which are no part of the model.
        seconds: Wall time.
    """

    path: str
    model_id: str
    release: int
    files: int
    nbytes: int
    curve: str
    fingerprint: str
    not_signed: tuple[str, ...]
    seconds: float


def sign_folder(
    path: str | os.PathLike[str],
    key: EcSigningKey,
    *,
    trust: TrustSources | None = None,
    force: bool = False,
    progress: bool | None = None,
) -> OmsReport:
    """Sign a model folder in the way of OpenSSF model signing, once every byte of it was verified.

    Args:
        path: An encrypted folder.
        key: Who signs.
        trust: Whom to trust with the folder, as for :func:`core.session.safe_open`.
        force: Replace a ``model.sig``.
        progress: Show a bar; None decides by the terminal.

    Raises:
        WriteError: There is a ``model.sig``, or it cannot be written.
        ConfigError: Not an encrypted folder, or one with links, which the peer refuses.
        ManifestError: A file changed meanwhile.
        SecureLoaderError: As :func:`core.inspection.verify`.
    """
    started = time.perf_counter()
    folder = Path(path).absolute()
    target = folder / MODEL_SIGNATURE
    if os.path.lexists(target) and not force:
        raise WriteError("exists already", path=target, hint="replace it with --force")
    names = [n for n in mf.list_files(folder) if n != MODEL_SIGNATURE]
    if mf.MANIFEST not in names:
        raise ConfigError("is not an encrypted folder", path=folder)
    before = {name: _state(folder, name) for name in names}
    nbytes = sum(info.st_size for info in before.values())
    # A model.sig that is there is about to be replaced, whatever it is worth.
    verified = inspection.verify(folder, trust=trust, full=True, oms_keys=[], progress=progress)
    with progress_bar(nbytes, f"Hashing {folder.name}", show=progress) as advance:
        digests = hash_files(folder, names, advance)
    for name, info in before.items():
        _refuse_change(info, _state(folder, name), name, folder)
    hidden = _hidden(folder)
    # A name that is not UTF-8 fits into no JSON; the peer will complain of that file.
    named = [name for name in hidden if name not in _IGNORED and name.isprintable()]
    ignored = [MODEL_SIGNATURE, *_IGNORED, *named]
    data = oms.write(folder.resolve().name, digests, ignored, key)
    write_bytes(target, data, overwrite=force)
    public = key.verify_key("")
    return OmsReport(
        path=str(target),
        model_id=str(verified.model_id),
        release=int(verified.release or 0),
        files=len(names),
        nbytes=nbytes,
        curve=public.curve,
        fingerprint=public.fingerprint(),
        not_signed=tuple(hidden),
        seconds=time.perf_counter() - started,
    )


def _state(folder: Path, name: str) -> os.stat_result:
    info = os.lstat(folder / name)
    if not stat.S_ISREG(info.st_mode):
        raise ConfigError(
            f"{name} is a link, or no regular file, and OpenSSF model signing takes neither",
            path=folder,
            hint="copy the folder with: cp -rL",
        )
    return info


def _refuse_change(before: os.stat_result, after: os.stat_result, name: str, folder: Path) -> None:
    """What is signed must be what was verified a moment before. Raises ManifestError."""
    for what in ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns"):
        if getattr(before, what) != getattr(after, what):
            raise ManifestError(f"{name} changed while it was signed", path=folder)


def _hidden(folder: Path) -> list[str]:
    """Hidden files and folders, relative: those that :func:`core.manifest.list_files` passes over."""
    found = []
    for root, folders, files in os.walk(folder):
        found += [(Path(root) / n).relative_to(folder).as_posix() for n in (*folders, *files) if n.startswith(".")]
        folders[:] = [f for f in folders if not f.startswith(".")]
    return sorted(found)
