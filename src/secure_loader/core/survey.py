"""What a plain model folder holds, and what its files will be called when they are encrypted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, MissingFileError
from . import envelope as env
from . import header as hdr
from . import index
from . import manifest as mf
from .source import FileSource, read_header

# Weights in other formats would lie beside the encrypted ones in clear.
PLAINTEXT_WEIGHTS = frozenset(
    {".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".onnx_data", ".npz", ".npy", ".pkl"}
    | {".pickle", ".joblib", ".tflite", ".ot", ".mlmodel"}
)
_SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_SECURE_SHARD = re.compile(r"model\.secure(-\d+-of-\d+)?\.safetensors")
_INDEX, _SECURE_INDEX = "model.safetensors.index.json", "model.safetensors.index.secure.json"


@dataclass(frozen=True, slots=True)
class Survey:
    """A source folder, surveyed.

    Attributes:
        headers: By path, of every safetensors file.
        names: Path in the new folder, by path in the source.
        index: Path of the root index, or None.
        weights: Tensor to shard, both as in the new folder, for the root checkpoint.
        others: Files that are copied.
        left_out: Weights in other formats, and signatures of the folder as it is.
    """

    headers: dict[str, hdr.Header]
    names: dict[str, str]
    index: str | None
    weights: dict[str, str]
    others: list[str]
    left_out: list[str]

    @property
    def everything(self) -> list[str]:
        """All files that are read."""
        return sorted([*self.headers, *self.others, *([self.index] if self.index else [])])


def survey(source: Path, *, keep_names: bool) -> Survey:
    """Look through a folder as ``save_pretrained`` writes it; only headers are read.

    Args:
        source: The folder.
        keep_names: Keep the names of weight files instead of giving them upstream's variant names.

    Raises:
        ConfigError: Encrypted already, no safetensors, or an index that does not fit the shards.
        FormatError: A malformed header or index.
    """
    if not source.is_dir():
        raise MissingFileError("no such folder", path=source)
    headers: dict[str, hdr.Header] = {}
    others: list[str] = []
    left_out: list[str] = []
    for name in mf.list_files(source):
        if not name.isprintable() and any("\ud800" <= c <= "\udfff" for c in name):
            raise ConfigError(f"{name!r} is not UTF-8, and no manifest can list it; rename it", path=source)
        if not (source / name).is_file():
            raise ConfigError(f"{name} is a link to a folder, or no regular file", path=source)
        if name.endswith(".safetensors"):
            headers[name] = _plain_header(source / name)
        elif Path(name).suffix in PLAINTEXT_WEIGHTS or ".pytorch" in name or is_signature(name):
            left_out.append(name)
        else:
            others.append(name)
    if mf.MANIFEST in others:
        raise ConfigError("is encrypted already", path=source)
    if not headers:
        raise ConfigError("holds no safetensors files", path=source, hint="save it with save_pretrained first")
    names = {name: name if keep_names else secure_name(name) for name in headers}
    root = [name for name in headers if "/" not in name]
    found = index.find(source, root)
    if found is None:
        main = "model.safetensors" if "model.safetensors" in root else root[0] if len(root) == 1 else None
        weights = dict.fromkeys(headers[main].tensors, names[main]) if main else {}
        return Survey(headers, names, None, weights, others, left_out)
    path, weight_map = found
    others.remove(path.name)
    names[path.name] = path.name if keep_names else _rename(path.name, {_INDEX: _SECURE_INDEX})
    weights = _all_weights(path, weight_map, headers)
    return Survey(headers, names, path.name, {t: names[s] for t, s in weights.items()}, others, left_out)


def _plain_header(path: Path) -> hdr.Header:
    with FileSource(path) as opened:
        header = read_header(opened)
    if env.is_encrypted(header):
        raise ConfigError("is encrypted already", path=path)
    return header


def _all_weights(path: Path, weight_map: Mapping[str, str], headers: Mapping[str, hdr.Header]) -> dict[str, str]:
    """Tensor to shard. Frameworks read whatever a shard holds, listed or not; so all of it goes into the new index."""
    for tensor, shard in weight_map.items():
        if tensor not in headers[shard].tensors:
            raise ConfigError(f"says that {shard} holds {tensor!r}, but it does not", path=path)
    weights: dict[str, str] = {}
    for shard in sorted(set(weight_map.values())):
        for tensor in headers[shard].tensors:
            if weights.setdefault(tensor, shard) != shard:
                raise ConfigError(f"both {weights[tensor]} and {shard} hold {tensor!r}", path=path)
    return weights


def is_signature(name: str) -> bool:
    """Whether a file signs the others (OpenSSF model signing): it holds no more when they are encrypted or rewrapped."""
    return Path(name).name == mf.MODEL_SIGNATURE


def secure_name(name: str) -> str:
    """Upstream's variant name of a root checkpoint file: ``model.secure.safetensors``; other names are kept."""
    found = _SHARD.fullmatch(name)
    return f"model.secure{found[1] or ''}.safetensors" if found else name


def plain_name(name: str) -> str:
    """The inverse of :func:`secure_name`, for shards and the index."""
    found = _SECURE_SHARD.fullmatch(name)
    return f"model{found[1] or ''}.safetensors" if found else _rename(name, {_SECURE_INDEX: _INDEX})


def _rename(name: str, names: Mapping[str, str]) -> str:
    return names.get(name, name)
