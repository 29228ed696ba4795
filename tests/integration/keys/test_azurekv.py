"""``azurekv:`` keys against a server that speaks as the documentation of Azure Key Vault says. The service itself has not been asked."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import socket

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from safetensors.numpy import load_file

from secure_loader import encrypt_model
from secure_loader.config import LoaderConfig
from secure_loader.core.aead import ALGORITHMS
from secure_loader.core.archive import Archive
from secure_loader.core.checkpoint import Checkpoint
from secure_loader.core.keys.azurekv import AzureKeyVaultProvider
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
HOSTS = ("myvault.vault.azure.net", "ours.managedhsm.azure.net")
# The example of the API's specification (stable/7.4/examples/unwrapKey-example.json): what a vault was asked, and said.
VERSION = "0698c2156c1a4e1da5b6bab6f6422fd6"
WRAPPED = (
    "khwIe26NuAZazS7upywDBpGRmRNMW5-4h_JQKxOdB78nYVxZWnBXwCxOv7a3Sr_mCjiVzKsoQQZwL-CJzhYa0512tfYem56zls5a44y5QsdcfvuSzOvpthVhA"
    "9XkEfCJSqSY_sip5d8BelT_w_ikvd_8KqiQ_0H54RqYUN8svCpu28paHgBocHFNXTQ9NtU9ec2qgESXk7Jp4OTy9HJtQJavKDUqTJ3YmtLxUgsgBCe0FNMHUSE"
    "YC0Ys6PavYzdTwIzYCq84idmAxJOj-O_6eALJFH2sDTOQYHjzOae2t8eFmw6C-t55qjrCI91a9mUJEGPhYixiG4gR4PaEJ7wGvw"
)
UNWRAPPED = "ovQIlbB0DgWhZA7sgkPxbg9H-Ly-VlNGPSgGrrZvlIo"
TOKEN = "eyJ0eXAiOiJKV1QiLCJhbGciOiJSUzI1NiIsIng1dCI6I.eyJhdWQiOiJodHRwczovL3Zhd.fgubiz1MKqTJTXI8dHI"


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def raw(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def reply(body: dict, status: str = "200 OK"):
    return answer(json.dumps(body).encode(), status, x_ms_keyvault_region="westeurope", x_ms_request_id="request-7")


def failure(code: str, status: str):
    return reply({"error": {"code": code, "message": "hunter2", "innererror": {"code": "KeyDisabled"}}}, status)


class Vault:
    """Keys of a vault (RSA) or of a Managed HSM (AES), each version of which is another key."""

    def __init__(self, rsa_key: rsa.RSAPrivateKey, **change) -> None:
        self._rsa, self.change, self.seen, self.current = rsa_key, change, [], VERSION

    def __call__(self, call) -> None:
        line, fields, body = read_json(call)
        self.seen.append((line, fields, body))
        path, _, query = line.split()[1].partition("?")
        assert query == "api-version=7.4"
        _, keys, name, *version, operation = path.split("/")
        assert keys == "keys"
        used = version[0] if version else self.current
        key, value = AESGCM(bytes.fromhex(used) * 2), raw(body["value"])
        oaep = padding.OAEP(padding.MGF1(hashes.SHA256()), hashes.SHA256(), None)
        said = {"kid": f"https://{fields['host'].partition(':')[0]}/keys/{name}/{used}"}
        try:
            if (operation, body["alg"]) == ("wrapkey", "RSA-OAEP-256"):
                said["value"] = b64(self._rsa.public_key().encrypt(value, oaep))
            elif (operation, body["alg"]) == ("unwrapkey", "RSA-OAEP-256"):
                said["value"] = b64(self._rsa.decrypt(value, oaep))
            elif (operation, body["alg"]) == ("encrypt", "A256GCM"):
                sealed = key.encrypt(bytes(range(12)), value, raw(body["aad"]))
                said |= {
                    "value": b64(sealed[:-16]),
                    "tag": b64(sealed[-16:]),
                    "iv": b64(bytes(range(12))),
                    "aad": body["aad"],
                }
            else:
                assert (operation, body["alg"]) == ("decrypt", "A256GCM")
                said["value"] = b64(key.decrypt(raw(body["iv"]), value + raw(body["tag"]), raw(body["aad"])))
        except (InvalidTag, ValueError):
            failure("BadParameter", "400 Bad Request")(call)
            return
        reply({name: v for name, v in (said | self.change).items() if v is not None})(call)


@pytest.fixture(scope="module")
def rsa_key():
    return rsa.generate_private_key(65537, 2048)


@pytest.fixture(scope="module")
def azure(authority):
    """What the hosts of Azure show."""
    return authority.issue(*HOSTS)


@pytest.fixture(autouse=True)
def user(tmp_path, monkeypatch):
    """Somebody with an access token in a file, for whom the hosts of Azure are here."""
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(TOKEN + "\n")
    monkeypatch.setenv("AZURE_ACCESS_TOKEN_FILE", str(token))

    def getaddrinfo(host, port, *args, **kwargs):
        if host not in HOSTS:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.fixture
def settings(authority):
    def make(**more) -> LoaderConfig:
        defaults = {"key_private_hosts": HOSTS, "key_ca_file": str(authority.file), "key_timeout_seconds": 5}
        return LoaderConfig(**defaults | more)

    return make


@pytest.fixture
def service(settings):
    def make(**more) -> AzureKeyVaultProvider:
        made = AzureKeyVaultProvider()
        made.configure(settings(**more))
        return made

    return make


def where(server, host: str = HOSTS[0], name: str = "sdktestkey") -> str:
    return f"https://{host}:{server.port}/keys/{name}"


def asking(*recipients: Recipient, context: WrapContext = CONTEXT) -> KeyRequest:
    file_id = bytes(16)
    kcv = key_check_value(KEY.secret, file_id)
    return KeyRequest(context.kid, ALGORITHMS[context.algorithm], context.model_id, file_id, kcv, recipients)


def is_key(secret) -> bool:
    return bytes(secret.reveal()) == bytes(KEY.secret.reveal())


def entry_of(value: str = WRAPPED, sealing: bytes = raw(UNWRAPPED), **change) -> Recipient:
    """The master key for the key of the specification's example."""
    sealed = AESGCM(sealing).encrypt(bytes(12), bytes(KEY.secret.reveal()), CONTEXT.encode())
    parts = {"alg": "RSA-OAEP-256", "version": VERSION, "value": value, "iv": b64(bytes(12)), "sealed": b64(sealed)}
    text = json.dumps({n: v for n, v in (parts | change).items() if v is not None})
    return Recipient("azure-kv", "myvault/keys/sdktestkey", text.encode())


