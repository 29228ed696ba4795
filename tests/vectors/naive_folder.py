"""A naive reader and writer of signed model folders, written from docs/format.md part C.

A folder is a dict of relative POSIX path -> bytes here; hidden paths are dropped by the reader, as on disk.
"""

from __future__ import annotations

import hashlib
import json
import re

from .naive import certificates, check_identity, is_int, open_file, read_file, verify
from .naive_json import (
    FormatError,
    ManifestError,
    RollbackError,
    UnsupportedVersionError,
    b64url,
    compact,
    members,
    strict_json,
    unb64url,
)
from .naive_writer import sign, sign_second

MANIFEST = "secure_manifest.json"
MODEL_SIGNATURE = "model.sig"
TYP = "secure-loader-manifest+jws"
INDEXES = ("model.safetensors.index.secure.json", "model.safetensors.index.json")
SINGLES = ("model.secure.safetensors", "model.safetensors")


def hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))


def is_relative(path: str) -> bool:
    parts = path.split("/")
    return "\0" not in path and all(parts) and not hidden(path)


def header_bytes(data: bytes) -> bytes:
    """The first 8 + N bytes of a shard, whose digest the manifest has."""
    if len(data) < 8 or int.from_bytes(data[:8], "little") > len(data) - 8:
        raise ManifestError("a shard without a header")
    return data[: 8 + int.from_bytes(data[:8], "little")]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def parse(data: bytes, trust: list[dict]) -> dict:
    """The payload of a manifest, its signature checked."""
    jws = strict_json(data)
    if isinstance(jws, dict) and "signatures" in jws:
        members(jws, {"payload", "signatures"}, set(), "general JWS")
        if not isinstance(jws["signatures"], list) or len(jws["signatures"]) != 2:
            raise FormatError("not two signatures")
        parts = [members(part, {"protected", "signature"}, set(), "signature") for part in jws["signatures"]]
    else:
        parts = [members(jws, {"payload", "protected", "signature"}, set(), "JWS")]
    unb64url(jws["payload"], "payload")
    heads = [check_protected(part, alg) for part, alg in zip(parts, ("EdDSA", "ML-DSA-65"), strict=False)]
    if len({head["kid"] for head in heads}) > 1:
        raise FormatError("two signers")
    raw = unb64url(jws["payload"], "payload")
    doc = strict_json(raw)
    if not isinstance(doc, dict):
        raise FormatError("payload is not an object")
    if not is_int(doc.get("profile"), 1, 1):
        raise UnsupportedVersionError("manifest profile")
    members(doc, {"profile", "model_id", "release", "created", "files", "weights"}, set(), "payload")
    check_identity(doc)
    if not isinstance(doc["files"], dict) or not isinstance(doc["weights"], dict):
        raise FormatError("files or weights")
    for path, entry in doc["files"].items():
        if not is_relative(path) or path == MANIFEST:
            raise FormatError(f"path {path!r}")
        check_entry(entry)
    for shard in doc["weights"].values():
        if not isinstance(shard, str) or "header_sha256" not in doc["files"].get(shard, {}):
            raise FormatError("weights names a file that is no listed shard")
    if compact(doc, sort=True).encode() != raw:
        raise FormatError("payload is not canonical")
    signed = [
        (f"{part['protected']}.{jws['payload']}".encode(), unb64url(part["signature"], "signature")) for part in parts
    ]
    verify(trust, heads[0]["kid"], *signed[0], signed[1] if len(signed) > 1 else None)
    return doc


def check_protected(part: dict, alg: str) -> dict:
    protected = strict_json(unb64url(part["protected"], "protected"))
    members(protected, {"alg", "kid", "typ"}, {"x5c"} if alg == "EdDSA" else set(), "protected header")
    if protected["alg"] != alg or protected["typ"] != TYP or not isinstance(protected["kid"], str):
        raise UnsupportedVersionError("alg or typ")
    if "x5c" in protected:
        certificates(protected["x5c"])
    if alg != "EdDSA" and len(unb64url(part["signature"], "signature")) != 3309:
        raise FormatError("length of the second signature")
    return protected


def check_entry(entry) -> None:
    kind = "sha256" if isinstance(entry, dict) and "sha256" in entry else "header_sha256"
    members(entry, {"bytes", kind}, set(), "file entry")
    digest = entry[kind]
    if not is_int(entry["bytes"]) or not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise FormatError("file entry")


