"""A real ``vllm serve`` for the length of a ``with`` block: started, waited for, asked, and always stopped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SMALL_CPU_SETTINGS = ("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4")
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; unset, vLLM takes nearly all memory of the machine, and fails if it cannot
    "VLLM_HOST_IP": "127.0.0.1",  # its processes talk to each other here and nowhere else
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
# A proxy setting of the user must not catch requests to 127.0.0.1.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(RuntimeError):
    """The server did not start, did not answer or did not stop."""


class Server:
    """``vllm serve FOLDER ...`` on a free port of 127.0.0.1, in a process group of its own."""

    def __init__(
        self,
        folder: Path | str,
        *arguments: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
        timeout: float = 600,
    ) -> None:
        self.port = _free_port()
        self.log = log
        self.command: Sequence[str] = (
            "vllm",
            "serve",
            str(folder),
            *arguments,
            *("--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "demo"),
            *SMALL_CPU_SETTINGS,
        )
        self.started_in = 0.0
        self._environment = (os.environ if environment is None else environment) | ENVIRONMENT
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        start = time.monotonic()
        program = Path(sys.executable).parent / self.command[0]  # of this environment, whatever PATH says
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [program, *self.command[1:]],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # one group to signal; and Ctrl-C reaches us alone, so that we stop it in order
            )
        try:
            self._wait_until_healthy(start + self._timeout)
        except BaseException:
            self._stop()
            raise
        self.started_in = time.monotonic() - start
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def ask(self, question: str, *, max_tokens: int = 24) -> str:
        """One chat request over HTTP, decoded greedily."""
        body = {"model": "demo", "messages": [{"role": "user", "content": question}]}
        body |= {"max_tokens": max_tokens, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with _DIRECT.open(request, timeout=120) as response:
                return json.load(response)["choices"][0]["message"]["content"]
        except urllib.error.URLError as error:
            raise ServerError(f"no answer: {error}\n{self.log_tail()}") from error

    def weights_seconds(self) -> float | None:
        """What vLLM itself says that loading the weights took."""
        found = re.search(r"Loading weights took ([\d.]+) seconds", self.log.read_text(errors="replace"))
        return float(found[1]) if found else None

    def log_tail(self, lines: int = 25) -> str:
        """The end of the server's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _wait_until_healthy(self, deadline: float) -> None:
        assert self._process is not None
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(f"vllm ended with {self._process.returncode} before it served\n{self.log_tail()}")
            try:
                with _DIRECT.open(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except OSError:  # URLError is one: not listening yet, or not healthy yet
                time.sleep(0.25)
        raise ServerError(f"vllm was not healthy after {self._timeout:.0f} s\n{self.log_tail()}")

    def _stop(self) -> None:
        """End the whole group, politely and then not; a second Ctrl-C meanwhile must not leave it half stopped."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        except ValueError:  # not in the main thread, where no Ctrl-C arrives either
            previous = None
        try:
            for number, patience in ((signal.SIGINT, 20), (signal.SIGKILL, 20)):
                if _group_ends(process, number, patience):
                    return
            raise ServerError(f"processes of group {process.pid} would not end")
        finally:
            if previous is not None:
                signal.signal(signal.SIGINT, previous)


def _group_ends(process: subprocess.Popen[bytes], number: signal.Signals, patience: float) -> bool:
    """Signal the group of ``process`` and say whether all of it ended within ``patience`` seconds."""
    if _living(process.pid):
        with contextlib.suppress(ProcessLookupError):  # it ended just now
            os.killpg(process.pid, number)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        process.poll()  # reaps the leader
        if not _living(process.pid):
            return True
        time.sleep(0.1)
    return False


def _living(group: int) -> list[int]:
    """The processes of a group that still run; a zombie that nobody has reaped yet does not."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # ended while we looked
            continue
        if int(its_group) == group and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
