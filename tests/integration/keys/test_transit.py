"""``transit:`` keys in the real OpenBao: they wrap and unwrap, for whom and for what they should, and say why not."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from secure_loader import encrypt_model, rewrap_model
from secure_loader.config import LoaderConfig
from secure_loader.core.aead import ALGORITHMS
from secure_loader.core.archive import Archive
from secure_loader.core.checkpoint import Checkpoint
from secure_loader.core.keys.provider import KeyRequest, KeyRing, key_check_value
from secure_loader.core.keys.recipients import targets
from secure_loader.core.keys.transit import TransitProvider
from secure_loader.core.recipient import Recipient, WrapContext
from secure_loader.core.secrets import Secret
from secure_loader.core.session import Session
from secure_loader.errors import (
    ConfigError,
    KeyAccessError,
    KeySourceDeniedError,
    KeySourceResponseError,
    KeySourceUnreachableError,
    UntrustedSignerError,
)
from tests.attacks.kit import (
    KEY,
    MALLORY,
    MALLORY_KEY,
    SIGN,
    assert_no_secret,
    build_folder,
    build_source,
    refused,
    shard,
    split,
    trust,
)
from tests.integration.keys.openbao import ROOT, running
from tests.integration.keys.services import Counter, answer, frames, hang, read_json, serving

CONTEXT = WrapContext(KEY.kid, KEY.algorithm.name, "demo/model")
POLICIES = {
    "wraps": 'path "transit/encrypt/*" { capabilities = ["update"] }',
    "unwraps": 'path "transit/decrypt/*" { capabilities = ["update"] }',
}


@pytest.fixture(scope="module")
def transit(openbao):
    """A transit engine with a key ``models``, policies to wrap and to unwrap, and an AppRole that may unwrap."""
    openbao.do("POST", "sys/mounts/transit", {"type": "transit"})
    openbao.do("POST", "transit/keys/models", {"type": "aes256-gcm96"})
    for name, policy in POLICIES.items():
        openbao.do("POST", f"sys/policies/acl/{name}", {"policy": policy})
    return openbao


@pytest.fixture
def may(transit, vault_user):
    """Makes the person who asks somebody with these policies."""

    def become(*policies: str) -> None:
        vault_user.write_text(ROOT if policies == ("everything",) else transit.token(*policies))

    become(*POLICIES)
    return become


def where(server, name: str = "models", mount: str = "transit", **more) -> str:
    return server.reference(f"{mount}/keys/{name}", **more).removeprefix("vault:")


def config(**more) -> LoaderConfig:
    return LoaderConfig(**{"key_private_hosts": ["127.0.0.1", "localhost"], "key_timeout_seconds": 5} | more)


def service(**more) -> TransitProvider:
    made = TransitProvider()
    made.configure(config(**more))
    return made


def asking(*recipients: Recipient, context: WrapContext = CONTEXT, key=KEY) -> KeyRequest:
    file_id = bytes(16)
    kcv = key_check_value(key.secret, file_id)
    return KeyRequest(context.kid, ALGORITHMS[context.algorithm], context.model_id, file_id, kcv, recipients)


def resolve(reference: str, request: KeyRequest, **more):
    return KeyRing([f"transit:{reference}"], config(**more)).resolve(request)


def is_key(unwrapper) -> bool:
    return bytes(unwrapper.secret.reveal()) == bytes(KEY.secret.reveal())


@pytest.mark.parametrize("kind", ["aes256-gcm96", "aes128-gcm96", "chacha20-poly1305", "xchacha20-poly1305"])
def test_what_is_wrapped_is_unwrapped(transit, may, kind):
    transit.do("POST", f"transit/keys/{kind}", {"type": kind})
    entry = service().wrap(where(transit, kind), KEY.secret, CONTEXT)
    assert (entry.alg, entry.kid) == ("vault-transit", f"transit/keys/{kind}")
    assert re.fullmatch(rb"vault:v1:[A-Za-z0-9+/=]+", entry.wrapped)
    assert_no_secret(entry.wrapped.decode())
    assert is_key(resolve(where(transit, kind), asking(entry)))
    assert is_key(resolve(where(transit, kind, host="localhost"), asking(entry))), "a file names no host"


def test_who_publishes_needs_not_unwrap_and_who_loads_not_wrap(transit, may):
    may("wraps")
    entry = service().wrap(where(transit), KEY.secret, CONTEXT)
    with refused(KeySourceDeniedError, f"https://127.0.0.1:{transit.port} denies the key (HTTP 403)", "no policy lets"):
        resolve(where(transit), asking(entry))
    may("unwraps")
    assert is_key(resolve(where(transit), asking(entry)))
    with refused(KeySourceDeniedError, "denies the key (HTTP 403)"):
        service().wrap(where(transit), KEY.secret, CONTEXT)


@pytest.mark.parametrize(
    "other", [{"kid": "enc-2"}, {"algorithm": "chacha20poly1305"}, {"model_id": "demo/other"}, {"model_id": ""}]
)
def test_an_entry_is_for_one_key_of_one_model(transit, may, other):
    entry = service().wrap(where(transit), KEY.secret, CONTEXT)
    with refused(KeySourceDeniedError, "was wrapped by another key or for another model"):
        resolve(where(transit), asking(entry, context=dataclasses.replace(CONTEXT, **other)))


def test_an_altered_entry(transit, may):
    entry = service().wrap(where(transit), KEY.secret, CONTEXT)
    transit.do("POST", "transit/keys/another", {})
    with refused(KeySourceDeniedError, "was wrapped by another key"):
        resolve(where(transit, "another"), asking(dataclasses.replace(entry, kid="transit/keys/another")))
    for wrapped in (
        entry.wrapped[:-8] + b"AAAAAAA=",
        entry.wrapped.replace(b":v1:", b":v2:"),
        b"vault:v1:" + b"A" * 16,
    ):
        with refused(KeySourceDeniedError, "or was altered"):
            resolve(where(transit), asking(dataclasses.replace(entry, wrapped=wrapped)))
    for wrapped in (b"hunter2", b"\xff" * 50, entry.wrapped + b'","x":"', b"vault:v1:" + b"A" * 8100):
        with refused(KeyAccessError, "what is wrapped for transit/keys/models is not a ciphertext of a transit engine"):
            resolve(where(transit), asking(dataclasses.replace(entry, wrapped=wrapped)))


def test_rotation_on_the_server(transit, may):
    """Old files open with old versions of the key, until those are disallowed."""
    transit.do("POST", "transit/keys/turned", {})
    old = service().wrap(where(transit, "turned"), KEY.secret, CONTEXT)
    transit.do("POST", "transit/keys/turned/rotate")
    new = service().wrap(where(transit, "turned"), KEY.secret, CONTEXT)
    assert new.wrapped.startswith(b"vault:v2:")
    for entry in (old, new):
        assert is_key(resolve(where(transit, "turned"), asking(entry)))
    transit.do("POST", "transit/keys/turned/config", {"min_decryption_version": 2})
    assert is_key(resolve(where(transit, "turned"), asking(new)))
    with refused(KeySourceDeniedError, "denies the key: the version of it", "is disallowed (min_decryption_version)"):
        resolve(where(transit, "turned"), asking(old))


def test_a_key_that_was_deleted(transit, may):
    transit.do("POST", "transit/keys/gone", {})
    entry = service().wrap(where(transit, "gone"), KEY.secret, CONTEXT)
    transit.do("POST", "transit/keys/gone/config", {"deletion_allowed": True})
    transit.do("DELETE", "transit/keys/gone")
    with refused(KeySourceResponseError, "has no key of that name"):
        resolve(where(transit, "gone"), asking(entry))


def test_a_typo_makes_no_key(transit, may):
    """An engine makes a key that it is asked to encrypt with, for those who may make keys."""
    may("everything")
    with refused(KeySourceResponseError, "has no key of that name", "type=aes256-gcm96"):
        service().wrap(where(transit, "modles"), KEY.secret, CONTEXT)
    assert transit.call("GET", "transit/keys/modles")[0] == 404


@pytest.mark.parametrize("kind", ["rsa-4096", "ed25519", "ecdsa-p256"])
def test_types_of_keys_that_bind_nothing(transit, may, kind):
    transit.do("POST", f"transit/keys/{kind}", {"type": kind})
    with refused(KeySourceResponseError, "cannot bind a master key to a model with this type of key"):
        service().wrap(where(transit, kind), KEY.secret, CONTEXT)


def test_derived_keys(transit, may):
    transit.do("POST", "transit/keys/derived", {"derived": True})
    with refused(KeySourceResponseError, "cannot wrap with a derived key"):
        service().wrap(where(transit, "derived"), KEY.secret, CONTEXT)


def test_wrong_mounts(transit, may):
    may("everything")
    for mount in ("nothing", "secret"):
        with refused(KeySourceResponseError, "has nothing at that path (HTTP 404)"):
            service().wrap(where(transit, mount=mount), KEY.secret, CONTEXT)


def test_a_mount_deeper_down_and_a_namespace(transit, may, monkeypatch):
    may("everything")
    transit.do("POST", "sys/namespaces/makers", {})
    transit.do("POST", "sys/mounts/a/b", {"type": "transit"}, "makers")
    transit.do("POST", "a/b/keys/models", {}, "makers")
    monkeypatch.setenv("VAULT_NAMESPACE", "makers")
    entry = service().wrap(where(transit, mount="a/b"), KEY.secret, CONTEXT)
    assert entry.kid == "a/b/keys/models"
    assert is_key(resolve(where(transit, mount="a/b"), asking(entry)))
    monkeypatch.delenv("VAULT_NAMESPACE")
    with refused(KeySourceResponseError, "has nothing at that path (HTTP 404)"):
        resolve(where(transit, mount="a/b"), asking(entry))


def test_an_approle(transit, may, tmp_path, monkeypatch):
    entry = service().wrap(where(transit), KEY.secret, CONTEXT)
    monkeypatch.delenv("VAULT_TOKEN_FILE")
    role = "auth/approle/role/unwrapper"
    transit.do("POST", role, {"token_policies": "unwraps", "token_ttl": "1m", "token_num_uses": 1})
    secret_id = tmp_path / "secret-id"
    secret_id.touch(0o600)
    secret_id.write_text(transit.do("POST", f"{role}/secret-id", {})["data"]["secret_id"])
    monkeypatch.setenv("VAULT_ROLE_ID", transit.do("GET", f"{role}/role-id")["data"]["role_id"])
    monkeypatch.setenv("VAULT_SECRET_ID_FILE", str(secret_id))
    assert is_key(resolve(where(transit), asking(entry)))
    with refused(KeySourceDeniedError, "denies the key (HTTP 403)"):
        service().wrap(where(transit), KEY.secret, CONTEXT)
    secret_id.write_text("11111111-2222-3333-4444-555555555555")
    with refused(KeySourceDeniedError, "denies the AppRole (HTTP 400)"):
        resolve(where(transit), asking(entry))


def test_files_that_are_not_for_us(transit, may):
    entry = service().wrap(where(transit), KEY.secret, CONTEXT)
    strangers = (dataclasses.replace(entry, kid="transit/keys/other"), dataclasses.replace(entry, alg="aws-kms"))
    with refused(KeyAccessError, "no master key with kid 'enc-1'"):
        resolve(where(transit), asking(*strangers))
    assert is_key(resolve(where(transit), asking(*strangers, entry)))


def test_another_key_than_the_file_was_encrypted_with(transit, may):
    entry = service().wrap(where(transit), MALLORY_KEY.secret, CONTEXT)
    with refused(KeyAccessError, "key check value differs"):
        resolve(where(transit), asking(entry))
    with Secret(bytes(16)) as short:
        entry = service().wrap(where(transit), short, CONTEXT)
    with refused(KeyAccessError, "has 16 bytes instead of 32"):
        resolve(where(transit), asking(entry))


@pytest.mark.parametrize(
    "rest", ["", "transit", "transit/models", "transit/keys", "transit/keys/", "keys/models", "v1/transit/keys/a", "transit/keys/a/b",
             "transit/keys/a?version=1", "transit//keys/a", "transit/encrypt/a"],
)  # fmt: skip
def test_references_that_name_no_key(vault_user, rest):
    with refused(KeyAccessError, "names no key of a transit engine", "transit:https://HOST:8200/MOUNT/keys/NAME"):
        service().kid(f"https://127.0.0.1/{rest}")


@pytest.mark.parametrize(
    "reference", ["transit:https://hunter2@host/transit/keys/a", "transit:https://host/transit/keys/a?token=hunter2"]
)
def test_references_with_secrets_are_not_shown(reference):
    for attempt in (lambda: KeyRing([reference]), lambda: targets([reference])):
        with pytest.raises(ConfigError) as caught:
            attempt()
        assert "hunter2" not in str(caught.value)


SCRIPTS = {
    "html": (answer(b"<!doctype html>"), KeySourceResponseError, "is not valid JSON"),
    "empty": (answer(b"{}"), KeySourceResponseError, "holds no data.plaintext in base64"),
    "elsewhere": (answer(b'{"plaintext":"' + b"A" * 44 + b'","data":{}}'), KeySourceResponseError, "holds no data.plaintext"),
    "number": (answer(b'{"data":{"plaintext":5}}'), KeySourceResponseError, "holds no data.plaintext"),
    "list": (answer(b'{"data":[{"plaintext":"' + b"A" * 44 + b'"}]}'), KeySourceResponseError, "holds no data.plaintext"),
    "escaped": (answer(b'{"data":{"plaintext":"\\u0041' + b"A" * 43 + b'"}}'), KeySourceResponseError, "holds no data.plaintext"),
    "twice": (answer(b'{"data":{"plaintext":"' + b"A" * 44 + b'","plaintext":"' + b"B" * 44 + b'"}}'), KeySourceResponseError, "twice"),
    "alphabets": (answer(b'{"data":{"plaintext":"+_' + b"A" * 42 + b'"}}'), KeySourceResponseError, "data.plaintext of the answer is not base64"),
    "length": (answer(b'{"data":{"plaintext":"' + b"A" * 41 + b'"}}'), KeySourceResponseError, "data.plaintext of the answer is not base64"),
    "short": (answer(b'{"data":{"plaintext":"' + b"A" * 24 + b'"}}'), KeyAccessError, "has 18 bytes instead of 32"),
    "other": (answer(b'{"data":{"plaintext":"' + b"A" * 43 + b'="}}'), KeyAccessError, "key check value differs"),
    "denied": (answer(b'{"errors":["1 error occurred:\\n\\t* permission denied\\n\\n"]}', "403 Forbidden"), KeySourceDeniedError, "HTTP 403"),
    "riddle": (answer(b'{"errors":["hunter2"]}', "400 Bad"), KeySourceResponseError, "answers HTTP 400 to what"),
    "sealed": (answer(b'{"errors":["Vault is sealed"]}', "503 Sealed"), KeySourceUnreachableError, "is sealed or not set up"),
    "redirect": (answer(b"", "307 Standby", Location="http://127.0.0.1/"), KeySourceResponseError, "redirects (HTTP 307)"),
    "silent": (hang, KeySourceUnreachableError, "no complete answer within 0.3 s"),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_a32_answers_to_an_unwrap(may, vault_user, monkeypatch, authority, localhost, name):
    """Services that are not what they seem: refused, asked once, and neither token nor key in any frame of ours."""
    script, kind, words = SCRIPTS[name]
    monkeypatch.setenv("VAULT_CACERT", str(authority.file))
    entry = Recipient("vault-transit", "transit/keys/models", b"vault:v1:" + b"A" * 80)
    token = vault_user.read_text()
    with serving(localhost, script) as server:
        with pytest.raises(KeyAccessError, match=re.escape(words)) as caught:
            resolve(f"https://localhost:{server.port}/transit/keys/models", asking(entry), key_timeout_seconds=0.3)
        assert type(caught.value) is kind
        assert server.connections == 1
        assert server.calls[0].startswith("POST /v1/transit/decrypt/models HTTP/1.1\r\n")
        assert token in server.calls[0]
    shown = frames(caught.value)
    assert token not in shown
    assert "hunter2" not in shown


@pytest.mark.parametrize(
    "body", [b"{}", b'{"data":{"ciphertext":5}}', b'{"data":{"ciphertext":"x"}}', b'{"data":{"ciphertext":"vault:v1:\\n"}}', b"[]"]
)  # fmt: skip
def test_a32_answers_to_a_wrap(may, monkeypatch, authority, localhost, body):
    """And what was to be wrapped is in no frame of ours."""
    monkeypatch.setenv("VAULT_CACERT", str(authority.file))
    with serving(localhost, answer(body)) as server, pytest.raises(KeySourceResponseError) as caught:
        service().wrap(f"https://localhost:{server.port}/transit/keys/models", KEY.secret, CONTEXT)
    assert "is not that of a transit engine" in str(caught.value)
    assert_no_secret(frames(caught.value))


def test_what_is_sent(may, monkeypatch, authority, localhost):
    """As the API wants it; the associated data is what the format says."""
    monkeypatch.setenv("VAULT_CACERT", str(authority.file))
    seen = []

    def script(call):
        seen.append(read_json(call)[2])
        answer(json.dumps({"data": {"ciphertext": "vault:v3:" + "A" * 80}}).encode())(call)

    with serving(localhost, script) as server:
        entry = service().wrap(f"https://localhost:{server.port}/transit/keys/models", KEY.secret, CONTEXT)
        assert server.calls[0].startswith("POST /v1/transit/encrypt/models HTTP/1.1\r\n")
    assert entry.wrapped == b"vault:v3:" + b"A" * 80
    bound = b'secure_loader recipient v1\0{"alg":"aes256gcm","kid":"enc-1","model_id":"demo/model"}'
    assert seen == [
        {
            "plaintext": base64.b64encode(KEY.secret.reveal()).decode(),
            "associated_data": base64.b64encode(bound).decode(),
            "type": "must-exist",
        }
    ]


def test_sealed_then_stopped(vault_user, monkeypatch, tmp_path):
    monkeypatch.setenv("VAULT_TOKEN", ROOT)
    loopback = {"insecure_allow_http_loopback": True}
    with running(tmp_path, tls=False) as server:
        server.do("POST", "sys/mounts/transit", {"type": "transit"})
        server.do("POST", "transit/keys/models", {})
        entry = service(**loopback).wrap(where(server), KEY.secret, CONTEXT)
        with refused(KeyAccessError, "http is not encrypted"):
            resolve(where(server), asking(entry))
        assert is_key(resolve(where(server), asking(entry), **loopback))
        server.do("POST", "sys/seal")
        with refused(KeySourceUnreachableError, "is sealed or not set up (HTTP 503)"):
            resolve(where(server), asking(entry), **loopback)
        server.stop()
        with refused(KeySourceUnreachableError, "cannot be reached: Connection refused"):
            resolve(where(server), asking(entry), **loopback)


def test_a_model_from_end_to_end_by_one_request(transit, may, tmp_path, secure_loader_home):
    """Encrypted for the service alone, with a key that nobody keeps; loaded by the service alone."""
    (secure_loader_home / "config.toml").write_text('[loader]\nkey_private_hosts = ["127.0.0.1"]\n')
    source = build_source(tmp_path / "plain", shards=3)
    who = {"signing_key": SIGN, "model_id": "demo/model", "recipients": [f"transit:{where(transit)}"]}
    encrypt_model(source, tmp_path / "secure", keep_names=True, **who)
    doc, _ = split(next((tmp_path / "secure").glob("*.safetensors")))
    assert "127.0.0.1" not in json.dumps(doc)
    with Counter(transit.port) as proxy:
        keys = f"transit:{where(transit, port=proxy.port)}"
        checkpoint = Checkpoint(tmp_path / "secure", Session(keys=keys, trust=trust(), config=config()))
        for name in checkpoint.shards():
            with Archive(checkpoint.open(name), "numpy") as f:
                for tensor, expected in load_file(source / name).items():
                    assert (f.get_tensor(tensor) == expected).all()
        assert proxy.connections == 1


def test_recipients_and_master_keys_change(transit, may, tmp_path, secure_loader_home):
    """A service joins, the master key is replaced by another that it wraps, and the service leaves."""
    reference = f"transit:{where(transit)}"
    (secure_loader_home / "config.toml").write_text(
        f'[loader]\nkey_private_hosts = ["127.0.0.1"]\nkeys = ["{reference}"]\n'
    )
    folder = build_folder(tmp_path / "model", shards=1)
    common = {"signing_key": SIGN, "trust": trust()}

    def loads(*keys) -> None:
        with Session(keys=keys, trust=trust(), config=config()).open(shard(folder), "numpy") as f:
            f.get_tensors()

    with refused(KeyAccessError, "no master key with kid 'enc-1'"):
        loads(reference)
    rewrap_model(folder, keys=[KEY], recipients=[reference], **common)
    loads(reference)
    loads(KEY)
    rewrap_model(folder, new_key=True, **common)
    loads(reference)
    with refused(KeyAccessError, "which is wrapped for transit/keys/models"):
        loads(KEY)
    rewrap_model(folder, key=KEY, remove=["transit/keys/models"], **common)
    loads(KEY)
    with refused(KeyAccessError, "no master key with kid 'enc-1'"):
        loads(reference)


def test_a36_no_service_is_asked_for_a_model_that_nobody_trusted_signed(transit, may, tmp_path, secure_loader_home):
    (secure_loader_home / "config.toml").write_text('[loader]\nkey_private_hosts = ["127.0.0.1"]\n')
    who = {"recipients": [f"transit:{where(transit)}"], "signing_key": MALLORY}
    folder = build_folder(tmp_path / "model", key=None, **who)
    with Counter(transit.port) as proxy:
        session = Session(keys=f"transit:{where(transit, port=proxy.port)}", trust=trust(), config=config())
        with refused(UntrustedSignerError), session.open(shard(folder), "numpy") as f:
            f.get_tensors()
        assert proxy.connections == 0


def test_the_commands_of_the_guide(transit, vault_user, tmp_path, secure_loader_home, monkeypatch):
    """What docs/keys.md says, word for word, but for the address."""
    text = (Path(__file__).parents[3] / "docs" / "keys.md").read_text()
    section = text.split("### Transit, of Vault and OpenBao\n")[1].split("\n### ")[0]
    blocks = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 3
    transit.do("DELETE", "sys/mounts/transit")
    build_source(tmp_path / "model")
    (secure_loader_home / "config.toml").write_text('[loader]\nkey_private_hosts = ["127.0.0.1"]\n')
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.delenv("VAULT_TOKEN_FILE")
    subprocess.run(["secure-loader", "keygen", "alice"], check=True, capture_output=True)
    # Whoever loads has the publisher's trust file and nothing else.
    for token, block in zip((ROOT, "", ""), blocks, strict=True):
        monkeypatch.setenv("VAULT_TOKEN", token)
        script = block.replace("vault.example.com:8200", f"127.0.0.1:{transit.port}")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        assert (tmp_path / "model-again" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
