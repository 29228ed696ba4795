"""``publish`` against a broker of our own: what an administrator puts there, those who load get."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from secure_loader.cli import main
from secure_loader.config import LoaderConfig
from secure_loader.core.envelope import Policy
from secure_loader.core.keys.provider import KeyRing
from secure_loader.core.policy import default_policy
from tests.attacks.kit import KEY, SIGN, assert_no_secret, build_file, build_folder
from tests.integration.keys.kbs_peer import brokering, unb64url
from tests.integration.keys.services import request_for

PATH = "models/key/demo"
ROOT = Path(__file__).parents[3]
POLICY = ROOT / "configs" / "trustee.rego"
RECORDED = json.loads((Path(__file__).parent / "data" / "trustee-kbs-0.4.0.json").read_text())
ADMIN = Ed25519PrivateKey.generate()


@pytest.fixture(scope="module")
def running(localhost):
    with brokering(localhost, ADMIN.public_key()) as peer:
        yield peer


@pytest.fixture
def peer(running):
    running.reset()
    running.policy = ""
    return running


def private(path: Path, data: bytes) -> Path:
    path.touch(0o600)
    path.write_bytes(data)
    return path


def pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@pytest.fixture
def admin(tmp_path, monkeypatch, authority, peer):
    """An administrator at work: a key by the name of enc-1, and a configuration file with the broker."""
    home = tmp_path / "home"
    (home / "keys").mkdir(parents=True, mode=0o700)
    home.chmod(0o700)
    private(home / "keys" / "demo.enc.jwk", json.dumps(KEY.document()).encode())
    (home / "config.toml").write_text(
        f'[loader]\nkbs_url = "{peer.url}"\nkey_ca_file = "{authority.file}"\nkey_private_hosts = ["localhost"]\n'
    )
    monkeypatch.setenv("SECURE_LOADER_HOME", str(home))
    return private(tmp_path / "admin.pem", pem(ADMIN))


def run(capsys, *words: object, code: int = 0) -> str:
    assert main([str(w) for w in words]) == code
    captured = capsys.readouterr()
    assert_no_secret(captured.out + captured.err)
    return captured.out + captured.err


def test_what_is_published_can_be_fetched(admin, peer, authority, capsys):
    text = run(capsys, "publish", f"kbs:///{PATH}", "-k", "demo", "--policy", POLICY, "--admin-key", admin)
    assert text.startswith("Published enc-1\n")
    assert "policy    replaced" in text
    assert peer.paths() == ["/resource-policy", f"/resource/{PATH}"], "no key lies there before its policy does"
    assert peer.policy == POLICY.read_text()
    config = LoaderConfig(
        key_private_hosts=["localhost"],
        key_ca_file=authority.file,
        kbs_evidence="sample",
        insecure_kbs_sample_evidence=True,
    )
    found = KeyRing([f"kbs://localhost:{peer.port}/{PATH}"], config).resolve(request_for(KEY))
    assert bytes(found.secret.reveal()) == bytes(KEY.secret.reveal())


def test_a_key_alone(admin, peer, capsys):
    text = run(
        capsys, "publish", f"kbs://localhost:{peer.port}/{PATH}", "--admin-key", admin, "--role", "owner", "--json"
    )
    assert json.loads(text) == {"broker": peer.url, "resource": PATH, "key_id": "enc-1", "policy": False}
    assert json.loads(peer.resources[PATH]) == KEY.document()
    claims = json.loads(unb64url(peer.calls[0].headers["authorization"].split(".")[1]))
    assert claims["role"] == "owner"
    assert claims["exp"] - claims["iat"] == 300


def test_a_token_of_an_administrator(admin, peer, tmp_path, capsys):
    run(capsys, "publish", f"kbs:///{PATH}", "--admin-key", admin)
    token = peer.calls[0].headers["authorization"].removeprefix("Bearer ")
    file = private(tmp_path / "token", token.encode() + b"\n")
    run(capsys, "publish", "kbs:///models/key/other", "--admin-token-file", file)
    assert peer.resources.keys() == {PATH, "models/key/other"}


@pytest.mark.parametrize("more", [(), ("--policy", POLICY)])
def test_somebody_else(more, admin, peer, tmp_path, capsys):
    mallory = private(tmp_path / "mallory.pem", pem(Ed25519PrivateKey.generate()))
    text = run(capsys, "publish", f"kbs:///{PATH}", *more, "--admin-key", mallory, code=5)
    assert "does not accept the administrator's token" in text
    assert (peer.resources, peer.policy, len(peer.calls)) == ({}, "", 1)


@pytest.mark.parametrize(
    ("reference", "code", "words"),
    [
        ("vault:https://localhost/secret/data/x", 2, "takes a kbs: reference"),
        ("kbs:///models/key", 5, "names no resource"),
        ("kbs:///models/../key", 5, "names no resource"),
        ("kbs://10.0.0.1/models/key/demo", 5, "not a public one"),
    ],
)
def test_where_nothing_can_be_put(reference, code, words, admin, peer, capsys):
    assert words in run(capsys, "publish", reference, "--admin-key", admin, code=code)
    assert peer.calls == []


def test_keys_and_tokens_that_cannot_be_used(admin, peer, tmp_path, capsys):
    def refuse(*words: object, code: int = 5) -> str:
        text = run(capsys, "publish", f"kbs:///{PATH}", *words, code=code)
        assert peer.calls == []
        return text

    bad = private(tmp_path / "bad", b"not a key")
    assert "does not hold an Ed25519 private key in PEM" in refuse("--admin-key", bad)
    assert "does not hold a JWT" in refuse("--admin-token-file", bad)
    assert "takes the path of a file" in refuse("--admin-key", pem(ADMIN).decode(), code=2)
    assert "there is no master key named 'nobody'" in refuse("--admin-key", admin, "-k", "nobody")
    admin.chmod(0o644)
    assert "can be read by others" in refuse("--admin-key", admin)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("package policy\nallow = true\n", "does not deny by default"),
        ("package policy\ndefault allow := true\n", "does not deny by default"),
        ("# default allow := false\npackage policy\n", "does not deny by default"),
        ("package model\nallow = true", "holds no policy in package policy"),
        ("package model\ndefault allow := false\n", "holds no policy in package policy"),
        ("package other\ndefault allow := false\n", "brokers take policy"),
        ("package policy\ndefault allow := false\nallow if", "line 3: expecting expression"),
        (b"package policy\ndefault allow := false\n\xff", "UTF-8"),
    ],
    ids=range(8),
)
def test_policies_that_deny_nothing(text, words, admin, peer, tmp_path, capsys):
    policy = tmp_path / "policy.rego"
    policy.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert words in run(capsys, "publish", f"kbs:///{PATH}", "--policy", policy, "--admin-key", admin, code=2)
    assert peer.calls == []


def test_policies_that_cannot_be_read(admin, peer, tmp_path, capsys):
    (tmp_path / "large").write_text("package policy\ndefault allow := false\n" + "#" * 65536)
    for name in ("none", "large"):
        text = run(capsys, "publish", f"kbs:///{PATH}", "--policy", tmp_path / name, "--admin-key", admin, code=7)
        assert str(tmp_path / name) in text
    assert peer.calls == []


@pytest.fixture
def signer(tmp_path):
    file = tmp_path / "signer.json"
    file.write_text(json.dumps({"name": "publisher", "key": SIGN.verify_key().document()}))
    file.chmod(0o644)
    return file


@pytest.mark.parametrize("shards", [0, 1, 2])
def test_the_policy_that_a_model_carries(shards, admin, signer, peer, tmp_path, capsys):
    """A file, a folder of one, a folder of two."""
    if shards:
        model = build_folder(tmp_path / "model", shards=shards, remote_policy=POLICY)
    else:
        model = build_file(tmp_path / "m.safetensors", policy=Policy(default_policy().local, POLICY.read_text()))
    words = ("publish", f"kbs:///{PATH}", "--policy-of", model, "--admin-key", admin, "--trust", signer)
    assert "policy    replaced" in run(capsys, *words)
    assert peer.policy == POLICY.read_text()
    peer.reset()
    text = run(capsys, *words[:-2], code=3)
    assert "is not trusted" in text or "trust" in text
    assert peer.calls == [], "a policy that nobody vouches for goes nowhere"


def test_a_model_without_a_policy_for_brokers(admin, signer, peer, tmp_path, capsys):
    model = build_file(tmp_path / "m.safetensors")
    words = ("publish", f"kbs:///{PATH}", "--admin-key", admin, "--trust", signer, "--policy-of")
    assert "holds no policy in package policy" in run(capsys, *words, model, code=2)
    run(capsys, *words, tmp_path / "none", code=7)
    assert peer.calls == []


def test_the_commands_of_the_guide(admin, signer, peer, tmp_path, monkeypatch):
    """What docs/keys.md says, word for word, but for the address, and for hardware to attest."""
    text = (ROOT / "docs" / "keys.md").read_text()
    section = text.split("### Trustee, the broker of confidential containers\n")[1].split("\n## ")[0].split("\n### ")[0]
    blocks = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 2
    folder = build_folder(tmp_path / "model-sec")
    home = tmp_path / "home"
    (home / "trust").mkdir()
    signer.rename(home / "trust" / "publisher.json")
    key = (home / "keys" / "demo.enc.jwk").rename(home / "keys" / "alice.enc.jwk")
    with (home / "config.toml").open("a") as f:
        f.write('kbs_evidence = ["sample"]\ninsecure_kbs_sample_evidence = true\n')
    (tmp_path / "configs").symlink_to(POLICY.parent)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    for block in blocks:
        script = block.replace("https://kbs.example.com:8080", peer.url)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert_no_secret(done.stdout + done.stderr)
        # Those who load have no key but the broker's.
        key.unlink(missing_ok=True)
    assert peer.policy == POLICY.read_text()
    assert peer.paths()[-3:] == ["/auth", "/attest", "/resource/models/key/alice"]
    plain = tmp_path / "model-sec-plain"
    assert sorted(p.name for p in (tmp_path / "model-again").glob("*.safetensors")) != []
    for name in ("config.json", "tokenizer.json"):
        assert (
            (tmp_path / "model-again" / name).read_bytes()
            == (folder / name).read_bytes()
            == (plain / name).read_bytes()
        )


# --- the policy in configs -----------------------------------------------------------------------------------------


def claims(number: int) -> dict:
    """What a live broker's policy was asked about, made up to be affirmed."""
    tokens = [body["token"] for step, body in RECORDED if step == "attest"]
    found = json.loads(unb64url(tokens[number].split(".")[1]))
    for submodule in found["submods"].values():
        submodule["ear.status"] = "affirming"
        submodule["ear.veraison.annotated-evidence"].pop("sample", None)
        submodule["ear.veraison.annotated-evidence"].pop("sampledevice", None)
    return found


