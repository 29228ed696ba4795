"""Trustee brokers that are hostile, misused, down, slow, or say no: 33, 34."""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
import socket
import threading
import time
import traceback

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from secure_loader.config import LoaderConfig
from secure_loader.core.keys import evidence
from secure_loader.core.keys.provider import KeyRing, key_check_value
from secure_loader.core.session import Session
from secure_loader.errors import (
    ConfigError,
    KeyAccessError,
    KeySourceDeniedError,
    KeySourceResponseError,
    KeySourceUnreachableError,
    UntrustedSignerError,
)
from tests.attacks.kit import KEY, MALLORY, SIGN, arrays, assert_no_secret, build_file, inner, refused, rewrite, trust
from tests.integration.keys.kbs_peer import ERRORS, b64url, brokering, coordinates, encrypt, unb64url
from tests.integration.keys.services import Authority, answer, request_for, serving

PATH = "models/key/demo"
JWK = json.dumps(KEY.document()).encode()
FILE_ID = bytes(range(16))
STEPS = ("auth", "attest", "resource")


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def localhost(authority):
    return authority.issue("localhost", "127.0.0.1")


@pytest.fixture(scope="module")
def running(localhost):
    with brokering(localhost) as peer:
        yield peer


@pytest.fixture
def peer(running):
    running.reset()
    running.resources[PATH] = JWK
    return running


@pytest.fixture
def settings(authority, running):
    def make(**more) -> LoaderConfig:
        defaults = {
            "key_private_hosts": ["localhost"],
            "key_ca_file": authority.file,
            "key_timeout_seconds": 5,
            "kbs_url": running.url,
            "kbs_evidence": "sample",
            "insecure_kbs_sample_evidence": True,
        }
        return LoaderConfig(**defaults | more)

    return make


def ask(config: LoaderConfig, reference: str = f"kbs:///{PATH}"):
    request = request_for(KEY, file_id=FILE_ID, kcv=key_check_value(KEY.secret, FILE_ID))
    return KeyRing([reference], config).resolve(request)


@contextlib.contextmanager
def in_time(seconds: float):
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


def client_key(peer) -> ec.EllipticCurvePublicKey:
    """The key of the newest session."""
    return list(peer.tokens.values())[-1]


# --- 33: what is asked, and whom -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rest",
    [
        "a/b/c", "/a/b/c", "//", "///", "///a/b", "///a/b/c/d", "///a/b/c/", "////b/c", "///a//c", "///../b/c", "///a/../c",
        "///a/b/..", "///a/./c", "///a/b/.c", "///a/%2e%2e/c", "///a/b%2fc/d", "///a/b/c?x=1", "///a/b/c#x", "///a b/c/d",
        "///a/b/c\r\nX: y", "///a/b/c\n", "///a/b/\0", "///a\\b/c/d", "///~/b/c", "///a/b/\u00fc", "///a/b/" + "c" * 129,
        "///kbs/v0/auth/x", "//host/a/b", "//me@host/a/b/c", "//me:hunter2@host/a/b/c", "//@/a/b/c", "//host:0/a/b/c",
        "//host:x/a/b/c", "//ho st/a/b/c", "//h\u00f6st/a/b/c", "//2130706433/a/b/c", "//127.1/a/b/c", "//[::1/a/b/c",
        "//host?/a/b/c", "//host\\@evil/a/b/c", "//..//a/b/c", "//-/a/b/c",
    ],
)  # fmt: skip
def test_a33_what_is_no_reference(rest, settings, peer):
    with pytest.raises(
        (KeyAccessError, ConfigError), match=r"key reference|kbs: reference|keys takes references"
    ) as caught:
        ask(settings(), f"kbs:{rest}")
    assert "hunter2" not in str(caught.value)
    assert peer.calls == []


def test_a33_passwords_in_references_are_not_repeated():
    for reference in (
        f"kbs://me:hunter2@kbs.example/{PATH}",
        f"kbs://hunter2@kbs.example/{PATH}",
        f"kbs:///{PATH}?key=hunter2",
    ):
        with pytest.raises(ConfigError, match="keys takes references") as caught:
            LoaderConfig(keys=reference)
        assert "hunter2" not in str(caught.value)
    assert LoaderConfig(keys=f"kbs://kbs.example:8080/{PATH}").keys == (f"kbs://kbs.example:8080/{PATH}",)


