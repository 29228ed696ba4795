"""A forked process never waits for a thread that only its parent has."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from secure_loader.core.forks import ForkLock
from tests.attacks.kit import build_file

# A thread of the parent is inside, holding what it holds, while the process forks; the child does the same by itself.
FORKING = """
import os, signal, sys, threading
inside, enough = threading.Event(), threading.Event()
parent = os.getpid()

def stay():
    if os.getpid() == parent:
        inside.set()
        enough.wait(30)

{setup}

thread = threading.Thread(target=work)
thread.start()
assert inside.wait(20)
pid = os.fork()
if pid == 0:
    signal.alarm(10)
    work()
    os._exit(0)
status = os.waitpid(pid, 0)[1]
enough.set()
thread.join()
print(status)
"""
LOCK = """
from secure_loader.core.forks import ForkLock
lock = ForkLock()
def work():
    with lock.here:
        stay()
"""
FILE = """
import pathlib
from tests.attacks.kit import Victim
from secure_loader.core.keys.provider import KeyRing
file = Victim().session.open_file(sys.argv[1])
resolve = file._keys.resolve
file._keys.resolve = lambda request: stay() or resolve(request)
work = file.unlock
"""
PASSPHRASE = """
from secure_loader.core.keys import passphrase
from secure_loader.errors import KeyAccessError
passphrase.read_private = lambda path: bytearray(b"no age file")
passphrase.find_passphrase = lambda path: stay() or passphrase.Secret(b"x")
provider = passphrase.PassphraseProvider()
def work():
    try:
        provider.keys("/nowhere")
    except KeyAccessError:
        pass
"""
RING = """
from secure_loader.core.keys import provider
from secure_loader.errors import ConfigError
make = provider.provider
provider.provider = lambda scheme: stay() or make(scheme)
ring = provider.KeyRing(["file:/nowhere"])
def work():
    ring._provider("file")
"""
FETCH = """
from secure_loader.core.keys.fetch import FetchingProvider
from secure_loader.core.keys.provider import KeyRequest
from tests.attacks.kit import KEY
class Table(dict):
    def setdefault(self, *args):
        stay()
        return super().setdefault(*args)
class Service(FetchingProvider):
    def fetch(self, reference, request):
        return KEY
service = Service()
service._found = Table()
def work():
    assert service.resolve("//host/", KeyRequest(KEY.kid, KEY.algorithm)) is not None
"""
HELD = """
from secure_loader.core.keys.held import held
def work():
    with held():
        stay()
"""


@pytest.mark.parametrize(
    "setup", [LOCK, FILE, PASSPHRASE, RING, FETCH, HELD], ids="lock file passphrase ring fetch held".split()
)
def test_a_lock_that_a_thread_of_the_parent_holds(tmp_path, setup):
    path = build_file(tmp_path / "x.safetensors")
    words = [sys.executable, "-W", "ignore", "-c", FORKING.format(setup=textwrap.dedent(setup)), str(path)]
    done = subprocess.run(words, capture_output=True, timeout=60, text=True, check=False)
    assert done.stdout == "0\n", done.stderr


def test_who_forks_inside_gives_back_its_own():
    code = """
    import os
    from secure_loader.core.forks import ForkLock
    lock = ForkLock()
    with lock.here:
        pid = os.fork()
        if pid == 0:
            assert lock.here.acquire(timeout=5)
            lock.here.release()
    if pid == 0:
        os._exit(0)
    print(os.waitpid(pid, 0)[1])
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.run(words, capture_output=True, timeout=60, text=True, check=True).stdout == "0\n"


def test_it_excludes():
    lock = ForkLock()
    with lock.here:
        assert not lock.here.acquire(blocking=False)
    assert lock.here.acquire(blocking=False)
