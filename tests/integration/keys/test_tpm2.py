"""``tpm2:`` keys in swtpm: sealed to one TPM and its PCRs, in sessions that hide them from the bus."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import tty
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from secure_loader import encrypt_model
from secure_loader.cli import main
from secure_loader.config import LoaderConfig
from secure_loader.core.aead import ALGORITHMS
from secure_loader.core.archive import Archive
from secure_loader.core.checkpoint import Checkpoint
from secure_loader.core.keys import tpm2
from secure_loader.core.keys.provider import KeyRequest, KeyRing, key_check_value
from secure_loader.core.keys.tpm2 import Tpm2Provider, parse_options, parse_sealed
from secure_loader.core.keys.tpm2_wire import sized
from secure_loader.core.recipient import Recipient, WrapContext
from secure_loader.core.session import Session
from secure_loader.errors import (
    KeyAccessError,
    KeySourceDeniedError,
    KeySourceResponseError,
    KeySourceUnreachableError,
)
from tests.attacks.kit import KEY, SIGN, assert_no_secret, build_source, master, refused, trust
from tests.integration.keys.devices import SoftTpm

CONTEXT = WrapContext(KEY.kid, KEY.algorithm.name, "demo/model")
SRK = "fixedtpm|fixedparent|sensitivedataorigin|userwithauth|noda|restricted|decrypt"


def started(tmp_path_factory):
    made = SoftTpm(tmp_path_factory.mktemp("tpm"))
    try:
        yield made
    finally:
        made.stop()


machine = pytest.fixture(scope="module")(started)
another = pytest.fixture(scope="module")(started)
passing = pytest.fixture(started)


@pytest.fixture
def tpm(machine, monkeypatch) -> SoftTpm:
    monkeypatch.setenv(tpm2.TCTI_VARIABLE, machine.tcti)
    return machine


def service(**more) -> Tpm2Provider:
    made = Tpm2Provider()
    made.configure(LoaderConfig(**more))
    return made


def asking(*recipients: Recipient, context: WrapContext = CONTEXT, key=KEY) -> KeyRequest:
    file_id = bytes(16)
    kcv = key_check_value(key.secret, file_id)
    return KeyRequest(context.kid, ALGORITHMS[context.algorithm], context.model_id, file_id, kcv, recipients)


def resolve(request: KeyRequest, reference: str = "", **more):
    return KeyRing([f"tpm2:{reference}"], LoaderConfig(**more)).resolve(request)


def is_key(unwrapper, key=KEY) -> bool:
    return bytes(unwrapper.secret.reveal()) == bytes(key.secret.reveal())


# --- sealing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reference", ["", "pcrs=sha256:7", "pcrs=sha256:23+0+11", "pcrs=sha384:7+11"])
@pytest.mark.parametrize("algorithm", ["aes256gcm", "aes128gcm"])
def test_what_is_sealed_is_unsealed(tpm, reference, algorithm):
    key = master(algorithm=algorithm)
    context = dataclasses.replace(CONTEXT, algorithm=algorithm)
    entry = service().wrap(reference, key.secret, context)
    assert entry.alg == "tpm2"
    assert re.fullmatch(r"000b[0-9a-f]{64}(;pcrs=sha(256|384):[0-9+]+)?", entry.kid)
    assert bytes(key.secret.reveal()) not in entry.wrapped
    assert is_key(resolve(asking(entry, context=context, key=key), reference), key)
    assert is_key(resolve(asking(entry, context=context, key=key)), key), "the entry says which PCRs"
    assert tpm.left() == b""


def test_the_selection_of_pcrs(tpm):
    entry = service().wrap("pcrs=sha256:11+7", KEY.secret, CONTEXT)
    assert entry.kid.endswith(";pcrs=sha256:7+11")
    for reference in ("pcrs=sha256:7", "pcrs=sha384:7+11"):
        with refused(KeyAccessError, "no master key with kid"):
            resolve(asking(entry), reference)
    both = [entry, service().wrap("", KEY.secret, CONTEXT)]
    with refused(KeyAccessError, "2 recipients of the model could be meant"):
        resolve(asking(*both))
    assert is_key(resolve(asking(*both), "pcrs=sha256:7+11"))


def test_other_pcrs_open_nothing(tpm):
    bound = service().wrap("pcrs=sha256:7+16", KEY.secret, CONTEXT)
    free = service().wrap("pcrs=sha256:7", KEY.secret, CONTEXT)
    assert is_key(resolve(asking(bound)))
    tpm.run("tpm2_pcrextend", f"16:sha256={'5a' * 32}")
    with refused(KeySourceDeniedError, "the PCRs are not what they were", "rewrap"):
        resolve(asking(bound))
    assert is_key(resolve(asking(free)))
    tpm.run("tpm2_pcrreset", "16")
    assert is_key(resolve(asking(bound)))
    # Whoever leaves the PCRs out of an entry, or names others, does not change what the TPM wants.
    for selection in (bytes(4), tpm2.parse_options("pcrs=sha256:7").marshalled()):
        wrapped = selection + bound.wrapped[10:]
        with refused(KeySourceDeniedError):
            resolve(asking(dataclasses.replace(bound, wrapped=wrapped)))
    assert tpm.left() == b""


def test_another_tpm_opens_nothing(tpm, another, monkeypatch):
    entry = service().wrap("", KEY.secret, CONTEXT)
    monkeypatch.setenv(tpm2.TCTI_VARIABLE, another.tcti)
    with refused(KeyAccessError, "no master key with kid"):
        resolve(asking(entry))
    moved = dataclasses.replace(entry, kid=service().kid(""))
    assert moved.kid != entry.kid
    with refused(KeySourceDeniedError, "the sealed key was altered, or is another TPM's"):
        resolve(asking(moved))
    assert another.left() == b""


@pytest.mark.parametrize(
    "other", [{"kid": "enc-2"}, {"algorithm": "chacha20poly1305"}, {"model_id": "demo/other"}, {"model_id": ""}]
)
def test_an_entry_is_for_one_key_of_one_model(tpm, other):
    entry = service().wrap("", KEY.secret, CONTEXT)
    with refused(KeySourceDeniedError, "it was wrapped for another model, or altered"):
        resolve(asking(entry, context=dataclasses.replace(CONTEXT, **other)))


def test_an_altered_entry(tpm):
    entry = service().wrap("pcrs=sha256:7", KEY.secret, CONTEXT)
    for at in range(0, len(entry.wrapped), 5):
        wrapped = bytearray(entry.wrapped)
        wrapped[at] ^= 1
        with refused(KeySourceDeniedError, "key source tpm2"):
            resolve(asking(dataclasses.replace(entry, wrapped=bytes(wrapped))))
    for size in range(1, len(entry.wrapped), 7):
        with refused(KeySourceDeniedError, "key source tpm2"):
            resolve(asking(dataclasses.replace(entry, wrapped=entry.wrapped[:size])))
    for wrapped in (entry.wrapped + b"x", b"hunter2", b"\xff" * 8192, bytes(8192)):
        with refused(KeySourceDeniedError, "key source tpm2"):
            resolve(asking(dataclasses.replace(entry, wrapped=wrapped)))
    assert tpm.left() == b""


def test_a_file_may_name_anything(tpm):
    entry = service().wrap("", KEY.secret, CONTEXT)
    others = [Recipient("tpm2", kid, b"x") for kid in ("hunter2", "000b", f"000b{'0' * 64}", f"{entry.kid};pcr")]
    assert is_key(resolve(asking(entry, *others)))


def test_pcrs_that_the_tpm_does_not_have(tmp_path_factory, monkeypatch):
    """It would leave them out, and the key would be bound to nothing."""
    folder = tmp_path_factory.mktemp("tpm")
    first = SoftTpm(folder)
    try:
        first.run("tpm2_pcrallocate", "sha256:all+sha384:none")
        first.run("tpm2_shutdown", "-c")
    finally:
        first.stop()
    first.socket.unlink()
    second = SoftTpm(folder)
    try:
        monkeypatch.setenv(tpm2.TCTI_VARIABLE, second.tcti)
        assert is_key(resolve(asking(service().wrap("pcrs=sha256:23", KEY.secret, CONTEXT))))
        with refused(KeyAccessError, "the TPM has no such PCRs (pcrs=sha384:7)"):
            service().wrap("pcrs=sha384:7", KEY.secret, CONTEXT)
        assert second.left() == b""
    finally:
        second.stop()


# --- other programs ------------------------------------------------------------------------------------------------


def test_tpm2_tools_unseal_it(tpm, tmp_path, monkeypatch):
    """Another implementation: the same SRK, and what we sealed is what they unseal."""
    entry = service().wrap("", KEY.secret, CONTEXT)
    tpm.run("tpm2_createprimary", "-C", "o", "-G", "ecc256:aes128cfb", "-a", SRK, "-c", tmp_path / "srk")
    tpm.run("tpm2_flushcontext", "-t")
    tpm.run("tpm2_readpublic", "-c", tmp_path / "srk", "-n", tmp_path / "name")
    tpm.run("tpm2_flushcontext", "-t")
    assert (tmp_path / "name").read_bytes().hex() == entry.kid
    sealed = parse_sealed(entry.wrapped)
    (tmp_path / "public").write_bytes(sealed.public)
    (tmp_path / "private").write_bytes(sealed.private)
    kek = unsealed_by_tools(tpm, tmp_path)
    assert AESGCM(kek).decrypt(sealed.nonce, sealed.wrapped, CONTEXT.encode()) == bytes(KEY.secret.reveal())
    assert tpm.left() == b""


def unsealed_by_tools(tpm: SoftTpm, folder: Path, **more) -> bytes:
    tpm.run(
        "tpm2_load", "-C", folder / "srk", "-u", folder / "public", "-r", folder / "private", "-c", folder / "key"
    )  # fmt: skip
    tpm.run("tpm2_flushcontext", "-t")
    try:
        return tpm.run("tpm2_unseal", "-c", folder / "key", **more)
    finally:
        tpm.run("tpm2_flushcontext", "-t")


@pytest.mark.parametrize("kind", ["rsa2048:aes128cfb", "ecc256:aes128cfb"])
def test_a_persistent_srk(tpm, tmp_path, kind):
    with refused(KeySourceResponseError, "there is no key at that handle"):
        service().wrap("srk=0x81000001", KEY.secret, CONTEXT)
    tpm.run("tpm2_createprimary", "-C", "o", "-G", kind, "-c", tmp_path / "srk")
    tpm.run("tpm2_evictcontrol", "-C", "o", "-c", tmp_path / "srk", "0x81000001")
    tpm.run("tpm2_flushcontext", "-t")
    try:
        tpm.run("tpm2_changeauth", "-c", "o", "a password")
        with refused(KeySourceDeniedError, "the TPM asks for a password", "srk=0x81"):
            service().wrap("", KEY.secret, CONTEXT)
        entry = service().wrap("srk=0x81000001;pcrs=sha256:7", KEY.secret, CONTEXT)
        assert is_key(resolve(asking(entry), "srk=0x81000001"))
        assert tpm.left() == b""
    finally:
        tpm.run("tpm2_changeauth", "-c", "o", "-p", "a password")
        tpm.run("tpm2_evictcontrol", "-C", "o", "-c", "0x81000001")


@pytest.mark.parametrize("kind", ["rsa2048:rsassa:null", "ecc384:aes128cfb"])
def test_keys_that_are_no_srk(tpm, tmp_path, kind):
    attributes = "fixedtpm|fixedparent|sensitivedataorigin|userwithauth|restricted|"
    attributes += "sign" if "rsassa" in kind else "decrypt"
    tpm.run("tpm2_createprimary", "-C", "o", "-G", kind, "-a", attributes, "-c", tmp_path / "key")
    tpm.run("tpm2_evictcontrol", "-C", "o", "-c", tmp_path / "key", "0x81000002")
    tpm.run("tpm2_flushcontext", "-t")
    try:
        with refused(KeyAccessError, "is no storage key" if "rsassa" in kind else "is none of RSA or P-256"):
            service().wrap("srk=0x81000002", KEY.secret, CONTEXT)
    finally:
        tpm.run("tpm2_evictcontrol", "-C", "o", "-c", "0x81000002")


# --- the bus -------------------------------------------------------------------------------------------------------


class Bus:
    """Stands between us and a TPM: listens, and changes answers to the command that ``change`` names.

    Args:
        tpm: The TPM.
        folder: Where its socket goes.
        device: A terminal instead, as a character device.
    """

    def __init__(self, tpm: SoftTpm, folder: Path, *, device: bool = False) -> None:
        self.heard = bytearray()
        self.change: dict[int, int] = {}
        self._tpm, self._stop = tpm, threading.Event()
        if device:
            self._ours, self._theirs = pty.openpty()
            tty.setraw(self._theirs)
            self.tcti = f"device:{os.ttyname(self._theirs)}"
            self._thread = threading.Thread(target=self._pass_on, args=(self._ours,), name="bus")
        else:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(folder / "bus"))
            self._listener.listen()
            self.tcti = f"swtpm:path={folder}/bus"
            self._thread = threading.Thread(target=self._accept, name="bus")
        self._device = device
        self._thread.start()

    def _accept(self) -> None:
        while not self._stop.is_set():
            if select.select([self._listener], [], [], 0.05)[0]:
                connection, _ = self._listener.accept()
                with connection:
                    self._pass_on(connection.fileno())

    def _pass_on(self, near: int) -> None:
        with socket.socket(socket.AF_UNIX) as far, contextlib.suppress(OSError):
            far.connect(str(self._tpm.socket))
            command = 0
            while not self._stop.is_set():
                for end in select.select([near, far.fileno()], [], [], 0.05)[0]:
                    data = bytearray(os.read(end, 8192))
                    if not data:
                        return
                    self.heard += data
                    if end == near:
                        command = int.from_bytes(data[6:10], "big")
                    elif command in self.change:
                        data[self.change[command]] ^= 1
                    os.write(far.fileno() if end == near else near, data)

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)
        if self._device:
            os.close(self._ours)
            os.close(self._theirs)
        else:
            self._listener.close()


@pytest.fixture
def keks(monkeypatch) -> list[bytes]:
    """The sealed keys that come back."""
    found: list[bytes] = []
    genuine = tpm2._unseal

    def unseal(*arguments):
        secret = genuine(*arguments)
        found.append(bytes(secret.reveal()))
        return secret

    monkeypatch.setattr(tpm2, "_unseal", unseal)
    return found


@pytest.mark.parametrize("reference", ["", "pcrs=sha256:7"])
def test_the_bus_carries_no_secret(tpm, tmp_path, monkeypatch, keks, reference):
    with Bus(tpm, tmp_path) as bus:
        monkeypatch.setenv(tpm2.TCTI_VARIABLE, bus.tcti)
        entry = service().wrap(reference, KEY.secret, CONTEXT)
        assert is_key(resolve(asking(entry), reference))
        heard = bytes(bus.heard)
    assert len(heard) > 1000
    (kek,) = keks
    for secret in (kek[:16], kek[16:], bytes(KEY.secret.reveal())):
        assert secret not in heard
    if reference:
        return
    # It would be heard without sessions of ours: tpm2_unseal says it in clear.
    sealed = parse_sealed(entry.wrapped)
    (tmp_path / "public").write_bytes(sealed.public)
    (tmp_path / "private").write_bytes(sealed.private)
    tpm.run("tpm2_createprimary", "-C", "o", "-G", "ecc256:aes128cfb", "-a", SRK, "-c", tmp_path / "srk")
    tpm.run("tpm2_flushcontext", "-t")
    (tmp_path / "bus").unlink()
    assert unsealed_by_tools(tpm, tmp_path) == kek


@pytest.mark.parametrize(
    ("command", "at"),
    [(0x153, 40), (0x153, -1), (0x157, 12), (0x157, 20), (0x157, -1), (0x15E, 20), (0x15E, -1), (0x176, 20)],
)
def test_who_changes_something_on_the_bus_is_noticed(tpm, tmp_path, monkeypatch, command, at):
    entry = service().wrap("", KEY.secret, CONTEXT)
    with Bus(tpm, tmp_path) as bus:
        monkeypatch.setenv(tpm2.TCTI_VARIABLE, bus.tcti)
        bus.change[command] = at
        with pytest.raises((KeySourceResponseError, KeySourceDeniedError), match="key source tpm2"):
            service().wrap("", KEY.secret, CONTEXT) if command == 0x153 else resolve(asking(entry))
        bus.change.clear()
        for kind in ("-t", "-l"):
            tpm.run("tpm2_flushcontext", kind)  # what was there under a handle that was changed
        assert is_key(resolve(asking(entry)))


def test_who_shows_a_key_of_their_own_on_the_bus_is_noticed(tpm, another, tmp_path, monkeypatch):
    """Another TPM, put in place after the first look at the SRK: it would get the salt, and hear everything."""
    asked = service()
    entry = asked.wrap("", KEY.secret, CONTEXT)
    monkeypatch.setenv(tpm2.TCTI_VARIABLE, another.tcti)
    for ask in (lambda: asked.wrap("", KEY.secret, CONTEXT), lambda: asked.resolve("", asking(entry))):
        with refused(KeySourceResponseError, "shows another storage root key than before"):
            ask()
    assert another.left() == b""


def test_a_character_device(passing, tmp_path, monkeypatch):
    """As /dev/tpmrm0 is: here a terminal, with the TPM behind it."""
    with Bus(passing, tmp_path, device=True) as bus:
        monkeypatch.setenv(tpm2.TCTI_VARIABLE, bus.tcti)
        assert is_key(resolve(asking(service().wrap("pcrs=sha256:7", KEY.secret, CONTEXT))))
        assert len(bus.heard) > 1000
        passing.process.send_signal(signal.SIGSTOP)
        try:
            with refused(KeySourceUnreachableError, "no answer within 0.3 s"):
                service(key_timeout_seconds=0.3).wrap("", KEY.secret, CONTEXT)
        finally:
            passing.process.send_signal(signal.SIGCONT)
        assert "tpm" in {thread.name for thread in threading.enumerate()}, "it waits for the device, and nobody for it"
    for _ in range(500):
        if "tpm" not in {thread.name for thread in threading.enumerate()}:
            break
        time.sleep(0.01)
    else:
        pytest.fail("the device has answered, or is gone, and the thread is still there")


# --- TPMs that are away --------------------------------------------------------------------------------------------


def test_a_tpm_that_hangs_then_dies(passing, monkeypatch):
    monkeypatch.setenv(tpm2.TCTI_VARIABLE, passing.tcti)
    entry = service().wrap("", KEY.secret, CONTEXT)
    assert is_key(resolve(asking(entry)))
    passing.process.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    with refused(KeySourceUnreachableError, f"the TPM at {passing.tcti}: no answer within 0.3 s"):
        resolve(asking(entry), key_timeout_seconds=0.3)
    assert time.monotonic() - start < 5
    passing.process.send_signal(signal.SIGCONT)
    assert is_key(resolve(asking(entry)))
    passing.stop()
    with refused(KeySourceUnreachableError, "cannot be opened"):
        resolve(asking(entry))


@pytest.mark.parametrize(
    ("tcti", "kind", "words"),
    [
        ("device:/nowhere", KeySourceUnreachableError, "cannot be opened: No such file or directory"),
        ("device:/dev/null", KeySourceUnreachableError, "cannot be reached: it is gone"),
        ("swtpm:path=/nowhere", KeySourceUnreachableError, "cannot be opened: No such file or directory"),
        (f"swtpm:path=/{'x' * 200}", KeySourceUnreachableError, "cannot be opened: AF_UNIX path too long"),
        ("swtpm:port=1", KeySourceUnreachableError, "cannot be opened: Connection refused"),
        ("swtpm:host=localhost,port=99999", KeySourceUnreachableError, "cannot be opened"),
        ("mssim", KeyAccessError, "TPM2TOOLS_TCTI names no TPM"),
        ("device:tpm0", KeyAccessError, "TPM2TOOLS_TCTI names no TPM"),
    ],
)
def test_tpms_that_are_not_there(monkeypatch, tcti, kind, words):
    monkeypatch.setenv(tpm2.TCTI_VARIABLE, tcti)
    with refused(kind, words):
        service().wrap("", KEY.secret, CONTEXT)


def test_no_tpm_is_tried_that_nobody_named(monkeypatch):
    monkeypatch.delenv(tpm2.TCTI_VARIABLE, raising=False)
    monkeypatch.setattr(tpm2, "DEFAULT_TCTI", "device:/nowhere")
    with refused(KeySourceUnreachableError, "device:/nowhere"):
        service().wrap("", KEY.secret, CONTEXT)


def answered(data: bytes, code: int = 0, tag: int = 0x8002, size: int | None = None) -> bytes:
    return struct.pack(">HII", tag, 10 + len(data) if size is None else size, code) + data


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (b"", KeySourceUnreachableError, "cannot be reached: it is gone"),
        (b"\x80\x02\x00", KeySourceUnreachableError, "cannot be reached: it is gone"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", KeySourceResponseError, "answers what no TPM 2.0 does"),
        (answered(b"", size=9), KeySourceResponseError, "answers what no TPM 2.0 does"),
        (answered(b"", size=5000), KeySourceResponseError, "answers what no TPM 2.0 does"),
        (answered(b"x" * 20, size=15), KeySourceResponseError, "answers what no TPM 2.0 does"),
        (answered(b""), KeySourceResponseError, "answers what no TPM 2.0 does"),
        (answered(b"x" * 4000), KeySourceResponseError, "answers what no TPM 2.0 does"),
        (answered(bytes(30)), KeySourceResponseError, "answers what no TPM 2.0 does"),
        (answered(b"", tag=0x8001), KeySourceResponseError, "answers what no TPM 2.0 does"),
        (answered(b"", 0x101, 0x8001), KeySourceUnreachableError, "TPM2_CreatePrimary fails (0x101)"),
        (answered(b"", 0x902, 0x8001), KeySourceUnreachableError, "TPM2_CreatePrimary fails (0x902)"),
        (answered(b"", 0x185, 0x8001), KeySourceDeniedError, "the owner's hierarchy is switched off"),
        (answered(b"", 0x921, 0x8001), KeySourceDeniedError, "the TPM is locked"),
        (answered(b"", 0x143, 0x8001), KeySourceResponseError, "TPM2_CreatePrimary fails (0x143)"),
        (answered(b"", 0x922, 0x8001), KeySourceUnreachableError, "no answer within 0.5 s"),
    ],
    ids=range(16),
)
def test_tpms_that_talk_nonsense(tmp_path, monkeypatch, answer, kind, words):
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    while connection.recv(4096) and answer:
                        connection.sendall(answer)
                        if len(answer) < 10:
                            break

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "tpm"))
        listener.listen()
        listener.settimeout(0.05)
        thread = threading.Thread(target=serve, name="tpm")
        thread.start()
        monkeypatch.setenv(tpm2.TCTI_VARIABLE, f"swtpm:path={tmp_path}/tpm")
        try:
            with refused(kind, words):
                service(key_timeout_seconds=0.5).wrap("", KEY.secret, CONTEXT)
        finally:
            stop.set()
            thread.join(10)


def test_a_slow_tpm_has_one_deadline_for_all_that_it_is_asked(tmp_path, monkeypatch):
    """Its name, the key once more, and a session: each answer comes after 0.3 s, and the third is none."""
    public = sized(tpm2._SRK)
    answers = {
        0x131: struct.pack(">HIII", 0x8002, 18 + len(public) + 5, 0, 0x80000000)
        + struct.pack(">I", len(public))
        + public
        + bytes(5)
    }
    nothing = struct.pack(">HII", 0x8001, 10, 0)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    while command := connection.recv(4096):
                        stop.wait(0.3)
                        connection.sendall(answers.get(int.from_bytes(command[6:10], "big"), nothing))

    srk = (struct.pack(">H", 0x0B) + hashlib.sha256(tpm2._SRK).digest()).hex()
    wrapped = bytes(4) + sized(bytes(100)) + sized(bytes(100)) + bytes(12 + 48)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "tpm"))
        listener.listen()
        listener.settimeout(0.05)
        thread = threading.Thread(target=serve, name="tpm")
        thread.start()
        monkeypatch.setenv(tpm2.TCTI_VARIABLE, f"swtpm:path={tmp_path}/tpm")
        try:
            with refused(KeySourceUnreachableError, "no answer within 0.8 s"):
                resolve(asking(Recipient("tpm2", srk, bytes(wrapped))), key_timeout_seconds=0.8)
        finally:
            stop.set()
            thread.join(10)


def test_keys_show_nowhere(tpm, keks):
    """Whatever goes wrong: not in the message, not in local variables of ours that crash reporters print."""
    entry = service().wrap("", KEY.secret, CONTEXT)
    with pytest.raises(KeySourceDeniedError) as caught:
        resolve(asking(entry, context=dataclasses.replace(CONTEXT, model_id="x")))
    frames = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    shown = "".join(str(f.locals) for f in frames.stack if "/secure_loader/" in f.filename) + str(caught.value)
    assert_no_secret(shown)
    (kek,) = keks
    assert repr(kek)[2:-1] not in shown
    assert kek.hex() not in shown


# --- references ----------------------------------------------------------------------------------------------------


def test_spellings_of_one_reference():
    options = parse_options("pcrs=sha256:11+7+7;srk=0x8100abcd")
    assert (options.srk, options.selection) == (0x8100ABCD, "pcrs=sha256:7+11")
    assert options.marshalled() == bytes.fromhex("00000001 000b 03 800800")
    assert parse_options("").selection == ""


@pytest.mark.parametrize(
    "reference",
    [
        "hunter2", "pcrs=7", "pcrs=sha256:", "pcrs=sha256:7,11", "pcrs=sha256:07", "pcrs=sha1:7", "pcrs=sha256:24", "srk=0x80000000",
        "srk=81000001", "srk=0x81000001;srk=0x81000001", "pcrs=sha256:7;pcrs=sha256:8", ";", "pcrs=sha256:7;", "//tpm",
    ],
)  # fmt: skip
def test_references_that_are_none(reference):
    with refused(KeyAccessError, "a tpm2: reference"):
        parse_options(reference)


@given(st.binary(), st.text(alphabet="pcrsk=:;+0x81sha256347"))
def test_any_bytes_are_an_entry_or_refused(data, text):
    with contextlib.suppress(KeySourceDeniedError):
        assert parse_sealed(data).wrapped
    with contextlib.suppress(KeyAccessError):
        assert parse_options(text).selection == parse_options(parse_options(text).selection).selection


# --- models --------------------------------------------------------------------------------------------------------


def test_a_model_for_this_machine(tpm, tmp_path, keks):
    """The TPM unseals once for a folder of three files."""
    source = build_source(tmp_path / "plain", shards=3)
    encrypt_model(
        source, tmp_path / "secure", signing_key=SIGN, model_id="demo/model", recipients=["tpm2:pcrs=sha256:7"]
    )
    checkpoint = Checkpoint(tmp_path / "secure", Session(keys=["tpm2:"], trust=trust(), config=LoaderConfig()))
    found = {}
    for name in checkpoint.shards():
        with Archive(checkpoint.open(name), "numpy") as f:
            found |= f.get_tensors()
    assert len(found) == 6
    assert len(keks) == 1
    assert tpm.left() == b""


def test_processes_that_use_one_tpm_at_once(tpm, tmp_path):
    entry = service().wrap("", KEY.secret, CONTEXT)
    script = (
        "import sys; from tests.integration.keys.test_tpm2 import *; "
        "print(is_key(resolve(asking(Recipient('tpm2', sys.argv[1], bytes.fromhex(sys.argv[2]))))))"
    )
    words = [sys.executable, "-c", script, entry.kid, entry.wrapped.hex()]
    running = [
        subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
        )
        for _ in range(3)
    ]
    for process in running:
        out, error = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "True\n"), error


def test_the_commands_of_the_guide(tpm, tmp_path, secure_loader_home, monkeypatch):
    """What docs/keys.md says, word for word."""
    text = (Path(__file__).parents[3] / "docs" / "keys.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text.split("### TPM 2.0\n")[1].split("\n## ")[0], re.DOTALL)
    assert len(blocks) == 2
    build_source(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert main(["keygen", "alice"]) == 0
    assert main(["encrypt", "model", "model-sec", "-k", "alice"]) == 0
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for block in blocks:
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", block], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        assert (tmp_path / "model-again" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