def read_folder(files: dict[str, bytes], keys: list[dict], trust: list[dict], *, floor: int = 0) -> dict:
    """Every tensor of the root checkpoint: name -> (dtype, shape, bytes)."""
    files = {path: data for path, data in files.items() if not hidden(path)}
    if MANIFEST not in files:
        raise ManifestError("no manifest")
    doc = parse(files.pop(MANIFEST), trust)
    if doc["release"] < floor:
        raise RollbackError(f"release {doc['release']} is older than {floor}")
    if MODEL_SIGNATURE not in doc["files"]:
        files.pop(MODEL_SIGNATURE, None)
    if set(files) != set(doc["files"]):
        raise ManifestError(f"missing or extra: {sorted(set(files) ^ set(doc['files']))}")
    for path, entry in doc["files"].items():
        digest = sha256(header_bytes(files[path])) if "header_sha256" in entry else sha256(files[path])
        if entry["bytes"] != len(files[path]) or digest not in entry.values():
            raise ManifestError(f"{path} is not the file that was signed")
    check_index(files, doc["weights"])
    shards = {p: files[p] for p, entry in doc["files"].items() if "header_sha256" in entry}
    check_shards(shards, doc, trust)
    tensors = {}
    for path in sorted(set(doc["weights"].values())):
        tensors |= read_file(files[path], keys, trust)
    return tensors


def check_index(files: dict[str, bytes], weights: dict[str, str]) -> None:
    """The root index, or else the single model file, says the same as `weights`."""
    for name in INDEXES:
        if name in files:
            # The whole file is vouched for, and real indexes hold fractions in their statistics: any JSON will do.
            try:
                index = json.loads(files[name])
            except ValueError:
                raise ManifestError(f"{name} is not JSON") from None
            if not isinstance(index, dict) or index.get("weight_map") != weights:
                raise ManifestError(f"{name} and the manifest's weights differ")
            return
    for name in SINGLES:
        if name in files:
            if set(weights.values()) - {name}:
                raise ManifestError(f"the checkpoint is {name}, the manifest's weights name others")
            return


def check_shards(shards: dict[str, bytes], doc: dict, trust: list[dict]) -> None:
    """Each shard is of this model and release; those of the root checkpoint hold exactly `weights`."""
    root, found, places = set(doc["weights"].values()), {}, []
    for path, data in shards.items():
        file, envelope = open_file(data, trust)
        if any(envelope.profile[m] != doc[m] for m in ("model_id", "release")):
            raise ManifestError(f"{path} is of another model or release")
        if path in root:
            found |= dict.fromkeys(file.by_name, path)
            places.append(envelope.profile["shard"])
    if found != doc["weights"]:
        raise ManifestError("the shards hold other tensors than the manifest lists")
    if sorted(places) != [[i + 1, len(root)] for i in range(len(root))]:
        raise ManifestError("the shards do not make up one checkpoint")


def manifest_payload(files: dict[str, bytes], weights: dict[str, str], shards: set[str], **identity) -> dict:
    """A correct payload for `files`."""
    entries = {}
    for path, data in files.items():
        if path in shards:
            entries[path] = {"bytes": len(data), "header_sha256": sha256(header_bytes(data))}
        else:
            entries[path] = {"bytes": len(data), "sha256": sha256(data)}
    return {"profile": 1, "created": "2026-01-02T03:04:06Z", "files": entries, "weights": weights} | identity


def sign_twice(payload: dict, signer: dict, second: dict, **protected) -> dict:
    """The general JWS with an Ed25519 and an ML-DSA-65 signature; `protected` is for the second."""
    first = sign_manifest(payload, signer)
    header = {"alg": "ML-DSA-65", "kid": second["kid"], "typ": TYP} | protected
    encoded = b64url(compact(header, sort=True).encode())
    signature = b64url(sign_second(second, f"{encoded}.{first['payload']}".encode()))
    body = first.pop("payload")
    return {"payload": body, "signatures": [first, {"protected": encoded, "signature": signature}]}


def sign_manifest(payload: dict | bytes, signer: dict, **protected) -> dict[str, str]:
    """The flattened JWS, as its three members."""
    raw = payload if isinstance(payload, bytes) else compact(payload, sort=True).encode()
    header = {"alg": "EdDSA", "kid": signer["kid"], "typ": TYP} | protected
    parts = {"payload": b64url(raw), "protected": b64url(compact(header, sort=True).encode())}
    message = f"{parts['protected']}.{parts['payload']}".encode()
    return parts | {"signature": b64url(sign(signer, message))}
