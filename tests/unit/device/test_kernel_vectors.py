"""The vectors of NIST and of Wycheproof, each set as a few batches of many keys."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from secure_loader.core.device import abi
from tests.unit.device.proof import Device, Message

VECTORS = Path(__file__).parents[2] / "vectors/gcm"
BATCH = 200


def check(shim, cases: list[tuple[bytes, bytes, bytes, bytes, bytes, bytes | None]]) -> tuple[int, int]:
    """Open every case, and seal it again where there is a plaintext.

    Args:
        cases: Key, nonce, AAD, ciphertext, tag, and the plaintext, or None where the tag is wrong.

    Returns:
        How many were good, and how many were to be rejected.
    """
    for start in range(0, len(cases), BATCH):
        some = cases[start : start + BATCH]
        at, messages = 0, []
        for index, (_, nonce, aad, sealed, tag, plain) in enumerate(some):
            message = Message(sealed if plain is None else plain, at, index, nonce, aad)
            message.sealed, message.tag = sealed, tag
            messages.append(message)
            at += len(sealed) + index % 3
        device = Device(shim, [case[0] for case in some], messages)
        memory = device.place([case[3] for case in some])
        wanted = [abi.REJECTED if case[5] is None else abi.VERIFIED for case in some]
        assert device.open(memory) == wanted
        for message, case in zip(messages, some, strict=True):
            if case[5] is not None:
                assert memory.read(message.offset, len(case[5])) == case[5]
        memory = device.place([m.plain for m in messages])
        tags = device.seal(memory)
        for message, tag, case in zip(messages, tags, some, strict=True):
            if case[5] is not None:
                assert (memory.read(message.offset, len(case[3])), tag) == (case[3], case[4])
    bad = sum(case[5] is None for case in cases)
    return len(cases) - bad, bad


def test_nist(shim):
    cases, fields = [], {}
    lines = gzip.decompress((VECTORS / "nist.rsp.gz").read_bytes()).decode().splitlines()
    for line in [*lines, "Count = end"]:
        name, _, value = line.partition(" = ")
        if name == "Count" and fields:
            plain = None if "FAIL" in fields else bytes.fromhex(fields["PT"])
            cases.append((*(bytes.fromhex(fields[key]) for key in ("Key", "IV", "AAD", "CT", "Tag")), plain))
            fields = {}
        elif not name.startswith(("#", "Count")):
            fields[name.strip(" =")] = value
    assert check(shim, cases) == (279, 121)


def test_wycheproof(shim):
    groups = json.loads(gzip.decompress((VECTORS / "wycheproof.json.gz").read_bytes()))["testGroups"]
    groups = [g for g in groups if g["ivSize"] == 96 and g["tagSize"] == 128 and g["keySize"] in (128, 256)]
    cases = [
        (
            *(bytes.fromhex(test[key]) for key in ("key", "iv", "aad", "ct", "tag")),
            bytes.fromhex(test["msg"]) if test["result"] == "valid" else None,
        )
        for group in groups
        for test in group["tests"]
    ]
    good, bad = check(shim, cases)
    assert (good + bad, bad) == (133, 54)
