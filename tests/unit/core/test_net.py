"""The client of network key sources by itself: what providers build on beyond what ``https:`` and ``vault:`` use."""

from __future__ import annotations

import time

import pytest

from secure_loader.core.keys import net
from secure_loader.core.keys.net import Deadline, Rules, Url, parse_url, request
from secure_loader.core.secrets import Secret
from secure_loader.errors import KeyAccessError, KeySourceResponseError, KeySourceUnreachableError
from tests.integration.keys.services import Call, answer, serving

LOOPBACK = Rules(insecure_http_loopback=True)


def at(server, path: str = "/a") -> Url:
    return parse_url(f"http://127.0.0.1:{server.port}{path}", LOOPBACK)


def test_bodies_of_errors_and_headers_for_who_wants_them():
    """Brokers say why in the body of a 401, and hand out cookies."""
    with serving(None, answer(b'{"type":"x"}', "401 Unauthorized", Set_Cookie="id=1")) as server:
        assert request(at(server), LOOPBACK, Deadline()).body == b""
        said = request(at(server), LOOPBACK, Deadline(), want_errors=True)
        assert (said.status, bytes(said.body), said.headers["Set-Cookie"]) == (401, b'{"type":"x"}', "id=1")
        assert "type" not in repr(said)
        said.wipe()
        assert bytes(said.body) == bytes(12)


@pytest.mark.parametrize("limit", [1, 100, 1 << 20])
def test_the_limit_is_to_the_byte(limit):
    with serving(None, answer(b"a" * limit)) as server:
        assert len(request(at(server), LOOPBACK, Deadline(), max_body=limit).body) == limit
        server.script = answer(b"a" * (limit + 1))
        with pytest.raises(KeySourceResponseError, match=f"more than {limit} bytes"):
            request(at(server), LOOPBACK, Deadline(), max_body=limit)


def test_a_body_is_sent_whole():
    received = []

    def script(call: Call) -> None:
        call.connection.settimeout(5)
        body = call.head.partition("\r\n\r\n")[2].encode()
        while len(body) < 300_000:
            body += call.connection.recv(65536)
        received.append(body)
        answer(b"{}")(call)

    with serving(None, script) as server:
        request(at(server, "/b?version=1"), LOOPBACK, Deadline(), method="POST", body=bytearray(b"x" * 300_000))
        head = server.calls[0].splitlines()
        assert head[0] == "POST /b?version=1 HTTP/1.1"
        assert "Content-Length: 300000" in head
        assert received == [b"x" * 300_000]


def test_secrets_in_headers():
    with serving(None, answer(b"{}")) as server:
        request(at(server), LOOPBACK, Deadline(), headers={"X-Token": Secret(b"tok en"), "X-Plain": "y"})
        assert "X-Token: tok en\r\nX-Plain: y\r\n" in server.calls[0]
        for bad in (Secret(b"a\r\nX: y"), Secret(b""), Secret(b" a"), Secret(b"a\xff"), "a\nb", "\u00e9", "\udcff"):
            with pytest.raises(KeyAccessError, match="sent as X-Token holds characters that cannot be") as caught:
                request(at(server), LOOPBACK, Deadline(), headers={"X-Token": bad})
            caught.value.__traceback__ = None
        assert len(server.calls) == 1


def test_a_deadline_ends():
    deadline = Deadline(0.01)
    assert 0 < deadline.left() <= 0.01
    time.sleep(0.02)
    with pytest.raises(TimeoutError):
        deadline.left()


@pytest.mark.parametrize(
    ("text", "origin", "path"),
    [
        ("HTTPS://Keys.Example.COM/A%20b/@c", "https://keys.example.com", "/A%20b/@c"),
        ("https://keys.example.com:443", "https://keys.example.com", "/"),
        ("https://[2606:4700:0::1111]:8443/x", "https://[2606:4700::1111]:8443", "/x"),
        ("https://1.1.1.1/x", "https://1.1.1.1", "/x"),
        ("https://xn--bcher-kva.example/x", "https://xn--bcher-kva.example", "/x"),
        ("https://key_service/x", "https://key_service", "/x"),
    ],
)
def test_urls(text, origin, path):
    url = parse_url(text, Rules())
    assert (url.origin, url.path) == (origin, path)


def test_no_thread_for_the_name_service(monkeypatch):
    def refuse(work, name):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(net, "start", refuse)
    url = parse_url("https://keys.example.com/a", Rules())
    with pytest.raises(KeySourceUnreachableError, match="cannot be resolved \\(the system gives no more threads\\)"):
        request(url, Rules(), Deadline(5))
