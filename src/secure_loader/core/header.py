"""The safetensors header: strict parsing, limits, and the one canonical way to write it.

Format: u64 little-endian length N, N bytes of JSON, then the body
(https://github.com/huggingface/safetensors, docs/format.md in this repository). What safetensors 0.8 refuses is
refused here; duplicate keys, unknown fields and anything that is not plain data are refused as well.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from ..errors import FormatError
from . import strict_json
from .types import DTYPES, TensorInfo

MAX_HEADER_BYTES = 100_000_000  # safetensors' own MAX_HEADER_SIZE
MAX_TENSORS = 1_000_000
MAX_DIMS = 1000  # torch has no limit of its own, and safetensors none at all
MAX_BODY_BYTES = 2**63 - 1
BODY_ALIGNMENT = 4096  # profile 1: O_DIRECT and GPUDirect Storage can read the body where it lies
_METADATA = "__metadata__"
_ENTRY_FIELDS = ("dtype", "shape", "data_offsets")  # in their canonical order
_ENTRY_SET = set(_ENTRY_FIELDS)
LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header.

    Attributes:
        metadata: ``__metadata__``, or an empty dict; ``has_metadata`` tells the two apart.
        tensors: By name, in the file's own order of offsets.
        raw: The N bytes as read, padding included.
        body_bytes: Size of the body.
        has_metadata: Whether ``__metadata__`` was there at all.
        canonical: Whether ``raw`` is proven to be in canonical form, padding included; False says nothing.
    """

    metadata: dict[str, str]
    tensors: dict[str, TensorInfo]
    raw: bytes
    body_bytes: int
    has_metadata: bool = True
    canonical: bool = False

    @property
    def body_start(self) -> int:
        """File offset of the first body byte."""
        return LENGTH.size + len(self.raw)

    def canonical_json(self, *, without: Iterable[str] = ()) -> bytes:
        """This header's JSON in canonical form, leaving out the metadata keys in ``without``."""
        drop = set(without)
        kept = {k: v for k, v in self.metadata.items() if k not in drop}
        return canonical_json(kept, self.tensors.values())


def canonical_json(metadata: Mapping[str, str], tensors: Iterable[TensorInfo]) -> bytes:
    """The canonical JSON of a header: metadata keys sorted, tensors in the order given, no spaces, UTF-8 unescaped."""
    doc: dict[str, Any] = {_METADATA: dict(sorted(metadata.items()))}
    for t in tensors:
        doc[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [t.start, t.stop]}
    return json.dumps(doc, ensure_ascii=False, separators=(",", ":")).encode()


def file_prefix(text: bytes, alignment: int = BODY_ALIGNMENT) -> bytes:
    """Length field, JSON and the fewest spaces that put the body on a multiple of ``alignment``."""
    raw = padded_length(len(text), alignment)
    if raw > MAX_HEADER_BYTES:
        raise FormatError(
            f"the header would take {raw:,} bytes; at most {MAX_HEADER_BYTES:,} are allowed",
            hint="split the model into more shards or use a larger chunk size",
        )
    return LENGTH.pack(raw) + text.ljust(raw)


def padded_length(length: int, alignment: int = BODY_ALIGNMENT) -> int:
    """Length N of a header whose JSON takes ``length`` bytes, with the fewest spaces behind it."""
    return length + -(LENGTH.size + length) % alignment


def parse_length(prefix: bytes, file_bytes: int) -> int:
    """Length N of the header from the first 8 bytes of a file of ``file_bytes`` bytes.

    Raises:
        FormatError: The file is too short, or N is longer than the file or the limit.
    """
    if len(prefix) < LENGTH.size:
        raise FormatError(f"{file_bytes} bytes are too short for a safetensors file")
    n: int = LENGTH.unpack(prefix[: LENGTH.size])[0]
    if n > MAX_HEADER_BYTES:
        raise FormatError(f"the header claims {n:,} bytes; at most {MAX_HEADER_BYTES:,} are allowed")
    if n < 2:
        raise FormatError(f"the header claims {n} bytes; not even '{{}}' fits")
    if n > file_bytes - LENGTH.size:
        raise FormatError(
            f"the header claims {n:,} bytes but the file has {file_bytes:,}: truncated, or no safetensors"
        )
    return n


