"""A model's whole life on the command line."""

from __future__ import annotations

import json
import shutil

import pytest

from secure_loader.core.keys.local import read_keys


def weights(folder):
    return {p.name: p.read_bytes() for p in folder.glob("*.safetensors")}


def test_from_keygen_to_rewrap(command, home, model, tmp_path):
    command("keygen", "alice")
    report = command("encrypt", model, "enc", "--model-id", "alice/tiny", "--json").json
    assert (report["tensors"], report["encrypted"], report["shards"], report["files"]) == (4, 4, 2, 2)
    assert report["model_id"] == "alice/tiny"
    verified = command("verify", "enc", "--json").json
    assert (verified["signer"], verified["full"], verified["model_id"]) == ("alice", False, "alice/tiny")
    assert command("verify", "enc", "--full", "--json").json["full"] is True
    assert command("inspect", "enc", "--json").json["release"] == 1
    command("decrypt", "enc", "plain")
    assert weights(tmp_path / "plain") == weights(model)
    for name in ("config.json", "model.safetensors.index.json"):
        assert json.loads((tmp_path / "plain" / name).read_text()) == json.loads((model / name).read_text())

    old = home / "keys" / "alice.enc.jwk"
    command("keygen", "bob")
    rewrapped = command("rewrap", "enc", "-k", "bob", "--release", "2", "--json").json
    assert rewrapped["release"] == 2
    assert rewrapped["key_id"].startswith("bob-enc-")
    assert rewrapped["signer_key_id"].startswith("bob-sign-")
    command("verify", "enc", "--full")
    refused = command("decrypt", "enc", "again", "--keys", old, code=5)
    assert rewrapped["key_id"] in refused.err
    assert not (tmp_path / "again").exists()
    command("decrypt", "enc", "again")
    assert weights(tmp_path / "again") == weights(model)


def test_prints_what_was_done(cli, model, tmp_path):
    cli("keygen", "alice")
    (model / "pytorch_model.bin").write_bytes(b"x")
    done = cli("encrypt", model, "enc", "--model-id", "alice/tiny", "--release", "3", "--exclude", "*.bias")
    for part in (
        "Encrypted",
        "alice/tiny, release 3",
        "4 tensors, 3 encrypted, 1 in clear",
        "alice-enc-",
        "alice-sign-",
    ):
        assert part in done.out
    assert "pytorch_model.bin" in done.err
    verified = cli("verify", "enc").out
    assert "alice (alice-sign-" in verified
    assert "--full" in verified
    assert "every stored byte" in cli("verify", "enc", "--full").out
    assert "4 tensors" in cli("decrypt", "enc", "plain").out


def test_quiet_says_nothing_but_errors(cli, model):
    cli("keygen", "alice", "-q")
    (model / "pytorch_model.bin").write_bytes(b"x")
    for words in (("encrypt", model, "enc"), ("verify", "enc"), ("decrypt", "enc", "plain"), ("rewrap", "enc")):
        result = cli(*words, "-q")
        assert (result.out, result.err) == ("", "")
    assert cli("inspect", "enc", "-q").out
    assert cli("verify", "nowhere", "-q", code=7).err


def test_inspects_without_key_and_home(cli, encrypted, home):
    shutil.rmtree(home)
    out = cli("inspect", encrypted).out
    for part in (
        "alice/tiny, release 1",
        "CryptoTensors 2 with profile 1, chunks of 2 MiB",
        "4 tensors, all encrypted",
        "2 F16",
        "(aes256gcm)",
        "not in your trust store",
        "model.secure-00001-of-00002.safetensors",
        "config.json",
        "Not verified",
    ):
        assert part in out
    assert not home.exists()


def test_inspect_names_the_signer_as_the_trust_store_does(cli, encrypted):
    assert "in your trust store as alice, for every model" in cli("inspect", encrypted).out
    doc = cli("inspect", encrypted, "--json").json
    assert list(doc["trusted_signers"].values()) == [["alice"]]
    assert doc["verified"] is False
    assert len(doc["files"]) == 2
    assert "tensors" not in doc


def test_inspect_lists_tensors(cli, model):
    cli("keygen", "alice")
    cli("encrypt", model, "enc", "--exclude", "*.bias")
    out = cli("inspect", "enc", "--tensors").out
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "[100, 64]" in rows["embed.weight"]
    assert "25,600" in rows["embed.weight"]
    assert "clear" in rows["layer.bias"]
    assert "encrypted" in rows["layer.weight"]
    tensors = {t["name"]: t for t in cli("inspect", "enc", "--tensors", "--json").json["tensors"]}
    assert tensors["layer.bias"] == {
        "file": "model.secure-00002-of-00002.safetensors",
        "name": "layer.bias",
        "dtype": "F16",
        "shape": [64],
        "nbytes": 128,
        "encrypted": False,
    }