def test_the_exchange_of_the_specification(azure, settings):
    said = {"kid": f"https://myvault.vault.azure.net/keys/sdktestkey/{VERSION}", "value": UNWRAPPED}
    seen = []

    def script(call):
        seen.append(read_json(call))
        reply(said)(call)

    with serving(azure, script) as server:
        opened = KeyRing([f"azurekv:{where(server)}"], settings()).resolve(asking(entry_of()))
        assert is_key(opened.secret)
        assert server.connections == 1
    line, fields, body = seen[0]
    assert line == f"POST /keys/sdktestkey/{VERSION}/unwrapkey?api-version=7.4 HTTP/1.1"
    assert fields["authorization"] == f"Bearer {TOKEN}"
    assert body == {"alg": "RSA-OAEP-256", "value": WRAPPED}


@pytest.mark.parametrize("host", HOSTS)
def test_what_is_wrapped_is_unwrapped(azure, service, settings, rsa_key, host):
    """By an RSA key of a vault, and by an AES key of a Managed HSM; never is the master key itself under RSA."""
    vault = Vault(rsa_key)
    with serving(azure, vault) as server:
        at = where(server, host)
        entry = service().wrap(at, KEY.secret, CONTEXT)
        assert (entry.alg, entry.kid) == ("azure-kv", f"{host.partition('.')[0]}/keys/sdktestkey")
        assert_no_secret(entry.wrapped.decode())
        vault.current = "f" * 32
        opened = KeyRing([f"azurekv:{at}"], settings()).resolve(asking(entry))
        assert is_key(opened.secret), "the key was rotated: its version is in the entry"
        assert is_key(service().unwrap_key(f"{at}/{VERSION}", entry.wrapped, CONTEXT))
        for other in ({"kid": "enc-2"}, {"model_id": "demo/other"}, {"algorithm": "chacha20poly1305"}):
            with refused(KeySourceDeniedError, "was wrapped by another key or for another model"):
                service().unwrap_key(at, entry.wrapped, dataclasses.replace(CONTEXT, **other))
        with refused(KeyAccessError, f"version {VERSION} of the key wrapped this, and the reference names another"):
            service().unwrap_key(f"{at}/{'f' * 32}", entry.wrapped, CONTEXT)
    (line, _, body), (again, _, _), *_ = vault.seen
    operation = ("wrapkey", "unwrapkey") if host == HOSTS[0] else ("encrypt", "decrypt")
    assert line == f"POST /keys/sdktestkey/{operation[0]}?api-version=7.4 HTTP/1.1"
    assert again == f"POST /keys/sdktestkey/{VERSION}/{operation[1]}?api-version=7.4 HTTP/1.1"
    sent = raw(body["value"])
    assert len(sent) == 32
    assert (sent == bytes(KEY.secret.reveal())) is (host == HOSTS[1])
    assert body.get("aad") == (None if host == HOSTS[0] else b64(CONTEXT.encode()))


