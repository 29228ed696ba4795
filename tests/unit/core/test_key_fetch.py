"""Asking a service once for a file set: what threads share, and forked processes do not."""

from __future__ import annotations

import subprocess
import sys

FORKING = """
import os, signal, threading
from secure_loader.core.aead import ALGORITHMS
from secure_loader.core.keys.fetch import FetchingProvider
from secure_loader.core.keys.provider import KeyRequest

asked, enough = threading.Event(), threading.Event()

class Slow(FetchingProvider):
    def fetch(self, reference, request):
        if os.getpid() == parent:
            asked.set()
            enough.wait(30)
        return None

parent, slow, request = os.getpid(), Slow(), KeyRequest("a", ALGORITHMS["aes256gcm"])
thread = threading.Thread(target=slow.resolve, args=("//host/", request))
thread.start()
asked.wait()
pid = os.fork()
if pid == 0:
    signal.alarm(5)
    os._exit(0 if slow.resolve("//host/", request) is None else 1)
status = os.waitpid(pid, 0)[1]
enough.set()
thread.join()
print(status)
"""


def test_a_forked_process_does_not_wait_for_an_answer_of_its_parent() -> None:
    words = [sys.executable, "-W", "ignore", "-c", FORKING]
    assert subprocess.run(words, capture_output=True, check=True, timeout=60).stdout == b"0\n"
