"""An authority, a genuine file to open, and the real OpenBao where it is installed."""

from __future__ import annotations

import os

import pytest

from tests.attacks.kit import KEY
from tests.integration.keys.openbao import OpenBao, running
from tests.integration.keys.services import Authority


@pytest.fixture(scope="session")
def authority(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def localhost(authority):
    """What a server on this machine shows."""
    return authority.issue("localhost", "127.0.0.1")


@pytest.fixture(scope="session")
def openbao(tmp_path_factory):
    """OpenBao behind TLS with a key at ``secret/models/demo``, a policy to read keys, and AppRole; shared by tests."""
    with running(tmp_path_factory.mktemp("openbao")) as server:
        server.put("models/demo", KEY.document())
        server.do(
            "POST", "sys/policies/acl/models", {"policy": 'path "secret/data/models/*" { capabilities = ["read"] }'}
        )
        server.do("POST", "sys/auth/approle", {"type": "approle"})
        server.do("POST", "auth/approle/role/loader", {"token_policies": "models", "token_ttl": "1m"})
        yield server


@pytest.fixture
def vault_user(openbao: OpenBao, tmp_path, monkeypatch):
    """Somebody who may read keys: no token of the person who runs the tests, a token file, and the authority."""
    for name in [name for name in os.environ if name.startswith(("VAULT_", "BAO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("VAULT_CACERT", str(openbao.authority))
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(openbao.token("models") + "\n")
    monkeypatch.setenv("VAULT_TOKEN_FILE", str(token))
    return token
