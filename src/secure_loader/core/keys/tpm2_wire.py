"""TPM 2.0 commands over a device or a socket, in salted sessions whose parameters are encrypted.

Not by tpm2-tools: a session of theirs has to survive from one program to the next, and Linux's resource manager
(``/dev/tpmrm0``) flushes it in between, so that secrets would cross the bus in clear. And not by a binding: there is none
in binary form. What is needed is small: ten commands, of *Trusted Platform Module Library*, parts 1 to 3.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from ...errors import KeyAccessError, KeySourceResponseError, KeySourceUnreachableError
from ..secrets import wipe
from ..threads import start
from .net import Deadline

RH_OWNER, RH_NULL, PASSWORD = 0x40000001, 0x40000007, 0x40000009
HMAC, POLICY, TRIAL = 0, 1, 3
FIXED_TPM, FIXED_PARENT, ORIGIN, USER_AUTH, NO_DA, RESTRICTED, DECRYPT = 0x2, 0x10, 0x20, 0x40, 0x400, 0x10000, 0x20000
SHA256, KEYED_HASH, ECC, RSA, AES, CFB, NULL, P256 = 0x0B, 0x08, 0x23, 0x01, 0x06, 0x43, 0x10, 0x03
# By their names in the library.
CODES: Final = {
    "StartAuthSession": 0x176, "FlushContext": 0x165, "ReadPublic": 0x173, "PolicyPCR": 0x17F, "PolicyGetDigest": 0x189,
    "CreatePrimary": 0x131, "Create": 0x153, "Load": 0x157, "Unseal": 0x15E, "GetCapability": 0x17A,
}  # fmt: skip
_NO_SESSIONS, _SESSIONS = 0x8001, 0x8002
_CONTINUE, _DECRYPT, _ENCRYPT = 1, 0x20, 0x40
# What a TPM says when it is busy with itself: YIELDED, TESTING, RETRY.
_LATER = (0x908, 0x90A, 0x922)
_MAX_ANSWER, _CAP_PCRS = 4096, 5
_NONCE = 32

_TCTI = re.compile(r"device:(/.+)|swtpm:path=(/[^,]+)|swtpm:(?:host=([\w.-]+),)?port=(\d{1,5})")


class TpmError(Exception):
    """A TPM's refusal.

    Args:
        command: Which it refuses.
        code: Its response code; the number of the parameter, handle or session that it blames is taken out.
    """

    def __init__(self, command: str, code: int) -> None:
        self.command = command
        self.code = code & 0xBF if code & 0x80 else code
        super().__init__(f"TPM2_{command} fails ({code:#x})")


@dataclass(frozen=True, slots=True)
class Object:
    """A loaded object.

    Attributes:
        handle: Its handle.
        public: Its public area (TPMT_PUBLIC).
    """

    handle: int
    public: bytes

    @property
    def name(self) -> bytes:
        """What the TPM calls it: a digest of its public area."""
        return struct.pack(">H", SHA256) + hashlib.sha256(self.public).digest()


class Reader:
    """Takes an answer apart. Raises ValueError where it ends early."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data, self._at = memoryview(data), 0

    def take(self, size: int) -> memoryview:
        """The next bytes."""
        if size > len(self._data) - self._at:
            raise ValueError
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        """The next number, of that many bytes."""
        return int.from_bytes(self.take(size), "big")

    def sized(self) -> memoryview:
        """The next TPM2B."""
        return self.take(self.number(2))

    def rest(self) -> memoryview:
        """All that is left."""
        return self.take(len(self._data) - self._at)


def sized(data: bytes | bytearray | memoryview) -> bytearray:
    """A TPM2B."""
    return bytearray(struct.pack(">H", len(data))) + data


