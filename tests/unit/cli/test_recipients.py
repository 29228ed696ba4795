"""Identities and models encrypted for them, as people use them: a publisher, and readers with homes of their own."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import secure_loader
from secure_loader.core.keys.hybrid import Identity
from secure_loader.core.keys.jwk import b64url
from secure_loader.core.keys.local import read_keys
from secure_loader.core.secrets import Secret

EVE = Identity("eve-1", Secret(b"\x0e" * 32))
PUBLIC = EVE.public().document(b64url)
SHARDS = ("model.secure-00001-of-00002.safetensors", "model.secure-00002-of-00002.safetensors")


@pytest.fixture
def person(cli, tmp_path, monkeypatch):
    """Run a command line as somebody with a home folder of their own."""

    def run(name: str, *words: object, code: int | None = 0):
        monkeypatch.setenv("SECURE_LOADER_HOME", str(tmp_path / "homes" / name))
        return cli(*words, code=code)

    return run


@pytest.fixture
def file(tmp_path):
    """Write a document and return its path."""

    def write(doc, name="eve.jwk"):
        path = tmp_path / name
        path.write_text(doc if isinstance(doc, str) else json.dumps(doc))
        return path

    return write


@pytest.fixture
def published(person, model, file):
    """Alice has published for Bob, who trusts her; returns Bob's kid."""
    kid = person("bob", "recipients", "new", "bob", "--json").json["key_id"]
    given = file(person("bob", "recipients", "export", "bob").out, "bob.jwk")
    person("alice", "keygen", "alice")
    person("alice", "recipients", "add", given)
    person("alice", "encrypt", model, "enc", "--model-id", "alice/tiny", "-r", "bob")
    signer = file(person("alice", "trust", "export", "alice").out, "alice.json")
    person("bob", "trust", "add", signer)
    return kid


def weights(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.glob("*.safetensors")}


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


# --- identities -----------------------------------------------------------------------------------------------------


