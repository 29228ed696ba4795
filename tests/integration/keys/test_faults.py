"""Key services and ways to them that break, at every step: a typed error by the deadline, and never a key after all.

Whatever goes wrong, the answer that is damaged here holds the right key, and another source has it as well. Every case
is tried with every service that brings or unwraps a key over the network by the client of :mod:`core.keys.net`; brokers
have cases of their own (tests/attacks/test_broker.py).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import pytest
from cryptography.hazmat.primitives import serialization

from secure_loader.config import LoaderConfig
from secure_loader.core.keys.provider import KeyRequest, KeyRing
from secure_loader.core.recipient import Recipient
from secure_loader.errors import KeyAccessError, KeySourceResponseError, KeySourceUnreachableError
from tests.attacks.kit import KEY, assert_no_secret
from tests.integration.keys.services import (
    Authority,
    Call,
    Identity,
    Script,
    answer,
    drip,
    flood,
    hang,
    key_set,
    raw,
    request_for,
    reset,
    serving,
    zipped,
)

SECONDS = 0.2
TOKEN, SECRET_ID = "hvs.a-token-that-must-not-be-shown", "a-secret-id-that-must-not-be-shown"
WRAPPED = Recipient("vault-transit", "transit/keys/demo", b"vault:v1:" + b"A" * 64)


@dataclass(frozen=True)
class Service:
    """A way to a key.

    Attributes:
        reference: With a place for the port.
        bodies: What the service says, by the end of the path that is asked.
        request: What is asked for.
    """

    reference: str
    bodies: dict[str, bytes]
    request: KeyRequest

    def script(self, call: Call) -> None:
        """As it should be."""
        answer(self.bodies[call.head.split()[1].rpartition("/")[2]])(call)

    def first(self) -> bytes:
        """What it says to the first request of a load."""
        return next(iter(self.bodies.values()))


def kv() -> bytes:
    return json.dumps({"data": {"data": KEY.document(), "metadata": {"version": 1}}}).encode()


LOGIN = json.dumps({"auth": {"client_token": TOKEN}}).encode()
PLAIN = json.dumps({"data": {"plaintext": base64.b64encode(KEY.secret.reveal()).decode()}}).encode()
KV = "vault:https://localhost:%d/secret/data/models/demo"
SERVICES = {
    "https": Service("https://localhost:%d/keys.json", {"keys.json": key_set(KEY)}, request_for(KEY)),
    "vault": Service(KV, {"demo": kv()}, request_for(KEY)),
    "vault-login": Service(KV, {"login": LOGIN, "demo": kv()}, request_for(KEY)),
    "transit": Service(
        "transit:https://localhost:%d/transit/keys/demo", {"demo": PLAIN}, request_for(KEY, recipients=(WRAPPED,))
    ),
}


@pytest.fixture(params=SERVICES)
def service(request, tmp_path, monkeypatch, authority) -> Service:
    for name in [name for name in os.environ if name.startswith(("VAULT_", "BAO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("VAULT_CACERT", str(authority.file))
    named = "VAULT_SECRET_ID_FILE" if request.param == "vault-login" else "VAULT_TOKEN_FILE"
    place = tmp_path / named
    place.touch(0o600)
    place.write_text(SECRET_ID if request.param == "vault-login" else TOKEN)
    monkeypatch.setenv(named, str(place))
    if request.param == "vault-login":
        monkeypatch.setenv("VAULT_ROLE_ID", "loader")
    return SERVICES[request.param]


@pytest.fixture
def config(authority) -> LoaderConfig:
    return LoaderConfig(key_private_hosts=["localhost"], key_ca_file=authority.file, key_timeout_seconds=SECONDS)


@contextlib.contextmanager
def fails(service: Service, port: int, config: LoaderConfig, *kinds: type[KeyAccessError]) -> Iterator[list[str]]:
    """Asked before and behind another source that has the key: the same error, each within its deadline."""
    said: list[str] = []
    reference = service.reference % port
    for sources in ([reference, KEY], [KEY, reference]):
        start = time.monotonic()
        with pytest.raises(KeyAccessError) as caught:
            KeyRing(sources, config).resolve(service.request)
        assert time.monotonic() - start < config.key_timeout_seconds + 2, "on a slow machine too"
        assert type(caught.value) in kinds, repr(caught.value)
        text = str(caught.value)
        assert f"key source https://localhost:{port}" in text
        assert_no_secret(text)
        assert TOKEN not in text
        assert SECRET_ID not in text
        said.append(text)
    yield said


def test_without_a_fault(service, config, localhost):
    """Or nothing below would show anything."""
    with serving(localhost, service.script) as server:
        found: Any = KeyRing([service.reference % server.port], config).resolve(service.request)
        assert bytes(found.secret.reveal()) == bytes(KEY.secret.reveal())
        assert len(server.calls) == len(service.bodies)


# --- before there is a connection to trust ---------------------------------------------------------------------------


class Listener:
    """Accepts connections of TCP and does something with each."""

    def __init__(self, script: Callable[[socket.socket, threading.Event], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.02)
        self.port: int = self._listener.getsockname()[1]
        self._script, self._stop = script, threading.Event()
        self._threads = [threading.Thread(target=self._run, name="listener")]
        self._threads[0].start()

    def _run(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                connection, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(connection,), name="listener")
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.settimeout(10)
            self._script(connection, self._stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()


def tear(connection: socket.socket) -> None:
    """Reset it when it is closed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def torn_at_once(connection: socket.socket, stop: threading.Event) -> None:
    tear(connection)