def decide(asked: dict, path: str = "/models/key/demo", plugin: str = "resource") -> object:
    """By the engine that Trustee uses as well."""
    regorus = pytest.importorskip("regorus", reason="the policy engine is not installed")
    engine = regorus.Engine()
    engine.add_policy("policy", POLICY.read_text())
    engine.add_data_json(json.dumps({"plugin": plugin, "resource-path": path, "query": {}}))
    engine.set_input_json(json.dumps(asked))
    return json.loads(engine.eval_rule_as_json("data.policy.allow"))


@pytest.mark.parametrize("number", [0, 1])
def test_affirmed_machines_get_the_keys_of_models(number):
    assert decide(claims(number)) is True
    assert decide(claims(number), "models/key/demo") is True
    assert decide(claims(number), "/other/key/demo") is False
    assert decide(claims(number), "/models-too/key/demo") is False
    assert decide(claims(number), plugin="pki") is False


def test_nobody_else_does():
    recorded = [json.loads(unb64url(b["token"].split(".")[1])) for s, b in RECORDED if s == "attest"]
    assert [decide(r) for r in recorded] == [False, False, False]
    for spoil in (
        lambda c: c["submods"]["gpu0"].update({"ear.status": "warning"}),
        lambda c: c["submods"]["cpu0"].update({"ear.status": "none"}),
        lambda c: c["submods"]["cpu0"].pop("ear.status"),
        lambda c: c["submods"]["cpu0"]["ear.veraison.annotated-evidence"].update(sample={"svn": "1"}),
        lambda c: c["submods"]["gpu0"]["ear.veraison.annotated-evidence"].update(sampledevice={"svn": "1"}),
        lambda c: c["submods"].pop("cpu0"),
        lambda c: c.pop("submods"),
    ):
        asked = claims(0)
        spoil(asked)
        assert decide(asked) is False
    assert decide({}) is False
