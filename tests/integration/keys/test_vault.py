"""``vault:`` key sources against the real OpenBao: tokens, AppRole, namespaces, and a server that is away."""

from __future__ import annotations

import json
import os
import pwd
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from secure_loader import encrypt_model, safe_open
from secure_loader.config import LoaderConfig
from secure_loader.core.checkpoint import Checkpoint
from secure_loader.core.keys.provider import KeyRing, provider
from secure_loader.core.session import Session
from secure_loader.errors import (
    KeyAccessError,
    KeySourceDeniedError,
    KeySourceResponseError,
    KeySourceUnreachableError,
)
from tests.attacks.kit import (
    KEY,
    SIGN,
    arrays,
    assert_no_secret,
    build_file,
    build_folder,
    master,
    refused,
    signing,
    trust,
)
from tests.integration.keys.openbao import ROOT, running
from tests.integration.keys.services import SlowProxy, answer, hang, request_for, serving


def config(**more) -> LoaderConfig:
    return LoaderConfig(**{"key_private_hosts": ["127.0.0.1", "localhost"], "key_timeout_seconds": 5} | more)


def resolve(reference: str, settings: LoaderConfig | None = None):
    return KeyRing([reference], settings or config()).resolve(request_for(KEY))


def is_key(unwrapper) -> bool:
    return bytes(unwrapper.secret.reveal()) == bytes(KEY.secret.reveal())


def test_a_secret_with_the_members_of_a_jwk(openbao, vault_user):
    assert is_key(resolve(openbao.reference()))
    document = KEY.document()
    openbao.put("models/short", {name: document[name] for name in ("kid", "alg", "k")})
    assert is_key(resolve(openbao.reference("secret/data/models/short")))


def test_a_secret_with_a_jwk_in_a_field(openbao, vault_user):
    for i, value in enumerate(
        (KEY.document(), json.dumps(KEY.document()), {"keys": [master("o", 3).document(), KEY.document()]})
    ):
        openbao.put(f"models/field-{i}", {"jwk": value, "owner": "us"})
        assert is_key(resolve(openbao.reference(f"secret/data/models/field-{i}")))


def test_an_old_version(openbao, vault_user):
    openbao.put("models/rotated", KEY.document())
    openbao.put("models/rotated", master("newer", 3).document())
    where = openbao.reference("secret/data/models/rotated")
    with refused(KeyAccessError, "no master key with kid 'enc-1'", "searched: vault:https://127.0.0.1"):
        resolve(where)
    assert is_key(resolve(f"{where}?version=1"))


def test_a_file_opens_with_it(openbao, vault_user, tmp_path):
    path = build_file(tmp_path / "model.safetensors")
    with safe_open(
        path, "numpy", keys=[openbao.reference()], trust=trust(), config=config(), strict=True
    ) as f:  # as an operator writes it
        assert (f.get_tensor("big") == arrays()["big"]).all()


def test_from_pretrained(openbao, vault_user, tmp_path, tiny_llama_shards):
    """A model folder of three files, by Transformers, with nothing in the process but the reference."""
    import torch
    from transformers import AutoModelForCausalLM

    encrypt_model(tiny_llama_shards, tmp_path / "secure", key=KEY, signing_key=SIGN)
    signer = tmp_path / "signer.json"
    signer.write_text(json.dumps({"name": "publisher", "key": SIGN.verify_key().document()}))
    signer.chmod(0o644)
    options = {"keys": [openbao.reference()], "trust": [str(signer)], "key_private_hosts": ["127.0.0.1"]}
    secure = AutoModelForCausalLM.from_pretrained(tmp_path / "secure", loader="secure", loader_config=options)
    plain = AutoModelForCausalLM.from_pretrained(tiny_llama_shards)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, secure.state_dict()[name]), name


def test_one_request_for_a_folder(openbao, vault_user, tmp_path, monkeypatch, authority, localhost):
    """Counted by a server that stands in for OpenBao."""
    body = json.dumps({"data": {"data": KEY.document(), "metadata": {"version": 1}}}).encode()
    folder = build_folder(tmp_path / "model", shards=3)
    monkeypatch.setenv("VAULT_CACERT", str(authority.file))
    with serving(localhost, answer(body)) as server:
        where = f"vault:https://localhost:{server.port}/secret/data/models/demo"
        checkpoint = Checkpoint(folder, Session(keys=where, trust=trust(), config=config()))
        for name in checkpoint.shards():
            with checkpoint.open(name).source, checkpoint.open(name).source:
                checkpoint.open(name).unlock()
        assert len(server.calls) == 1
        assert server.calls[0].startswith("GET /v1/secret/data/models/demo HTTP/1.1\r\n")
        assert "X-Vault-Request: true\r\n" in server.calls[0]


