"""A real server with a real request: API server, engine core and worker are processes of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from examples.serving import Server, ServerError

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_serve(secure_llama_shards, publisher, engine_environment, tmp_path):
    arguments = ("--load-format", "secure", "--model-loader-extra-config.keys", str(publisher.home / "keys"))
    environment = dict(os.environ) | engine_environment
    with Server(secure_llama_shards, *arguments, log=tmp_path / "log", environment=environment) as server:
        assert server.ask("Hello", max_tokens=4)
        assert server.weights_seconds() is not None
    log = Path(server.log).read_text()
    assert "signed by publisher" in log


def test_server_that_is_not_asked_for_secure_ends_at_once(secure_qwen3, engine_environment, tmp_path):
    server = Server(secure_qwen3, log=tmp_path / "log", environment=dict(os.environ) | engine_environment)
    with pytest.raises(ServerError, match="--load-format secure"), server:
        pass
