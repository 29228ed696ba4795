"""The source of the device kernels: ``csrc/`` in a clone, package data in an installed wheel."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import DeviceError

_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Sources:
    """All files that a kernel is compiled from.

    Attributes:
        files: Text by file name; the files include only each other.
    """

    files: Mapping[str, str]

    @property
    def unit(self) -> str:
        """The one translation unit: whatever defines kernels, one behind the other."""
        return "".join(f'#include "{name}"\n' for name in self.files if name.endswith(".cu"))

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of all names and texts."""
        digest = hashlib.sha256()
        for name, text in self.files.items():
            for part in (name.encode(), text.encode()):
                digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()


def folder() -> Path:
    """Where the files are."""
    packed = _HERE / "csrc"
    # src/secure_loader/core/device in a clone: an editable installation compiles what is being edited.
    return packed if packed.is_dir() else _HERE.parents[3] / "csrc"


@functools.cache
def read() -> Sources:
    """Read them, once in a process.

    Raises:
        DeviceError: They are not there.
    """
    return read_from(folder())


def read_from(path: Path) -> Sources:
    """Read the files of a folder; folders inside it hold no device code.

    Raises:
        DeviceError: There are none.
    """
    found = sorted(p for p in path.glob("*.cu*") if p.suffix in (".cu", ".cuh")) if path.is_dir() else []
    if not any(p.suffix == ".cu" for p in found):
        raise DeviceError("no source of device kernels", path=path)
    try:
        return Sources({p.name: p.read_text("utf-8") for p in found})
    except (OSError, UnicodeDecodeError) as e:
        raise DeviceError(f"cannot be read: {e}", path=path) from None
