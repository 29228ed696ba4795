"""AES-GCM and ChaCha20-Poly1305 over chunks, into memory that the caller owns.

``cryptography`` is the only host implementation (design: it runs at memory speed and releases the GIL). Its
``decrypt_into`` leaves unverified plaintext in the output when the tag is wrong, so every failure here wipes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from ..errors import AuthenticationError
from .secrets import Secret, wipe

NONCE_BYTES = 12
TAG_BYTES = 16
CHUNK_SIZE = 2 * 1024 * 1024  # CryptoTensors' default
# SP 800-38D bounds one GCM invocation at 2**39 - 256 bits; RFC 8439 is more generous.
MAX_SINGLE_SEAL = 2**36 - 32


class Cipher(Protocol):
    """What `cryptography`'s AEAD classes have in common, as far as used here."""

    def encrypt_into(self, nonce: bytes, data: memoryview, associated_data: None, buf: memoryview) -> int: ...
    def decrypt_into(self, nonce: bytes, data: memoryview, associated_data: None, buf: memoryview) -> int: ...


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One AEAD.

    Attributes:
        name: As CryptoTensors writes it.
        key_bytes: Length of DEK and master key.
    """

    name: str
    key_bytes: int

    def cipher(self, key: Secret) -> Cipher:
        """A cipher for a key of ``key_bytes`` bytes. It keeps copies of the key until it is deleted."""
        raw = key.reveal()
        return ChaCha20Poly1305(raw) if self.name.startswith("chacha") else AESGCM(raw)


ALGORITHMS: dict[str, Algorithm] = {
    a.name: a for a in (Algorithm("aes256gcm", 32), Algorithm("aes128gcm", 16), Algorithm("chacha20poly1305", 32))
}


def chunk_count(nbytes: int, chunk_size: int) -> int:
    """Chunks of a v2 tensor; an empty one still has one, which only carries a tag."""
    return max(1, -(-nbytes // chunk_size))


def chunk_nonce(base_iv: bytes, index: int) -> bytes:
    """Nonce of chunk ``index``: the last four bytes of ``base_iv`` count up, big-endian, and never wrap."""
    return base_iv[:8] + (int.from_bytes(base_iv[8:], "big") + index).to_bytes(4, "big")


def seal_into(cipher: Cipher, nonce: bytes, plain: memoryview, out: memoryview) -> None:
    """Encrypt ``plain`` into ``out``, which is 16 bytes longer: ciphertext, then the tag. May be in place."""
    cipher.encrypt_into(nonce, plain, None, out)


def open_into(cipher: Cipher, nonce: bytes, sealed: memoryview, out: memoryview) -> None:
    """Decrypt and verify ``sealed`` (ciphertext, then 16 bytes of tag) into ``out``.

    Raises:
        AuthenticationError: The tag does not match; ``out`` was wiped.
    """
    try:
        cipher.decrypt_into(nonce, sealed, None, out)
    except InvalidTag:
        wipe(out)
        raise AuthenticationError("authentication failed: these bytes were altered, or belong to another key") from None
    except BaseException:
        wipe(out)
        raise


def wrap_key(master: Cipher, nonce: bytes, dek: Secret) -> tuple[bytes, bytes]:
    """Wrap a DEK: returns its ciphertext and tag."""
    out = bytearray(len(dek) + TAG_BYTES)
    seal_into(master, nonce, dek.reveal(), memoryview(out))
    return bytes(out[:-TAG_BYTES]), bytes(out[-TAG_BYTES:])


def unwrap_key(master: Cipher, nonce: bytes, wrapped: bytes, tag: bytes) -> Secret:
    """Unwrap a DEK.

    Raises:
        AuthenticationError: Wrapped by another key, or altered.
    """
    out = bytearray(len(wrapped))
    open_into(master, nonce, memoryview(wrapped + tag), memoryview(out))
    return Secret.owning(out)
