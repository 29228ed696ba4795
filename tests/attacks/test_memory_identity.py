"""67: what of an identity is left in a process that opened a model by it, besides what test_memory.py looks for."""

from __future__ import annotations

import hashlib
import json
import secrets

import pytest

from secure_loader import MasterKey
from secure_loader.core.aead import ALGORITHMS
from secure_loader.core.keys.hybrid import Identity
from secure_loader.core.keys.jwk import b64url
from secure_loader.core.recipient import WrapContext
from secure_loader.core.secrets import Secret
from tests.attacks.kit import SIGN, Victim, build_file
from tests.attacks.test_memory import Scene, everything, process, seen, spellings


@pytest.fixture(scope="module")
def opened(tmp_path_factory) -> tuple[Scene, dict[str, bytes]]:
    """A model for an identity that is nowhere but in its file, and all that must not be left."""
    folder = tmp_path_factory.mktemp("identity")
    raw, seed = secrets.token_bytes(32), secrets.token_bytes(32)
    key = MasterKey("enc-1", ALGORITHMS["aes256gcm"], Secret(raw))
    bob = Identity("bob-1", Secret(seed))
    entry = bob.public().wrap(key.secret, WrapContext("enc-1", "aes256gcm", "demo/model"))
    model = build_file(folder / "x.safetensors", master=key, recipients=(entry,))
    with Victim(keys=[key]).open(model) as f:
        f.get_tensor("big")
        deks = tuple(bytes(s.reveal()) for s in f.file._deks.values())
    trust, identity = folder / "trust.json", folder / "bob.id.jwk"
    trust.write_text(json.dumps(SIGN.verify_key().document()))
    identity.write_text(json.dumps(bob.document(b64url)))
    identity.chmod(0o600)
    (folder / "home").mkdir()
    scene = Scene(
        model,
        trust,
        raw,
        deks,
        {"identity": str(identity)},
        {"SECURE_LOADER_HOME": str(folder / "home"), "HOME": str(folder)},
        *[b""] * 5,
    )
    expanded = hashlib.shake_256(seed).digest(96)
    wanted = everything(scene) | spellings(seed, "seed") | spellings(expanded[64:], "X25519 key")
    return scene, wanted | spellings(expanded[:32], "d of ML-KEM") | spellings(expanded[32:64], "z of ML-KEM")


def test_a67_no_identity_in_memory_after_closing(opened):
    scene, wanted = opened
    with process(scene, "identity") as child:
        assert seen(child, wanted) == set()


def test_a67_no_identity_in_memory_while_the_model_is_open(opened):
    scene, wanted = opened
    with process(scene, "identity", "open") as child:
        found = seen(child, wanted)
    assert {f"key of tensor {i}, raw" for i in range(len(scene.deks))} <= found
    assert not [name for name in found if not name.startswith("key of tensor")]
