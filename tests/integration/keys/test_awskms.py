"""``awskms:`` keys in moto, a mock of AWS that runs in this process, and servers that answer as KMS may.

What moto does not do (it encrypts with disabled keys) is played by servers that say what the documentation of KMS says.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from secure_loader import encrypt_model, rewrap_model
from secure_loader.config import LoaderConfig
from secure_loader.core.aead import ALGORITHMS
from secure_loader.core.archive import Archive
from secure_loader.core.checkpoint import Checkpoint
from secure_loader.core.keys.awskms import AwsKmsProvider
from secure_loader.core.keys.provider import KeyRequest, KeyRing, key_check_value
from secure_loader.core.recipient import Recipient, WrapContext
from secure_loader.core.secrets import Secret
from secure_loader.core.session import Session
from secure_loader.errors import (
    ConfigError,
    KeyAccessError,
    KeySourceDeniedError,
    KeySourceResponseError,
    KeySourceUnreachableError,
    UntrustedSignerError,
)
from tests.attacks.kit import (
    KEY,
    MALLORY,
    MALLORY_KEY,
    SIGN,
    assert_no_secret,
    build_folder,
    build_source,
    refused,
    shard,
    trust,
)
from tests.integration.keys.services import Counter, answer, frames, hang, read_json, serving

CONTEXT = WrapContext(KEY.kid, KEY.algorithm.name, "demo/model")
REGION = "eu-central-1"
ID = "1234abcd-12ab-34cd-56ef-1234567890ab"
ARN = f"arn:aws:kms:{REGION}:123456789012:key/{ID}"
REPLICA = f"arn:aws:kms:{REGION}:123456789012:key/mrk-1234abcd12ab34cd56ef1234567890ab"
SECRETS = ("hunter2-secret-access-key", "hunter2-session-token")


class Aws:
    """A region of the mock, and the keys in it."""

    def __init__(self, port: int) -> None:
        import botocore.session

        self.port, self.url = port, f"http://127.0.0.1:{port}"
        words = {"endpoint_url": self.url, "aws_access_key_id": "a", "aws_secret_access_key": "b"}
        self.kms = botocore.session.Session().create_client("kms", REGION, **words)
        self.arn = self.make()
        self.id = self.arn.rpartition("/")[2]
        self.kms.create_alias(AliasName="alias/models", TargetKeyId=self.id)

    def make(self, **options) -> str:
        return self.kms.create_key(**options)["KeyMetadata"]["Arn"]


@pytest.fixture(scope="module")
def moto():
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield Aws(server.get_host_and_port()[1])
    finally:
        server.stop()


@pytest.fixture(autouse=True)
def user(tmp_path, monkeypatch):
    """Somebody with credentials of AWS and a region, and nothing of the person who runs the tests."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRETS[0])
    monkeypatch.setenv("AWS_SESSION_TOKEN", SECRETS[1])
    monkeypatch.setenv("AWS_REGION", REGION)


