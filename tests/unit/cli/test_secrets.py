"""No key byte leaves by any output, in any spelling; and no key comes in by an argument."""

from __future__ import annotations

import base64
import json
import logging
import random

import pytest

from secure_loader.core.keys.local import read_keys
from secure_loader.core.secrets import looks_like_key


def spellings(secret: bytes) -> set[str]:
    """Every way in which a key might be printed, whole or with its first bytes."""
    texts = set()
    for part in (secret, secret[:12]):
        texts |= {part.hex(), part.hex().upper(), repr(part)[2:-1], ", ".join(map(str, part))}
        texts |= {base64.b64encode(part).decode().rstrip("="), base64.urlsafe_b64encode(part).decode().rstrip("=")}
    return texts


def test_no_command_prints_key_bytes(cli, model, home, caplog):
    caplog.set_level(logging.DEBUG)
    said = []

    def once(*words, code=0):
        result = cli(*words, "-v", code=code)
        said.append(result.out + result.err)

    once("keygen", "alice")
    once("keygen", "bob", "--json")
    once("keygen", "bob", "--force")
    once("keygen", "bob", code=7)
    once("encrypt", model, "enc", "-k", "alice")
    once("decrypt", "enc", "plain")
    once("rewrap", "enc", "-k", "bob")
    once("decrypt", "enc", "again", "--keys", home / "keys" / "alice.enc.jwk", code=5)
    once("encrypt", model, "again", "-k", "nobody", code=5)
    once("trust", "add", home / "keys" / "alice.sign.jwk", code=5)
    once("trust", "add", home / "keys" / "alice.enc.jwk", code=5)
    for words in (("verify", "enc"), ("inspect", "enc", "--tensors"), ("trust", "list"), ("env",), ("config", "show")):
        once(*words)
        once(*words, "--json")
    (home / "keys" / "alice.enc.jwk").chmod(0o644)
    once("decrypt", "enc", "again", code=5)
    once("env")
    (home / "keys" / "alice.enc.jwk").chmod(0o600)

    text = "\n".join(said) + caplog.text
    files = [p for p in (home / "keys").iterdir() if p.is_file()]
    assert len(files) == 6
    for path in files:
        [key] = read_keys(path)
        for spelling in spellings(bytes(key.secret.reveal())):
            assert spelling not in text


@pytest.mark.parametrize("broken", ["k", "alg", "kid", "json", "twice"])
def test_no_error_about_a_key_file_shows_it(cli, encrypted, home, broken):
    path = home / "keys" / "alice.enc.jwk"
    doc = json.loads(path.read_text())
    secret = doc["k"]
    if broken == "k":
        doc["k"] = secret[:-1]
    elif broken in doc:
        del doc[broken]
    text = json.dumps({"keys": [doc, doc]} if broken == "twice" else doc)
    path.write_text(text[:-1] if broken == "json" else text)
    for more in ([], ["-v"], ["--json"]):
        result = cli("decrypt", encrypted, "plain", *more, code=5)
        assert secret[:16] not in result.out + result.err
    shown = cli("env").out
    assert secret[:16] not in shown
    assert "Problems" in shown


RAW = bytes(range(100, 132))
MATERIAL = [
    RAW.hex(),
    RAW[:16].hex(),
    "0x" + RAW.hex().upper(),
    base64.b64encode(RAW).decode(),
    base64.urlsafe_b64encode(RAW).decode().rstrip("="),
    base64.b64encode(RAW[:16]).decode(),
    json.dumps({"kty": "oct", "alg": "A256GCM", "kid": "x", "k": base64.urlsafe_b64encode(RAW).decode()}),
    '[{"k": "' + RAW.hex() + '"}]',
    "-----BEGIN PRIVATE KEY-----\n" + base64.b64encode(RAW).decode(),
    "AGE-SECRET-KEY-1" + "Q" * 58,
    "file:" + base64.b64encode(RAW).decode(),
    "env:" + RAW.hex(),
]


@pytest.mark.parametrize("material", MATERIAL)
def test_arguments_that_are_keys_are_refused_and_not_repeated(cli, encrypted, model, material):
    for words in (
        ("decrypt", encrypted, "x", "--keys", material),
        ("decrypt", encrypted, "x", f"--keys={material}"),
        ("encrypt", model, "x", "-k", material),
        ("encrypt", model, "x", "-k", "alice", "--signing-key", material),
        ("rewrap", encrypted, "-k", material),
    ):
        for more in ([], ["-v"], ["--json"]):
            result = cli(*words, *more, code=2)
            assert "never key material" in result.err
            assert material not in result.err
            assert material[20:] not in result.err


