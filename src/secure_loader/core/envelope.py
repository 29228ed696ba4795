"""The CryptoTensors metadata in a header: who encrypted what, how, and who signed; with our profile on top.

Formats: docs/format.md, parts A (CryptoTensors "1" and "2") and B (profile 1). Parsing here needs no key and trusts
nothing: it only turns strings into checked values. Whether they are true is for :mod:`core.trust`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import FormatError, NotEncryptedError, UnsupportedVersionError
from . import strict_json
from .aead import ALGORITHMS, CHUNK_SIZE, NONCE_BYTES, TAG_BYTES, Algorithm, chunk_count
from .base64_text import base64_text, unbase64, unbase64_all
from .header import Header
from .recipient import Recipient, check_recipients

CRYPTO_KEYS = "__crypto_keys__"
ENCRYPTION = "__encryption__"
POLICY = "__policy__"
SIGNATURE = "__signature__"
SECOND = "__signature_mldsa65__"
PROFILE = "__secure_loader__"
NOTICE = "__notice__"
_REQUIRED = (CRYPTO_KEYS, ENCRYPTION, POLICY, SIGNATURE)
MIN_CHUNK_SIZE = 4096
MAX_CHUNKS = 2**32
MAX_RELEASE = 2**53 - 1
MAX_CERTIFICATES, MAX_CHAIN_BYTES = 10, 64 * 1024
SECOND_BYTES = 3309
# Members of a record by version, in the order in which CryptoTensors' own writer has them.
_RECORD = {
    "1": ("wrapped_key", "key_iv", "key_tag", "iv", "tag"),
    "2": ("wrapped_key", "key_iv", "key_tag", "base_iv", "tags"),
}
_PRIVATE_MEMBERS = {"k", "d", "p", "q", "dp", "dq", "qi", "priv"}
_KID = re.compile(r"[^\x00-\x1f\x7f/]{1,256}")
_MODEL_ID = re.compile(r"[^\x00-\x1f\x7f]{1,256}")
_FILE_ID = re.compile(r"[0-9a-f]{32}")
_CREATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)


@dataclass(frozen=True, slots=True)
class KeyHint:
    """Public half of a JWK as a header names it: a hint which key to use, never a reason to trust it.

    Attributes:
        kid: Its name.
        alg: What it is for.
        kty: Its kind.
        jku: Where somebody says it is; never followed.
        x5c: Certificates of the signing key, DER, its own first (profile 1).
    """

    kid: str
    alg: str
    kty: str
    jku: str | None = None
    x5c: tuple[bytes, ...] = ()

    def document(self) -> dict[str, Any]:
        """Members to serialise, absent ones left out."""
        doc: dict[str, Any] = {"alg": self.alg, "kid": self.kid, "kty": self.kty}
        if self.jku is not None:
            doc["jku"] = self.jku
        return doc | {"x5c": list(map(base64_text, self.x5c))} if self.x5c else doc


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """How one tensor was sealed.

    Attributes:
        wrapped_key: The tensor's DEK under the master key, without tag.
        key_iv: Nonce of the wrapping, 12 bytes.
        key_tag: Tag of the wrapping, 16 bytes.
        iv: v2: nonce of chunk 0; v1: nonce of the whole tensor, empty for an empty tensor.
        tags: v2: 16 bytes per chunk; v1: one tag, empty for an empty tensor.
    """

    wrapped_key: bytes
    key_iv: bytes
    key_tag: bytes
    iv: bytes
    tags: bytes


@dataclass(frozen=True, slots=True)
class Policy:
    """Embedded Rego texts."""

    local: str
    remote: str


@dataclass(frozen=True, slots=True)
class Profile:
    """Profile 1, the fields under ``__secure_loader__``.

    Attributes:
        file_id: 16 random bytes that no other file shares.
        model_id: What the signer calls the model; the trust store matches patterns against it.
        release: Grows with every publication of the model.
        shard: Position and number of shards, counted from 1.
        created: RFC 3339, UTC.
        kcv: Key check value of the master key, 16 bytes.
        digest_chunk_size: Bytes per digest.
        digests: Per tensor, the concatenated SHA-256 digests of its stored bytes.
        recipients: For whom the master key is wrapped, sorted.
    """

    file_id: bytes
    model_id: str
    release: int
    shard: tuple[int, int]
    created: str
    kcv: bytes
    digest_chunk_size: int
    digests: Mapping[str, bytes]
    recipients: tuple[Recipient, ...] = ()


@dataclass(frozen=True, slots=True)
class Envelope:
    """Everything cryptographic that a header says, checked for form.

    Attributes:
        version: ``"1"`` or ``"2"``.
        algorithm: For tensors and for wrapping alike.
        chunk_size: Bytes per chunk, None for whole-tensor sealing (v1).
        enc: Hint to the master key.
        sign: Hint to the signing key.
        records: By name, encrypted tensors only.
        policy: Embedded rules.
        signature: 64 bytes, Ed25519.
        profile: None for files without ours on top.
        second: 3,309 bytes, ML-DSA-65, or None where there is no post-quantum signature.
        canonical: Whether the metadata it was read from is proven to be what :func:`metadata` writes; False says nothing.
    """

    version: str
    algorithm: Algorithm
    chunk_size: int | None
    enc: KeyHint
    sign: KeyHint
    records: Mapping[str, TensorRecord]
    policy: Policy
    signature: bytes
    profile: Profile | None
    second: bytes | None = None
    canonical: bool = field(default=False, compare=False)


def is_encrypted(header: Header) -> bool:
    """Whether a header claims any of CryptoTensors' fields: a plain file has none of them."""
    return any(key in header.metadata for key in (*_REQUIRED, PROFILE))


