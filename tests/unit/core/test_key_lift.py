"""Private members leave a text before the JSON parser sees it, and nothing else changes."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secure_loader.core.keys.jwk import MasterKey, SigningKey, parse_keys
from secure_loader.core.keys.lift import QUOTED, Digits, lift, restore
from secure_loader.errors import KeyAccessError
from tests.attacks.kit import KEY, SIGN, master

DOC = {"keys": [KEY.document(), SIGN.document(), master("c", 3, "aes128gcm").document()]}


def verdict(text: bytes | bytearray):
    try:
        keys = parse_keys(text, "x")
    except KeyAccessError as e:
        return e.message
    return [(k.kid, bytes(k.secret.reveal()) if isinstance(k, (MasterKey, SigningKey)) else k.public) for k in keys]


@pytest.mark.parametrize("indent", [None, 2, "\t"])
def test_what_is_lifted_is_gone_from_the_text(indent):
    text = bytearray(json.dumps(DOC, indent=indent).encode())
    plain = verdict(bytes(text))
    lifted = lift(text)
    assert len(lifted) == 3
    for key in DOC["keys"]:
        assert (key.get("d") or key["k"]).encode() not in text
    assert len(text) == len(json.dumps(DOC, indent=indent))
    assert [k[1] for k in plain] == [bytes(d.decode()) for d in lifted.values()]


def test_the_parser_says_the_same_of_both():
    text = json.dumps(DOC).encode()
    assert (
        verdict(bytearray(text))
        == verdict(text)
        == [(k.kid, bytes(k.secret.reveal())) for k in (KEY, SIGN, master("c", 3, "aes128gcm"))]
    )


@pytest.mark.parametrize("indent", [None, 1])
def test_a_text_in_a_string_of_another(indent):
    """As the KV engine of Vault has it. What was lifted comes back where the inner text is read."""
    text = bytearray(json.dumps({"jwk": json.dumps(DOC, indent=indent)}).encode())
    lifted = lift(text, QUOTED)
    assert len(lifted) == 3
    for key in DOC["keys"]:
        assert (key.get("d") or key["k"]).encode() not in text
    keys = parse_keys(json.loads(text)["jwk"], "x", lifted)
    assert [bytes(k.secret.reveal()) for k in keys] == [d for _, d in verdict(json.dumps(DOC).encode())]
    assert restore("no object", lifted) == "no object"


K = KEY.document()["k"]


@pytest.mark.parametrize(
    "value",
    [
        K,
        K + "=",
        K + "====",
        K[:-1],
        K[:-2],
        K + "A",
        K[:20] + "+" + K[21:],
        K[:20] + "+-" + K[22:],
        K[:20] + "=" + K[21:],
        K[:20] + "*" + K[21:],
        K[:20] + "\\u0041" + K[21:],
        base64.b64encode(bytes([0xFF, 0xEF]) * 16).decode(),
        base64.b64encode(bytes([0xFF, 0xEF]) * 16).decode().replace("/", "\\/"),
        base64.urlsafe_b64encode(bytes([0xFF, 0xEF]) * 16).decode(),
        "",
        "=" * 43,
        "A" * 128,
        "A" * 129,
        "@" * 43,
    ],
)
@pytest.mark.parametrize("space", ["", " ", "\n\t "])
def test_odd_values(value, space):
    text = f'{{"kty":"oct","alg":"A256GCM","kid":"a","k"{space}:{space}"{value}"}}'.encode()
    assert verdict(bytearray(text)) == verdict(text)


@pytest.mark.parametrize(
    "kid", [f'x\\"k\\":\\"{K}', f'x\\"k\\": \\"{K}\\"', f'"k":"{K}"', K, f'\\\\"k":"{K}', "k", "\\"]
)
def test_what_only_looks_like_a_member(kid):
    """Inside another string, or in its place."""
    text = f'{{"kty":"oct","alg":"A256GCM","kid":"{kid}","k":"{K}"}}'.encode()
    assert str(verdict(bytearray(text)))[:40] == str(verdict(text))[:40]


def test_members_twice_and_members_of_other_objects():
    for text in (
        f'{{"kty":"oct","alg":"A256GCM","kid":"a","k":"{K}","k":"{K}"}}',
        f'{{"kty":"oct","alg":"A256GCM","kid":"a","x":{{"k":"{K}"}},"k":"{K}"}}',
        f'{{"kty":"oct","alg":"A256GCM","kid":"a","d":"{K}"}}',
        f'[{{"k":"{K}"}}]',
    ):
        assert verdict(bytearray(text.encode())) == verdict(text.encode())


@given(st.binary(min_size=12, max_size=96), st.booleans())
def test_digits(data, padded):
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        text = encode(data) if padded else encode(data).rstrip(b"=")
        assert Digits(text).decode() == data


@given(st.text("ABYZabyz0189+/-_=*", min_size=1, max_size=40))
def test_digits_are_read_as_the_standard_library_does(text):
    bare = text.rstrip("=")
    try:
        expected = base64.b64decode(bare.replace("-", "+").replace("_", "/") + "=" * (-len(bare) % 4), validate=True)
    except ValueError:
        with pytest.raises(ValueError):
            Digits(text.encode()).decode()
    else:
        assert Digits(text.encode()).decode() == expected
