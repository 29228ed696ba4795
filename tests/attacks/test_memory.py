"""67, 68: what of a key is left in a process that has closed its model, looked at from outside, byte by byte."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyrage
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from secure_loader import MasterKey
from secure_loader.core.aead import ALGORITHMS
from secure_loader.core.keys.scrypt_file import MIN_WORK, seal
from secure_loader.core.secrets import Secret
from tests.attacks.kit import SIGN, Victim, build_file
from tests.integration.keys.kbs_peer import brokering
from tests.integration.keys.services import Authority, Call, answer, serving

PHRASE = b"correct horse battery staple"
NETWORK = ("https", "vault-fields", "vault-text", "vault-document", "vault-approle")
BROKER = {"kbs-jwk": "attest", "kbs-bare": "attest", "kbs-token": "token", "kbs-hub": "cdh"}
CHILD = """
import gc, sys
import numpy
import secure_loader
path, reference, trust, *steps = sys.argv[1:]
if "harden" in steps:
    secure_loader.harden_process()
f = secure_loader.safe_open(path, "numpy", keys=[reference], trust=trust, strict=True)
with f:
    for name in f.keys():
        f.get_tensor(name)
    if "open" in steps:
        print("ready", flush=True)
        sys.stdin.read(1)
del f
if "forget" in steps:
    secure_loader.forget_keys()
gc.collect()
print("ready", flush=True)
sys.stdin.read(1)
"""


@dataclass(frozen=True)
class Scene:
    """A model under a key that is nowhere but in its sources. ``token`` and ``pass_word`` are what Vault wants to see,
    ``passport`` and ``scalar`` what a broker issued for an attested key, and that key."""

    model: Path
    trust: Path
    key: bytes
    deks: tuple[bytes, ...]
    references: dict[str, str]
    environment: dict[str, str]
    text: bytes
    token: bytes
    pass_word: bytes
    passport: bytes
    scalar: bytes


def speaking(key: MasterKey, token: bytes) -> Callable[[Call], None]:
    """A service that has the key in every form in which it is handed out."""
    document, text = key.document(), json.dumps(key.document(), indent=1)
    secrets_of = {"fields": document, "text": {"jwk": text}, "document": {"jwk": {"keys": [document]}}}

    def script(call: Call) -> None:
        what = call.head.split()[1].rpartition("/")[2]
        found: dict[str, Any] = {"auth": {"client_token": token.decode(), "policies": ["models"]}}
        if what == "keys.json":
            found = {"keys": [document]}
        elif what in secrets_of:
            found = {"data": {"data": secrets_of[what], "metadata": {"version": 1}}}
        answer(json.dumps(found).encode())(call)

    return script


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("memory")
    raw = secrets.token_bytes(32)
    key = MasterKey("enc-1", ALGORITHMS["aes256gcm"], Secret(raw))
    model = build_file(folder / "x.safetensors", master=key)
    with Victim(keys=[key]).open(model) as f:
        f.get_tensor("big")
        deks = tuple(bytes(s.reveal()) for s in f.file._deks.values())
    text = json.dumps(key.document()).encode()

    def private(name: str, data: bytes) -> Path:
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o600)
        return folder / name

    identity = pyrage.x25519.Identity.generate()
    trust = folder / "trust.json"
    trust.write_text(json.dumps(SIGN.verify_key().document()))
    trust.chmod(0o644)
    references = {
        "file": str(private("key.jwk", text)),
        "env": "env:THE_KEY",
        "fd": "fd:0",
        "passphrase": f"passphrase:{private('key.jwk.age', seal(bytearray(text), Secret(PHRASE), work=MIN_WORK))}",
        "age": f"age:{private('other.jwk.age', pyrage.encrypt(text, [identity.to_public()]))}",
    }
    authority = Authority(folder)
    home = folder / "home"
    home.mkdir()
    settings = f'[loader]\nkey_private_hosts = ["localhost"]\nkey_ca_file = "{authority.file}"\n'
    token, pass_word = (secrets.token_urlsafe(40).encode() for _ in range(2))
    environment = {
        "SECURE_LOADER_HOME": str(home),
        "HOME": str(folder),
        "VAULT_CACERT": str(authority.file),
        "VAULT_TOKEN_FILE": str(private("token", token)),
        "VAULT_SECRET_ID_FILE": str(private("secret-id", pass_word)),
        "SECURE_LOADER_PASSPHRASE_FILE": str(private("phrase", PHRASE)),
        "SECURE_LOADER_AGE_IDENTITY": str(private("identity", str(identity).encode())),
    }
    attested = ec.generate_private_key(ec.SECP256R1())
    scalar = attested.private_numbers().private_value.to_bytes(32, "big")
    identity_of = authority.issue("localhost")
    with serving(identity_of, speaking(key, token)) as server, brokering(identity_of) as broker, brokering(None) as hub:
        broker.resources = hub.resources = {"models/key/jwk": text, "models/key/bare": raw}
        passport = broker.issue(attested.public_key()).encode()
        pem = attested.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        settings += f"""kbs_url = "{broker.url}"\nkbs_evidence = ["sample"]\ninsecure_kbs_sample_evidence = true
