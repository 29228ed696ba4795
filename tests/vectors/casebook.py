"""What every case file uses: the keys, the base tensors, and the text header that a vector starts with."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from .naive_json import unb64
from .naive_writer import Draft, draft_file, make_identity, make_master, make_second, make_signer, public

ORIGIN = "tests/vectors/make.py"
MASTERS = {
    "aes256gcm": make_master("aes256gcm", "m-aes256"),
    "aes128gcm": make_master("aes128gcm", "m-aes128"),
    "chacha20poly1305": make_master("chacha20poly1305", "m-chacha"),
}
MASTER = MASTERS["aes256gcm"]
SIGNER = make_signer("s-publisher")
STRANGER = make_signer("s-stranger")
SECOND = make_signer("s-second")
QUANTUM = make_second("s-publisher")
OTHER_QUANTUM = make_second("s-publisher", seed="s-imposter")
BOB = make_identity("r-bob")
IMPOSTER_BOB = make_identity("r-bob", seed="r-imposter")

# File name under data/keys -> JWKs. The private ones are test keys made from their names: worthless by construction.
KEY_FILES: dict[str, list[dict]] = {
    "keys/masters.json": [*MASTERS.values()],
    "keys/masters-rfc.json": [make_master(alg, jwk["kid"], rfc=True) for alg, jwk in MASTERS.items()],
    "keys/masters-other.json": [make_master("aes256gcm", "m-other")],
    "keys/masters-wrong.json": [make_master("aes256gcm", "m-not-this-one") | {"kid": "m-aes256"}],
    "keys/masters-128.json": [make_master("aes128gcm", "m-too-short") | {"kid": "m-aes256"}],
    "keys/identity.json": [BOB],
    "keys/identity-imposter.json": [IMPOSTER_BOB],
    "keys/signers-private.json": [SIGNER, SECOND, STRANGER],
    "keys/trusted.json": [public(SIGNER), public(SECOND)],
    "keys/trusted-rfc.json": [public(make_signer("s-publisher", rfc=True)), public(make_signer("s-second", rfc=True))],
    "keys/trusted-quantum.json": [public(SIGNER), public(QUANTUM), public(SECOND)],
    "keys/trusted-imposter.json": [public(make_signer("s-publisher", seed="s-imposter"))],
}
KEYS, TRUST = "keys/masters.json", "keys/trusted.json"

Tensors = dict[str, tuple[str, list[int], bytes]]
TINY: Tensors = {
    "v": ("F32", [2, 3], bytes(range(24))),
    "w": ("F32", [2, 3], bytes(range(24, 48))),
    "c": ("U8", [5], b"clear"),
}
# One chunk and a bit: the smallest that shows what happens between chunks.
CHUNKED: Tensors = {"w": ("U8", [4100], bytes(i * 7 % 251 for i in range(4100))), "x": ("U8", [3], b"xyz")}


@dataclass
class Case:
    name: str
    expect: str
    comment: str
    data: bytes
    tensors: Tensors = field(default_factory=dict)
    keys: str = KEYS
    trust: str = TRUST
    kind: str = "file"
    allow: str = ""
    integrity: str = ""
    floor: int = 0
    cryptotensors: str = ""
    attacks: str = ""
    provenance: str = ORIGIN

    def head(self) -> list[str]:
        lines = [f"expect: {self.expect}", f"kind: {self.kind}", f"comment: {self.comment}"]
        lines += [f"keys: {self.keys}", f"trust: {self.trust}"]
        for key in ("allow", "integrity", "cryptotensors", "attacks"):
            if getattr(self, key):
                lines.append(f"{key}: {getattr(self, key)}")
        if self.floor:
            lines.append(f"floor: {self.floor}")
        lines.append(f"provenance: {self.provenance}")
        for name, (dtype, shape, data) in self.tensors.items():
            sizes = json.dumps(shape, separators=(",", ":"))
            lines.append(f"tensor: {hashlib.sha256(data).hexdigest()} {dtype} {sizes} {json.dumps(name)}")
        return lines

    def raw(self) -> bytes:
        """The vector file. Long runs of padding are left out and noted: they would be most of all bytes."""
        lines, data = self.head(), self.data
        for run in reversed(list(re.finditer(rb" {64,}|\x00{64,}|A{64,}", data))):
            lines.append(f"fill: {run.start()} {run.end() - run.start()} {data[run.start()]:02x}")
            data = data[: run.start()] + data[run.end() :]
        return ("\n".join(lines) + "\n\n").encode() + data


Edit = Callable[[Draft], object]


def tiny(seed: str, **options) -> Draft:
    """Two encrypted tensors and a clear one."""
    options.setdefault("encrypt", ["v", "w"])
    return draft_file(TINY, options.pop("master", MASTER), options.pop("signer", SIGNER), seed=seed, **options)


def chunked(seed: str, **options) -> Draft:
    """One tensor of two chunks, one of one."""
    return draft_file(CHUNKED, options.pop("master", MASTER), SIGNER, seed=seed, **options)


def signed_defect(name: str, expect: str, comment: str, edit: Edit, *, attacks: str = "", **options) -> Case:
    """A file whose publisher signed the defect: only the check in question can refuse it."""
    draft = tiny(name, **options)
    edit(draft)
    legacy = {} if draft.profile is not None else {"allow": "legacy unverified-clear"}
    return Case(name, expect, comment, draft.file(), attacks=attacks, **legacy)


def flip(data: bytes, at: int) -> bytes:
    """`data` with one bit changed."""
    out = bytearray(data)
    out[at] ^= 1
    return bytes(out)


def text64(record: dict, member: str) -> bytes:
    """A base64 member of a record, decoded."""
    return unb64(record[member], member)