def test_a_fresh_key_for_every_wrapping(azure, service, rsa_key):
    vault = Vault(rsa_key)
    with serving(azure, vault) as server:
        for _ in range(2):
            service().wrap(where(server), KEY.secret, CONTEXT)
    first, second = (body["value"] for _, _, body in vault.seen)
    assert first != second


def test_a_model_from_end_to_end_by_one_request(azure, authority, settings, rsa_key, tmp_path, secure_loader_home):
    (secure_loader_home / "config.toml").write_text(
        f'[loader]\nkey_private_hosts = ["{HOSTS[0]}"]\nkey_ca_file = "{authority.file}"\n'
    )
    source = build_source(tmp_path / "plain", shards=3)
    vault = Vault(rsa_key)
    with serving(azure, vault) as server:
        who = {"signing_key": SIGN, "model_id": "demo/model", "recipients": [f"azurekv:{where(server)}"]}
        encrypt_model(source, tmp_path / "secure", keep_names=True, **who)
        assert len(vault.seen) == 1
        session = Session(keys=f"azurekv:{where(server)}", trust=trust(), config=settings())
        checkpoint = Checkpoint(tmp_path / "secure", session)
        for name in checkpoint.shards():
            with Archive(checkpoint.open(name), "numpy") as f:
                for tensor, expected in load_file(source / name).items():
                    assert (f.get_tensor(tensor) == expected).all()
        assert len(vault.seen) == 2


@pytest.mark.parametrize("host", HOSTS)
def test_where_tokens_come_from(azure, service, rsa_key, monkeypatch, host):
    said = {
        "access_token": "from-the-metadata-service",
        "expires_in": "3599",
        "token_type": "Bearer",
        "refresh_token": "",
    }
    vault = Vault(rsa_key)
    with serving(azure, vault) as server, serving(None, reply(said)) as metadata:
        monkeypatch.setenv("AZURE_ACCESS_TOKEN", "from-the-variable")
        service().wrap(where(server, host), KEY.secret, CONTEXT)
        monkeypatch.delenv("AZURE_ACCESS_TOKEN")
        monkeypatch.delenv("AZURE_ACCESS_TOKEN_FILE")
        with refused(KeyAccessError, "there is no access token of Azure", "AZURE_POD_IDENTITY_AUTHORITY_HOST where"):
            service().wrap(where(server, host), KEY.secret, CONTEXT)
        monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", f"http://127.0.0.1:{metadata.port}/")
        service(insecure_allow_http_loopback=True).wrap(where(server, host), KEY.secret, CONTEXT)
        tokens = [fields["authorization"] for _, fields, _ in vault.seen]
        assert tokens == ["Bearer from-the-variable", "Bearer from-the-metadata-service"]
        line, *fields = metadata.calls[0].splitlines()
        kind = "api-version=2018-02-01&resource=https%3A%2F%2F" + host.partition(".")[2]
        assert line == f"GET /metadata/identity/oauth2/token?{kind} HTTP/1.1"
        assert "Metadata: true" in fields


@pytest.mark.parametrize(
    "rest", ["", "keys", "keys/", "secrets/a", "keys/a_b", "keys/a/1", f"keys/a/{VERSION}/x", "keys/a?x=1", "keys/a/" + "G" * 32, "keys//a"]
)  # fmt: skip
def test_a32_references_that_name_no_key(service, rest):
    with refused(KeyAccessError, "names no key of Azure Key Vault"):
        service().kid(f"https://{HOSTS[0]}/{rest}")


def test_a32_references_with_secrets():
    for reference in (f"azurekv:https://u:hunter2@{HOSTS[0]}/keys/a", f"azurekv:https://{HOSTS[0]}/keys/a?sig=hunter2"):
        with pytest.raises(ConfigError) as caught:
            KeyRing([reference])
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"alg": "RSA1_5"}, {"alg": "RSA-OAEP"}, {"alg": "A256GCM"}, {"alg": 5}, {"alg": None}, {"version": "x"}, {"version": None},
        {"value": ""}, {"value": "a+b"}, {"value": 5}, {"value": None}, {"iv": "AAAA"}, {"iv": None}, {"sealed": None}, {"more": "x"},
        {"version": "../" + "a" * 29},
    ],
)  # fmt: skip
def test_entries_that_are_not_ours(azure, service, rsa_key, change):
    """No weaker algorithm, no other path: nothing is asked."""
    with serving(azure, Vault(rsa_key)) as server:
        with refused(KeyAccessError, "what is wrapped for myvault/keys/sdktestkey is not what Azure Key Vault wraps"):
            service().unwrap_key(where(server), entry_of(**change).wrapped, CONTEXT)
        assert server.connections == 0
    for wrapped in (b"", b"[]", b"\xff", b"{"):
        with refused(KeyAccessError, "is not what Azure Key Vault wraps"):
            service().unwrap_key(where(server), wrapped, CONTEXT)


