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
    assert cli("trust", "list", "--json").json == {
        "signers": [],
        "revoked": [],
        "rules": [],
        "only_listed": False,
        "authorities": [],
        "unusable": [],
    }
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


def test_revokes_a_signer_by_name_and_by_thumbprint(cli, home, file):
    cli("trust", "add", file(PUBLIC), "--name", "alice")
    thumbprint = KEY.verify_key().thumbprint()
    result = cli("trust", "revoke", "alice", "--reason", "key stolen")
    for part in (thumbprint, "alice", "key stolen", str(home / "trust" / "revoked.toml")):
        assert part in result.out
    assert "on this machine only" in result.err
    assert "revoked already" in cli("trust", "revoke", thumbprint, "--reason", "again", code=2).err
    listed = cli("trust", "list")
    assert listed.out.count("revoked") == 2
    assert "key stolen" in listed.out
    document = cli("trust", "list", "--json").json
    assert document["signers"][0]["revoked"] == document["revoked"][0]["since"]
    assert (document["revoked"][0]["signer"], document["revoked"][0]["name"]) == (thumbprint, "alice")


def test_a_revoked_key_signs_nothing_more(cli, encrypted, model):
    cli("trust", "revoke", "alice", "--reason", "stolen")
    assert "was revoked" in cli("encrypt", model, "again", code=2).err
    assert "keygen" in cli("rewrap", encrypted, code=2).err


def test_a_revoked_key_is_not_added_again(cli, file):
    cli("trust", "revoke", KEY.verify_key().thumbprint(), "--reason", "key stolen", "--since", "2026-01-02")
    result = cli("trust", "add", file(PUBLIC), "--name", "alice", code=2)
    assert "was revoked here on 2026-01-02: key stolen" in result.err


def test_revokes_releases_and_files(cli, encrypted):
    shard = next(encrypted.glob("*.safetensors"))
    entries = [
        cli("trust", "revoke", "--model", "alice/tiny", "--release", 1, "--reason", "x", "--json").json,
        cli("trust", "revoke", "--file", shard, "--reason", "x", "--json").json,
        cli("trust", "revoke", "--file", encrypted / "secure_manifest.json", "--reason", "x", "--json").json,
        cli("trust", "revoke", "--digest", ":".join(["AB"] * 32), "--reason", "x", "--json").json,
        cli("trust", "revoke", "--digest", "ab" * 16, "--reason", "x", "--json").json,
    ]
    assert [sorted(e) for e in entries] == [
        ["file", "model", "reason", "release", "since"],
        ["file", "file_id", "reason", "since"],
        ["file", "reason", "sha256", "since"],
        ["file", "reason", "sha256", "since"],
        ["file", "file_id", "reason", "since"],
    ]
    assert entries[3]["sha256"] == "ab" * 32
    for path in (encrypted, shard):
        assert "was revoked on" in cli("verify", path, code=3).err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "one of NAME or THUMBPRINT"),
        (("alice", "--model", "x"), "one of NAME or THUMBPRINT"),
        (("--digest", "xx"), "cannot be"),
        (("--file", "."), "is a folder"),
        (("nobody",), "no signer named 'nobody' is trusted"),
        (("../keys/alice",), "no signer named"),
        (("--model", "x", "--since", "tomorrow"), "--since"),
        (("--model", "x", "--release", "-1"), "release must be"),
        (("--digest", "ab" * 32, "--release", "1"), "--release goes with --model"),
    ],
)
def test_revoke_says_what_it_cannot_do(cli, home, words, message):
    assert message in cli("trust", "revoke", *words, "--reason", "x", code=2).err
    assert not (home / "trust" / "revoked.toml").exists()
    assert "--reason" in cli("trust", "revoke", "--model", "x", code=2).err


def test_lists_rules_and_what_is_wrong_with_them(cli, home, file):
    cli("trust", "add", file(PUBLIC), "--name", "alice")
    (home / "trust.toml").write_text(
        "only_listed = true\n[[model]]\npattern = 'a/*'\nsigners = ['alice']\nmin_release = 3\nencrypted = true\n"
    )
    out = cli("trust", "list").out
    for part in ("a/*", "signers alice; min_release 3; encrypted true", "Models that no rule is about are refused."):
        assert part in out
    (home / "trust" / "trust.toml").write_text("[[modell]]\n")
    result = cli("trust", "list", "--json", code=2)
    assert result.json["unusable"] == [str(home / "trust" / "trust.toml")]
    assert "modell" in result.error["message"]
    assert any("modell" in problem for problem in cli("env", "--json").json["problems"])


