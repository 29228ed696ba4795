"""A known-answer test on the device itself: kernels that fail it are not used there.

It finds a driver, compiler or chip that runs the kernels wrongly, and kernels that accept what they must reject. The answers are
the tags below, made once with OpenSSL; the ciphertexts that belong to them come from the CPU in the same process, and are believed only
because their tags are these.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from ...errors import AuthenticationError, DeviceError
from ..secrets import Secret
from .batch import Batch, Chunk, Kernels
from .driver import Driver

_GUARD = 64
_POISON = 0xA5


class Case(NamedTuple):
    """A chunk with a known tag.

    Attributes:
        key: Index in :data:`KEYS`.
        nbytes: Its size.
        shift: Its address, modulo 16.
        tag: The tag, in hex.
    """

    key: int
    nbytes: int
    shift: int
    tag: str


KEYS = (bytes(range(32)), bytes(range(100, 116)))
# Less than a block, blocks and a bit, more than a segment of 64 KiB, aligned and not; neighbours under different keys.
CASES = (
    Case(0, 0, 0, "f05d76ae4ab99fe5a6f69b3148c2363d"),
    Case(1, 1, 1, "ce435f2cc209ff1cc077d0fd3b2696c2"),
    Case(0, 15, 3, "f6435e453bbb71a782db2164087d2e88"),
    Case(1, 16, 0, "5f94057dac08b96e214e66e61605dc43"),
    Case(0, 17, 8, "556ac5b7d2a801a579664664ff807809"),
    Case(1, 31, 5, "c55995129a12e7e920112c4855810e9d"),
    Case(0, 4095, 4, "b26855db2345c951b7d5358bb7484d7f"),
    Case(1, 65537, 0, "640f3626d244c9c42972d763e34c5626"),
    Case(0, 69649, 0, "706a1e49271aa4c61824ee9710e8f270"),
    Case(0, 131105, 13, "5bffef978956ae81e3b5ab10f70ae887"),
)
NBYTES = sum(_GUARD + case.nbytes + 16 for case in CASES) + _GUARD
"""Device memory that the test needs."""


class Scratch(Protocol):
    """Device memory for the test.

    Attributes:
        address: Where its :data:`NBYTES` bytes are.
        stream: A stream of the device.
    """

    address: int
    stream: int

    def put(self, data: bytes) -> None:
        """Copy to the device, and wait."""

    def get(self) -> bytes:
        """Copy all of it back."""


def check(kernels: Kernels, scratch: Scratch) -> None:
    """Let the kernels open what is known, and what was tampered with.

    Raises:
        DeviceError: They gave a wrong answer, wrote where they must not, or failed.
    """
    memory, places = _sealed(scratch.address)
    opened = bytearray(memory)
    for (_, plain), chunk in zip(_texts(), places, strict=True):
        _put(opened, chunk.address - scratch.address, plain)
    _expect(kernels, scratch, places, memory, opened, accepted=True)
    # One bit in the last chunk: the whole batch has to go.
    last = places[-1]
    memory[last.address - scratch.address + last.nbytes // 2] ^= 0x10
    for chunk in places:
        _put(opened, chunk.address - scratch.address, bytes(chunk.nbytes))
    _expect(kernels, scratch, places, memory, opened, accepted=False)
    # And one bit in the tag of an empty chunk, where there is nothing to decrypt.
    memory, places = _sealed(scratch.address)
    first = places[0]
    places[0] = first._replace(tag=bytes([first.tag[0] ^ 1]) + first.tag[1:])
    _expect(kernels, scratch, places, memory, opened, accepted=False)


def _expect(
    kernels: Kernels, scratch: Scratch, chunks: list[Chunk], before: bytearray, after: bytearray, *, accepted: bool
) -> None:
    scratch.put(bytes(before))
    keys = [Secret(key) for key in KEYS]
    try:
        kernels.open(Batch(keys, chunks), scratch.stream).wait()
    except AuthenticationError:
        if accepted:
            raise DeviceError("known-answer test: a genuine chunk was rejected") from None
    else:
        if not accepted:
            raise DeviceError("known-answer test: a chunk that was tampered with was accepted")
    finally:
        for key in keys:
            key.wipe()
    if scratch.get() != after:
        what = "wrong plaintext, or bytes changed around it" if accepted else "rejected chunks were not overwritten"
        raise DeviceError(f"known-answer test: {what}")


def _texts() -> Iterator[tuple[bytes, bytes]]:
    """Nonce and plaintext of every case."""
    for i, case in enumerate(CASES):
        pattern = bytes((j * 7 + i * 29 + (j >> 8)) & 0xFF for j in range(min(case.nbytes, 4096)))
        repeats = -(-case.nbytes // len(pattern)) if pattern else 0
        yield bytes([i] * 12), (pattern * repeats)[: case.nbytes]


def _sealed(address: int) -> tuple[bytearray, list[Chunk]]:
    """What the memory holds, and the chunks in it.

    Raises:
        DeviceError: The tags of this machine's CPU are not the known ones.
    """
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    memory, chunks, at = bytearray([_POISON]) * NBYTES, [], 0
    for (nonce, plain), case in zip(_texts(), CASES, strict=True):
        text = AESGCM(KEYS[case.key]).encrypt(nonce, plain, None)
        if text[case.nbytes :].hex() != case.tag:
            raise DeviceError("known-answer test: the CPU itself gives a wrong tag")
        at += _GUARD
        at += (case.shift - address - at) % 16
        _put(memory, at, text[: case.nbytes])
        chunks.append(Chunk(address + at, case.nbytes, case.key, nonce, text[case.nbytes :]))
        at += case.nbytes
    return memory, chunks


def _put(memory: bytearray, at: int, data: bytes) -> None:
    memory[at : at + len(data)] = data


class _DriverScratch:
    """By the driver's interface, in the current context, on the default stream."""

    stream = 0

    def __init__(self, driver: Driver, address: int, host: int) -> None:
        self.address = address
        self._driver, self._host = driver, host

    def put(self, data: bytes) -> None:
        ctypes.memmove(self._host, data, len(data))
        self._driver.upload(self.address, self._host, len(data), self.stream)
        self._driver.synchronise(self.stream)

    def get(self) -> bytes:
        self._driver.download(self._host, self.address, NBYTES, self.stream)
        self._driver.synchronise(self.stream)
        return ctypes.string_at(self._host, NBYTES)


