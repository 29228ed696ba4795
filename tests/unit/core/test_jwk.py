"""JSON Web Keys in both spellings, and everything that is not one."""

from __future__ import annotations

import base64
import json
import pickle

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from secure_loader.core.aead import ALGORITHMS
from secure_loader.core.keys.jwk import MasterKey, SigningKey, VerifyKey, parse_key, parse_keys
from secure_loader.core.secrets import Secret
from secure_loader.errors import KeyAccessError

SECRET = bytes(range(0xE0, 0x100))  # with + and / in the one alphabet, - and _ in the other
SEED = bytes(range(0xD0, 0xF0))
PUBLIC = Ed25519PrivateKey.from_private_bytes(SEED).public_key().public_bytes_raw()


def std(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


OCT = {"kty": "oct", "kid": "m", "alg": "A256GCM", "k": url(SECRET)}
OKP = {"kty": "OKP", "crv": "Ed25519", "kid": "s", "alg": "EdDSA", "x": url(PUBLIC), "d": url(SEED)}


@pytest.mark.parametrize("alg", ["A256GCM", "A256GCMKW", "aes256gcm", "AES-256-GCM"])
@pytest.mark.parametrize("k", [url(SECRET), std(SECRET), std(SECRET).rstrip("="), url(SECRET) + "="])
def test_master_keys_of_both_spellings(alg, k):
    key = parse_key(OCT | {"alg": alg, "k": k}, "test")
    assert isinstance(key, MasterKey)
    assert (key.kid, key.algorithm.name, bytes(key.secret.reveal())) == ("m", "aes256gcm", SECRET)


@pytest.mark.parametrize(("alg", "name", "n"), [("A128GCM", "aes128gcm", 16), ("C20P", "chacha20poly1305", 32)])
def test_the_other_algorithms(alg, name, n):
    key = parse_key(OCT | {"alg": alg, "k": url(SECRET[:n])}, "test")
    assert key.algorithm.name == name
    assert key.document()["alg"] == alg


@pytest.mark.parametrize(
    "spelling", [{}, {"kty": "okp", "alg": "ed25519", "x": std(PUBLIC), "d": std(SEED), "crv": None}]
)
def test_signing_keys_of_both_spellings(spelling):
    doc = {k: v for k, v in (OKP | spelling).items() if v is not None}
    key = parse_key(doc, "test")
    assert isinstance(key, SigningKey)
    assert key.verify_key().public == PUBLIC
    del doc["d"]
    assert parse_key(doc, "test") == VerifyKey("s", PUBLIC)


def test_what_we_write_we_read():
    for doc in (OCT | {"use": "enc"}, OKP | {"use": "sig"}):
        key = parse_key(doc, "test")
        assert key.document() == doc
        assert parse_keys(json.dumps({"keys": [key.document()]}), "test") == [key]


def test_thumbprint_of_rfc_8037():
    x = "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"
    key = parse_key({"kty": "OKP", "crv": "Ed25519", "kid": "a", "alg": "EdDSA", "x": x}, "test")
    assert key.thumbprint() == "kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kty": "RSA"}, "none of oct, OKP and AKP"),
        ({"kty": "OCT"}, "none of oct, OKP and AKP"),
        ({"kty": None}, "none of oct, OKP and AKP"),
        ({"kid": None}, "no usable kid"),
        ({"kid": ""}, "no usable kid"),
        ({"kid": "a/b"}, "no usable kid"),
        ({"kid": "a\nb"}, "no usable kid"),
        ({"kid": "x" * 257}, "no usable kid"),
        ({"kid": "x" * 1_000_000}, "no usable kid"),
        ({"kid": 7}, "no usable kid"),
        ({"alg": None}, "names no alg"),
        ({"alg": "none"}, "is for 'none'"),
        ({"alg": "HS256"}, "is for 'HS256'"),
        ({"alg": "ed25519"}, "is for 'ed25519'"),
        ({"alg": "A192GCM"}, "is for 'A192GCM'"),
        ({"alg": "A128GCM"}, "has 32 bytes instead of 16"),
        ({"use": "sig"}, "not meant for this use"),
        ({"key_ops": ["sign"]}, "not meant for this use"),
        ({"key_ops": "encrypt"}, "not meant for this use"),
        ({"key_ops": [[]]}, "not meant for this use"),
        ({"key_ops": [{}]}, "not meant for this use"),
        ({"k": None}, "missing or not a string"),
        ({"k": 5}, "missing or not a string"),
        ({"k": url(SECRET[:31])}, "has 31 bytes instead of 32"),
        ({"k": url(SECRET) + "!"}, "is not base64"),
        ({"k": " " + url(SECRET)}, "is not base64"),
        ({"k": std(SECRET)[:20] + "+" + "-" + std(SECRET)[22:]}, "mixes the two alphabets"),
        ({"k": "ü" * 43}, "is not base64"),
    ],
)
def test_refused_master_keys(change, message):
    doc = {k: v for k, v in (OCT | change).items() if v is not None}
    with pytest.raises(KeyAccessError) as caught:
        parse_key(doc, "the file")
    assert message in caught.value.message
    assert caught.value.message.startswith("the file: ")
    assert url(SECRET)[:12] not in caught.value.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"crv": "X25519"}, "not an Ed25519 key"),
        ({"crv": "Ed448"}, "not an Ed25519 key"),
        ({"alg": "HS256"}, "not an Ed25519 key"),
        ({"alg": "none"}, "not an Ed25519 key"),
        ({"alg": "A256GCM"}, "not an Ed25519 key"),
        ({"use": "enc"}, "not meant for this use"),
        ({"key_ops": ["encrypt"]}, "not meant for this use"),
        ({"x": None}, "missing or not a string"),
        ({"x": url(PUBLIC[:31])}, "has 31 bytes instead of 32"),
        ({"x": url(SECRET)}, "x is not the public half of d"),
        ({"d": url(SEED[:31])}, "has 31 bytes instead of 32"),
        ({"d": None, "x": None}, "missing or not a string"),
    ],
)
def test_refused_signing_keys(change, message):
    doc = {k: v for k, v in (OKP | change).items() if v is not None}
    with pytest.raises(KeyAccessError) as caught:
        parse_key(doc, "the file")
    assert message in caught.value.message
    assert url(SEED)[:12] not in caught.value.message


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"keys":[]}', '{"keys":{}}', '{"keys":[5]}', "5", "null", "[" * 50, '{"kty":"oct","kty":"oct"}'],
)
def test_refused_documents(text):
    with pytest.raises(KeyAccessError, match=r"^the file: "):
        parse_keys(text, "the file")


