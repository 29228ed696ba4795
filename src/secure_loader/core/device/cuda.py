"""The CUDA kernels of ``csrc/`` on one device: batches on the caller's stream, judged by the verdict of every chunk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from ...errors import AuthenticationError, DeviceError, SecureLoaderError
from ..pool import CLEANING_TRIES, insist
from ..secrets import Secret
from . import abi
from .batch import Batch, Chunk, Pending
from .driver import Driver
from .host_tags import AuthenticatedChunk
from .launch import Launcher, Part

KEYS_PER_LAUNCH = 1024


class CudaKernels:
    """AES-GCM on an NVIDIA GPU; an implementation of :class:`~secure_loader.core.device.batch.Kernels`.

    Any thread may use it, for any stream of its device. A stream has to live until everything that was queued on it was waited for.

    Args:
        driver: The driver.
        ordinal: Number of the device.
        image: A cubin for it.
        name: For people.

    Raises:
        DeviceError: The cubin cannot be loaded there.
    """

    def __init__(self, driver: Driver, ordinal: int, image: bytes, name: str) -> None:
        self.name = name
        self._launcher = Launcher(driver, ordinal, image)
        self._lock = threading.Lock()
        self._under_way: set[_Pending] = set()
        self._closed = False

    def open(self, batch: Batch, stream: int) -> Pending:
        """As :meth:`Kernels.open`; more than 1,024 keys become several launches.

        Raises:
            DeviceError: It could not be queued; the chunks were overwritten if the device still does that.
            ValueError: A key, nonce, tag or number is not what AES-GCM has.
        """
        return self._start(batch, stream, tags_were_compared=False)

    def decrypt(self, keys: Sequence[Secret], chunks: Sequence[AuthenticatedChunk], stream: int) -> Pending:
        """Queue chunks whose tags the host has compared: AES in counter mode alone, in place.

        Args:
            keys: DEKs, as in :class:`Batch`.
            chunks: The evidence. Their memory has to hold the very bytes that it is about.
            stream: As for :meth:`open`.

        Raises:
            DeviceError, ValueError: As :meth:`open`.
        """
        return self._start(Batch(keys, [c.chunk for c in chunks]), stream, tags_were_compared=True)

    def _start(self, batch: Batch, stream: int, *, tags_were_compared: bool) -> Pending:
        launcher, parts = self._launcher, list[Part]()
        pending = _Pending(launcher, parts, stream, self._forget)
        with self._lock:
            if self._closed:
                raise DeviceError("the kernels were closed")
            try:
                with launcher.current():
                    for keys, chunks in _split(batch):
                        launcher.start(keys, chunks, stream, parts, tags_were_compared=tags_were_compared)
                self._under_way.add(pending)
            except BaseException:
                insist(lambda: launcher.abandon(parts, stream), CLEANING_TRIES)
                raise
        return pending

    def close(self) -> None:
        """Give device memory back; no secrets are in it any more. Batches that are under way are waited for.

        Chunks of a batch that nobody waited for are left as they are: their memory may belong to somebody else by now.
        """
        with self._lock:
            self._closed = True
            under_way = list(self._under_way)
        for pending in under_way:
            pending.drain()
        self._launcher.close()

    def _forget(self, pending: _Pending) -> None:
        with self._lock:
            self._under_way.discard(pending)


class _Pending:
    """A batch on its way; see :class:`~secure_loader.core.device.batch.Pending`."""

    def __init__(self, launcher: Launcher, parts: list[Part], stream: int, forget: Callable[[_Pending], None]) -> None:
        self._launcher, self._parts, self._stream, self._forget = launcher, parts, stream, forget
        self._lock = threading.Lock()
        self._verdicts: list[int] | None = None
        self._error: SecureLoaderError | None = None
        self._settled = False

    def done(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        if not self._lock.acquire(blocking=False):
            return self._settled  # somebody is waiting already
        try:
            return self._settled or self._launcher.reached(self._parts)
        except DeviceError:
            return True  # which wait tells
        finally:
            self._lock.release()

    def wait(self) -> None:
        """Wait for the verdicts.

        Raises:
            AuthenticationError: A tag is wrong. All chunks of the batch were overwritten before this is raised.
            DeviceError: The device failed; nothing of the batch may be used.
        """
        with self._lock:
            if not self._settled:
                self._settle()
            error = self._error
        if error is not None:
            # A fresh one for each caller: tracebacks would pile up in a shared one.
            raise type(error)(error.message, hint=error.hint)

    def _settle(self) -> None:
        """Judge, then clean up. An interruption may fall between any two steps; the next call goes on from there."""
        if self._error is None and self._verdicts is None:
            try:
                self._verdicts = self._launcher.verdicts(self._parts)
            except DeviceError as e:
                self._error = e
        if self._error is None and self._verdicts is not None:
            wrong = sum(verdict != abi.VERIFIED for verdict in self._verdicts)
            if wrong:
                self._error = AuthenticationError(f"{wrong} of {len(self._verdicts)} chunks failed authentication")
        if self._error is None:
            while self._parts:
                self._launcher.give(self._parts)
        else:
            insist(lambda: self._launcher.abandon(self._parts, self._stream), CLEANING_TRIES)
        self._forget(self)
        self._settled = True

    def drain(self) -> None:
        """Wait for the device and give the memory back, but leave the chunks alone: the kernels are being closed."""
        with self._lock:
            if self._settled:
                return
            self._error = DeviceError("the kernels were closed before anybody waited for the batch")
            try:
                self._launcher.verdicts(self._parts)
            except DeviceError:
                # The device may still use its memory: it is neither used again nor freed.
                self._parts.clear()
            while self._parts:
                self._launcher.give(self._parts)
            self._settled = True


def _split(batch: Batch) -> Iterator[tuple[Sequence[Secret], Sequence[Chunk]]]:
    """Launches of at most 1,024 keys, and the chunks of each."""
    if not all(0 <= chunk.key < len(batch.keys) for chunk in batch.chunks):
        raise ValueError(f"a chunk names a key that is not among the {len(batch.keys)} of its batch")
    for first in range(0, len(batch.keys), KEYS_PER_LAUNCH):
        last = first + KEYS_PER_LAUNCH
        chunks = [c._replace(key=c.key - first) if first else c for c in batch.chunks if first <= c.key < last]
        if chunks:
            yield batch.keys[first:last], chunks
