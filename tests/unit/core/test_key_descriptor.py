"""Keys from inherited descriptors: once, to the end, in bounded time, and nobody else's."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from secure_loader.core.aead import ALGORITHMS
from secure_loader.core.keys import descriptor
from secure_loader.core.keys.held import forget_keys, held
from secure_loader.core.keys.local import keys_at
from secure_loader.core.keys.provider import KeyRequest, KeyRing
from secure_loader.errors import KeyAccessError
from tests.attacks.kit import KEY, assert_no_secret, master

TEXT = json.dumps({"keys": [KEY.document(), master("other", 3).document()]}).encode()
REQUEST = KeyRequest(KEY.kid, ALGORITHMS["aes256gcm"])


@pytest.fixture(autouse=True)
def nothing_is_remembered():
    yield
    with held() as table:
        table.clear()


@pytest.fixture
def pipe():
    """Both ends of a pipe whose reading end counts as inherited; what is left of them is closed."""
    ends = os.pipe()
    os.set_inheritable(ends[0], True)
    yield ends
    for fd in ends:
        with contextlib.suppress(OSError):
            os.close(fd)


def write(fd: int, data: bytes = TEXT) -> None:
    os.write(fd, data)
    os.close(fd)


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_read_once_remembered_and_closed(pipe):
    write(pipe[1])
    ring = KeyRing([f"fd:{pipe[0]}"])
    assert bytes(ring.resolve(REQUEST).secret.reveal()) == bytes(KEY.secret.reveal())
    assert not is_open(pipe[0])
    assert ring.resolve(REQUEST) is not None, "remembered"
    assert KeyRing([f"fd:{pipe[0]}"]).resolve(KeyRequest("other", ALGORITHMS["aes256gcm"])) is not None
    assert [k.kid for k in keys_at(f"fd:{pipe[0]}")] == [KEY.kid, "other"]


def test_what_is_forgotten_stays_forgotten(pipe):
    """The number may belong to something else by now."""
    write(pipe[1])
    secret = keys_at(f"fd:{pipe[0]}")[0].secret.reveal()
    assert any(secret)
    forget_keys()
    assert not any(secret), "overwritten"
    with pytest.raises(KeyAccessError, match="was read before, and its key was forgotten"):
        keys_at(f"fd:{pipe[0]}")


def test_what_arrives_in_pieces(pipe):
    def slowly():
        for byte in TEXT[:20]:
            os.write(pipe[1], bytes([byte]))
            time.sleep(0.001)
        write(pipe[1], TEXT[20:])

    thread = threading.Thread(target=slowly)
    thread.start()
    assert len(keys_at(f"fd:{pipe[0]}")) == 2
    thread.join()


@pytest.mark.parametrize("written", [b"", b"x", TEXT])
def test_a_pipe_without_end(pipe, monkeypatch, written):
    monkeypatch.setattr(descriptor, "DEADLINE", 0.05)
    os.write(pipe[1], written)
    with pytest.raises(KeyAccessError, match=r"did not end within 0.05 seconds") as caught:
        keys_at(f"fd:{pipe[0]}")
    assert "must close its end" in caught.value.hint
    assert not is_open(pipe[0])


def test_a_pipe_that_never_stops(pipe):
    def forever():
        try:
            while True:
                os.write(pipe[1], bytes(4096))
        except OSError:
            pass

    thread = threading.Thread(target=forever)
    thread.start()
    with pytest.raises(KeyAccessError, match="holds more than 65536 bytes"):
        keys_at(f"fd:{pipe[0]}")
    thread.join(timeout=10)
    assert not thread.is_alive(), "the reading end is closed"


def test_another_reader_that_is_quicker(pipe, monkeypatch):
    """poll saw something that is gone when it is read."""
    monkeypatch.setattr(descriptor, "DEADLINE", 0.2)
    other = os.dup(pipe[0])
    os.write(pipe[1], b"x")
    real = os.readv

    def late(fd, buffers):
        os.set_blocking(other, False)
        with contextlib.suppress(BlockingIOError):
            os.read(other, 1)
        return real(fd, buffers)

    monkeypatch.setattr(descriptor.os, "readv", late)
    try:
        with pytest.raises(KeyAccessError, match="did not end"):
            keys_at(f"fd:{pipe[0]}")
    finally:
        os.close(other)


@pytest.mark.parametrize(
    ("text", "message"), [(b"", "JWK"), (b"{", "JWK"), (b"\xff\xfe", "JWK"), (b'{"keys":[]}', "holds no")]
)
def test_what_is_no_key(pipe, text, message):
    write(pipe[1], text)
    with pytest.raises(KeyAccessError, match=f"file descriptor {pipe[0]}.*{message}"):
        keys_at(f"fd:{pipe[0]}")
    assert not is_open(pipe[0])


def test_a_descriptor_of_ours_is_left_alone(tmp_path):
    """The number was meant for another process: this one is a model file, or the socket of a server."""
    path = tmp_path / "a.jwk"
    path.write_bytes(TEXT)
    path.chmod(0o600)
    with path.open("rb") as f:
        with pytest.raises(KeyAccessError, match="was not inherited: this process has opened it"):
            keys_at(f"fd:{f.fileno()}")
        assert f.read() == TEXT


@pytest.mark.parametrize("kind", ["socket", "folder", "zero", "public file"])
def test_what_is_neither_pipe_nor_private_file(tmp_path, kind):
    left, right = socket.socketpair()
    public = tmp_path / "public.jwk"
    public.write_bytes(TEXT)
    public.chmod(0o644)
    places = {"folder": tmp_path, "zero": "/dev/zero", "public file": public}
    fd = os.dup(left.fileno()) if kind == "socket" else os.open(places[kind], os.O_RDONLY)
    left.close()
    right.close()
    os.set_inheritable(fd, True)
    with pytest.raises(
        KeyAccessError, match="can be read by others" if "file" in kind else "neither a pipe nor a file"
    ):
        keys_at(f"fd:{fd}")
    if is_open(fd):
        os.close(fd)


def test_a_file_without_a_name():
    fd = os.memfd_create("key", 0)
    os.write(fd, TEXT)
    os.lseek(fd, 0, os.SEEK_SET)
    assert len(keys_at(f"fd:{fd}")) == 2
    assert not is_open(fd)


@pytest.mark.parametrize("data", [TEXT, b"no key"])
def test_the_pipe_is_left_as_it_was_for_others_who_have_it(pipe, data):
    """Whether reads wait is a setting of the open pipe, which other processes may share."""
    shared = os.dup(pipe[0])
    try:
        write(pipe[1], data)
        with contextlib.suppress(KeyAccessError):
            keys_at(f"fd:{pipe[0]}")
        assert os.get_blocking(shared)
        assert os.read(shared, 1) == b"", "to its end"
    finally:
        os.close(shared)


@pytest.mark.parametrize("reference", ["", "x", "-1", "+3", "03", " 3", "3 ", "1", "2", "99999999", "³", "3/"])
def test_what_is_no_descriptor(reference):
    with pytest.raises(KeyAccessError, match="key reference fd:"):
        keys_at(f"fd:{reference}")


def test_a_descriptor_that_is_not_open():
    with pytest.raises(KeyAccessError, match="file descriptor 99999 is not open") as caught:
        keys_at("fd:99999")
    assert "child processes" in caught.value.hint


def test_a_malformed_key_shows_nowhere(pipe):
    import traceback

    write(pipe[1], TEXT.replace(b'"oct"', b'"RSA"'))
    with pytest.raises(KeyAccessError, match="none of oct, OKP and AKP") as caught:
        KeyRing([f"fd:{pipe[0]}"]).resolve(REQUEST)
    assert_no_secret("".join(traceback.TracebackException.from_exception(caught.value, capture_locals=True).format()))


CHILD = """
import os, sys
from secure_loader.core.keys.local import keys_at
print([k.kid for k in keys_at(sys.argv[1])], os.path.realpath("/proc/self/fd/0"))
"""


def test_standard_input_and_a_real_child():
    done = subprocess.run([sys.executable, "-c", CHILD, "fd:0"], input=TEXT, capture_output=True, check=True)
    assert done.stdout.decode().split() == ["['enc-1',", "'other']", "/dev/null"]
    fd = os.memfd_create("key")
    os.write(fd, TEXT)
    os.lseek(fd, 0, os.SEEK_SET)
    done = subprocess.run([sys.executable, "-c", CHILD, f"fd:{fd}"], pass_fds=[fd], capture_output=True, check=True)
    os.close(fd)
    assert b"enc-1" in done.stdout


def test_a_child_does_not_wait_for_a_lock_that_nobody_holds_there():
    code = """
import os, threading, warnings
warnings.simplefilter("ignore")
from secure_loader.core.keys.held import forget_keys, held
go, done = threading.Event(), threading.Event()
def hold():
    with held():
        go.set()
        done.wait()
thread = threading.Thread(target=hold)
thread.start()
go.wait()
pid = os.fork()
if not pid:
    forget_keys()
    os._exit(0)
status = os.waitpid(pid, 0)[1]
done.set()
thread.join()
raise SystemExit(os.waitstatus_to_exitcode(status))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=20, check=False).returncode == 0
