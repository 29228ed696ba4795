"""67: what is left of a key in a process that had a service unwrap or wrap it, looked at from outside, byte by byte."""

from __future__ import annotations

import base64
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from secure_loader import MasterKey
from secure_loader.core.aead import ALGORITHMS
from secure_loader.core.keys.gcpkms import crc32c
from secure_loader.core.recipient import Recipient, WrapContext
from secure_loader.core.secrets import Secret
from tests.attacks.kit import SIGN, Victim, build_file
from tests.attacks.test_memory import seen, spellings
from tests.integration.keys.services import Authority, Call, answer, read_json, serving

ARN = "arn:aws:kms:eu-central-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
GCP = "projects/p/locations/l/keyRings/r/cryptoKeys/k"
VERSION = "0698c2156c1a4e1da5b6bab6f6422fd6"
SERVICES = ("transit", "awskms", "gcpkms", "azurekv")
LOAD = """
f = secure_loader.safe_open(path, "numpy", keys=[reference], trust=trust, strict=True)
with f:
    for name in f.keys():
        f.get_tensor(name)
del f
"""
WRAP = """
from secure_loader.config import load
from secure_loader.core.keys.local import read_keys
from secure_loader.core.keys.recipients import targets, wrap_for
key, = read_keys(pathlib.Path(path))
wrap_for(targets([reference], load()), key, "demo/model")
del key
"""
CHILD = """
import gc, pathlib, sys
import secure_loader
path, reference, trust = sys.argv[1:]
{steps}
gc.collect()
print("ready", flush=True)
sys.stdin.read(1)
"""


@dataclass(frozen=True)
class Scene:
    """A model for four services, and what nobody should find."""

    model: Path
    key_file: Path
    trust: Path
    references: dict[str, str]
    environment: dict[str, str]
    wanted: dict[str, bytes]


def speaking(key: bytes, fresh: bytes):
    """All services in one: each wraps by saying so, and unwraps the one key that there is."""

    def script(call: Call) -> None:
        line, fields, _ = read_json(call)
        what, plain = line.split()[1], base64.b64encode(key).decode()
        said = {
            "/v1/transit/decrypt/k": {"data": {"plaintext": plain}},
            "/v1/transit/encrypt/k": {"data": {"ciphertext": "vault:v1:" + "A" * 80}},
            f"/v1/{GCP}:decrypt": {"plaintext": plain, "plaintextCrc32c": str(crc32c(key))},
            f"/v1/{GCP}:encrypt": {
                "name": f"{GCP}/cryptoKeyVersions/1",
                "ciphertext": base64.b64encode(b"sealed").decode(),
                "ciphertextCrc32c": str(crc32c(b"sealed")),
                "verifiedPlaintextCrc32c": True,
                "verifiedAdditionalAuthenticatedDataCrc32c": True,
            },
            f"/keys/k/{VERSION}/unwrapkey?api-version=7.4": {"value": base64.urlsafe_b64encode(fresh).decode()},
            "/keys/k/wrapkey?api-version=7.4": {"value": "A" * 342},
        }.get(what)
        if what == "/":
            said = {"KeyId": ARN, "Plaintext": plain}
            if fields["x-amz-target"] == "TrentService.Encrypt":
                said = {"KeyId": ARN, "CiphertextBlob": base64.b64encode(b"sealed").decode()}
        if what.startswith("/keys/"):
            said |= {"kid": f"https://localhost/keys/k/{VERSION}"}
        answer(json.dumps(said).encode())(call)

    return script


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("memory")
    raw, fresh = secrets.token_bytes(32), secrets.token_bytes(32)
    key = MasterKey("enc-1", ALGORITHMS["aes256gcm"], Secret(raw))
    context = WrapContext(key.kid, key.algorithm.name, "demo/model").encode()
    sealed = base64.urlsafe_b64encode(AESGCM(fresh).encrypt(bytes(12), raw, context)).rstrip(b"=").decode()
    azure = {"alg": "RSA-OAEP-256", "version": VERSION, "value": "A" * 342, "iv": "A" * 16, "sealed": sealed}
    entries = [
        Recipient("vault-transit", "transit/keys/k", b"vault:v1:" + b"A" * 80),
        Recipient("aws-kms", ARN, b"sealed"),
        Recipient("gcp-kms", GCP, b"sealed"),
        Recipient("azure-kv", "localhost/keys/k", json.dumps(azure).encode()),
    ]
    model = build_file(folder / "x.safetensors", master=key, recipients=tuple(sorted(entries)))
    wanted = spellings(raw, "master key") | spellings(fresh, "fresh key")
    with Victim(keys=[key]).open(model) as f:
        f.get_tensor("big")
        for i, dek in enumerate(f.file._deks.values()):
            wanted |= spellings(bytes(dek.reveal()), f"key of tensor {i}")

    def private(name: str, data: bytes) -> str:
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o600)
        return str(folder / name)

    (folder / "trust.json").write_text(json.dumps(SIGN.verify_key().document()))
    (folder / "trust.json").chmod(0o644)
    authority = Authority(folder)
    settings = f'[loader]\nkey_private_hosts = ["localhost"]\nkey_ca_file = "{authority.file}"\n'
    private("config.toml", settings.encode())
    wanted["token"] = secrets.token_urlsafe(40).encode()
    token = private("token", wanted["token"])
    with serving(authority.issue("localhost"), speaking(raw, fresh)) as server:
        here = f"https://localhost:{server.port}"
        references = {
            "transit": f"transit:{here}/transit/keys/k",
            "awskms": f"awskms:{ARN}",
            "gcpkms": f"gcpkms:{here}/{GCP}",
            "azurekv": f"azurekv:{here}/keys/k",
        }
        environment = {
            "SECURE_LOADER_HOME": str(folder),
            "HOME": str(folder),
            "VAULT_CACERT": str(authority.file),
            "VAULT_TOKEN_FILE": token,
            "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": token,
            "AZURE_ACCESS_TOKEN_FILE": token,
            "AWS_ENDPOINT_URL_KMS": here,
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
        }
        key_file = Path(private("key.jwk", json.dumps(key.document()).encode()))
        yield Scene(model, key_file, folder / "trust.json", references, environment, wanted)


def left(scene: Scene, service: str, steps: str, path: Path) -> set[str]:
    """What is found in a process that has done the steps."""
    environment = os.environ | scene.environment | {"LD_BIND_NOW": "1"}
    words = [sys.executable, "-c", CHILD.format(steps=steps), path, scene.references[service], scene.trust]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
        try:
            assert child.stdout.readline() == b"ready\n"
            return seen(child, scene.wanted)
        finally:
            child.kill()


@pytest.mark.parametrize("service", SERVICES)
def test_a67_no_key_in_memory_after_a_service_unwrapped_it(scene, service):
    assert left(scene, service, LOAD, scene.model) == set()


@pytest.mark.parametrize("service", SERVICES)
def test_a67_no_key_in_memory_after_a_service_wrapped_it(scene, service):
    assert left(scene, service, WRAP, scene.key_file) == set()


def test_a67_the_search_finds_a_key_that_is_kept(scene):
    assert "master key, raw" in left(scene, "transit", WRAP.replace("del key", ""), scene.key_file)
