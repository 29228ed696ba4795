"""``transit:https://HOST:8200/MOUNT/keys/NAME``: a key of the transit engine of HashiCorp Vault or OpenBao.

The key never leaves the server: it wraps a model's master key for whoever publishes, and unwraps it for whoever loads,
bound to the model by associated data.
"""

from __future__ import annotations

import base64
import dataclasses
import re
from collections.abc import Callable
from typing import ClassVar, TypeVar

from ...errors import KeyAccessError, KeySourceDeniedError, KeySourceResponseError
from .. import strict_json
from ..recipient import WrapContext
from ..secrets import Secret, wipe
from .carried import secret_in, with_secret
from .fetch import reading
from .net import Deadline, Response, Rules, Url, parse_url
from .vault_api import ask, check, find_token, vault_rules
from .wrapping import WrappingProvider

_T = TypeVar("_T")

_PATH = re.compile(r"/(?P<mount>(?!v1/)[^/]+(?:/[^/]+)*)/keys/(?P<name>[^/]+)")
_CIPHERTEXT = re.compile(r"[a-z]+:v[1-9][0-9]{0,9}:[A-Za-z0-9+/]{16,8000}={0,2}")
# What the server says, and what of it is told; its own words are not repeated.
_DENIED = {
    "too old": "denies the key: the version of it that wrapped this is disallowed (min_decryption_version)",
    "authentication failed": "does not unwrap: it was wrapped by another key or for another model, or was altered",
    "invalid ciphertext": "does not unwrap: it was wrapped by a version of the key that is not there, or was altered",
}
_WRONG = {
    "non-AEAD": "cannot bind a master key to a model with this type of key",
    "key derivation": "cannot wrap with a derived key",
    "unknown key type": "has no key of that name",
    "key not found": "has no key of that name",
}
_HINT = "make one with: vault write -f MOUNT/keys/NAME type=aes256-gcm96"


class TransitProvider(WrappingProvider):
    """Keys of a transit engine."""

    alg: ClassVar[str] = "vault-transit"

    def kid(self, reference: str) -> str:
        """See :meth:`WrappingProvider.kid`: ``MOUNT/keys/NAME``."""
        return self._locate(reference)[0].path[1:]

    def wrap_key(self, reference: str, master: Secret, context: WrapContext) -> bytes:
        """See :meth:`WrappingProvider.wrap_key`."""
        # An engine asked to encrypt under a name that it does not know makes a key of that name, if the token may. Of a
        # type that does not exist it makes none; where there is a key, the type is not looked at.
        after = b'","type":"must-exist","associated_data":"%b"}' % _bound(context)
        return self._ask(reference, "encrypt", with_secret(b'{"plaintext":"', master, after), _ciphertext_of)

    def unwrap_key(self, reference: str, wrapped: bytes, context: WrapContext) -> Secret:
        """See :meth:`WrappingProvider.unwrap_key`."""
        text = wrapped.decode("ascii", errors="replace")
        if not _CIPHERTEXT.fullmatch(text):
            raise KeyAccessError(f"what is wrapped for {self.kid(reference)} is not a ciphertext of a transit engine")
        body = bytearray(b'{"ciphertext":"%b","associated_data":"%b"}' % (wrapped, _bound(context)))
        return self._ask(reference, "decrypt", body, lambda answer: secret_in(answer, "data", "plaintext")[1])

    def _locate(self, reference: str) -> tuple[Url, Rules, str, str]:
        rules = vault_rules(self.rules)
        url = parse_url(reference, rules)
        match = _PATH.fullmatch(url.path)
        if match is None or url.query:
            raise KeyAccessError(
                f"{url.source}: the reference names no key of a transit engine",
                hint="transit:https://HOST:8200/MOUNT/keys/NAME",
            )
        return url, rules, match["mount"], match["name"]

    def _ask(self, reference: str, what: str, body: bytearray, read: Callable[[bytearray], _T]) -> _T:
        try:
            url, rules, mount, name = self._locate(reference)
            deadline = Deadline(self.seconds)
            with find_token(url, rules, deadline) as token:
                api = dataclasses.replace(url, path=f"/{mount}/{what}/{name}")
                response = ask(api, rules, deadline, {"X-Vault-Token": token}, body, want_errors=True)
        finally:
            wipe(body)
        if response.status == 400:
            _explain(response, url)
        check(response, url)
        return reading(response, url, read)


def _bound(context: WrapContext) -> bytes:
    return base64.b64encode(context.encode())


def _ciphertext_of(body: bytearray) -> bytes:
    answer = strict_json.loads(bytes(body), what="answer", scan=True, any_number=True)
    data = answer.get("data") if isinstance(answer, dict) else None
    text = data.get("ciphertext") if isinstance(data, dict) else None
    if not isinstance(text, str) or not _CIPHERTEXT.fullmatch(text):
        raise KeyAccessError("the answer is not that of a transit engine")
    return text.encode("ascii")


def _explain(response: Response, url: Url) -> None:
    """Raise what a refusal means. The status says nothing: everything that is not a question of permission has 400."""
    for words, meaning in _WRONG.items():
        if words.encode() in response.body:
            raise KeySourceResponseError(f"{url.source} {meaning}", hint=_HINT)
    for words, meaning in _DENIED.items():
        if words.encode() in response.body:
            raise KeySourceDeniedError(f"{url.source} {meaning}")
    raise KeySourceResponseError(f"{url.source} answers HTTP 400 to what a transit engine should understand")
