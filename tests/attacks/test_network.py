"""Key services that are not what they seem, and addresses that must not be asked: 32, 34."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import traceback

import pytest

from secure_loader.config import LoaderConfig, load
from secure_loader.core.keys.addresses import is_public
from secure_loader.core.keys.net import Rules, parse_url
from secure_loader.core.keys.provider import KeyRing, provider
from secure_loader.core.session import Session
from secure_loader.errors import (
    ConfigError,
    KeyAccessError,
    KeySourceDeniedError,
    KeySourceResponseError,
    KeySourceUnreachableError,
    UntrustedSignerError,
)
from tests.attacks.kit import KEY, MALLORY, MALLORY_KEY, assert_no_secret, build_file, refused, trust
from tests.integration.keys.services import (
    Authority,
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


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def localhost(authority):
    return authority.issue("localhost", "127.0.0.1", "::1", "keys.example")


@pytest.fixture
def settings(authority):
    def make(**more) -> LoaderConfig:
        defaults = {"key_private_hosts": ["localhost", "127.0.0.1"], "key_ca_file": authority.file}
        return LoaderConfig(**defaults | {"key_timeout_seconds": 5} | more)

    return make


def ask(where, config: LoaderConfig):
    url = where if isinstance(where, str) else f"https://localhost:{where.port}/keys.json"
    return KeyRing([url], config).resolve(request_for(KEY))


@contextlib.contextmanager
def in_time(seconds: float):
    """Far within what a hanging peer would take, on a slow machine too."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


