"""A deliberately naive reader of one encrypted file, written from docs/format.md parts A, B and D.

It shares no line with `secure_loader`: whole file in memory, one tensor after the other, digests always checked.
Where the two readers disagree, one of them or the specification is wrong.
"""

from __future__ import annotations

import hashlib
import hmac
import re

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA65PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from .naive_hpke import open_wrapped
from .naive_json import (
    AuthenticationError,
    FormatError,
    KeyAccessError,
    NotEncryptedError,
    PolicyDeniedError,
    SignatureError,
    UnsupportedVersionError,
    UntrustedSignerError,
    compact,
    members,
    strict_json,
    unb64,
)

MAX_HEADER = 100_000_000
MAX_TENSORS = 1_000_000
MAX_INT = 2**63 - 1
MAX_RELEASE = 2**53 - 1
DEFAULT_CHUNK = 2097152
BITS = {
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"], 8),
    **dict.fromkeys(["I16", "U16", "F16", "BF16"], 16),
    **dict.fromkeys(["I32", "U32", "F32"], 32),
    **dict.fromkeys(["C64", "F64", "I64", "U64"], 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
KEY_BYTES = {"aes128gcm": 16, "aes256gcm": 32, "chacha20poly1305": 32}
# RFC 7518 has names for two of them and for wrapping with them; "C20P" is what JOSE drafts call the third.
JWK_ALGS = {"a128gcm": "aes128gcm", "a256gcm": "aes256gcm", "c20p": "chacha20poly1305"}
JWK_ALGS |= {f"{name}kw": alg for name, alg in JWK_ALGS.items()}
FOUR = ("__crypto_keys__", "__encryption__", "__policy__", "__signature__")
OURS = "__secure_loader__"
NOTICE = "__notice__"
SECOND = "__signature_mldsa65__"
PRIVATE = {"k", "d", "p", "q", "dp", "dq", "qi", "priv"}
ALLOW = re.compile(r"\s*package\s+model\s+(default\s+)?allow\s*:?=\s*true\s*")


def cipher(alg: str, key: bytes):
    return ChaCha20Poly1305(key) if alg == "chacha20poly1305" else AESGCM(key)


def unseal(alg: str, key: bytes, nonce: bytes, data: bytes, tag: bytes, what: str) -> bytes:
    try:
        return cipher(alg, key).decrypt(nonce, data + tag, None)
    except InvalidTag:
        raise AuthenticationError(f"{what}: tag mismatch") from None


def normal_alg(alg) -> str:
    return alg.replace("-", "").lower() if isinstance(alg, str) else ""


def is_int(value, low: int = 0, high: int = MAX_INT) -> bool:
    return type(value) is int and low <= value <= high


# --- the safetensors header (D.3) ---------------------------------------------------------------------------------


class Tensor:
    def __init__(self, name: str, entry):
        members(entry, {"dtype", "shape", "data_offsets"}, set(), f"entry of {name!r}")
        self.name, self.dtype, self.shape, offsets = name, entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(self.dtype, str) or self.dtype not in BITS:
            raise FormatError("unknown dtype")
        if not isinstance(self.shape, list) or not all(is_int(n) for n in self.shape):
            raise FormatError("shape")
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(is_int(n) for n in offsets):
            raise FormatError("data_offsets")
        self.begin, self.end = offsets
        bits = BITS[self.dtype]
        for n in self.shape:
            bits *= n
            if bits > MAX_INT:
                raise FormatError("shape overflows")
        if bits % 8 or self.end - self.begin != bits // 8:
            raise FormatError("offsets do not fit dtype and shape")

    @property
    def size(self) -> int:
        return self.end - self.begin

    def entry(self) -> dict:
        return {"dtype": self.dtype, "shape": self.shape, "data_offsets": [self.begin, self.end]}


class File:
    """The safetensors layer: `meta` (None when absent), `tensors` in order of offsets, `body`, `text` (padded JSON)."""

    def __init__(self, data: bytes):
        if len(data) < 8:
            raise FormatError("shorter than the length field")
        n = int.from_bytes(data[:8], "little")
        if n < 2 or n > MAX_HEADER or n > len(data) - 8:
            raise FormatError("header length")
        self.text, self.body = data[8 : 8 + n], data[8 + n :]
        if self.text[:1] != b"{":
            raise FormatError("header does not start with '{'")
        if not self.text.rstrip(b" ").endswith(b"}"):
            raise FormatError("only spaces may follow the header's '}'")
        doc = strict_json(self.text)
        self.meta = None
        if "__metadata__" in doc:
            self.meta = doc.pop("__metadata__")
            if not isinstance(self.meta, dict) or not all(isinstance(v, str) for v in self.meta.values()):
                raise FormatError("__metadata__ must be an object of strings")
        if len(doc) > MAX_TENSORS:
            raise FormatError("too many tensors")
        # Python's sort is stable: ties stay in file order, which is what the signature covers (A.7).
        self.tensors = sorted((Tensor(k, v) for k, v in doc.items()), key=lambda t: (t.begin, t.end))
        at = 0
        for t in self.tensors:
            if t.begin != at:
                raise FormatError("hole or overlap")
            at = t.end
        if at != len(self.body):
            raise FormatError("the tensors do not cover the body")
        self.by_name = {t.name: t for t in self.tensors}

    def json(self, without: tuple[str, ...] = (), ties_by_name: bool = False) -> bytes:
        meta = {k: v for k, v in sorted((self.meta or {}).items()) if k not in without}
        order = sorted(self.tensors, key=lambda t: (t.begin, t.end, t.name)) if ties_by_name else self.tensors
        return compact({"__metadata__": meta} | {t.name: t.entry() for t in order}).encode()


def canonical_prefix(text: bytes) -> bytes:
    """Header bytes as profile 1 demands them (B.2): the JSON and the fewest spaces that align the body."""
    return text + b" " * (-(8 + len(text)) % 4096)


# --- the CryptoTensors metadata (D.5) -----------------------------------------------------------------------------


def inner(meta: dict, key: str) -> dict:
    value = strict_json(meta[key])
    if not isinstance(value, dict):
        raise FormatError(f"{key} is not an object")
    return value


def jwk_hint(value, what: str, kty: str, strict: bool) -> dict:
    if not isinstance(value, dict):
        raise FormatError(f"{what} is not an object")
    if PRIVATE & set(value):
        raise FormatError(f"{what} embeds a private key")
    kid = value.get("kid")
    if not isinstance(kid, str) or not re.fullmatch(r"[^\x00-\x1f\x7f/]{1,256}", kid):
        raise FormatError(f"{what}: kid")
    if not isinstance(value.get("alg"), str) or str(value.get("kty")).lower() != kty:
        raise FormatError(f"{what}: kty or alg")
    if "jku" in value and not isinstance(value["jku"], str):
        raise FormatError(f"{what}: jku")
    if strict:
        members(value, {"alg", "kid", "kty"}, {"jku", "x5c"} if what == "sign" else {"jku"}, what)
        if "x5c" in value:
            certificates(value["x5c"])
        if value["kty"] != kty:
            raise FormatError(f"{what}: kty")
    return value


def certificates(value) -> None:
    """The form of x5c: whether to trust it is not for this reader, which has trusted keys only (B.6)."""
    if not isinstance(value, list) or not 1 <= len(value) <= 10:
        raise FormatError("x5c is no array of 1 to 10")
    ders = [unb64(text, "x5c") for text in value]
    if not all(ders) or sum(map(len, ders)) > 65536:
        raise FormatError("x5c lengths")


class Envelope:
    def __init__(self, file: File):
        meta = file.meta
        self.strict = OURS in meta
        self.profile = inner(meta, OURS) if self.strict else None
        if self.strict and not (is_int(self.profile.get("profile")) and self.profile["profile"] == 1):
            raise UnsupportedVersionError("profile")
        self.crypto_keys(inner(meta, "__crypto_keys__"))
        self.records = inner(meta, "__encryption__")
        seen = set()
        for name, record in self.records.items():
            if name not in file.by_name:
                raise FormatError(f"a record names {name!r}, which is no tensor")
            self.check_record(record, file.by_name[name].size)
            if record["key_iv"] in seen:
                raise FormatError("key_iv used twice")
            seen.add(record["key_iv"])
        self.policy = inner(meta, "__policy__")
        if not all(isinstance(self.policy.get(k), str) for k in ("local", "remote")):
            raise FormatError("__policy__")
        self.signature = unb64(meta["__signature__"], "__signature__")
        if len(self.signature) != 64:
            raise FormatError("__signature__ length")
        self.second = None
        if self.strict and SECOND in meta:
            self.second = unb64(meta[SECOND], SECOND)
            if len(self.second) != 3309:
                raise FormatError("length of the second signature")
        if self.strict:
            members(self.policy, {"local", "remote"}, set(), "__policy__")
            self.check_profile(file)
            unknown = [k for k in meta if k.startswith("__") and k not in (*FOUR, OURS, NOTICE, SECOND)]
            if unknown:
                raise FormatError(f"unknown reserved metadata {unknown}")

    def crypto_keys(self, doc: dict) -> None:
        version = doc.get("version")
        if not isinstance(version, str) or version not in ("1", "2"):
            raise UnsupportedVersionError("version")
        # Version 1 has no chunks, version 2 without a size has the default; files that mix them follow the size.
        self.chunk = doc.get("chunk_size", DEFAULT_CHUNK if version == "2" else None)
        if "chunk_size" in doc and not is_int(doc["chunk_size"], 4096, 2**40):
            raise FormatError("chunk_size")
        if self.strict:
            members(doc, {"enc", "sign", "version"}, {"chunk_size"}, "__crypto_keys__")
            if (version == "2") != ("chunk_size" in doc):
                raise FormatError("chunk_size belongs to version 2, and to it alone")
        self.enc = jwk_hint(doc.get("enc"), "enc", "oct", self.strict)
        self.sign = jwk_hint(doc.get("sign"), "sign", "okp", self.strict)
        self.alg = self.enc["alg"] if self.strict else normal_alg(self.enc["alg"])
        sign_alg = self.sign["alg"] if self.strict else self.sign["alg"].lower()
        if self.alg not in KEY_BYTES or sign_alg != "ed25519":
            raise UnsupportedVersionError("algorithm")

    def check_record(self, record, size: int) -> None:
        iv, tags = ("iv", "tag") if self.chunk is None else ("base_iv", "tags")
        names = ("wrapped_key", "key_iv", "key_tag", iv, tags)
        if not isinstance(record, dict) or not set(names) <= set(record):
            raise FormatError("record lacks a member")
        if self.strict:
            members(record, set(names), set(), "record")
        if self.chunk is None:
            lengths = (KEY_BYTES[self.alg], 12, 16, 12, 16) if size else (KEY_BYTES[self.alg], 12, 16, 0, 0)
        else:
            chunks = max(1, -(-size // self.chunk))
            if chunks > 2**32:
                raise FormatError("too many chunks")
            lengths = (KEY_BYTES[self.alg], 12, 16, 12, 16 * chunks)
        for name, length in zip(names, lengths, strict=True):
            if len(unb64(record[name], name)) != length:
                raise FormatError(f"{name} length")
        if self.chunk is not None and int.from_bytes(unb64(record[iv], iv)[8:], "big") + chunks - 1 > 0xFFFFFFFF:
            raise FormatError("chunk counter overflows")

    def check_profile(self, file: File) -> None:
        p = self.profile
        names = {"profile", "file_id", "model_id", "release", "shard", "created", "kcv", "digest"}
        members(p, names, {"recipients"}, OURS)
        if "recipients" in p:
            check_recipients(p["recipients"])
        check_text(p["file_id"], r"[0-9a-f]{32}", "file_id")
        check_identity(p)
        shard = p["shard"]
        if not isinstance(shard, list) or len(shard) != 2 or not all(is_int(n) for n in shard):
            raise FormatError("shard")
        if not 1 <= shard[0] <= shard[1]:
            raise FormatError("shard")
        if len(unb64(p["kcv"], "kcv")) != 16:
            raise FormatError("kcv length")
        digest = members(p["digest"], {"alg", "chunk_size", "tensors"}, set(), "digest")
        if digest["alg"] != "sha256":
            raise UnsupportedVersionError("digest.alg")
        self.piece = digest["chunk_size"]
        if not is_int(self.piece) or self.piece != (self.chunk or DEFAULT_CHUNK):
            raise FormatError("digest.chunk_size")
        tensors = members(digest["tensors"], set(file.by_name), set(), "digest.tensors")
        for name, text in tensors.items():
            if len(unb64(text, "digest")) != 32 * -(-file.by_name[name].size // self.piece):
                raise FormatError("digest length")

    def is_canonical(self, meta: dict) -> bool:
        """Whether the inner JSON is spelt as B.3 demands."""
        iv, tags = ("iv", "tag") if self.chunk is None else ("base_iv", "tags")
        order = ("wrapped_key", "key_iv", "key_tag", iv, tags)
        records = {name: {m: record[m] for m in order} for name, record in sorted(self.records.items())}
        return (
            meta["__crypto_keys__"] == compact(strict_json(meta["__crypto_keys__"]), sort=True)
            and meta["__encryption__"] == compact(records)
            and meta["__policy__"] == compact(self.policy, sort=True)
            and meta[OURS] == compact(self.profile, sort=True)
        )


def check_recipients(entries) -> None:
    if not isinstance(entries, list) or not 1 <= len(entries) <= 64:
        raise FormatError("recipients")
    for entry in entries:
        members(entry, {"alg", "kid", "wrapped"}, set(), "recipient")
        check_text(entry["alg"], r"[a-z0-9][a-z0-9.-]{0,31}", "alg of a recipient")
        check_text(entry["kid"], r"[^\x00-\x1f\x7f]{1,512}", "kid of a recipient")
        if not 1 <= len(unb64(entry["wrapped"], "wrapped")) <= 8192:
            raise FormatError("wrapped key length")
    names = [(entry["alg"], entry["kid"]) for entry in entries]
    if names != sorted(set(names)):
        raise FormatError("recipients not in order, or twice")


def check_text(value, pattern: str, what: str) -> None:
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise FormatError(what)


def check_identity(doc: dict) -> None:
    """The three members that files and manifests share."""
    check_text(doc["model_id"], r"[^\x00-\x1f\x7f]{1,256}", "model_id")
    check_text(doc["created"], r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z", "created")
    if not is_int(doc["release"], 0, MAX_RELEASE):
        raise FormatError("release")


# --- keys (D.6, D.8) ----------------------------------------------------------------------------------------------


def key_bytes(text) -> bytes:
    """JWK files come in both alphabets: CryptoTensors' padded standard one and RFC 7515's."""
    return unb64(text.replace("-", "+").replace("_", "/").rstrip("=") + "=" * (-len(text.rstrip("=")) % 4), "JWK")


def verify(trust: list[dict], kid: str, message: bytes, signature: bytes, second: tuple | None = None) -> None:
    """`second`: message and signature of the post-quantum key, or None where the document has none."""
    found = {key_bytes(k["x"]) for k in trust if k.get("kid") == kid and k.get("kty") in ("OKP", "okp")}
    if len(found) != 1:
        raise UntrustedSignerError(f"{len(found)} trusted keys are called {kid!r}")
    try:
        Ed25519PublicKey.from_public_bytes(found.pop()).verify(signature, message)
    except InvalidSignature:
        raise SignatureError("signature mismatch") from None
    demanded = {key_bytes(k["pub"]) for k in trust if k.get("kid") == kid and k.get("alg") == "ML-DSA-65"}
    if demanded and (len(demanded) > 1 or second is None):
        raise UntrustedSignerError(f"{kid!r} has {len(demanded)} second keys, and the signature is {second}")
    if demanded:
        try:
            MLDSA65PublicKey.from_public_bytes(demanded.pop()).verify(second[1], second[0])
        except InvalidSignature:
            raise SignatureError("second signature mismatch") from None


def check_value(key: bytes, file_id: bytes) -> bytes:
    """HKDF-SHA256 (RFC 5869), one block, spelt out."""
    prk = hmac.new(file_id, key, hashlib.sha256).digest()
    return hmac.new(prk, b"secure_loader kcv v1" + b"\x01", hashlib.sha256).digest()[:16]


def recipient_info(alg: str, kid: str, model_id: str) -> bytes:
    """What an entry of the list of recipients is bound to (B.5)."""
    return b"secure_loader recipient v1\0" + compact({"alg": alg, "kid": kid, "model_id": model_id}).encode()


def unwrapped(keys: list[dict], envelope: Envelope) -> bytes | None:
    """The master key as it is wrapped for one of the reader's identities, if it is."""
    for entry in (envelope.profile or {}).get("recipients", []):
        seeds = {key_bytes(k["priv"]) for k in keys if k.get("kty") == "AKP" and k.get("kid") == entry["kid"]}
        if entry["alg"] != "mlkem768-x25519" or not seeds:
            continue
        if len(seeds) > 1:
            raise KeyAccessError(f"{len(seeds)} identities are called {entry['kid']!r}")
        info = recipient_info(envelope.alg, envelope.enc["kid"], envelope.profile["model_id"])
        return open_wrapped(seeds.pop(), unb64(entry["wrapped"], "wrapped"), info)
    return None


def master_key(keys: list[dict], envelope: Envelope) -> bytes:
    found = [k for k in keys if k.get("kid") == envelope.enc["kid"] and k.get("kty") == "oct"]
    key = unwrapped(keys, envelope) if not found else None
    if key is None:
        if len(found) != 1:
            raise KeyAccessError(f"{len(found)} master keys are called {envelope.enc['kid']!r}")
        key = key_bytes(found[0]["k"])
        alg = normal_alg(found[0].get("alg"))
        if JWK_ALGS.get(alg, alg) != envelope.alg:
            raise KeyAccessError("the key is for another algorithm")
    if len(key) != KEY_BYTES[envelope.alg]:
        raise KeyAccessError("the key is for another algorithm")
    if envelope.profile:
        kcv = check_value(key, bytes.fromhex(envelope.profile["file_id"]))
        if not hmac.compare_digest(kcv, unb64(envelope.profile["kcv"], "kcv")):
            raise KeyAccessError("the key of that name is another key (kcv)")
    return key


# --- all of it, in the order of D.1 -------------------------------------------------------------------------------


def open_file(data: bytes, trust: list[dict], *, require_profile: bool = True) -> tuple[File, Envelope]:
    """Everything that needs no secret: form, signature, policy."""
    file = File(data)
    meta = file.meta or {}
    if not any(k in meta for k in (*FOUR, OURS)):
        raise NotEncryptedError("a plain safetensors file")
    if not all(k in meta for k in FOUR):
        raise FormatError("cryptographic metadata was removed in part")
    envelope = Envelope(file)
    if envelope.profile is None and require_profile:
        raise NotEncryptedError("profile 1 is required, this is plain CryptoTensors")
    message = file.json(without=("__signature__",))
    canonical = envelope.profile is None or (
        file.text == canonical_prefix(file.json(ties_by_name=True)) and envelope.is_canonical(meta)
    )
    if not canonical:
        raise SignatureError("not the canonical form: rewritten after signing")
    second = None
    if envelope.second is not None:
        second = file.json(without=("__signature__", SECOND)), envelope.second
    verify(trust, envelope.sign["kid"], message, envelope.signature, second)
    if not ALLOW.fullmatch(envelope.policy["local"]):
        raise PolicyDeniedError("a local policy that is not evaluated counts as denied")
    return file, envelope


def read_file(
    data: bytes,
    keys: list[dict],
    trust: list[dict],
    *,
    require_profile: bool = True,
    unverified_clear: bool = False,
) -> dict:
    """name -> (dtype, shape, bytes), or an exception named as the specification names it."""
    file, envelope = open_file(data, trust, require_profile=require_profile)
    # A file in which nothing is encrypted needs no key, and asks for none.
    key = master_key(keys, envelope) if envelope.records else b""
    deks = {}
    for name, record in envelope.records.items():
        wrapped, iv, tag = (unb64(record[m], m) for m in ("wrapped_key", "key_iv", "key_tag"))
        try:
            deks[name] = unseal(envelope.alg, key, iv, wrapped, tag, name)
        except AuthenticationError:
            # The signature vouches for the record, so it is the master key that does not fit.
            raise KeyAccessError("the master key does not unwrap the keys of this file") from None
    vouched = envelope.profile is not None or all(t.name in deks for t in file.tensors if t.size)
    if not vouched and not unverified_clear:
        raise NotEncryptedError("a clear tensor that nothing vouches for")
    return {t.name: (t.dtype, t.shape, read_tensor(file, envelope, t, deks.get(t.name))) for t in file.tensors}


def read_tensor(file: File, envelope: Envelope, tensor: Tensor, dek: bytes | None) -> bytes:
    stored = file.body[tensor.begin : tensor.end]
    if envelope.profile:
        pieces = [stored[i : i + envelope.piece] for i in range(0, len(stored), envelope.piece)]
        digests = b"".join(hashlib.sha256(piece).digest() for piece in pieces)
        if digests != unb64(envelope.profile["digest"]["tensors"][tensor.name], "digest"):
            raise AuthenticationError(f"digest of {tensor.name!r}")
    if dek is None:
        return stored
    record = envelope.records[tensor.name]
    if envelope.chunk is None:
        iv, tag = unb64(record["iv"], "iv"), unb64(record["tag"], "tag")
        return unseal(envelope.alg, dek, iv, stored, tag, tensor.name) if stored else b""
    base, tags, out = unb64(record["base_iv"], "base_iv"), unb64(record["tags"], "tags"), b""
    for i in range(len(tags) // 16):
        nonce = base[:8] + (int.from_bytes(base[8:], "big") + i).to_bytes(4, "big")
        chunk = stored[i * envelope.chunk : (i + 1) * envelope.chunk]
        out += unseal(envelope.alg, dek, nonce, chunk, tags[16 * i : 16 * i + 16], f"{tensor.name} chunk {i}")
    return out