kbs_cdh_port = {hub.port}\nkbs_token_file = "{private("passport", passport)}"
kbs_token_key_file = "{private("attested.pem", pem)}"\n"""
        (home / "config.toml").write_text(settings)
        references |= {name: f"kbs:///models/key/{'bare' if 'bare' in name else 'jwk'}" for name in BROKER}
        vault = f"vault:https://localhost:{server.port}/secret/data"
        references |= {
            "https": f"https://localhost:{server.port}/keys.json",
            "vault-fields": f"{vault}/fields",
            "vault-text": f"{vault}/text",
            "vault-document": f"{vault}/document",
            "vault-approle": f"{vault}/text",
        }
        yield Scene(model, trust, raw, deks, references, environment, text, token, pass_word, passport, scalar)


@contextlib.contextmanager
def process(scene: Scene, source: str, *steps: str) -> Iterator[subprocess.Popen]:
    """A process that has done the steps, and waits."""
    # What OpenSSL leaves in vector registers nobody can overwrite from here. The C library saves these on the stack when
    # it looks up a function that is called for the first time: look up all of them at the start.
    environment = (
        os.environ
        | scene.environment
        | {"LD_BIND_NOW": "1"}
        | ({"THE_KEY": scene.text.decode()} if source == "env" else {})
        | ({"SECURE_LOADER_KBS_MODE": BROKER[source]} if source in BROKER else {})
        | ({"VAULT_ROLE_ID": "loader", "VAULT_TOKEN_FILE": ""} if source == "vault-approle" else {})
    )
    ours, theirs = os.pipe()
    waiting = ours
    if source == "fd":
        # Standard input brings the key; afterwards it is /dev/null, so that read(1) ends at once: sleep instead.
        os.write(theirs, scene.text)
        os.close(theirs)
    code = CHILD.replace("sys.stdin.read(1)", "__import__('time').sleep(60)")
    words = [sys.executable, "-c", code, scene.model, scene.references[source], scene.trust, *steps]
    child = subprocess.Popen(words, stdin=waiting, stdout=subprocess.PIPE, env=environment)
    try:
        os.close(ours)
        assert child.stdout.readline() == b"ready\n"
        yield child
    finally:
        child.kill()
        child.communicate()
        if source != "fd":
            os.close(theirs)


def spellings(secret: bytes, what: str) -> dict[str, bytes]:
    """Whole, and the half of it that the freed memory of an allocator would still show."""
    found = {}
    for part, data in (("", secret), (", first half", secret[:16]), (", second half", secret[16:])):
        found |= {f"{what}{part}, raw": data, f"{what}{part}, hex": data.hex().encode()}
    for name, encode in (("base64", base64.b64encode), ("base64url", base64.urlsafe_b64encode)):
        digits = encode(secret).rstrip(b"=")
        found |= {f"{what}, {name}": digits, f"{what}, end of {name}": digits[20:]}
    return found


def seen(child: subprocess.Popen, wanted: dict[str, bytes]) -> set[str]:
    """Which of some bytes are in the memory that a process can write: heap, stacks, anonymous maps, data of libraries."""
    found = set()
    maps = Path(f"/proc/{child.pid}/maps").read_text().splitlines()
    with Path(f"/proc/{child.pid}/mem").open("rb", 0) as memory:
        for line in maps:
            span, access, *_ = line.split()
            if "w" not in access:
                continue
            start, stop = (int(x, 16) for x in span.split("-"))
            memory.seek(start)
            data = memory.read(stop - start)
            found |= {name for name, secret in wanted.items() if re.search(re.escape(secret), data)}
    return found


def everything(scene: Scene) -> dict[str, bytes]:
    wanted = spellings(scene.key, "master key")
    for i, dek in enumerate(scene.deks):
        wanted |= spellings(dek, f"key of tensor {i}")
    return wanted


@pytest.mark.parametrize("source", ["file", "env", "fd", "passphrase", "age", *NETWORK, *BROKER])
def test_a67_no_key_in_memory_after_closing(scene, source):
    wanted = everything(scene) | {"token": scene.token, "secret id": scene.pass_word, "passport": scene.passport}
    wanted |= spellings(scene.scalar, "attested key")
    with process(scene, source, "forget") as child:
        assert seen(child, wanted) == set()


def test_a67_the_search_finds_what_is_there(scene):
    """Keys of tensors while the file is open; a key that is remembered because its source cannot be read again."""
    with process(scene, "file", "open") as child:
        found = seen(child, everything(scene))
        assert {f"key of tensor {i}, raw" for i in range(len(scene.deks))} <= found
        assert not [name for name in found if name.startswith("master key")], "let go as soon as it has unwrapped"
    with process(scene, "env") as child:
        assert "master key, raw" in seen(child, everything(scene))


@pytest.mark.parametrize("source", ["file", "passphrase", "https", "vault-text", "kbs-jwk"])
def test_a67_no_key_as_text_even_while_a_model_is_open(scene, source):
    with process(scene, source, "open") as child:
        assert not [name for name in seen(child, everything(scene)) if "hex" in name or "base64" in name]


def test_a67_a_variable_is_not_left_where_the_process_was_started_with_it(scene):
    with process(scene, "env", "open") as child:
        shown = Path(f"/proc/{child.pid}/environ").read_bytes()
    assert b"SECURE_LOADER_HOME=" in shown
    assert scene.text[:30] not in shown
    assert b"THE_KEY=\0" in shown


def test_a68_no_core_with_keys_in_it(scene, tmp_path):
    with process(scene, "file", "harden", "open") as child:
        limits = Path(f"/proc/{child.pid}/limits").read_text()
        owner = Path(f"/proc/{child.pid}/mem").stat().st_uid
    assert re.search(r"^Max core file size +0 +0 ", limits, re.MULTILINE)
    assert owner == 0, "root's, not the user's: the kernel dumps no such process and lets no other look into it"