def parse(raw: bytes, body_bytes: int, scanned: strict_json.Scanner | None = None) -> Header:
    """Parse and check a whole header.

    Args:
        raw: The N header bytes. They must have passed a :class:`strict_json.Scanner`, which bounds what parsing them
            may cost; :func:`core.source.read_header` does that while it reads.
        body_bytes: File size less 8 + N.
        scanned: That scanner, for what it knows already.

    Returns:
        The header; its tensors exactly cover the body.

    Raises:
        FormatError: Anything outside the format.
    """
    if not raw.startswith(b"{"):
        raise FormatError("the header does not start with '{'")
    text = raw.rstrip(b" ")
    if not text.endswith(b"}"):
        raise FormatError("the header does not end with '}' and spaces")
    with strict_json.building(len(raw)):
        return _parse(raw, text, body_bytes, scanned)


def _parse(raw: bytes, text: bytes, body_bytes: int, scanned: strict_json.Scanner | None) -> Header:
    doc = strict_json.loads(text, what="header", scanned=scanned)
    if not isinstance(doc, dict):
        raise FormatError("the header is not a JSON object")
    first = next(iter(doc), None)
    has_metadata = _METADATA in doc
    metadata = _metadata(doc.pop(_METADATA, {}))
    if len(doc) > MAX_TENSORS:
        raise FormatError(f"{len(doc):,} tensors; at most {MAX_TENSORS:,} are allowed")
    tensors = [_tensor(name, entry) for name, entry in doc.items()]
    # Compact JSON has one spelling but for the order of members.
    canonical = (
        scanned is not None
        and scanned.is_compact(padding=len(raw) - len(text))
        and len(raw) == padded_length(len(text))
        and first == _METADATA
        and list(metadata) == sorted(metadata)
        and all(tuple(entry) == _ENTRY_FIELDS for entry in doc.values())
        and tensors == sorted(tensors, key=attrgetter("start", "stop", "name"))
    )
    # sort() is stable: tensors with equal offsets (empty ones) keep the file's own order, which the signature covers.
    tensors.sort(key=attrgetter("start", "stop"))
    _check_cover(tensors, body_bytes)
    return Header(metadata, {t.name: t for t in tensors}, raw, body_bytes, has_metadata, canonical)


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise FormatError("__metadata__ is not a JSON object")
    for key, text in value.items():
        if not isinstance(text, str):
            raise FormatError(f"__metadata__ value {key[:80]!r} is not a string")
    return value


def _tensor(name: str, entry: Any) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_SET:
        raise FormatError("its header entry must have exactly dtype, shape and data_offsets", tensor=name[:200])
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FormatError(f"unknown dtype {str(dtype)[:40]!r}", tensor=name[:200])
    if not isinstance(shape, list):
        raise FormatError("its shape is not a list of whole numbers", tensor=name[:200])
    if len(shape) > MAX_DIMS:
        raise FormatError(f"{len(shape):,} dimensions; at most {MAX_DIMS} are allowed", tensor=name[:200])
    if not isinstance(offsets, list) or len(offsets) != 2 or {*map(type, offsets)} != {int}:
        raise FormatError("its data_offsets are not two whole numbers", tensor=name[:200])
    bits = DTYPES[dtype].bits
    for n in shape:
        if type(n) is not int:  # strict_json.loads lets no negative or large one through
            raise FormatError("its shape is not a list of whole numbers", tensor=name[:200])
        bits *= n
        if bits > MAX_BODY_BYTES:
            raise FormatError("its shape overflows", tensor=name[:200])
    if bits % 8:
        raise FormatError("its elements do not fill whole bytes", tensor=name[:200])
    start, stop = offsets
    if stop - start != bits // 8:
        raise FormatError(
            f"data_offsets span {stop - start} bytes, but {dtype} of shape {shape[:16]} takes {bits // 8}",
            tensor=name[:200],
        )
    return TensorInfo(name, dtype, tuple(shape), start, stop)


def _check_cover(tensors: list[TensorInfo], body_bytes: int) -> None:
    end = 0
    for t in tensors:
        if t.start != end:
            raise FormatError(
                f"starts at byte {t.start}, where {end} was due: a hole or an overlap", tensor=t.name[:200]
            )
        end = t.stop
    if end != body_bytes:
        raise FormatError(
            f"the tensors take {end:,} bytes but the body has {body_bytes:,}: truncated, or trailing bytes"
        )
