"""Attacks 1 to 17: bytes that are not what a safetensors file may be. None of them gets as far as a key."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

from secure_loader.errors import (
    ConfigError,
    FormatError,
    MissingFileError,
    NotEncryptedError,
    ReadError,
    SignatureError,
    SourceError,
)
from tests.attacks.kit import (
    CHUNK,
    KEY,
    MALLORY,
    SIGN,
    Victim,
    arrays,
    build_file,
    inner,
    join,
    refused,
    rewrite,
    split,
    trust,
)


@pytest.fixture
def good(tmp_path):
    return build_file(tmp_path / "model.secure.safetensors")


@pytest.fixture
def victim():
    return Victim()


def expect(victim, path, kind, *words, strict=True):
    with refused(kind, *words, victim=victim, place=path):
        victim.open(path, strict=strict)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes are too short"),
        (b"\x02\0\0\0\0\0\0", "7 bytes are too short"),
        (struct.pack("<Q", 0), "claims 0 bytes"),
        (struct.pack("<Q", 0) + b"{}", "claims 0 bytes"),
        (struct.pack("<Q", 1) + b"{", "claims 1 bytes"),
        (struct.pack("<Q", 2), "claims 2 bytes but the file has 8"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a01_tiny_files(tmp_path, victim, data, words, strict):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    expect(victim, path, FormatError, words, strict=strict)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**63 - 1, 100_000_001, 100_000_000, 5000, 1 << 32])
def test_a02_length_bombs(tmp_path, victim, length):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}".ljust(100))
    expect(victim, path, FormatError, f"claims {length:,} bytes", strict=False)


NESTED = ["[" * 100_000, '{"a":' * 100_000, "[" * 17 + "]" * 17, '{"a":' * 17 + "1" + "}" * 17]


@pytest.mark.parametrize("text", NESTED, ids=["lists", "objects", "17 lists", "17 objects"])
def test_a03_nesting(tmp_path, victim, text):
    path = join(tmp_path / "x.safetensors", b'{"x":' + text.encode() + b"}", b"")
    expect(victim, path, FormatError, "nested deeper than 16 levels", strict=False)


@pytest.mark.parametrize("text", NESTED, ids=["lists", "objects", "17 lists", "17 objects"])
@pytest.mark.parametrize("name", ["__crypto_keys__", "__encryption__", "__policy__", "__secure_loader__"])
def test_a03_nesting_inside_metadata_strings(good, victim, text, name):
    def change(doc):
        doc["__metadata__"][name] = text

    expect(victim, rewrite(good, change, sign=MALLORY), FormatError, name, "nested deeper than 16 levels")


def test_a04_duplicate_keys(good, victim):
    doc, body = split(good)
    text = json.dumps(doc, separators=(",", ":"))
    entry = json.dumps({"small": doc["small"]}, separators=(",", ":"))[1:-1]
    for broken, key in (
        (text[:-1] + "," + entry + "}", "small"),
        (text.replace('"dtype":"I64"', '"dtype":"I64","dtype":"I64"'), "dtype"),
        (text.replace('"format":"pt"', '"format":"pt","format":"pt"'), "format"),
        (text.replace('{"__metadata__":', '{"__metadata__":{},"__metadata__":'), "__metadata__"),
        (text[:-1] + ',"\\u0073mall":' + entry.partition(":")[2] + "}", "small"),
    ):
        assert broken != text
        join(good, broken.encode(), body)
        expect(victim, good, FormatError, f"has the key {key!r} twice", strict=False)


@pytest.mark.parametrize("name", ["__crypto_keys__", "__encryption__", "__policy__", "__secure_loader__"])
def test_a04_duplicate_keys_inside_metadata_strings(good, victim, name):
    def change(doc):
        text = doc["__metadata__"][name]
        first = next(iter(json.loads(text)))
        value = json.dumps(json.loads(text)[first], separators=(",", ":"))
        doc["__metadata__"][name] = text[:-1] + f',"{first}":{value}}}'

    expect(victim, rewrite(good, change, sign=SIGN), FormatError, name, "twice")


@pytest.mark.parametrize("dtype", ["F31", "f32", "float32", "", "F32 ", 3, None, ["F32"]])
def test_a06_unknown_dtypes(tmp_path, victim, dtype):
    path = join(tmp_path / "x.safetensors", {"a": {"dtype": dtype, "shape": [1], "data_offsets": [0, 4]}}, bytes(4))
    expect(victim, path, FormatError, "tensor 'a'", "unknown dtype", strict=False)


@pytest.mark.parametrize(("dtype", "shape"), [("F4", [3]), ("F6_E2M3", [5]), ("F6_E3M2", [1]), ("F4", [])])
def test_a06_packed_elements_that_do_not_fill_bytes(tmp_path, victim, dtype, shape):
    path = join(tmp_path / "x.safetensors", {"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, 1]}}, bytes(1))
    expect(victim, path, FormatError, "tensor 'a'", "do not fill whole bytes", strict=False)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ([2**32, 2**32], "its shape overflows"),
        ([2**62, 4], "its shape overflows"),
        ([2**63 - 1], "its shape overflows"),
        ([2**64], "number out of range"),
        ([1] * 1_000_000, "holds too many items"),
        ([1] * 50_000, "50,000 dimensions; at most 1000"),
        ([1] * 1001, "1,001 dimensions; at most 1000"),
        ([-1], "number out of range"),
        ([1.0], "not a whole number"),
        ([True], "not a list of whole numbers"),
        ([None], "not a list of whole numbers"),
        ({}, "not a list of whole numbers"),
        (1, "not a list of whole numbers"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_a07_shapes(tmp_path, victim, shape, words):
    path = join(tmp_path / "x.safetensors", {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}, bytes(4))
    expect(victim, path, FormatError, words, strict=False)


@pytest.mark.parametrize("shape", [[0], [0, 5], [5, 0, 2**40], [1] * 63 + [0]])
def test_a07_zero_dimensions_are_legal(tmp_path, victim, shape):
    path = join(tmp_path / "x.safetensors", {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}, b"")
    assert victim.load(path, strict=False)["a"].shape == tuple(shape)


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ([(0, 4), (8, 12)], "a hole or an overlap"),
        ([(0, 4), (0, 4)], "a hole or an overlap"),
        ([(0, 4), (2, 6)], "a hole or an overlap"),
        ([(4, 8), (8, 12)], "a hole or an overlap"),
        ([(4, 0), (4, 8)], "data_offsets span -4 bytes"),
        ([(0, 5), (5, 9)], "data_offsets span 5 bytes"),
        ([(0, 3), (3, 7)], "data_offsets span 3 bytes"),
        ([(0, 4), (4, 8), (8, 12)], "12 bytes but the body has 8"),
        ([(0, 4)], "4 bytes but the body has 8"),
        ([(0, 4, 8), (4, 8)], "not two whole numbers"),
        ([(0,), (4, 8)], "not two whole numbers"),
        (["0", (4, 8)], "not two whole numbers"),
    ],
    ids=str,
)
def test_a08_offsets(tmp_path, victim, offsets, words):
    doc = {f"t{i}": {"dtype": "F32", "shape": [1], "data_offsets": o} for i, o in enumerate(offsets)}
    path = join(tmp_path / "x.safetensors", doc, bytes(8))
    expect(victim, path, FormatError, words, strict=False)


@pytest.mark.parametrize("change", [b"x", b"\0" * 4096, -1, -4096])
def test_a08_trailing_and_missing_bytes(good, victim, change):
    raw = good.read_bytes()
    good.write_bytes(raw + change if isinstance(change, bytes) else raw[:change])
    expect(victim, good, FormatError, "truncated, or trailing bytes")


@pytest.mark.parametrize("value", [1, None, [], {}, True, 1.5])
def test_a10_metadata_that_are_no_strings(tmp_path, victim, value):
    path = join(tmp_path / "x.safetensors", {"__metadata__": {"format": value}}, b"")
    with refused(FormatError, victim=victim, place=path):
        victim.open(path, strict=False)


@pytest.mark.parametrize("value", [[], "x", None, 5])
def test_a10_metadata_that_are_no_object(tmp_path, victim, value):
    path = join(tmp_path / "x.safetensors", {"__metadata__": value}, b"")
    expect(victim, path, FormatError, "__metadata__ is not a JSON object", strict=False)


@pytest.mark.parametrize("lead", [b" ", b"\n", b"\t", b"\xef\xbb\xbf", b"\0"])
def test_a11_anything_before_the_brace(tmp_path, victim, lead):
    path = join(tmp_path / "x.safetensors", lead + b"{}", b"")
    expect(victim, path, FormatError, "does not start with '{'", strict=False)


@pytest.mark.parametrize("tail", [b"\n", b"\t", b"\0", b"x", b"{}"])
def test_a11_anything_but_spaces_behind_the_brace(tmp_path, victim, tail):
    path = join(tmp_path / "x.safetensors", b"{}" + tail, b"")
    with refused(FormatError, victim=victim, place=path):
        victim.open(path, strict=False)


def test_a11_padding_is_part_of_what_profile_1_fixes(good, victim):
    doc, body = split(good)
    for align in (1, 8, 8192):
        join(good, doc, body, align=align)
        if good.stat().st_size - len(body) == 4096 * -(-(good.stat().st_size - len(body)) // 4096) and align != 8192:
            continue
        expect(victim, good, SignatureError, "not in canonical form")
    join(good, doc, body)
    assert victim.open(good).keys() == ["big", "clear", "small"]


@pytest.mark.parametrize("how", ["indented", "reordered", "spaces", "escaped"])
def test_a12_the_same_header_in_other_bytes(good, victim, how):
    doc, body = split(good)
    if how == "reordered":
        doc = {k: doc[k] for k in ("small", "__metadata__", "clear", "big")}
    text = {
        "indented": lambda: json.dumps(doc, indent=1),
        "reordered": lambda: json.dumps(doc, separators=(",", ":")),
        "spaces": lambda: json.dumps(doc),
        "escaped": lambda: json.dumps(doc, separators=(",", ":")).replace('"small"', '"\\u0073mall"'),
    }[how]()
    join(good, text.encode(), body)
    expect(victim, good, SignatureError, "not in canonical form")


def test_a12_the_same_inner_json_in_other_bytes(good, victim):
    """Signed again by the trusted signer: what is not canonical is refused all the same."""

    def change(doc):
        text = doc["__metadata__"]["__policy__"]
        doc["__metadata__"]["__policy__"] = json.dumps(json.loads(text), indent=1)

    expect(victim, rewrite(good, change, sign=SIGN), SignatureError, "not in canonical form")


@pytest.mark.parametrize("sign", [None, SIGN])
def test_a13_unknown_fields_of_a_tensor(good, victim, sign):
    path = rewrite(good, lambda doc: doc["small"].update(extra=1), sign=sign)
    expect(victim, path, FormatError, "tensor 'small'", "exactly dtype, shape and data_offsets")


@pytest.mark.parametrize("name", ["__crypto_keys__", "__encryption__", "__policy__", "__secure_loader__"])
def test_a13_unknown_fields_of_records(good, victim, name):
    def change(doc):
        inner(doc, name, lambda value: (value["big"] if name == "__encryption__" else value).update(extra="1"))

    expect(victim, rewrite(good, change, sign=SIGN), FormatError, "unknown member 'extra'")


@pytest.mark.parametrize("name", ["big", "clear", "small"])
@pytest.mark.parametrize("clear_tensors", ["map", "copy"])
def test_a14_truncated_after_opening(good, name, clear_tensors):
    victim = Victim(clear_tensors=clear_tensors)
    with victim.open(good) as f:
        with good.open("r+b") as out:
            out.truncate(8192)
        with refused(ReadError, f"tensor {name!r}", place=good):
            f.get_tensor(name)


def test_a14_truncated_while_the_header_is_read(good, victim, monkeypatch):
    real = os.preadv

    def shrinks(fd, buffers, offset):
        with good.open("r+b") as out:
            out.truncate(100)
        return real(fd, buffers, offset)

    monkeypatch.setattr("secure_loader.core.source.os.preadv", shrinks)
    expect(victim, good, ReadError, "truncated since it was opened")


def test_a16_what_is_not_a_regular_file(tmp_path, victim):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "fifo", tmp_path / "folder", Path("/dev/zero"), Path("/dev/null")):
        expect(victim, path, SourceError, "is not a regular file")
    for path in (tmp_path / "nowhere", tmp_path / "fifo" / "x"):
        expect(victim, path, MissingFileError, "no such file")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    expect(victim, tmp_path / "loop", SourceError, "cannot be opened")
    with refused(SourceError, "is not a usable path", victim=victim):
        victim.open(Path("a\0b"))


def test_a16_links_to_files_are_followed_once(good, tmp_path):
    """The hub cache is made of them. What is open stays open, whatever becomes of the link."""
    link = tmp_path / "link.safetensors"
    link.symlink_to(good)
    with Victim().open(link) as f:
        link.unlink()
        link.symlink_to("/dev/zero")
        assert (f.get_tensor("big") == arrays()["big"]).all()


def test_a16_a_sparse_file_of_terabytes(tmp_path, victim):
    path = tmp_path / "sparse.safetensors"
    with path.open("wb") as f:
        f.truncate(1 << 43)
    expect(victim, path, FormatError, "claims 0 bytes", strict=False)
    with path.open("r+b") as f:
        f.write(struct.pack("<Q", 100_000_000) + b"{")
    expect(victim, path, FormatError, strict=False)


def test_a17_no_tensors(tmp_path, victim):
    path = join(tmp_path / "x.safetensors", {}, b"")
    assert victim.load(path, strict=False) == {}
    build_file(path, {})
    assert victim.load(path) == {}


@pytest.mark.parametrize("size", [0, 1, 512, 4095, 2**41, -4096, 1.5, "65536", True, None])
def test_a17_chunk_sizes_when_reading(good, victim, size):
    path = rewrite(good, lambda doc: inner(doc, "__crypto_keys__", lambda v: v.update(chunk_size=size)), sign=SIGN)
    with refused(FormatError, victim=victim, place=path):
        victim.open(path)


@pytest.mark.parametrize("size", [0, 1, 4096, 32768, 65537, 1 << 25, 100_000])
def test_a17_chunk_sizes_when_writing(tmp_path, size):
    with refused(ConfigError, "chunk_size must be a power of two from 64 KiB to 16 MiB"):
        build_file(tmp_path / "x.safetensors", chunk_size=size)


def test_a17_too_many_chunks(tmp_path, victim):
    """Not by their number in the file, which has no room for them, but by what a header may claim."""
    from secure_loader.core import envelope
    from secure_loader.core.aead import chunk_count

    assert chunk_count(2**63 - 1, envelope.MIN_CHUNK_SIZE) > envelope.MAX_CHUNKS
    path = build_file(tmp_path / "x.safetensors")

    def change(doc):
        # Counters begin at the top: the second chunk would have no nonce.
        inner(doc, "__encryption__", lambda v: v["big"].update(base_iv="AAAAAAAAAAD/////"))

    expect(victim, rewrite(path, change, sign=SIGN), FormatError, "tensor 'big'", "counter would overflow")


def test_a17_a_million_tensors_is_the_limit(tmp_path, victim, monkeypatch):
    monkeypatch.setattr("secure_loader.core.header.MAX_TENSORS", 100)
    doc = {f"t{i}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(101)}
    path = join(tmp_path / "x.safetensors", doc, bytes(101))
    expect(victim, path, FormatError, "101 tensors; at most 100 are allowed", strict=False)


def test_the_genuine_file_is_accepted(good):
    """Or every refusal above would prove nothing."""
    victim = Victim()
    with victim.open(good) as f:
        found = f.get_tensors()
        again = f.get_slice("big")[3:5]
    assert {n: a.tolist() for n, a in found.items()} == {n: a.tolist() for n, a in arrays().items()}
    assert (again == arrays()["big"][3:5]).all()
    assert len(victim.ring.asked) == 1
    assert arrays()["big"].nbytes > 3 * CHUNK
    assert trust().signers[0].key == SIGN.verify_key()
    assert KEY.kid == victim.ring.asked[0].kid
    with refused(NotEncryptedError, "plain safetensors"):
        join(good, {}, b"")
        Victim().open(good)