@pytest.fixture
def aws(moto, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", moto.url)
    return moto


def config(**more) -> LoaderConfig:
    defaults = {"key_private_hosts": ["localhost"], "insecure_allow_http_loopback": True, "key_timeout_seconds": 5}
    return LoaderConfig(**defaults | more)


def service(**more) -> AwsKmsProvider:
    made = AwsKmsProvider()
    made.configure(config(**more))
    return made


def asking(*recipients: Recipient, context: WrapContext = CONTEXT) -> KeyRequest:
    file_id = bytes(16)
    kcv = key_check_value(KEY.secret, file_id)
    return KeyRequest(context.kid, ALGORITHMS[context.algorithm], context.model_id, file_id, kcv, recipients)


def resolve(reference: str, request: KeyRequest, **more):
    return KeyRing([f"awskms:{reference}"], config(**more)).resolve(request)


def is_key(unwrapper) -> bool:
    return bytes(unwrapper.secret.reveal()) == bytes(KEY.secret.reveal())


# --- against moto ----------------------------------------------------------------------------------------------------


def test_what_is_wrapped_is_unwrapped(aws):
    """By whatever names the key; the file has its ARN."""
    names = (
        aws.arn,
        aws.id,
        "alias/models",
        f"arn:aws:kms:{REGION}:123456789012:alias/models",
        f"{aws.id}?region={REGION}",
    )
    for name in names:
        entry = service().wrap(name, KEY.secret, CONTEXT)
        assert (entry.alg, entry.kid) == ("aws-kms", aws.arn)
        assert bytes(KEY.secret.reveal()) not in entry.wrapped
        for other in names:
            assert is_key(resolve(other, asking(entry)))


@pytest.mark.parametrize(
    "other", [{"kid": "enc-2"}, {"algorithm": "chacha20poly1305"}, {"model_id": "demo/other"}, {"model_id": ""}]
)
def test_an_entry_is_for_one_key_of_one_model(aws, other):
    entry = service().wrap(aws.arn, KEY.secret, CONTEXT)
    with refused(KeySourceDeniedError, "denies the key (InvalidCiphertextException)", "or for another model"):
        resolve(aws.arn, asking(entry, context=dataclasses.replace(CONTEXT, **other)))


def test_an_altered_entry(aws):
    entry = service().wrap(aws.arn, KEY.secret, CONTEXT)
    altered = dataclasses.replace(entry, wrapped=entry.wrapped[:-1] + bytes([entry.wrapped[-1] ^ 1]))
    with refused(KeySourceDeniedError, "was altered"):
        resolve(aws.arn, asking(altered))


def test_the_key_is_pinned(aws):
    """An entry of another key of the account: KMS is told which key is meant, and refuses."""
    other = aws.make()
    entry = service().wrap(other, KEY.secret, CONTEXT)
    with refused(KeyAccessError, "no master key with kid 'enc-1'"):
        resolve(aws.arn, asking(entry))
    for claimed, name in ((aws.arn, aws.arn), (aws.arn, aws.id), (other, "alias/models")):
        with refused(KeySourceDeniedError, "denies the key (AccessDeniedException)"):
            resolve(name, asking(dataclasses.replace(entry, kid=claimed)))


def test_two_entries_and_an_alias(aws):
    entries = sorted(service().wrap(arn, KEY.secret, CONTEXT) for arn in (aws.arn, aws.make()))
    with refused(KeyAccessError, "2 recipients of the model could be meant", "name the key exactly"):
        resolve("alias/models", asking(*entries))
    assert is_key(resolve(aws.arn, asking(*entries)))
    assert is_key(resolve(aws.id, asking(*entries)))


@pytest.mark.parametrize(
    ("reference", "kid", "opens"),
    [
        (ARN, ARN, True),
        (ID, ARN, True),
        ("alias/models", ARN, True),
        (f"arn:aws:kms:{REGION}:123456789012:alias/models", ARN, True),
        ("arn:aws:kms:us-east-1:123456789012:alias/models", ARN, True),
        (f"arn:aws:kms:{REGION}:999999999999:alias/models", ARN, False),
        (ARN.replace("1234abcd", "abcd1234"), ARN, False),
        (ARN.replace(REGION, "us-east-1"), ARN, False),
        (ARN.replace("123456789012", "999999999999"), ARN, False),
        (ARN.replace("arn:aws:", "arn:aws-cn:"), ARN, False),
        (ID.replace("1234abcd", "abcd1234"), ARN, False),
        ("alias/models", "alias/models", False),
        ("alias/models", f"arn:aws:kms:{REGION}:123456789012:alias/models", False),
        (REPLICA, REPLICA, True),
        (REPLICA.replace(REGION, "us-east-1"), REPLICA, True),
        (REPLICA.replace("123456789012", "999999999999"), REPLICA, False),
    ],
)
def test_which_entries_a_reference_opens(reference, kid, opens):
    """An alias may stand for any key; replicas of one key in several regions are one."""
    assert service().opens(reference, Recipient("aws-kms", kid, b"x")) is opens


def test_keys_that_do_not_exist(aws):
    with refused(KeySourceResponseError, "cannot do this (NotFoundException)", "a symmetric key is needed"):
        service().wrap("alias/nothing", KEY.secret, CONTEXT)
    with refused(KeySourceResponseError, "cannot do this (NotFoundException)"):
        service().wrap(ID, KEY.secret, CONTEXT)


def test_another_key_than_the_file_was_encrypted_with(aws):
    entry = service().wrap(aws.arn, MALLORY_KEY.secret, CONTEXT)
    with refused(KeyAccessError, "key check value differs"):
        resolve(aws.arn, asking(entry))
    with Secret(bytes(16)) as short:
        entry = service().wrap(aws.arn, short, CONTEXT)
    with refused(KeyAccessError, "has 16 bytes instead of 32"):
        resolve(aws.arn, asking(entry))


def test_a_profile(aws, tmp_path, monkeypatch):
    """Credentials and region from where other tools of AWS have them."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION"):
        monkeypatch.delenv(name)
    with refused(KeyAccessError, "which region of AWS to ask for the key is not known"):
        service().wrap("alias/models", KEY.secret, CONTEXT)
    with refused(KeyAccessError, "there are no AWS credentials", "AWS_PROFILE"):
        service().wrap(aws.arn, KEY.secret, CONTEXT)
    monkeypatch.setenv("AWS_PROFILE", "publisher")
    with refused(KeyAccessError, "the profile of AWS cannot be used (ProfileNotFound)"):
        service().wrap("alias/models", KEY.secret, CONTEXT)
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text(f"[profile publisher]\nregion = {REGION}\n")
    (tmp_path / ".aws" / "credentials").write_text("[publisher]\naws_access_key_id = a\naws_secret_access_key = b\n")
    assert service().wrap("alias/models", KEY.secret, CONTEXT).kid == aws.arn


def test_a_model_from_end_to_end_by_one_request(aws, tmp_path, secure_loader_home, monkeypatch):
    """Encrypted for KMS alone, with a key that nobody keeps; loaded by KMS alone."""
    (secure_loader_home / "config.toml").write_text("[loader]\ninsecure_allow_http_loopback = true\n")
    source = build_source(tmp_path / "plain", shards=3)
    who = {"signing_key": SIGN, "model_id": "demo/model", "recipients": ["awskms:alias/models"]}
    encrypt_model(source, tmp_path / "secure", keep_names=True, **who)
    with Counter(aws.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", f"http://127.0.0.1:{proxy.port}")
        checkpoint = Checkpoint(tmp_path / "secure", Session(keys=f"awskms:{aws.arn}", trust=trust(), config=config()))
        for name in checkpoint.shards():
            with Archive(checkpoint.open(name), "numpy") as f:
                for tensor, expected in load_file(source / name).items():
                    assert (f.get_tensor(tensor) == expected).all()
        assert proxy.connections == 1


def test_master_keys_change_by_arn(aws, tmp_path, secure_loader_home):
    """A new master key is wrapped for the services among the settings that files name: an alias is not what they name."""
    settings = secure_loader_home / "config.toml"
    settings.write_text("[loader]\ninsecure_allow_http_loopback = true\n")
    folder = build_folder(tmp_path / "model", shards=1, key=None, recipients=["awskms:alias/models"])
    common = {"signing_key": SIGN, "trust": trust(), "new_key": True}
    settings.write_text('[loader]\ninsecure_allow_http_loopback = true\nkeys = ["awskms:alias/models"]\n')
    with refused(ConfigError, f"cannot be wrapped for {aws.arn}: not known here", "name them with -r"):
        rewrap_model(folder, **common)
    settings.write_text(f'[loader]\ninsecure_allow_http_loopback = true\nkeys = ["awskms:{aws.arn}"]\n')
    rewrap_model(folder, **common)
    session = Session(keys=["awskms:alias/models"], trust=trust(), config=config())
    with session.open(shard(folder), "numpy") as f:
        f.get_tensors()


def test_a36_kms_is_not_asked_for_a_model_that_nobody_trusted_signed(aws, tmp_path, secure_loader_home, monkeypatch):
    (secure_loader_home / "config.toml").write_text("[loader]\ninsecure_allow_http_loopback = true\n")
    who = {"recipients": [f"awskms:{aws.arn}"], "signing_key": MALLORY}
    folder = build_folder(tmp_path / "model", key=None, **who)
    with Counter(aws.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", f"http://127.0.0.1:{proxy.port}")
        session = Session(keys=f"awskms:{aws.arn}", trust=trust(), config=config())
        with refused(UntrustedSignerError), session.open(shard(folder), "numpy") as f:
            f.get_tensors()
        assert proxy.connections == 0


def test_the_commands_of_the_guide(aws, tmp_path, secure_loader_home, monkeypatch):
    """What docs/keys.md says, word for word, but for the ARN and the commands of AWS' own tool."""
    text = (Path(__file__).parents[3] / "docs" / "keys.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text.split("### AWS KMS\n")[1].split("\n### ")[0], re.DOTALL)
    assert len(blocks) == 3
    build_source(tmp_path / "model")
    (secure_loader_home / "config.toml").write_text("[loader]\ninsecure_allow_http_loopback = true\n")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    subprocess.run(["secure-loader", "keygen", "alice"], check=True, capture_output=True)
    arn = "arn:aws:kms:eu-central-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab"
    assert blocks[0].startswith("aws kms create-key"), "the rest is run"
    assert sum(block.count(arn) for block in blocks) == 1
    for block in blocks[1:]:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.replace(arn, aws.arn)],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert not [s for s in SECRETS if s in done.stdout + done.stderr]
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        assert (tmp_path / "model-again" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()


# --- against servers that answer as KMS may ----------------------------------------------------------------------------


ENTRY = Recipient("aws-kms", ARN, b"A" * 150)
DENIED, WRONG, LATER = KeySourceDeniedError, KeySourceResponseError, KeySourceUnreachableError


def error(code: str, status: str = "400 Bad Request") -> object:
    body = json.dumps({"__type": code, "Message": "arn:aws:iam::123456789012:user/hunter2 is not authorized"})
    return answer(body.encode(), status, x_amzn_RequestId="request-7")


def opened(**changes) -> object:
    good = {"KeyId": ARN, "EncryptionAlgorithm": "SYMMETRIC_DEFAULT", "Plaintext": _digits(KEY)}
    return answer(json.dumps({n: v for n, v in (good | changes).items() if v is not None}).encode())


def _digits(key) -> str:
    return base64.b64encode(key.secret.reveal()).decode()


SCRIPTS = {
    "denied": (error("AccessDeniedException"), DENIED, "denies the key (AccessDeniedException): no policy of the key"),
    "prefix": (error("com.amazonaws.kms#IncorrectKeyException"), DENIED, "denies the key (IncorrectKeyException)"),
    "disabled": (error("DisabledException"), DENIED, "the key is disabled"),
    "pending": (error("KMSInvalidStateException"), DENIED, "about to be deleted"),
    "signature": (error("InvalidSignatureException"), DENIED, "the credentials are wrong, or a clock is"),
    "expired": (error("ExpiredTokenException"), DENIED, "the credentials have expired"),
    "stranger": (error("UnrecognizedClientException"), DENIED, "the credentials are wrong"),
    "usage": (error("InvalidKeyUsageException"), WRONG, "cannot do this (InvalidKeyUsageException)"),
    "throttled": (error("ThrottlingException"), LATER, "out of order (ThrottlingException)"),
    "internal": (error("KMSInternalException", "500 Oops"), LATER, "out of order (KMSInternalException)"),
    "unknown": (error("SomethingNew", "500 Oops"), LATER, "out of order (HTTP 500)"),
    "proxy": (answer(b"<html>hunter2", "403 Forbidden"), DENIED, "denies the key (HTTP 403)"),
    "nonsense": (answer(b'{"__type":"hunter2 hunter2"}', "400 Bad"), WRONG, "answers HTTP 400"),
    "redirect": (answer(b"", "307 X", Location="http://127.0.0.1/"), WRONG, "redirects (HTTP 307)"),
    "html": (answer(b"<!doctype html>"), WRONG, "is not valid JSON"),
    "empty": (answer(b"{}"), WRONG, "holds no Plaintext in base64"),
    "list": (answer(b"[]"), WRONG, "holds no Plaintext in base64"),
    "no-key": (opened(KeyId=None), WRONG, "names another key than was asked for, or none"),
    "other-key": (opened(KeyId=ARN.replace("1234567890", "2222222222")), WRONG, "names another key than was asked for"),
    "no-text": (opened(Plaintext=None), WRONG, "holds no Plaintext in base64"),
    "number": (opened(Plaintext=5), WRONG, "holds no Plaintext in base64"),
    "no-base64": (opened(Plaintext="+_" + "A" * 42), WRONG, "Plaintext of the answer is not base64"),
    "short": (opened(Plaintext="A" * 24), KeyAccessError, "has 18 bytes instead of 32"),
    "lie": (opened(Plaintext=_digits(MALLORY_KEY)), KeyAccessError, "key check value differs"),
    "silent": (hang, LATER, "no complete answer within 0.5 s"),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_a34_answers_of_kms(monkeypatch, authority, localhost, name):
    """Refused, asked once, and neither credentials nor what was said in any frame of ours."""
    script, kind, words = SCRIPTS[name]
    resolve_once = {"key_ca_file": str(authority.file), "key_timeout_seconds": 0.5 if name == "silent" else 5}
    with serving(localhost, script) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", f"https://localhost:{server.port}")
        with pytest.raises(KeyAccessError, match=re.escape(words)) as caught:
            resolve(ARN, asking(ENTRY), **resolve_once)
        assert type(caught.value) is kind
        assert server.connections == 1
    shown = frames(caught.value)
    assert not [s for s in ("hunter2", *SECRETS) if s in shown]
    assert "request-7" not in str(caught.value)
    assert_no_secret(shown)


def test_what_is_sent(monkeypatch, authority, localhost):
    """The protocol of KMS, signed; botocore makes the same signature of the same request."""
    import botocore.auth
    import botocore.awsrequest
    from botocore.credentials import Credentials

    calls = []

    def script(call):
        line, fields, body = read_json(call)
        calls.append((line, fields, body))
        operation = fields["x-amz-target"]
        sealed = {"KeyId": ARN, "CiphertextBlob": base64.b64encode(b"blob").decode()}
        opened(**({"Plaintext": None} | sealed if operation.endswith("Encrypt") else {}))(call)

    with serving(localhost, script) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://localhost:{server.port}/")
        entry = service(key_ca_file=str(authority.file)).wrap("alias/models", KEY.secret, CONTEXT)
        assert entry == Recipient("aws-kms", ARN, b"blob")
        assert is_key(resolve(ARN, asking(entry), key_ca_file=str(authority.file)))
    context = {"alg": "aes256gcm", "kid": "enc-1", "model_id": "demo/model"}
    common = {"EncryptionAlgorithm": "SYMMETRIC_DEFAULT", "EncryptionContext": context}
    assert [body for _, _, body in calls] == [
        {"KeyId": "alias/models", "Plaintext": _digits(KEY), **common},
        {"KeyId": ARN, "CiphertextBlob": base64.b64encode(b"blob").decode(), **common},
    ]
    for (line, fields, body), operation in zip(calls, ("Encrypt", "Decrypt"), strict=True):
        assert line == "POST / HTTP/1.1"
        assert fields["x-amz-target"] == f"TrentService.{operation}"
        assert fields["content-type"] == "application/x-amz-json-1.1"
        assert fields["x-amz-security-token"] == SECRETS[1]
        names = re.search(r"SignedHeaders=([a-z0-9;-]+)", fields["authorization"])[1].split(";")
        assert names == ["content-type", "host", "x-amz-date", "x-amz-security-token", "x-amz-target"]
        sent = {n: v for n, v in fields.items() if n in names}
        data = json.dumps(body, separators=(",", ":")).encode()
        again = botocore.awsrequest.AWSRequest("POST", f"https://{fields['host']}/", headers=sent, data=data)
        again.context["timestamp"] = fields["x-amz-date"]
        signer = botocore.auth.SigV4Auth(Credentials("AKIAIOSFODNN7EXAMPLE", *SECRETS), "kms", REGION)
        signature = signer.signature(signer.string_to_sign(again, signer.canonical_request(again)), again)
        assert fields["authorization"].endswith(f"Signature={signature}")


@pytest.mark.parametrize(
    ("region", "fips", "host"),
    [
        ("us-east-1", "", "kms.us-east-1.amazonaws.com"),
        ("cn-north-1", "", "kms.cn-north-1.amazonaws.com.cn"),
        ("us-gov-west-1", "true", "kms-fips.us-gov-west-1.amazonaws.com"),
    ],
)
def test_a32_where_kms_is(monkeypatch, region, fips, host):
    """As botocore has it. A name that leads inside is refused until it is allowed (an endpoint of one's own network)."""
    import socket

    import botocore.session

    monkeypatch.setenv("AWS_USE_FIPS_ENDPOINT", fips or "false")
    client = botocore.session.Session().create_client("kms", region)
    assert client.meta.endpoint_url == f"https://{host}"
    asked = []

    def getaddrinfo(name, port, *args, **kwargs):
        asked.append((name, port))
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.1.2.3", port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with refused(KeyAccessError, f"key source https://{host} has the address 10.1.2.3", "key_private_hosts"):
        service().wrap(f"alias/models?region={region}", KEY.secret, CONTEXT)
    assert asked == [(host, 443)]


def test_a32_endpoints_that_are_not_used(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", "http://169.254.169.254/latest/meta-data")
    with refused(KeyAccessError, "http is not encrypted"):
        service().wrap(ARN, KEY.secret, CONTEXT)
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", "http://127.0.0.1:1")
    with refused(KeyAccessError, "http is not encrypted", "insecure_allow_http_loopback"):
        service(insecure_allow_http_loopback=False).wrap(ARN, KEY.secret, CONTEXT)
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", "https://user:hunter2@localhost/")
    with pytest.raises(KeyAccessError, match="must not hold a user name") as caught:
        service().wrap(ARN, KEY.secret, CONTEXT)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "reference",
    [
        "", "models", "alias/", "key/" + ID, ID.upper(), "arn:aws:s3:::bucket", ARN + "x", f"{ARN}?region={REGION}", "alias/a?region=x",
        "alias/a?region=evil.example/", "alias/a?token=hunter2", "arn:aws:kms:evil.example/:123456789012:alias/a", 'alias/a","x":"',
        "//host/alias/a", "mrk-1234", f"arn:aws:kms:{REGION}:1234:key/{ID}",
    ],
)  # fmt: skip
def test_a32_references_that_name_no_key(reference):
    """Nothing of a reference can get into a host or out of a string."""
    with refused(KeyAccessError, "names no key of AWS KMS"):
        service().kid(reference)


@pytest.mark.parametrize("region", ["evil.example/", "EU-CENTRAL-1", "eu", "", "x@y"])
def test_a32_regions_that_are_none(monkeypatch, region):
    monkeypatch.setenv("AWS_REGION", region)
    monkeypatch.setenv("AWS_DEFAULT_REGION", region)
    with refused(KeyAccessError, "which region of AWS"):
        service().wrap("alias/models", KEY.secret, CONTEXT)


def test_a34_credentials_that_do_not_come(tmp_path, monkeypatch):
    """A program that hangs, one that fails and says why, and a role that may not be taken."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    settings = tmp_path / "config"
    monkeypatch.setenv("AWS_CONFIG_FILE", str(settings))
    settings.write_text("[default]\ncredential_process = sleep 1\n")
    start = time.monotonic()
    with refused(KeySourceUnreachableError, "no AWS credentials within 0.3 s"):
        service(key_timeout_seconds=0.3).wrap(ARN, KEY.secret, CONTEXT)
    assert time.monotonic() - start < 0.9
    settings.write_text("[default]\ncredential_process = bash -c 'echo hunter2 >&2; exit 1'\n")
    with pytest.raises(KeyAccessError, match=r"cannot be had \(CredentialRetrievalError\)") as caught:
        service().wrap(ARN, KEY.secret, CONTEXT)
    assert "hunter2" not in frames(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    said = b"<ErrorResponse><Error><Code>AccessDenied</Code><Message>hunter2</Message></Error></ErrorResponse>"
    with serving(None, answer(said, "403 Forbidden", Content_Type="text/xml")) as sts:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{sts.port}")
        settings.write_text(
            "[default]\nrole_arn = arn:aws:iam::123456789012:role/loader\nsource_profile = base\n"
            "[profile base]\naws_access_key_id = a\naws_secret_access_key = b\n"
        )
        with pytest.raises(KeySourceDeniedError, match=r"AWS gives no credentials \(AccessDenied\)") as caught:
            service().wrap(ARN, KEY.secret, CONTEXT)
    assert "hunter2" not in frames(caught.value)


def test_credentials_show_nowhere(aws, caplog):
    """Not in what is logged, either, but for what botocore says when it is asked for everything."""
    with caplog.at_level(logging.INFO):
        assert is_key(resolve(aws.arn, asking(service().wrap(aws.arn, KEY.secret, CONTEXT))))
    assert not [s for s in SECRETS if s in caplog.text]
    assert_no_secret(caplog.text)


def test_nobody_imports_botocore_before_it_is_needed():
    code = (
        "import sys, secure_loader; from secure_loader.core.keys.provider import provider; provider('awskms').kid('alias/a')\n"
        "from secure_loader.core.environment import describe; describe(); sys.exit('botocore' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"SECURE_LOADER_KEYS": "awskms:alias/a"})


def test_without_botocore(monkeypatch):
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    with refused(ConfigError, "awskms: references need the package botocore", "pip install 'secure-loader[aws]'"):
        service().wrap(ARN, KEY.secret, CONTEXT)
