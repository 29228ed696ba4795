"""The one HTTP client of all network key sources: small, strict, and done by a deadline.

What it refuses is what key services never need and attackers do: redirects, proxies, compressed answers, answers beyond
a limit, user names in URLs, certificates that do not verify, and addresses inside the network unless the operator named
the host. A name is resolved once; every address is checked, and what was checked is what is connected to, so that a
second answer of the name service changes nothing. There are no retries: a load that failed is cheap to start again.

Only that part of the standard library is used that does one thing each: sockets, TLS, the parser of answers. ``urllib``
and the libraries above it follow redirects and read proxies from the environment unless told not to, resolve names a
second time, and keep no one deadline over name service, connection, TLS and body.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import ipaddress
import queue
import re
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import KeyAccessError, KeySourceDeniedError, KeySourceResponseError, KeySourceUnreachableError
from ..secrets import Secret, wipe
from ..threads import start
from .addresses import Address, is_public
from .tls import Tls

MAX_BODY = 64 * 1024
DEADLINE = 10.0
METADATA = ipaddress.IPv4Address("169.254.169.254")
"""Where clouds tell a machine of theirs who it is; it speaks http alone, and nobody but the machine hears it."""
_MAX_HEAD = 32 * 1024
_MAX_ATTEMPTS = 4
_AT_ONCE = 8 * 1024

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_URL = re.compile(
    rf"(?P<scheme>https?)://(?P<host>{_LABEL}(?:\.{_LABEL})*|\[[0-9a-f:.]+\])(?::(?P<port>[0-9]{{1,5}}))?"
    r"(?P<path>(?:/[A-Za-z0-9._~!$&'()*+,;=:@%-]*)*)(?:\?(?P<query>[A-Za-z0-9._~=&-]+))?",
)
_HEADER_VALUE = re.compile(rb"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")


@dataclass(frozen=True, slots=True)
class Url:
    """A URL that may be asked for a key.

    Attributes:
        scheme: ``https``, or ``http`` to loopback where that was allowed.
        host: In small letters; IPv6 addresses without brackets.
        port: Its port.
        path: Begins with a slash.
        query: Without the question mark; empty when there is none.
    """

    scheme: str
    host: str
    port: int
    path: str
    query: str = ""

    @property
    def authority(self) -> str:
        """Host and port, the port only where it is not the usual one."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _port_of(self.scheme) else f"{host}:{self.port}"

    @property
    def origin(self) -> str:
        """Scheme, host and port: what messages show."""
        return f"{self.scheme}://{self.authority}"

    @property
    def source(self) -> str:
        """How messages name it. No path: some services put secrets there."""
        return f"key source {self.origin}"


@dataclass(frozen=True, slots=True)
class Rules:
    """What the operator allows.

    Attributes:
        tls: Roots and client certificate.
        private_hosts: Hosts, in small letters, that may have addresses which are not public.
        insecure_http_loopback: Whether ``http:`` may be spoken to this machine itself.
        insecure_http_metadata: Whether it may be spoken to the metadata service of a cloud.
    """

    tls: Tls = field(default_factory=Tls)
    private_hosts: frozenset[str] = frozenset()
    insecure_http_loopback: bool = False
    insecure_http_metadata: bool = False


class Deadline:
    """A time by which everything is over.

    Args:
        seconds: From now on.
    """

    def __init__(self, seconds: float = DEADLINE) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left, more than none.

        Raises:
            TimeoutError: It is over.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


@dataclass(frozen=True, slots=True)
class Response:
    """An answer.

    Attributes:
        status: HTTP status.
        headers: Its header fields.
        body: Its body; empty where it was not asked for. Wipe it.
        cookies: What its fields ``Set-Cookie`` say. Nothing is done with them here.
    """

    status: int
    headers: Mapping[str, str]
    body: bytearray = field(repr=False)
    cookies: tuple[str, ...] = field(default=(), repr=False)

    def wipe(self) -> None:
        """Overwrite the body."""
        wipe(self.body)


