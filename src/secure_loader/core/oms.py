"""``model.sig`` as OpenSSF model signing writes it: a Sigstore bundle around a signed list of files (docs/format.md, C.3).

The bundle holds a DSSE envelope, the envelope an in-toto statement, and that the SHA-256 of every file. Only what the
envelope's signature covers is believed, and only after it was checked; the rest of the bundle is a hint at most.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from ..errors import FormatError, SignatureError, UnsupportedVersionError, UntrustedSignerError
from . import strict_json
from .keys.ec import EcSigningKey, EcVerifyKey

MAX_SIZE = 64 << 20
_MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_PAYLOAD_TYPE = "application/vnd.in-toto+json"
_STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
_PREDICATE_TYPE = "https://model_signing/signature/v1.0"
_WHAT = "model.sig"


def write(name: str, digests: Mapping[str, str], ignored: Sequence[str], key: EcSigningKey) -> bytes:
    """A signed ``model.sig``.

    Args:
        name: Of the model; tells nothing to a verifier.
        digests: SHA-256 in hex by POSIX path, relative to the folder.
        ignored: Paths that the peer's verifier passes over.
        key: Who signs.
    """
    # The peer sorts by the parts of paths, and so does whoever compares two statements.
    names = sorted(digests, key=lambda n: n.split("/"))
    statement = {
        "_type": _STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": _root([digests[n] for n in names])}}],
        "predicateType": _PREDICATE_TYPE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": list(ignored),
            },
            "resources": [{"name": n, "algorithm": "sha256", "digest": digests[n]} for n in names],
        },
    }
    payload = strict_json.dumps(statement).encode()
    bundle = {
        "mediaType": _MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": key.verify_key("").fingerprint()}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode("ascii"),
            "payloadType": _PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(key.sign(_signed(payload))).decode("ascii"), "keyid": ""}],
        },
    }
    return strict_json.dumps(bundle).encode()


def read(data: bytes, keys: Sequence[EcVerifyKey]) -> tuple[dict[str, str], EcVerifyKey]:
    """What a ``model.sig`` says, once the signature of a trusted key was found on it.

    Args:
        data: The file.
        keys: Trusted keys.

    Returns:
        SHA-256 in hex by path, and the key that signed.

    Raises:
        FormatError: Malformed, or it names a file twice or by a path that leaves the folder.
        UnsupportedVersionError: Signed in another way, or with other digests than whole files' SHA-256.
        UntrustedSignerError: Signed by another key than these.
        SignatureError: The signature does not verify.
    """
    payload, signature, hint = _open(strict_json.loads(data, what=_WHAT, scan=True, any_number=True))
    key = _who_signed(payload, signature, hint, keys)
    return _digests(strict_json.loads(payload, what=f"statement of {_WHAT}", scan=True, any_number=True)), key


def _open(bundle: Any) -> tuple[bytes, bytes, str | None]:
    """Payload, signature and hint of a bundle: nothing of it is to be believed yet."""
    if not isinstance(bundle, dict) or not isinstance(bundle.get("mediaType"), str):
        raise FormatError(f"{_WHAT} is not a Sigstore bundle")
    if bundle["mediaType"] != _MEDIA_TYPE:
        raise UnsupportedVersionError(f"{_WHAT} is a bundle of another kind: {bundle['mediaType'][:80]!r}")
    material, envelope = bundle.get("verificationMaterial"), bundle.get("dsseEnvelope")
    if not isinstance(material, dict) or not isinstance(envelope, dict):
        raise FormatError(f"{_WHAT} has no verificationMaterial, or no dsseEnvelope")
    if not isinstance(material.get("publicKey"), dict):
        raise UnsupportedVersionError(f"{_WHAT} is signed with a certificate; only signatures of a key are known here")
    hint = material["publicKey"].get("hint")
    if hint is not None and not isinstance(hint, str):
        raise FormatError(f"the hint in {_WHAT} is not a string")
    if envelope.get("payloadType") != _PAYLOAD_TYPE:
        raise UnsupportedVersionError(f"{_WHAT} signs something that is no in-toto statement")
    signatures = envelope.get("signatures")
    if not isinstance(signatures, list) or len(signatures) != 1 or not isinstance(signatures[0], dict):
        raise FormatError(f"{_WHAT} does not hold exactly one signature")
    return _bytes(envelope.get("payload"), "payload"), _bytes(signatures[0].get("sig"), "signature"), hint or None


def _who_signed(payload: bytes, signature: bytes, hint: str | None, keys: Sequence[EcVerifyKey]) -> EcVerifyKey:
    for key in keys:
        if hint is None:  # of before version 1.0 of the format's package: any of them may be meant
            with contextlib.suppress(SignatureError):
                key.verify(signature, _signed(payload))
                return key
        elif key.fingerprint() == hint:
            key.verify(signature, _signed(payload))
            return key
    raise UntrustedSignerError(
        f"{_WHAT} is not signed by a key that is trusted for it",
        hint="if you trust who signed it, put the public key (PEM) into trust/oms in the home folder, or into oms_keys",
    )


def _digests(statement: Any) -> dict[str, str]:
    """The files of a signed statement."""
    if not isinstance(statement, dict) or statement.get("_type") != _STATEMENT_TYPE:
        raise UnsupportedVersionError(f"{_WHAT} signs something that is no in-toto statement, version 1")
    if statement.get("predicateType") != _PREDICATE_TYPE:
        raise UnsupportedVersionError(f"{_WHAT} states something else: {str(statement.get('predicateType'))[:80]!r}")
    predicate, subject = statement.get("predicate"), statement.get("subject")
    if not isinstance(predicate, dict) or not isinstance(predicate.get("serialization"), dict):
        raise FormatError(f"{_WHAT} does not say how files were read")
    how = predicate["serialization"]
    if how.get("method") != "files" or how.get("hash_type") != "sha256":
        raise UnsupportedVersionError(f"{_WHAT} signs other digests than SHA-256 of whole files")
    # allow_symlinks and ignore_paths are not looked at: neither makes a file one that was signed.
    resources = predicate.get("resources")
    if not isinstance(resources, list):
        raise FormatError(f"{_WHAT} lists no files")
    found: dict[str, str] = {}
    for resource in resources:
        name, digest = _resource(resource)
        if name in found:
            raise FormatError(f"{_WHAT} lists {name[:200]!r} twice")
        found[name] = digest
    match subject:
        case [{"digest": {"sha256": str() as root}}] if root == _root(found.values()):
            return found
    raise FormatError(f"the digest of the whole in {_WHAT} is not that of its files")


def _resource(doc: Any) -> tuple[str, str]:
    if not isinstance(doc, dict) or not isinstance(doc.get("name"), str) or not isinstance(doc.get("digest"), str):
        raise FormatError(f"a file in {_WHAT} has no name, or no digest")
    name, digest = doc["name"], doc["digest"]
    path = PurePosixPath(name)
    if str(path) != name or path.is_absolute() or ".." in path.parts or name == "." or "\0" in name:
        raise FormatError(f"{name[:200]!r} in {_WHAT} is not a plain relative path")
    if doc.get("algorithm") != "sha256":
        raise UnsupportedVersionError(f"{_WHAT} signs other digests than SHA-256")
    if len(digest) != 64 or digest.strip("0123456789abcdef"):
        raise FormatError(f"the digest of {name[:200]!r} in {_WHAT} is malformed")
    return name, digest


def _root(digests: Any) -> str:
    return hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()


def _signed(payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding: the type is signed as well, and the lengths."""
    return b"DSSEv1 %d %s %d %s" % (len(_PAYLOAD_TYPE), _PAYLOAD_TYPE.encode(), len(payload), payload)


def _bytes(text: object, what: str) -> bytes:
    try:
        if isinstance(text, str):
            data = base64.b64decode(text, validate=True)
            if base64.b64encode(data).decode("ascii") == text:
                return data
    except (binascii.Error, ValueError):
        pass
    raise FormatError(f"the {what} in {_WHAT} is not base64")