@pytest.mark.parametrize("host", ["169.254.169.254", "10.0.0.1", "[::1]", "localhost", "127.0.0.1"])
def test_a33_addresses_inside(host, settings, peer):
    with refused(KeyAccessError, "which is not a public one"):
        ask(settings(key_private_hosts=None), f"kbs://{host}:{peer.port}/{PATH}")
    assert peer.calls == []


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://kbs.example", "http is not encrypted"), ("http://localhost:1", "http is not encrypted"),
        ("kbs.example", "no URL"), ("ftp://kbs.example", "no URL"), ("https://kbs.example/kbs/v0", "without a path"),
        ("https://kbs.example/../", "'.' or '..'"), ("https://localhost:99999", "a port that does not exist"), ("", "no URL"),
    ],
)  # fmt: skip
def test_a33_default_brokers_that_cannot_be(url, words, settings):
    with refused(KeyAccessError, words):
        ask(settings(kbs_url=url))


def test_a33_no_default_broker(settings, peer):
    with refused(KeyAccessError, "there is no default one", "set kbs_url or SECURE_LOADER_KBS_URL"):
        ask(settings(kbs_url=None))


def test_a33_no_way_down_to_http(settings, peer):
    """Not by the reference, not where a development broker is allowed, and not beyond this machine."""
    with brokering(None) as plain:
        plain.resources[PATH] = JWK
        for more in ({}, {"insecure_allow_http_loopback": True}):
            with refused(KeySourceUnreachableError, "cannot be reached: "):
                ask(settings(**more), f"kbs://localhost:{plain.port}/{PATH}")
            with refused(KeyAccessError, "http is not encrypted"):
                ask(settings(**more, kbs_url="http://kbs.example:8080"))
        assert plain.calls == []


def test_a33_a_broker_that_nobody_vouches_for(settings, peer, tmp_path):
    with refused(KeySourceUnreachableError, "its certificate is refused"):
        ask(settings(key_ca_file=Authority(tmp_path, "other").file))
    assert peer.calls == []


def test_a33_a_file_does_not_choose_the_broker(settings, peer, tmp_path, localhost):
    """Not even one whose signer is trusted: an address of a key in a header is passed over."""
    path = build_file(tmp_path / "model.safetensors")
    with brokering(localhost) as evil:

        def change(doc):
            def point(v):
                v["enc"] = dict(sorted((v["enc"] | {"jku": f"kbs://localhost:{evil.port}/{PATH}"}).items()))

            inner(doc, "__crypto_keys__", point)

        rewrite(path, change, sign=SIGN)
        session = Session(keys=f"kbs:///{PATH}", trust=trust(), config=settings())
        with session.open(path, "numpy") as f:
            assert (f.get_tensor("small") == arrays()["small"]).all()
        assert len(peer.calls) == 3
        assert evil.calls == []


def test_a33_nothing_is_asked_for_a_file_that_nobody_trusted_signed(settings, peer, tmp_path):
    path = build_file(tmp_path / "model.safetensors", signing=MALLORY)
    session = Session(keys=f"kbs:///{PATH}", trust=trust(), config=settings())
    with refused(UntrustedSignerError), session.open(path, "numpy") as f:
        f.get_tensors()
    assert peer.calls == []


def test_a33_the_hub_is_asked_on_loopback_alone(settings, peer):
    for authority in ("localhost", "127.0.0.1:8006", "evil.example"):
        with refused(KeyAccessError, "must not name a host under kbs_mode"):
            ask(settings(kbs_mode="cdh"), f"kbs://{authority}/{PATH}")


# --- 33: sessions --------------------------------------------------------------------------------------------------


def set_cookies(*cookies: str):
    def fault(call):
        call.fields = [("Set-Cookie", c) for c in cookies]

    return fault


@pytest.mark.parametrize(
    "cookies",
    [
        ("kbs-session-id=",), ("kbs-session-id=a b",), ('kbs-session-id="a"',), ("kbs-session-id=a,b",),
        ("kbs-session-id=" + "a" * 513,), ("kbs-session-id=a", "kbs-session-id=b"), ("KBS-Session-ID=a",),
        ("kbs-session-id=\u00fc",), ("kbs-session-id=a\tb",),
    ],
    ids=range(9),
)  # fmt: skip
def test_a33_sessions_that_are_none(cookies, settings, peer):
    peer.faults["auth"] = set_cookies(*cookies)
    with refused(KeySourceResponseError, "names no session, or several"):
        ask(settings())
    assert peer.paths() == ["/auth"]


