"""Plain files, differentially: what safetensors 0.8 refuses is refused here, and what it writes is read here alike."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from secure_loader import Archive, Session, TrustStore, safe_open
from secure_loader.core.source import FileSource
from secure_loader.core.types import DTYPES
from secure_loader.errors import SecureLoaderError

from .peers import ODD_NAMES, same

NOBODY = TrustStore([])
A = '"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
B = '"b":{"dtype":"U8","shape":[3],"data_offsets":[8,11]}'
GOOD = f'{{"__metadata__":{{"format":"pt"}},{A},{B}}}'


def file_of(text: str | bytes, body: int = 11, length: int | None = None) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(n % 255 + 1 for n in range(body))


def one(**fields: Any) -> bytes:
    """A file of one tensor of 8 bytes whose entry has these fields instead of the right ones."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | fields
    return file_of(json.dumps({"a": {k: v for k, v in entry.items() if v is not None}}), 8)


def entry(text: str, body: int = 8) -> bytes:
    return file_of(f'{{"a":{text}}}', body)


# Refused by safetensors, and so here.
REFUSED = {
    "nothing at all": b"",
    "seven bytes": b"\2\0\0\0\0\0\0",
    "length zero": file_of("", 0),
    "length one": file_of("{", 0),
    "longer than the file": file_of(GOOD, length=len(GOOD) + 12),
    "longer than any header": file_of(GOOD, length=100_000_001),
    "longest length": file_of(GOOD, length=2**64 - 1),
    "length beyond signed": file_of(GOOD, length=2**63),
    "one short": file_of(GOOD, length=len(GOOD) - 1),
    "one long": file_of(GOOD, length=len(GOOD) + 1),
    "body one short": file_of(GOOD, 10),
    "body one long": file_of(GOOD, 12),
    "no body": file_of(GOOD, 0),
    "body without tensors": file_of("{}", 1),
    "not UTF-8": file_of(GOOD.replace("pt", "p\xff").encode("latin-1")),
    "overlong UTF-8": file_of(GOOD.encode().replace(b"pt", b"\xc0\xaf")),
    "surrogate in UTF-8": file_of(GOOD.encode().replace(b"pt", b"\xed\xa0\x80")),
    "lone surrogate escaped": file_of(GOOD.replace("pt", "\\ud800")),
    "byte order mark": file_of("\ufeff" + GOOD),
    "array": file_of("[]", 0),
    "string": file_of('"a"', 0),
    "null": file_of("null", 0),
    "number": file_of("12", 0),
    "not JSON": file_of("{a:1}", 0),
    "comment": file_of("{}//", 0),
    "trailing comma": file_of("{" + A + ",}", 8),
    "two documents": file_of("{}{}", 0),
    "bracket missing": file_of(GOOD[:-1]),
    "single quotes": file_of(GOOD.replace('"', "'")),
    "raw newline in a name": entry("0").replace(b'"a"', b'"\n"'),
    "unknown escape": file_of(GOOD.replace('"pt"', '"\\x70"')),
    "metadata is a list": file_of('{"__metadata__":[]}', 0),
    "metadata is a string": file_of('{"__metadata__":"x"}', 0),
    "metadata holds a number": file_of('{"__metadata__":{"a":1}}', 0),
    "metadata holds null": file_of('{"__metadata__":{"a":null}}', 0),
    "metadata holds an object": file_of('{"__metadata__":{"a":{}}}', 0),
    "entry is null": entry("null"),
    "entry is a string": entry('"F32"'),
    "no dtype": one(dtype=None),
    "no shape": one(shape=None),
    "no offsets": one(data_offsets=None),
    "unknown dtype": one(dtype="F33"),
    "small letters": one(dtype="f32"),
    "dtype null": entry('{"dtype":null,"shape":[2],"data_offsets":[0,8]}'),
    "dtype is a number": one(dtype=32),
    "dtype is empty": one(dtype=""),
    "shape is a number": one(shape=2),
    "shape is a string": one(shape="2"),
    "shape is an object": one(shape={"0": 2}),
    "negative size": one(shape=[-2]),
    "two negative sizes": one(shape=[-1, -2]),
    "fraction as size": one(shape=[2.0]),
    "size in e notation": entry('{"dtype":"F32","shape":[2e0],"data_offsets":[0,8]}'),
    "size NaN": entry('{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}'),
    "size true": one(shape=[2, True]),
    "size is a string": one(shape=["2"]),
    "size null": one(shape=[None]),
    "leading zero": entry('{"dtype":"F32","shape":[02],"data_offsets":[0,8]}'),
    "plus sign": entry('{"dtype":"F32","shape":[+2],"data_offsets":[0,8]}'),
    "hexadecimal": entry('{"dtype":"F32","shape":[0x2],"data_offsets":[0,8]}'),
    "size of 2**64": one(shape=[2**64]),
    "product wraps to the size": one(shape=[2**62 + 2]),
    "product wraps to zero": entry('{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}', 0),
    "larger than its bytes": one(shape=[3]),
    "smaller than its bytes": one(shape=[1]),
    "one offset": one(data_offsets=[8]),
    "three offsets": one(data_offsets=[0, 8, 8]),
    "offsets reversed": one(data_offsets=[8, 0]),
    "offsets negative": one(data_offsets=[-8, 0]),
    "offsets as strings": one(data_offsets=["0", "8"]),
    "offset fraction": one(data_offsets=[0, 8.0]),
    "offset of 2**64": one(data_offsets=[0, 2**64]),
    "offset far away": one(data_offsets=[2**63, 2**63 + 8]),
    "starts late": one(data_offsets=[1, 9]),
    "hole": file_of("{" + A + "," + B.replace("[8,11]", "[9,12]") + "}", 12),
    "overlap": file_of("{" + A + "," + B.replace("[8,11]", "[7,10]") + "}", 10),
    "same bytes twice": file_of("{" + A + "," + A.replace('"a"', '"c"') + "}", 8),
    "half a byte": entry('{"dtype":"F4","shape":[3],"data_offsets":[0,1]}', 1),
    "six bits": entry('{"dtype":"F6_E2M3","shape":[1],"data_offsets":[0,0]}', 0),
}
# Read alike. The rest of what safetensors accepts is in STRICTER.
READ = {
    "as written": file_of(GOOD),
    "no tensors": file_of("{}", 0),
    "only metadata": file_of('{"__metadata__":{}}', 0),
    "padded": file_of(GOOD + " " * 7),
    "other order": file_of("{" + B + "," + A + "}"),
    "spaces inside": file_of(GOOD.replace(":", " : ").replace(",", " ,\t\n ")),
    "escaped name": file_of(GOOD.replace('"a"', '"\\u0061\\n\\/\\ud83d\\ude00"')),
    "empty name": file_of(GOOD.replace('"a"', '""')),
    "scalar": entry('{"dtype":"F64","shape":[],"data_offsets":[0,8]}'),
    "empty": entry('{"dtype":"F64","shape":[3,0,2],"data_offsets":[0,0]}', 0),
    "many dimensions": one(shape=[1] * 20 + [2]),
    "entry in another order": entry('{"data_offsets":[0,8],"shape":[2],"dtype":"F32"}'),
    "metadata last": file_of("{" + A + ',"__metadata__":{"k":"v"}}', 8),
}
# Accepted by safetensors, refused here: what two readers could take for two things (docs/format.md).
STRICTER = {
    "metadata twice": file_of('{"__metadata__":{"k":"v","k":"w"},' + A + "}", 8),
    "unknown field": one(extra=1),
}


