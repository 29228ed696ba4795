"""Putting a master key, and the policy that guards it, into a Trustee broker: what its administrators do.

The policy goes first: a key never lies there under one that was meant for something else.
"""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from ...config import LoaderConfig, load
from ...errors import ConfigError, KeyAccessError
from .. import strict_json
from ..checkpoint import Checkpoint
from ..policy import is_trivial
from ..policy_lint import carried
from ..secrets import Secret, wipe
from ..session import Session, TrustSources
from .fetch import rules_of
from .jwk import MasterKey, b64url
from .kbs import broker_url, parse_resource
from .local import read_private
from .net import Deadline
from .provider import split_reference
from .rcar import Broker, kind_of

_TOKEN_SECONDS = 300
_PACKAGE = re.compile(r"^[ \t]*package[ \t]+policy[ \t]*(?:#.*)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Published:
    """What :func:`publish` did.

    Attributes:
        broker: Address of the broker.
        resource: ``repository/type/tag``.
        key_id: kid of the key in it.
        policy: Whether the broker's policy was replaced.
    """

    broker: str
    resource: str
    key_id: str
    policy: bool


def publish(reference: str, key: MasterKey, token: Secret, policy: str | None, config: LoaderConfig) -> Published:
    """Put a key where a ``kbs:`` reference will find it.

    Args:
        reference: The whole reference.
        key: The key.
        token: Of an administrator.
        policy: Text of a resource policy, which replaces the broker's one; None leaves that.
        config: Settings: the default broker, TLS, deadline.

    Raises:
        ConfigError: No ``kbs:`` reference.
        KeySourceDeniedError: The broker does not take this administrator.
        KeySourceUnreachableError: Down, too slow, or out of order.
        KeySourceResponseError: It did not keep to the protocol.
        KeyAccessError: A reference or an address that cannot be used.
    """
    scheme, rest = split_reference(reference)
    if scheme != "kbs":
        raise ConfigError("publish takes a kbs: reference, as those who load will name it")
    authority, path = parse_resource(rest)
    rules = rules_of(config)
    broker = Broker(broker_url(authority, config, rules), rules, Deadline(config.key_timeout_seconds))
    if policy is not None:
        _put(
            broker, "resource-policy", token, bytearray(strict_json.dumps({"policy": b64url(policy.encode())}).encode())
        )
    _put(broker, f"resource/{path}", token, bytearray(json.dumps(key.document()).encode()))
    return Published(broker.url.origin, path, key.kid, policy is not None)


def _put(broker: Broker, what: str, token: Secret, body: bytearray) -> None:
    try:
        with Secret(bytearray(b"Bearer ") + token.reveal()) as bearer:
            response = broker.ask(what, {"Authorization": bearer}, body)
    finally:
        wipe(body)
    if response.status != 200:
        broker.refuse(response, kind_of(response))


def read_policy(path: str | os.PathLike[str]) -> str:
    """A resource policy from a file.

    Raises:
        ConfigError: Not a policy that a broker takes, or one that does not deny by default; or there is no engine to parse it.
        SourceError: Not readable.
    """
    return _for_brokers(carried(path), path)


def policy_of(model: str | os.PathLike[str], trust: TrustSources | None = None) -> str:
    """The resource policy that the publisher of a model wants brokers to enforce.

    Args:
        model: A folder or file, which is verified.
        trust: Whom to trust, as for :func:`core.session.safe_open`.

    Raises:
        ConfigError: It carries none for brokers such as these, or its files differ.
        VerificationError, FormatError, SourceError: As :func:`core.inspection.verify`.
    """
    session, where = Session(keys=[], trust=trust, config=load()), Path(model)
    checkpoint = Checkpoint(where, session) if where.is_dir() else None
    found = set()
    for name in [""] if checkpoint is None else checkpoint.shards():
        file = session.open_file(where) if checkpoint is None else checkpoint.open(name)
        with file.source:
            if file.verified is None:
                raise ConfigError("is not encrypted, and carries no policy", path=where)
            found.add(file.verified.envelope.policy.remote)
    if len(found) != 1:
        raise ConfigError("its files carry different policies for brokers", path=where)
    return _for_brokers(found.pop(), where)


def _for_brokers(text: str, where: str | os.PathLike[str]) -> str:
    if is_trivial(text) or not _PACKAGE.search(text):
        raise ConfigError(
            "holds no policy in package policy, which a broker takes",
            path=where,
            hint="configs/trustee.rego is one to start from",
        )
    return text


def admin_token(path: Path, role: str) -> Secret:
    """A token for an administrator, for five minutes, signed by his key.

    Args:
        path: His Ed25519 key, in PEM.
        role: What the broker's access rules call him.

    Raises:
        KeyAccessError: The key cannot be used, or is kept carelessly.
    """
    text = read_private(path, "administrator's key file")
    try:
        key = load_pem_private_key(text, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    finally:
        wipe(text)
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyAccessError(
            "administrator's key file does not hold an Ed25519 private key in PEM, without a passphrase",
            path=path,
            hint="openssl genpkey -algorithm ed25519 makes one",
        )
    now = int(time.time())
    parts = ({"alg": "EdDSA", "typ": "JWT"}, {"iat": now, "exp": now + _TOKEN_SECONDS, "role": role})
    signed = ".".join(b64url(strict_json.dumps(part).encode()) for part in parts)
    return Secret(f"{signed}.{b64url(key.sign(signed.encode()))}".encode())