@pytest.mark.parametrize("cookies", [(), ("other=1",), ("x=kbs-session-id=a",)], ids=range(3))
def test_a33_no_session(cookies, settings, peer):
    peer.faults["auth"] = set_cookies(*cookies)
    with refused(KeySourceResponseError, "begins no session"):
        ask(settings())
    assert peer.paths() == ["/auth"]


def test_a33_a_session_put_under_us(settings, peer):
    """Whoever gets our evidence into a session of his own would be handed what we were to have."""
    peer.faults["attest"] = set_cookies("kbs-session-id=" + "0" * 32)
    with refused(KeySourceResponseError, "changes the session after it was attested"):
        ask(settings())
    assert peer.paths() == ["/auth", "/attest"]


def test_a33_a_nonce_that_comes_twice(settings, peer):
    nonce = base64.b64encode(secrets.token_bytes(32)).decode()

    def same(call):
        call.say({"nonce": nonce, "extra-params": ""})
        for session in peer.sessions.values():
            session.nonce = nonce

    peer.faults["auth"] = same
    peer.faults["attest"] = lambda call: peer.sessions.clear()
    with refused(KeySourceResponseError, "sends the same nonce twice"):
        ask(settings())
    assert peer.paths() == ["/auth", "/attest", f"/resource/{PATH}", "/auth"]


N32 = base64.b64encode(bytes(32)).decode()
CHALLENGES = [
    {}, [], None, "x", {"nonce": None}, {"nonce": 1}, {"nonce": ""}, {"nonce": N32[:-1]}, {"nonce": N32 + "A"},
    {"nonce": base64.b64encode(bytes(31)).decode()}, {"nonce": base64.b64encode(bytes(33)).decode()}, {"nonce": "\u00fc" * 44},
    {"nonce": N32, "extra-params": {"selected-hash-algorithm": "md5"}},
    {"nonce": N32, "extra-params": {"selected-hash-algorithm": None}},
    {"nonce": N32, "extra-params": {"selected-hash-algorithm": "sha1"}},
]  # fmt: skip


@pytest.mark.parametrize("challenge", CHALLENGES, ids=range(len(CHALLENGES)))
def test_a33_challenges_that_are_none(challenge, settings, peer):
    peer.faults["auth"] = lambda call: call.say(challenge)
    with refused(KeySourceResponseError, "the challenge "):
        ask(settings())
    assert peer.paths() == ["/auth"]


@pytest.mark.parametrize(
    "said", [{}, [], {"token": None}, {"token": ""}, {"token": "a.b"}, {"token": "a.b.c.d"}], ids=range(6)
)
def test_a33_an_attestation_without_a_token(said, settings, peer):
    peer.faults["attest"] = lambda call: call.say(said)
    with refused(KeySourceResponseError, "holds no token"):
        ask(settings())
    assert peer.paths() == ["/auth", "/attest"]


# --- 33: what comes back -------------------------------------------------------------------------------------------


def header(**changes):
    """A JWE that is right but for its header, which is authenticated as it stands."""
    return lambda key: encrypt(key, JWK, **changes)


def epk(**changes):
    return lambda key: encrypt(key, JWK, epk=point() | changes)


def point(curve: ec.EllipticCurve | None = None) -> dict[str, str]:
    key = ec.generate_private_key(curve or ec.SECP256R1()).public_key()
    return {"kty": "EC", "crv": "P-256"} | coordinates(key)


def member(name: str, change):
    def make(key):
        doc = encrypt(key, JWK)
        return doc | {name: change(doc[name])}

    return make


def flipped(text: str) -> str:
    data = bytearray(unb64url(text))
    data[0] ^= 1
    return b64url(bytes(data))


def without(name: str):
    def make(key):
        doc = encrypt(key, JWK)
        del doc[name]
        return doc

    return make