def their_view(data: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    """What safetensors makes of the bytes; None when it refuses them."""
    try:
        found = safetensors.deserialize(data)
    except safetensors.SafetensorError:
        return None
    return {name: (spec["dtype"], tuple(spec["shape"]), bytes(spec["data"])) for name, spec in found}


def our_view(data: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    """The same by ours, below frameworks: some dtypes have no counterpart there."""
    try:
        file = Session(trust=NOBODY).accept(FileSource.from_bytes(data), strict=False)
    except SecureLoaderError:
        return None
    found = {}
    for name, info in file.header.tensors.items():
        out = bytearray(info.nbytes)
        file.read_into(name, memoryview(out))
        found[name] = (info.dtype, info.shape, bytes(out))
    return found


@pytest.mark.parametrize("what", REFUSED)
def test_what_safetensors_refuses_is_refused(tmp_path: Path, what: str) -> None:
    data = REFUSED[what]
    (tmp_path / "x").write_bytes(data)
    assert their_view(data) is None, "safetensors has changed its mind: this case belongs elsewhere"
    with pytest.raises((safetensors.SafetensorError, OSError, ValueError)), safetensors.safe_open(tmp_path / "x", "pt"):
        pass
    with pytest.raises(SecureLoaderError) as e:
        safe_open(tmp_path / "x", trust=NOBODY)
    assert e.value.path == str(tmp_path / "x")


@pytest.mark.parametrize("what", READ)
def test_what_is_right_is_read_alike(what: str) -> None:
    view = their_view(READ[what])
    assert view is not None
    assert our_view(READ[what]) == view


@pytest.mark.parametrize("what", STRICTER)
def test_what_could_mean_two_things_is_refused_here_only(what: str) -> None:
    assert their_view(STRICTER[what]) is not None
    assert our_view(STRICTER[what]) is None


PIECES = [b'"', b"{", b"}", b"[", b"]", b",", b":", b"0", b"1", b"-", b".", b"e", b" ", b"\\", b"\0", b"\xff", b"null"]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A good file with one to three small changes to its header; the length follows, or does not."""
    good = draw(st.sampled_from(list(READ.values())))
    n = struct.unpack("<Q", good[:8])[0]
    text, body = good[8 : 8 + n], len(good) - 8 - n
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(text)))
        gone = draw(st.integers(0, 3))
        text = text[:at] + draw(st.sampled_from(PIECES) | st.just(b"")) + text[at + gone :]
    off = draw(st.sampled_from([0] * 8 + [-1, 1]))
    return file_of(text, max(0, body + draw(st.sampled_from([0] * 8 + [-1, 1]))), max(0, len(text) + off))


@settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=1200,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(mutated())
def test_no_mutation_is_read_here_that_safetensors_refuses_or_reads_otherwise(data: bytes) -> None:
    ours = our_view(data)
    if ours is not None:
        assert their_view(data) == ours


TORCH_DTYPES = dict(safetensors.torch._TYPES)


def torch_tensors() -> dict[str, torch.Tensor]:
    made = torch.arange(70_000).reshape(700, 100)  # above and below what is mapped rather than copied
    dtypes = {code: (made % 2 == 0 if d is torch.bool else made.to(d)) for code, d in TORCH_DTYPES.items()}
    odd = {f"odd {name}": torch.ones(2) * i for i, name in enumerate(ODD_NAMES)}
    return dtypes | odd | {"scalar": torch.tensor(1.5), "empty": torch.empty(0), "hollow": torch.empty(2, 0, 3)}


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt", "ü": "\n"}], ids=["none", "empty", "some"])
def test_their_torch_writer_is_read_equal(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    tensors = torch_tensors()
    safetensors.torch.save_file(tensors, tmp_path / "x", metadata)
    with safe_open(tmp_path / "x", trust=NOBODY) as f, safetensors.safe_open(tmp_path / "x", "pt") as theirs:
        assert same(f.get_tensors(), tensors)
        assert f.keys() == sorted(theirs.keys())
        # The order of empty tensors at one offset is the file's own here, and any there.
        ordered = [[n for n in opened.offset_keys() if tensors[n].numel()] for opened in (f, theirs)]
        assert ordered[0] == ordered[1]
        assert f.metadata() == theirs.metadata()
        for name in tensors:
            ours_slice, their_slice = f.get_slice(name), theirs.get_slice(name)
            assert ours_slice.get_shape() == their_slice.get_shape()
            assert ours_slice.get_dtype() == their_slice.get_dtype()
            if tensors[name].dim() == 2 and tensors[name].numel():
                assert same({"": ours_slice[3:90, 5]}, {"": their_slice[3:90, 5]})


def test_their_numpy_writer_is_read_equal(tmp_path: Path) -> None:
    arrays = {code: (np.arange(60).reshape(12, 5) % 7).astype(d) for code, d in safetensors.numpy._TYPES.items()}
    arrays |= {"scalar": np.array(2.5), "empty": np.zeros((0, 4), np.int32)}
    safetensors.numpy.save_file(arrays, tmp_path / "x")
    with Archive(Session(trust=NOBODY).open_file(tmp_path / "x", strict=False), "numpy") as f:
        loaded = f.get_tensors()
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (loaded[name].dtype, loaded[name].shape) == (array.dtype, array.shape)
        assert loaded[name].tobytes() == array.tobytes()


def test_every_dtype_of_the_format_is_read_as_the_same_bytes() -> None:
    """Also those that no framework has: F4 and F6 are packed, four elements to whole bytes."""
    text, start = {}, 0
    for code, dtype in DTYPES.items():
        stop = start + 8 * dtype.bits // 8
        text[code] = {"dtype": code, "shape": [2, 4], "data_offsets": [start, stop]}
        start = stop
    data = file_of(json.dumps(text), start)
    view = their_view(data)
    assert view is not None
    assert len(view) == len(DTYPES)
    assert our_view(data) == view
