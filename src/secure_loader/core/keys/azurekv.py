"""``azurekv:https://VAULT.vault.azure.net/keys/NAME[/VERSION]``: a key of Azure Key Vault or a Managed HSM, by REST.

The key never leaves the service. The RSA keys of a vault wrap no associated data: there the service wraps a fresh key (RSA-OAEP
with SHA-256), under which the master key is sealed, bound to the model, by AES-256-GCM. The AES keys of a Managed HSM
(``….managedhsm.azure.net``) seal the master key themselves.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ...errors import FormatError, KeyAccessError, KeySourceDeniedError, KeySourceResponseError
from .. import strict_json
from ..recipient import WrapContext
from ..secrets import Secret, wipe
from .bearer import Cloud
from .carried import secret_in, with_secret
from .fetch import reading
from .jwk import b64url
from .net import Deadline, Response, Url, check_status, parse_url, request
from .wrapping import WrappingProvider

_T = TypeVar("_T")

_RSA, _AES = "RSA-OAEP-256", "A256GCM"
# What an entry holds beside the names of algorithm and version.
_PARTS = {_RSA: {"value", "iv", "sealed"}, _AES: {"value", "iv", "tag"}}
_VERSION = re.compile(r"[0-9a-f]{32}")
_PATH = re.compile(r"/keys/(?P<name>[0-9A-Za-z-]{1,127})(?:/(?P<version>[0-9a-f]{32}))?")
_BASE64URL = re.compile(r"[A-Za-z0-9_-]{1,8000}")
_NONCE, _TAG = 12, 16
_HSM = re.compile(r"[^.]+\.managedhsm\.[a-z.]+")


def _cloud(audience: str) -> Cloud:
    return Cloud(
        name="Azure",
        variable="AZURE_ACCESS_TOKEN",
        file="AZURE_ACCESS_TOKEN_FILE",
        metadata="AZURE_POD_IDENTITY_AUTHORITY_HOST",
        path="/metadata/identity/oauth2/token",
        query=f"api-version=2018-02-01&resource=https%3A%2F%2F{audience}",
        header=("Metadata", "true"),
    )


class AzureKeyVaultProvider(WrappingProvider):
    """RSA keys of Azure Key Vault, and AES keys of a Managed HSM."""

    alg: ClassVar[str] = "azure-kv"

    def kid(self, reference: str) -> str:
        """See :meth:`WrappingProvider.kid`: ``VAULT/keys/NAME``, whatever the version."""
        url, name, _ = self._locate(reference)
        return f"{url.host.partition('.')[0]}/keys/{name}"

    def wrap_key(self, reference: str, master: Secret, context: WrapContext) -> bytes:
        """See :meth:`WrappingProvider.wrap_key`."""
        url, name, version = self._locate(reference)
        if _HSM.fullmatch(url.host):
            aad = b64url(context.encode())
            body = with_secret(b'{"alg":"A256GCM","value":"', master, f'","aad":"{aad}"}}'.encode(), url=True)
            entry = self._ask(
                url, name, version, "encrypt", body, lambda said: _entry_of(said, _AES, name, ("iv", "tag"))
            )
        else:
            with Secret(bytearray(os.urandom(32))) as fresh:
                iv, sealed = _seal(fresh, master, context)
                body = with_secret(b'{"alg":"RSA-OAEP-256","value":"', fresh, b'"}', url=True)
            entry = self._ask(url, name, version, "wrapkey", body, lambda said: _entry_of(said, _RSA, name, ()))
            entry |= {"iv": b64url(iv), "sealed": b64url(sealed)}
        return strict_json.dumps(entry).encode()

    def unwrap_key(self, reference: str, wrapped: bytes, context: WrapContext) -> Secret:
        """See :meth:`WrappingProvider.unwrap_key`."""
        url, name, version = self._locate(reference)
        entry = _parse(wrapped, self.kid(reference))
        if version not in (None, entry["version"]):
            raise KeyAccessError(
                f"{url.source}: version {entry['version']} of the key wrapped this, and the reference names another"
            )
        asked = {"alg": entry["alg"], "value": entry["value"]}
        if entry["alg"] == _AES:
            asked |= {"iv": entry["iv"], "tag": entry["tag"], "aad": b64url(context.encode())}
        what = "decrypt" if entry["alg"] == _AES else "unwrapkey"
        body = bytearray(strict_json.dumps(asked).encode())
        opened = self._ask(
            url, name, entry["version"], what, body, lambda said: _secret_of(said, name, entry["version"])
        )
        if entry["alg"] == _AES:
            return opened
        with opened:
            return _open(opened, entry, context, url)

    def _locate(self, reference: str) -> tuple[Url, str, str | None]:
        url = parse_url(reference, self.rules)
        match = _PATH.fullmatch(url.path)
        if match is None or url.query:
            raise KeyAccessError(
                f"{url.source}: the reference names no key of Azure Key Vault",
                hint="azurekv:https://VAULT.vault.azure.net/keys/NAME, and /VERSION behind it if need be",
            )
        return url, match["name"], match["version"]

    def _ask(
        self, at: Url, name: str, version: str | None, what: str, body: bytearray, read: Callable[[bytearray], _T]
    ) -> _T:
        try:
            deadline = Deadline(self.seconds)
            path = "/".join(["keys", name, *([version] if version else []), what])
            url = parse_url(f"{at.origin}/{path}?api-version=7.4", self.rules)
            # Tokens are for all vaults of a cloud, vault.azure.net or vault.azure.cn, not for one of them.
            cloud = _cloud(url.host.partition(".")[2] or url.host)
            headers: dict[str, str | Secret] = {"Authorization": cloud.authorization(url, self.rules, deadline)}
            response = request(url, self.rules, deadline, method="POST", headers=headers, body=body, want_errors=True)
        finally:
            wipe(body)
        _check(response, url, what)
        return reading(response, url, read)


def _seal(key: Secret, master: Secret, context: WrapContext) -> tuple[bytes, bytes]:
    """Nonce, and the sealed master key, under a key that is used once."""
    iv = os.urandom(_NONCE)
    return iv, AESGCM(key.reveal()).encrypt(iv, master.reveal(), context.encode())


def _open(key: Secret, entry: dict[str, str], context: WrapContext, url: Url) -> Secret:
    out = bytearray()
    try:
        iv, sealed = _bytes(entry["iv"]), _bytes(entry["sealed"])
        out = bytearray(max(0, len(sealed) - _TAG))
        AESGCM(key.reveal()).decrypt_into(iv, sealed, context.encode(), out)
    except (InvalidTag, ValueError):
        wipe(out)
        raise KeySourceDeniedError(
            f"{url.source} does not unwrap: it was wrapped by another key or for another model, or was altered"
        ) from None
    return Secret(out)


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _parse(wrapped: bytes, kid: str) -> dict[str, str]:
    """What :meth:`AzureKeyVaultProvider.wrap_key` wrote."""
    try:
        entry = strict_json.loads(wrapped, what="entry", scan=True)
    except FormatError:
        entry = None
    parts = _PARTS.get(entry.get("alg", "")) if isinstance(entry, dict) and isinstance(entry.get("alg"), str) else None
    if (
        parts is None
        or set(entry) != parts | {"alg", "version"}
        or not all(isinstance(entry[p], str) and _BASE64URL.fullmatch(entry[p]) for p in parts)
        or not _VERSION.fullmatch(str(entry["version"]))
        or len(entry["iv"]) != 16
    ):
        raise KeyAccessError(f"what is wrapped for {kid} is not what Azure Key Vault wraps")
    return dict(entry)


def _entry_of(body: bytearray, alg: str, name: str, more: tuple[str, ...]) -> dict[str, str]:
    answer = strict_json.loads(bytes(body), what="answer", scan=True, any_number=True)
    entry = {"alg": alg, "version": _version_of(answer, name)}
    for part in ("value", *more):
        text = answer.get(part)
        if not isinstance(text, str) or not _BASE64URL.fullmatch(text):
            raise KeyAccessError(f"the answer holds no {part} in base64url")
        entry[part] = text
    return entry


def _secret_of(body: bytearray, name: str, version: str) -> Secret:
    answer, secret = secret_in(body, "value")
    if _version_of(answer, name) != version:
        secret.wipe()
        raise KeyAccessError("the answer names another version of the key than was asked for")
    return secret


def _version_of(answer: Any, name: str) -> str:
    kid = answer.get("kid") if isinstance(answer, dict) else None
    match = re.search(r"/keys/([^/]+)/([0-9a-f]{32})$", kid) if isinstance(kid, str) else None
    if match is None or match[1].lower() != name.lower():
        raise KeyAccessError("the answer names another key than was asked for, or none")
    return match[2]


def _check(response: Response, url: Url, what: str) -> None:
    """Raise what an error means."""
    if response.status == 401:
        raise KeySourceDeniedError(
            f"{url.source} denies the key (HTTP 401)",
            hint="the access token has expired, or is for another audience than the vaults",
        )
    if response.status == 403:
        raise KeySourceDeniedError(
            f"{url.source} denies the key (HTTP 403)",
            hint="no role or policy allows it (wrapKey, unwrapKey; encrypt, decrypt in a Managed HSM), the key is disabled, or a firewall",
        )
    if response.status == 400 and what in ("unwrapkey", "decrypt"):
        raise KeySourceDeniedError(
            f"{url.source} does not unwrap: it was wrapped by another key or for another model, or was altered"
        )
    if response.status == 400:
        raise KeySourceResponseError(
            f"{url.source} cannot wrap with this key (HTTP 400)",
            hint="an RSA key is needed in a vault, an AES key of 256 bits in a Managed HSM",
        )
    check_status(response, url)