P256 = 0xFFFFFFFF00000001000000000000000000000000FFFFFFFFFFFFFFFFFFFFFFFF
RESOURCES = {
    "rsa": (header(alg="RSA1_5"), "is not encrypted by ECDH-ES+A256KW and A256GCM"),
    "rsa-oaep": (header(alg="RSA-OAEP-256"), "is not encrypted by"),
    "direct": (header(alg="dir"), "is not encrypted by"),
    "ecdh-direct": (header(alg="ECDH-ES"), "is not encrypted by"),
    "a128kw": (header(alg="ECDH-ES+A128KW"), "is not encrypted by"),
    "alg-case": (header(alg="ecdh-es+a256kw"), "is not encrypted by"),
    "alg-list": (header(alg=["ECDH-ES+A256KW"]), "is not encrypted by"),
    "alg-none": (header(alg="none"), "is not encrypted by"),
    "cbc": (header(enc="A256CBC-HS512"), "is not encrypted by"),
    "a128gcm": (header(enc="A128GCM"), "is not encrypted by"),
    "zip": (header(zip="DEF"), "it has 'zip'"),
    "crit": (header(crit=["b64"], b64=False), "it has 'b64'"),
    "jku": (header(jku="https://evil.example/"), "it has 'jku'"),
    "apu": (header(apu="QWxpY2U"), "it has 'apu'"),
    "p-384": (epk(crv="P-384", **coordinates(ec.generate_private_key(ec.SECP384R1()).public_key())), "not a P-256 key"),
    "p-384-as-p-256": (epk(**coordinates(ec.generate_private_key(ec.SECP384R1()).public_key())), "48 bytes instead of 32"),
    "x25519": (epk(kty="OKP", crv="X25519"), "not a P-256 key"),
    "off-curve": (epk(x=b64url(bytes(31) + b"\x05"), y=b64url(bytes(31) + b"\x07")), "not a point on P-256"),
    "zero": (epk(x=b64url(bytes(32)), y=b64url(bytes(32))), "not a point on P-256"),
    "beyond": (epk(x=b64url(P256.to_bytes(32, "big"))), "not a point on P-256"),
    "short-x": (epk(x=b64url(bytes(31))), "31 bytes instead of 32"),
    "long-y": (epk(y=b64url(bytes(33))), "33 bytes instead of 32"),
    "private": (epk(d=b64url(bytes(32))), "it has 'd'"),
    "padded": (epk(x=b64url(bytes(32)) + "="), "not base64url"),
    "epk-text": (header(epk="x"), "its epk does not have just the members"),
    "other-key": (lambda _: encrypt(ec.generate_private_key(ec.SECP256R1()).public_key(), JWK), "encrypted to another key"),
    "wrapped-key": (member("encrypted_key", flipped), "encrypted to another key, or altered"),
    "wrapped-short": (member("encrypted_key", lambda t: b64url(unb64url(t)[:24])), "24 bytes instead of 40"),
    "wrapped-long": (member("encrypted_key", lambda t: b64url(unb64url(t) + bytes(8))), "48 bytes instead of 40"),
    "iv": (member("iv", flipped), "it was altered"),
    "iv-long": (member("iv", lambda _: b64url(bytes(16))), "16 bytes instead of 12"),
    "iv-empty": (member("iv", lambda _: ""), "0 bytes instead of 12"),
    "tag": (member("tag", flipped), "it was altered"),
    "tag-short": (member("tag", lambda t: b64url(unb64url(t)[:12])), "12 bytes instead of 16"),
    "ciphertext": (member("ciphertext", flipped), "it was altered"),
    "ciphertext-cut": (member("ciphertext", lambda t: t[:-4]), "it was altered"),
    "ciphertext-spelling": (member("ciphertext", lambda t: t + "\n"), "not base64url"),
    "number": (member("tag", lambda _: 5), "not base64url"),
    "protected": (member("protected", lambda t: b64url(unb64url(t).replace(b'"alg"', b' "alg"'))), "it was altered"),
    "protected-text": (member("protected", lambda _: b64url(b"x")), "not valid JSON"),
    "no-tag": (without("tag"), "does not have just the members"),
    "unprotected": (lambda k: encrypt(k, JWK) | {"unprotected": {"zip": "DEF"}}, "it has 'unprotected'"),
    "header": (lambda k: encrypt(k, JWK) | {"header": {"alg": "dir"}}, "it has 'header'"),
    "aad": (lambda k: encrypt(k, JWK) | {"aad": "eA"}, "it has 'aad'"),
    "recipients": (lambda k: {"recipients": [], **encrypt(k, JWK)}, "it has 'recipients'"),
    "compact": (lambda k: ".".join(encrypt(k, JWK).values()), "does not have just the members"),
    "clear": (lambda _: KEY.document(), "does not have just the members"),
    "list": (lambda k: [encrypt(k, JWK)], "does not have just the members"),
}  # fmt: skip


