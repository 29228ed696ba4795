"""The signed model folder: which files belong to it, and what is in them (docs/format.md, part C).

``secure_manifest.json`` is a flattened JWS (RFC 7515, section 7.2.2) with EdDSA (RFC 8037). It makes the folder one
thing: shards of two models, an added ``auto_map``, a swapped chat template or a file too many are refused.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import FormatError, ManifestError, MissingFileError, SecureLoaderError, UnsupportedVersionError
from . import header as hdr
from . import strict_json
from .envelope import MAX_RELEASE, SECOND_BYTES, check_created, check_model_id, parse_chain
from .keys.jwk import SigningKey, b64url
from .keys.mldsa import ALG as MLDSA
from .signing import MANIFEST_TYPE, sign_manifest
from .source import FileSource, read_small_file
from .trust import TrustedSigner, TrustStore
from .trust_rules import Subject

MANIFEST = "secure_manifest.json"
MAX_MANIFEST = 64 << 20
# It signs all files, the manifest too, and so comes after it: see core/oms_check.py.
MODEL_SIGNATURE = "model.sig"
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What the manifest says of one file.

    Attributes:
        nbytes: Its size.
        sha256: Digest of the whole file, or None for a shard.
        header_sha256: Digest of a shard's first 8 + N bytes, which vouch for the rest, or None.
    """

    nbytes: int
    sha256: str | None = None
    header_sha256: str | None = None

    def document(self) -> dict[str, Any]:
        """As JSON."""
        if self.sha256 is not None:
            return {"bytes": self.nbytes, "sha256": self.sha256}
        return {"bytes": self.nbytes, "header_sha256": self.header_sha256}


@dataclass(frozen=True, slots=True)
class Manifest:
    """A model folder as its publisher signed it.

    Attributes:
        model_id: What the publisher calls the model.
        release: Grows with every publication.
        created: RFC 3339, UTC.
        files: By POSIX path relative to the folder.
        weights: Tensor name to shard, for the checkpoint in the folder's root.
    """

    model_id: str
    release: int
    created: str
    files: Mapping[str, FileEntry]
    weights: Mapping[str, str]

    def payload(self) -> bytes:
        """What is signed: canonical JSON."""
        doc = {
            "profile": 1,
            "model_id": self.model_id,
            "release": self.release,
            "created": self.created,
            "files": {name: entry.document() for name, entry in self.files.items()},
            "weights": dict(self.weights),
        }
        return strict_json.dumps(doc).encode()

    def sign(self, key: SigningKey) -> bytes:
        """The manifest file."""
        return sign_manifest(self.payload(), key)


def read(folder: Path, trust: TrustStore) -> tuple[Manifest, TrustedSigner]:
    """Read and verify a folder's manifest.

    Raises:
        ManifestError: There is none.
        FormatError: It is malformed.
        SignatureError, UntrustedSignerError, RollbackError: As :meth:`core.trust.TrustStore.verify`.
    """
    path = folder / MANIFEST
    try:
        data = read_small_file(str(path), MAX_MANIFEST)
    except MissingFileError:
        raise ManifestError(
            f"has no {MANIFEST}: not encrypted by secure-loader, or the manifest was removed",
            path=folder,
            hint="encrypt the folder with: secure-loader encrypt SRC DST",
        ) from None
    try:
        found = _parse(data)
        manifest, second = found.manifest, found.second
        subject = Subject(
            manifest.model_id,
            manifest.release,
            created=manifest.created,
            digest=lambda: revocable_digest(manifest),
        )
        return manifest, trust.verify(
            found.first.message,
            found.first.signature,
            found.first.kid,
            subject,
            chain=found.first.chain,
            second=None if second is None else (lambda: second.message, second.signature),
        )
    except SecureLoaderError as e:
        raise type(e)(e.message, hint=e.hint, path=path) from None


def revocable_digest(manifest: Manifest) -> str:
    """By which a folder is revoked: SHA-256 of what is signed, in hex. That of the file changes with its white space."""
    return hashlib.sha256(manifest.payload()).hexdigest()


def peek(data: bytes) -> Manifest:
    """A manifest without checking who signed it, for showing to a person.

    Raises:
        FormatError: It is malformed.
    """
    return _parse(data).manifest


@dataclass(frozen=True, slots=True)
class _Signature:
    """One signature of a JWS, not verified: what is signed, by whom, with which certificates."""

    message: bytes
    signature: bytes
    kid: str
    chain: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class _Signed:
    """A manifest and its signatures, not verified: Ed25519, and ML-DSA-65 or None."""

    manifest: Manifest
    first: _Signature
    second: _Signature | None


