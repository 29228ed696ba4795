"""``gcpkms:`` keys against a server that speaks as the documentation of Google Cloud KMS says. The service itself has not been asked."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import socket

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from safetensors.numpy import load_file

from secure_loader import encrypt_model
from secure_loader.config import LoaderConfig
from secure_loader.core.aead import ALGORITHMS
from secure_loader.core.archive import Archive
from secure_loader.core.checkpoint import Checkpoint
from secure_loader.core.keys.gcpkms import GcpKmsProvider, crc32c
from secure_loader.core.keys.net import METADATA, Rules, parse_url
from secure_loader.core.keys.provider import KeyRequest, KeyRing, key_check_value
from secure_loader.core.recipient import Recipient, WrapContext
from secure_loader.core.session import Session
from secure_loader.errors import (
    ConfigError,
    KeyAccessError,
    KeySourceDeniedError,
    KeySourceResponseError,
    KeySourceUnreachableError,
)
from tests.attacks.kit import KEY, MALLORY_KEY, SIGN, assert_no_secret, build_source, refused, trust
from tests.integration.keys.services import answer, frames, hang, read_json, serving

CONTEXT = WrapContext(KEY.kid, KEY.algorithm.name, "demo/model")
NAME = "projects/example.com:demo-1/locations/europe-west1/keyRings/our_ring/cryptoKeys/models"
# The example of the documentation of metadata servers.
TOKEN = "ya29.AHES6ZRN3-HlhAPya30GnW_bHSb_QtAS08i85nHq39HE3C2LTrCARA"


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def reply(body: dict, status: str = "200 OK"):
    return answer(json.dumps(body, indent=2).encode(), status, X_Content_Type_Options="nosniff")


def failure(code: int, status: str, message: str = "hunter2"):
    return reply({"error": {"code": code, "message": message, "status": status}}, f"{code} X")


class Kms:
    """A key, as ``cryptoKeys.encrypt`` and ``cryptoKeys.decrypt`` show it.

    Args:
        change: What to alter in an answer.
    """

    def __init__(self, **change) -> None:
        self._key, self.change, self.seen = AESGCM(bytes(32)), change, []

    def __call__(self, call) -> None:
        line, fields, body = read_json(call)
        self.seen.append((line, fields, body))
        data = {name: base64.b64decode(body[name]) for name in body if not name.endswith("Crc32c")}
        assert {name: crc32c(value) for name, value in data.items()} == {
            name.removesuffix("Crc32c"): int(body[name]) for name in body if name.endswith("Crc32c")
        }
        path = line.split()[1].removeprefix("/v1/")
        aad = data["additionalAuthenticatedData"]
        if path.endswith(":encrypt"):
            sealed = bytes(12) + self._key.encrypt(bytes(12), data["plaintext"], aad)
            said = {
                "name": f"{path.removesuffix(':encrypt')}/cryptoKeyVersions/3",
                "ciphertext": b64(sealed),
                "ciphertextCrc32c": str(crc32c(sealed)),
                "verifiedPlaintextCrc32c": True,
                "verifiedAdditionalAuthenticatedDataCrc32c": True,
                "protectionLevel": "SOFTWARE",
            }
        else:
            try:
                plain = self._key.decrypt(data["ciphertext"][:12], data["ciphertext"][12:], aad)
            except InvalidTag:
                failure(400, "INVALID_ARGUMENT", "Decryption failed: the ciphertext is invalid.")(call)
                return
            said = {"plaintext": b64(plain), "plaintextCrc32c": str(crc32c(plain)), "usedPrimary": True}
        reply({name: v for name, v in (said | self.change).items() if v is not None})(call)


@pytest.fixture(autouse=True)
def user(tmp_path, monkeypatch):
    """Somebody with an access token in a file."""
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "CLOUDSDK_", "GCE_"))]:
        monkeypatch.delenv(name)
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(TOKEN + "\n")
    monkeypatch.setenv("CLOUDSDK_AUTH_ACCESS_TOKEN_FILE", str(token))


@pytest.fixture
def settings(authority):
    def make(**more) -> LoaderConfig:
        defaults = {"key_private_hosts": ["localhost"], "key_ca_file": str(authority.file), "key_timeout_seconds": 5}
        return LoaderConfig(**defaults | more)

    return make


@pytest.fixture
def service(settings):
    def make(**more) -> GcpKmsProvider:
        made = GcpKmsProvider()
        made.configure(settings(**more))
        return made

    return make


def where(server) -> str:
    return f"https://localhost:{server.port}/{NAME}"


def asking(*recipients: Recipient, context: WrapContext = CONTEXT) -> KeyRequest:
    file_id = bytes(16)
    kcv = key_check_value(KEY.secret, file_id)
    return KeyRequest(context.kid, ALGORITHMS[context.algorithm], context.model_id, file_id, kcv, recipients)


def test_what_is_wrapped_is_unwrapped(localhost, service, settings):
    kms = Kms()
    with serving(localhost, kms) as server:
        entry = service().wrap(where(server), KEY.secret, CONTEXT)
        assert (entry.alg, entry.kid) == ("gcp-kms", NAME)
        opened = KeyRing([f"gcpkms:{where(server)}"], settings()).resolve(asking(entry))
        assert bytes(opened.secret.reveal()) == bytes(KEY.secret.reveal())
        for other in ({"kid": "enc-2"}, {"model_id": "demo/other"}, {"algorithm": "chacha20poly1305"}):
            with refused(KeySourceDeniedError, "was wrapped by another key or for another model"):
                service().unwrap_key(where(server), entry.wrapped, dataclasses.replace(CONTEXT, **other))
    aad = {
        "additionalAuthenticatedData": b64(CONTEXT.encode()),
        "additionalAuthenticatedDataCrc32c": str(crc32c(CONTEXT.encode())),
    }
    plain = bytes(KEY.secret.reveal())
    assert [(line, body) for line, _, body in kms.seen[:2]] == [
        (f"POST /v1/{NAME}:encrypt HTTP/1.1", {"plaintext": b64(plain), "plaintextCrc32c": str(crc32c(plain))} | aad),
        (
            f"POST /v1/{NAME}:decrypt HTTP/1.1",
            {"ciphertext": b64(entry.wrapped), "ciphertextCrc32c": str(crc32c(entry.wrapped))} | aad,
        ),
    ]
    assert {fields["authorization"] for _, fields, _ in kms.seen} == {f"Bearer {TOKEN}"}


def test_the_checksum():
    """RFC 3720, B.4, and the check value that catalogues of checksums give."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E