def test_inspects_single_files_and_plain_ones(cli, encrypted, model):
    one = cli("inspect", encrypted / "model.secure-00001-of-00002.safetensors", "--tensors").out
    assert "embed.weight" in one
    assert "manifest" not in one
    plain = cli("inspect", model).out
    assert "plain safetensors: not encrypted, not signed" in plain
    assert "none encrypted" in plain
    assert "Not verified" not in plain


def test_a_broken_trust_file_does_not_stop_inspect(cli, encrypted, home):
    (home / "trust" / "bad.json").write_text("{")
    result = cli("inspect", encrypted)
    assert "in your trust store as alice" in result.out
    assert "bad.json" in result.err


def test_formats_and_algorithms(cli, model, tmp_path):
    cli("keygen", "cha", "--algorithm", "chacha20poly1305")
    cli("encrypt", model, "one", "--format-version", "1", "--keep-names")
    cli("encrypt", model, "two", "--chunk-size", "64KiB")
    assert (tmp_path / "one" / "model.safetensors.index.json").exists()
    assert "CryptoTensors 1 with profile 1\n" in cli("inspect", "one").out
    assert "chunks of 64 KiB" in cli("inspect", "two").out
    for name in ("one", "two"):
        cli("decrypt", name, f"{name}-plain")
        assert weights(tmp_path / f"{name}-plain") == weights(model)


def test_patterns_choose_what_is_encrypted(cli, model):
    cli("keygen", "alice")
    report = cli(
        "encrypt", model, "enc", "--include", "layer.*", "--include", "embed*", "--exclude", "*.bias", "--json"
    ).json
    assert report["encrypted"] == 2
    assert "matches no tensor" in cli("encrypt", model, "other", "--include", "lyer.*", code=2).err


def test_keys_by_reference(cli, command, model, home, tmp_path):
    cli("keygen", "alice")
    cli("keygen", "bob")
    secret = (home / "keys" / "alice.enc.jwk").read_text()
    sign = home / "keys" / "alice.sign.jwk"
    both = tmp_path / "both.jwks"
    both.write_text(json.dumps({"keys": [json.loads(secret), json.loads(sign.read_text())]}))
    both.chmod(0o600)
    kid = read_keys(home / "keys" / "alice.enc.jwk")[0].kid
    for i, (key, signing) in enumerate(
        [("alice", None), (kid, "alice"), (home / "keys" / "alice.enc.jwk", sign), (f"file:{both}", f"file:{both}")]
    ):
        more = [] if signing is None else ["--signing-key", signing]
        report = cli("encrypt", model, f"enc{i}", "-k", key, *more, "--json").json
        assert report["key_id"] == kid
        assert report["signer_key_id"].startswith("alice-sign-")
    command("encrypt", model, "enc-env", "-k", "env:THE_KEY", "--signing-key", "alice", THE_KEY=secret)
    (home / "keys" / "alice.enc.jwk").unlink()
    command("decrypt", "enc-env", "plain", "--keys", "env:THE_KEY", THE_KEY=secret)
    command("decrypt", "enc-env", "plain2", SECURE_LOADER_KEYS="env:THE_KEY", THE_KEY=secret)
    assert weights(tmp_path / "plain") == weights(tmp_path / "plain2") == weights(model)


def test_several_keys_must_be_told_apart(cli, model):
    cli("keygen", "alice")
    cli("keygen", "bob")
    result = cli("encrypt", model, "enc", code=5)
    assert "several" in result.err
    assert "--key NAME" in result.err


def test_trust_option_replaces_the_store(cli, encrypted, tmp_path, home):
    public = tmp_path / "alice.json"
    public.write_text(cli("trust", "export", "alice").out)
    cli("trust", "remove", "alice")
    cli("verify", encrypted, code=3)
    cli("verify", encrypted, "--trust", public)
    cli("decrypt", encrypted, "plain", "--trust", public)
    cli("rewrap", encrypted, "--trust", public)


@pytest.mark.parametrize("verb", ["encrypt", "decrypt"])
def test_destinations_are_replaced_only_by_force(cli, encrypted, model, tmp_path, verb):
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text("mine")
    source = model if verb == "encrypt" else encrypted
    assert "--force" in cli(verb, source, target, code=7).err
    assert (target / "config.json").read_text() == "mine"
    cli(verb, source, target, "--force")
    assert (target / "config.json").read_text() == '{"model_type": "none"}'
