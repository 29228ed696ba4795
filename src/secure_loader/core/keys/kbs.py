"""``kbs:///REPOSITORY/TYPE/TAG``: a resource of a Trustee key broker, which hands keys to attested machines only.

``kbs://HOST:PORT/…`` names the broker; without a host it is the one of the setting ``kbs_url``. The resource holds a JWK
or JWK set, or nothing but the bytes of a master key, whose name and algorithm are then those that the file asks for: the
key check value in the file's signed header proves that it is the one. How this process shows where it runs is the
setting ``kbs_mode``.
"""

from __future__ import annotations

import re
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from ...config import LoaderConfig
from ...errors import KeyAccessError, KeySourceDeniedError, KeySourceResponseError, KeySourceUnreachableError
from ..secrets import Secret, wipe
from .evidence import evidence_provider
from .fetch import FetchingProvider, only_master
from .jwk import MasterKey
from .local import parse, read_private
from .net import Deadline, Rules, Url, parse_url, request
from .provider import KeyRequest, LocalUnwrapper
from .rcar import MAX_ANSWER, Broker, attested_resource, passport_resource

_PART = r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}"
_REFERENCE = re.compile(rf"//(?P<authority>[^/]*)/(?P<path>{_PART}/{_PART}/{_PART})")
_TEXT = re.compile(rb"[ \t\r\n]*\{")
_TOKEN = re.compile(rb"\s*([A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+)\s*")


class KbsProvider(FetchingProvider):
    """Resources of a Trustee key broker."""

    def __init__(self) -> None:
        super().__init__()
        self._config = LoaderConfig()

    def configure(self, config: LoaderConfig) -> None:
        """See :class:`core.keys.provider.Configurable`."""
        super().configure(config)
        self._config = config

    def fetch(self, reference: str, request: KeyRequest) -> MasterKey | None:
        """See :meth:`FetchingProvider.fetch`; ``reference`` is a URI without ``kbs:``."""
        authority, path = parse_resource(reference)
        deadline = Deadline(self.seconds)
        if self._config.kbs_mode == "cdh":
            return _key_in(*self._by_guest(authority, path, deadline), request)
        broker = Broker(broker_url(authority, self._config, self.rules), self.rules, deadline)
        if self._config.kbs_mode == "token":
            return _key_in(self._by_token(broker, path), broker.url, request)
        providers = [evidence_provider(name) for name in self._config.kbs_evidence]
        return _key_in(attested_resource(broker, path, providers), broker.url, request)

    def _by_token(self, broker: Broker, path: str) -> bytearray:
        config = self._config
        if config.kbs_token_file is None or config.kbs_token_key_file is None:
            raise KeyAccessError('kbs_mode = "token" needs kbs_token_file and kbs_token_key_file')
        key = _private_key(Path(config.kbs_token_key_file))
        with read_token(Path(config.kbs_token_file), "attestation token file") as token:
            return passport_resource(broker, path, token, key)

    def _by_guest(self, authority: str, path: str, deadline: Deadline) -> tuple[bytearray, Url]:
        """What the Confidential Data Hub of this guest gets from its broker. It listens on loopback alone, without TLS."""
        if authority:
            raise KeyAccessError(
                'a kbs: reference must not name a host under kbs_mode = "cdh": the guest knows its broker',
                hint="kbs:///REPOSITORY/TYPE/TAG",
            )
        url = Url("http", "127.0.0.1", self._config.kbs_cdh_port, f"/cdh/resource/{path}")
        response = request(url, self.rules, deadline, max_body=MAX_ANSWER)
        status, hint = response.status, "its log says whether the broker is away, or says no"
        if status == 200:
            return response.body, url
        response.wipe()
        if status in (401, 403):
            raise KeySourceDeniedError(f"{url.source} denies the key (HTTP {status})", hint=hint)
        if status == 429 or status >= 500:
            raise KeySourceUnreachableError(f"{url.source} did not get the key (HTTP {status})", hint=hint)
        raise KeySourceResponseError(f"{url.source} has no such resource (HTTP {status})", hint=hint)


def parse_resource(reference: str) -> tuple[str, str]:
    """Host and port, or nothing, and ``repository/type/tag`` of what follows ``kbs:``.

    Raises:
        KeyAccessError: It is no such reference.
    """
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise KeyAccessError(
            "a kbs: reference names no resource",
            hint="kbs:///REPOSITORY/TYPE/TAG or kbs://HOST:PORT/REPOSITORY/TYPE/TAG, of letters, digits, dots, dashes and "
            "underscores; no part begins with a dot",
        )
    return match["authority"], match["path"]


def broker_url(authority: str, config: LoaderConfig, rules: Rules) -> Url:
    """The address of a broker: of the one that a reference names, else of the default one.

    Raises:
        KeyAccessError: There is none, or it cannot be used.
    """
    if not authority and config.kbs_url is None:
        raise KeyAccessError(
            "a kbs: reference names no broker, and there is no default one",
            hint='set kbs_url or SECURE_LOADER_KBS_URL to https://HOST:PORT; or, in a confidential guest, kbs_mode = "cdh"',
        )
    url = parse_url(f"https://{authority}/" if authority else str(config.kbs_url), rules)
    if url.path != "/" or url.query:
        raise KeyAccessError("kbs_url is the address of a broker, without a path")
    return url


def _key_in(resource: bytearray, url: Url, request: KeyRequest) -> MasterKey | None:
    """The key that a resource holds; the resource is wiped."""
    length = request.algorithm.key_bytes
    if len(resource) == length:
        return _bare_key(resource, url, request)
    if not _TEXT.match(resource):
        said = f"{url.source}: the resource is neither a JWK nor the {length} bytes of a key ({len(resource)} bytes)"
        wipe(resource)
        raise KeySourceResponseError(said)
    try:
        return only_master(parse(resource, "the resource"), request.kid, url)
    except KeySourceResponseError:
        raise
    except KeyAccessError as e:
        message, hint = e.message, e.hint
    raise KeySourceResponseError(f"{url.source}: {message}", hint=hint)


def _bare_key(resource: bytearray, url: Url, request: KeyRequest) -> MasterKey:
    secret = Secret(resource)
    if request.kcv is None or request.file_id is None:
        raise KeySourceResponseError(
            f"{url.source}: the resource is a key without a name, and the file has no value to check it against",
            hint="put the JWK into the resource instead",
        )
    key = MasterKey(request.kid, request.algorithm, secret)
    # Here as well, so that no key is remembered by a name that nothing has proven.
    LocalUnwrapper(key, request)
    return key


def read_token(path: Path, what: str) -> Secret:
    """A token from a file that nobody else can read.

    Args:
        path: The file, which holds a JWT and nothing else.
        what: What it is called in messages.

    Raises:
        KeyAccessError: It cannot be used, or is kept carelessly.
    """
    with Secret(read_private(path, what)) as text:
        match = _TOKEN.fullmatch(text.reveal())
        if match is None:
            raise KeyAccessError(f"{what} does not hold a JWT, and nothing else", path=path)
        return Secret(text.reveal()[slice(*match.span(1))])


def _private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The P-256 key that was attested, from PEM."""
    text = read_private(path, "attested key file")
    try:
        key = load_pem_private_key(text, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    finally:
        wipe(text)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise KeyAccessError(
            "attested key file does not hold a P-256 private key in PEM, without a passphrase", path=path
        )
    return key
