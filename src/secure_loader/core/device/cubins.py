"""Machine code that the wheel carries: ``images/sm_*.cubin`` and an index that says what they were made of.

``make cubins`` writes them (tools/make_cubins.py). They are used only while they belong to the source beside them, so that
whoever edits the source never runs what was there before.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from ...errors import DeviceError
from .sources import Sources

ARCHITECTURES = (70, 75, 80, 86, 89, 90, 100, 120)
IMAGES = Path(__file__).parent / "images"
INDEX = "index.json"


class Cubin(NamedTuple):
    """Machine code.

    Attributes:
        arch: What it was compiled for: 90 for sm_90.
        image: The bytes of the file.
    """

    arch: int
    image: bytes


@dataclass(frozen=True, slots=True)
class Index:
    """What a folder of cubins was made of.

    Attributes:
        fingerprint: Of the source.
        nvrtc: Version of the compiler.
        options: Its options, without the architecture.
        sha256: Of every cubin, in hex, by the name of its architecture.
    """

    fingerprint: str
    nvrtc: str
    options: list[str]
    sha256: dict[str, str] = field(default_factory=dict)


def shipped(sources: Sources, arch: int, folder: Path = IMAGES) -> Cubin:
    """The cubin for a device, made of this very source.

    Args:
        sources: The source.
        arch: Of the device: 103 for compute capability 10.3, which runs what was compiled for 10.0. Tegra chips (72, 87,
            101) do not run what was made for others of their generation: loading it fails, and the next way is tried.
        folder: Where the cubins are.

    Raises:
        DeviceError: There is none for it, or it is not what the index says.
    """
    index = read_index(folder)
    if index.fingerprint != sources.fingerprint:
        raise DeviceError("the shipped cubins were made of another source", hint="make cubins")
    known = [int(name.removeprefix("sm_")) for name in index.sha256]
    fitting = [a for a in known if a // 10 == arch // 10 and a <= arch]
    if not fitting:
        raise DeviceError(f"no cubin for sm_{arch} is shipped; there are {', '.join(f'sm_{a}' for a in sorted(known))}")
    name = f"sm_{max(fitting)}"
    path = folder / f"{name}.cubin"
    try:
        image = path.read_bytes()
    except OSError as e:
        raise DeviceError(f"cannot be read: {e.strerror}", path=path) from None
    if hashlib.sha256(image).hexdigest() != index.sha256[name]:
        raise DeviceError("is not the cubin that the index names: the installation is damaged", path=path)
    return Cubin(max(fitting), image)


def read_index(folder: Path = IMAGES) -> Index:
    """The index.

    Raises:
        DeviceError: There is none, or it is no index.
    """
    path = folder / INDEX
    try:
        return Index(**json.loads(path.read_text("ascii")))
    except FileNotFoundError:
        raise DeviceError("no cubins are shipped with this installation", hint="make cubins") from None
    except (OSError, ValueError, TypeError) as e:
        raise DeviceError(f"cannot be read: {e}", path=path) from None


def write(index: Index, cubins: list[Cubin], folder: Path = IMAGES) -> None:
    """Write cubins and their index; what else was in the folder goes. For the release, not at run time."""
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for cubin in cubins:
        index.sha256[f"sm_{cubin.arch}"] = hashlib.sha256(cubin.image).hexdigest()
        (folder / f"sm_{cubin.arch}.cubin").write_bytes(cubin.image)
    (folder / INDEX).write_text(json.dumps(asdict(index), indent=2) + "\n", "ascii")