def torn_in_the_handshake(connection: socket.socket, stop: threading.Event) -> None:
    connection.recv(4096)
    connection.sendall(b"\x16\x03\x03\x00\x7a\x02\x00")
    tear(connection)


def closed_in_the_handshake(connection: socket.socket, stop: threading.Event) -> None:
    connection.recv(4096)
    connection.sendall(b"\x16\x03\x03\x00\x7a\x02\x00")


def silent(connection: socket.socket, stop: threading.Event) -> None:
    stop.wait(20)


def trickling(connection: socket.socket, stop: threading.Event) -> None:
    connection.sendall(b"\x16\x03\x03\x40\x00")
    while not stop.wait(0.02):
        connection.sendall(b"\x02")


def without_tls(connection: socket.socket, stop: threading.Event) -> None:
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")


def alerting(connection: socket.socket, stop: threading.Event) -> None:
    connection.recv(4096)
    connection.sendall(b"\x15\x03\x03\x00\x02\x02\x28")


@pytest.mark.parametrize(
    "script",
    [
        torn_at_once,
        torn_in_the_handshake,
        closed_in_the_handshake,
        silent,
        trickling,
        without_tls,
        alerting,
    ],
    ids=lambda f: f.__name__,
)
def test_no_connection(service, config, script):
    with Listener(script) as listener, fails(service, listener.port, config, KeySourceUnreachableError) as said:
        assert all("cannot be reached: " in text for text in said)


def test_nobody_listens(service, config):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with fails(service, port, config, KeySourceUnreachableError) as said:
        assert all("Connection refused" in text for text in said)