KID = f"https://myvault.vault.azure.net/keys/sdktestkey/{VERSION}"
DENIED, WRONG, LATER = KeySourceDeniedError, KeySourceResponseError, KeySourceUnreachableError
UNWRAPS = {
    "denied": (failure("Forbidden", "403 Forbidden"), DENIED, "denies the key (HTTP 403)"),
    "expired": (failure("Unauthorized", "401 Unauthorized"), DENIED, "the access token has expired"),
    "altered": (failure("BadParameter", "400 Bad Request"), DENIED, "or was altered"),
    "missing": (failure("KeyNotFound", "404 Not Found"), WRONG, "has nothing at that path"),
    "conflict": (failure("Conflict", "409 Conflict"), WRONG, "answers HTTP 409"),
    "throttled": (failure("Throttled", "429 Too Many Requests"), LATER, "out of order (HTTP 429)"),
    "down": (failure("ServiceUnavailable", "503 Unavailable"), LATER, "out of order (HTTP 503)"),
    "redirect": (answer(b"", "307 X", Location="http://127.0.0.1/"), WRONG, "redirects (HTTP 307)"),
    "html": (answer(b"<!doctype html>"), WRONG, "is not valid JSON"),
    "empty": (reply({}), WRONG, "holds no value in base64"),
    "no-kid": (reply({"value": UNWRAPPED}), WRONG, "names another key than was asked for, or none"),
    "other-key": (reply({"value": UNWRAPPED, "kid": KID.replace("sdktest", "other")}), WRONG, "names another key"),
    "other-version": (reply({"value": UNWRAPPED, "kid": KID[:-32] + "f" * 32}), WRONG, "another version of the key"),
    "other-value": (reply({"value": b64(bytes(32)), "kid": KID}), DENIED, "or was altered"),
    "short": (reply({"value": b64(bytes(20)), "kid": KID}), DENIED, "or was altered"),
    "silent": (hang, LATER, "no complete answer within 0.3 s"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNWRAPS)
def test_a34_answers_to_an_unwrap(azure, settings, name):
    script, kind, words = UNWRAPS[name]
    with serving(azure, script) as server:
        with pytest.raises(KeyAccessError) as caught:
            KeyRing([f"azurekv:{where(server)}"], settings(key_timeout_seconds=0.3)).resolve(asking(entry_of()))
        assert type(caught.value) is kind
        assert words in str(caught.value)
        assert server.connections == 1
    shown = frames(caught.value)
    assert "hunter2" not in shown
    assert TOKEN not in shown
    assert UNWRAPPED[:20] not in shown
    assert "request-7" not in str(caught.value)


def test_a35_another_key_than_the_file_was_encrypted_with(azure, service, settings, rsa_key):
    with serving(azure, Vault(rsa_key)) as server:
        entry = service().wrap(where(server), MALLORY_KEY.secret, CONTEXT)
        with refused(KeyAccessError, "key check value differs"):
            KeyRing([f"azurekv:{where(server)}"], settings()).resolve(asking(entry))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kid": None}, "names another key than was asked for, or none"),
        ({"kid": KID.replace("sdktest", "other")}, "names another key"),
        ({"kid": KID[:-33]}, "names another key"),
        ({"value": None}, "holds no value in base64url"),
        ({"value": "a+/="}, "holds no value in base64url"),
        ({"value": "A" * 8001}, "holds no value in base64url"),
    ],
)
def test_a34_answers_to_a_wrap(azure, service, rsa_key, change, words):
    with serving(azure, Vault(rsa_key, **change)) as server, pytest.raises(KeyAccessError) as caught:
        service().wrap(where(server), KEY.secret, CONTEXT)
    assert words in str(caught.value)
    assert_no_secret(frames(caught.value))
    with serving(azure, failure("BadParameter", "400 Bad Request")) as server:
        with refused(WRONG, "cannot wrap with this key (HTTP 400)", "an RSA key is needed in a vault"):
            service().wrap(where(server), KEY.secret, CONTEXT)
        with refused(WRONG, "cannot wrap with this key (HTTP 400)", "an AES key of 256 bits in a Managed HSM"):
            service().wrap(where(server, HOSTS[1]), KEY.secret, CONTEXT)
