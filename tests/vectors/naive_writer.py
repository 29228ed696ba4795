"""A naive writer of encrypted files: a draft that is filled, spoilt on purpose where a test wants it, and signed.

Everything random comes from a counter hashed with a seed, so that a draft always gives the same bytes. Nothing here
may be used to protect anything.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA65PrivateKey

from . import DATA
from .naive import (
    BITS,
    DEFAULT_CHUNK,
    KEY_BYTES,
    canonical_prefix,
    check_value,
    cipher,
    key_bytes,
    normal_alg,
    recipient_info,
)
from .naive_hpke import open_wrapped, public_of, wrap
from .naive_json import b64, b64url, compact, unb64

RANK = [
    "BOOL",
    "F4",
    "F6_E2M3",
    "F6_E3M2",
    "U8",
    "I8",
    "F8_E5M2",
    "F8_E4M3",
    "F8_E8M0",
    "F8_E4M3FNUZ",
    "F8_E5M2FNUZ",
    "I16",
    "U16",
    "F16",
    "BF16",
    "I32",
    "U32",
    "F32",
    "C64",
    "F64",
    "I64",
    "U64",
]
ALLOW_ALL = "package model\nallow = true"
NOTICE = "encrypted: load with secure_loader, other readers see ciphertext"


class Stream:
    """Reproducible bytes: SHA-256 of seed and counter."""

    def __init__(self, seed: str):
        self.seed, self.count = seed, 0

    def take(self, n: int) -> bytes:
        out = b""
        while len(out) < n:
            out += hashlib.sha256(f"{self.seed}/{self.count}".encode()).digest()
            self.count += 1
        return out[:n]


def make_master(alg: str, kid: str, *, rfc: bool = False) -> dict:
    key = Stream(f"master {kid}").take(KEY_BYTES[alg])
    if rfc:
        names = {"aes256gcm": "A256GCM", "aes128gcm": "A128GCM", "chacha20poly1305": "C20P"}
        return {"alg": names[alg], "k": b64url(key), "kid": kid, "kty": "oct", "use": "enc"}
    return {"alg": alg, "k": b64(key), "kid": kid, "kty": "oct"}


def make_signer(kid: str, *, rfc: bool = False, seed: str | None = None) -> dict:
    private = Ed25519PrivateKey.from_private_bytes(Stream(f"signer {seed or kid}").take(32))
    d, x = private.private_bytes_raw(), private.public_key().public_bytes_raw()
    if rfc:
        return {
            "alg": "EdDSA",
            "crv": "Ed25519",
            "d": b64url(d),
            "kid": kid,
            "kty": "OKP",
            "use": "sig",
            "x": b64url(x),
        }
    return {"alg": "ed25519", "d": b64(d), "kid": kid, "kty": "okp", "x": b64(x)}


def make_second(kid: str, *, seed: str | None = None) -> dict:
    """A post-quantum key, to sign beside the signer of that kid."""
    seed_bytes = Stream(f"second {seed or kid}").take(32)
    pub = MLDSA65PrivateKey.from_seed_bytes(seed_bytes).public_key().public_bytes_raw()
    return {"alg": "ML-DSA-65", "kid": kid, "kty": "AKP", "priv": b64url(seed_bytes), "pub": b64url(pub), "use": "sig"}


def public(jwk: dict) -> dict:
    return {k: v for k, v in jwk.items() if k not in ("d", "priv")}


def sign(signer: dict, message: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(key_bytes(signer["d"])).sign(message)


# ML-DSA as the library has it is randomised. So that vectors can be made again, signatures that were made once are kept.
SECOND_SIGNATURES = DATA / "keys" / "second-signatures.json"
USED: dict[str, str] = {}


def sign_second(key: dict, message: bytes) -> bytes:
    name = hashlib.sha256(key["pub"].encode() + message).hexdigest()
    kept = json.loads(SECOND_SIGNATURES.read_bytes()) if SECOND_SIGNATURES.exists() else {}
    if name not in USED:
        private = MLDSA65PrivateKey.from_seed_bytes(key_bytes(key["priv"]))
        USED[name] = kept.get(name) or b64(private.sign(message))
        private.public_key().verify(unb64(USED[name], "kept"), message)
    return unb64(USED[name], "kept")


# So is what is wrapped for an identity.
WRAPPED_KEYS = DATA / "keys" / "wrapped-keys.json"
WRAPPED: dict[str, str] = {}


def make_identity(kid: str, *, seed: str | None = None) -> dict:
    """A private identity (B.5)."""
    private = Stream(f"identity {seed or kid}").take(32)
    return {
        "alg": "MLKEM768-X25519",
        "kid": kid,
        "kty": "AKP",
        "priv": b64url(private),
        "pub": b64url(public_of(private)),
        "use": "enc",
    }


def wrap_for(identity: dict, master: dict, context: dict[str, str]) -> bytes:
    """A master key wrapped for an identity."""
    info = recipient_info(**context)
    name = hashlib.sha256(identity["pub"].encode() + key_bytes(master["k"]) + info).hexdigest()
    kept = json.loads(WRAPPED_KEYS.read_bytes()) if WRAPPED_KEYS.exists() else {}
    if name not in WRAPPED:
        ephemeral = Stream(f"wrapped {name}").take(32)
        WRAPPED[name] = kept.get(name) or b64(wrap(key_bytes(identity["pub"]), key_bytes(master["k"]), info, ephemeral))
        if open_wrapped(key_bytes(identity["priv"]), unb64(WRAPPED[name], "kept"), info) != key_bytes(master["k"]):
            raise ValueError(name)
    return unb64(WRAPPED[name], "kept")


def layout(tensors: dict[str, tuple[str, list[int], bytes]]) -> list[str]:
    """Order of the tensors in the body: CryptoTensors' own, with empty tensors spread so that few share an offset."""
    order = sorted(tensors, key=lambda name: (-RANK.index(tensors[name][0]), name))
    full = [name for name in order if tensors[name][2]]
    empty = sorted(name for name in order if not tensors[name][2])
    out = []
    for name in full:
        out += [*empty[:1], name]
        empty = empty[1:]
    return out + empty


