"""``vault:https://HOST:8200/MOUNT/data/PATH``: a secret of the KV engine, version 2, of HashiCorp Vault or OpenBao.

The secret holds a JWK or JWK set as text in a field ``jwk``, or the members of a JWK as its fields.
"""

from __future__ import annotations

import re

from ...errors import KeyAccessError
from .. import strict_json
from .fetch import FetchingProvider, only_master, reading
from .jwk import Jwk, MasterKey, parse_key, parse_keys
from .lift import QUOTED, lift, restore
from .net import Deadline, parse_url
from .provider import KeyRequest
from .vault_api import ask, check, find_token, vault_rules

_PATH = re.compile(r"/(?!v1/)[^/]+(?:/[^/]+)*/data(?:/[^/]+)+")
_VERSION = re.compile(r"version=[1-9][0-9]{0,9}")


class VaultProvider(FetchingProvider):
    """Secrets of a KV version 2 engine."""

    def fetch(self, reference: str, key: KeyRequest) -> MasterKey | None:
        """See :meth:`FetchingProvider.fetch`; ``reference`` is a URL without ``/v1``."""
        rules = vault_rules(self.rules)
        url = parse_url(reference, rules)
        if not _PATH.fullmatch(url.path) or (url.query and not _VERSION.fullmatch(url.query)):
            raise KeyAccessError(
                f"{url.source}: the reference names no secret of a KV engine, version 2",
                hint="vault:https://HOST:8200/MOUNT/data/PATH, and ?version=N for an old version",
            )
        deadline = Deadline(self.seconds)
        with find_token(url, rules, deadline) as token:
            response = ask(url, rules, deadline, {"X-Vault-Token": token})
        check(response, url)
        return only_master(reading(response, url, _keys_of), key.kid, url)


def _keys_of(body: bytearray) -> list[Jwk]:
    """The keys in an answer of the KV engine."""
    lifted = lift(body, QUOTED)
    answer = strict_json.loads(bytes(body), what="answer", scan=True, any_number=True)
    outer = answer.get("data") if isinstance(answer, dict) else None
    secret, metadata = (outer.get("data"), outer.get("metadata")) if isinstance(outer, dict) else (None, None)
    if not isinstance(secret, dict) or not isinstance(metadata, dict):
        raise KeyAccessError("the answer is not that of a KV engine, version 2")
    if "jwk" not in secret:
        return [parse_key(restore({"kty": "oct", **secret}, lifted), "the secret")]
    text = secret["jwk"]
    if not isinstance(text, str):
        text = strict_json.dumps(text)
    return parse_keys(text, "field jwk of the secret", lifted)
