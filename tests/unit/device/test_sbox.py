"""The S-box circuit, gate by gate from the very text that is compiled, on all 256 inputs. Needs no compiler."""

from __future__ import annotations

import re

from tests.unit.device.shim import CSRC

GATE = re.compile(r"const u32 (\w+) = sl_lop3<(0x[0-9a-f]{2})>\((\w+), (\w+), (\w+)\);")
TEXT = (CSRC / "sbox.cuh").read_text()
GATES = GATE.findall(TEXT)


def times(a: int, b: int) -> int:
    """A product in the field of AES, FIPS 197 section 4.2."""
    product = 0
    for i in range(8):
        product ^= (a << i) * (b >> i & 1)
    for i in range(14, 7, -1):
        product ^= (0x11B << (i - 8)) * (product >> i & 1)
    return product


def sbox(x: int) -> int:
    """FIPS 197 section 5.1.1: the inverse, then an affine map."""
    y = 1
    for _ in range(254):
        y = times(y, x)
    turned = 0
    for shift in range(5):
        turned ^= (y << shift | y >> (8 - shift)) & 0xFF
    return turned ^ 0x63


def circuit(x: int) -> int:
    """The gates on one input."""
    inputs = dict(re.findall(r"(x\d) = a\[(\d)\]", TEXT))
    values = {name: x >> int(bit) & 1 for name, bit in inputs.items()} | {"0u": 0}
    for out, table, a, b, c in GATES:
        values[out] = int(table, 16) >> (values[a] << 2 | values[b] << 1 | values[c]) & 1
    return sum(values[name] << int(bit) for bit, name in re.findall(r"a\[(\d)\] = (s\d);", TEXT))


def test_every_gate_was_read():
    assert len(GATES) == TEXT.count("sl_lop3<0x") == 77


def test_the_circuit_is_the_sbox():
    assert [circuit(x) for x in range(256)] == [sbox(x) for x in range(256)]


def test_the_definition_is_that_of_fips_197():
    assert [sbox(x) for x in (0x00, 0x01, 0x53, 0xFF)] == [0x63, 0x7C, 0xED, 0x16]