@dataclass
class Draft:
    """A file before it is signed. Tests change any of it to sign a defect."""

    entries: dict[str, dict]
    body: bytearray
    crypto_keys: dict
    encryption: dict
    policy: dict
    profile: dict | None
    signer: dict
    master: dict
    extra: dict[str, str] = field(default_factory=dict)
    deks: dict[str, bytes] = field(default_factory=dict)
    second: dict | None = None

    def stored(self, name: str) -> bytes:
        begin, end = self.entries[name]["data_offsets"]
        return bytes(self.body[begin:end])

    def digests(self) -> None:
        """Compute the signed digests of the bytes as they now stand."""
        piece = self.profile["digest"]["chunk_size"]
        out = {}
        for name in self.entries:
            stored = self.stored(name)
            digests = (hashlib.sha256(stored[i : i + piece]).digest() for i in range(0, len(stored), piece))
            out[name] = b64(b"".join(digests))
        self.profile["digest"]["tensors"] = out

    def metadata(self) -> dict[str, str]:
        """The metadata strings, all but the signature."""
        meta = {
            "__crypto_keys__": compact(self.crypto_keys, sort=True),
            "__encryption__": compact(dict(sorted(self.encryption.items()))),
            "__policy__": compact(self.policy, sort=True),
        }
        if self.profile is not None:
            meta["__secure_loader__"] = compact(self.profile, sort=True)
        return meta | self.extra

    def signed(self, meta: dict[str, str] | None = None) -> dict[str, str]:
        """The metadata with its signature."""
        meta = dict(sorted((self.metadata() if meta is None else meta).items()))
        if self.second is not None:
            signature = sign_second(self.second, compact({"__metadata__": meta} | self.entries).encode())
            meta = dict(sorted((meta | {"__signature_mldsa65__": b64(signature)}).items()))
        message = compact({"__metadata__": meta} | self.entries).encode()
        return dict(sorted((meta | {"__signature__": b64(sign(self.signer, message))}).items()))

    def text(self, meta: dict[str, str] | None = None) -> bytes:
        """The header's JSON, signed."""
        return compact({"__metadata__": self.signed(meta)} | self.entries).encode()

    def file(self, meta: dict[str, str] | None = None) -> bytes:
        """The whole file as profile 1 has it, or with CryptoTensors' own padding."""
        return assemble(self.text(meta), bytes(self.body), 4096 if self.profile is not None else 8)