@pytest.fixture(scope="module")
def impostors(authority, tmp_path_factory) -> dict[str, Identity]:
    folder = tmp_path_factory.mktemp("impostors")
    alone = Authority(folder, "localhost")
    key = folder / "alone.key"
    key.touch(0o600)
    key.write_bytes(
        alone._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return {
        "another name": authority.issue("example.org"),
        "an address": authority.issue("127.0.0.1"),
        "expired": authority.issue("localhost", days=-1),
        "for clients": authority.issue("localhost", client=True),
        "unknown authority": Authority(folder, "others").issue("localhost"),
        "self-signed": Identity(alone.file, key),
    }


@pytest.mark.parametrize(
    "who", ["another name", "an address", "expired", "for clients", "unknown authority", "self-signed"]
)
def test_certificates_that_vouch_for_nothing(service, config, impostors, who):
    # This is not about the deadline, and a busy machine may take its time.
    config = config.replace({"key_timeout_seconds": 30})
    with (
        serving(impostors[who], service.script) as server,
        fails(service, server.port, config, KeySourceUnreachableError) as said,
    ):
        assert all("its certificate is refused" in text for text in said)
        assert server.calls == [], "nothing was said to it"


# --- when the answer comes -------------------------------------------------------------------------------------------


def head(length: object, *more: bytes) -> bytes:
    return b"\r\n".join([b"HTTP/1.1 200 OK", b"Content-Length: %b" % str(length).encode(), *more, b"", b""])


def then_reset(data: bytes) -> Script:
    def script(call: Call) -> None:
        call.send(data)
        reset(call)

    return script


def then_hang(data: bytes) -> Script:
    def script(call: Call) -> None:
        call.send(data)
        hang(call)

    return script


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
DOWN, WRONG = (KeySourceUnreachableError,), (KeySourceResponseError,)
# What a genuine body becomes, and what that is. An end without the farewell of TLS may be told as either.
FAULTS: dict[str, tuple[Callable[[bytes], Script], tuple[type[KeyAccessError], ...]]] = {
    "nothing": (lambda body: raw(b""), DOWN),
    "reset before the head": (lambda body: reset, DOWN),
    "reset in the head": (lambda body: then_reset(b"HTTP/1.1 200 OK\r\nContent-"), DOWN),
    "closed in the head": (lambda body: raw(b"HTTP/1.1 200"), WRONG),
    "reset before the body": (lambda body: then_reset(head(len(body))), DOWN),
    "reset in the body": (lambda body: then_reset(head(len(body)) + body[:-1]), DOWN),
    "closed in the body": (lambda body: raw(head(len(body)) + body[:-1]), WRONG),
    "silence": (lambda body: hang, DOWN),
    "silence after the head": (lambda body: then_hang(head(len(body))), DOWN),
    "silence before the last byte": (lambda body: then_hang(head(len(body)) + body[:-1]), DOWN),
    "a byte now and then": (lambda body: drip(body, head=head(len(body))), DOWN),
    "a byte of the head now and then": (lambda body: drip(head(len(body)) + body, head=b""), DOWN),
    "429": (lambda body: answer(body, "429 Too Many Requests", Retry_After="0"), DOWN),
    "500": (lambda body: answer(body, "500 Oops"), DOWN),
    "502": (lambda body: answer(body, "502 Bad Gateway"), DOWN),
    "503": (lambda body: answer(body, "503 Busy", Retry_After="1"), DOWN),
    "504": (lambda body: answer(body, "504 Gateway Timeout"), DOWN),
    "201": (lambda body: answer(body, "201 Created"), WRONG),
    "204": (lambda body: answer(b"", "204 No Content"), WRONG),
    "206": (lambda body: answer(body, "206 Partial Content", Content_Range="bytes 0-1/2"), WRONG),
    "307": (lambda body: answer(body, "307 Temporary Redirect", Location="https://localhost:1/"), WRONG),
    "418": (lambda body: answer(body, "418 I'm a teapot"), WRONG),
    "too long a length": (lambda body: raw(head(len(body) + 1) + body), WRONG),
    "too short a length": (lambda body: raw(head(len(body) - 1) + body), WRONG),
    "no length at all, cut": (lambda body: raw(b"HTTP/1.1 200 OK\r\n\r\n" + body[:-1]), WRONG),
    "a negative length": (lambda body: raw(head(-1) + body[:-1]), WRONG),
    "a length of words": (lambda body: raw(head("many") + body[:-1]), WRONG),
    "a length of none": (lambda body: raw(head(0) + body), WRONG),
    "a length of terabytes": (lambda body: raw(head(1 << 42) + body), WRONG),
    "chunks that are none": (lambda body: raw(CHUNKED + body), WRONG),
    "a chunk with too much in it": (lambda body: raw(CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body) - 1, body)), WRONG),
    "a chunk with too little in it": (lambda body: raw(CHUNKED + b"%x\r\n%b" % (len(body), body[:-1])), WRONG),
    "chunks without an end": (lambda body: raw(CHUNKED + b"%x\r\n%b\r\n" % (len(body), body)), WRONG),
    "a chunk of less than nothing": (lambda body: raw(CHUNKED + b"-1\r\n%b\r\n0\r\n\r\n" % body), WRONG),
    "a chunk of terabytes": (lambda body: raw(CHUNKED + b"fffffffffff\r\n%b" % body), WRONG),
    "chunks of zeros for ever": (lambda body: flood(CHUNKED, b"1\r\n \r\n" * 400), DOWN + WRONG),
    "gzip": (zipped, WRONG),
    "said to be gzip": (lambda body: answer(body, Content_Encoding="gzip"), WRONG),
    "gzip as a transfer coding": (lambda body: raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n" + body), WRONG),
    "a header for ever": (lambda body: flood(b"HTTP/1.1 200 OK\r\nA: ", b"a" * 4096), WRONG),
    "a body for ever": (lambda body: flood(b"HTTP/1.1 200 OK\r\n\r\n", b" " * 4096), WRONG),
    "another protocol": (lambda body: raw(b"220 mail.example ESMTP\r\n"), WRONG),
    "a page to sign in": (lambda body: answer(b"<!doctype html><form>", Content_Type="text/html"), WRONG),
    "an empty answer": (lambda body: answer(b""), WRONG),
    "an answer and a half": (lambda body: answer(body + body[: len(body) // 2]), WRONG),
    "half an answer": (lambda body: answer(body[: len(body) // 2]), WRONG),
    "another encoding": (lambda body: answer(body.decode().encode("utf-16")), WRONG),
    "zeros": (lambda body: answer(bytes(len(body))), WRONG),
}  # fmt: skip


# The first two are all that the others do as well; a few of these suffice to show that they do.
FEW = (
    "reset in the body",
    "silence before the last byte",
    "429",
    "307",
    "too long a length",
    "chunks that are none",
    "gzip",
    "zeros",
)


@pytest.mark.parametrize(
    ("service", "fault"),
    [(name, fault) for name in SERVICES for fault in (FAULTS if name in ("https", "vault") else FEW)],
    indirect=["service"],
)
def test_answers_that_break(service, config, localhost, fault):
    make, kinds = FAULTS[fault]
    with serving(localhost, make(service.first())) as server, fails(service, server.port, config, *kinds):
        assert server.connections == 2, "once for each who asks: no retries"


def test_the_second_answer_breaks(config, localhost, monkeypatch, tmp_path, authority):
    """After a login: one deadline for both, and the token that came shows nowhere."""
    secret_id = tmp_path / "secret-id"
    secret_id.touch(0o600)
    secret_id.write_text(SECRET_ID)
    for name in [name for name in os.environ if name.startswith(("VAULT_", "BAO_"))]:
        monkeypatch.delenv(name)
    for name, value in (
        ("VAULT_ROLE_ID", "loader"),
        ("VAULT_SECRET_ID_FILE", secret_id),
        ("VAULT_CACERT", authority.file),
    ):
        monkeypatch.setenv(name, str(value))
    service = SERVICES["vault-login"]
    for fault in ("silence", "reset in the body", "a byte now and then", "too long a length", "503", "zeros"):
        make, kinds = FAULTS[fault]
        broken = make(service.bodies["demo"])

        def script(call: Call, broken: Script = broken) -> None:
            (answer(LOGIN) if "/login " in call.head else broken)(call)

        with serving(localhost, script) as server, fails(service, server.port, config, *kinds):
            assert len(server.calls) == 4
            assert TOKEN in server.calls[1]


# --- anywhere ---------------------------------------------------------------------------------------------------------


class Cut:
    """A way to a server that ends after so many bytes of the answer, handshake included.

    Args:
        port: Of the server.
        after: Bytes that it lets pass.
        torn: Whether the connection is reset, or closed.
    """

    def __init__(self, port: int, after: int, *, torn: bool) -> None:
        self._to, self._after, self._torn = port, after, torn
        self.passed = 0

    def __call__(self, connection: socket.socket, stop: threading.Event) -> None:
        with socket.create_connection(("127.0.0.1", self._to)) as server:
            back = threading.Thread(target=self._forth, args=(connection, server))
            back.start()
            try:
                self._back(server, connection)
                if self._torn:
                    tear(connection)
            finally:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RD)
                back.join()

    def _back(self, server: socket.socket, connection: socket.socket) -> None:
        while self.passed < self._after and (data := server.recv(min(65536, self._after - self.passed))):
            connection.sendall(data)
            self.passed += len(data)

    @staticmethod
    def _forth(connection: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := connection.recv(65536):
                server.sendall(data)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("torn", [True, False], ids=["torn", "closed"])
def test_cut_anywhere(service, config, localhost, torn):
    """Every hundred bytes or so of all that a server says, from its first to the last of the key."""
    with serving(localhost, service.script) as server:
        whole = Cut(server.port, 1 << 30, torn=False)
        with Listener(whole) as way:
            ask = KeyRing([service.reference % way.port], config)
            assert ask.resolve(service.request) is not None
        # What takes two requests is cut on the first of them.
        every = whole.passed // len(service.bodies)
        # The last bytes are the farewell of TLS, without which a body of the length that was announced is complete.
        cuts = [*range(0, every - 200, max(97, every // 16)), every - 60]
        for after in cuts:
            with Listener(Cut(server.port, after, torn=torn)) as way:
                start = time.monotonic()
                with pytest.raises(KeyAccessError) as caught:
                    KeyRing([service.reference % way.port, KEY], config).resolve(service.request)
                assert type(caught.value) in DOWN + WRONG
                assert time.monotonic() - start < SECONDS + 2
