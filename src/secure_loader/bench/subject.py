"""The model under a measurement: its weight files, and whether there is room for what is to be done with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..core import envelope as env
from ..core import manifest as mf
from ..core.header import Header
from ..core.pipeline import annotate
from ..core.source import FileSource, read_header
from ..core.survey import plain_name
from ..core.types import TensorInfo
from ..errors import ConfigError, FormatError, MissingFileError, OutOfMemoryError, SecureLoaderError, WriteError

# Room for what is not weights: headers, tags, file systems' own needs.
_SLACK = 32 << 20


@dataclass(frozen=True)
class Shard:
    """One safetensors file.

    Attributes:
        name: Path relative to the model folder; the file's name where there is no folder.
        label: What it is called in plain and encrypted folders alike; empty where there is only one file.
        path: The file.
        size: Of the file.
        header: Its header; nothing of it was verified.
    """

    name: str
    label: str
    path: Path
    size: int
    header: Header


@dataclass(frozen=True)
class Subject:
    """A model folder, or one file.

    Attributes:
        path: As given.
        is_folder: Which of both.
        encrypted: Whether it claims to be.
        shards: Its safetensors files.
    """

    path: Path
    is_folder: bool
    encrypted: bool
    shards: tuple[Shard, ...]

    @property
    def nbytes(self) -> int:
        """Size of all tensors."""
        return sum(shard.header.body_bytes for shard in self.shards)

    @property
    def files(self) -> tuple[Path, ...]:
        """Its safetensors files."""
        return tuple(shard.path for shard in self.shards)

    def tensors(self) -> Iterator[tuple[Shard, TensorInfo]]:
        """Every tensor with its file."""
        for shard in self.shards:
            for info in shard.header.tensors.values():
                yield shard, info

    def largest(self) -> tuple[Shard, TensorInfo] | None:
        """The largest tensor that has rows."""
        with_rows = [(shard, info) for shard, info in self.tensors() if info.shape and info.nbytes]
        return max(with_rows, key=lambda item: item[1].nbytes, default=None)

    def must_match(self, other: Subject) -> None:
        """Check that another model has tensors of the same names, dtypes and shapes in the same files.

        Raises:
            ConfigError: It has not.
        """
        mine, theirs = ({(s.label, t.name): (t.dtype, t.shape) for s, t in model.tensors()} for model in (self, other))
        if mine != theirs:
            raise ConfigError(
                f"does not hold the same tensors as {self.path}", path=other.path, hint="name the folder it was made of"
            )


def look(path: Path) -> Subject:
    """Read the headers of a model.

    Raises:
        MissingFileError: There is nothing of that name.
        FormatError: No weights, or a malformed header.
        SourceError: Something cannot be read.
    """
    if not path.exists():
        raise MissingFileError("no such file or folder", path=path)
    if not path.is_dir():
        only = _shard(path, path.name, "")
        return Subject(path, is_folder=False, encrypted=env.is_encrypted(only.header), shards=(only,))
    names = [name for name in mf.list_files(path) if name.endswith(".safetensors")]
    if not names:
        raise FormatError("holds no safetensors files", path=path)
    shards = tuple(_shard(path / name, name, plain_name(name) if len(names) > 1 else "") for name in names)
    encrypted = (path / mf.MANIFEST).exists() or any(env.is_encrypted(shard.header) for shard in shards)
    return Subject(path, is_folder=True, encrypted=encrypted, shards=shards)


def _shard(path: Path, name: str, label: str) -> Shard:
    with FileSource(path) as source:
        try:
            return Shard(name, label, path, source.size, read_header(source))
        except SecureLoaderError as e:
            raise annotate(e, source.path) from None


def check_disk(folder: Path, nbytes: int) -> None:
    """Refuse to begin what would not fit on the disk.

    Args:
        folder: Where it would be written.
        nbytes: How much.

    Raises:
        MissingFileError: No such folder.
        WriteError: Too little room.
    """
    if not folder.is_dir():
        raise MissingFileError("no such folder", path=folder)
    found = os.statvfs(folder)
    free, needed = found.f_bavail * found.f_frsize, nbytes + nbytes // 50 + _SLACK
    if free < needed:
        raise WriteError(
            f"temporary copies would take {needed:,} bytes, and {free:,} are free; nothing was written",
            path=folder,
            hint="name a folder on another disk with --work",
        )


def check_memory(nbytes: int) -> None:
    """Refuse to load what would drive the machine into swapping.

    Raises:
        OutOfMemoryError: Too little memory is available.
    """
    available, needed = available_memory(), nbytes + nbytes // 20 + _SLACK
    if available is not None and available < needed:
        raise OutOfMemoryError(
            f"loading it takes {needed:,} bytes of memory, and {available:,} are available",
            hint="measure one of its weight files, or use a larger machine",
        )


def available_memory() -> int | None:
    """Bytes that the system can give without swapping, or None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