def assemble(text: bytes, body: bytes, align: int | None = 4096) -> bytes:
    """Length, header, padding, body. `align` None: no padding at all."""
    if align == 4096:
        text = canonical_prefix(text)
    elif align:
        text += b" " * (-(8 + len(text)) % align)
    return len(text).to_bytes(8, "little") + text + body


def seal(draft: Draft, name: str, plain: bytes, stream: Stream, chunk: int | None) -> None:
    """Encrypt one tensor into the draft."""
    alg = normal_alg(draft.crypto_keys["enc"]["alg"])
    dek, key_iv, iv = stream.take(KEY_BYTES[alg]), stream.take(12), stream.take(8) + bytes(4)
    draft.deks[name] = dek
    wrapped = cipher(alg, key_bytes(draft.master["k"])).encrypt(key_iv, dek, None)
    record = {"wrapped_key": b64(wrapped[:-16]), "key_iv": b64(key_iv), "key_tag": b64(wrapped[-16:])}
    if chunk is None:
        sealed = cipher(alg, dek).encrypt(iv, plain, None)
        record |= {"iv": b64(iv), "tag": b64(sealed[-16:])} if plain else {"iv": "", "tag": ""}
        stored = sealed[:-16]
    else:
        stored, tags = b"", b""
        for i in range(max(1, -(-len(plain) // chunk))):
            nonce = iv[:8] + (int.from_bytes(iv[8:], "big") + i).to_bytes(4, "big")
            sealed = cipher(alg, dek).encrypt(nonce, plain[i * chunk : (i + 1) * chunk], None)
            stored, tags = stored + sealed[:-16], tags + sealed[-16:]
        record |= {"base_iv": b64(iv), "tags": b64(tags)}
    begin, end = draft.entries[name]["data_offsets"]
    draft.body[begin:end] = stored
    draft.encryption[name] = record


def draft_file(
    tensors: dict[str, tuple[str, list[int], bytes]],
    master: dict,
    signer: dict,
    *,
    seed: str = "file",
    version: str = "2",
    chunk: int = 4096,
    encrypt: list[str] | None = None,
    profile: bool = True,
    metadata: dict[str, str] | None = None,
    model_id: str = "acme/tiny",
    release: int = 3,
    shard: tuple[int, int] = (1, 1),
    order: list[str] | None = None,
) -> Draft:
    """A correct draft of `tensors` (name -> dtype, shape, bytes). `encrypt` None: all that are not empty."""
    stream = Stream(f"stream {seed}")
    entries, at = {}, 0
    for name in order or layout(tensors):
        dtype, shape, data = tensors[name]
        bits = BITS[dtype]
        for n in shape:
            bits *= n
        if bits != 8 * len(data):
            raise ValueError(name)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    body = bytearray(b"".join(tensors[name][2] for name in entries))
    alg = normal_alg(master["alg"])
    keys = {
        "enc": {"alg": alg, "kid": master["kid"], "kty": "oct"},
        "sign": {"alg": "ed25519", "kid": signer["kid"], "kty": "okp"},
        "version": version,
    }
    if version == "2":
        keys["chunk_size"] = chunk
    policy = {"local": ALLOW_ALL, "remote": ALLOW_ALL}
    extra = {"format": "pt"} | ({"__notice__": NOTICE} if profile else {}) | (metadata or {})
    draft = Draft(entries, body, keys, {}, policy, None, signer, master, extra)
    for name in entries:
        if tensors[name][2] if encrypt is None else name in encrypt:
            seal(draft, name, tensors[name][2], stream, keys.get("chunk_size"))
    if profile:
        file_id = stream.take(16)
        draft.profile = {
            "profile": 1,
            "file_id": file_id.hex(),
            "model_id": model_id,
            "release": release,
            "shard": list(shard),
            "created": "2026-01-02T03:04:05Z",
            "kcv": b64(check_value(key_bytes(master["k"]), file_id)),
            "digest": {"alg": "sha256", "chunk_size": keys.get("chunk_size", DEFAULT_CHUNK), "tensors": {}},
        }
        draft.digests()
    return draft
