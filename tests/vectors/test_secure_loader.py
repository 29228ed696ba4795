"""Our reader over every vector: what must open does, bit for bit; what must be refused is, by the error named."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from secure_loader import LoaderConfig, MasterKey, Session, TrustedSigner, TrustStore, errors
from secure_loader.core import manifest, rollback
from secure_loader.core.archive import TensorFile
from secure_loader.core.checkpoint import Checkpoint
from secure_loader.core.keys.jwk import VerifyKey, parse_key, parse_second
from secure_loader.core.source import FileSource
from tests.vectors import Vector, iter_vectors

VECTORS = list(iter_vectors())


def session_for(vector: Vector, folder: Path) -> Session:
    """What the vector's reader has; private identities lie in a hidden folder, as key files do."""
    keys = [parse_key(jwk, "vector") for jwk in vector.keys]
    seconds = {jwk["kid"]: parse_second(jwk, "vector") for jwk in vector.trust if jwk["kty"] == "AKP"}
    public = ({k: v for k, v in jwk.items() if k != "d"} for jwk in vector.trust if jwk["kty"] != "AKP")
    trusted = [parse_key(jwk, "vector") for jwk in public]
    signers = [
        TrustedSigner(key.kid, replace(key, second=seconds.get(key.kid)))
        for key in trusted
        if isinstance(key, VerifyKey)
    ]
    config = LoaderConfig(
        integrity="full" if vector.full_integrity else "tags",
        insecure_allow_legacy=not vector.profile_required,
        insecure_allow_unverified_clear=vector.unverified_clear,
    )
    sources: list[str | MasterKey] = [k for k in keys if isinstance(k, MasterKey)]
    if identities := [jwk for jwk in vector.keys if jwk["kty"] == "AKP"]:
        sources.append(str(folder / ".identities"))
        (folder / ".identities").mkdir()
        for i, jwk in enumerate(identities):
            path = folder / ".identities" / f"{i}.jwk"
            path.touch(0o600)
            path.write_text(json.dumps(jwk))
    return Session(keys=sources, trust=TrustStore(signers), config=config)


def contents(file: TensorFile) -> dict[str, tuple[str, str, list[int]]]:
    """SHA-256, dtype and shape of every tensor."""
    found = {}
    with file.source:
        if file.envelope is not None:
            file.unlock()
        for t in file.header.tensors.values():
            data = bytearray(t.nbytes)
            file.read_into(t.name, memoryview(data))
            found[t.name] = (hashlib.sha256(data).hexdigest(), t.dtype, list(t.shape))
    return found


def read(vector: Vector, folder: Path) -> dict[str, tuple[str, str, list[int]]]:
    session = session_for(vector, folder)
    if vector.kind == "file":
        return contents(session.accept(FileSource.from_bytes(vector.data)))
    for name, data in vector.files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    if vector.floor:
        model_id = manifest.peek((folder / manifest.MANIFEST).read_bytes()).model_id
        for signer in session.trust.signers:
            rollback.check_release(model_id, signer.key.thumbprint(), vector.floor)
    checkpoint = Checkpoint(folder, session)
    found, root = {}, set(checkpoint.weights().values())
    for shard in checkpoint.shards():
        tensors = contents(checkpoint.open(shard))
        found |= tensors if shard in root else {}
    return found


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v.name)
def test_vector(vector: Vector, tmp_path: Path) -> None:
    if vector.expect != "success":
        expected = getattr(errors, vector.expect)
        with pytest.raises(expected):
            read(vector, tmp_path)
        return
    found = read(vector, tmp_path)
    assert {name: digest for name, (digest, _, _) in found.items()} == vector.sha256s
    assert {name: dtype for name, (_, dtype, _) in found.items()} == vector.dtypes
    assert {name: shape for name, (_, _, shape) in found.items()} == vector.shapes


def test_the_vectors_name_every_error_that_a_file_can_show() -> None:
    named = {v.expect for v in VECTORS} - {"success"}
    assert named >= {"FormatError", "SignatureError", "AuthenticationError", "KeyAccessError", "ManifestError"}