@pytest.fixture
def names(monkeypatch):
    """A name service: what each name means, one answer after the other. The only peer that cannot be run here."""
    table: dict[str, list[list[str]]] = {}
    asked: list[str] = []

    def getaddrinfo(host, port, *args, **kwargs):
        asked.append(host)
        if host not in table:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        found = table[host].pop(0) if len(table[host]) > 1 else table[host][0]
        return [(socket.AF_INET6 if ":" in a else socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in found]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    table["asked"] = asked  # type: ignore[assignment]
    return table


# --- 32: where to --------------------------------------------------------------------------------------------------

INSIDE = [
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.100.100.200",
    "168.63.129.16", "192.0.0.192", "198.18.0.1", "203.0.113.7", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255",
    "::", "::1", "fe80::1", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254",
    "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a9fe:a9fe::1", "2001:db8::1",
    "2001:0:7f00:1::", "3fff::1", "3fff:fff:ffff::1", "5f00::1", "64:ff9b:1::7f00:1", "100:0:0:1::1",
]  # fmt: skip


@pytest.mark.parametrize("address", INSIDE)
def test_a32_addresses_inside(address, names, settings):
    """As they are, and behind a name."""
    literal = f"[{address}]" if ":" in address else address
    names["keys.example"] = [[address]]
    for host in (literal, "keys.example"):
        with refused(KeyAccessError, "key source https://", "which is not a public one"):
            ask(f"https://{host}/keys.json", settings(key_private_hosts=None))


def test_a32_one_address_inside_is_enough(names, settings, localhost):
    with serving(localhost, answer(key_set(KEY))) as server:
        names["keys.example"] = [["93.184.215.14", "127.0.0.1"]]
        with refused(KeyAccessError, "has the address 127.0.0.1"):
            ask(f"https://keys.example:{server.port}/", settings())
        assert server.connections == 0


def test_a32_public_addresses_are_public():
    import ipaddress

    for text in (
        "93.184.215.14",
        "1.1.1.1",
        "2606:4700:4700::1111",
        "3ffe::1",
        "3fff:1000::1",
        "64:ff9b::101:101",
        "2002:101:101::",
    ):
        assert is_public(ipaddress.ip_address(text)), text


def test_a32_a_name_is_resolved_once(names, settings, localhost):
    """Rebinding: what was checked is what is connected to, whatever the name means a moment later."""
    with serving(localhost, answer(key_set(KEY))) as server, serving(localhost, answer(key_set(MALLORY_KEY))) as evil:
        names["keys.example"] = [["127.0.0.1"], ["::1"], ["169.254.169.254"]]
        config = settings(key_private_hosts=["keys.example"])
        assert ask(f"https://keys.example:{server.port}/", config) is not None
        assert names["asked"] == ["keys.example"]
        assert (server.connections, server.names) == (1, ["keys.example"])
        assert f"Host: keys.example:{server.port}\r\n" in server.calls[0]
        assert evil.connections == 0


def test_a32_a_host_that_is_allowed_allows_no_other(names, settings, localhost):
    with serving(localhost, answer(key_set(KEY))) as server:
        names["other.example"] = names["localhost"] = [["127.0.0.1"]]
        assert ask(server, settings()) is not None
        for host in ("other.example", "127.0.0.2", "[::1]"):
            with refused(KeyAccessError, "is not a public one"):
                ask(f"https://{host}:{server.port}/", settings())
        with refused(KeyAccessError, "is not a public one"):
            ask(server, settings(key_private_hosts=None))
        assert server.connections == 1


@pytest.mark.parametrize(
    "host", ["2130706433", "0x7f000001", "0x7f.1", "127.1", "0177.0.0.1", "127.0.0.1.", "1", "a.0x1"]
)
def test_a32_addresses_in_disguise(host, settings):
    """What ``inet_aton`` makes an address of."""
    with refused(KeyAccessError, "key reference"):
        ask(f"https://{host}/keys.json", settings(key_private_hosts=None))


@pytest.mark.parametrize(
    "url",
    [
        "https://user@host/", "https://user:hunter2@host/", "https://host:hunter2@evil.example/", "https://@host/",
    ],
)  # fmt: skip
def test_a32_user_names_in_urls(url, settings, monkeypatch):
    """Refused, by every way in, and not repeated."""
    for attempt in (
        lambda: parse_url(url, Rules()),
        lambda: provider("https").resolve(url[6:], request_for(KEY)),
        lambda: provider("vault").resolve(url + "secret/data/a", request_for(KEY)),
        lambda: ask(url, settings()),
    ):
        with pytest.raises((KeyAccessError, ConfigError)) as caught:
            attempt()
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "https:///keys", "https://", "https:/host/x", "https:host/x", "https://host\\@evil/", "https://ho st/", "https://host/a b",
        "https://host/\r\nX: y", "https://host/\tx", "https://host:0/", "https://host:65536/", "https://host:x/", "https://host:/",
        "https://h\u00f6st/", "https://host/\u00e9", "https://host/#f", "https://[::1/", "https://[fe80::1%25eth0]/", "https://[v1.x]/",
        "https://host/../x", "https://host/a/%2e%2E/b", "https://-host/", "https://host-/", "https://.host/", "https://host../",
        "https://host/\0", "https://" + "a" * 64 + "/", "https://host/\n", "ftp://host/", "file:///etc/passwd",
    ],
)  # fmt: skip
def test_a32_what_is_no_url(url):
    with refused(KeyAccessError, "key reference"):
        parse_url(url, Rules())


def test_a32_http_is_no_scheme_of_keys(settings, localhost):
    with refused(ConfigError, "no key provider serves 'http': references"):
        ask("http://127.0.0.1/keys.json", settings(insecure_allow_http_loopback=True))
    for url in ("http://127.0.0.1/a", "http://localhost/a", "http://example.org/a"):
        with refused(KeyAccessError, "http is not encrypted"):
            parse_url(url, Rules())
    loopback = Rules(insecure_http_loopback=True)
    assert parse_url("http://localhost:8200/a", loopback).port == 8200
    for url in ("http://example.org/a", "http://10.0.0.1/a", "http://localhost.example.org/a"):
        with refused(KeyAccessError, "http is not encrypted"):
            parse_url(url, loopback)


