"""Defects of the safetensors layer: length, JSON, entries, cover. All are refused before any key or signature."""

from __future__ import annotations

import json
from collections.abc import Iterator

from .casebook import MASTER, SIGNER, TINY, Case, tiny
from .naive_json import compact
from .naive_writer import Draft, assemble, draft_file


def header() -> Iterator[Case]:
    yield from lengths()
    yield from spelling()
    yield from duplicates()
    yield from entries()
    yield from cover()
    yield from metadata()


def bad(name: str, comment: str, data: bytes, attacks: str, expect: str = "FormatError") -> Case:
    return Case(f"header-{name}", expect, comment, data, attacks=attacks)


def lengths() -> Iterator[Case]:
    good = tiny("lengths").file()
    yield bad("empty-file", "0 bytes", b"", "a01")
    yield bad("seven-bytes", "shorter than the length field", good[:7], "a01")
    yield bad("eight-bytes", "nothing but a length", good[:8], "a01")
    for n in (0, 1):
        yield bad(f"length-{n}", f"header length {n}", n.to_bytes(8, "little") + good[8:], "a01")
    for n, label in (
        (2**63, "2-63"),
        (2**64 - 1, "2-64-less-1"),
        (100_000_001, "over-limit"),
        (len(good) - 7, "over-file"),
    ):
        yield bad(f"length-{label}", f"header length {n}", n.to_bytes(8, "little") + good[8:], "a02")
    yield bad("length-big-endian", "length in the wrong byte order", good[:8][::-1] + good[8:], "a02")
    size = int.from_bytes(good[:8], "little")
    yield bad("length-short", "the header ends inside its JSON", (size // 2).to_bytes(8, "little") + good[8:], "a01")
    yield bad("truncated-header", "the file ends inside the header", good[:500], "a14")
    yield bad("truncated-body", "the last byte is missing", good[:-1], "a08")
    yield bad("truncated-to-header", "the body is missing", good[: 8 + size], "a08")
    yield bad("trailing-byte", "one byte too many", good + b"\0", "a08")


def raw(text: bytes, body: bytes = b"") -> bytes:
    return assemble(text, body, None)


def spelling() -> Iterator[Case]:
    draft = tiny("spelling")
    text, body = draft.text(), bytes(draft.body)
    deep = b'{"a":' + b"[" * 40 + b"]" * 40 + b"}"
    yield bad("brackets", "nothing but '['", raw(b"[" * 4000), "a03")
    yield bad("brackets-after-brace", "an open object and then '['", raw(b'{"a":' + b"[" * 4000), "a03")
    yield bad("deep", "40 levels of lists", raw(deep), "a03")
    yield bad("deep-objects", "200 nested objects", raw(b'{"a":' * 200 + b"1" + b"}" * 200), "a03")
    yield bad("array", "the header is a list", raw(b"[]"), "a10")
    yield bad("string", "the header is a string", raw(b'"{}"'), "a10")
    yield bad("unclosed", "the last brace is missing", raw(text[:-1] + b" " * 5, body), "a01")
    yield bad("two-values", "a second value after the header", raw(text + b"{}", body), "a11")
    yield bad("not-utf8", "a byte that is not UTF-8", raw(text.replace(b'"format"', b'"form\xff\xfe"'), body), "a01")
    yield bad(
        "overlong-utf8", "an overlong UTF-8 sequence", raw(text.replace(b'"format"', b'"form\xc1\xa1t"'), body), "a01"
    )
    yield bad("bom", "a byte order mark", raw(b"\xef\xbb\xbf" + text, body), "a11")
    for label, space in (("space", b" "), ("newline", b"\n")):
        yield bad(f"leading-{label}", "white space before '{'", raw(space + text, body), "a11")
    for label, pad in (("tab", b"\t"), ("newline", b"\n"), ("nul", b"\0"), ("x", b"x")):
        padded = assemble(text, b"")[8:]
        comment = f"padding of spaces that ends in {label}"
        yield bad(f"padding-{label}", comment, raw(padded[:-1] + pad, body), "a11")
    surrogate = text.replace(b'"format":"pt"', b'"format":"\\ud800"')
    yield bad("lone-surrogate", "an escaped lone surrogate in a value", raw(surrogate, body), "a03")
    surrogate = text.replace(b'"c":{', b'"\\udc00":{')
    yield bad("lone-surrogate-name", "an escaped lone surrogate as a tensor name", raw(surrogate, body), "a03")
    control = text.replace(b'"format":"pt"', b'"format":"p\nt"')
    yield bad("raw-control", "an unescaped line feed inside a string", raw(control, body), "a03")
    yield bad("single-quotes", "not JSON", raw(text.replace(b'"c"', b"'c'"), body), "a03")
    yield bad("trailing-comma", "a comma before the last brace", raw(text[:-1] + b",}", body), "a03")
    yield bad("comment", "a comment", raw(text[:-1] + b"/**/}", body), "a03")


def duplicates() -> Iterator[Case]:
    draft = tiny("duplicates")
    text, body, entry = draft.text(), bytes(draft.body), compact(draft.entries["c"]).encode()
    yield bad("duplicate-tensor", "a tensor name twice", assemble(text[:-1] + b',"c":' + entry + b"}", body), "a04")
    escaped = text[:-1] + b',"\\u0063":' + entry + b"}"
    yield bad("duplicate-tensor-escaped", "a tensor name twice, once escaped", assemble(escaped, body), "a04")
    for member in ("dtype", "shape", "data_offsets"):
        first = entry[:-1] + b"," + compact({member: draft.entries["c"][member]}).encode()[1:]
        data = assemble(text.replace(entry, first), body)
        yield bad(f"duplicate-{member}", f"{member} twice in one entry", data, "a04")
    again = text.replace(b'"format":"pt"', b'"format":"pt","format":"tf"')
    yield bad("duplicate-metadata-key", "a metadata key twice", assemble(again, body), "a04")
    meta = compact({"__metadata__": draft.signed()}).encode()[1:-1]
    yield bad("duplicate-metadata", "__metadata__ twice", assemble(text[:-1] + b"," + meta + b"}", body), "a04")


def entry_case(name: str, comment: str, attacks: str, body: bytes | None = None, **members) -> Case:
    """The clear tensor's entry with members replaced (None: removed), then signed: only parsing can refuse it."""
    draft = tiny(name)
    for member, value in members.items():
        if value is None:
            del draft.entries["c"][member]
        else:
            draft.entries["c"][member] = value
    data = assemble(draft.text(), bytes(draft.body) if body is None else body)
    return bad(name, comment, data, attacks)


def entries() -> Iterator[Case]:
    for label, dtype in (
        ("lower-case", "u8"),
        ("unknown", "F128"),
        ("empty", ""),
        ("number", 8),
        ("null", [None]),
        ("padded", "U8 "),
    ):
        yield entry_case(f"dtype-{label}", f"dtype {dtype!r}", "a06", dtype=dtype)
    yield entry_case("f4-odd", "5 bytes cannot be 9 elements of 4 bits", "a06", dtype="F4", shape=[9])
    yield entry_case("f6-odd", "5 bytes cannot be 6 elements of 6 bits", "a06", dtype="F6_E2M3", shape=[6])
    for member in ("dtype", "shape", "data_offsets"):
        yield entry_case(f"no-{member}", f"an entry without {member}", "a13", **{member: None})
    yield entry_case("unknown-member", "an unknown member in an entry", "a13", strides=[1])
    yield entry_case("shape-small", "4 elements in 5 bytes", "a08", shape=[4])
    yield entry_case(
        "shape-overflow", "shape product 2^124, then 0", "a07", shape=[2**62, 2**62, 0], data_offsets=[48, 48]
    )
    yield entry_case("shape-wraps", "a shape product that is 5 modulo 2^64", "a07", shape=[5, 2**32 + 1, 2**32 - 1])
    for label, value in (
        ("negative", [-5]),
        ("minus-zero", "[-0]"),
        ("float", [5.0]),
        ("exponent", "[5e0]"),
        ("string", ["5"]),
        ("true", [5, True]),
        ("nested", [[5]]),
        ("null", "null"),
        ("object", {}),
        ("2-63", [2**63, 0]),
        ("leading-zero", "[05]"),
        ("nan", "[NaN]"),
    ):
        yield spelt("shape", label, value)
    for label, value in (
        ("one", [48]),
        ("three", [48, 53, 53]),
        ("float", [48.0, 53]),
        ("string", ["48", "53"]),
        ("negative", [-5, 0]),
        ("backwards", [53, 48]),
        ("empty", []),
        ("huge", [2**64, 2**64 + 5]),
        ("true", [True, 6]),
    ):
        yield spelt("data_offsets", label, value)
    draft = tiny("entry list")
    for label, value in (("list", []), ("null", None), ("string", "c")):
        data = assemble(compact(json.loads(draft.text()) | {"c": value}).encode(), bytes(draft.body))
        yield bad(f"entry-{label}", f"a tensor's entry is {value!r}", data, "a10")


def spelt(member: str, label: str, value: object) -> Case:
    """A member replaced by JSON text, or by a value."""
    text = value if isinstance(value, str) else compact(value)
    draft = tiny(f"{member} {label}")
    old = f'"{member}":{compact(draft.entries["c"][member])}'
    entry = compact(draft.entries["c"]).replace(old, f'"{member}":{text}')
    header_text = draft.text().decode().replace(compact(draft.entries["c"]), entry)
    attacks = "a07" if member == "shape" else "a08"
    name = f"{member.replace('data_', '')}-{label}"
    return bad(name, f"{member}: {text}", assemble(header_text.encode(), bytes(draft.body)), attacks)


def moved(name: str, comment: str, body: bytes | None = None, **offsets: list[int]) -> Case:
    """Offsets replaced and signed."""
    draft = tiny(name)
    for tensor, pair in offsets.items():
        draft.entries[tensor]["data_offsets"] = pair
    order = sorted(draft.entries.items(), key=lambda item: item[1]["data_offsets"])
    draft.entries = dict(order)
    return bad(name, comment, assemble(draft.text(), bytes(draft.body) if body is None else body), "a08")


def cover() -> Iterator[Case]:
    body = bytes(tiny("cover").body)
    yield moved("overlap", "two tensors share their bytes", body[:29], v=[0, 24], w=[0, 24], c=[24, 29])
    yield moved("overlap-partly", "two tensors overlap by a byte", body[:52], v=[0, 24], w=[23, 47], c=[47, 52])
    yield moved("hole", "a byte between two tensors", body + b"\0", c=[49, 54])
    yield moved("hole-at-start", "the first tensor starts at byte 1", b"\0" + body, v=[1, 25], w=[25, 49], c=[49, 54])
    yield moved("beyond-body", "the last tensor ends behind the file", body[:-1])
    empty = draft_file(
        {"e": ("U8", [0], b""), "w": ("U8", [2], b"ab")}, MASTER, SIGNER, seed="inside", order=["w", "e"]
    )
    inside: Draft = empty
    inside.entries["e"]["data_offsets"] = [1, 1]
    comment = "an empty tensor inside another one"
    yield bad("empty-inside", comment, assemble(inside.text(), bytes(inside.body)), "a08")
    inside.entries["e"]["data_offsets"] = [3, 3]
    comment = "an empty tensor behind the body"
    yield bad("empty-behind", comment, assemble(inside.text(), bytes(inside.body)), "a08")


def metadata() -> Iterator[Case]:
    draft = tiny("metadata")
    body, doc = bytes(draft.body), json.loads(draft.text())
    for label, value in (("list", []), ("string", "x"), ("null", None), ("number", 1)):
        data = assemble(compact(doc | {"__metadata__": value}).encode(), body)
        yield bad(f"metadata-{label}", f"__metadata__ is {value!r}", data, "a10")
    for label, value in (("number", 1), ("null", None), ("object", {}), ("true", True), ("list", ["pt"])):
        meta = doc["__metadata__"] | {"format": value}
        data = assemble(compact(doc | {"__metadata__": meta}).encode(), body)
        yield bad(f"metadata-value-{label}", f"a metadata value is {value!r}", data, "a10")
    # As an object rather than as text: the one mistake that a second implementation is sure to make.
    meta = doc["__metadata__"] | {"__secure_loader__": draft.profile}
    data = assemble(compact(doc | {"__metadata__": meta}).encode(), body)
    yield bad("profile-object", "__secure_loader__ is an object instead of its text", data, "a10")
    plain = {name: entry for name, entry in doc.items() if name != "__metadata__"}
    comment = "a plain safetensors file without any metadata"
    data = assemble(compact(plain).encode(), b"".join(TINY[n][2] for n in plain), 8)
    yield bad("plain-no-metadata", comment, data, "a18", "NotEncryptedError")
    yield bad("plain-empty", "a plain safetensors file of no tensors", raw(b"{}"), "a18", "NotEncryptedError")
