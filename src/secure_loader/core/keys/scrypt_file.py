"""A small secret in a file under a passphrase: the age format with an scrypt recipient, one chunk long.

age (https://c2sp.org/age) and not a format of our own: `age -d` and everything that reads age files opens it. Not JWE:
its only passphrase recipient, PBES2, is PBKDF2, which graphics cards try a thousand times faster than scrypt.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
import re

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from ...errors import KeyAccessError
from ..secrets import Secret, wipe

# log2 of scrypt's N, with r = 8 and p = 1: from 128 MiB and half a second to 1 GiB and some seconds. age writes 18.
MIN_WORK, WORK, MAX_WORK = 17, 18, 20
# One chunk of age's payload.
MAX_SECRET = 64 * 1024
WRONG = "cannot be opened: the passphrase is wrong, or the file was altered"
_LABEL = b"age-encryption.org/v1/scrypt"
_BEGIN, _END = b"-----BEGIN AGE ENCRYPTED FILE-----\n", b"-----END AGE ENCRYPTED FILE-----\n"
_B64 = rb"[A-Za-z0-9+/]"
_HEADER = re.compile(
    rb"(age-encryption\.org/v1\n-> scrypt (%b{22}) ([1-9][0-9]?)\n(%b{43})\n---) (%b{43})\n" % (_B64, _B64, _B64)
)
_NONCE, _FILE_KEY, _TAG = 16, 16, 16
_LAST_CHUNK = bytes(11) + b"\x01"
_COLUMNS = 64


def seal(secret: bytearray | memoryview, passphrase: Secret, *, work: int = WORK) -> bytes:
    """An armoured age file.

    Args:
        secret: At least 1 byte, at most 64 KiB.
        passphrase: UTF-8.
        work: log2 of scrypt's N.

    Raises:
        ValueError: A secret of the wrong length, or a work factor that :func:`unseal` would refuse.
    """
    if not 1 <= len(secret) <= MAX_SECRET or not MIN_WORK <= work <= MAX_WORK:
        raise ValueError("nothing to seal, too much of it, or a work factor out of bounds")
    salt, nonce = os.urandom(16), os.urandom(_NONCE)
    with Secret(bytearray(os.urandom(_FILE_KEY))) as file_key, _stretch(passphrase, salt, work) as wrapping:
        wrapped = bytearray(_FILE_KEY + _TAG)
        ChaCha20Poly1305(wrapping.reveal()).encrypt_into(bytes(12), file_key.reveal(), None, wrapped)
        head = b"age-encryption.org/v1\n-> scrypt %b %d\n%b\n---" % (_encode(salt), work, _encode(wrapped))
        with _derive(file_key, nonce, b"payload") as key:
            payload = bytearray(len(secret) + _TAG)
            ChaCha20Poly1305(key.reveal()).encrypt_into(_LAST_CHUNK, secret, None, payload)
        whole = head + b" " + _encode(_mac(file_key, head)) + b"\n" + nonce + bytes(payload)
    text = base64.b64encode(whole)
    lines = [text[i : i + _COLUMNS] + b"\n" for i in range(0, len(text), _COLUMNS)]
    return _BEGIN + b"".join(lines) + _END


def unseal(data: bytes | bytearray, passphrase: Secret) -> bytearray:
    """The secret in an age file, armoured or not.

    Args:
        data: The file.
        passphrase: UTF-8.

    Raises:
        KeyAccessError: No age file under a passphrase, a work factor out of bounds (told before any work is done), or
            the passphrase is wrong or the file was altered, which look the same.
    """
    salt, work, wrapped, mac, head, body = _parse(bytes(data))
    if not MIN_WORK <= work <= MAX_WORK:
        raise KeyAccessError(
            f"asks for a work factor of 2^{work}; from 2^{MIN_WORK} to 2^{MAX_WORK} are accepted",
            hint="seal it anew: secure-loader keygen --passphrase, or age -p",
        )
    raw, out = bytearray(_FILE_KEY), bytearray(len(body) - _NONCE - _TAG)
    try:
        with _stretch(passphrase, salt, work) as wrapping:
            _open(wrapping, bytes(12), wrapped, memoryview(raw))
        with Secret(raw) as file_key:
            if not hmac.compare_digest(_mac(file_key, head), mac):
                raise InvalidTag
            with _derive(file_key, body[:_NONCE], b"payload") as key:
                _open(key, _LAST_CHUNK, body[_NONCE:], memoryview(out))
    except InvalidTag:
        wipe(raw)
        wipe(out)
        raise KeyAccessError(WRONG) from None
    except MemoryError:
        raise KeyAccessError(f"needs {1 << work - 10} MiB of memory to be opened, which are not there") from None
    return out


def _parse(data: bytes) -> tuple[bytes, int, bytes, bytes, bytes, bytes]:
    if data.startswith(_BEGIN.rstrip()):
        data = _bare(data)
    found = _HEADER.match(data)
    if found is None:
        other = data.startswith(b"age-encryption.org/v1\n")
        raise KeyAccessError(
            "is not encrypted under a passphrase" if other else "is not an age file",
            hint="for a file that is encrypted to an age identity, take age: instead" if other else None,
        )
    body = data[found.end() :]
    if not _NONCE + _TAG < len(body) <= _NONCE + _TAG + MAX_SECRET:
        raise KeyAccessError(WRONG)
    salt, wrapped, mac = (_decode(found[i]) for i in (2, 4, 5))
    return salt, int(found[3]), wrapped, mac, found[1], body


def _bare(data: bytes) -> bytes:
    text = data.replace(b"\r\n", b"\n").rstrip() + b"\n"
    if not text.endswith(_END):
        raise KeyAccessError(WRONG)
    lines = text[len(_BEGIN) : -len(_END)].split(b"\n")
    try:
        return base64.b64decode(b"".join(lines), validate=True)
    except binascii.Error:
        raise KeyAccessError(WRONG) from None


def _stretch(passphrase: Secret, salt: bytes, work: int) -> Secret:
    out = bytearray(32)
    Scrypt(salt=_LABEL + salt, length=32, n=1 << work, r=8, p=1).derive_into(passphrase.reveal(), out)
    return Secret(out)


def _derive(key: Secret, salt: bytes, info: bytes) -> Secret:
    out = bytearray(32)
    HKDF(algorithm=hashes.SHA256(), length=32, salt=salt, info=info).derive_into(key.reveal(), out)
    return Secret(out)


def _mac(file_key: Secret, head: bytes) -> bytes:
    with _derive(file_key, b"", b"header") as key:
        return hmac.digest(key.reveal(), head, "sha256")


def _open(key: Secret, nonce: bytes, sealed: bytes, out: memoryview) -> None:
    ChaCha20Poly1305(key.reveal()).decrypt_into(nonce, sealed, None, out)


def _encode(data: bytes | bytearray) -> bytes:
    return base64.b64encode(data).rstrip(b"=")


def _decode(text: bytes) -> bytes:
    data = base64.b64decode(text + b"=" * (-len(text) % 4))
    if _encode(data) != text:
        raise KeyAccessError(WRONG)  # the last digit of base64 has bits to spare, which an honest writer leaves 0
    return data