def parse_url(text: str, rules: Rules) -> Url:
    """A URL, if it is one that keys may be fetched from.

    Args:
        text: As the operator wrote it.
        rules: Say whether ``http:`` may be.

    Raises:
        KeyAccessError: It is not. The message does not repeat the URL, which may hold a password.
    """
    scheme, separator, rest = text.partition("://")
    authority, slash, path = rest.partition("/")
    if "@" in authority:
        raise KeyAccessError("a key reference must not hold a user name or a password (…@host)")
    match = _URL.fullmatch(scheme.lower() + separator + authority.lower() + slash + path)
    if match is None:
        raise KeyAccessError(
            "a key reference is no URL that can be used",
            hint="https://HOST:PORT/PATH in ASCII, without blanks, fragment or query",
        )
    if any(part in (".", "..") for part in match["path"].lower().replace("%2e", ".").split("/")):
        raise KeyAccessError("a key reference must not hold '.' or '..' in its path")
    port = int(match["port"] or _port_of(match["scheme"]))
    if not 0 < port < 65536:
        raise KeyAccessError("a key reference names a port that does not exist")
    host = match["host"].strip("[]")
    host = str(_literal(host) or host)
    url = Url(match["scheme"], host, port, match["path"] or "/", match["query"] or "")
    _check_host(url, rules)
    return url


def _port_of(scheme: str) -> int:
    return 443 if scheme == "https" else 80


def _check_host(url: Url, rules: Rules) -> None:
    address = _literal(url.host)
    if address is None and (":" in url.host or re.fullmatch(r"[0-9]+|0x[0-9a-f]*", url.host.rpartition(".")[2])):
        # 2130706433, 0x7f.1 and 127.1 are 127.0.0.1 to the system, and nothing to anybody else.
        raise KeyAccessError("a key reference names a host by something that is neither a name nor an address")
    if url.scheme == "http":
        local = url.host == "localhost" if address is None else address.is_loopback
        metadata = address == METADATA and rules.insecure_http_metadata
        if not (local and rules.insecure_http_loopback) and not metadata:
            raise KeyAccessError(
                f"{url.source}: http is not encrypted, keys are fetched by https only",
                hint="a development server on this machine can be used with insecure_allow_http_loopback",
            )


def request(
    url: Url,
    rules: Rules,
    deadline: Deadline,
    *,
    method: str = "GET",
    headers: Mapping[str, str | Secret] | None = None,
    body: bytearray | None = None,
    max_body: int = MAX_BODY,
    want_errors: bool = False,
) -> Response:
    """Ask once.

    Args:
        url: Whom, and what.
        rules: What the operator allows.
        deadline: When the whole answer has to be there: name service, connection, TLS and body together.
        method: ``GET`` or ``POST``.
        headers: Header fields beyond those that are always sent, or instead of them.
        body: JSON to send; wiped by the caller.
        max_body: Bytes of body to accept.
        want_errors: Read the body of answers other than 200 as well.

    Returns:
        The answer, of any status but those of a redirect.

    Raises:
        KeySourceUnreachableError: No connection, no trustworthy one, or no complete answer in time.
        KeySourceResponseError: A redirect, a compressed or oversized answer, or no HTTP.
        KeyAccessError: An address that is not public and not allowed, or a local file that cannot be used.
    """
    context = rules.tls.context() if url.scheme == "https" else None
    said: str | None = None
    why = ""
    try:
        with _connect(url, rules, deadline) as plain, _secured(plain, context, url.host, deadline) as connection:
            _send(connection, deadline, _head(url, method, headers or {}, body), body)
            return _receive(connection, deadline, method, max_body, want_errors=want_errors)
    except TimeoutError:
        why = f"no complete answer within {deadline.seconds:g} s"
    except ssl.SSLCertVerificationError as e:
        why = f"its certificate is refused: {e.verify_message}"
    except ssl.SSLError as e:
        why = f"TLS failed: {e.reason or type(e).__name__}"
    except http.client.RemoteDisconnected:
        why = "it closed the connection without an answer"
    except (http.client.HTTPException, ValueError) as e:
        said = (
            str(e) if isinstance(e, _AnswerError) else f"answers with something that is not HTTP ({type(e).__name__})"
        )
    except OSError as e:
        why = e.strerror or type(e).__name__
    # Raised here, and not from what was caught: errors of http.client hold what they have read, which may be the key.
    if said is not None:
        raise KeySourceResponseError(f"{url.source} {said}")
    raise KeySourceUnreachableError(f"{url.source} cannot be reached: {why}")


