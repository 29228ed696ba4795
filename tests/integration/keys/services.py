"""A certificate authority, and TLS servers on loopback that answer as a script says, well or badly."""

from __future__ import annotations

import contextlib
import datetime as dt
import gzip
import hashlib
import ipaddress
import json
import socket
import ssl
import struct
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from secure_loader import MasterKey
from secure_loader.core.keys.provider import KeyRequest

DAY = dt.timedelta(days=1)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


@dataclass(frozen=True)
class Identity:
    """A certificate and its key, as PEM files."""

    certificate: Path
    key: Path


class Authority:
    """A certificate authority of a test.

    Args:
        folder: Where its files go.
        name: Names it, and its files.
    """

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        now = dt.datetime.now(dt.UTC)
        usage = dict.fromkeys(
            "digital_signature content_commitment key_encipherment data_encipherment key_agreement encipher_only "
            "decipher_only".split(),
            False,
        )
        self._certificate = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(_name(name))
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 30 * DAY)
            .not_valid_after(now + 30 * DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(x509.KeyUsage(key_cert_sign=True, crl_sign=True, **usage), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))
        self.file.chmod(0o644)

    def openssl_hash(self) -> int:
        """What ``openssl x509 -hash`` prints: OpenSSL looks for a root under that name in its folder.

        SHA-1 of the subject in a canonical form (X509_NAME_hash): without the outer sequence, text in UTF-8 and lower case.
        """
        text = self._name.lower().encode()
        attribute = bytes.fromhex("0603550403") + b"\x0c" + bytes([len(text)]) + text
        sequence = b"\x30" + bytes([len(attribute)]) + attribute
        digest = hashlib.sha1(b"\x31" + bytes([len(sequence)]) + sequence).digest()
        return int.from_bytes(digest[:4], "little")

    def issue(
        self,
        *names: str,
        days: int = 7,
        client: bool = False,
        passphrase: bytes | None = None,
        subject: str | None = None,
    ) -> Identity:
        """A certificate for names and addresses that is valid until ``days`` from now; its subject is the first of them
        unless another is given."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(subject or names[0]))
            .issuer_name(self._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 20 * DAY)
            .not_valid_after(now + days * DAY)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH if client else ExtendedKeyUsageOID.SERVER_AUTH]),
                critical=False,
            )
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if names:
            general = x509.SubjectAlternativeName([_general(name) for name in names])
            builder = builder.add_extension(general, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        stem = f"{self._name}-{subject or names[0]}-{certificate.serial_number:x}"
        issued = Identity(self._folder / f"{stem}.pem", self._folder / f"{stem}.key")
        issued.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        issued.key.touch(0o600)
        issued.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption(),
            )
        )
        return issued


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


@dataclass(frozen=True)
class Call:
    """A request that reached a server, and the connection it came by."""

    head: str
    connection: socket.socket
    stop: threading.Event

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)


Script = Callable[[Call], None]


class Server:
    """A server that reads a request and answers as its script says.

    Args:
        identity: What it shows; None speaks HTTP.
        script: Answers a request; the connection is closed when it returns.
        clients: Authority of the client certificates it demands.
        version: The highest TLS version it speaks.
    """

    def __init__(
        self,
        identity: Identity | None,
        script: Script,
        *,
        clients: Authority | None = None,
        version: ssl.TLSVersion | None = None,
    ) -> None:
        self.script = script
        self.calls: list[str] = []
        self.connections = 0
        self.names: list[str | None] = []
        self._context = None if identity is None else self._tls(identity, clients, version)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self.port: int = self._listener.getsockname()[1]
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._listen, name="server")]
        self._threads[0].start()

    def _tls(self, identity: Identity, clients: Authority | None, version: ssl.TLSVersion | None) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(identity.certificate, identity.key)
        context.sni_callback = lambda _, name, __: self.names.append(name)
        if version is not None:
            context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
            context.maximum_version = version
            context.set_ciphers("ALL:@SECLEVEL=0")
        if clients is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(clients.file)
        return context

    def _listen(self) -> None:
        while not self._stop.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            self.connections += 1
            thread = threading.Thread(target=self._serve, args=(connection,), name="server")
            self._threads.append(thread)
            thread.start()

    def _serve(self, plain: socket.socket) -> None:
        with contextlib.suppress(OSError), plain:
            plain.settimeout(10)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is None:
                self._talk(plain)
            else:
                with self._context.wrap_socket(plain, server_side=True) as connection:
                    self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            piece = connection.recv(4096)
            if not piece:
                return
            head += piece
        self.calls.append(head.decode("latin-1"))
        self.script(Call(head.decode("latin-1"), connection, self._stop))
        with contextlib.suppress(OSError):
            if isinstance(connection, ssl.SSLSocket):
                connection.unwrap()

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()


@contextlib.contextmanager
def serving(identity: Identity | None, script: Script, **options: Any) -> Iterator[Server]:
    """A server for the length of the block."""
    server = Server(identity, script, **options)
    try:
        yield server
    finally:
        server.close()


class SlowProxy:
    """Passes bytes on to a server, each after a pause.

    Args:
        port: Of the server on loopback.
        pause: Seconds before each byte of an answer.
    """

    def __init__(self, port: int, pause: float) -> None:
        self._port, self._pause = port, pause
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self.port: int = self._listener.getsockname()[1]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy")
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(OSError):
                connection, _ = self._listener.accept()
                with connection, socket.create_connection(("127.0.0.1", self._port)) as server:
                    server.sendall(connection.recv(65536))
                    while not self._stop.is_set() and (byte := server.recv(1)):
                        connection.sendall(byte)
                        self._stop.wait(self._pause)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._listener.close()


class Counter:
    """Passes everything on to a server and back, and counts connections: each is one request."""

    def __init__(self, port: int) -> None:
        self._port, self.connections = port, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self.port: int = self._listener.getsockname()[1]
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, name="counter")]

    def _run(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                near = self._listener.accept()[0]
                self.connections += 1
                far = socket.create_connection(("127.0.0.1", self._port))
                for pair in ((near, far), (far, near)):
                    thread = threading.Thread(target=self._pass_on, args=pair, name="counter")
                    self._threads.append(thread)
                    thread.start()

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket) -> None:
        with source, contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(10)
        self._listener.close()


def read_json(call: Call) -> tuple[str, dict[str, str], Any]:
    """The whole of a request: its line, its fields by names in small letters, and the JSON in its body."""
    head, _, body = call.head.partition("\r\n\r\n")
    line, *rest = head.splitlines()
    fields = {name.lower(): value for name, _, value in (r.partition(": ") for r in rest)}
    while len(body) < int(fields.get("content-length", "0")):
        body += call.connection.recv(4096).decode()
    return line, fields, json.loads(body) if body else None


def frames(error: BaseException) -> str:
    """What a crash reporter would show of an error: its message, and local variables of ours."""
    found = traceback.TracebackException.from_exception(error, capture_locals=True)
    return "".join(str(f.locals) for f in found.stack if "/secure_loader/" in f.filename) + str(error)


# --- scripts -------------------------------------------------------------------------------------------------------


def request_for(key: MasterKey, **more: Any) -> KeyRequest:
    return KeyRequest(key.kid, key.algorithm, **more)


def key_set(*keys: MasterKey) -> bytes:
    return json.dumps({"keys": [k.document() for k in keys]}).encode()


def answer(body: bytes, status: str = "200 OK", **headers: str) -> Script:
    """A well-formed answer."""
    fields = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = f"HTTP/1.1 {status}\r\n" + "".join(f"{n}: {v}\r\n" for n, v in fields.items())
    return raw(head.encode() + b"\r\n" + body)


def raw(data: bytes) -> Script:
    return lambda call: call.send(data)


def zipped(body: bytes) -> Script:
    return answer(gzip.compress(body), Content_Encoding="gzip")


def chunked(*pieces: bytes) -> Script:
    body = b"".join(f"{len(p):x}\r\n".encode() + p + b"\r\n" for p in (*pieces, b""))
    return raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body)


def hang(call: Call) -> None:
    call.stop.wait(30)


def drip(
    data: bytes, *, pause: float = 0.05, head: bytes = b"HTTP/1.1 200 OK\r\nContent-Length: 4000\r\n\r\n"
) -> Script:
    """An answer of which a byte arrives now and then."""

    def script(call: Call) -> None:
        call.send(head)
        for byte in data:
            call.send(bytes([byte]))
            if call.stop.wait(pause):
                return

    return script


def flood(head: bytes, piece: bytes) -> Script:
    """An answer that never ends."""

    def script(call: Call) -> None:
        call.send(head)
        while not call.stop.is_set():
            call.send(piece)

    return script


def reset(call: Call) -> None:
    """The connection is torn down, not closed."""
    call.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raise OSError
