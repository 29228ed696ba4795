"""What a device is asked to do: many chunks under many DEKs in one go, and one verdict for each chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..secrets import Secret


class Chunk(NamedTuple):
    """One sealed chunk in the memory of a device.

    Attributes:
        address: Device address of its first byte, of any alignment. It is decrypted in place.
        nbytes: Its size, without the tag; at most 2**36 - 32.
        key: Which key of the batch it is sealed with.
        nonce: 12 bytes.
        tag: 16 bytes.
        aad: Associated data; CryptoTensors has none.
    """

    address: int
    nbytes: int
    key: int
    nonce: bytes
    tag: bytes
    aad: bytes = b""


@dataclass(frozen=True, slots=True)
class Batch:
    """Chunks that one launch opens.

    Attributes:
        keys: DEKs of 16 or 32 bytes. They are copied to the device for as long as the launch needs them.
        chunks: What to open; none overlaps another.
    """

    keys: Sequence[Secret]
    chunks: Sequence[Chunk]


class Pending(Protocol):
    """A batch that was handed to a device."""

    def done(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        ...

    def wait(self) -> None:
        """Wait until every chunk was decrypted, and every tag compared.

        The plaintext is whole for work that is queued from here on, on any stream of the device.

        Raises:
            AuthenticationError: A tag is wrong. All chunks of the batch were overwritten before this is raised.
            DeviceError: The device failed; nothing of the batch may be used.
        """
        ...


class Kernels(Protocol):
    """One implementation of AES-GCM on one device."""

    @property
    def name(self) -> str:
        """What it is, for people: ``"cubin sm_90"``, ``"NVRTC sm_103"``, ``"Triton"``."""
        ...

    def open(self, batch: Batch, stream: int) -> Pending:
        """Queue a batch: decrypt in place and authenticate, behind what the stream has been given before.

        Key material on the device is overwritten behind its last use, on error paths too.

        Args:
            batch: What to open.
            stream: Handle of the stream, as ``torch.cuda.Stream.cuda_stream``.

        Raises:
            DeviceError: It could not be queued.
        """
        ...

    def close(self) -> None:
        """Give device memory back, overwritten. Batches that are under way are waited for."""
        ...