def check_status(response: Response, url: Url) -> None:
    """Raise for every status but 200.

    Raises:
        KeySourceDeniedError: 401, 403, 407.
        KeySourceUnreachableError: 429 and what says that the server is out of order.
        KeySourceResponseError: Any other.
    """
    status = response.status
    if status in (401, 403, 407):
        raise KeySourceDeniedError(f"{url.source} denies the key (HTTP {status})")
    if status == 429 or 500 <= status < 600:
        raise KeySourceUnreachableError(f"{url.source} is out of order (HTTP {status})")
    if status in (404, 410):
        raise KeySourceResponseError(f"{url.source} has nothing at that path (HTTP {status})")
    if status != 200:
        raise KeySourceResponseError(f"{url.source} answers HTTP {status}, where 200 is due")


class _AnswerError(http.client.HTTPException):
    """An answer that is HTTP, and refused. Its text follows the name of the source."""


# --- where to ------------------------------------------------------------------------------------------------------


def _connect(url: Url, rules: Rules, deadline: Deadline) -> socket.socket:
    """A connection to one of the addresses of the host, all of which were checked."""
    found = _resolve(url, deadline)
    for _, where in found:
        _check_address(where[0], url, rules)
    found = found[:_MAX_ATTEMPTS]
    last: OSError = OSError("the name has no address")
    for i, (family, where) in enumerate(found):
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            # An address that swallows packets must leave time for the others.
            connection.settimeout(deadline.left() / (len(found) - i))
            connection.connect(where)
            # Or the second of two small writes waits for the other side's acknowledgement of the first.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as e:
            connection.close()
            last = e
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise last


