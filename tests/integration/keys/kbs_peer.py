"""A key broker that is as strict as Trustee's, or stricter, and goes wrong where it is told to.

The real one is in no package registry. This one speaks protocol 0.4.0 as docs/keys.md and the recorded exchanges in
``data/trustee-kbs-0.4.0.json`` have it; it shares no code with the client: canonical JSON, key agreement and encryption are
written a second time here.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import json
import re
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.keywrap import aes_key_wrap

from tests.integration.keys.services import Identity

ERRORS = "https://github.com/confidential-containers/kbs/errors/"
PUBKEY = {"kty": "EC", "crv": "P-256", "alg": "ECDH-ES+A256KW"}


def b64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def unb64url(text: str) -> bytes:
    assert re.fullmatch(r"[A-Za-z0-9_-]*", text)
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def canonical(value: Any) -> str:
    """RFC 8785, without numbers that are not whole."""
    if isinstance(value, dict):
        members = sorted(value.items(), key=lambda m: m[0].encode("utf-16-be"))
        return "{" + ",".join(f"{canonical(k)}:{canonical(v)}" for k, v in members) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    if isinstance(value, str):
        short = {"\b": "b", "\t": "t", "\n": "n", "\f": "f", "\r": "r", '"': '"', "\\": "\\"}
        return (
            '"' + "".join(f"\\{short[c]}" if c in short else f"\\u{ord(c):04x}" if c < " " else c for c in value) + '"'
        )
    assert value is None or type(value) in (bool, int)
    return json.dumps(value)


def concat_kdf(shared: bytes, algorithm: bytes, apu: bytes, apv: bytes, bits: int) -> bytes:
    """RFC 7518, 4.6.2, for keys of at most one hash."""
    parts = [shared, *(x for part in (algorithm, apu, apv) for x in (len(part).to_bytes(4, "big"), part))]
    return hashlib.sha256(b"\0\0\0\1" + b"".join(parts) + bits.to_bytes(4, "big")).digest()[: bits // 8]


def coordinates(key: ec.EllipticCurvePublicKey) -> dict[str, str]:
    numbers, size = key.public_numbers(), (key.curve.key_size + 7) // 8
    return {"x": b64url(numbers.x.to_bytes(size, "big")), "y": b64url(numbers.y.to_bytes(size, "big"))}


def encrypt(public: ec.EllipticCurvePublicKey, plain: bytes, **head: Any) -> dict[str, str]:
    """A JWE for somebody; ``head`` changes its header before it is authenticated."""
    ephemeral = ec.generate_private_key(ec.SECP256R1())
    wrapping = concat_kdf(ephemeral.exchange(ec.ECDH(), public), b"ECDH-ES+A256KW", b"", b"", 256)
    header = {"alg": "ECDH-ES+A256KW", "enc": "A256GCM"}
    header["epk"] = {"crv": "P-256", "kty": "EC"} | coordinates(ephemeral.public_key())  # type: ignore[assignment]
    protected = b64url(json.dumps(header | head, separators=(",", ":")).encode())
    content, iv = secrets.token_bytes(32), secrets.token_bytes(12)
    sealed = AESGCM(content).encrypt(iv, plain, protected.encode())
    return {
        "protected": protected,
        "encrypted_key": b64url(aes_key_wrap(wrapping, content)),
        "iv": b64url(iv),
        "ciphertext": b64url(sealed[:-16]),
        "tag": b64url(sealed[-16:]),
    }


class RefusedError(Exception):
    """An error of the protocol."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind)
        self.kind, self.detail = kind, detail


def demand(truth: object, kind: str, detail: str = "") -> None:
    if not truth:
        raise RefusedError(kind, detail)