def parse(header: Header) -> Envelope:
    """Read the envelope of a header.

    Raises:
        NotEncryptedError: The file has no cryptographic metadata at all.
        FormatError: Some of it is missing, malformed, or does not fit the tensors.
        UnsupportedVersionError: A version, algorithm or profile we do not know.
    """
    with strict_json.building(len(header.raw)):
        return _parse(header)


def _parse(header: Header) -> Envelope:
    meta = header.metadata
    if not is_encrypted(header):
        raise NotEncryptedError("is a plain safetensors file, not an encrypted one")
    missing = [key for key in _REQUIRED if key not in meta]
    if missing:
        raise FormatError(f"signed files carry {', '.join(_REQUIRED)}; {', '.join(missing)} is missing: stripped?")
    strict = PROFILE in meta
    keys, _ = _object(CRYPTO_KEYS, header)
    version = keys.get("version")
    if not isinstance(version, str):
        raise UnsupportedVersionError(f"{CRYPTO_KEYS} has no version string")
    if version not in ("1", "2"):
        raise UnsupportedVersionError(f"version {version[:40]!r} of CryptoTensors is unknown; 1 and 2 are supported")
    if strict:
        _only(keys, {"chunk_size", "enc", "sign", "version"}, CRYPTO_KEYS)
        if ("chunk_size" in keys) != (version == "2"):
            raise FormatError("chunk_size belongs to version 2, and only to it")
        _only(
            {k: v for k, v in meta.items() if k.startswith("__")}, {*_REQUIRED, PROFILE, NOTICE, SECOND}, "__metadata__"
        )
    chunk_size = _chunk_size(keys, version)
    enc = _key_hint(keys.get("enc"), "enc", "oct", strict=strict)
    sign = _key_hint(keys.get("sign"), "sign", "okp", strict=strict)
    algorithm = _algorithm(enc.alg, strict=strict)
    if sign.alg != "ed25519" and (strict or sign.alg.lower() not in ("ed25519", "eddsa")):
        raise UnsupportedVersionError(f"signature algorithm {sign.alg[:40]!r} is unknown; ed25519 is supported")
    sealed, compact = _object(ENCRYPTION, header)
    records = _records(sealed, header, algorithm, chunk_size, strict=strict)
    policy, _ = _object(POLICY, header)
    if not {"local", "remote"} <= policy.keys() or not all(isinstance(p, str) for p in policy.values()):
        raise FormatError(f"{POLICY} needs the texts local and remote")
    if strict:
        _only(policy, {"local", "remote"}, POLICY)
    signature = unbase64(meta[SIGNATURE], 64, SIGNATURE)
    rules = Policy(policy["local"], policy["remote"])
    if not strict:
        return Envelope(version, algorithm, chunk_size, enc, sign, records, rules, signature, None)
    fields, compact_too = _object(PROFILE, header)
    profile = _profile(fields, header, chunk_size)
    # The two long ones are not written again only to be compared: compact JSON has one spelling but for the order.
    canonical = (
        compact
        and compact_too
        and _in_order(sealed)
        and all(tuple(entry) == _RECORD[version] for entry in sealed.values())
        and all(map(_in_order, (fields, fields["digest"], fields["digest"]["tensors"], *fields.get("recipients", []))))
        and meta[CRYPTO_KEYS] == _keys_text(version, chunk_size, enc, sign)
        and meta[POLICY] == _policy_text(rules)
    )
    second = unbase64(meta[SECOND], SECOND_BYTES, SECOND) if SECOND in meta else None
    return Envelope(version, algorithm, chunk_size, enc, sign, records, rules, signature, profile, second, canonical)