def _resolve(url: Url, deadline: Deadline) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """Family and socket address of every address of the host."""
    address = _literal(url.host)
    if address is not None:
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        return [(family, (str(address), url.port))]
    answer: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answer.put(socket.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as e:
            answer.put(e)

    # The system's resolver cannot be told a deadline. A thread that it holds back ends when it gives up.
    try:
        start(ask, "secure-loader-resolver")
    except RuntimeError:
        raise OSError(0, "its name cannot be resolved (the system gives no more threads)") from None
    try:
        found = answer.get(timeout=deadline.left())
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(found, Exception):
        raise OSError(0, f"its name cannot be resolved ({getattr(found, 'strerror', None) or type(found).__name__})")
    return [(family, where) for family, _, _, _, where in found]


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _check_address(text: str, url: Url, rules: Rules) -> None:
    """Raises KeyAccessError where the host may not have that address."""
    address = ipaddress.ip_address(text.partition("%")[0])
    http = address.is_loopback or (address == METADATA and rules.insecure_http_metadata)
    named = http if url.scheme == "http" else url.host in rules.private_hosts
    if not (named or (url.scheme == "https" and is_public(address))) or address.is_multicast or address.is_unspecified:
        raise KeyAccessError(
            f"{url.source} has the address {address}, which is not a public one",
            hint="a host inside the network must be named in the setting key_private_hosts",
        )


# --- what is said ----------------------------------------------------------------------------------------------------


def _secured(
    plain: socket.socket, context: ssl.SSLContext | None, host: str, deadline: Deadline
) -> contextlib.AbstractContextManager[socket.socket]:
    if context is None:
        return contextlib.nullcontext(plain)
    plain.settimeout(deadline.left())
    # OpenSSL counts the time over the whole handshake, not for each packet of it. An end without farewell is an error:
    # somebody may have cut the answer.
    return context.wrap_socket(plain, server_hostname=host, suppress_ragged_eofs=False)


def _head(url: Url, method: str, headers: Mapping[str, str | Secret], body: bytearray | None) -> bytearray:
    target = url.path + (f"?{url.query}" if url.query else "")
    fields: dict[str, str | Secret] = {
        "Host": url.authority,
        "User-Agent": "secure-loader",
        "Accept": "application/json",
        "Accept-Encoding": "identity",
        "Connection": "close",
        **headers,
    }
    if body is not None:
        fields |= {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
    parts: list[bytes | memoryview] = [f"{method} {target} HTTP/1.1\r\n".encode("ascii")]
    for name, value in fields.items():
        shown = value.reveal() if isinstance(value, Secret) else value.encode("utf-8", errors="surrogateescape")
        if not _HEADER_VALUE.fullmatch(shown):
            raise KeyAccessError(f"{url.source}: what is to be sent as {name} holds characters that cannot be")
        parts += [name.encode("ascii") + b": ", shown, b"\r\n"]
    # Of its final size from the start: a buffer that grows leaves copies behind.
    return bytearray().join([*parts, b"\r\n"])


def _send(connection: socket.socket, deadline: Deadline, head: bytearray, body: bytearray | None) -> None:
    try:
        for part in (head, body or b""):
            connection.settimeout(deadline.left())
            connection.sendall(part)
    finally:
        wipe(head)


class _Incoming(io.BufferedIOBase):
    """What arrives, by the deadline and up to a limit, as the file that http.client wants a socket to make.

    It has a buffer of its own, since those of the standard library cannot be overwritten.
    """

    def __init__(self, connection: socket.socket, deadline: Deadline, limit: int) -> None:
        self._connection, self._deadline, self._room = connection, deadline, limit
        self._buffer, self._start, self._stop = bytearray(_AT_ONCE), 0, 0

    def makefile(self, _mode: str) -> _Incoming:
        return self

    def _fill(self) -> int:
        """Bytes in the buffer; none at the end of what arrives."""
        if self._start == self._stop:
            self._connection.settimeout(self._deadline.left())
            self._start, self._stop = 0, self._connection.recv_into(self._buffer)
            self._room -= self._stop
            if self._room < 0:
                raise _AnswerError("answers with more than a key service has to say")
        return self._stop - self._start

    def readinto(self, out: Any, /) -> int:
        filled = 0
        with memoryview(out) as target, memoryview(self._buffer) as source:
            while filled < len(target) and (n := min(self._fill(), len(target) - filled)):
                target[filled : filled + n] = source[self._start : self._start + n]
                self._start, filled = self._start + n, filled + n
        return filled

    def read(self, size: int | None = -1, /) -> bytes:
        """Ends of chunks only, which are two bytes."""
        out = bytearray(max(size or 0, 0))
        return bytes(out[: self.readinto(out)])

    def readline(self, size: int | None = -1, /) -> bytes:
        """Lines of heads, and sizes of chunks."""
        line, limit = bytearray(), size or -1
        while not line.endswith(b"\n") and len(line) != limit and self._fill():
            end = self._buffer.find(b"\n", self._start, self._stop) + 1 or self._stop
            end = end if limit < 0 else min(end, self._start + limit - len(line))
            line += self._buffer[self._start : end]
            self._start = end
        return bytes(line)

    def close(self) -> None:
        wipe(self._buffer)
        super().close()


def _receive(
    connection: socket.socket, deadline: Deadline, method: str, max_body: int, *, want_errors: bool
) -> Response:
    # Chunks of one byte take six: what is counted here is only there to end floods of headers and chunk sizes.
    incoming = _Incoming(connection, deadline, _MAX_HEAD + 8 * max_body)
    answer = http.client.HTTPResponse(incoming, method=method)  # type: ignore[arg-type]
    try:
        answer.begin()
        if 300 <= answer.status < 400:
            raise _AnswerError(f"redirects (HTTP {answer.status}), which is not followed")
        body = bytearray()
        if answer.status == 200 or want_errors:
            body = _read_body(answer, max_body)
        return Response(
            answer.status, dict(answer.headers.items()), body, tuple(answer.headers.get_all("Set-Cookie", []))
        )
    finally:
        answer.close()


def _read_body(answer: http.client.HTTPResponse, max_body: int) -> bytearray:
    if answer.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
        raise _AnswerError("answers with a compressed body, which nobody asked for")
    if not answer.chunked and answer.headers.get("Transfer-Encoding") is not None:
        raise _AnswerError("answers with a transfer coding that nobody asked for")
    room = bytearray(max_body + 1)
    filled = 0
    try:
        while filled <= max_body and (n := answer.readinto(memoryview(room)[filled:])):
            filled += n
        if filled > max_body:
            raise _AnswerError(f"answers with more than {max_body} bytes")
        if answer.length:
            raise _AnswerError("ends its answer too early")
        return room[:filled]
    except http.client.IncompleteRead:
        raise _AnswerError("ends its answer too early") from None
    finally:
        wipe(room)