@pytest.mark.parametrize("name", RESOURCES)
def test_a33_resources_that_are_not_opened(name, settings, peer):
    make, words = RESOURCES[name]
    peer.faults["resource"] = lambda call: call.say(make(client_key(peer)))
    with refused(KeySourceResponseError, f"key source https://localhost:{peer.port}: ", words):
        ask(settings())
    assert len(peer.calls) == 3


@pytest.mark.parametrize("name", ["rsa", "zip", "other-key", "off-curve"])
def test_a33_with_a_token_as_well(name, settings, peer, tmp_path):
    key = ec.generate_private_key(ec.SECP256R1())
    for file, text in (
        ("token", peer.issue(key.public_key()).encode()),
        ("key", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())),
    ):
        (tmp_path / file).touch(0o600)
        (tmp_path / file).write_bytes(text)
    make, words = RESOURCES[name]
    peer.faults["resource"] = lambda call: call.say(make(key.public_key()))
    files = {"kbs_token_file": str(tmp_path / "token"), "kbs_token_key_file": str(tmp_path / "key")}
    with refused(KeySourceResponseError, words):
        ask(settings(kbs_mode="token", **files))
    assert len(peer.calls) == 1


RAW = bytes(KEY.secret.reveal())
CONTENTS = {
    "empty": (b"", "neither a JWK nor the 32 bytes of a key (0 bytes)"),
    "short": (RAW[:31], "(31 bytes)"),
    "long": (RAW + b"\n", "(33 bytes)"),
    "half": (RAW[:16], "(16 bytes)"),
    "hex": (RAW.hex().encode(), "(64 bytes)"),
    "base64": (base64.b64encode(RAW), "(44 bytes)"),
    "list": (b"[" + JWK + b"]", "neither a JWK nor"),
    "cut": (JWK[:-1], "the resource: the JWK is not"),
    "rsa": (JWK.replace(b'"oct"', b'"RSA"'), "kty"),
    "signing": (JWK.replace(b'"enc"', b'"sig"'), "not meant for this use"),
    "twice": (b'{"keys":[' + JWK + b"," + JWK + b"]}", "two keys share the kid"),
    "short-k": (JWK.replace(KEY.document()["k"].encode(), b64url(RAW[:16]).encode()), "16 bytes instead of 32"),
}


@pytest.mark.parametrize("mode", ["attest", "cdh"])
@pytest.mark.parametrize("name", CONTENTS)
def test_a33_contents_that_are_no_key(name, mode, settings, peer):
    content, words = CONTENTS[name]
    with brokering(None) if mode == "cdh" else contextlib.nullcontext(peer) as broker:
        broker.resources[PATH] = content
        with refused(KeySourceResponseError, words):
            ask(settings(kbs_mode=mode, kbs_cdh_port=broker.port))


def test_a33_a_key_that_is_another(settings, peer):
    """32 bytes of the broker's choice: the signed check value of the file says which they have to be."""
    peer.resources[PATH] = bytes(reversed(RAW))
    with refused(KeyAccessError, "key check value differs"):
        ask(settings())


def test_a33_nothing_secret_is_in_errors_and_frames(settings, peer):
    """Crash reporters print local variables."""
    for content in (RAW + b"x", JWK[:-1], JWK.replace(b'"oct"', b'"RSA"'), JWK.replace(b'"use"', b'"use" 1')):
        peer.resources[PATH] = content
        with pytest.raises(KeySourceResponseError) as caught:
            ask(settings())
        frames = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
        assert_no_secret("".join(line for line in frames.format() if "tests/" not in line))
        error: BaseException | None = caught.value
        while error is not None:
            assert_no_secret(repr((error.args, vars(error))))
            error = error.__cause__ or error.__context__
        caught.value.__traceback__ = None


def send(data: bytes):
    def fault(call):
        call.connection.sendall(data)
        return True

    return fault


