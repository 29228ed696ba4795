"""Secrets and tokens in the JSON of services: there and back as the standard library has it, and nothing but typed errors."""

from __future__ import annotations

import base64
import contextlib
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from secure_loader.core.keys import awskms, azurekv, gcpkms, transit
from secure_loader.core.keys.carried import secret_digits, secret_in, with_secret
from secure_loader.core.keys.tokens import token_in
from secure_loader.core.secrets import Secret
from secure_loader.errors import FormatError, KeyAccessError

PLAIN = bytes(range(32))
DIGITS = base64.b64encode(PLAIN).decode()


@given(st.binary(max_size=100))
def test_digits_are_those_of_the_standard_library(data):
    with Secret(data) as secret:
        assert bytes(secret_digits(secret).reveal()) == base64.b64encode(data)
        assert bytes(secret_digits(secret, url=True).reveal()) == base64.urlsafe_b64encode(data).rstrip(b"=")
        body = with_secret(b'{"a":"', secret, b'"}')
    assert json.loads(body) == {"a": base64.b64encode(data).decode()}


@given(st.binary(min_size=12, max_size=200), st.booleans())
def test_what_is_sent_comes_back(data, url):
    with Secret(data) as secret:
        body = with_secret(b'{"outer": {"value" :\n"', secret, b'", "other": 1.5}}', url=url)
    answer, found = secret_in(body, "outer", "value")
    assert bytes(found.reveal()) == data
    assert answer["outer"]["other"] == 1.5
    assert base64.b64encode(data) not in body, "it was taken out"
    assert base64.b64encode(data).decode() not in str(answer)


@pytest.mark.parametrize(
    "text",
    [
        "{}", "[]", "5", '"x"', '{"a": {}}', '{"a": []}', '{"a": null}', '{"a": {"b": 5}}', '{"a": {"b": ["$"]}}', '{"b": "$"}',
        '{"a": {"c": "$"}}', '{"a": "$"}', '{"a": {"b": "AAAA"}}', '{"a": {"b": "AAAAAAAAAAAAAAAAA"}}', '{"a": {"b": "A A$"}}',
        '{"a": {"b": "\\u0041$"}}', '{"a": {"b": "+_$"}}', '{"a": {"b": "=$"}}', '{"a": {"b": "@0000000000000000@@@@@@"}}',
    ],
)  # fmt: skip
def test_what_holds_no_secret_where_it_should_be(text):
    with pytest.raises(KeyAccessError) as caught:
        secret_in(bytearray(text.replace("$", DIGITS).encode()), "a", "b")
    assert DIGITS[4:20] not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", '{"a": {"b": "$", "b": "$"}}', "\xff", "[" * 100, "NaN"])
def test_what_is_no_json(text):
    with pytest.raises(FormatError):
        secret_in(bytearray(text.replace("$", DIGITS).encode("latin-1")), "a", "b")


def test_tokens():
    assert bytes(
        token_in(bytearray(b'{"auth":{"client_token":"s.aaaaaaaaaaaaaaaa"}}'), "auth", "client_token").reveal()
    ) == (b"s.aaaaaaaaaaaaaaaa")
    assert bytes(token_in(bytearray(b'{"access_token": "short"}'), "access_token").reveal()) == b"short"
    for bad in (
        b"{}",
        b'{"access_token": 5}',
        b'{"access_token": ""}',
        b'{"access_token": "a b"}',
        b'{"access_token": "a\\nb"}',
    ):
        with pytest.raises(KeyAccessError):
            token_in(bytearray(bad), "access_token")


ARN = "arn:aws:kms:eu-central-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
VERIFIED = {"verifiedPlaintextCrc32c": True, "verifiedAdditionalAuthenticatedDataCrc32c": True}
SUM = str(gcpkms.crc32c(PLAIN))
KID = "https://v.vault.azure.net/keys/k/" + "0" * 32
# What a service says when all is well, and who reads it.
ANSWERS = {
    "transit-wrap": ({"data": {"ciphertext": "vault:v1:" + "A" * 80}}, transit._ciphertext_of),
    "transit-unwrap": ({"data": {"plaintext": DIGITS}}, lambda body: secret_in(body, "data", "plaintext")),
    "aws-wrap": ({"KeyId": ARN, "CiphertextBlob": DIGITS}, lambda body: awskms._ciphertext_of(body, ARN)),
    "aws-unwrap": ({"KeyId": ARN, "Plaintext": DIGITS}, lambda body: awskms._plaintext_of(body, ARN)),
    "gcp-wrap": (
        {"name": "k/cryptoKeyVersions/1", "ciphertext": DIGITS, "ciphertextCrc32c": SUM} | VERIFIED,
        lambda body: gcpkms._ciphertext_of(body, "k"),
    ),
    "gcp-unwrap": ({"plaintext": DIGITS, "plaintextCrc32c": SUM}, gcpkms._plaintext_of),
    "azure-wrap": ({"kid": KID, "value": "A", "iv": "A", "tag": "A"}, lambda body: azurekv._entry_of(body, "A256GCM", "k", ("iv", "tag"))),
    "azure-unwrap": ({"kid": KID, "value": DIGITS}, lambda body: azurekv._secret_of(body, "k", "0" * 32)),
    "azure-entry": (
        {"alg": "A256GCM", "iv": "A" * 16, "tag": "A", "value": "A", "version": "0" * 32},
        lambda body: azurekv._parse(bytes(body), "k"),
    ),
}  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.just(DIGITS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_that_are_as_they_should_be(name):
    """Or nothing below would show anything."""
    good, read = ANSWERS[name]
    assert read(bytearray(json.dumps(good).encode()))
    for member in good:
        for bad in (None, 5, [], {}, "\u00fc", "A" * 9000 + "?"):
            with pytest.raises((FormatError, KeyAccessError)):
                read(bytearray(json.dumps(good | {member: bad}, ensure_ascii=False).encode()))


@pytest.mark.parametrize("name", ANSWERS)
@given(data=st.data())
def test_answers_of_any_shape(name, data):
    """A genuine one with one member of any other kind, or any other document: what is meant, or a typed error."""
    good, read = ANSWERS[name]
    member = data.draw(st.sampled_from([None, *good]))
    changed = data.draw(JSON) if member is None else good | {member: data.draw(JSON)}
    with contextlib.suppress(FormatError, KeyAccessError):
        read(bytearray(json.dumps(changed).encode()))


@pytest.mark.parametrize("name", ANSWERS)
@given(text=st.binary(max_size=60))
@example(text=b'{"KeyId":"\\ud800"}')
def test_answers_that_are_noise(name, text):
    with pytest.raises((FormatError, KeyAccessError)):
        ANSWERS[name][1](bytearray(text))