def test_a_model_from_end_to_end_by_one_request(localhost, authority, settings, tmp_path, secure_loader_home):
    (secure_loader_home / "config.toml").write_text(
        f'[loader]\nkey_private_hosts = ["localhost"]\nkey_ca_file = "{authority.file}"\n'
    )
    source = build_source(tmp_path / "plain", shards=3)
    kms = Kms()
    with serving(localhost, kms) as server:
        who = {"signing_key": SIGN, "model_id": "demo/model", "recipients": [f"gcpkms:{where(server)}"]}
        encrypt_model(source, tmp_path / "secure", keep_names=True, **who)
        assert len(kms.seen) == 1
        session = Session(keys=f"gcpkms:{where(server)}", trust=trust(), config=settings())
        checkpoint = Checkpoint(tmp_path / "secure", session)
        for name in checkpoint.shards():
            with Archive(checkpoint.open(name), "numpy") as f:
                for tensor, expected in load_file(source / name).items():
                    assert (f.get_tensor(tensor) == expected).all()
        assert len(kms.seen) == 2


def test_where_tokens_come_from(localhost, service, tmp_path, monkeypatch):
    kms = Kms()
    said = {"access_token": "from-the-metadata-server", "expires_in": 3599, "token_type": "Bearer"}
    with (
        serving(localhost, kms) as server,
        serving(None, answer(json.dumps(said).encode(), Metadata_Flavor="Google")) as metadata,
    ):
        monkeypatch.setenv("GOOGLE_OAUTH_ACCESS_TOKEN", "from-the-variable")
        service().wrap(where(server), KEY.secret, CONTEXT)
        monkeypatch.delenv("GOOGLE_OAUTH_ACCESS_TOKEN")
        service().wrap(where(server), KEY.secret, CONTEXT)
        monkeypatch.delenv("CLOUDSDK_AUTH_ACCESS_TOKEN_FILE")
        with refused(KeyAccessError, "there is no access token of Google Cloud", "GCE_METADATA_HOST where the machine"):
            service().wrap(where(server), KEY.secret, CONTEXT)
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{metadata.port}")
        with refused(KeyAccessError, "http is not encrypted"):
            service().wrap(where(server), KEY.secret, CONTEXT)
        service(insecure_allow_http_loopback=True).wrap(where(server), KEY.secret, CONTEXT)
        tokens = [fields["authorization"] for _, fields, _ in kms.seen]
        assert tokens == ["Bearer from-the-variable", f"Bearer {TOKEN}", "Bearer from-the-metadata-server"]
        line, *fields = metadata.calls[0].splitlines()
        assert line == "GET /computeMetadata/v1/instance/service-accounts/default/token HTTP/1.1"
        assert "Metadata-Flavor: Google" in fields