def redirect(call):
    call.status, call.fields = 307, [("Location", "https://localhost:1/kbs/v0/auth")]


def zipped(call):
    call.fields.append(("Content-Encoding", "gzip"))


def huge(call):
    call.answer += b" " * (1 << 20)


def html(call):
    call.answer = b"<!doctype html><title>Sign in</title>"


ODD = {
    "redirect": (redirect, "redirects (HTTP 307)"),
    "compressed": (zipped, "compressed"),
    "huge": (huge, "answers with more than 1048576 bytes"),
    "html": (html, "not valid JSON"),
    "cut": (send(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{"), "ends its answer too early"),
    "no-http": (send(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), "not HTTP"),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ODD)
def test_a33_answers_that_are_refused_at_every_step(name, step, settings, peer):
    peer.faults[step], words = ODD[name]
    with refused(KeySourceResponseError, f"key source https://localhost:{peer.port}", words):
        ask(settings())
    assert len(peer.calls) == STEPS.index(step) + 1


# --- 34: down, slow, or no -----------------------------------------------------------------------------------------


def test_a34_no_broker(settings):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for mode, where in (("attest", f"https://localhost:{port}"), ("cdh", f"http://127.0.0.1:{port}")):
        config = settings(kbs_mode=mode, kbs_url=f"https://localhost:{port}", kbs_cdh_port=port)
        with in_time(4), refused(KeySourceUnreachableError, f"{where} cannot be reached: Connection refused"):
            ask(config)


def hang(call):
    call.stop.wait(0.9)
    return True


def drip(call):
    with contextlib.suppress(OSError):
        for byte in b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 10:
            call.connection.sendall(bytes([byte]))
            if call.stop.wait(0.02):
                break
    return True


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("fault", [hang, drip])
def test_a34_slow_at_any_step(fault, step, settings, peer):
    peer.faults[step] = fault
    with in_time(4), refused(KeySourceUnreachableError, "no complete answer within 0.5 s"):
        ask(settings(key_timeout_seconds=0.5))
    assert len(peer.calls) == STEPS.index(step) + 1


def test_a34_one_deadline_for_all_steps(settings, peer):
    """Each answer would be in time."""
    for step in STEPS:
        peer.faults[step] = lambda call: call.stop.wait(0.3) and None
    with in_time(4), refused(KeySourceUnreachableError, "no complete answer within 0.6 s"):
        ask(settings(key_timeout_seconds=0.6))


def test_a34_evidence_that_never_comes(settings, peer, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(evidence.SampleProvider, "evidence", lambda self, data: release.wait(30))
    try:
        with in_time(4), refused(KeySourceUnreachableError, "there is no evidence for", "within 0.4 s"):
            ask(settings(key_timeout_seconds=0.4))
    finally:
        release.set()
    assert peer.paths() == ["/auth"]


def say(kind: str, status: int = 401):
    def fault(call):
        call.status, call.fields = status, []
        call.say({"type": ERRORS + kind, "detail": "hunter2"})

    return fault


UNREACHABLE, DENIED, ODDITY = KeySourceUnreachableError, KeySourceDeniedError, KeySourceResponseError


@pytest.mark.parametrize("status", [401, 404, 503])
@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("PolicyDeny", DENIED, "denied by broker policy"),
        ("TokenVerifierError", DENIED, "does not accept the attestation token"),
        ("PluginInternalError", ODDITY, "has no such resource, or cannot read it"),
        ("PluginNotFound", ODDITY, "has no such resource"),
        ("PolicyEngineError", UNREACHABLE, "is out of order (PolicyEngineError)"),
        ("JweError", ODDITY, "answers with the error JweError"),
    ],
)
def test_a34_the_type_of_an_error_decides(kind, error, words, status, settings, peer):
    """Not its status. And nothing is asked again."""
    peer.faults["resource"] = say(kind, status)
    with refused(error, f"key source https://localhost:{peer.port}", words):
        ask(settings())
    assert len(peer.calls) == 3


@pytest.mark.parametrize(
    ("step", "error", "words"),
    [
        ("auth", ODDITY, "begins no attestation of 'sample' by protocol 0.4.0"),
        ("attest", DENIED, "does not accept the evidence"),
    ],
)
def test_a34_an_attestation_that_fails(step, error, words, settings, peer):
    peer.faults[step] = say("AttestationError")
    with refused(error, words):
        ask(settings())
    assert len(peer.calls) == STEPS.index(step) + 1


def test_a34_what_a_broker_says_in_detail_is_not_repeated(settings, peer):
    """It may hold anything, terminal escapes and what others sent there included."""
    for step in STEPS:
        for kind in ("AttestationError", "PolicyDeny", "PluginInternalError", "PolicyEngineError", "Whatever"):
            peer.faults = {step: say(kind)}
            with pytest.raises(KeyAccessError) as caught:
                ask(settings())
            assert "hunter2" not in str(caught.value)


def test_a34_a_broker_that_always_forgets(settings, peer):
    """Answers of 401 without an end: two sessions, and that is it."""
    peer.faults["resource"] = say("TokenNotFound")
    with refused(KeySourceDeniedError, "knows neither a session nor a token of ours"):
        ask(settings())
    assert peer.paths() == 2 * ["/auth", "/attest", f"/resource/{PATH}"]


def test_a34_a_cookie_that_gets_lost(settings, peer):
    """As behind a balancer that asks another broker each time."""
    peer.faults["auth"] = lambda call: peer.sessions.clear()
    with refused(KeySourceDeniedError, "does not accept the evidence"):
        ask(settings())
    assert peer.paths() == ["/auth", "/attest"]


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (503, b"<html>Busy</html>", UNREACHABLE, "is out of order (HTTP 503)"),
        (429, b"slow down", UNREACHABLE, "is out of order (HTTP 429)"),
        (401, b"<html>Sign in</html>", ODDITY, "answers HTTP 401, and not as a broker does"),
        (403, b"{}", ODDITY, "answers HTTP 403, and not as a broker does"),
        (404, b'{"type": 5}', ODDITY, "answers HTTP 404, and not as a broker does"),
        (204, b"", ODDITY, "answers HTTP 204, and not as a broker does"),
        (401, b'{"type": "https://x/errors/PolicyDeny\\n"}', ODDITY, "answers HTTP 401"),
        (401, b'{"type": "PolicyDeny"}', ODDITY, "answers HTTP 401"),
    ],
)
def test_a34_what_stands_before_the_broker(status, body, error, words, settings, peer):
    def fault(call):
        call.status, call.answer, call.fields = status, body, []

    for step in STEPS:
        peer.faults = {step: fault}
        peer.calls.clear()
        with refused(error, words):
            ask(settings())
        assert len(peer.calls) == STEPS.index(step) + 1


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (500, UNREACHABLE, "did not get the key (HTTP 500)"),
        (429, UNREACHABLE, "did not get the key (HTTP 429)"),
        (401, DENIED, "denies the key (HTTP 401)"),
        (403, DENIED, "denies the key (HTTP 403)"),
        (404, ODDITY, "has no such resource (HTTP 404)"),
        (204, ODDITY, "has no such resource (HTTP 204)"),
    ],
)
def test_a34_a_hub_that_gets_nothing(status, error, words, settings):
    with serving(None, answer(JWK, f"{status} X")) as hub:
        with refused(error, f"key source http://127.0.0.1:{hub.port} ", words, "its log says"):
            ask(settings(kbs_mode="cdh", kbs_cdh_port=hub.port))
        assert hub.connections == 1


def test_a34_a_hub_that_hangs(settings):
    with brokering(None) as hub, in_time(4):
        hub.faults["cdh"] = hang
        with refused(KeySourceUnreachableError, "no complete answer within 0.3 s"):
            ask(settings(kbs_mode="cdh", kbs_cdh_port=hub.port, key_timeout_seconds=0.3))


def test_a34_no_other_source_hides_a_broker(settings, peer, tmp_path):
    path = build_file(tmp_path / "model.safetensors")
    peer.denied.add(PATH)
    for keys in ([f"kbs:///{PATH}", KEY], [KEY, f"kbs:///{PATH}"]):
        session = Session(keys=keys, trust=trust(), config=settings())
        with refused(KeySourceDeniedError, "denied by broker policy"), session.open(path, "numpy") as f:
            f.get_tensor("small")


def test_a33_sample_evidence_is_no_accident():
    with pytest.raises(ConfigError, match="insecure_kbs_sample_evidence"):
        LoaderConfig(kbs_evidence="sample")