def test_a32_a_query_is_refused_and_not_shown(settings):
    with refused(KeyAccessError, "must not hold a query"):
        provider("https").resolve("//keys.example/keys.json?token=hunter2", request_for(KEY))
    with pytest.raises(ConfigError, match="keys takes references") as caught:
        ask("https://keys.example/keys.json?token=hunter2", settings())
    assert "hunter2" not in str(caught.value)


# --- 32: what comes back -------------------------------------------------------------------------------------------

SET = key_set(KEY)
ANSWERS = {
    "html": (answer(b"<!doctype html><title>Sign in</title>", Content_Type="text/html"), "is not valid JSON"),
    "redirect-file": (answer(b"", "302 Found", Location="file:///etc/passwd"), "redirects (HTTP 302)"),
    "redirect-http": (answer(SET, "301 Moved", Location="http://127.0.0.1/"), "redirects (HTTP 301)"),
    "redirect-metadata": (answer(b"", "307 X", Location="https://169.254.169.254/latest/"), "redirects (HTTP 307)"),
    "redirect-refresh": (answer(b"", "200 OK", Refresh="0; url=http://127.0.0.1/"), "JSON"),
    "gzip": (zipped(SET), "compressed"),
    "gzip-bomb": (zipped(SET + b" " * 10_000_000), "compressed"),
    "brotli": (answer(SET, Content_Encoding="br"), "compressed"),
    "gzip-te": (raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n" + SET), "transfer coding"),
    "huge": (answer(SET + b" " * 65536), "more than 65536 bytes"),
    "huge-length": (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n{}"), "ends its answer too early"),
    "endless": (flood(b"HTTP/1.1 200 OK\r\n\r\n", b" " * 1000), "more than 65536 bytes"),
    "endless-chunks": (flood(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n" * 500), "more than"),
    "chunk-extensions": (
        flood(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1;" + b"x" * 9000 + b"\r\n \r\n"),
        "more than a key service has to say",
    ),
    "chunk-size": (raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n"), "ends its answer too early"),
    "chunk-negative": (raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n{}\r\n0\r\n\r\n"), ""),
    "headers": (flood(b"HTTP/1.1 200 OK\r\n", b"A: b\r\n" * 100), "not HTTP"),
    "header": (flood(b"HTTP/1.1 200 OK\r\nA: ", b"a" * 1000), "not HTTP"),
    "continue": (flood(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 40), "more than a key service has to say"),
    "cut": (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n" + SET[:20]), "ends its answer too early"),
    "cut-chunk": (raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{"), "too early"),
    "no-http": (raw(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), "not HTTP"),
    "http-0.9": (raw(SET + b"\r\n"), "not HTTP"),
    "http-2": (raw(b"HTTP/2 200\r\n\r\n"), "not HTTP"),
    "status": (raw(b"HTTP/1.1 2000 OK\r\n\r\n"), "not HTTP"),
    "no-content": (answer(b"", "204 No Content"), "HTTP 204"),
    "partial": (answer(SET, "206 Partial"), "HTTP 206"),
    "switching": (raw(b"HTTP/1.1 101 Switching\r\n\r\n" + SET), "HTTP 101"),
    "missing": (answer(b"", "404 Not Found"), "nothing at that path (HTTP 404)"),
    "twice": (answer(key_set(KEY, KEY)), "two keys share the kid"),
    "same-kid": (answer(SET.replace(b"]", b"," + key_set(KEY)[10:-2] + b"]")), "two keys share the kid"),
    "member-twice": (answer(SET.replace(b'"kty"', b'"kid": "x", "kty"')), "twice"),
    "deep": (answer(b"[" * 30000), "nested deeper"),
    "utf-16": (answer(SET.decode().encode("utf-16")), "UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_a32_answers_that_are_refused(name, settings, localhost):
    script, words = ANSWERS[name]
    with serving(localhost, script) as server, in_time(4):
        with refused(KeySourceResponseError, f"key source https://localhost:{server.port}", words):
            ask(server, settings())
        assert server.connections == 1, "asked once, and sent nowhere else"


def test_a32_a_body_is_in_no_message_and_no_frame(settings, localhost):
    """Crash reporters print local variables."""
    bad = SET.replace(b'"oct"', b'"RSA"')
    for script in (answer(bad), answer(bad[:-1]), answer(SET, "404 Nope"), answer(SET * 1000), zipped(SET)):
        with serving(localhost, script) as server:
            with pytest.raises(KeySourceResponseError) as caught:
                ask(server, settings())
            frames = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
            ours = [line for line in frames.format() if "tests/" not in line]
            assert_no_secret("".join(ours))
            caught.value.__traceback__ = None


@pytest.mark.parametrize(
    "script",
    [
        raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\nff\r\n{" % (len(SET), SET)),
        raw(SET + b"\r\n"),
    ],
    ids=["cut", "bare"],
)
def test_a32_a_body_is_in_no_error_behind_the_error(script, settings, localhost):
    """Errors of http.client hold what was read so far, and Python chains errors that are raised while handling others."""
    with serving(localhost, script) as server, pytest.raises(KeySourceResponseError) as caught:
        ask(server, settings())
    error: BaseException | None = caught.value
    while error is not None:
        assert_no_secret(repr((error.args, vars(error))))
        error = error.__cause__ or error.__context__


def test_a32_nothing_is_asked_for_a_file_that_nobody_trusted_signed(tmp_path, settings, localhost):
    path = build_file(tmp_path / "model.safetensors", signing=MALLORY)
    with serving(localhost, answer(key_set(KEY))) as server:
        session = Session(keys=f"https://localhost:{server.port}/", trust=trust(), config=settings())
        with refused(UntrustedSignerError), session.open(path, "numpy") as f:
            f.get_tensors()
        assert server.connections == 0


def test_a32_settings_that_loosen_do_not_come_from_the_environment(monkeypatch):
    for name in ("KEY_PRIVATE_HOSTS", "KEY_CA_FILE", "KEY_TIMEOUT_SECONDS", "INSECURE_ALLOW_HTTP_LOOPBACK"):
        monkeypatch.setenv(f"SECURE_LOADER_{name}", "1")
    assert load() == LoaderConfig()


# --- 34: services that are down, slow, or say no --------------------------------------------------------------------


def test_a34_nobody_there(settings):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with (
        in_time(4),
        refused(KeySourceUnreachableError, f"https://localhost:{port} cannot be reached: Connection refused"),
    ):
        ask(f"https://localhost:{port}/", settings())


def test_a34_a_name_that_does_not_exist(names, settings):
    with refused(KeySourceUnreachableError, "cannot be reached", "name cannot be resolved (Name or service not known)"):
        ask("https://keys.example/", settings())


@pytest.mark.parametrize(
    "script",
    [
        hang,
        drip(b" " * 4000),
        drip(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 50, head=b""),
        drip(b"1\r\n \r\n" * 100, head=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"),
        drip(b"HTTP/1.1 100 Continue\r\n\r\n" * 20, head=b""),
    ],
    ids="silent body head chunks continue".split(),
)
def test_a34_slow_answers(script, settings, localhost):
    with serving(localhost, script) as server, in_time(4):
        with refused(KeySourceUnreachableError, "no complete answer within 0.3 s"):
            ask(server, settings(key_timeout_seconds=0.3))
        assert server.connections == 1


def test_a34_a_handshake_that_never_ends(settings):
    """The connection is accepted by the system, and nobody says a word; or a byte of it now and then."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = f"https://localhost:{listener.getsockname()[1]}/"
        with in_time(4), refused(KeySourceUnreachableError, "no complete answer within 0.3 s"):
            ask(where, settings(key_timeout_seconds=0.3))
        stop = threading.Event()

        def trickle() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    # The beginning of a record that announces 16 KiB.
                    connection.sendall(b"\x16\x03\x03\x40\x00")
                    while not stop.wait(0.05):
                        connection.sendall(b"\x02")

        thread = threading.Thread(target=trickle)
        thread.start()
        listener.settimeout(5)
        try:
            with in_time(4), refused(KeySourceUnreachableError, "https://localhost"):
                ask(where, settings(key_timeout_seconds=0.3))
        finally:
            stop.set()
            with contextlib.suppress(OSError):
                socket.create_connection(listener.getsockname()).close()
            thread.join()


def test_a34_addresses_that_swallow_packets(names, settings, localhost):
    """A full backlog drops what knocks. The addresses behind it still get their share of the time."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.2", 0))
        full.listen(0)
        port = full.getsockname()[1]
        for _ in range(4):
            knocking = stack.enter_context(socket.socket())
            knocking.setblocking(False)
            knocking.connect_ex(("127.0.0.2", port))
        names["keys.example"] = [["127.0.0.2"]]
        config = settings(key_private_hosts=["keys.example"], key_timeout_seconds=0.4)
        with in_time(4), refused(KeySourceUnreachableError, "no complete answer within 0.4 s"):
            ask(f"https://keys.example:{port}/", config)
        names["keys.example"] = [["127.0.0.2", "127.0.0.3"]]
        with in_time(4), refused(KeySourceUnreachableError, "Connection refused"):
            ask(f"https://keys.example:{port}/", config)


def test_a34_a_name_service_that_does_not_answer(monkeypatch, settings):
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: release.wait(30) and [])
    try:
        with in_time(4), refused(KeySourceUnreachableError, "no complete answer within 0.3 s"):
            ask("https://keys.example/", settings(key_timeout_seconds=0.3))
    finally:
        release.set()


@pytest.mark.parametrize("script", [reset, raw(b"")], ids=["reset", "closed"])
def test_a34_connections_that_break(script, settings, localhost):
    with serving(localhost, script) as server, in_time(4):
        with refused(KeySourceUnreachableError, "cannot be reached"):
            ask(server, settings())
        assert server.connections == 1, "no retries"


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        ("401 Unauthorized", KeySourceDeniedError, "denies the key (HTTP 401)"),
        ("403 Forbidden", KeySourceDeniedError, "denies the key (HTTP 403)"),
        ("407 Proxy Authentication Required", KeySourceDeniedError, "denies the key (HTTP 407)"),
        ("429 Too Many Requests", KeySourceUnreachableError, "out of order (HTTP 429)"),
        ("500 Oops", KeySourceUnreachableError, "out of order (HTTP 500)"),
        ("503 Busy", KeySourceUnreachableError, "out of order (HTTP 503)"),
    ],
)
def test_a34_no_and_not_now_are_told_apart(status, kind, words, settings, localhost):
    """And asked once: a service that denies is not asked again, one that is down neither."""
    with serving(localhost, answer(SET, status, Retry_After="0", WWW_Authenticate="Basic")) as server:
        with refused(kind, words):
            ask(server, settings())
        assert server.connections == 1


def test_a34_no_other_source_hides_it(tmp_path, settings, localhost):
    """Another source has the key: the one that failed is reported all the same."""
    path = build_file(tmp_path / "model.safetensors")
    with serving(localhost, answer(b"", "503 Busy")) as server:
        for keys in ([f"https://localhost:{server.port}/", KEY], [KEY, f"https://localhost:{server.port}/"]):
            session = Session(keys=keys, trust=trust(), config=settings())
            with refused(KeySourceUnreachableError, "out of order"), session.open(path, "numpy") as f:
                f.get_tensor("small")


def test_a34_many_who_wait_wait_one_deadline(settings, localhost):
    with serving(localhost, hang) as server, in_time(4):
        ring = KeyRing([f"https://localhost:{server.port}/"], settings(key_timeout_seconds=0.5))
        errors = []

        def resolve() -> None:
            try:
                ring.resolve(request_for(KEY))
            except KeySourceUnreachableError as e:
                errors.append(str(e))

        threads = [threading.Thread(target=resolve) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(errors) == 8
        assert server.connections <= 8
