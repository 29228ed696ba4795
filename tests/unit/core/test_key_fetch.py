"""Asking a service once for a file set: what threads share, and forked processes do not."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from secure_loader.core.keys.fetch import FetchingProvider
from secure_loader.core.keys.jwk import MasterKey
from secure_loader.core.keys.provider import KeyRequest
from secure_loader.core.recipient import Recipient
from secure_loader.errors import KeySourceDeniedError, KeySourceUnreachableError
from tests.attacks.kit import KEY

REQUEST = KeyRequest(KEY.kid, KEY.algorithm)

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


class Interrupted(FetchingProvider):
    """The first who asks presses ^C while others wait for the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.waiting = threading.Event()

    def fetch(self, reference: str, request: KeyRequest) -> MasterKey | None:
        self.asked += 1
        if self.asked == 1:
            assert self.waiting.wait(20)
            # The others have reached the answer that will not come, or will see that there is none.
            time.sleep(0.05)
            raise KeyboardInterrupt
        return KEY


def test_an_interruption_is_for_one_thread_and_the_others_ask_for_themselves() -> None:
    service, found, interrupted = Interrupted(), [], []

    def ask() -> None:
        try:
            found.append(service.resolve("//host/", REQUEST))
        except KeyboardInterrupt as e:
            interrupted.append(type(e))

    first = threading.Thread(target=ask)
    first.start()
    others = [threading.Thread(target=ask) for _ in range(4)]
    for thread in others:
        thread.start()
    service.waiting.set()
    for thread in (first, *others):
        thread.join(20)
    assert interrupted == [KeyboardInterrupt]
    assert len(found) == 4
    assert None not in found
    assert service.asked == 2, "the others share one answer"
    assert service.resolve("//host/", REQUEST) is not None
    assert service.asked == 2


def test_an_error_is_shared_and_not_remembered() -> None:
    class Down(FetchingProvider):
        asked = 0

        def fetch(self, reference: str, request: KeyRequest) -> MasterKey | None:
            self.asked += 1
            raise KeySourceUnreachableError("down")

    service = Down()
    for _ in range(2):
        with pytest.raises(KeySourceUnreachableError, match="down"):
            service.resolve("//host/", REQUEST)
    assert service.asked == 2


def test_a_forked_process_does_not_wait_for_an_answer_of_its_parent() -> None:
    words = [sys.executable, "-W", "ignore", "-c", FORKING]
    assert subprocess.run(words, capture_output=True, check=True, timeout=60).stdout == b"0\n"


class Bound(FetchingProvider):
    """A service that unwraps for one model."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str | None] = []

    def fetch(self, reference: str, request: KeyRequest) -> MasterKey | None:
        self.asked.append(request.model_id)
        if request.model_id != "demo/model":
            raise KeySourceDeniedError("wrapped for another model")
        return KEY


def test_what_was_unwrapped_for_one_model_is_not_handed_out_for_another() -> None:
    """Who may sign one model copies the entries of another into it: they share names, and what is wrapped."""
    service, entries = Bound(), (Recipient("service", "key", b"wrapped"),)
    theirs = KeyRequest(KEY.kid, KEY.algorithm, "demo/model", recipients=entries)
    for _ in range(2):
        assert service.resolve("//host/", theirs) is not None
    with pytest.raises(KeySourceDeniedError):
        service.resolve("//host/", replace(theirs, model_id="mallory/model"))
    assert service.asked == ["demo/model", "mallory/model"]
