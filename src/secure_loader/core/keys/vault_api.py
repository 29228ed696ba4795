"""How HashiCorp Vault and OpenBao are asked, whatever for: by a token, or as an AppRole.

Who asks is told by the variables that Vault's own tools read; the address is the reference's alone, so that no variable
can send a token elsewhere.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from ...errors import KeyAccessError, KeySourceDeniedError, KeySourceUnreachableError
from ..secrets import Secret, wipe
from .fetch import reading
from .net import Deadline, Response, Rules, Url, check_status, request
from .tokens import token_in, word_of_file, word_of_variable


def vault_rules(rules: Rules) -> Rules:
    """Rules with Vault's own authority, if there is one: it does not vouch for other services, and the other way round."""
    roots = os.environ.get("VAULT_CACERT") or rules.tls.ca_file
    return dataclasses.replace(rules, tls=dataclasses.replace(rules.tls, ca_file=roots))


def ask(
    url: Url,
    rules: Rules,
    deadline: Deadline,
    headers: dict[str, str | Secret],
    body: bytearray | None = None,
    *,
    want_errors: bool = False,
) -> Response:
    """Ask once, where the path of ``url`` follows ``/v1``. Arguments and errors as for :func:`core.keys.net.request`."""
    # Agents of Vault refuse requests without the first, which a forged request cannot carry.
    headers = {"X-Vault-Request": "true", **headers}
    if namespace := os.environ.get("VAULT_NAMESPACE"):
        headers["X-Vault-Namespace"] = namespace
    api = dataclasses.replace(url, path=f"/v1{url.path}")
    method = "GET" if body is None else "POST"
    return request(api, rules, deadline, method=method, headers=headers, body=body, want_errors=want_errors)


def check(response: Response, url: Url) -> None:
    """Raise for every status but 200, as :func:`core.keys.net.check_status`."""
    if response.status == 403:
        raise KeySourceDeniedError(
            f"{url.source} denies the key (HTTP 403)",
            hint="the token is wrong or expired, or no policy lets it do this",
        )
    if response.status in (501, 503):
        raise KeySourceUnreachableError(f"{url.source} is sealed or not set up (HTTP {response.status})")
    if response.status in (472, 473):
        raise KeySourceUnreachableError(
            f"{url.source} is a standby (HTTP {response.status})", hint="name the active node"
        )
    check_status(response, url)


def find_token(url: Url, rules: Rules, deadline: Deadline) -> Secret:
    """The token to ask with: the first that is set of a token, its file, an AppRole, and what ``vault login`` left.

    Raises:
        KeyAccessError: There is none, it cannot be used, or the AppRole is not let in.
    """
    if os.environ.get("VAULT_TOKEN"):
        return word_of_variable("VAULT_TOKEN")
    if named := os.environ.get("VAULT_TOKEN_FILE"):
        return word_of_file(Path(named), "token file")
    if role := os.environ.get("VAULT_ROLE_ID"):
        return _login(role, url, rules, deadline)
    # Not Path.expanduser, which raises where nobody knows the home folder, and not Path.exists, which may.
    left = os.path.expanduser("~/.vault-token")
    if os.path.isabs(left) and os.path.exists(left):
        return word_of_file(Path(left), "token file")
    raise KeyAccessError(
        f"{url.source}: there is no token to ask with",
        hint="set VAULT_TOKEN_FILE, or VAULT_ROLE_ID and VAULT_SECRET_ID_FILE, or VAULT_TOKEN; or log in with vault or bao",
    )


def _login(role: str, url: Url, rules: Rules, deadline: Deadline) -> Secret:
    """A token for an AppRole."""
    named = os.environ.get("VAULT_SECRET_ID_FILE")
    if not named:
        raise KeyAccessError("VAULT_ROLE_ID is set, and VAULT_SECRET_ID_FILE, which goes with it, is not")
    with word_of_file(Path(named), "secret id file") as secret_id:
        before = b'{"role_id":' + json.dumps(role).encode() + b',"secret_id":"'
        body = bytearray().join([before, secret_id.reveal(), b'"}'])
    try:
        login = dataclasses.replace(url, path="/auth/approle/login", query="")
        response = ask(login, rules, deadline, {}, body)
    finally:
        wipe(body)
    if response.status in (400, 403):
        raise KeySourceDeniedError(f"{url.source} denies the AppRole (HTTP {response.status})")
    check(response, url)
    return reading(response, url, lambda answer: token_in(answer, "auth", "client_token"))