def metadata(envelope: Envelope) -> dict[str, str]:
    """The metadata strings of an envelope, all but the signature: the inverse of :func:`parse`."""
    members = _RECORD["1" if envelope.chunk_size is None else "2"]
    records = {
        name: dict(zip(members, map(base64_text, (r.wrapped_key, r.key_iv, r.key_tag, r.iv, r.tags)), strict=True))
        for name, r in sorted(envelope.records.items())
    }
    out = {
        CRYPTO_KEYS: _keys_text(envelope.version, envelope.chunk_size, envelope.enc, envelope.sign),
        ENCRYPTION: strict_json.dumps(records, sort_keys=False),
        POLICY: _policy_text(envelope.policy),
    }
    if envelope.profile is not None:
        out[PROFILE] = strict_json.dumps(_profile_document(envelope.profile))
    return out


def _profile_document(p: Profile) -> dict[str, Any]:
    doc = {
        "profile": 1,
        "file_id": p.file_id.hex(),
        "model_id": p.model_id,
        "release": p.release,
        "shard": list(p.shard),
        "created": p.created,
        "kcv": base64_text(p.kcv),
        "digest": {
            "alg": "sha256",
            "chunk_size": p.digest_chunk_size,
            "tensors": {name: base64_text(d) for name, d in p.digests.items()},
        },
    }
    if p.recipients:
        doc["recipients"] = [{"alg": r.alg, "kid": r.kid, "wrapped": base64_text(r.wrapped)} for r in p.recipients]
    return doc


def _keys_text(version: str, chunk_size: int | None, enc: KeyHint, sign: KeyHint) -> str:
    keys: dict[str, Any] = {"enc": enc.document(), "sign": sign.document(), "version": version}
    return strict_json.dumps(keys if chunk_size is None else keys | {"chunk_size": chunk_size})


def _policy_text(policy: Policy) -> str:
    return strict_json.dumps({"local": policy.local, "remote": policy.remote})


def check_created(created: object) -> str:
    """Returns ``created``; raises FormatError unless it is an RFC 3339 time in UTC, to the second."""
    if not isinstance(created, str) or not _CREATED.fullmatch(created):
        raise FormatError("created is not an RFC 3339 time in UTC")
    return created


def check_model_id(model_id: str) -> str:
    """Returns ``model_id``; raises FormatError unless it is 1 to 256 characters without controls."""
    if not _MODEL_ID.fullmatch(model_id):
        raise FormatError("model_id must be 1 to 256 characters without control characters")
    return model_id


def _object(what: str, header: Header) -> tuple[dict[str, Any], bool]:
    """The object in the metadata string ``what``, and whether the string is proven to be compact JSON."""
    text = header.metadata[what]
    # Six commas a tensor in its record, one in its digest. More could only be refused after building them all.
    scanned = strict_json.scan_all(text, what=what, max_items=1000 + 8 * len(header.tensors))
    doc = strict_json.loads(text, what=what, scanned=scanned)
    if not isinstance(doc, dict):
        raise FormatError(f"{what} is not a JSON object")
    return doc, scanned.is_compact()


def _in_order(doc: Mapping[str, Any]) -> bool:
    names = list(doc)
    return names == sorted(names)


def _only(doc: Mapping[str, Any], allowed: set[str], what: str) -> None:
    unknown = sorted(doc.keys() - allowed)
    if unknown:
        raise FormatError(f"{what} has the unknown member {unknown[0][:80]!r}")


def _chunk_size(keys: Mapping[str, Any], version: str) -> int | None:
    # The reader of record switches on the presence of chunk_size; v2 without one means 2 MiB.
    if "chunk_size" not in keys:
        return CHUNK_SIZE if version == "2" else None
    size = keys["chunk_size"]
    if not strict_json.is_count(size) or not MIN_CHUNK_SIZE <= size <= 2**40:
        raise FormatError(f"chunk_size {str(size)[:40]} is not a whole number of at least {MIN_CHUNK_SIZE}")
    return int(size)


