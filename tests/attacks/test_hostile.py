"""Attacks 2, 3 and 17 by the megabyte: hostile headers end in an error within a second and 64 MB."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

LIMIT = 99_000_000

# Runs in a process of its own, where memory and time can be told apart from those of the tests. Peak memory only ever
# rises, so the process is new for each case; what it imports is imported before the first look.
CODE = """
    import json, resource, sys
    sys.path[:0] = {path!r}
    from secure_loader import Session, TrustStore
    from secure_loader.core import archive
    from secure_loader.errors import SecureLoaderError
    session = Session(keys=[], trust=TrustStore([]))
    def usage():
        r = resource.getrusage(resource.RUSAGE_SELF)
        return r.ru_utime + r.ru_stime, r.ru_maxrss * 1024
    before = usage()
    try:
        session.open_file(sys.argv[1], strict=False)
        kind, text = "accepted", ""
    except SecureLoaderError as e:
        kind, text = type(e).__name__, str(e)
    after = usage()
    print(json.dumps([kind, text[:300], after[0] - before[0], after[1] - before[1]]))
"""


LONG = 1.0


def open_it(path: Path) -> tuple[str, str, float, int]:
    text = textwrap.dedent(CODE).format(path=[p for p in sys.path if p])
    done = subprocess.run([sys.executable, "-c", text, path], capture_output=True, text=True, check=True, timeout=60)
    kind, message, seconds, nbytes = json.loads(done.stdout)
    return kind, message, seconds, nbytes


def repeat(unit: bytes, lead: bytes = b"", tail: bytes = b"") -> bytes:
    return lead + unit * ((LIMIT - len(lead) - len(tail)) // len(unit)) + tail


def numbered(n: int) -> bytes:
    return b"{" + b",".join(b'"%d":{}' % i for i in range(n)) + b"}"


META = b'{"__metadata__":{'
HEADERS = {
    "ten million tensors": lambda: b"{" + b",".join(b'"":{}' for _ in range(10_000_000)) + b"}",
    "seven million tensors of different names": lambda: numbered(7_000_000),
    "as many whole entries as fit": lambda: repeat(
        b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},', b"{", b'"b":{}}'
    ),
    "lists": lambda: repeat(b"[],", b'{"a":[', b"[]]}"),
    "99 MB of [": lambda: repeat(b"[", b'{"a":'),
    "99 MB of {": lambda: repeat(b"{", b'{"a":'),
    "99 MB of ]": lambda: repeat(b"]", b'{"a":'),
    "99 MB of }": lambda: repeat(b"}", b'{"a":'),
    "99 MB of ][": lambda: repeat(b"][", b'{"a":'),
    "99 MB of []": lambda: repeat(b"[]", b'{"a":'),
    "99 MB of {[": lambda: repeat(b"{[", b'{"a":'),
    "100,000 nested objects": lambda: b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep at the very end": lambda: repeat(b" ", b"{", b'"a":' + b"[" * 100 + b"]" * 100 + b"}"),
    "metadata: a string that does not end": lambda: repeat(b"x", META + b'"format":"'),
    "metadata: quotes that do not end": lambda: repeat(b'\\"', META + b'"format":"'),
    "metadata: backslashes that do not end": lambda: repeat(b"\\\\", META + b'"format":"'),
    "metadata: ten million strings": lambda: repeat(b'"a":"",', META, b'"b":""}}'),
    "a shape of fifty million": lambda: repeat(b"1,", b'{"a":{"dtype":"F32","shape":[', b'1],"data_offsets":[0,4]}}'),
    "offsets of fifty million": lambda: repeat(b"1,", b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[', b"1]}}"),
    "nothing but commas": lambda: repeat(b",", b"{", b"}"),
}


@pytest.fixture
def hostile(tmp_path):
    def write(header: bytes, length: int | None = None, sparse: int = 0) -> Path:
        path = tmp_path / "hostile.safetensors"
        with path.open("wb") as f:
            f.write(struct.pack("<Q", len(header) if length is None else length) + header)
            f.truncate(8 + len(header) + sparse)
        return path

    return write


def check(path: Path, kind: str = "FormatError") -> None:
    found, message, seconds, nbytes = open_it(path)
    if seconds >= LONG:  # what else runs on the machine has its share in it
        seconds = min(seconds, open_it(path)[2], open_it(path)[2])
    path.unlink()
    assert found == kind, message
    assert str(path) in message
    assert seconds < LONG
    assert nbytes < 64 << 20


@pytest.mark.parametrize("what", list(HEADERS))
def test_a03_hostile_headers_cost_little(hostile, what):
    check(hostile(HEADERS[what]()))


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001])
def test_a02_lengths_cost_nothing(hostile, length):
    check(hostile(b"{}", length, sparse=1 << 36))


def test_a02_a_header_of_zeros(hostile):
    check(hostile(b"{", 100_000_000, sparse=1 << 36))


def nested(name: str, text: bytes) -> bytes:
    """A header whose metadata string ``name`` holds JSON of its own; what has to be there is there."""
    meta = {"__crypto_keys__": "{}", "__encryption__": "{}", "__policy__": "{}", "__signature__": ""}
    keys = {"alg": "aes256gcm", "kid": "a", "kty": "oct"}, {"alg": "ed25519", "kid": "a", "kty": "okp"}
    meta["__crypto_keys__"] = json.dumps({"version": "2", "chunk_size": 65536, "enc": keys[0], "sign": keys[1]})
    meta["__policy__"] = json.dumps({"local": "", "remote": ""})
    meta["__signature__"] = "A" * 86 + "=="
    meta[name] = "PLACE"
    outer = json.dumps({"__metadata__": meta}).encode()
    return outer.replace(b"PLACE", text.replace(b"\\", b"\\\\").replace(b'"', b'\\"'))


SMALL = 8_000_000  # what is inside a string has been read and kept already: memory goes with its size
NESTED = {
    "lists": lambda: b"[" * SMALL,
    "objects": lambda: b'{"a":' * (SMALL // 5),
    "members": lambda: b"{" + b'"a":"",' * (SMALL // 9) + b'"b":""}',
    "numbers": lambda: b'{"a":[' + b"1," * (SMALL // 2) + b"1]}",
    "empty lists": lambda: b'{"a":[' + b"[]," * (SMALL // 3) + b"1]}",
}


@pytest.mark.parametrize("name", ["__crypto_keys__", "__encryption__", "__policy__", "__secure_loader__"])
@pytest.mark.parametrize("what", list(NESTED))
def test_a03_hostile_metadata_strings_cost_little(hostile, name, what):
    check(hostile(nested(name, NESTED[what]())))


def test_a_large_header_that_is_right_costs_a_few_times_its_size(hostile):
    """Not a refusal: what bounds the bound. A string of metadata may be as long as the header."""
    path = hostile(META + b'"a":"' + b"x" * 50_000_000 + b'"}}')
    kind, message, seconds, nbytes = open_it(path)
    assert kind == "accepted", message
    assert seconds < 2
    assert nbytes < 6 * 50_000_000


def test_many_tensors_that_are_right(hostile):
    n = 50_000
    entries = b",".join(
        b'"layers.%d.w":{"dtype":"U8","shape":[1,1],"data_offsets":[%d,%d]}' % (i, i, i + 1) for i in range(n)
    )
    path = hostile(b"{" + entries + b"}", sparse=n)
    kind, message, seconds, _ = open_it(path)
    assert kind == "accepted", message
    assert seconds < 3
