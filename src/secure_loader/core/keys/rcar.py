"""Trustee's key broker protocol, version 0.4.0: request, challenge, attestation, response.

All requests of one key share a deadline, and a session: a cookie that the broker hands out at ``/auth``, which goes back
to the same address and nowhere else. What is wrong is told by the ``type`` of an error, not by its HTTP status, which is
401 for nearly everything. A session that the broker lost meanwhile is begun anew, once; nothing else is repeated.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import queue
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

from cryptography.hazmat.primitives.asymmetric import ec

from ...errors import (
    FormatError,
    KeyAccessError,
    KeySourceDeniedError,
    KeySourceResponseError,
    KeySourceUnreachableError,
    SecureLoaderError,
)
from .. import strict_json
from ..secrets import Secret
from ..threads import start
from .evidence import EvidenceProvider
from .fetch import reading
from .jwe import open_jwe, public_jwk
from .net import Deadline, Response, Rules, Url, check_status, request

VERSION = "0.4.0"
BASE = "/kbs/v0"
MAX_ANSWER = 1 << 20
_MAX_EVIDENCE = 1 << 20
_NONCE = 32
# Names as the protocol has them; the first is what is taken where the broker does not say.
_HASHES = {"sha384": hashlib.sha384, "sha256": hashlib.sha256, "sha512": hashlib.sha512}
_COOKIE = re.compile(r"kbs-session-id=([A-Za-z0-9._~+/=-]{1,512})[ \t]*(?:;.*)?")
_TOKEN = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")
_KIND = re.compile(r"[^\s]*/errors/([A-Za-z]{1,64})")
_TEE = re.compile(r"[a-z0-9-]{1,64}")

_DENIED = {
    "PolicyDeny": "denied by broker policy",
    "TokenVerifierError": "the broker does not accept the attestation token",
    "TokenNotFound": "the broker knows neither a session nor a token of ours",
    "AttestationError": "the broker does not accept the evidence",
    "AdminAuthAccess": "the broker does not accept the administrator's token",
}
_ABSENT = {"PluginInternalError", "PluginNotFound", "InvalidRequestPath"}
_BROKEN = {
    "PolicyEngineError",
    "ParsePolicyError",
    "RvpsError",
    "StorageBackendInitialization",
    "PluginManagerInitialization",
    "HTTPFailed",
    "HTTPSFailed",
    "PrometheusError",
}

_T = TypeVar("_T")


@dataclass(frozen=True)
class Broker:
    """A broker, and how long it may take.

    Attributes:
        url: Its address, without a path.
        rules: What the operator allows.
        deadline: When everything has to be over.
    """

    url: Url
    rules: Rules
    deadline: Deadline

    def ask(
        self, what: str, headers: Mapping[str, str | Secret] | None = None, body: bytearray | None = None
    ) -> Response:
        """Its answer, of whatever status; asked once."""
        where = replace(self.url, path=f"{BASE}/{what}")
        return request(
            where,
            self.rules,
            self.deadline,
            method="GET" if body is None else "POST",
            headers=headers,
            body=body,
            max_body=MAX_ANSWER,
            want_errors=True,
        )

    def refuse(self, response: Response, kind: str | None) -> NoReturn:
        """Raise what an answer other than 200 means.

        Raises:
            KeySourceDeniedError: The broker said no.
            KeySourceUnreachableError: It is out of order.
            KeySourceResponseError: There is no such resource, or it said something else.
        """
        source, hint = self.url.source, "the broker's log says why"
        if kind in _DENIED:
            raise KeySourceDeniedError(f"{source}: {_DENIED[kind]}", hint=hint)
        if kind in _ABSENT:
            raise KeySourceResponseError(f"{source} has no such resource, or cannot read it", hint=hint)
        if kind in _BROKEN:
            raise KeySourceUnreachableError(f"{source} is out of order ({kind})", hint=hint)
        if kind is not None:
            raise KeySourceResponseError(f"{source} answers with the error {kind}", hint=hint)
        if response.status == 429 or response.status >= 500:
            # What stands before the broker, and does not know its protocol.
            check_status(response, self.url)
        raise KeySourceResponseError(f"{source} answers HTTP {response.status}, and not as a broker does")


def attested_resource(broker: Broker, path: str, providers: Sequence[EvidenceProvider]) -> bytearray:
    """A resource for which this process attests itself.

    Args:
        broker: Whom to ask.
        path: ``repository/type/tag``.
        providers: Of evidence: of the machine first, then of devices in it.

    Returns:
        What it holds; wipe it.

    Raises:
        KeySourceDeniedError: The broker does not accept the evidence, or its policy says no.
        KeySourceUnreachableError: Down, too slow, or out of order; or the evidence took too long.
        KeySourceResponseError: It did not keep to the protocol, or has no such resource.
        KeyAccessError: There is no evidence to be had.
    """
    nonces: set[str] = set()
    while True:
        key = ec.generate_private_key(ec.SECP256R1())
        with _attest(broker, key, providers, nonces) as session:
            response = broker.ask(f"resource/{path}", {"Cookie": session})
        if response.status == 200:
            return _open(broker, response, key)
        kind = kind_of(response)
        # A broker that was started anew, or another one behind the same address, has never heard of our session.
        if kind != "TokenNotFound" or len(nonces) > 1:
            broker.refuse(response, kind)


def passport_resource(broker: Broker, path: str, token: Secret, key: ec.EllipticCurvePrivateKey) -> bytearray:
    """A resource for a token of an earlier attestation.

    Args:
        broker: Whom to ask.
        path: ``repository/type/tag``.
        token: What the attestation service issued.
        key: The private half of the key that was attested.

    Returns:
        What it holds; wipe it.

    Raises:
        KeySourceDeniedError: The broker does not accept the token, or its policy says no.
        KeySourceUnreachableError: Down, too slow, or out of order.
        KeySourceResponseError: It did not keep to the protocol, has no such resource, or encrypted it to another key.
    """
    with Secret(bytearray(b"Bearer ") + token.reveal()) as bearer:
        response = broker.ask(f"resource/{path}", {"Authorization": bearer})
    if response.status != 200:
        broker.refuse(response, kind_of(response))
    return _open(broker, response, key)


def report_data(content: Mapping[str, str | Mapping[str, str]], algorithm: str) -> bytes:
    """The hash of what evidence is bound to.

    Args:
        content: Texts, and objects of texts, under names in ASCII: of such, sorted compact JSON is what RFC 8785 (JCS)
            makes, because it escapes what we escape, and sorts ASCII as we do.
        algorithm: ``sha256``, ``sha384`` or ``sha512``.
    """
    return _HASHES[algorithm](strict_json.dumps(content).encode()).digest()


def kind_of(response: Response) -> str | None:
    """Which error of the protocol an answer is, or None where it is none; the answer is wiped."""
    try:
        doc = strict_json.loads(bytes(response.body), what="error", scan=True, any_number=True)
    except FormatError:
        return None
    finally:
        response.wipe()
    said = doc.get("type") if isinstance(doc, dict) else None
    match = _KIND.fullmatch(said) if isinstance(said, str) else None
    return None if match is None else match[1]


def _open(broker: Broker, response: Response, key: ec.EllipticCurvePrivateKey) -> bytearray:
    return reading(response, broker.url, lambda body: open_jwe(bytes(body), key))


def _attest(
    broker: Broker, key: ec.EllipticCurvePrivateKey, providers: Sequence[EvidenceProvider], nonces: set[str]
) -> Secret:
    """A session that is attested: its cookie, as it is sent."""
    # Code of others: it says what it likes.
    tees: list[Any] = [_in_time(broker, provider.tee) for provider in providers]
    if not all(isinstance(tee, str) and _TEE.fullmatch(tee) for tee in tees) or len(set(tees)) != len(tees):
        raise KeyAccessError("the evidence providers give no name, or one name twice")
    body = {"version": VERSION, "tee": tees[0], "extra-params": {"supported-hash-algorithms": list(_HASHES)}}
    response = broker.ask("auth", None, _json(body))
    if response.status != 200:
        kind = kind_of(response)
        if kind == "AttestationError":
            raise KeySourceResponseError(
                f"{broker.url.source} begins no attestation of {tees[0]!r} by protocol {VERSION}",
                hint="the broker's log says whether it speaks another version, or does not know the hardware",
            )
        broker.refuse(response, kind)
    cookie = _cookie(broker, response)
    nonce, algorithm = reading(response, broker.url, _challenge)
    if cookie is None:
        raise KeySourceResponseError(f"{broker.url.source} begins no session")
    if nonce in nonces:
        raise KeySourceResponseError(f"{broker.url.source} sends the same nonce twice")
    nonces.add(nonce)
    body = _attestation(broker, nonce, algorithm, public_jwk(key.public_key()), list(zip(tees, providers, strict=True)))
    session = Secret(b"kbs-session-id=" + cookie.encode("ascii"))
    response = broker.ask("attest", {"Cookie": session}, _json(body))
    if response.status != 200:
        broker.refuse(response, kind_of(response))
    reading(response, broker.url, _check_token)
    if _cookie(broker, response) not in (None, cookie):
        # Whatever it wants us to ask in, it is not what we attested.
        raise KeySourceResponseError(f"{broker.url.source} changes the session after it was attested")
    return session


def _attestation(
    broker: Broker,
    nonce: str,
    algorithm: str,
    public: dict[str, str],
    sources: list[tuple[str, EvidenceProvider]],
) -> dict[str, Any]:
    """The body of ``/attest``."""
    bound: dict[str, str | Mapping[str, str]] = {"nonce": nonce, "tee-pubkey": public}
    devices = {tee: _evidence(broker, p, report_data(bound, algorithm)) for tee, p in sources[1:]}
    additional = strict_json.dumps(devices) if devices else ""
    primary = _evidence(broker, sources[0][1], report_data(bound | {"additional-evidence": additional}, algorithm))
    return {
        "init-data": None,
        "runtime-data": bound,
        "tee-evidence": {"primary_evidence": primary, "additional_evidence": additional},
    }


def _evidence(broker: Broker, provider: EvidenceProvider, data: bytes) -> Any:
    found = _in_time(broker, lambda: provider.evidence(data))
    try:
        text = strict_json.dumps(found).encode()
    except (TypeError, ValueError, RecursionError):
        raise KeyAccessError(f"{type(provider).__name__} returns evidence that is no JSON") from None
    if len(text) > _MAX_EVIDENCE:
        raise KeyAccessError(f"{type(provider).__name__} returns more than {_MAX_EVIDENCE} bytes of evidence")
    return found


def _in_time(broker: Broker, work: Callable[[], _T]) -> _T:
    """What an evidence provider returns, by the deadline: hardware, and code of others, may never answer."""
    answer: queue.SimpleQueue[tuple[_T, None] | tuple[None, Exception]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answer.put((work(), None))
        except Exception as e:  # noqa: BLE001 - code of others; it is raised where it is waited for
            answer.put((None, e))

    start(run, "secure-loader-evidence")
    try:
        found, error = answer.get(timeout=broker.deadline.left())
    except (queue.Empty, TimeoutError):
        seconds = broker.deadline.seconds
        raise KeySourceUnreachableError(f"there is no evidence for {broker.url.source} within {seconds:g} s") from None
    if isinstance(error, SecureLoaderError):
        raise error
    if error is not None:
        raise KeyAccessError(f"an evidence provider failed: {type(error).__name__}") from error
    return found  # type: ignore[return-value] # None only beside an error


def _challenge(body: bytes | bytearray) -> tuple[str, str]:
    """Nonce and hash algorithm of an answer to ``/auth``."""
    doc = strict_json.loads(bytes(body), what="challenge", scan=True)
    nonce, extra = (doc.get("nonce"), doc.get("extra-params")) if isinstance(doc, dict) else (None, None)
    try:
        length = len(base64.b64decode(nonce, validate=True)) if isinstance(nonce, str) else 0
    except (binascii.Error, ValueError):
        length = 0
    if not isinstance(nonce, str) or length != _NONCE:
        raise KeyAccessError(f"the challenge holds no nonce of {_NONCE} bytes")
    selected = extra.get("selected-hash-algorithm", "sha384") if isinstance(extra, dict) else "sha384"
    name = selected.lower().replace("-", "") if isinstance(selected, str) else ""
    if name not in _HASHES:
        raise KeyAccessError("the challenge selects a hash algorithm that was not offered")
    return nonce, name


def _check_token(body: bytes | bytearray) -> None:
    doc = strict_json.loads(bytes(body), what="answer", scan=True)
    token = doc.get("token") if isinstance(doc, dict) else None
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise KeyAccessError("the answer to the attestation holds no token")


def _cookie(broker: Broker, response: Response) -> str | None:
    """The session that an answer names, or None; cookies of others, such as of a balancer, do not count."""
    found = [c for c in response.cookies if c.partition("=")[0].strip().lower() == "kbs-session-id"]
    match = _COOKIE.fullmatch(found[0]) if len(found) == 1 else None
    if found and match is None:
        raise KeySourceResponseError(f"{broker.url.source} names no session, or several")
    return None if match is None else match[1]


def _json(doc: dict[str, Any]) -> bytearray:
    return bytearray(strict_json.dumps(doc).encode())
