"""sign --oms, and what verify, encrypt and rewrap make of a model.sig."""

from __future__ import annotations

import hashlib
import os
import shutil

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

PEM = serialization.Encoding.PEM
SPKI = serialization.PublicFormat.SubjectPublicKeyInfo


def write(path, key, passphrase=None, form=serialization.PrivateFormat.PKCS8):
    sealed = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    path.write_bytes(key.private_bytes(PEM, form, sealed))
    path.chmod(0o600)
    public = path.with_suffix(".pub.pem")
    public.write_bytes(key.public_key().public_bytes(PEM, SPKI))
    return path, public


@pytest.fixture
def key(tmp_path):
    return write(tmp_path / "release.pem", ec.generate_private_key(ec.SECP256R1()))


def test_signs_and_verifies(cli, encrypted, key, home):
    done = cli("sign", "--oms", encrypted, "--key", key[0])
    fingerprint = hashlib.sha256(key[1].read_bytes()).hexdigest()
    for part in ("Signed", "model.sig", "alice/tiny, release 1", "5 files", f"{fingerprint} (P-256)"):
        assert part in done.out
    assert done.err == ""
    assert cli("verify", encrypted, "--json").json["model_signer"] is None
    assert "model.sig" not in cli("verify", encrypted).out
    for more in ([], ["--full"]):
        result = cli("verify", encrypted, "--oms-key", key[1], *more)
        assert "model.sig  by release.pub" in result.out
    store = home / "trust" / "oms"
    store.mkdir()
    shutil.copy(key[1], store / "alice.pem")
    assert cli("verify", encrypted, "--json").json["model_signer"] == "alice"
    assert cli("verify", encrypted, "--json", "--oms-key", store).json["model_signer"] == "alice"


def test_reports_as_json(cli, encrypted, key):
    (encrypted / ".notes").write_text("x")
    report = cli("sign", "--oms", encrypted, "--key", key[0], "--json").json
    assert report.pop("seconds") > 0
    nbytes = sum(p.stat().st_size for p in encrypted.iterdir() if p.name not in ("model.sig", ".notes"))
    assert report == {
        "path": str(encrypted / "model.sig"),
        "model_id": "alice/tiny",
        "release": 1,
        "files": 5,
        "nbytes": nbytes,
        "curve": "P-256",
        "fingerprint": hashlib.sha256(key[1].read_bytes()).hexdigest(),
        "not_signed": [".notes"],
    }
    assert "not signed  .notes" in cli("sign", "--oms", encrypted, "--key", key[0], "--force").out
    assert cli("sign", "--oms", encrypted, "--key", key[0], "--force", "-q").out == ""


def test_hidden_names_that_are_no_text(cli, encrypted, key):
    os.close(os.open(os.fsencode(encrypted) + b"/.\xff\n", os.O_CREAT | os.O_WRONLY))
    done = cli("sign", "--oms", encrypted, "--key", key[0])
    assert "not signed  .\\udcff\\n" in done.out
    assert cli("sign", "--oms", encrypted, "--key", key[0], "--force", "--json").json["not_signed"] == [".\udcff\n"]
    cli("verify", encrypted, "--oms-key", key[1])


def test_what_is_there_stays_unless_it_is_meant(cli, encrypted, key):
    cli("sign", "--oms", encrypted, "--key", key[0])
    before = (encrypted / "model.sig").read_bytes()
    error = cli("sign", "--oms", encrypted, "--key", key[0], "--json", code=7).error
    assert (error["type"], error["hint"]) == ("WriteError", "replace it with --force")
    assert (encrypted / "model.sig").read_bytes() == before
    cli("sign", "--oms", encrypted, "--key", key[0], "--force")
    assert (encrypted / "model.sig").read_bytes() != before, "ECDSA is never the same twice"


def test_a_signature_is_demanded_where_a_key_is_named(cli, encrypted, key, tmp_path):
    assert "has no model.sig" in cli("verify", encrypted, "--oms-key", key[1], code=3).err
    [shard, _] = sorted(encrypted.glob("*.safetensors"))
    assert "signs folders" in cli("verify", shard, "--oms-key", key[1], code=2).err
    cli("sign", "--oms", encrypted, "--key", key[0])
    _, other = write(tmp_path / "other.pem", ec.generate_private_key(ec.SECP384R1()))
    assert "not signed by a key that is trusted" in cli("verify", encrypted, "--oms-key", other, code=3).err
    cli("verify", encrypted, "--oms-key", other, "--oms-key", key[1])
    (encrypted / "config.json").write_text("{}")
    assert "config.json" in cli("verify", encrypted, "--oms-key", key[1], code=3).err


