"""Known answers, tampering, and what lies around the chunks, on a device: ``python -m benchmarks.gpu.proof 8388608``.

Chunks of many sizes lie at odd addresses in a memory that is poisoned everywhere else. Good ones must come out as what
``cryptography`` sealed, and the poison untouched; where one of them was altered, all must be overwritten, and the poison
untouched still. Torch has no part in it, so that compute-sanitizer sees the kernels alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from secure_loader.core.device.batch import Batch, Chunk, Kernels
from secure_loader.core.device.driver import Driver
from secure_loader.core.secrets import Secret
from secure_loader.errors import AuthenticationError

_POISON = 0xA5
_THOROUGH = 64 << 20  # a larger memory is filled only three times: that is what takes the time
_STAGED = 64 << 20  # pinned memory at a time
_SMALL = (0, 1, 15, 16, 17, 4095, 4096, 4097, 65535, 65536, 65537)
_LARGE = (2 << 20, (2 << 20) + 5, (8 << 20) - 3)


class ProofError(Exception):
    """A device did something that it must not do; the text says what."""


@dataclass(frozen=True)
class Layout:
    """Chunks in a memory, and what belongs around them.

    Attributes:
        sealed: The whole memory before it is opened.
        plain: The same behind it.
        wiped: The same behind a refusal: chunks overwritten with zeros.
        chunks: With addresses from 0.
        keys: By number.
    """

    sealed: bytearray
    plain: bytearray
    wiped: bytearray
    chunks: Sequence[Chunk]
    keys: Sequence[bytes]


def lay_out(nbytes: int, seed: int = 0) -> Layout:
    """Fill a memory of about so many bytes: keys of both lengths, gaps of 0 to 40 bytes."""
    rng = random.Random(seed)
    keys = [rng.randbytes(32 if number % 3 else 16) for number in range(7)]
    noise = rng.randbytes(_LARGE[-1])
    sealed, plain, wiped = (bytearray() for _ in range(3))
    chunks: list[Chunk] = []
    sizes: list[int] = [size for size in _SMALL if size <= nbytes // 4]
    while len(sealed) < nbytes:
        left = nbytes - len(sealed)
        size = sizes[len(chunks)] if len(chunks) < len(sizes) else min(left, rng.choice(_LARGE))
        number, nonce = rng.randrange(len(keys)), rng.randbytes(12)
        start = rng.randrange(len(noise) - size + 1) if size < len(noise) else 0
        text = noise[start : start + size]
        found = AESGCM(keys[number]).encrypt(nonce, text, None)
        gap = bytes([_POISON]) * rng.randrange(41)
        for memory, content in ((sealed, found[:-16]), (plain, text), (wiped, bytes(size))):
            memory.extend(gap + content)
        chunks.append(Chunk(len(sealed) - size, size, number, nonce, found[-16:]))
    for memory in (sealed, plain, wiped):
        memory.extend(bytes([_POISON]) * 64)
    return Layout(sealed, plain, wiped, chunks, keys)


def prove(driver: Driver, ordinal: int, kernels: Kernels, nbytes: int) -> list[str]:
    """All of it, in memory of about so many bytes, on the default stream.

    Returns:
        What was proven, for people.

    Raises:
        ProofError: Something is not as it has to be.
        DeviceError: The device failed.
    """
    layout = lay_out(nbytes)
    proven = []
    with _memory(driver, ordinal, len(layout.sealed)) as memory:
        memory.put(layout.sealed)
        _open(kernels, layout, memory.address)
        _compare(memory.get(), layout.plain, "opened", layout)
        proven.append(f"{len(layout.chunks)} chunks of 0 to {max(c.nbytes for c in layout.chunks):,} bytes")
        thorough = nbytes <= _THOROUGH
        for what, changed, keys in _forgeries(layout) if thorough else [next(_forgeries(layout))]:
            memory.put(layout.sealed)
            try:
                _open(kernels, layout, memory.address, changed, keys)
            except AuthenticationError:
                pass
            else:
                raise ProofError(f"{what} was altered, and nobody noticed")
            _compare(memory.get(), layout.wiped, f"refused ({what} altered)", layout)
            proven.append(f"{what} altered: refused, all chunks overwritten")
        for chunk in (layout.chunks[-1], *(c for c in layout.chunks if c.nbytes == 1 and thorough)):
            bad = bytearray(layout.sealed)
            bad[chunk.address + chunk.nbytes - 1] ^= 0x80
            memory.put(bad)
            try:
                _open(kernels, layout, memory.address)
            except AuthenticationError:
                pass
            else:
                raise ProofError(f"the last byte of {chunk.nbytes} was altered, and nobody noticed")
            _compare(memory.get(), layout.wiped, "refused", layout)
            proven.append(f"the last of {chunk.nbytes:,} bytes altered: refused, all chunks overwritten")
    return proven


def _forgeries(layout: Layout) -> Iterator[tuple[str, list[Chunk], list[bytes]]]:
    """Each with another thing changed, in a chunk in the middle."""
    middle = len(layout.chunks) // 2
    chunk = layout.chunks[middle]
    flip: Callable[[bytes], bytes] = lambda data: data[:-1] + bytes([data[-1] ^ 1])  # noqa: E731 - shorter than a def
    for what, other in (
        ("a tag", chunk._replace(tag=flip(chunk.tag))),
        ("a nonce", chunk._replace(nonce=flip(chunk.nonce))),
    ):
        yield what, [*layout.chunks[:middle], other, *layout.chunks[middle + 1 :]], list(layout.keys)
    keys = list(layout.keys)
    keys[chunk.key] = flip(keys[chunk.key])
    yield "a key", list(layout.chunks), keys
    empty = next((n for n, c in enumerate(layout.chunks) if not c.nbytes), None)
    if empty is not None:
        changed = list(layout.chunks)
        changed[empty] = changed[empty]._replace(tag=flip(changed[empty].tag))
        yield "the tag of a chunk without bytes", changed, list(layout.keys)


def _open(
    kernels: Kernels,
    layout: Layout,
    address: int,
    chunks: Sequence[Chunk] | None = None,
    keys: Sequence[bytes] | None = None,
) -> None:
    placed = [c._replace(address=address + c.address) for c in chunks or layout.chunks]
    kernels.open(Batch([Secret(key) for key in keys or layout.keys], placed), 0).wait()


def _compare(found: bytes, wanted: bytearray, what: str, layout: Layout) -> None:
    if found == wanted:
        return
    block = next(n for n in range(0, len(wanted), 1 << 20) if found[n : n + (1 << 20)] != wanted[n : n + (1 << 20)])
    at = block + next(n for n in range(1 << 20) if found[block + n] != wanted[block + n])
    inside = any(c.address <= at < c.address + c.nbytes for c in layout.chunks)
    raise ProofError(f"{what}: byte {at} is wrong, {'in a chunk' if inside else 'outside of all chunks'}")


class _Memory:
    """Device memory that is filled and looked at by way of pinned memory."""

    def __init__(self, driver: Driver, address: int, host: int, nbytes: int) -> None:
        self._driver, self.address, self._host, self._nbytes = driver, address, host, nbytes

    def put(self, data: bytearray) -> None:
        for start in range(0, self._nbytes, _STAGED):
            part = bytes(data[start : start + _STAGED])
            ctypes.memmove(self._host, part, len(part))
            self._driver.upload(self.address + start, self._host, len(part), 0)
            self._driver.synchronise(0)

    def get(self) -> bytes:
        parts = []
        for start in range(0, self._nbytes, _STAGED):
            size = min(_STAGED, self._nbytes - start)
            self._driver.download(self._host, self.address + start, size, 0)
            self._driver.synchronise(0)
            parts.append(ctypes.string_at(self._host, size))
        return b"".join(parts)


@contextlib.contextmanager
def _memory(driver: Driver, ordinal: int, nbytes: int) -> Iterator[_Memory]:
    with contextlib.ExitStack() as undo:
        context = driver.retain(ordinal)
        undo.callback(driver.release, ordinal)
        undo.enter_context(driver.current(context))
        host = driver.allocate_host(min(nbytes, _STAGED))
        undo.callback(driver.free_host, host)
        address = driver.allocate(nbytes)
        undo.callback(driver.free, address)
        yield _Memory(driver, address, host, nbytes)


def main() -> int:
    """Prove the first device's kernels in memory of so many bytes."""
    from secure_loader.core.device.choice import choose

    kernels = choose(0, require=True).kernels
    assert kernels is not None  # require
    for text in prove(Driver(), 0, kernels, int(sys.argv[1])):
        print(text)
    kernels.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
