"""Tags compared on the host, for a device that then only decrypts.

A GCM tag can be checked without decrypting: ciphertext handed over as associated data goes through the same GHASH. What is
off by then is the last block, which holds the lengths of both; the field being linear, that difference times H mends the
tag (NIST SP 800-38D, 6.4 and 7.1).
"""

from __future__ import annotations

import hmac
from typing import NoReturn

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from ...errors import AuthenticationError
from ..secrets import Secret
from .batch import Chunk

_DOOR = object()


class AuthenticatedChunk:
    """A chunk whose tag fits its ciphertext; made by :func:`authenticate` alone.

    Attributes:
        chunk: The chunk.
    """

    __slots__ = ("chunk",)

    def __init__(self, chunk: Chunk, door: object = None) -> None:
        if door is not _DOOR:
            raise TypeError("only authenticate() makes an AuthenticatedChunk")
        self.chunk = chunk

    def __reduce__(self) -> NoReturn:
        raise TypeError("an AuthenticatedChunk is evidence about memory of this process")


def authenticate(key: Secret, ciphertext: memoryview, chunk: Chunk) -> AuthenticatedChunk:
    """Compare the tag of a chunk, without decrypting it, at the speed of GHASH.

    Args:
        key: The DEK, 16 or 32 bytes.
        ciphertext: The chunk's bytes in private memory: the device has to be given these very bytes, never read again.
        chunk: Where they are going to lie on the device, with nonce, tag and associated data.

    Raises:
        AuthenticationError: The tag does not fit.
        ValueError: The sizes of chunk and ciphertext differ.
    """
    if ciphertext.nbytes != chunk.nbytes:
        raise ValueError(f"a chunk of {chunk.nbytes:,} bytes, and {ciphertext.nbytes:,} bytes of ciphertext")
    aes = algorithms.AES(key.reveal())
    hashing = Cipher(aes, modes.GCM(chunk.nonce)).encryptor()
    padded = chunk.aad + bytes(-len(chunk.aad) % 16)
    hashing.authenticate_additional_data(padded)
    hashing.authenticate_additional_data(ciphertext)
    hashing.finalize()
    h = int.from_bytes(Cipher(aes, modes.ECB()).encryptor().update(bytes(16)), "big")  # noqa: S305 - H is E(0), 6.4
    due = (8 * len(chunk.aad)) << 64 | 8 * chunk.nbytes
    counted = (8 * (len(padded) + chunk.nbytes)) << 64
    tag = int.from_bytes(hashing.tag, "big") ^ _multiply(due ^ counted, h)
    if not hmac.compare_digest(tag.to_bytes(16, "big"), chunk.tag):
        raise AuthenticationError("authentication failed: these bytes were altered, or belong to another key")
    return AuthenticatedChunk(chunk, _DOOR)


def _multiply(public: int, secret: int) -> int:
    """Product in GHASH's field (SP 800-38D, 6.3); ``secret`` decides no branch."""
    product = 0
    for bit in range(127, -1, -1):
        product ^= secret * (public >> bit & 1)
        secret = secret >> 1 ^ (0xE1 << 120) * (secret & 1)
    return product