def _parse(data: bytes) -> _Signed:
    jws = strict_json.loads(data, what=MANIFEST, scan=True)
    if not isinstance(jws, dict) or jws.keys() not in (
        {"payload", "protected", "signature"},
        {"payload", "signatures"},
    ):
        raise FormatError(f"{MANIFEST} is neither a flattened nor a general JWS")
    parts = jws.get("signatures", [{name: jws[name] for name in jws.keys() - {"payload"}}])
    if not isinstance(parts, list) or len(parts) != 1 + ("signatures" in jws):
        raise FormatError("a general JWS must have two signatures here")
    signatures = [_signature(part, jws["payload"], alg) for part, alg in zip(parts, ("EdDSA", MLDSA), strict=False)]
    if len({s.kid for s in signatures}) > 1:
        raise FormatError("the two signatures name two signers")
    payload = _unb64(jws["payload"])
    doc = strict_json.loads(payload, what="manifest payload", scan=True)
    manifest = _manifest(doc)
    if manifest.payload() != payload:
        raise FormatError("the manifest payload is not in canonical form")
    return _Signed(manifest, signatures[0], signatures[1] if len(signatures) > 1 else None)


def _signature(part: Any, payload: Any, alg: str) -> _Signature:
    if not isinstance(part, dict) or part.keys() != {"protected", "signature"}:
        raise FormatError("a signature needs exactly protected and signature")
    if not isinstance(payload, str):
        raise FormatError("the payload is not base64url")
    protected = strict_json.loads(_unb64(part["protected"]), what="protected header", scan=True)
    allowed = {"alg", "kid", "typ", "x5c"} if alg == "EdDSA" else {"alg", "kid", "typ"}
    if not isinstance(protected, dict) or not {"alg", "kid", "typ"} <= protected.keys() <= allowed:
        raise FormatError("the protected header needs exactly alg, kid and typ; x5c is allowed for EdDSA")
    if protected["alg"] != alg or protected["typ"] != MANIFEST_TYPE or not isinstance(protected["kid"], str):
        raise UnsupportedVersionError("the protected header names another algorithm or type")
    chain = parse_chain(protected["x5c"]) if "x5c" in protected else ()
    signature = _unb64(part["signature"])
    if alg != "EdDSA" and len(signature) != SECOND_BYTES:
        raise FormatError(f"the post-quantum signature has {len(signature)} bytes instead of {SECOND_BYTES}")
    return _Signature(f"{part['protected']}.{payload}".encode(), signature, protected["kid"], chain)


def _manifest(doc: Any) -> Manifest:
    if not isinstance(doc, dict):
        raise FormatError("the manifest payload is not an object")
    if type(doc.get("profile")) is not int or doc["profile"] != 1:
        raise UnsupportedVersionError(f"manifest profile {str(doc.get('profile'))[:40]} is unknown")
    if doc.keys() != {"profile", "model_id", "release", "created", "files", "weights"}:
        raise FormatError("the manifest payload has missing or unknown members")
    model_id, release, files, weights = doc["model_id"], doc["release"], doc["files"], doc["weights"]
    if not isinstance(model_id, str):
        raise FormatError("model_id must be a string")
    if not strict_json.is_count(release) or release > MAX_RELEASE:
        raise FormatError("release is not a whole number below 2**53")
    if not isinstance(files, dict) or not isinstance(weights, dict):
        raise FormatError("files and weights must be objects")
    entries = {check_relative(name): _entry(name, entry) for name, entry in files.items()}
    if MANIFEST in entries:
        raise FormatError("the manifest cannot list itself")
    for shard in weights.values():
        if not isinstance(shard, str) or shard not in entries or entries[shard].header_sha256 is None:
            raise FormatError("weights names a file that is not a listed shard")
    return Manifest(check_model_id(model_id), release, check_created(doc["created"]), entries, weights)


def _entry(name: str, doc: Any) -> FileEntry:
    if not isinstance(doc, dict) or not strict_json.is_count(doc.get("bytes")):
        raise FormatError(f"the entry of {name[:200]!r} needs bytes")
    digests = doc.keys() - {"bytes"}
    if len(digests) != 1 or not digests <= {"sha256", "header_sha256"}:
        raise FormatError(f"the entry of {name[:200]!r} needs one of sha256 and header_sha256")
    kind = digests.pop()
    value = doc[kind]
    if not isinstance(value, str) or len(value) != 64 or value.strip("0123456789abcdef"):
        raise FormatError(f"the entry of {name[:200]!r} has a malformed digest")
    return FileEntry(doc["bytes"], **{kind: value})


