"""Whom this machine trusts: added, listed, removed and exported without ever taking a private key."""

from __future__ import annotations

import base64
import json
import stat

import pytest

from secure_loader.core.keys.jwk import SigningKey
from secure_loader.core.secrets import Secret
from secure_loader.core.trust import read_trust_file

KEY = SigningKey("pub-1", Secret(b"\x01" * 32))
PUBLIC = KEY.verify_key().document()


@pytest.fixture
def file(tmp_path):
    """Write a document and return its path."""

    def write(doc, name="signer.json"):
        path = tmp_path / name
        path.write_text(doc if isinstance(doc, str) else json.dumps(doc))
        return path

    return write


def test_adds_a_public_jwk(cli, home, file):
    result = cli("trust", "add", file(PUBLIC))
    assert KEY.verify_key().thumbprint() in result.out
    assert "every model" in result.out
    assert "Compare the thumbprint" in result.err
    path = home / "trust" / "pub-1.json"
    assert read_trust_file(path).key == KEY.verify_key()
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_adds_a_set_of_one_key(cli, home, file):
    cli("trust", "add", file({"keys": [PUBLIC]}), "--name", "alice")
    assert read_trust_file(home / "trust" / "alice.json").key == KEY.verify_key()


def test_adds_cryptotensors_own_spelling(cli, home, file):
    x = base64.b64encode(KEY.verify_key().public).decode()
    cli("trust", "add", file({"kty": "okp", "alg": "ed25519", "kid": "pub-1", "x": x}))
    assert read_trust_file(home / "trust" / "pub-1.json").key == KEY.verify_key()


def test_adds_one_of_our_trust_files_with_what_it_says(cli, home, file):
    doc = {"name": "alice", "key": PUBLIC, "models": ["alice/*"], "not_after": "2099-01-01T00:00:00Z"}
    cli("trust", "add", file(doc))
    assert read_trust_file(home / "trust" / "alice.json").document() == doc


def test_options_win_over_the_file(cli, home, file):
    doc = {"name": "alice", "key": PUBLIC, "models": ["*"], "not_after": None}
    args = ("--name", "al", "--model", "a/*", "--model", "b", "--until", "2098-05-01")
    row = cli("trust", "add", file(doc), *args, "--json").json
    assert (row["name"], row["models"], row["until"]) == ("al", ["a/*", "b"], "2098-05-01T00:00:00Z")
    assert read_trust_file(home / "trust" / "al.json").models == ("a/*", "b")


def test_reads_stdin(command, home):
    command("trust", "add", "-", "--name", "alice", stdin=json.dumps(PUBLIC).encode())
    assert read_trust_file(home / "trust" / "alice.json").key == KEY.verify_key()


@pytest.mark.parametrize("which", ["enc", "sign"])
def test_refuses_private_keys(cli, home, which):
    cli("keygen", "alice")
    path = home / "keys" / f"alice.{which}.jwk"
    doc = json.loads(path.read_text())
    result = cli("trust", "add", path, "--name", "other", code=5)
    assert "private key" in result.err
    assert "trust export" in result.err
    assert doc.get("k", doc.get("d")) not in result.err
    assert not (home / "trust" / "other.json").exists()


def test_refuses_a_private_key_inside_a_trust_file_or_set(cli, home, file):
    for doc in ({"name": "a", "key": KEY.document()}, {"keys": [KEY.document()]}):
        assert "private key" in cli("trust", "add", file(doc), code=5).err
    assert not home.exists()


@pytest.mark.parametrize(
    ("doc", "code"),
    [
        ("", 6),
        ("[]", 6),
        ("{", 6),
        ('{"kty": "OKP", "kty": "OKP"}', 6),
        ({}, 5),
        ({"keys": []}, 6),
        ({"keys": [PUBLIC, PUBLIC | {"kid": "2"}]}, 6),
        ({"keys": "x"}, 6),
        (PUBLIC | {"crv": "X25519"}, 5),
        (PUBLIC | {"x": "AAAA"}, 5),
        (PUBLIC | {"kid": "a/b"}, 5),
        ({"name": "a", "key": PUBLIC, "model": ["*"]}, 6),
        ({"name": "a", "key": PUBLIC, "models": []}, 6),
        ({"name": "a", "key": PUBLIC, "not_after": "soon"}, 6),
        (" " * 70_000, 7),
    ],
)
def test_refuses_what_is_no_public_key(cli, home, file, doc, code):
    path = file(doc)
    assert f"error: {path}: " in cli("trust", "add", path, code=code).err
    assert not home.exists()