class Tpm:
    """A connection to a TPM; objects and sessions that are left are flushed when it is closed.

    Args:
        tcti: ``device:PATH``, ``swtpm:path=PATH`` or ``swtpm:host=HOST,port=PORT``.
        deadline: When everything is over.

    Raises:
        KeyAccessError: Another ``tcti``.
        KeySourceUnreachableError: It cannot be opened.
    """

    def __init__(self, tcti: str, deadline: Deadline) -> None:
        self._name, self._deadline = f"key source tpm2: the TPM at {tcti}", deadline
        self._handles: list[int] = []
        self._fd = self._open(tcti)

    def _open(self, tcti: str) -> int:
        where = _TCTI.fullmatch(tcti)
        if where is None:
            raise KeyAccessError(
                "TPM2TOOLS_TCTI names no TPM", hint="device:/dev/tpmrm0, swtpm:path=/path/of/socket, or swtpm:port=2321"
            )
        try:
            if where[1]:
                return _through_thread(os.open(where[1], os.O_RDWR | os.O_CLOEXEC))
            with socket.socket(socket.AF_UNIX if where[2] else socket.AF_INET) as connection:
                connection.settimeout(self._deadline.left())
                connection.connect(where[2] or (where[3] or "127.0.0.1", int(where[4])))
                connection.settimeout(0)
                return connection.detach()
        except (OSError, OverflowError, RuntimeError) as e:
            if isinstance(e, TimeoutError):
                raise self._slow() from None
            reason = e.strerror if isinstance(e, OSError) and e.strerror else e
            raise KeySourceUnreachableError(f"{self._name} cannot be opened: {reason}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            # The resource manager does it when we are gone; without one nobody does.
            while self._handles and kind is not KeySourceUnreachableError:
                with contextlib.suppress(TpmError, KeyAccessError):
                    self.do("FlushContext", parameters=struct.pack(">I", self._handles.pop()))
        finally:
            os.close(self._fd)

    def do(self, command: str, handles: Sequence[int] = (), parameters: bytes | bytearray = b"") -> Reader:
        """A command without sessions; what it answers. Raises as :meth:`exchange`."""
        body = struct.pack(f">{len(handles)}I", *handles) + parameters
        return Reader(self.exchange(command, _NO_SESSIONS, bytearray(body)))

    def exchange(self, command: str, tag: int, body: bytearray) -> bytearray:
        """Send a command; what comes behind the response code.

        Raises:
            TpmError: The TPM refuses.
            KeySourceUnreachableError: It is dead or slow.
            KeySourceResponseError: It says nonsense.
        """
        message = bytearray(struct.pack(">HII", tag, 10 + len(body), CODES[command])) + body
        try:
            while True:
                self._send(message)
                answer = self._receive()
                code = int.from_bytes(answer[6:10], "big")
                if code not in _LATER:
                    break
                time.sleep(min(0.02, self._deadline.left()))
        except TimeoutError:
            raise self._slow() from None
        except OSError as e:
            raise KeySourceUnreachableError(f"{self._name} cannot be reached: {e.strerror or e}") from None
        finally:
            wipe(message)
        if code:
            raise TpmError(command, code)
        if int.from_bytes(answer[:2], "big") != tag:
            raise self.nonsense()
        del answer[:10]
        return answer

    def _send(self, message: bytearray) -> None:
        left = memoryview(message)
        while left:
            self._wait(select.POLLOUT)
            left = left[os.write(self._fd, left) :]

    def _receive(self) -> bytearray:
        room, size, whole = bytearray(_MAX_ANSWER), 0, 10
        try:
            while size < whole:
                self._wait(select.POLLIN)
                count = os.readv(self._fd, [memoryview(room)[size:]])
                if not count:
                    raise ConnectionResetError("it is gone")
                size += count
                if size >= 10:
                    whole = int.from_bytes(room[2:6], "big")
                    if not 10 <= whole <= _MAX_ANSWER:
                        raise self.nonsense()
            if size > whole:
                raise self.nonsense()
            return room[:size]
        finally:
            wipe(room)

    def _wait(self, event: int) -> None:
        ready = select.poll()
        ready.register(self._fd, event)
        if not ready.poll(self._deadline.left() * 1000):
            raise TimeoutError

    def _slow(self) -> KeySourceUnreachableError:
        return KeySourceUnreachableError(f"{self._name}: no answer within {self._deadline.seconds:g} s")

    def nonsense(self) -> KeySourceResponseError:
        """For an answer that cannot be understood."""
        return KeySourceResponseError(f"{self._name} answers what no TPM 2.0 does")

    def remember(self, handle: int) -> int:
        """Have an object or a session flushed in the end."""
        self._handles.append(handle)
        return handle

    def create_primary(self, public: bytes) -> Object:
        """The primary object of the owner's hierarchy that a template leads to, always the same."""
        # Owner without a password; no sensitive data; no outside information; no PCRs.
        authorisation = struct.pack(">IHBH", PASSWORD, 0, _CONTINUE, 0)
        body = struct.pack(">II", RH_OWNER, len(authorisation)) + authorisation
        body += sized(bytes(4)) + sized(public) + bytes(2) + bytes(4)
        answer = Reader(self.exchange("CreatePrimary", _SESSIONS, bytearray(body)))
        handle = self.remember(answer.number(4))
        answer.number(4)
        return Object(handle, bytes(answer.sized()))

    def read_public(self, handle: int) -> Object:
        """An object that is there."""
        return Object(handle, bytes(self.do("ReadPublic", [handle]).sized()))

    def has_pcrs(self, bank: int, pcrs: Sequence[int]) -> bool:
        """Whether PCRs of a bank are there and in use."""
        answer = self.do("GetCapability", parameters=struct.pack(">III", _CAP_PCRS, 0, 1))
        answer.take(5)
        wanted = int.from_bytes(bitmap(pcrs), "little")
        banks = [
            (answer.number(2), int.from_bytes(answer.take(answer.number(1)), "little")) for _ in range(answer.number(4))
        ]
        return any(found == bank and there & wanted == wanted for found, there in banks)


class Session:
    """A session that only the TPM with the private half of a key can take part in.

    It is salted by that key, every command and answer is authenticated, and first parameters are encrypted (AES-128-CFB):
    who listens on the bus learns no secret, who changes something is noticed.

    Args:
        tpm: The TPM.
        salt_key: The key, in the TPM.
        kind: HMAC, POLICY or TRIAL.

    Raises:
        KeyAccessError: The key cannot be used for that.
        TpmError, KeySourceUnreachableError, KeySourceResponseError: As :meth:`Tpm.exchange`.
    """

    def __init__(self, tpm: Tpm, salt_key: Object, kind: int) -> None:
        self._tpm, self._caller = tpm, os.urandom(_NONCE)
        salt, sealed = _salt(salt_key.public)
        answer = tpm.do(
            "StartAuthSession",
            [salt_key.handle, RH_NULL],
            sized(self._caller) + sized(sealed) + struct.pack(">BHHHH", kind, AES, 128, CFB, SHA256),
        )
        self.handle = tpm.remember(answer.number(4))
        self._theirs = bytes(answer.sized())
        self._key = _kdf_a(salt, b"ATH", self._theirs, self._caller, 256)

    def do(self, command: str, of: Object, parameters: bytearray, *, seal: bool, open_: bool) -> Reader:
        """A command about an object without authorisation value, authorised by this session.

        Args:
            command: Its name.
            of: The object.
            parameters: Its parameters; wiped.
            seal: Encrypt its first parameter, which is a TPM2B.
            open_: Have the first of the answer's encrypted, likewise.

        Returns:
            What is in the answer, without handles: of those :meth:`loaded` is for.

        Raises:
            TpmError, KeySourceUnreachableError, KeySourceResponseError: As :meth:`Tpm.exchange`.
        """
        return self._do(command, of, parameters, seal=seal, open_=open_, handles=0)[1]

    def loaded(self, command: str, of: Object, parameters: bytearray) -> int:
        """As :meth:`do`, for a command that makes a handle."""
        return self._tpm.remember(self._do(command, of, parameters, seal=True, open_=True, handles=1)[0])

    def _do(
        self, command: str, of: Object, parameters: bytearray, *, seal: bool, open_: bool, handles: int
    ) -> tuple[int, Reader]:
        self._caller = os.urandom(_NONCE)
        flags = bytes([_CONTINUE | (_DECRYPT if seal else 0) | (_ENCRYPT if open_ else 0)])
        if seal:
            self._mask(parameters, self._caller, self._theirs, sealing=True)
        code = struct.pack(">I", CODES[command])
        digest = hashlib.sha256(code + of.name)
        digest.update(parameters)
        mac = self._mac(digest.digest(), self._caller, self._theirs, flags)
        authorisation = struct.pack(">I", self.handle) + sized(self._caller) + flags + sized(mac)
        body = bytearray(struct.pack(">II", of.handle, len(authorisation)) + authorisation)
        body += parameters
        wipe(parameters)
        answer = self._tpm.exchange(command, _SESSIONS, body)
        try:
            reader = Reader(answer)
            handle = reader.number(4) if handles else 0
            out = bytearray(reader.take(reader.number(4)))
            theirs, back, proof = bytes(reader.sized()), bytes(reader.take(1)), reader.sized()
            expected = self._mac(hashlib.sha256(bytes(4) + code + out).digest(), theirs, self._caller, back)
            if len(reader.rest()) or not hmac.compare_digest(expected, proof):
                raise self._tpm.nonsense()
            if open_:
                self._mask(out, theirs, self._caller, sealing=False)
        except ValueError:
            raise self._tpm.nonsense() from None
        self._theirs = theirs
        return handle, Reader(out)

    def _mac(self, digest: bytes, newer: bytes, older: bytes, flags: bytes) -> bytes:
        return hmac.digest(self._key, digest + newer + older + flags, "sha256")

    def _mask(self, parameters: bytearray, newer: bytes, older: bytes, *, sealing: bool) -> None:
        """Encrypt or decrypt a first parameter in place."""
        size = int.from_bytes(parameters[:2], "big")
        if len(parameters) < 2 + size:
            raise ValueError
        keys = _kdf_a(self._key, b"CFB", newer, older, 256)
        with memoryview(parameters) as view:
            _cfb(keys[:16], keys[16:], view[2 : 2 + size], sealing=sealing)


def _through_thread(device: int) -> int:
    """A socket with a device behind it, which is closed with it.

    Whatever is asked of the kernel's TPM device waits while a command runs, ``poll`` and ``close`` too, and may do so for minutes
    where a TPM hangs. So a thread waits, and is left behind where it must be.

    Raises:
        RuntimeError: There are no more threads to be had.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def pass_on() -> None:
        # Whoever waits is told of any error by the end.
        with theirs, contextlib.suppress(OSError):
            try:
                while command := theirs.recv(_MAX_ANSWER):
                    os.write(device, command)
                    answer = os.read(device, _MAX_ANSWER)
                    while 10 <= len(answer) < min(int.from_bytes(answer[2:6], "big"), _MAX_ANSWER):
                        answer += os.read(device, _MAX_ANSWER)
                    theirs.send(answer)
            finally:
                os.close(device)

    with ours:
        try:
            start(pass_on, "tpm")
        except RuntimeError:
            theirs.close()
            os.close(device)
            raise
        ours.settimeout(0)
        return ours.detach()


def _salt(public: bytes) -> tuple[bytes, bytes]:
    """A secret, and what the key with that public area makes it of."""
    reader = Reader(public)
    kind, digest, _ = reader.number(2), reader.number(2), reader.number(4)
    reader.sized()
    symmetric, bits, mode, scheme = (reader.number(2) for _ in range(4))
    if (digest, symmetric, mode, scheme) != (SHA256, AES, CFB, NULL) or bits not in (128, 256):
        raise _useless()
    if kind == RSA:
        bits, exponent = reader.number(2), reader.number(4)
        salt = os.urandom(32)
        found = rsa.RSAPublicNumbers(exponent or 65537, int.from_bytes(reader.sized(), "big")).public_key()
        oaep = padding.OAEP(padding.MGF1(hashes.SHA256()), hashes.SHA256(), b"SECRET\0")
        return salt, found.encrypt(salt, oaep)
    if kind != ECC or reader.number(2) != P256 or reader.number(2) != NULL:
        raise _useless()
    x, y = bytes(reader.sized()), bytes(reader.sized())
    theirs = ec.EllipticCurvePublicNumbers(int.from_bytes(x, "big"), int.from_bytes(y, "big"), ec.SECP256R1())
    ours = ec.generate_private_key(ec.SECP256R1())
    shared = ours.exchange(ec.ECDH(), theirs.public_key())
    point = ours.public_key().public_numbers()
    our_x, our_y = point.x.to_bytes(32, "big"), point.y.to_bytes(32, "big")
    salt = hashlib.sha256(struct.pack(">I", 1) + shared + b"SECRET\0" + our_x + x.rjust(32, b"\0")).digest()
    return salt, bytes(sized(our_x) + sized(our_y))


def _useless() -> KeyAccessError:
    return KeyAccessError("key source tpm2: the storage root key is none of RSA or P-256 with SHA-256 and AES")


def _kdf_a(key: bytes, label: bytes, newer: bytes, older: bytes, bits: int) -> bytes:
    """SP 800-108 in counter mode, for one block."""
    return hmac.digest(key, struct.pack(">I", 1) + label + b"\0" + newer + older + struct.pack(">I", bits), "sha256")


def _cfb(key: bytes, iv: bytes, data: memoryview, *, sealing: bool) -> None:
    """AES-CFB in place. ``cryptography`` is about to drop it."""
    block = Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # noqa: S305 - CFB is made of it
    stream = bytearray(31)
    try:
        for at in range(0, len(data), 16):
            part = data[at : at + 16]
            before = bytes(part)
            block.update_into(iv, stream)
            for i, byte in enumerate(before):
                part[i] = byte ^ stream[i]
            iv = bytes(part) if sealing else before
    finally:
        wipe(stream)


def bitmap(pcrs: Sequence[int]) -> bytes:
    """A selection of PCRs below 24: the lowest in the lowest bit of the first of three bytes."""
    return sum(1 << n for n in pcrs).to_bytes(3, "little")