@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        (answer(b'{"access_token":"hunter2"}'), KeySourceResponseError, "is not the metadata service of Google Cloud"),
        (answer(b"{}", Metadata_Flavor="Google"), KeySourceResponseError, "holds no token"),
        (answer(b'{"access_token":"a b"}', Metadata_Flavor="Google"), KeySourceResponseError, "one word of ASCII"),
        (answer(b"", "404 Not Found"), KeySourceResponseError, "has nothing at that path"),
        (answer(b"", "302 Found", Location="http://127.0.0.1/"), KeySourceResponseError, "redirects (HTTP 302)"),
        (hang, KeySourceUnreachableError, "no complete answer within 0.3 s"),
    ],
)  # fmt: skip
def test_a32_metadata_services_that_are_none(localhost, service, monkeypatch, script, kind, words):
    monkeypatch.delenv("CLOUDSDK_AUTH_ACCESS_TOKEN_FILE")
    with serving(localhost, Kms()) as server, serving(None, script) as metadata:
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{metadata.port}")
        seconds = 0.3 if script is hang else 5
        with pytest.raises(KeyAccessError, match=r"key source http://127.0.0.1") as caught:
            service(insecure_allow_http_loopback=True, key_timeout_seconds=seconds).wrap(
                where(server), KEY.secret, CONTEXT
            )
        assert type(caught.value) is kind
        assert words in str(caught.value)
        assert "hunter2" not in frames(caught.value)
        assert server.connections == 0


def test_a32_http_to_the_metadata_service_is_for_it_alone(service, monkeypatch):
    """Its address and no other, and only where tokens are asked for."""
    with refused(KeyAccessError, "http is not encrypted"):
        parse_url(f"http://{METADATA}/", Rules())
    allowed = Rules(insecure_http_metadata=True)
    assert parse_url(f"http://{METADATA}/", allowed).host == "169.254.169.254"
    for host in ("169.254.169.253", "10.0.0.1", "metadata.google.internal", "127.0.0.1", "[fe80::1]", "2852039166"):
        with pytest.raises(KeyAccessError):
            parse_url(f"http://{host}/", allowed)
    with refused(KeyAccessError, "http is not encrypted"):
        service().wrap(f"http://{METADATA}/{NAME}", KEY.secret, CONTEXT)
    monkeypatch.delenv("CLOUDSDK_AUTH_ACCESS_TOKEN_FILE")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("a name was resolved"))
    for host in ("evil.example", "169.254.169.254/latest", "169.254.169.254?x=y"):
        monkeypatch.setenv("GCE_METADATA_HOST", host)
        with refused(KeyAccessError):
            service().wrap(NAME, KEY.secret, CONTEXT)


def test_a32_where_kms_is(service, monkeypatch):
    asked = []

    def getaddrinfo(name, port, *args, **kwargs):
        asked.append((name, port))
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.1.2.3", port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    for reference in (NAME, f"https://cloudkms.europe-west1.rep.googleapis.com/{NAME}"):
        with refused(KeyAccessError, "has the address 10.1.2.3"):
            service().wrap(reference, KEY.secret, CONTEXT)
    assert asked == [("cloudkms.googleapis.com", 443), ("cloudkms.europe-west1.rep.googleapis.com", 443)]


