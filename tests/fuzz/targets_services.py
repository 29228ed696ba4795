"""What key services and brokers send, from the first byte behind TLS to the key: what must hold is in the claims."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any, Self
from unittest import mock

from cryptography.hazmat.primitives.asymmetric import ec

from secure_loader.core import strict_json
from secure_loader.core.aead import ALGORITHMS
from secure_loader.core.keys import jwe, jwk, kbs, net, rcar, vault
from secure_loader.core.keys.carried import secret_in
from secure_loader.core.keys.provider import KeyRequest
from secure_loader.core.secrets import Secret
from secure_loader.errors import (
    FormatError,
    KeyAccessError,
    KeySourceResponseError,
    KeySourceUnreachableError,
    SecureLoaderError,
)
from tests.fuzz import targets_kms
from tests.fuzz.claims import URL, check, check_no_secret, read
from tests.integration.keys.kbs_peer import encrypt

KEY = jwk.MasterKey("enc-1", ALGORITHMS["aes256gcm"], Secret(bytes(range(32))))
RULES = net.Rules(insecure_http_loopback=True)
REQUEST = KeyRequest(KEY.kid, KEY.algorithm, "demo/model", bytes(16), bytes(16))
PLAIN = json.dumps(KEY.document()).encode()
BROKER_KEY = ec.derive_private_key(0x5EC12E7, ec.SECP256R1())
_BY_THE_BYTE = 200


class Wire:
    """A connection by which some bytes arrive, a few at a time."""

    def __init__(self, data: bytes, step: int) -> None:
        self._data, self._step = memoryview(data), max(step, 1)

    def settimeout(self, seconds: float) -> None:
        check(seconds > 0, "no time to wait")

    def sendall(self, data: bytes) -> None:
        pass

    def recv_into(self, buffer: Any) -> int:
        n = min(len(buffer), self._step, len(self._data))
        buffer[:n] = self._data[:n]
        self._data = self._data[n:]
        return n

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _answered(data: bytes, step: int, *, want_errors: bool) -> tuple[Any, ...]:
    with mock.patch.object(net, "_connect", return_value=Wire(data, step)):
        try:
            found = net.request(URL, RULES, net.Deadline(20), want_errors=want_errors)
        except KeyAccessError as e:
            check(type(e) in (KeySourceResponseError, KeySourceUnreachableError), f"an error of another type: {e!r}")
            check_no_secret(data, f"{e}{e.__cause__ or ''}{e.__context__ or ''}")
            return type(e), e.message
    return found.status, dict(found.headers), bytes(found.body), found.cookies


def one_http(data: bytes) -> None:
    """The input is all that arrives. What is made of it does not depend on the pieces in which it does."""
    for want_errors in (False, True):
        steps = (8192, len(data) // 3 + 1, 1 if len(data) <= _BY_THE_BYTE else len(data) // 40 + 1)
        verdicts = [_answered(data, step, want_errors=want_errors) for step in steps]
        check(verdicts[0] == verdicts[1] == verdicts[2], "the verdict depends on the pieces")
        if len(verdicts[0]) == 2:
            continue
        status, headers, body, _ = verdicts[0]
        check(100 <= status <= 999 and not 300 <= status < 400, "a redirect is handed on")
        check(len(body) <= net.MAX_BODY, "a body above the limit")
        check(not body or status == 200 or want_errors, "the body of an error, which nobody wanted")
        if not any(name.lower() == "transfer-encoding" for name in headers):
            check(body in data, "a body that did not arrive")


def one_vault(data: bytes) -> None:
    """The input is the body of an answer: of the KV engine, and of the transit engine."""
    keys = read(data, vault._keys_of)
    if keys is not None:
        check({_private(k) for k in keys} == {_private(k) for k in _slowly(data)}, "lifting changed a key")
    found = read(data, lambda body: secret_in(body, "data", "plaintext"))
    if found is not None:
        text = json.loads(data)["data"]["plaintext"].rstrip("=")
        padded = text + "=" * (-len(text) % 4)
        check(base64.b64decode(padded, b"-_" if set(text) & set("-_") else None) == found[1].reveal(), "another secret")


def _private(key: jwk.Jwk) -> bytes:
    secret = getattr(key, "secret", None)
    return b"" if secret is None else secret.reveal().tobytes()


def _slowly(data: bytes) -> list[jwk.Jwk]:
    """As ``vault._keys_of``, with copies."""
    secret = strict_json.loads(data, what="answer", any_number=True)["data"]["data"]
    if "jwk" not in secret:
        return [jwk.parse_key({"kty": "oct", **secret}, "the secret")]
    text = secret["jwk"] if isinstance(secret["jwk"], str) else json.dumps(secret["jwk"])
    return jwk.parse_keys(text, "the secret")


def one_kbs(data: bytes) -> None:
    """The input is what a broker says at each step of the protocol, as body and as cookie; and a resource."""
    challenge = read(data, rcar._challenge)
    if challenge is not None:
        check(len(base64.b64decode(challenge[0], validate=True)) == 32, "a nonce of another length")
        check(challenge[1] in ("sha256", "sha384", "sha512"), "a hash that nobody offered")
    read(data, rcar._check_token)
    kind = rcar.kind_of(net.Response(401, {}, bytearray(data)))
    check(kind is None or kind.isalnum(), "a kind of error that is no word")
    broker = rcar.Broker(URL, RULES, net.Deadline(20))
    try:
        cookie = rcar._cookie(broker, net.Response(200, {}, bytearray(), (data.decode("latin-1"),)))
        check(cookie is None or not set(cookie) & set(';, \r\n"'), "a cookie that ends elsewhere")
    except KeySourceResponseError:
        pass
    resource = bytearray(data)
    try:
        found = kbs._key_in(resource, URL, REQUEST)
        check(found is None or found.kid == KEY.kid, "a key of another name")
    except KeyAccessError as e:
        check_no_secret(data, str(e))
    check(not any(resource), "a resource was not overwritten")


def one_jwe(data: bytes) -> None:
    """The input is a JWE to us. What opens says what its sender said, who is the only one to know how to seal it."""
    try:
        plain = jwe.open_jwe(data, BROKER_KEY)
    except (FormatError, KeyAccessError):
        return
    except SecureLoaderError as e:
        raise AssertionError(f"an error of another type: {e!r}") from e
    check(bytes(plain) == PLAIN, "an altered JWE opens")


TARGETS: dict[str, Callable[[bytes], None]] = {
    "fuzz_http": one_http,
    "fuzz_vault": one_vault,
    "fuzz_kbs": one_kbs,
    "fuzz_jwe": one_jwe,
} | targets_kms.TARGETS


def _http(body: bytes, status: str = "200 OK", *fields: str) -> bytes:
    head = [f"HTTP/1.1 {status}", *(fields or (f"Content-Length: {len(body)}",))]
    return "\r\n".join([*head, "", ""]).encode() + body


def seeds() -> dict[str, list[bytes]]:
    """Where fuzzing starts."""
    keys = json.dumps({"keys": [KEY.document()]}).encode()
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in (keys[:20], keys[20:], b""))
    document = KEY.document()
    secrets_of = (document, {"jwk": PLAIN.decode()}, {"jwk": document}, {"jwk": {"keys": [document]}})
    nonce = base64.b64encode(bytes(range(32))).decode()
    sealed = encrypt(BROKER_KEY.public_key(), PLAIN)
    return {
        "fuzz_http": [
            _http(keys),
            _http(keys, "200 OK", "Connection: close"),
            _http(chunks, "200 OK", "Transfer-Encoding: chunked"),
            _http(keys, "200 OK", "Transfer-Encoding: chunked", f"Content-Length: {len(keys)}"),
            _http(keys, "200 OK", f"Content-Length: {len(keys)}", "Content-Encoding: gzip"),
            _http(b"", "302 Found", "Location: https://example.org/"),
            _http(b'{"errors":[]}', "403 Forbidden"),
            _http(b"{}", "200 OK", "Set-Cookie: kbs-session-id=0123; Path=/", "Content-Length: 2"),
            b"HTTP/1.1 100 Continue\r\n\r\n" + _http(keys),
            _http(keys).replace(b"\r\n", b"\n"),
        ],
        "fuzz_vault": [
            *(json.dumps({"data": {"data": s, "metadata": {"version": 1}}}).encode() for s in secrets_of),
            json.dumps({"auth": {"client_token": "hvs." + "A" * 40}}).encode(),
            json.dumps({"data": {"plaintext": base64.b64encode(bytes(range(32))).decode()}}).encode(),
            b'{"errors": ["permission denied"]}',
        ],
        "fuzz_kbs": [
            json.dumps({"nonce": nonce, "extra-params": ""}).encode(),
            json.dumps({"nonce": nonce, "extra-params": {"selected-hash-algorithm": "sha384"}}).encode(),
            b'{"token":"eyJhbGciOiJFUzM4NCJ9.eyJpc3MiOiJjb2NvIn0.c2lnbmF0dXJl"}',
            b'{"type":"https://github.com/confidential-containers/kbs/errors/PolicyDeny","detail":"no"}',
            b"kbs-session-id=0123456789abcdef; Path=/; HttpOnly",
            PLAIN,
            keys,
            bytes(range(32)),
        ],
        "fuzz_jwe": [json.dumps(sealed, indent=i).encode() for i in (None, 1)]
        + [json.dumps(encrypt(BROKER_KEY.public_key(), PLAIN, **head)).encode() for head in ODD_HEADS],
    } | targets_kms.seeds()


ODD_HEADS: tuple[dict[str, Any], ...] = ({"alg": "RSA1_5"}, {"zip": "DEF"}, {"enc": "A128GCM"}, {"crit": ["x"]})