def test_tokens_and_where_they_come_from(openbao, vault_user, tmp_path, monkeypatch):
    good = vault_user.read_text().strip()
    monkeypatch.setenv("VAULT_TOKEN", good)
    monkeypatch.setenv("VAULT_TOKEN_FILE", "/nowhere")
    assert is_key(resolve(openbao.reference())), "VAULT_TOKEN comes first"
    monkeypatch.setenv("VAULT_TOKEN", "s.wrong")
    with refused(KeySourceDeniedError, f"key source https://127.0.0.1:{openbao.port} denies the key (HTTP 403)"):
        resolve(openbao.reference())
    monkeypatch.delenv("VAULT_TOKEN")
    with refused(KeyAccessError, "token file cannot be read: No such file"):
        resolve(openbao.reference())
    monkeypatch.delenv("VAULT_TOKEN_FILE")
    with refused(KeyAccessError, "there is no token to ask with"):
        resolve(openbao.reference())
    left = tmp_path / ".vault-token"
    left.touch(0o600)
    left.write_text(good)
    assert is_key(resolve(openbao.reference())), "what `bao login` left"


def test_nobody_is_at_home(openbao, vault_user, monkeypatch):
    """A container may run under a number that no user has, without HOME: what was named is found all the same."""

    def getpwuid(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", getpwuid)
    monkeypatch.delenv("HOME")
    assert is_key(resolve(openbao.reference()))
    monkeypatch.delenv("VAULT_TOKEN_FILE")
    with refused(KeyAccessError, "there is no token to ask with"):
        resolve(openbao.reference())


def test_a_token_file_is_kept_as_a_key_is(openbao, vault_user, tmp_path, monkeypatch):
    vault_user.chmod(0o640)
    with refused(KeyAccessError, "token file can be read by others (mode 0640)", place=vault_user):
        resolve(openbao.reference())
    vault_user.chmod(0o600)
    link = tmp_path / "link"
    link.symlink_to(vault_user)
    monkeypatch.setenv("VAULT_TOKEN_FILE", str(link))
    with refused(KeyAccessError, "token file is a link or not a regular file"):
        resolve(openbao.reference())


@pytest.mark.parametrize("text", ["", "\n", "two words", "a\r\nX-Evil: 1", "t\u00f6ken", "a\0b", 'quo"te'])
def test_what_is_no_token_is_not_sent_and_not_shown(openbao, vault_user, text):
    vault_user.write_text(text)
    with pytest.raises(KeyAccessError, match="does not hold one word of ASCII") as caught:
        resolve(openbao.reference())
    assert not text.strip() or text not in str(caught.value)


def test_what_is_no_token_in_the_environment(vault_user, monkeypatch):
    for bad in ("hunter2 hunter3", "hunter2\r\nX-Evil: 1", "hunter2\udcff"):
        monkeypatch.setenv("VAULT_TOKEN", bad)
        with pytest.raises(KeyAccessError, match="VAULT_TOKEN does not hold one word of ASCII") as caught:
            resolve("vault:https://127.0.0.1/secret/data/a")
        frames = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
        shown = [str(f.locals) for f in frames.stack if "/secure_loader/" in f.filename]
        assert "hunter2" not in "".join(shown) + str(caught.value)


def test_an_approle(openbao, vault_user, tmp_path, monkeypatch):
    monkeypatch.delenv("VAULT_TOKEN_FILE")
    secret_id = tmp_path / "secret-id"
    secret_id.touch(0o600)
    secret_id.write_text(openbao.do("POST", "auth/approle/role/loader/secret-id", {})["data"]["secret_id"])
    monkeypatch.setenv("VAULT_ROLE_ID", openbao.do("GET", "auth/approle/role/loader/role-id")["data"]["role_id"])
    with refused(KeyAccessError, "VAULT_SECRET_ID_FILE, which goes with it, is not"):
        resolve(openbao.reference())
    monkeypatch.setenv("VAULT_SECRET_ID_FILE", str(secret_id))
    assert is_key(resolve(openbao.reference()))
    secret_id.chmod(0o644)
    with refused(KeyAccessError, "secret id file can be read by others"):
        resolve(openbao.reference())
    secret_id.chmod(0o600)
    secret_id.write_text("11111111-2222-3333-4444-555555555555")
    with refused(KeySourceDeniedError, "denies the AppRole (HTTP 400)"):
        resolve(openbao.reference())


def test_a_namespace(openbao, vault_user, monkeypatch):
    openbao.do("POST", "sys/namespaces/team", {})
    openbao.do("POST", "sys/mounts/secret", {"type": "kv", "options": {"version": "2"}}, "team")
    openbao.put("models/theirs", KEY.document(), "team")
    where = openbao.reference("secret/data/models/theirs")
    monkeypatch.setenv("VAULT_TOKEN", ROOT)
    with refused(KeySourceResponseError, "nothing at that path (HTTP 404)"):
        resolve(where)
    monkeypatch.setenv("VAULT_NAMESPACE", "team")
    assert is_key(resolve(where))
    monkeypatch.setenv("VAULT_NAMESPACE", "a\r\nX-Evil: 1")
    with refused(KeyAccessError, "what is to be sent as X-Vault-Namespace holds characters that cannot be"):
        resolve(where)


def test_wrong_paths(openbao, vault_user):
    with refused(KeySourceResponseError, "nothing at that path (HTTP 404)"):
        resolve(openbao.reference("secret/data/models/nothing"))
    with refused(KeySourceDeniedError, "denies the key (HTTP 403)"):
        resolve(openbao.reference("secret/data/payroll"))
    openbao.put("models/deleted", KEY.document())
    openbao.do("DELETE", "secret/data/models/deleted")
    with refused(KeySourceResponseError, "nothing at that path (HTTP 404)"):
        resolve(openbao.reference("secret/data/models/deleted"))


@pytest.mark.parametrize(
    "rest",
    [
        "", "secret", "secret/models/demo", "secret/data", "secret/data/", "data/models", "v1/secret/data/a", "secret/data/a?x=1",
        "secret/data/a?version=0", "secret/data/a?version=1&b", "secret/data/a?version=", "secret//data/a", "secret/data//a",
    ],
)  # fmt: skip
def test_references_that_name_no_secret(vault_user, rest):
    with refused(KeyAccessError, "names no secret of a KV engine, version 2"):
        provider("vault").resolve(f"https://127.0.0.1/{rest}", request_for(KEY))


@pytest.mark.parametrize("reference", ["vault:secret/data/a", "vault://host/secret/data/a", "vault:/secret/data/a"])
def test_references_without_an_address(vault_user, reference):
    with refused(KeyAccessError, "a key reference is no URL"):
        resolve(reference)


@pytest.mark.parametrize(
    ("secret", "message"),
    [
        ({"password": "x"}, "has no usable kid"),
        ({"jwk": 5}, "is not a JWK"),
        ({"jwk": "hunter2"}, "not valid JSON"),
        ({"jwk": {"keys": []}}, "holds no keys"),
        ({"jwk": {"keys": [KEY.document(), KEY.document()]}}, "two keys share the kid"),
        (KEY.document() | {"k": "AAAA"}, "has 3 bytes instead of 32"),
        (KEY.document() | {"kty": "RSA"}, "none of oct, OKP and AKP"),
        (signing(KEY.kid).document(), "is not a symmetric key"),
    ],
)
def test_secrets_that_are_no_keys(openbao, vault_user, secret, message):
    openbao.put("models/bad", secret)
    with pytest.raises(KeySourceResponseError, match=message) as caught:
        resolve(openbao.reference("secret/data/models/bad"))
    assert "hunter2" not in str(caught.value)
    frames = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    assert_no_secret("".join(line for line in frames.format() if "tests/" not in line))


def test_a_version_1_engine_is_told(openbao, vault_user, monkeypatch):
    monkeypatch.setenv("VAULT_TOKEN", ROOT)
    openbao.do("POST", "sys/mounts/old", {"type": "kv", "options": {"version": "1"}})
    openbao.do("POST", "old/data/demo", KEY.document())
    with refused(KeySourceResponseError, "not that of a KV engine, version 2"):
        resolve(openbao.reference("old/data/demo"))


def test_tokens_show_nowhere(openbao, vault_user, tmp_path, monkeypatch, authority, localhost):
    """Whatever goes wrong: not in the message, not in local variables of ours that crash reporters print."""
    token = vault_user.read_text().strip()
    monkeypatch.setenv("VAULT_CACERT", str(authority.file))
    scripts = (
        answer(b"", "403 No"),
        answer(b"", "503 X"),
        answer(b"{}"),
        answer(b"", "302 X", Location="http://x/"),
        hang,
    )
    for script in scripts:
        with serving(localhost, script) as server:
            where = f"vault:https://localhost:{server.port}/secret/data/a"
            with pytest.raises(KeyAccessError) as caught:
                resolve(where, config(key_timeout_seconds=0.3))
            assert token in server.calls[0], "it was sent"
            frames = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
            shown = [str(f.locals) for f in frames.stack if "/secure_loader/" in f.filename]
            assert len(shown) > 3
            assert token not in "".join(shown) + str(caught.value)


def test_the_token_is_not_sent_to_whom_nobody_vouches_for(openbao, vault_user, monkeypatch, localhost):
    with serving(localhost, answer(b"{}")) as server:
        with refused(KeySourceUnreachableError, "certificate is refused"):
            resolve(f"vault:https://localhost:{server.port}/secret/data/a")
        monkeypatch.setenv("VAULT_SKIP_VERIFY", "true")
        monkeypatch.setenv("VAULT_ADDR", "http://127.0.0.1:1")
        with refused(KeySourceUnreachableError, "certificate is refused"):
            resolve(f"vault:https://localhost:{server.port}/secret/data/a")
        assert server.calls == []


def test_loopback_is_refused_unless_allowed(openbao, vault_user):
    with refused(KeyAccessError, "which is not a public one"):
        resolve(openbao.reference(), LoaderConfig())


def test_a_development_server_without_tls_then_sealed_then_stopped(vault_user, monkeypatch, tmp_path):
    monkeypatch.setenv("VAULT_TOKEN", ROOT)
    with running(tmp_path, tls=False) as server:
        server.put("models/demo", KEY.document())
        with refused(KeyAccessError, "http is not encrypted", "insecure_allow_http_loopback"):
            resolve(server.reference(), config())
        allowed = LoaderConfig(insecure_allow_http_loopback=True)
        assert is_key(resolve(server.reference(), allowed))
        assert is_key(resolve(server.reference(host="localhost"), allowed))
        server.do("POST", "sys/seal")
        with refused(KeySourceUnreachableError, "is sealed or not set up (HTTP 503)"):
            resolve(server.reference(), allowed)
        server.stop()
        with refused(KeySourceUnreachableError, "cannot be reached: Connection refused"):
            resolve(server.reference(), allowed)


def test_a_slow_way_to_the_server(openbao, vault_user):
    """A proxy that passes an answer on byte by byte: each byte in time, the whole of it not."""
    proxy = SlowProxy(openbao.port, 0.02)
    try:
        with refused(KeySourceUnreachableError, "no complete answer within 0.5 s"):
            resolve(openbao.reference(port=proxy.port), config(key_timeout_seconds=0.5))
    finally:
        proxy.close()


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        ("472 DR", KeySourceUnreachableError, "is a standby (HTTP 472)"),
        ("473 Standby", KeySourceUnreachableError, "is a standby (HTTP 473)"),
        ("501 Not initialised", KeySourceUnreachableError, "is sealed or not set up"),
        ("307 Standby", KeySourceResponseError, "redirects (HTTP 307)"),
        ("400 Bad", KeySourceResponseError, "answers HTTP 400"),
    ],
)
def test_answers_of_other_editions(vault_user, monkeypatch, authority, localhost, status, kind, words):
    monkeypatch.setenv("VAULT_CACERT", str(authority.file))
    with serving(localhost, answer(b'{"errors":[]}', status)) as server, refused(kind, words):
        resolve(f"vault:https://localhost:{server.port}/secret/data/a")


