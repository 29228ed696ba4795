"""The index file beside a sharded checkpoint: which shard holds which tensor."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ..errors import FormatError
from . import strict_json
from .source import read_small_file

MAX_INDEX = 64 << 20


def find(folder: Path, shards: Collection[str]) -> tuple[Path, dict[str, str]] | None:
    """The index file of a folder and its ``weight_map``, or None when there is no index.

    Raises:
        FormatError: Several index files, or a malformed one.
    """
    found = sorted(folder.glob("*.safetensors.index*.json"))
    if len(found) > 1:
        raise FormatError(f"{len(found)} index files in one folder: {', '.join(p.name for p in found)}", path=folder)
    return (found[0], parse(found[0], shards)) if found else None


def only(folder: Path, shards: Collection[str]) -> str:
    """The one shard of a folder that has no index.

    Raises:
        FormatError: None, or several.
    """
    if len(shards) != 1:
        raise FormatError(f"{len(shards)} safetensors files and no index that says what they are", path=folder)
    return next(iter(shards))


def parse(path: Path, shards: Collection[str]) -> dict[str, str]:
    """The ``weight_map`` of an index file.

    Raises:
        FormatError: Malformed, or it names a file that is not a shard of the folder.
    """
    doc = load(path)
    weight_map = doc.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise FormatError("has no weight_map", path=path)
    strange = sorted(set(weight_map.values()) - set(shards))
    if strange:
        raise FormatError(f"names {strange[0]!r}, which is not a safetensors file of this folder", path=path)
    return weight_map


def load(path: Path) -> dict[str, object]:
    """The JSON object of an index file. Raises FormatError when it is none."""
    data = read_small_file(str(path), MAX_INDEX)
    try:
        doc = strict_json.loads(data, what="index", scan=True, any_number=True)
    except FormatError as e:
        raise FormatError(e.message, path=path) from None
    if not isinstance(doc, dict):
        raise FormatError("is not a JSON object", path=path)
    return doc