@contextlib.contextmanager
def driver_scratch(driver: Driver, ordinal: int) -> Iterator[Scratch]:
    """Memory for the test by the driver's interface."""
    with contextlib.ExitStack() as undo:
        context = driver.retain(ordinal)
        undo.callback(driver.release, ordinal)
        undo.enter_context(driver.current(context))
        host = driver.allocate_host(NBYTES)
        undo.callback(driver.free_host, host)
        address = driver.allocate(NBYTES)
        undo.callback(driver.free, address)
        yield _DriverScratch(driver, address, host)


class TorchScratch:
    """Memory for the test by PyTorch, wherever it runs: NVIDIA's or AMD's.

    Args:
        device: As ``"cuda:0"``.
        stream: The current stream of that device.
    """

    def __init__(self, device: str, stream: int) -> None:
        import torch

        self._torch = torch
        self._memory = torch.empty(NBYTES, dtype=torch.uint8, device=device)
        self.address, self.stream = self._memory.data_ptr(), stream

    def put(self, data: bytes) -> None:
        """As :meth:`Scratch.put`."""
        self._memory.copy_(self._torch.frombuffer(bytearray(data), dtype=self._torch.uint8))

    def get(self) -> bytes:
        """As :meth:`Scratch.get`."""
        return bytes(self._memory.tolist())
