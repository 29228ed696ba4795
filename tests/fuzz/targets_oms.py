"""The target of ``model.sig``: bundles that nobody signed, and statements that somebody was made to sign."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric import ec

from secure_loader.core import oms
from secure_loader.core.keys.ec import EcSigningKey
from secure_loader.errors import SecureLoaderError
from tests.fuzz.claims import check

_OWNER, _STRANGER = (EcSigningKey(ec.derive_private_key(n, ec.SECP256R1())) for n in (2, 3))
_TRUSTED = [_OWNER.verify_key("owner")]
_FILES = {"config.json": "0" * 64, "sub/x": "1" * 64, ".keep": "a" * 64, "sub-a": "f" * 64}
_GENUINE = oms.write("model", _FILES, ["model.sig", ".git"], _OWNER)


def one_oms(data: bytes) -> None:
    """The input is a ``model.sig``; and once more, the statement in one, which a trusted key has signed."""
    try:
        found, key = oms.read(data, _TRUSTED)
        check(found == _FILES and key == _TRUSTED[0], "a signature of nobody was accepted")
    except SecureLoaderError:
        pass
    try:
        found, _ = oms.read(_bundle(data), _TRUSTED)
    except SecureLoaderError:
        return
    for name, digest in found.items():
        check(name and not name.startswith("/") and ".." not in name.split("/"), "a path leaves the folder")
        check(len(bytes.fromhex(digest)) == 32, "a digest is none")
    check(oms.read(oms.write("again", found, [], _OWNER), _TRUSTED)[0] == found, "files changed when signed anew")


def _bundle(statement: bytes) -> bytes:
    doc = json.loads(_GENUINE)
    # The target is about what is read once a signature holds, not about the wrapping.
    signature = base64.b64encode(_OWNER.sign(oms._signed(statement))).decode()
    doc["dsseEnvelope"] |= {
        "payload": base64.b64encode(statement).decode(),
        "signatures": [{"sig": signature, "keyid": ""}],
    }
    return json.dumps(doc).encode()


def seeds() -> dict[str, list[bytes]]:
    """Genuine ones, one by a stranger, and what is inside."""
    genuine, foreign = json.loads(_GENUINE), json.loads(oms.write("model", _FILES, [], _STRANGER))
    statement = base64.b64decode(genuine["dsseEnvelope"]["payload"])
    posing = foreign | {"verificationMaterial": genuine["verificationMaterial"]}
    spaced = json.dumps(json.loads(statement), indent=2).encode()
    return {
        "fuzz_oms": [
            _GENUINE,
            json.dumps(genuine | {"verificationMaterial": {"publicKey": {}}}).encode(),
            json.dumps(foreign).encode(),
            json.dumps(posing).encode(),
            statement,
            spaced,
            statement.replace(b'"files"', b'"shards"').replace(b"false", b'false,"shard_size":1000000000.0'),
        ]
    }


TARGETS: dict[str, Callable[[bytes], None]] = {"fuzz_oms": one_oms}