def _key_hint(doc: Any, what: str, kty: str, *, strict: bool) -> KeyHint:
    if not isinstance(doc, dict):
        raise FormatError(f"{CRYPTO_KEYS} has no object {what!r}")
    if _PRIVATE_MEMBERS & doc.keys():
        # Never echo the value: somebody published a private key by mistake.
        raise FormatError(f"{what} embeds private key material: that key is burnt, replace it")
    kid, alg, jku = doc.get("kid"), doc.get("alg"), doc.get("jku")
    if not isinstance(kid, str) or not _KID.fullmatch(kid):
        raise FormatError(f"{what} has no usable kid: 1 to 256 characters, no '/' and no controls")
    if not isinstance(alg, str) or not isinstance(doc.get("kty"), str) or _spelled(doc["kty"], strict=strict) != kty:
        raise FormatError(f"{what} must have kty {kty!r} and an alg")
    if jku is not None and not isinstance(jku, str):
        raise FormatError(f"{what} has a jku that is not a string")
    if not strict:
        return KeyHint(kid, alg, doc["kty"], jku)
    _only(doc, {"alg", "jku", "kid", "kty", "x5c"} if what == "sign" else {"alg", "jku", "kid", "kty"}, what)
    return KeyHint(kid, alg, doc["kty"], jku, parse_chain(doc["x5c"]) if "x5c" in doc else ())


def parse_chain(doc: Any) -> tuple[bytes, ...]:
    """The certificates of ``x5c`` (RFC 7515, 4.1.6), DER; what they say is not looked at here.

    Raises:
        FormatError: No list of 1 to 10 of them, not canonical base64, or more than 64 KiB.
    """
    if not isinstance(doc, list) or not 1 <= len(doc) <= MAX_CERTIFICATES:
        raise FormatError(f"x5c is not a list of 1 to {MAX_CERTIFICATES} certificates")
    found = tuple(unbase64(text, None, "a certificate of x5c") for text in doc)
    if sum(map(len, found)) > MAX_CHAIN_BYTES or not all(found):
        raise FormatError("x5c holds an empty certificate, or more than 64 KiB")
    return found


def _spelled(text: str, *, strict: bool) -> str:
    """CryptoTensors compares names without hyphens and case; profile 1 has one spelling of everything."""
    return text if strict else text.replace("-", "").lower()


def _algorithm(alg: str, *, strict: bool) -> Algorithm:
    found = ALGORITHMS.get(_spelled(alg, strict=strict))
    if found is None:
        raise UnsupportedVersionError(f"algorithm {alg[:40]!r} is unknown; {', '.join(ALGORITHMS)} are supported")
    return found


def _records(
    doc: Mapping[str, Any], header: Header, algorithm: Algorithm, chunk_size: int | None, *, strict: bool
) -> dict[str, TensorRecord]:
    members = _RECORD["1" if chunk_size is None else "2"]
    known = set(members)
    for name, entry in doc.items():
        if name not in header.tensors:
            raise FormatError(f"{ENCRYPTION} names it, but the file holds no such tensor", tensor=name[:200])
        if not isinstance(entry, dict) or not known <= entry.keys():
            raise FormatError(f"its encryption record needs {', '.join(sorted(known))}", tensor=name[:200])
        if strict and len(entry) > len(known):
            _only(entry, known, f"the encryption record of {name[:200]!r}")
    sizes = [header.tensors[name].nbytes for name in doc]
    if chunk_size is None:
        # v1 seals a tensor in one call, and an empty one not at all.
        chunks = [int(n > 0) for n in sizes]
        ivs = [NONCE_BYTES * n for n in chunks]
    else:
        chunks = [chunk_count(n, chunk_size) for n in sizes]
        ivs = [NONCE_BYTES] * len(doc)
    tags = [TAG_BYTES * n for n in chunks]
    wrapping = [[n] * len(doc) for n in (algorithm.key_bytes, NONCE_BYTES, TAG_BYTES)]
    columns = [
        unbase64_all({name: entry[member] for name, entry in doc.items()}, lengths, member)
        for member, lengths in zip(members, [*wrapping, ivs, tags], strict=True)
    ]
    records = dict(zip(doc, map(TensorRecord, *columns), strict=True))
    _check_nonces(records)
    for name, iv, n in zip(doc, columns[3], chunks, strict=True):
        if chunk_size is not None and int.from_bytes(iv[8:], "big") + n > MAX_CHUNKS:
            raise FormatError("its chunk counter would overflow", tensor=name[:200])
    return records