def test_makes_an_identity(cli, home):
    result = cli("recipients", "new", "bob")
    private, public = home / "keys" / "bob.id.jwk", home / "recipients" / "bob.jwk"
    (identity,) = read_keys(private)
    for part in (identity.kid, identity.public().thumbprint(), str(private), str(public), "keep a backup"):
        assert part in result.out
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert stat.S_IMODE(public.stat().st_mode) == 0o644
    for folder in (home, private.parent, public.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    doc = json.loads(private.read_text())
    assert doc["priv"] not in result.out + result.err
    assert json.loads(public.read_text()) == {k: v for k, v in doc.items() if k != "priv"}


def test_makes_an_identity_as_json(cli, home):
    made = cli("recipients", "new", "bob", "--json").json
    assert made["key_id"].startswith("bob-id-")
    assert made["key_file"] == str(home / "keys" / "bob.id.jwk")
    assert (len(made["thumbprint"]), made["replaced"]) == (64, [])


def test_never_replaces_an_identity_without_force(cli, home):
    first = cli("recipients", "new", "bob", "--json").json
    before = (home / "keys" / "bob.id.jwk").read_bytes()
    assert "already" in cli("recipients", "new", "bob", code=7).err
    assert (home / "keys" / "bob.id.jwk").read_bytes() == before
    result = cli("recipients", "new", "bob", "--force", "--json")
    assert result.json["key_id"] != first["key_id"]
    assert "no longer load" in result.err
    (private,) = [Path(p) for p in result.json["replaced"] if ".id.jwk" in p]
    assert private.read_bytes() == before
    assert [k.kid for k in read_keys(home / "keys")] == [result.json["key_id"]]


def test_an_identity_beside_keys_of_that_name(cli, home):
    cli("keygen", "bob")
    cli("recipients", "new", "bob")
    assert sorted(p.name for p in (home / "keys").iterdir()) == ["bob.enc.jwk", "bob.id.jwk", "bob.sign.jwk"]


def test_exports_what_add_takes(cli, home, tmp_path, file):
    cli("recipients", "new", "bob")
    exported = cli("recipients", "export", "bob").out
    assert '"priv"' not in exported
    cli("recipients", "remove", "bob")
    result = cli("recipients", "add", file(exported, "robert.jwk"))
    assert "Known from now on: robert" in result.out
    assert "Compare the thumbprint" in result.err
    assert cli("recipients", "export", "robert").out == exported
    assert (home / "keys" / "bob.id.jwk").exists()


def test_through_a_pipe(home, tmp_path):
    """As in the guide: ssh bob@host secure-loader recipients export bob | secure-loader recipients add -"""
    run = shlex.join([sys.executable, "-m", "secure_loader"])
    environment = os.environ | {"PYTHONPATH": str(Path(secure_loader.__file__).parents[1])}
    bob, alice = tmp_path / "b", tmp_path / "a"
    script = (
        f"set -e; SECURE_LOADER_HOME={bob} {run} recipients new bob -q\n"
        f"SECURE_LOADER_HOME={bob} {run} recipients export bob | SECURE_LOADER_HOME={alice} {run} recipients add - --name bob"
    )
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (alice / "recipients" / "bob.jwk").read_bytes() == (bob / "recipients" / "bob.jwk").read_bytes()


def test_standard_input(command, home):
    added = command("recipients", "add", "-", "--json", stdin=json.dumps(PUBLIC).encode()).json
    assert (added["name"], added["key_id"], added["thumbprint"]) == ("eve-1", "eve-1", EVE.public().thumbprint())
    assert "standard input" in command("recipients", "add", "-", stdin=b"", code=5).err
    assert "65,536 bytes" in command("recipients", "add", "-", stdin=b" " * 70_000, code=2).err


def test_lists(cli, home, file):
    assert "No recipient is known" in cli("recipients", "list").out
    assert cli("recipients", "list", "--json").json == {"recipients": [], "unusable": []}
    cli("recipients", "add", file(PUBLIC))
    out = cli("recipients", "list").out
    for part in ("eve", "eve-1", EVE.public().thumbprint()):
        assert part in out
    assert cli("recipients", "list", "--json").json["recipients"] == [
        {
            "name": "eve",
            "key_id": "eve-1",
            "thumbprint": EVE.public().thumbprint(),
            "file": str(home / "recipients" / "eve.jwk"),
        }
    ]


def test_a_bad_file_is_an_error_but_the_others_are_listed(cli, home, file):
    cli("recipients", "add", file(PUBLIC))
    (home / "recipients" / "bad.jwk").write_text("{")
    (home / "recipients" / "loose.jwk").write_text(json.dumps(PUBLIC))
    (home / "recipients" / "loose.jwk").chmod(0o666)
    result = cli("recipients", "list", code=2)
    assert EVE.public().thumbprint() in result.out
    assert "bad.jwk" in result.err
    assert "loose.jwk: recipient's key could have been written by others" in result.err
    result = cli("recipients", "list", "--json", code=2)
    assert [Path(p).name for p in result.json["unusable"]] == ["bad.jwk", "loose.jwk"]


def test_removes(cli, home, file):
    cli("recipients", "add", file(PUBLIC))
    assert cli("recipients", "remove", "eve").out == "Forgotten: eve\n"
    assert list((home / "recipients").iterdir()) == []
    for words in (("remove", "eve"), ("export", "eve")):
        assert "there is no recipient 'eve'" in cli("recipients", *words, code=2).err
    assert "NAME" in cli("recipients", "remove", "../keys/alice", code=2).err


def test_never_overwrites_without_force(cli, home, file):
    cli("recipients", "add", file(PUBLIC), "--name", "eve")
    other = Identity("other-1", Secret(b"\x0f" * 32)).public().document(b64url)
    assert (
        "there is a recipient named 'eve'"
        in cli("recipients", "add", file(other, "o.jwk"), "--name", "eve", code=7).err
    )
    cli("recipients", "add", file(other, "o.jwk"), "--name", "eve", "--force")
    assert [r["key_id"] for r in cli("recipients", "list", "--json").json["recipients"]] == ["other-1"]


def test_refuses_another_key_of_a_known_kid(cli, file):
    cli("recipients", "add", file(PUBLIC))
    twin = Identity("eve-1", Secret(b"\x0f" * 32)).public().document(b64url)
    for more in ((), ("--force",)):
        result = cli("recipients", "add", file(twin, "twin.jwk"), *more, code=2)
        assert "two different identities go by the kid 'eve-1'" in result.err
        assert "thumbprint" in result.err


def test_refuses_private_identities(cli, home):
    cli("recipients", "new", "bob")
    path = home / "keys" / "bob.id.jwk"
    result = cli("recipients", "add", path, "--name", "other", code=5)
    assert "private identity" in result.err
    assert "recipients export" in result.err
    assert json.loads(path.read_text())["priv"] not in result.err
    assert not (home / "recipients" / "other.jwk").exists()


@pytest.mark.parametrize(
    ("doc", "code"),
    [
        ("", 5),
        ("[]", 5),
        ("{", 5),
        ({}, 5),
        ({"keys": []}, 5),
        ({"keys": [PUBLIC, PUBLIC | {"kid": "2"}]}, 5),
        (PUBLIC | {"alg": "ML-KEM-768"}, 5),
        (PUBLIC | {"pub": "AAAA"}, 5),
        (PUBLIC | {"pub": b64url(EVE.public().public[:1184] + bytes(32))}, 5),
        (PUBLIC | {"kid": "a/b"}, 5),
        (PUBLIC | {"use": "sig"}, 5),
        ({"kty": "OKP", "crv": "Ed25519", "kid": "s", "alg": "EdDSA", "x": b64url(bytes(32))}, 5),
        (" " * 70_000, 7),
    ],
)
def test_refuses_what_is_no_public_identity(cli, home, file, doc, code):
    path = file(doc)
    assert f"error: {path}: " in cli("recipients", "add", path, code=code).err
    assert not home.exists()


def test_bad_arguments(cli, file):
    assert "no such file" in cli("recipients", "add", "nowhere.jwk", code=7).err
    assert "NAME" in cli("recipients", "add", file(PUBLIC), "--name", "../x", code=2).err
    assert "NAME" in cli("recipients", "new", "a b", code=2).err
    spaces = file(PUBLIC | {"kid": "spaces in it"}, "more spaces.jwk")
    assert "--name" in cli("recipients", "add", spaces, code=2).err


# --- models ---------------------------------------------------------------------------------------------------------


def test_from_identity_to_weights(person, published, model, tmp_path):
    person("bob", "verify", "enc", "--full")
    person("bob", "decrypt", "enc", "plain")
    assert weights(tmp_path / "plain") == weights(model)
    refused = person("alice", "decrypt", "enc", "again", code=5)
    assert f"which is wrapped for {published}" in refused.err
    assert not (tmp_path / "again").exists()


def test_encrypt_says_who_can_open_it(person, published, model):
    result = person("alice", "encrypt", model, "two", "-r", "bob")
    assert f"recipients  {published}" in result.out
    assert "Nobody keeps the master key: only the recipients can load it" in result.err
    assert "-r with your own name" in result.err
    report = person("alice", "encrypt", model, "three", "-r", "bob", "--json").json
    assert report["recipients"] == [published]
    assert report["key_id"].startswith("model-")


def test_encrypt_warns_of_a_shared_master_key(person, published, model, tmp_path):
    result = person("alice", "encrypt", model, "two", "-r", "bob", "-k", "alice")
    kid = json.loads((tmp_path / "homes" / "alice" / "keys" / "alice.enc.jwk").read_text())["kid"]
    assert f"the recipients get {kid}, and with it every model that is encrypted under it" in result.err
    assert "Nobody keeps" not in result.err
    person("alice", "decrypt", "two", "a")
    person("bob", "decrypt", "two", "b")
    assert weights(tmp_path / "a") == weights(tmp_path / "b") == weights(model)


def test_encrypt_without_recipients_is_as_before(person, published, model):
    result = person("alice", "encrypt", model, "two")
    assert "recipients" not in result.out + result.err
    assert person("alice", "inspect", "two", "--json").json["files"][0]["recipients"] == []


def test_inspect_names_recipients_without_any_key(person, published):
    assert f"recipients  {published}\n" in person("nobody", "inspect", "enc").out
    files = person("nobody", "inspect", "enc", "--json").json["files"]
    assert [f["recipients"] for f in files] == [[published]] * 2
    assert published in person("nobody", "inspect", f"enc/{SHARDS[1]}").out


def test_by_the_path_of_an_identity(person, published, model, tmp_path):
    kid = person("carol", "recipients", "new", "carol", "--json").json["key_id"]
    path = tmp_path / "homes" / "carol" / "recipients" / "carol.jwk"
    result = person("alice", "encrypt", model, "two", "-r", path, "-r", "bob", "--json").json
    assert result["recipients"] == sorted([kid, published])


def test_rewrap_adds_and_removes(person, published, model, tmp_path):
    """Bob publishes onward: he is a recipient, and signs himself from then on."""
    carol = person("carol", "recipients", "new", "carol", "--json").json["key_id"]
    public = tmp_path / "homes" / "carol" / "recipients" / "carol.jwk"
    person("bob", "keygen", "bob")
    added = person("bob", "rewrap", "enc", "-r", public, "--json").json
    assert added["recipients"] == sorted([carol, published])
    assert "may have kept" not in person("bob", "rewrap", "enc", "--release", "2").err
    person("carol", "decrypt", "enc", "c", "--trust", tmp_path / "homes" / "bob" / "trust")
    assert weights(tmp_path / "c") == weights(model)
    removed = person("bob", "rewrap", "enc", "--remove", carol)
    assert "Whoever was removed may have kept what he could open" in removed.err
    assert carol not in person("bob", "inspect", "enc").out
    refused = person("carol", "decrypt", "enc", "again", "--trust", tmp_path / "homes" / "bob" / "trust", code=5)
    assert f"which is wrapped for {published}" in refused.err


def test_rewrap_with_a_new_key(person, published, tmp_path, model):
    person("bob", "keygen", "bob")
    old = person("bob", "inspect", "enc", "--json").json["files"][0]["key_id"]
    done = person("bob", "rewrap", "enc", "--new-key", "--release", "3", "--json").json
    assert (done["recipients"], done["release"]) == ([published], 3)
    assert done["key_id"].startswith("model-")
    assert done["key_id"] != old
    person("bob", "decrypt", "enc", "plain")
    assert weights(tmp_path / "plain") == weights(model)


def test_rewrap_to_a_key_of_one_s_own(person, published, tmp_path, model):
    person("bob", "keygen", "bob")
    done = person("bob", "rewrap", "enc", "-k", "bob", "--remove", published, "--json").json
    assert (done["recipients"], done["key_id"][:8]) == ([], "bob-enc-")
    person("bob", "decrypt", "enc", "plain")
    assert weights(tmp_path / "plain") == weights(model)


def test_what_rewrap_refuses(person, published, tmp_path):
    person("bob", "keygen", "bob")
    before = contents(tmp_path / "enc")
    last = person("bob", "rewrap", "enc", "--remove", published, code=2)
    assert "nobody could open the model any more" in last.err
    assert "add somebody with -r" in last.err
    assert f"there are: {published}" in person("bob", "rewrap", "enc", "--remove", "bob", code=2).err
    assert "opened by nobody" in person("bob", "rewrap", "enc", "--new-key", "--remove", published, code=2).err
    assert "exclude each other" in person("bob", "rewrap", "enc", "--new-key", "-k", "bob", code=2).err
    person("bob", "recipients", "remove", "bob")
    (tmp_path / "homes" / "bob" / "keys" / "bob.id.jwk").rename(tmp_path / "bob.id.jwk")
    stranger = person("bob", "rewrap", "enc", "--new-key", "--keys", tmp_path / "bob.id.jwk", code=2)
    assert f"cannot be wrapped for {published}: not known here" in stranger.err
    error = person("bob", "rewrap", "enc", "--new-key", "--json", code=2).error
    assert (error["type"], error["exit_code"]) == ("ConfigError", 2)
    assert person("alice", "rewrap", "enc", "-r", "bob", "--json", code=5).error["type"] == "KeyAccessError"
    assert contents(tmp_path / "enc") == before


@pytest.mark.parametrize(
    ("who", "message"),
    [
        ("nobody", "there is no recipient 'nobody'"),
        ("./nowhere.jwk", "there is no recipient './nowhere.jwk'"),
        ("env:KEY", "env: references bring keys, and wrap none"),
        ("nosuch:x", "no key provider serves 'nosuch': references"),
        (b64url(bytes(range(9, 41))), "never key material"),
    ],
)
def test_whom_encrypt_refuses(person, published, model, tmp_path, who, message):
    result = person("alice", "encrypt", model, "two", "-r", who, code=2)
    assert message in result.err
    assert not list(tmp_path.glob("*two*"))


def test_a_name_that_others_could_have_replaced(person, published, model, tmp_path):
    path = tmp_path / "homes" / "alice" / "recipients" / "bob.jwk"
    path.chmod(0o666)
    result = person("alice", "encrypt", model, "two", "-r", "bob", code=2)
    assert "could have been written by others" in result.err
    assert f"chmod go-w {path}" in result.err
    assert not list(tmp_path.glob("*two*"))


def test_quiet(person, published, model):
    result = person("alice", "encrypt", model, "two", "-r", "bob", "-q")
    assert (result.out, result.err) == ("", "")