@pytest.mark.parametrize(
    "reference",
    [
        "", "models", f"{NAME}/cryptoKeyVersions/1", f"/{NAME}", f"{NAME}:encrypt", f"{NAME}?x=y", NAME.replace("our_ring", ".."),
        NAME.replace("our_ring", "a/b"), NAME.replace("demo-1", 'a","x":"'), f"https://host/v2/{NAME}", f"ftp://host/{NAME}",
    ],
)  # fmt: skip
def test_a32_references_that_name_no_key(service, reference):
    with refused(KeyAccessError, "names no key of Google Cloud KMS"):
        service().kid(reference)


def test_a32_references_with_passwords():
    with pytest.raises(ConfigError) as caught:
        KeyRing([f"gcpkms:https://user:hunter2@localhost/{NAME}"])
    assert "hunter2" not in str(caught.value)


DENIED, WRONG, LATER = KeySourceDeniedError, KeySourceResponseError, KeySourceUnreachableError
UNWRAPS = {
    "denied": (failure(403, "PERMISSION_DENIED"), DENIED, "denies the key (HTTP 403)"),
    "expired": (failure(401, "UNAUTHENTICATED"), DENIED, "the access token has expired"),
    "disabled": (failure(400, "FAILED_PRECONDITION"), DENIED, "is disabled or destroyed"),
    "altered": (failure(400, "INVALID_ARGUMENT"), DENIED, "or was altered"),
    "riddle": (failure(400, "SOMETHING_ELSE"), WRONG, "answers HTTP 400"),
    "missing": (failure(404, "NOT_FOUND"), WRONG, "has nothing at that path"),
    "throttled": (failure(429, "RESOURCE_EXHAUSTED"), LATER, "out of order (HTTP 429)"),
    "down": (failure(503, "UNAVAILABLE"), LATER, "out of order (HTTP 503)"),
    "html": (answer(b"<!doctype html>"), WRONG, "is not valid JSON"),
    "empty": (reply({}), WRONG, "holds no plaintext in base64"),
    "no-sum": (reply({"plaintext": b64(bytes(32))}), WRONG, "plaintext of the answer is not what its checksum is of"),
    "sum": (reply({"plaintext": b64(bytes(32)), "plaintextCrc32c": "5"}), WRONG, "is not what its checksum is of"),
    "lie": (
        reply({"plaintext": b64(MALLORY_KEY.secret.reveal()), "plaintextCrc32c": str(crc32c(MALLORY_KEY.secret.reveal()))}),
        KeyAccessError, "key check value differs",
    ),
    "silent": (hang, LATER, "no complete answer within 0.3 s"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNWRAPS)
def test_a34_answers_to_an_unwrap(localhost, settings, name):
    script, kind, words = UNWRAPS[name]
    entry = Recipient("gcp-kms", NAME, b"A" * 100)
    with serving(localhost, script) as server:
        with pytest.raises(KeyAccessError) as caught:
            KeyRing([f"gcpkms:{where(server)}"], settings(key_timeout_seconds=0.3)).resolve(asking(entry))
        assert type(caught.value) is kind
        assert words in str(caught.value)
        assert server.connections == 1
    shown = frames(caught.value)
    assert "hunter2" not in shown
    assert TOKEN not in shown
    assert_no_secret(shown)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": None}, "names another key than was asked for, or none"),
        ({"name": NAME.replace("models", "others") + "/cryptoKeyVersions/1"}, "names another key"),
        ({"name": NAME + "s/cryptoKeyVersions/1"}, "names another key"),
        ({"verifiedPlaintextCrc32c": False}, "does not say that what was sent arrived"),
        ({"verifiedAdditionalAuthenticatedDataCrc32c": None}, "does not say that what was sent arrived"),
        ({"ciphertext": "?"}, "ciphertext of the answer is not base64"),
        ({"ciphertextCrc32c": "5"}, "ciphertext of the answer is not what its checksum is of"),
        ({"ciphertext": "", "ciphertextCrc32c": "0"}, "is not 1 to 8,192 bytes"),
    ],
)
def test_a34_answers_to_a_wrap(localhost, service, change, words):
    with serving(localhost, Kms(**change)) as server, pytest.raises(KeyAccessError) as caught:
        service().wrap(where(server), KEY.secret, CONTEXT)
    assert words in str(caught.value)
    assert_no_secret(frames(caught.value))
    with serving(localhost, failure(400, "INVALID_ARGUMENT")) as server, refused(WRONG, "answers HTTP 400"):
        service().wrap(where(server), KEY.secret, CONTEXT)