def test_only_what_is_genuine_is_signed(cli, encrypted, model, key):
    assert "is not an encrypted folder" in cli("sign", "--oms", model, "--key", key[0], code=2).err
    [shard, _] = sorted(encrypted.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert cli("sign", "--oms", encrypted, "--key", key[0], "--json", code=3).error["type"] == "AuthenticationError"
    assert not (encrypted / "model.sig").exists()


def test_passphrases(cli, encrypted, tmp_path):
    sealed, public = write(tmp_path / "k.pem", ec.generate_private_key(ec.SECP521R1()), b"correct horse battery")
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("correct horse battery\n")
    wrong.write_text("another one, just as long\n")
    for path in (right, wrong):
        path.chmod(0o600)
    assert "--passphrase-file FILE" in cli("sign", "--oms", encrypted, "--key", sealed, code=5).err
    assert (
        "another passphrase" in cli("sign", "--oms", encrypted, "--key", sealed, "--passphrase-file", wrong, code=5).err
    )
    assert "P-521" in cli("sign", "--oms", encrypted, "--key", sealed, "--passphrase-file", right).out
    cli("verify", encrypted, "--oms-key", public)
    plain, _ = write(tmp_path / "plain.pem", ec.generate_private_key(ec.SECP256R1()))
    assert (
        "is not encrypted"
        in cli("sign", "--oms", encrypted, "--key", plain, "--passphrase-file", right, "--force", code=5).err
    )


@pytest.mark.parametrize(
    "made",
    [
        ed25519.Ed25519PrivateKey.generate,
        lambda: ec.generate_private_key(ec.SECP256K1()),
        lambda: rsa.generate_private_key(65537, 1024),
    ],
    ids=["Ed25519", "secp256k1", "RSA"],
)
def test_other_keys_are_refused(cli, encrypted, tmp_path, made):
    private, public = write(tmp_path / "k.pem", made())
    assert "does not hold an EC key on the curve" in cli("sign", "--oms", encrypted, "--key", private, code=5).err
    assert "does not hold an EC key on the curve" in cli("verify", encrypted, "--oms-key", public, code=2).err


def test_what_is_no_key(cli, encrypted, key, tmp_path):
    key[0].chmod(0o640)
    assert "chmod 600" in cli("sign", "--oms", encrypted, "--key", key[0], code=5).err
    key[0].chmod(0o600)
    text = key[0].read_text()
    for broken in (text[:-40], "", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"):
        key[0].write_text(broken)
        err = cli("sign", "--oms", encrypted, "--key", key[0], "-v", code=5).err
        assert text.splitlines()[1][:20] not in err
    err = cli("sign", "--oms", encrypted, "--key", text, code=2).err
    assert text.splitlines()[1] not in err
    cli("sign", "--oms", encrypted, "--key", tmp_path / "nowhere.pem", code=5)
    cli("sign", encrypted, "--key", key[0], code=2)


@pytest.mark.parametrize("parameters", ["", "BggqhkjOPQMBBw=="], ids=["-noout", "with parameters"])
def test_keys_as_openssl_writes_them(cli, encrypted, tmp_path, parameters):
    """``openssl ecparam -genkey``: in SEC 1, with the curve's parameters in a block of their own before it."""
    form = serialization.PrivateFormat.TraditionalOpenSSL
    path, public = write(tmp_path / "o.pem", ec.generate_private_key(ec.SECP256R1()), form=form)
    if parameters:
        head = f"-----BEGIN EC PARAMETERS-----\n{parameters}\n-----END EC PARAMETERS-----\n"
        path.write_text(head + path.read_text())
    cli("sign", "--oms", encrypted, "--key", path)
    cli("verify", encrypted, "--oms-key", public)


def test_encrypt_and_rewrap_say_what_they_leave_out(cli, model, encrypted, key):
    (model / "model.sig").write_text("{}")
    (model / "pytorch_model.bin").write_bytes(b"x")
    done = cli("encrypt", model, "again", "--json")
    assert sorted(done.json["left_out"]) == ["model.sig", "pytorch_model.bin"]
    weights, signature = cli("encrypt", model, "once-more").err.splitlines()
    assert weights.endswith("in clear: pytorch_model.bin")
    assert "what it signs is not this folder: model.sig" in signature
    assert "secure-loader sign --oms" in signature
    cli("sign", "--oms", encrypted, "--key", key[0])
    cli("verify", encrypted, "--oms-key", key[1])
    assert "model.sig" in cli("rewrap", encrypted).err
    assert not (encrypted / "model.sig").exists()
    cli("sign", "--oms", encrypted, "--key", key[0])
    cli("verify", encrypted, "--oms-key", key[1], "--full")
    # The signature is of the encrypted folder.
    cli("decrypt", encrypted, "plain")
    assert not (encrypted.parent / "plain" / "model.sig").exists()