def test_the_commands_of_the_guide(openbao, vault_user, tmp_path, secure_loader_home, monkeypatch):
    """What docs/keys.md says, word for word, but for the address."""
    text = (Path(__file__).parents[3] / "docs" / "keys.md").read_text()
    blocks = re.findall(
        r"```sh\n(.*?)```", text.split("### HashiCorp Vault and OpenBao\n")[1].split("\n### ")[0], re.DOTALL
    )
    assert len(blocks) == 2
    openbao.do("DELETE", "sys/auth/approle")
    build_folder(tmp_path / "model-sec")
    key = tmp_path / "alice.enc.jwk"
    key.write_text(json.dumps(KEY.document()))
    (secure_loader_home / "config.toml").write_text('[loader]\nkey_private_hosts = ["127.0.0.1"]\n')
    store = secure_loader_home / "trust"
    store.mkdir()
    (store / "publisher.json").write_text(json.dumps({"name": "publisher", "key": SIGN.verify_key().document()}))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.delenv("VAULT_TOKEN_FILE")
    for block, token in zip(blocks, (ROOT, ""), strict=True):
        monkeypatch.setenv("VAULT_TOKEN", token)
        script = block.replace("vault.example.com:8200", f"127.0.0.1:{openbao.port}")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert_no_secret(done.stdout + done.stderr)
    plain = tmp_path / "model-sec-plain"
    assert sorted(p.name for p in (tmp_path / "model-again").glob("*.safetensors")) != []
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "model-again" / name).read_bytes() == (plain / name).read_bytes()