def test_refuses_missing_files_and_bad_arguments(cli, file):
    path = file(PUBLIC)
    assert "no such file" in cli("trust", "add", "nowhere.json", code=7).err
    assert "NAME" in cli("trust", "add", path, "--name", "../x", code=2).err
    assert "--until" in cli("trust", "add", path, "--until", "tomorrow", code=2).err
    assert "past" in cli("trust", "add", path, "--until", "2001-01-01", code=2).err
    assert "pattern" in cli("trust", "add", path, "--model", "", code=2).err


def test_asks_for_a_name_when_nothing_can_serve_as_one(cli, file):
    path = file(PUBLIC | {"kid": "spaces in it"}, name="more spaces.jwk")
    assert "--name" in cli("trust", "add", path, code=2).err
    assert (
        cli("trust", "add", file(PUBLIC | {"kid": "spaces in it"}, name="alice.jwk"), "--json").json["name"] == "alice"
    )


def test_never_overwrites_without_force(cli, home, file):
    cli("trust", "add", file(PUBLIC), "--name", "alice")
    other = SigningKey("pub-2", Secret(b"\x02" * 32)).verify_key()
    assert "already" in cli("trust", "add", file(other.document()), "--name", "alice", code=7).err
    assert read_trust_file(home / "trust" / "alice.json").key == KEY.verify_key()
    cli("trust", "add", file(other.document()), "--name", "alice", "--force")
    assert read_trust_file(home / "trust" / "alice.json").key == other


def test_refuses_another_key_of_the_same_kid(cli, file):
    cli("trust", "add", file(PUBLIC), "--name", "alice")
    twin = SigningKey("pub-1", Secret(b"\x02" * 32)).verify_key()
    result = cli("trust", "add", file(twin.document()), "--name", "mallory", "--force", code=2)
    assert "different key" in result.err
    cli("trust", "add", file(PUBLIC), "--name", "alice-for-b", "--model", "b/*")


def test_lists(cli, file):
    empty = cli("trust", "list")
    assert "No signer is trusted" in empty.out
    assert cli("trust", "list", "--json").json == {"signers": [], "unusable": []}
    cli("trust", "add", file(PUBLIC), "--name", "alice", "--until", "2099-01-01", "--model", "a/*")
    out = cli("trust", "list").out
    for part in ("alice", "pub-1", KEY.verify_key().thumbprint(), "a/*", "2099-01-01"):
        assert part in out
    [row] = cli("trust", "list", "--json").json["signers"]
    assert (row["name"], row["key_id"], row["expired"]) == ("alice", "pub-1", False)


def test_lists_expired_signers_as_such(cli, home):
    (home / "trust").mkdir(parents=True)
    (home / "trust" / "old.json").write_text(json.dumps({"key": PUBLIC, "not_after": "2001-01-01"}))
    assert "(expired)" in cli("trust", "list").out
    assert cli("trust", "list", "--json").json["signers"][0]["expired"] is True


def test_a_bad_file_is_an_error_but_the_others_are_listed(cli, home, file):
    cli("trust", "add", file(PUBLIC), "--name", "alice")
    (home / "trust" / "bad.json").write_text("{")
    (home / "trust" / "loose.json").write_text(json.dumps(PUBLIC))
    (home / "trust" / "loose.json").chmod(0o666)
    result = cli("trust", "list", code=2)
    assert "alice" in result.out
    assert "bad.json" in result.err
    assert "loose.json" in result.err


def test_removes(cli, home, file):
    cli("trust", "add", file(PUBLIC), "--name", "alice")
    assert "alice" in cli("trust", "remove", "alice").out
    assert list((home / "trust").iterdir()) == []
    assert "no signer named 'alice'" in cli("trust", "remove", "alice", code=2).err
    assert "NAME" in cli("trust", "remove", "../keys/alice", code=2).err


def test_exports_what_add_takes(cli, file, tmp_path):
    cli("trust", "add", file(PUBLIC), "--name", "alice", "--model", "a/*")
    exported = cli("trust", "export", "alice").out
    assert '"d"' not in exported
    cli("trust", "remove", "alice")
    cli("trust", "add", file(exported, "exported.json"))
    assert cli("trust", "export", "alice").out == exported
    assert "no signer" in cli("trust", "export", "bob", code=2).err
