"""Putting signatures into headers and manifests (docs/format.md, A.7, B.6 and C.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import envelope as env
from . import strict_json
from .base64_text import base64_text
from .header import canonical_json
from .keys.jwk import SigningKey, b64url
from .keys.mldsa import ALG as MLDSA
from .keys.mldsa import SecondSigningKey
from .types import TensorInfo

MANIFEST_TYPE = "secure-loader-manifest+jws"


def sign_hint(key: SigningKey) -> env.KeyHint:
    """How a header names its signer."""
    return env.KeyHint(key.kid, "ed25519", "okp", x5c=key.chain)


def sign_header(
    metadata: Mapping[str, str], tensors: Sequence[TensorInfo], key: SigningKey, *, pretend: bool = False
) -> bytes:
    """The JSON of a header, signed.

    Args:
        metadata: All strings but the signatures.
        tensors: In the order of the file.
        key: Who signs.
        pretend: Put zeros in place of signatures: to know how long the header will be.
    """
    meta = dict(metadata)
    if key.second is not None:
        # First, so that Ed25519 covers it: readers that do not know it leave out no metadata but __signature__.
        second = bytes(env.SECOND_BYTES) if pretend else key.second.sign(canonical_json(meta, tensors))
        meta[env.SECOND] = base64_text(second)
    signature = bytes(64) if pretend else key.sign(canonical_json(meta, tensors))
    return canonical_json(meta | {env.SIGNATURE: base64_text(signature)}, tensors)


def sign_manifest(payload: bytes, key: SigningKey) -> bytes:
    """A manifest file: a flattened JWS, or a general one where there are two signatures."""
    chain = {"x5c": list(map(base64_text, key.chain))} if key.chain else {}
    body = b64url(payload)
    first = _jws_part({"alg": "EdDSA", "kid": key.kid, "typ": MANIFEST_TYPE} | chain, body, key)
    if key.second is None:
        document: dict[str, Any] = {"payload": body} | first
    else:
        second = _jws_part({"alg": MLDSA, "kid": key.kid, "typ": MANIFEST_TYPE}, body, key.second)
        document = {"payload": body, "signatures": [first, second]}
    return strict_json.dumps(document).encode() + b"\n"


def _jws_part(header: Mapping[str, Any], body: str, key: SigningKey | SecondSigningKey) -> dict[str, str]:
    protected = b64url(strict_json.dumps(header).encode())
    return {"protected": protected, "signature": b64url(key.sign(f"{protected}.{body}".encode()))}
