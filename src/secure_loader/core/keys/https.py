"""``https://HOST/PATH``: a JWK, or a JWK set with exactly one key of the wanted name."""

from __future__ import annotations

from ...errors import KeyAccessError
from .fetch import FetchingProvider, only_master, reading
from .jwk import MasterKey, parse_keys
from .net import Deadline, check_status, parse_url, request
from .provider import KeyRequest


class HttpsProvider(FetchingProvider):
    """JWK sets behind https, for services that tell callers apart by address or client certificate."""

    def fetch(self, reference: str, key: KeyRequest) -> MasterKey | None:
        """See :meth:`FetchingProvider.fetch`; ``reference`` is a URL without its scheme."""
        url = parse_url(f"https:{reference}", self.rules)
        if url.query:
            raise KeyAccessError(
                f"{url.source}: a key reference must not hold a query",
                hint="references are shown in logs and process lists; show a client certificate instead",
            )
        response = request(url, self.rules, Deadline(self.seconds))
        check_status(response, url)
        keys = reading(response, url, lambda body: parse_keys(body, "the answer"))
        return only_master(keys, key.kid, url)