@dataclass
class Exchange:
    """A request and its answer, which a fault may change or send in another way."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    stop: threading.Event
    connection: socket.socket
    status: int = 200
    answer: bytes = b""
    fields: list[tuple[str, str]] = field(default_factory=list)

    def json(self) -> Any:
        return json.loads(self.answer)

    def say(self, document: Any) -> None:
        self.answer = json.dumps(document).encode()

    def send(self) -> None:
        fields = [("Content-Type", "application/json"), ("Content-Length", str(len(self.answer))), *self.fields]
        head = f"HTTP/1.1 {self.status} X\r\n" + "".join(f"{n}: {v}\r\n" for n, v in fields)
        self.connection.sendall(head.encode() + b"\r\n" + self.answer)


@dataclass
class Session:
    nonce: str
    tee: str
    algorithm: str
    token: str | None = None


# True: it has sent the answer itself.
Fault = Callable[[Exchange], "bool | None"]


class Peer:
    """A broker on loopback, and the Confidential Data Hub of a guest.

    Args:
        identity: Its certificate; None speaks HTTP.
        admin: Whose tokens may write.

    Attributes:
        resources: By ``repository/type/tag``.
        denied: Those that the policy does not release.
        faults: By step: auth, attest, resource, cdh.
        selected: Hash algorithm to select; None leaves it to the client.
    """

    def __init__(self, identity: Identity | None, admin: Ed25519PublicKey | None = None) -> None:
        self.resources: dict[str, bytes] = {}
        self.denied: set[str] = set()
        self.faults: dict[str, Fault] = {}
        self.selected: str | None = None
        self.policy = ""
        self.calls: list[Exchange] = []
        self.sessions: dict[str, Session] = {}
        self.tokens: dict[str, ec.EllipticCurvePublicKey] = {}
        self.evidence: list[dict[str, Any]] = []
        self.stop = threading.Event()
        self._admin = admin
        self._context = None if identity is None else ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if identity is not None and self._context is not None:
            self._context.load_cert_chain(identity.certificate, identity.key)
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = False
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="broker")
        self._thread.start()

    @property
    def url(self) -> str:
        return f"{'http' if self._context is None else 'https'}://localhost:{self.port}"

    def paths(self) -> list[str]:
        return [call.path.rpartition("/kbs/v0")[2] for call in self.calls]

    def reset(self) -> None:
        for table in (self.resources, self.denied, self.faults, self.calls, self.sessions, self.tokens, self.evidence):
            table.clear()
        self.selected = None

    def close(self) -> None:
        self.stop.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def issue(self, public: ec.EllipticCurvePublicKey) -> str:
        """A token for whoever was attested with a key."""
        token = ".".join(b64url(secrets.token_bytes(24)) for _ in range(3))
        self.tokens[token] = public
        return token

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        peer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = 10

            def setup(self) -> None:
                self.request.settimeout(10)
                self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if peer._context is not None:
                    self.request = peer._context.wrap_socket(self.request, server_side=True)
                super().setup()

            def finish(self) -> None:
                super().finish()
                with contextlib.suppress(OSError):
                    if isinstance(self.connection, ssl.SSLSocket):
                        self.connection.unwrap()
                self.connection.close()

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._serve(b"")

            def do_POST(self) -> None:
                self._serve(self.rfile.read(int(self.headers["Content-Length"])))

            def _serve(self, body: bytes) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                call = Exchange(self.command, self.path, headers, body, peer.stop, self.connection)
                peer.calls.append(call)
                step = peer._answer(call)
                fault = peer.faults.get(step)
                if fault is None or not fault(call):
                    call.send()

        return Handler

    def _answer(self, call: Exchange) -> str:
        found = re.fullmatch(r"/(kbs/v0|cdh)/([a-z-]+)(?:/(.*))?", call.path)
        assert found, call.path
        prefix, step, rest = found.groups()
        try:
            if prefix == "cdh":
                assert call.method == "GET"
                assert step == "resource"
                self._hub(call, rest)
                return "cdh"
            {
                ("POST", "auth"): self._auth,
                ("POST", "attest"): self._attest,
                ("GET", "resource"): self._resource,
                ("POST", "resource"): self._store,
                ("POST", "resource-policy"): self._set_policy,
            }[call.method, step](call, rest)
        except RefusedError as e:
            call.status, call.fields = 401, []
            call.say({"type": ERRORS + e.kind, "detail": e.detail})
        return step

    def _hub(self, call: Exchange, path: str) -> None:
        if path in self.denied or path not in self.resources:
            # It does not say why.
            call.status, call.answer = 500, b"rpc status: Status { code: INTERNAL, message: ... }"
        else:
            call.answer = self.resources[path]

    def _auth(self, call: Exchange, _: str) -> None:
        body = json.loads(call.body)
        demand(body.keys() == {"version", "tee", "extra-params"}, "AttestationError", "not a request")
        demand(body["version"] == "0.4.0", "AttestationError", "KBS Client Protocol Version Mismatch: expect =0.4.0")
        demand(body["tee"] in ("sample", "tdx", "cca"), "AttestationError", "unknown TEE")
        offered = body["extra-params"].get("supported-hash-algorithms", [])
        demand(self.selected is None or self.selected.lower() in offered, "AttestationError", "hash algorithm")
        nonce = base64.b64encode(secrets.token_bytes(32)).decode()
        name = secrets.token_hex(16)
        self.sessions[name] = Session(nonce, body["tee"], (self.selected or "sha384").lower())
        extra = "" if self.selected is None else {"selected-hash-algorithm": self.selected}
        call.say({"nonce": nonce, "extra-params": extra})
        call.fields.append(("Set-Cookie", f"kbs-session-id={name}; Expires=Fri, 01 Jan 2100 00:00:00 GMT"))

    def _session(self, call: Exchange) -> tuple[str, Session] | None:
        found = re.fullmatch(r"kbs-session-id=([0-9a-f]{32})", call.headers.get("cookie", ""))
        session = self.sessions.get(found[1]) if found else None
        return None if found is None or session is None else (found[1], session)

    def _attest(self, call: Exchange, _: str) -> None:
        found = self._session(call)
        demand(found, "AttestationError", "cookie not found")
        assert found is not None
        name, session = found
        demand(session.token is None, "AttestationError", "attested already")
        body = json.loads(call.body)
        demand(body.keys() == {"init-data", "runtime-data", "tee-evidence"}, "AttestationError", "not an attestation")
        runtime, evidence = body["runtime-data"], body["tee-evidence"]
        demand(
            runtime.keys() == {"nonce", "tee-pubkey"} and runtime["nonce"] == session.nonce, "AttestationError", "nonce"
        )
        demand(evidence.keys() == {"primary_evidence", "additional_evidence"}, "AttestationError", "evidence")
        key = runtime["tee-pubkey"]
        demand(key.keys() == {"kty", "crv", "alg", "x", "y"} and key | PUBKEY == key, "AttestationError", "key")
        self._verify(
            evidence["primary_evidence"], session, runtime | {"additional-evidence": evidence["additional_evidence"]}
        )
        for tee, more in (
            json.loads(evidence["additional_evidence"]) if evidence["additional_evidence"] else {}
        ).items():
            demand(tee == "sampledevice" and tee != session.tee, "AttestationError", "device")
            self._verify(more, session, runtime)
        self.evidence.append(evidence)
        x, y = (int.from_bytes(unb64url(key[n]), "big") for n in "xy")
        session.token = self.issue(ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key())
        call.say({"token": session.token})
        call.fields.append(("Set-Cookie", f"kbs-session-id={name}; Expires=Fri, 01 Jan 2100 00:00:00 GMT"))

    def _verify(self, evidence: dict[str, Any], session: Session, content: dict[str, Any]) -> None:
        digest = hashlib.new(session.algorithm, canonical(content).encode()).digest()
        if "quote" in evidence:
            demand(session.tee == "tdx" and evidence.keys() == {"quote", "cc_eventlog"}, "AttestationError", "form")
            found, wanted = base64.b64decode(evidence["quote"]), b"TD quote " + digest.ljust(64, b"\0")
        elif "token" in evidence:
            demand(session.tee == "cca" and evidence.keys() == {"token"}, "AttestationError", "form")
            found, wanted = bytes(evidence["token"]), b"TD quote " + digest.ljust(64, b"\0")
        else:
            demand(evidence.keys() == {"svn", "report_data"}, "AttestationError", "form")
            found, wanted = base64.b64decode(evidence["report_data"]), digest
        demand(found == wanted, "AttestationError", "verify TEE evidence failed: report_data")

    def _resource(self, call: Exchange, path: str) -> None:
        found, bearer = self._session(call), call.headers.get("authorization", "")
        token = found[1].token if found and found[1].token else bearer.removeprefix("Bearer ")
        demand(token, "TokenNotFound", "Attestation Token not found")
        demand(token in self.tokens, "TokenVerifierError", "Token Verifier error")
        demand(path not in self.denied, "PolicyDeny", "Access denied by policy")
        demand(path in self.resources, "PluginInternalError", "Plugin internal error")
        call.say(encrypt(self.tokens[token], self.resources[path]))

    def _demand_admin(self, call: Exchange) -> None:
        found = re.fullmatch(r"Bearer ([\w-]+)\.([\w-]+)\.([\w-]+)", call.headers.get("authorization", ""))
        demand(found and self._admin, "AdminAuthAccess", "no token")
        assert found is not None
        assert self._admin is not None
        head, claims = (json.loads(unb64url(found[i])) for i in (1, 2))
        try:
            self._admin.verify(unb64url(found[3]), f"{found[1]}.{found[2]}".encode())
        except InvalidSignature:
            raise RefusedError("AdminAuthAccess", "signature") from None
        demand(head == {"alg": "EdDSA", "typ": "JWT"}, "AdminAuthAccess", "header")
        demand(0 < claims["exp"] - claims["iat"] <= 600 and claims["role"], "AdminAuthAccess", "validity")

    def _store(self, call: Exchange, path: str) -> None:
        self._demand_admin(call)
        demand(re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*/[\w-][\w.-]*", path, re.ASCII), "InvalidRequestPath", path)
        self.resources[path] = call.body

    def _set_policy(self, call: Exchange, _: str) -> None:
        self._demand_admin(call)
        body = json.loads(call.body)
        demand(body.keys() == {"policy"}, "PolicyEngineError", "no policy")
        self.policy = unb64url(body["policy"]).decode()


@contextlib.contextmanager
def brokering(identity: Identity | None, admin: Ed25519PublicKey | None = None) -> Iterator[Peer]:
    """A broker for the length of the block."""
    peer = Peer(identity, admin)
    try:
        yield peer
    finally:
        peer.close()