def _check_nonces(records: Mapping[str, TensorRecord]) -> None:
    """Two DEKs wrapped under one master key and nonce give both away."""
    seen = {record.key_iv: name for name, record in records.items()}
    if len(seen) < len(records):
        name = next(name for name, record in records.items() if seen[record.key_iv] != name)
        raise FormatError("its key_iv is used by another tensor as well", tensor=name[:200])


def _profile(doc: Mapping[str, Any], header: Header, chunk_size: int | None) -> Profile:
    number = doc.get("profile")
    if number != 1 or type(number) is not int:
        raise UnsupportedVersionError(f"profile {str(number)[:40]} is unknown; profile 1 is supported")
    fields = {"profile", "file_id", "model_id", "release", "shard", "created", "kcv", "digest"}
    _only(doc, fields | {"recipients"}, PROFILE)
    if not doc.keys() >= fields:
        raise FormatError(f"{PROFILE} lacks {', '.join(sorted(fields - doc.keys()))}")
    file_id, model_id, created, shard = doc["file_id"], doc["model_id"], doc["created"], doc["shard"]
    if not isinstance(file_id, str) or not _FILE_ID.fullmatch(file_id):
        raise FormatError("file_id is not 32 lower-case hex digits")
    if not isinstance(model_id, str):
        raise FormatError("model_id is not a string")
    if not strict_json.is_count(doc["release"]) or doc["release"] > MAX_RELEASE:
        raise FormatError("release is not a whole number below 2**53")
    if not isinstance(shard, list) or len(shard) != 2 or not all(strict_json.is_count(n) for n in shard):
        raise FormatError("shard is not [position, number]")
    if not 1 <= shard[0] <= shard[1]:
        raise FormatError(f"shard {shard[0]} of {shard[1]} cannot be")
    size, digests = _digests(doc["digest"], header, chunk_size)
    return Profile(
        file_id=bytes.fromhex(file_id),
        model_id=check_model_id(model_id),
        release=doc["release"],
        shard=(shard[0], shard[1]),
        created=check_created(created),
        kcv=unbase64(doc["kcv"], 16, "kcv"),
        digest_chunk_size=size,
        digests=digests,
        recipients=_recipients(doc["recipients"]) if "recipients" in doc else (),
    )


def _recipients(doc: Any) -> tuple[Recipient, ...]:
    if not isinstance(doc, list) or not doc:
        raise FormatError("recipients is not a list with somebody in it")
    found = []
    for entry in doc:
        if not isinstance(entry, dict) or entry.keys() != {"alg", "kid", "wrapped"}:
            raise FormatError("a recipient needs exactly alg, kid and wrapped")
        if not isinstance(entry["alg"], str) or not isinstance(entry["kid"], str):
            raise FormatError("alg and kid of a recipient are strings")
        found.append(
            Recipient(entry["alg"], entry["kid"], unbase64(entry["wrapped"], None, "a recipient's wrapped key"))
        )
    return check_recipients(tuple(found))


def _digests(doc: Any, header: Header, chunk_size: int | None) -> tuple[int, dict[str, bytes]]:
    if not isinstance(doc, dict) or doc.keys() != {"alg", "chunk_size", "tensors"}:
        raise FormatError("digest needs exactly alg, chunk_size and tensors")
    if doc["alg"] != "sha256":
        raise UnsupportedVersionError(f"digest algorithm {str(doc['alg'])[:40]!r} is unknown; sha256 is supported")
    size, tensors = doc["chunk_size"], doc["tensors"]
    if not strict_json.is_count(size) or size != (chunk_size or CHUNK_SIZE):
        raise FormatError("digest.chunk_size differs from the chunk size of the file")
    if not isinstance(tensors, dict) or tensors.keys() != header.tensors.keys():
        raise FormatError("digest.tensors must name exactly the tensors of the file")
    lengths = [32 * -(-header.tensors[name].nbytes // size) for name in tensors]
    return size, dict(zip(tensors, unbase64_all(tensors, lengths, "digest"), strict=True))