def test_one_kid_twice():
    with pytest.raises(KeyAccessError, match="two keys share the kid 'm'"):
        parse_keys(json.dumps({"keys": [OCT, OCT]}), "the file")


@pytest.mark.parametrize(
    ("name", "n"), [("aes256gcm", 16), ("aes128gcm", 32), ("chacha20poly1305", 0), ("aes256gcm", 33)]
)
def test_a_key_object_has_the_length_of_its_algorithm(name, n):
    """AESGCM takes 16 bytes for AES-256 and quietly is AES-128."""
    with pytest.raises(KeyAccessError, match=f"has {n} bytes instead of"):
        MasterKey("m", ALGORITHMS[name], Secret(bytes(n)))


@pytest.mark.parametrize("kid", ["", "a/b", "x" * 257, "a\x00"])
def test_a_key_object_has_a_kid_that_a_file_can_name(kid):
    with pytest.raises(KeyAccessError, match="a kid has 1 to 256 characters"):
        MasterKey(kid, ALGORITHMS["aes256gcm"], Secret(bytes(32)))
    with pytest.raises(KeyAccessError, match="a kid has 1 to 256 characters"):
        SigningKey(kid, Secret(bytes(32)))


def test_a_signing_key_has_32_bytes():
    with pytest.raises(KeyAccessError, match="has 31 bytes instead of 32"):
        SigningKey("s", Secret(bytes(31)))


def test_secrets_do_not_show_travel_or_stay():
    secret = Secret(bytearray(SECRET))
    assert repr(secret) == str(secret) == f"{secret}" == "<Secret>"
    assert url(SECRET) not in repr(parse_key(OCT, "x"))
    assert "SECRET" not in repr(parse_key(OKP, "x"))
    import copy

    for travel in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            travel(secret)
    assert secret != Secret(SECRET)
    data = bytearray(SECRET)
    kept = Secret(data)
    assert not any(data), "the original is wiped"
    view = kept.reveal()
    with pytest.raises(TypeError):
        view[0] = 1
    kept.wipe()
    assert not any(view)
    assert len(kept) == 0