@pytest.mark.parametrize("material", MATERIAL[:6])
def test_no_message_repeats_a_key_from_the_command_line(cli, encrypted, material):
    for words in (
        ("verify", material),
        ("verify", encrypted, "--secret", material),
        ("verify", encrypted, "--trust", material),
        ("trust", "remove", material),
        ("keygen", "x", "--algorithm", material),
        ("encrypt", encrypted, "x", "--chunk-size", material),
        (material,),
    ):
        for more in ([], ["-v"], ["--json"]):
            result = cli(*words, *more, code=None)
            assert result.code in (2, 7)  # 7 where it may have been a path
            assert material not in result.err + result.out


@pytest.mark.parametrize("material", [*MATERIAL, f"file:x,{MATERIAL[0]}"])
def test_a_key_in_the_place_of_a_reference_to_one(cli, encrypted, monkeypatch, material):
    monkeypatch.setenv("SECURE_LOADER_KEYS", material)
    result = cli("decrypt", encrypted, "x", "-v", code=2)
    assert "never key material" in result.err
    for words, code in ((("env",), 0), (("config", "show"), 2)):
        done = cli(*words, code=code)
        assert material not in done.out + done.err
        assert material[20:40] not in done.out + done.err


@pytest.mark.parametrize("material", MATERIAL)
def test_looks_like_a_key(material):
    assert looks_like_key(material)
    assert looks_like_key(f"  {material}\n")


@pytest.mark.parametrize(
    "text",
    [
        "https://user:hunter2@keys.example.com/a",
        "https://hunter2@keys.example.com/a",
        "vault:https://u:hunter2@vault.example.com/secret/data/a",
        "https://keys.example.com/a.jwks?X-Amz-Signature=hunter2",
        "vault:https://vault.example.com/secret/data/a?token=hunter2",
        "hvs.CAESIJ" + "hunter2Ab" * 10,
        "s.NjFZgIfxVZ59cPhunter2Vq0O",
    ],
)
def test_urls_that_are_secrets_and_tokens(cli, encrypted, monkeypatch, text):
    """Refused as keys are, wherever a reference is expected, and not shown."""
    assert looks_like_key(text)
    monkeypatch.setenv("SECURE_LOADER_KEYS", text)
    for words, code in ((("decrypt", encrypted, "x", "-v"), 2), (("env",), 0), (("config", "show"), 2)):
        done = cli(*words, code=code)
        assert "hunter2" not in done.out + done.err


@pytest.mark.parametrize("length", [16, 24, 32, 48, 64])
def test_random_keys_look_like_keys(length):
    """All but one in a few thousand, which have no digit and few capitals, or letters of one kind only."""
    rng = random.Random(length)
    keys = [rng.randbytes(length) for _ in range(2000)]
    spelt = [t for key in keys for t in (base64.b64encode(key).decode(), base64.urlsafe_b64encode(key).decode())]
    missed = [t for t in spelt if not t.startswith("/") and not (looks_like_key(t) and looks_like_key(t.rstrip("=")))]
    assert len(missed) <= 4
    assert all(looks_like_key(key.hex()) for key in keys)


@pytest.mark.parametrize(
    "text",
    [
        "alice",
        "alice-enc-a1594888",
        "/run/secrets/alice.jwk",
        "file:/run/secrets/alice.jwk",
        "env:THE_KEY",
        "keys/alice.enc.jwk",
        "./model",
        "meta-llama/Llama-3.1-8B-Instruct",
        "a-name-of-22-characters",
        "a-name-that-is-made-of-forty-three-letters-x",
        "env:MODEL_MASTER_KEY_2026",
        "fd:3",
        "passphrase:/run/secrets/alice.jwk.age",
        "MyCompanyModelKeyAlice",
        "models/customer-a/keys/enc/2026/alice-1.jwk",
        "environments/production/eu-west-1/customer-a/keys/model-2026-aa",
        "/home/Alice/projects/model1/keys/aliceXenc1",
        "https://keys.example.com:8443/models/a@b/keys.jwks",
        "vault:https://vault.example.com:8200/secret/data/models/Alice2",
        "vault:https://[fd00::1]:8200/secret/data/models/alice?version=12",
        "s.safetensors",
        "*.bias",
        "",
    ],
)
def test_does_not_look_like_a_key(text):
    assert not looks_like_key(text)
