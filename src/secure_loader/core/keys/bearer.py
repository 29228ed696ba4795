"""Access tokens of clouds: from a variable, a file, or the metadata service of the machine, where the operator names it."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

from ...errors import KeyAccessError, KeySourceResponseError
from ..secrets import Secret
from .fetch import reading
from .net import METADATA, Deadline, Rules, Url, check_status, parse_url, request
from .tokens import token_in, word_of_file, word_of_variable


@dataclass(frozen=True, slots=True)
class Cloud:
    """Where a cloud's tools have access tokens from.

    Attributes:
        name: Of the cloud.
        variable: Environment variable with a token.
        file: Environment variable that names a file with one.
        metadata: Environment variable that names the metadata service, as HOST, HOST:PORT or http://HOST:PORT.
        path: Where tokens are there.
        query: And of which kind.
        header: What tells the service that nobody was tricked into asking.
        signs: Whether it answers with the same header.
        aliases: Names of the service.
    """

    name: str
    variable: str
    file: str
    metadata: str
    path: str
    query: str
    header: tuple[str, str]
    signs: bool = False
    aliases: tuple[str, ...] = ()

    def authorization(self, url: Url, rules: Rules, deadline: Deadline) -> Secret:
        """The header field ``Authorization`` for a request: the first that is set of variable, file, metadata service.

        Raises:
            KeyAccessError: There is no token.
        """
        with self._token(url, rules, deadline) as token:
            return Secret(bytearray().join([b"Bearer ", token.reveal()]))

    def _token(self, url: Url, rules: Rules, deadline: Deadline) -> Secret:
        if os.environ.get(self.variable):
            return word_of_variable(self.variable)
        if named := os.environ.get(self.file):
            return word_of_file(Path(named), "token file")
        if host := os.environ.get(self.metadata):
            return self._ask(host, rules, deadline)
        raise KeyAccessError(
            f"{url.source}: there is no access token of {self.name} to ask with",
            hint=f"set {self.file} or {self.variable}, or {self.metadata} where the machine has an identity of its own",
        )

    def _ask(self, named: str, rules: Rules, deadline: Deadline) -> Secret:
        host = named.removeprefix("http://").rstrip("/")
        # The name would be resolved by whoever answers; the address is the same on every machine.
        host = str(METADATA) if host in self.aliases else host
        rules = dataclasses.replace(rules, insecure_http_metadata=True)
        base = parse_url(f"http://{host}", rules)
        if base.path != "/" or base.query:
            raise KeyAccessError(f"{self.metadata} names no host", hint="HOST or HOST:PORT")
        where = dataclasses.replace(base, path=self.path, query=self.query)
        response = request(where, rules, deadline, headers=dict([self.header]))
        check_status(response, where)
        token = reading(response, where, lambda answer: token_in(answer, "access_token"))
        said = {name.lower(): value for name, value in response.headers.items()}
        if self.signs and said.get(self.header[0].lower()) != self.header[1]:
            token.wipe()
            raise KeySourceResponseError(f"{where.source} is not the metadata service of {self.name}")
        return token