def check_relative(name: str) -> str:
    """Returns a path that stays inside its folder.

    Raises:
        FormatError: Absolute, or with ``..``, empty or hidden parts.
    """
    path = PurePosixPath(name)
    # PurePosixPath drops '//' and '.': what it prints back must be what was written.
    if str(path) != name or path.is_absolute() or any(p.startswith(".") for p in path.parts) or "\0" in name:
        raise FormatError(f"{name[:200]!r} is not a plain relative path")
    return name


def list_files(folder: Path) -> Iterator[str]:
    """POSIX paths, relative, of the files that make up a folder: all but hidden ones, sorted.

    A link to a folder counts as one file, so that nothing behind it goes unseen: no manifest lists such a name.
    """
    top = os.fspath(folder)
    for root, folders, files in os.walk(top):
        links = [f for f in folders if os.path.islink(os.path.join(root, f))]
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in links)
        inside = "" if root == top else os.path.relpath(root, top) + "/"
        yield from (inside + name for name in sorted(files + links) if not name.startswith("."))


def check_files(folder: Path, manifest: Manifest, *, partial: bool = False) -> None:
    """Compare a folder with its manifest: every file but the bodies of shards.

    Args:
        folder: The folder.
        manifest: Its verified manifest.
        partial: Accept that files other than shards, index and config are absent, as in a hub cache that fetched
            only what was asked for. What is there must still be right.

    Raises:
        ManifestError: A file is missing, extra or altered.
    """
    present = set(list_files(folder)) - {MANIFEST}
    extra = sorted(present - manifest.files.keys() - _beside(folder))
    if extra:
        raise ManifestError(
            f"{extra[0]} is not part of the signed folder" + (f" (and {len(extra) - 1} more)" if extra[1:] else ""),
            path=folder,
            hint="remove it, or sign the folder again with it",
        )
    for name, entry in manifest.files.items():
        if name not in present:
            if partial and not is_needed(name, entry):
                continue
            raise ManifestError(f"{name} is missing from the signed folder", path=folder)
        if not _is_as_signed(folder / name, entry):
            raise ManifestError(f"{name} is not the file that was signed: altered, or of another release", path=folder)


def _beside(folder: Path) -> set[str]:
    """What may lie in a folder besides the files of its manifest: a ``model.sig``, which no framework reads."""
    return {MODEL_SIGNATURE} if (folder / MODEL_SIGNATURE).is_file() else set()


def _is_as_signed(path: Path, entry: FileEntry) -> bool:
    with FileSource(path) as source:
        if source.size != entry.nbytes:  # or a file of many terabytes would be hashed to the end
            return False
        return _digest(source, path, shard=entry.header_sha256 is not None) == entry


def check_copy(path: Path, name: str, manifest: Manifest) -> None:
    """Whether a copy is the file that was signed: the original may have changed since the folder was checked.

    Raises:
        ManifestError: It is not.
    """
    if not _is_as_signed(path, manifest.files[name]):
        raise ManifestError(f"{name} is not the file that was signed: it changed while it was copied", path=path.parent)


def is_needed(name: str, entry: FileEntry) -> bool:
    """Whether a file must be there even where only part of a folder was fetched: shards, index and configuration."""
    return entry.sha256 is None or name.endswith(("config.json", ".index.json", ".index.secure.json"))


def digest_of(path: Path, *, shard: bool) -> FileEntry:
    """The entry that describes a file as it is.

    Raises:
        ManifestError: A shard without a header.
        SourceError: It cannot be read.
    """
    with FileSource(path) as source:
        return _digest(source, path, shard=shard)


def _digest(source: FileSource, path: Path, *, shard: bool) -> FileEntry:
    length = source.size
    if shard:
        try:
            length = hdr.LENGTH.size + hdr.parse_length(source.read(0, min(8, source.size)), source.size)
        except FormatError as e:
            raise ManifestError(f"{path.name}: {e.message}", path=path.parent) from None
    sha = hashlib.sha256()
    piece = memoryview(bytearray(min(_PIECE, length)))
    for start in range(0, length, _PIECE):
        view = piece[: min(_PIECE, length - start)]
        source.read_into([view], start)
        sha.update(view)
    if shard:
        return FileEntry(source.size, header_sha256=sha.hexdigest())
    return FileEntry(source.size, sha256=sha.hexdigest())


def _unb64(text: object) -> bytes:
    if not isinstance(text, str) or not text.isascii() or "=" in text or "+" in text or "/" in text:
        raise FormatError(f"{MANIFEST} holds something that is not base64url")
    try:
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (binascii.Error, ValueError):
        raise FormatError(f"{MANIFEST} holds something that is not base64url") from None
    if b64url(data) != text:
        raise FormatError(f"{MANIFEST} holds base64url that is not canonical")
    return data
