"""Threads start whole or not at all, whenever a signal comes."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from secure_loader.core.threads import start

# Signals come at all moments of a start, which takes some 50 us.
INTERRUPTED = """
import itertools, signal, time
import threading
from secure_loader.core.threads import start

class Stop(Exception): pass

def handler(number, frame):
    raise Stop

broken = []
threading.excepthook = lambda args: broken.append(repr(args.exc_value))
signal.signal(signal.SIGALRM, handler)
ran, started = [], 0
for delay in itertools.chain.from_iterable(range(1, 120) for _ in range(25)):
    begun = False
    try:
        signal.setitimer(signal.ITIMER_REAL, delay / 1e6)
        start(lambda: ran.append(1), "one")
        begun = True
        while True:
            pass
    except Stop:
        started += begun
time.sleep(0.5)
print(len(ran), started, len(broken), *broken[:1])
"""


def test_a_signal_while_a_thread_starts_breaks_none():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=120, check=True)
    ran, started, broken = map(int, done.stdout.split()[:3])
    assert not done.stderr
    assert broken == 0
    assert started < 25 * 119, "no signal came in time"
    assert ran >= started


def test_it_has_its_name_and_holds_nobody_up():
    seen, done = [], threading.Event()

    def work():
        seen.append(threading.current_thread())
        done.set()

    start(work, "secure-loader-test")
    assert done.wait(20)
    assert seen[0].name == "secure-loader-test"
    assert seen[0].daemon


def test_no_more_threads_is_an_error_or_nobody_comes(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    asked = threading.Event()
    monkeypatch.setattr(threading.Thread, "start", lambda self: (asked.set(), refuse(self)))
    start(pytest.fail, "secure-loader-test")
    assert asked.wait(20)
