"""A header that was parsed is written back as the very bytes that were signed."""

from __future__ import annotations

import json
import math
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from secure_loader.core import header as hdr
from secure_loader.core.base64_text import base64_text
from secure_loader.core.envelope import SIGNATURE
from secure_loader.core.source import FileSource, read_header
from secure_loader.core.trust import signed_bytes
from secure_loader.core.types import DTYPES, TensorInfo
from secure_loader.errors import FormatError

from .files import PROFILE

# Lone surrogates are no UTF-8; everything else may be a name, controls and quotes included.
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
# What needs no escape but that of quotes and backslashes, so that there is something to prove.
SIMPLE = st.text('ab"\\\u00e9,:{} ', max_size=6)
METADATA = st.dictionaries(NAMES, NAMES, max_size=4)


@st.composite
def tensor_lists(draw: st.DrawFn, names: st.SearchStrategy[str] = NAMES) -> list[TensorInfo]:
    """Tensors that cover a body without a hole, empty ones and scalars among them."""
    out: list[TensorInfo] = []
    for name in draw(st.lists(names.filter(lambda n: n != "__metadata__"), max_size=6, unique=True)):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = draw(st.lists(st.integers(0, 9), max_size=4))
        if DTYPES[dtype].bits % 8:
            shape = [*shape, 4 * draw(st.integers(0, 3))]  # packed kinds fill whole bytes in fours
        start = out[-1].stop if out else 0
        out.append(TensorInfo(name, dtype, tuple(shape), start, start + math.prod(shape) * DTYPES[dtype].bits // 8))
    # Equal offsets keep the order of the file; any other order is that of the offsets.
    return out


@settings(PROFILE, max_examples=150)
@given(METADATA, tensor_lists())
def test_canonical_bytes_survive_a_round_trip(metadata: dict[str, str], tensors: list[TensorInfo]) -> None:
    text = hdr.canonical_json(metadata, tensors)
    prefix, body = hdr.file_prefix(text), b"\0" * (tensors[-1].stop if tensors else 0)
    assert len(prefix) % hdr.BODY_ALIGNMENT == 0
    header = read_header(FileSource.from_bytes(prefix + body))
    assert header.metadata == metadata
    assert list(header.tensors.values()) == tensors
    assert header.canonical_json() == text
    assert header.body_start == len(prefix)
    # An independent parser sees the same document.
    assert json.loads(text)["__metadata__"] == metadata


@settings(PROFILE, max_examples=60)
@given(METADATA, tensor_lists(), st.data())
def test_order_and_spacing_of_the_json_do_not_matter(
    metadata: dict[str, str], tensors: list[TensorInfo], data: st.DataObject
) -> None:
    """However a writer lays the same header out, its canonical form is one and the same."""
    tensors = [t for t in tensors if t.nbytes]  # the order of empty tensors at one offset is the file's own
    text = hdr.canonical_json(metadata, tensors)
    entries = data.draw(st.permutations(list(json.loads(text).items())))
    doc = {name: dict(data.draw(st.permutations(list(entry.items())))) for name, entry in entries}
    indent = data.draw(st.sampled_from([None, 0, 2]))
    other = json.dumps(doc, indent=indent, ensure_ascii=data.draw(st.booleans())).encode()
    assert hdr.parse(other + b" " * 3, tensors[-1].stop if tensors else 0).canonical_json() == text


@st.composite
def spellings(draw: st.DrawFn) -> tuple[bytes, int]:
    """A header with a signature, in canonical form or nearly so, and the size of its body."""
    names = draw(st.sampled_from([SIMPLE, SIMPLE, NAMES]))
    tensors = draw(tensor_lists(names))
    more = draw(st.dictionaries(names, names, max_size=4))
    metadata = {"__crypto_keys__": draw(names)} | more | {SIGNATURE: base64_text(bytes(64))}
    text = hdr.canonical_json(metadata, tensors)
    change = draw(
        st.sampled_from(["none", "none", "space", "escape", "order", "last", "member order", "metadata order", "hex"])
    )
    doc = json.loads(text)
    if change == "order":
        doc = dict(draw(st.permutations(list(doc.items()))))
    elif change == "last":
        doc["__metadata__"] = doc.pop("__metadata__")
    elif change == "metadata order":
        doc["__metadata__"] = dict(draw(st.permutations(list(doc["__metadata__"].items()))))
    elif change == "member order" and tensors:
        name = draw(st.sampled_from([t.name for t in tensors]))
        doc[name] = dict(reversed(doc[name].items()))
    text = json.dumps(doc, ensure_ascii=change == "escape", separators=(",", ":")).encode()
    if change == "space":
        at = draw(st.integers(1, len(text) - 1))
        text = text[:at] + b" " + text[at:]
    elif change == "hex":
        text = text.replace(b"e", draw(st.sampled_from([b"e", b"\\u0065", b"\\/"])), 1)
    length = hdr.padded_length(len(text)) + draw(st.sampled_from([0, 0, 0, 1, -1, 4096]))
    return text.ljust(length), tensors[-1].stop if tensors else 0


@settings(PROFILE, max_examples=300)
@given(spellings())
def test_what_is_proven_canonical_is_canonical(case: tuple[bytes, int]) -> None:
    """The proof from the scan, against the definition: written again, the header is the same."""
    raw, body = case
    try:
        header = read_header(FileSource.from_bytes(hdr.LENGTH.pack(len(raw)) + raw + bytes(body)))
    except FormatError:  # a space inside a name, and the name is another one's
        return
    ordered = sorted(header.tensors.values(), key=lambda t: (t.start, t.stop, t.name))
    again = hdr.file_prefix(hdr.canonical_json(header.metadata, ordered))[hdr.LENGTH.size :]
    if header.canonical:
        assert again == raw
    elif again == raw:
        # Only what has to be escaped in another way than quotes and backslashes is left to the definition.
        assert re.search(rb"\\[bfnrtu]", raw)
    assert signed_bytes(header) == header.canonical_json(without=[SIGNATURE])
