"""Identities: X-Wing by its published vector, HPKE against one that is spelt out, and what does not open."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import re
import traceback

import pytest

from secure_loader.core.keys.hybrid import ALG, JWK_ALG, PUBLIC_BYTES, Identity, PublicIdentity
from secure_loader.core.keys.jwk import b64url, parse_key, parse_keys
from secure_loader.core.keys.local import parse
from secure_loader.core.recipient import Recipient, WrapContext
from secure_loader.core.secrets import Secret
from secure_loader.errors import KeyAccessError
from tests.vectors import naive_hpke, naive_json

# draft-connolly-cfrg-xwing-kem: the first seed of its vectors is the first output of SHAKE-128 over nothing.
SEED = bytes.fromhex("7f9c2ba4e88f827d616045507605853ed73b8093f6efbc88eb1a6eacfa66ef26")
BOB = Identity("bob-1", Secret(SEED))
PUBLIC = BOB.public()
EVE = Identity("bob-1", Secret(b"\x05" * 32))
MASTER = bytes(range(100, 132))
CONTEXT = WrapContext("model-1", "aes256gcm", "alice/tiny")
INFO = b'secure_loader recipient v1\0{"alg":"aes256gcm","kid":"model-1","model_id":"alice/tiny"}'
# Points that every X25519 key takes to zero, so that half of the hybrid would be known to all.
LOW_ORDER = (
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0100000000000000000000000000000000000000000000000000000000000000",
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
)


def entry(key: bytes = MASTER, context: WrapContext = CONTEXT) -> Recipient:
    return PUBLIC.wrap(Secret(key), context)


def frames(error: BaseException) -> str:
    """What a crash reporter shows of an error: the local variables of our own frames, here and in what it came from."""
    shown, todo = [], [error]
    while todo:
        found = todo.pop()
        todo += [e for e in {id(e): e for e in (found.__cause__, found.__context__)}.values() if e is not None]
        for frame, _ in traceback.walk_tb(found.__traceback__):
            if "secure_loader/core" in frame.f_code.co_filename:
                shown += [f"{name} = {value!r}" for name, value in frame.f_locals.items()]
    return "\n".join(shown)


def assert_no_trace(text: str, *secrets: bytes) -> None:
    """No part of the secrets, in any spelling."""
    shown = json.dumps(text)
    for secret in secrets:
        for spelling in (secret.hex(), b64url(secret), b64url(secret).replace("-", "+").replace("_", "/")):
            assert spelling[:16] not in text
        assert repr(secret)[2:18] not in text
        assert repr(secret)[2:18] not in shown


def test_the_seed_is_the_draft_s():
    assert hashlib.shake_128(b"").digest(32) == SEED


def test_the_key_pair_of_the_draft():
    assert len(PUBLIC.public) == PUBLIC_BYTES == 1216
    assert PUBLIC.public[:32].hex() == "e2236b35a8c24b39b10aa1323a96a919a2ced88400633a7b07131713fc14b2b5"
    digest = "2e816deebcd76c5c80d0cd2d174478871658e8e2ff42bc9d4a6e486372e856bb"
    assert hashlib.sha256(PUBLIC.public).hexdigest() == PUBLIC.thumbprint() == digest
    assert naive_hpke.public_of(SEED) == PUBLIC.public


@pytest.mark.parametrize("length", [16, 32])
def test_wraps_and_unwraps(length):
    made = entry(MASTER[:length])
    assert made.name == (ALG, "bob-1") == ("mlkem768-x25519", "bob-1")
    assert len(made.wrapped) == 1120 + length + 16
    secret = BOB.unwrap(made, CONTEXT)
    assert isinstance(secret, Secret)
    assert bytes(secret.reveal()) == MASTER[:length]


def test_never_wraps_the_same_twice():
    first, second = entry(), entry()
    assert first.wrapped[:1088] != second.wrapped[:1088]
    assert first.wrapped[1088:1120] != second.wrapped[1088:1120]
    assert first.wrapped[1120:] != second.wrapped[1120:]


def test_the_context_is_what_the_format_says():
    assert CONTEXT.encode() == INFO
    odd = WrapContext('k"\\', "chacha20poly1305", "ü/\u2028")
    assert odd.encode().split(b"\0", 1)[1] == naive_json.compact(odd.fields(), sort=True).encode()


def test_hpke_as_it_is_spelt_out():
    """Both directions: what is wrapped here opens there, and the other way round."""
    assert naive_hpke.open_wrapped(SEED, entry().wrapped, INFO) == MASTER
    wrapped = naive_hpke.wrap(PUBLIC.public, MASTER, INFO, os.urandom(32))
    with BOB.unwrap(Recipient(ALG, "bob-1", wrapped), CONTEXT) as secret:
        assert bytes(secret.reveal()) == MASTER
    with pytest.raises(naive_json.KeyAccessError):
        naive_hpke.open_wrapped(SEED, entry().wrapped, INFO + b" ")


@pytest.mark.parametrize("member", ["kid", "algorithm", "model_id"])
@pytest.mark.parametrize("change", ["", "more", "case"])
def test_another_context(member, change):
    old = getattr(CONTEXT, member)
    new = {"": "", "more": f"{old}2", "case": old.swapcase()}[change]
    with pytest.raises(KeyAccessError, match="what is wrapped for 'bob-1' does not open with this identity"):
        BOB.unwrap(entry(), dataclasses.replace(CONTEXT, **{member: new}))


def test_members_of_the_context_cannot_run_into_each_other():
    other = WrapContext('model-1","model_id":"alice/tiny"}', "aes256gcm", "")
    assert other.encode() != CONTEXT.encode()
    with pytest.raises(KeyAccessError):
        BOB.unwrap(entry(), other)


def test_another_key_of_that_name():
    with pytest.raises(KeyAccessError, match="does not open with this identity") as caught:
        EVE.unwrap(entry(), CONTEXT)
    assert "another key goes by the same name" in caught.value.hint


def test_every_flipped_byte():
    made = entry()
    for at in range(len(made.wrapped)):
        data = bytearray(made.wrapped)
        data[at] ^= 1 << at % 8
        # The top bit of an X25519 point (1119) is not looked at by X25519; X-Wing hashes the point, so it counts as well.
        with pytest.raises(KeyAccessError):
            BOB.unwrap(Recipient(ALG, "bob-1", bytes(data)), CONTEXT)


def test_truncated_and_lengthened():
    whole = entry().wrapped
    lengths = {*range(1, 40), *range(1080, len(whole))}
    for data in (*(whole[:n] for n in sorted(lengths)), whole + b"\0", whole + whole, b"\0" * 8192):
        with pytest.raises(KeyAccessError):
            BOB.unwrap(Recipient(ALG, "bob-1", data), CONTEXT)


def test_random_bytes():
    rng = random.Random(7)
    for n in (1, 1119, 1120, 1136, 1152, 1168, 8192):
        with pytest.raises(KeyAccessError):
            BOB.unwrap(Recipient(ALG, "bob-1", rng.randbytes(n)), CONTEXT)


@pytest.mark.parametrize("point", LOW_ORDER)
def test_a_point_that_gives_the_secret_away(point):
    """As a public key it is refused before anything is wrapped for it; as half of what is wrapped, it does not open."""
    with pytest.raises(KeyAccessError, match=f"key 'eve' is not a public key of {JWK_ALG}"):
        PublicIdentity("eve", PUBLIC.public[:1184] + bytes.fromhex(point))
    made = entry().wrapped
    with pytest.raises(KeyAccessError):
        BOB.unwrap(Recipient(ALG, "bob-1", made[:1088] + bytes.fromhex(point) + made[1120:]), CONTEXT)


@pytest.mark.parametrize("public", [b"", bytes(1184), bytes(1215), bytes(1217), b"\xff" * 1216, PUBLIC.public + b"\0"])
def test_what_is_no_public_key(public):
    with pytest.raises(KeyAccessError, match=f"key 'bob' is not a public key of {JWK_ALG}"):
        PublicIdentity("bob", public)


# --- as JWKs --------------------------------------------------------------------------------------------------------


def jwk(**members) -> dict:
    return {k: v for k, v in (BOB.document(b64url) | members).items() if v is not None}


def test_a_private_jwk_is_read_as_it_was_written():
    doc = BOB.document(b64url)
    assert {k: v for k, v in doc.items() if k not in ("pub", "priv")} == {
        "kty": "AKP",
        "kid": "bob-1",
        "alg": "MLKEM768-X25519",
        "use": "enc",
    }
    for text in (json.dumps(doc), json.dumps(doc).encode(), bytearray(json.dumps({"keys": [doc]}).encode())):
        (found,) = parse_keys(text, "test")
        assert isinstance(found, Identity)
        assert (found.kid, bytes(found.secret.reveal())) == ("bob-1", SEED)


def test_a_public_jwk_is_read_as_it_was_written():
    doc = PUBLIC.document(b64url)
    assert "priv" not in doc
    assert parse_key(doc, "test") == PUBLIC
    assert parse_key(jwk(priv=None), "test") == PUBLIC


def test_the_text_of_a_private_jwk_is_lifted_out_of_the_json():
    """No string is made of the seed that nobody could overwrite."""
    text = bytearray(json.dumps(jwk()).encode())
    (found,) = parse_keys(text, "test")
    assert bytes(found.secret.reveal()) == SEED
    assert_no_trace(text.decode(), SEED)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"pub": b64url(EVE.public().public)}, "key 'bob-1': pub is not the public half of priv"),
        ({"alg": "ML-KEM-768"}, "key 'bob-1' is for 'ML-KEM-768'"),
        ({"alg": "mlkem768-x25519"}, "is for 'mlkem768-x25519'"),
        ({"alg": None}, "key 'bob-1' names no alg"),
        ({"alg": 5}, "key 'bob-1' names no alg"),
        ({"kty": "OKP"}, "key 'bob-1' is not an Ed25519 key"),
        ({"kty": "oct"}, "key 'bob-1' is for 'MLKEM768-X25519'"),
        ({"kty": "akp"}, "has a kty that is none of oct, OKP and AKP"),
        ({"kty": None}, "has a kty that is none of oct, OKP and AKP"),
        ({"kid": None}, "a key has no usable kid"),
        ({"kid": "a/b"}, "a key has no usable kid"),
        ({"kid": "b" * 257}, "a key has no usable kid"),
        ({"use": "sig"}, "key 'bob-1' is not meant for this use"),
        ({"key_ops": ["sign"]}, "key 'bob-1' is not meant for this use"),
        ({"key_ops": "deriveKey"}, "key 'bob-1' is not meant for this use"),
        ({"pub": None}, "member pub of key 'bob-1' is missing or not a string"),
        ({"pub": b64url(PUBLIC.public[:-1])}, "member pub of key 'bob-1' has 1215 bytes instead of 1216"),
        ({"pub": b64url(PUBLIC.public + b"\0")}, "member pub of key 'bob-1' has 1217 bytes instead of 1216"),
        ({"pub": "*" * 1622}, "member pub of key 'bob-1' is not base64"),
        ({"pub": b64url(b"\xff" * 1216), "priv": None}, "key 'bob-1' is not a public key of MLKEM768-X25519"),
        ({"pub": b64url(b"\xff" * 1216)}, "key 'bob-1': pub is not the public half of priv"),
        ({"priv": b64url(SEED[:-1])}, "member priv of key 'bob-1' has 31 bytes instead of 32"),
        ({"priv": b64url(SEED * 2)}, "member priv of key 'bob-1' has 64 bytes instead of 32"),
        ({"priv": b64url(SEED)[:-1] + "*"}, "member priv of key 'bob-1' is not base64"),
        ({"priv": ""}, "member priv of key 'bob-1' has 0 bytes instead of 32"),
        ({"priv": 5}, "member priv of key 'bob-1' is missing or not a string"),
        ({"priv": [b64url(SEED)]}, "member priv of key 'bob-1' is missing or not a string"),
    ],
)
def test_what_is_no_identity(members, message):
    """Neither the message nor a frame that a crash reporter would show has any of the private half."""
    text = bytearray(json.dumps(jwk(**members)).encode())
    with pytest.raises(KeyAccessError, match=re.escape(message)) as caught:
        parse(text, "test")
    assert not any(text)
    assert_no_trace(str(caught.value), SEED)
    if not isinstance(members.get("priv"), list):
        assert_no_trace(frames(caught.value), SEED)


@pytest.mark.parametrize("ops", [["deriveKey"], ["wrapKey", "unwrapKey"], ["deriveBits"], []])
def test_operations_that_fit(ops):
    assert parse_key(jwk(key_ops=ops), "test") == BOB


def test_no_text_form_of_a_private_half():
    assert_no_trace(f"{BOB!r} {BOB} {[BOB]} {dataclasses.replace(BOB)}", SEED)
    assert "secret" not in repr(BOB)


def test_no_key_bytes_where_an_unwrapping_failed():
    expanded = hashlib.shake_256(SEED).digest(96)
    for made in (entry(context=WrapContext("x", "y", "z")), Recipient(ALG, "bob-1", b"short")):
        with pytest.raises(KeyAccessError) as caught:
            BOB.unwrap(made, CONTEXT)
        shown = frames(caught.value)
        assert "bob-1" in shown
        assert_no_trace(shown, SEED, expanded[:64], expanded[64:], MASTER)