def test_pairs_of_keys(cli, home, model, tmp_path, file):
    made = cli("keygen", "alice", "--post-quantum")
    assert "Ed25519 and ML-DSA-65" in made.out
    assert cli("keygen", "bob", "--json").json["post_quantum"] is False
    assert "+ ML-DSA-65" in cli("trust", "list").out
    cli("encrypt", model, tmp_path / "enc", "-k", "alice", "--model-id", "alice/tiny")
    cli("verify", tmp_path / "enc")
    assert "ML-DSA-65" in cli("inspect", tmp_path / "enc").out
    document = json.loads(cli("trust", "export", "alice").out)
    assert document["post_quantum"]["alg"] == "ML-DSA-65"
    cli("trust", "remove", "alice")
    jwks = {"keys": [document["post_quantum"], document["key"]]}
    added = cli("trust", "add", file(jwks), "--name", "alice")
    assert "ML-DSA-65" in added.out
    assert json.loads((home / "trust" / "alice.json").read_text()) == document
    cli("verify", tmp_path / "enc")
    cli("encrypt", model, tmp_path / "weak", "-k", "bob", "--model-id", "alice/tiny")
    alone = {"keys": [document["post_quantum"], document["post_quantum"]]}
    assert "exactly one key" in cli("trust", "add", file(alone), "--name", "x", code=6).err


def test_certificates(cli, home, model, tmp_path):
    from secure_loader.core.keys.local import find_signing_key
    from tests.certificates import pem, root

    cli("keygen", "alice")
    authority = root()
    key = find_signing_key([home / "keys"], "alice")
    chain = pem(tmp_path / "chain.pem", authority.issue(key))
    pem(home / "trust" / "roots" / "acme.pem", authority.certificate)
    cli("encrypt", model, tmp_path / "enc", "--model-id", "acme/tiny", "--certificate", chain)
    cli("trust", "remove", "alice")
    assert "does not name" in cli("verify", tmp_path / "enc", code=3).err
    (home / "trust" / "trust.toml").write_text(
        "[[authority]]\nname = 'acme'\nroots = ['roots/acme.pem']\nmodels = ['acme/*']\nsubject = { O = 'Acme' }\n"
    )
    cli("verify", tmp_path / "enc")
    out = cli("trust", "list").out
    assert "O = Acme" in out
    assert "acme/*" in out
    (home / "trust" / "roots" / "acme.pem").rename(home / "trust" / "roots" / "moved.pem")
    assert "no such file of root certificates" in cli("trust", "list", code=7).err
    (home / "trust" / "roots" / "moved.pem").rename(home / "trust" / "roots" / "acme.pem")
    assert cli("trust", "list", "--json").json["authorities"][0]["name"] == "acme"
    cli("rewrap", tmp_path / "enc", "--release", "2", "--trust", home / "trust")
    assert "does not name" in cli("verify", tmp_path / "enc", code=3).err
    result = cli("encrypt", model, tmp_path / "other", "--certificate", home / "trust" / "roots" / "acme.pem", code=2)
    assert "not for an Ed25519 key" in result.err


def test_requests_a_certificate(cli, home):
    from cryptography import x509

    made = cli("keygen", "alice", "--json").json
    for words, subject in (((), "CN=alice"), (("--subject", "CN=Release,O=Acme, Inc".replace(", ", "\\, ")), None)):
        csr = x509.load_pem_x509_csr(cli("trust", "request", "alice", *words).out.encode())
        assert csr.is_signature_valid
        assert subject in (None, csr.subject.rfc4514_string())
        public = csr.public_key().public_bytes_raw()
        assert public == read_trust_file(home / "trust" / "alice.json").key.public
    assert csr.subject.get_attributes_for_oid(x509.NameOID.ORGANIZATION_NAME)[0].value == "Acme, Inc"
    assert "is no name" in cli("trust", "request", "alice", "--subject", "Acme", code=2).err
    assert "no signing key" in cli("trust", "request", "bob", code=5).err
    assert cli("trust", "request", made["signing_key_id"]).out.startswith("-----BEGIN CERTIFICATE REQUEST")
