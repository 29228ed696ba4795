"""Ciphertext in a file to verified plaintext in memory: read, decrypt, check, on a shared pool of threads.

Each job reads a few chunks with one ``preadv`` into scratch memory of its thread, leaving 16 bytes behind each for its
tag, and decrypts them out of place into the destination. The first error wins: no further job starts, those that run
are waited for, and the whole destination is wiped before the error is raised.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from ..errors import AuthenticationError, KeyAccessError, SecureLoaderError
from .aead import TAG_BYTES, Cipher, chunk_nonce, open_into
from .secrets import wipe
from .source import FileSource

_T = TypeVar("_T")
# One job: enough to make a system call and a hand-over cheap, little enough to share a tensor between threads.
JOB_BYTES = 4 << 20


@dataclass(frozen=True)
class SealedBytes:
    """One encrypted tensor's bytes in a file.

    Attributes:
        source: The file.
        offset: File offset of its first byte.
        nbytes: Its size.
        chunk_size: Bytes per chunk, None when it was sealed in one call (v1).
        iv: Nonce of the first chunk.
        tags: 16 bytes per chunk.
        digests: SHA-256 per digest piece, checked as well when given; ``digest_chunk_size`` bytes each.
        digest_chunk_size: Bytes per digest.
    """

    source: FileSource
    offset: int
    nbytes: int
    chunk_size: int | None
    iv: bytes
    tags: bytes
    digests: bytes | None = None
    digest_chunk_size: int = 0

    @property
    def step(self) -> int:
        """Bytes per chunk, at most the tensor's own; v1 has a single one."""
        whole = max(1, self.nbytes)
        return min(self.chunk_size or whole, whole)


def decrypt_into(sealed: SealedBytes, cipher: Cipher, out: memoryview, start: int = 0) -> None:
    """Decrypt and verify ``out.nbytes`` bytes of a tensor from byte ``start`` on; only the chunks touched are read.

    Args:
        sealed: Where the ciphertext is.
        cipher: Of the tensor's DEK.
        out: Writable bytes, filled only with verified plaintext.
        start: First byte wanted.

    Raises:
        AuthenticationError: A tag or digest is wrong; ``out`` was wiped.
        ReadError: The file ends early or cannot be read; ``out`` was wiped.
    """
    stop = start + out.nbytes
    step = sealed.step
    if sealed.nbytes == 0:
        # v2 gives an empty tensor one tag all the same; v1 does not.
        if sealed.tags:
            _open_chunks(sealed, cipher, range(1), memoryview(bytearray()), 0)
        return
    if start == stop:
        return
    per_job = max(1, JOB_BYTES // step)
    chunks = range(start // step, -(-stop // step))
    groups = [range(c, min(c + per_job, chunks.stop)) for c in range(chunks.start, chunks.stop, per_job)]

    def job(group: range) -> None:
        low, high = max(start, group.start * step), min(stop, group.stop * step)
        _open_chunks(sealed, cipher, group, out[low - start : high - start], low)

    run_jobs(job, groups, on_error=lambda: wipe(out))


def _open_chunks(sealed: SealedBytes, cipher: Cipher, chunks: range, out: memoryview, low: int) -> None:
    """Decrypt consecutive chunks; ``out`` takes the part of their plaintext that begins at tensor byte ``low``."""
    step = sealed.step
    scratch = _scratch(len(chunks) * (step + TAG_BYTES))
    sizes = [min(step, sealed.nbytes - c * step) for c in chunks]
    slots = [scratch[i * (step + TAG_BYTES) :][: n + TAG_BYTES] for i, n in enumerate(sizes)]
    sealed.source.read_into(
        [s[:n] for s, n in zip(slots, sizes, strict=True) if n], sealed.offset + chunks.start * step
    )
    if sealed.digests is not None:
        for c, n, slot in zip(chunks, sizes, slots, strict=True):
            check_digests(sealed.digests, sealed.digest_chunk_size, c * step, slot[:n])
    high = low + out.nbytes
    for c, n, slot in zip(chunks, sizes, slots, strict=True):
        slot[n:] = sealed.tags[c * TAG_BYTES : (c + 1) * TAG_BYTES]
        first, last = c * step, c * step + n
        nonce = chunk_nonce(sealed.iv, c) if sealed.chunk_size is not None else sealed.iv
        if low <= first and last <= high:
            open_into(cipher, nonce, slot, out[first - low : last - low])
            continue
        # Only part of this chunk is wanted, but its tag covers all of it.
        whole = memoryview(bytearray(n))
        try:
            open_into(cipher, nonce, slot, whole)
            a, b = max(first, low), min(last, high)
            out[a - low : b - low] = whole[a - first : b - first]
        finally:
            wipe(whole)


def check_digests(digests: bytes, size: int, start: int, stored: memoryview) -> None:
    """Compare stored bytes with their signed digests.

    Args:
        digests: 32 bytes per piece, of the whole tensor.
        size: Bytes per piece.
        start: Tensor byte at which ``stored`` begins, a multiple of ``size``.
        stored: Whole pieces, the tensor's last one may be shorter.

    Raises:
        AuthenticationError: They differ.
    """
    for offset in range(0, stored.nbytes, size):
        i = (start + offset) // size
        digest = hashlib.sha256(stored[offset : offset + size]).digest()
        if not hmac.compare_digest(digest, digests[32 * i : 32 * i + 32]):
            raise AuthenticationError(f"bytes {start + offset:,} and up differ from the signed digest")


@dataclass(frozen=True)
class ClearBytes:
    """One clear tensor's bytes in a signed file.

    Attributes:
        source: The file.
        offset: File offset of its first byte.
        nbytes: Its size.
        digests: SHA-256 per piece.
        size: Bytes per piece.
    """

    source: FileSource
    offset: int
    nbytes: int
    digests: bytes
    size: int

    def pieces(self, start: int, stop: int) -> list[range]:
        """The tensor bytes of every digest piece that ``[start, stop)`` touches."""
        first = start // self.size * self.size
        return [range(p, min(p + self.size, self.nbytes)) for p in range(first, stop, self.size)]

    def check_piece(self, piece: range, into: memoryview) -> None:
        """Read a piece into private memory and compare it with its digest."""
        self.source.read_into([into], self.offset + piece.start)
        check_digests(self.digests, self.size, piece.start, into)


def read_clear_into(clear: ClearBytes, out: memoryview, start: int) -> None:
    """Fill ``out`` with a clear tensor's bytes from ``start`` on; what was checked is what is handed out.

    Raises:
        AuthenticationError: A digest differs; ``out`` was wiped.
        ReadError: As :meth:`FileSource.read_into`; ``out`` was wiped.
    """
    stop = start + out.nbytes

    def job(piece: range) -> None:
        low, high = max(start, piece.start), min(stop, piece.stop)
        target = out[low - start : high - start]
        if len(piece) == target.nbytes:
            clear.check_piece(piece, target)
            return
        whole = _scratch(len(piece))
        clear.check_piece(piece, whole)
        target[:] = whole[low - piece.start : high - piece.start]

    run_jobs(job, clear.pieces(start, stop), on_error=lambda: wipe(out))


def verify_clear(clear: ClearBytes, start: int, stop: int) -> None:
    """Check the digests of the pieces that ``[start, stop)`` touches, keeping nothing. Raises as read_clear_into."""
    run_jobs(lambda piece: clear.check_piece(piece, _scratch(len(piece))), clear.pieces(start, stop))


_local = threading.local()


def _scratch(nbytes: int) -> memoryview:
    """Scratch memory of this thread; it only ever holds bytes as stored in the file."""
    buffer: memoryview | None = getattr(_local, "scratch", None)
    if buffer is None or buffer.nbytes < nbytes:
        buffer = memoryview(bytearray(nbytes))
        # v1 tensors may be huge; do not keep their scratch for ever.
        if nbytes <= 2 * JOB_BYTES:
            _local.scratch = buffer
    return buffer[:nbytes]


_pool_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_threads = 0


def set_threads(n: int | None) -> None:
    """Number of threads of the shared pool; None sizes it to the processors this process may use.

    Takes effect with the next job; running ones end on the old pool.
    """
    global _pool, _threads
    with _pool_lock:
        old, _pool, _threads = _pool, None, n or 0
    if old is not None:
        old.shutdown(wait=False)


def threads() -> int:
    """Threads that the shared pool has, or will have."""
    return _threads or min(16, len(os.sched_getaffinity(0)))


def _executor() -> ThreadPoolExecutor:
    global _pool  # noqa: PLW0603 - the pool is the one thing shared by the process
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(threads(), thread_name_prefix="secure-loader")
        return _pool


def _after_fork() -> None:
    # Threads do not survive a fork, nor does the state of the lock.
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def run_jobs(job: Callable[[_T], None], items: Sequence[_T], on_error: Callable[[], None] | None = None) -> None:
    """Run a job per item on the shared pool, and on this thread when there is only one.

    Raises:
        Exception: The first error of any job, after all that started have ended and ``on_error`` ran.
    """
    try:
        if len(items) == 1 or threads() == 1:
            for item in items:
                job(item)
            return
        _fan_out(job, items)
    except BaseException:
        if on_error is not None:
            on_error()
        raise


def _fan_out(job: Callable[[_T], None], items: Sequence[_T]) -> None:
    todo: Iterator[_T] = iter(items)
    changed = threading.Condition()
    running = 0
    failed: list[BaseException] = []

    def work() -> None:
        nonlocal running
        while True:
            with changed:
                item = None if failed else next(todo, None)
                if item is None:
                    return
                running += 1
            try:
                job(item)
            except BaseException as e:  # noqa: BLE001 - raised again below, in the caller's thread
                failed.append(e)
            finally:
                with changed:
                    running -= 1
                    changed.notify_all()

    helpers: list[Future[None]] = []
    try:
        helpers.extend(_submit(work, min(threads(), len(items)) - 1))
        work()
    except BaseException as e:  # noqa: BLE001 - a signal in this thread, say; raised again below
        failed.append(e)
    # Until no job runs any more nobody may wipe or reuse the destination, however often the user presses ^C.
    while True:
        try:
            for helper in helpers:
                helper.cancel()
            with changed:
                while running:
                    changed.wait()
            break
        except BaseException as e:  # noqa: BLE001 - as above
            failed.append(e)
    if failed:
        raise failed[0]


def _submit(work: Callable[[], None], n: int) -> Iterator[Future[None]]:
    for _ in range(n):
        try:
            yield _executor().submit(work)
        except RuntimeError:
            # Somebody changed the number of threads this moment, the interpreter is on its way out, or there are no
            # more threads to be had. The calling thread does all the work itself then.
            return


def annotate(error: SecureLoaderError, path: str, tensor: str | None = None) -> SecureLoaderError:
    """The same error, saying where it happened."""
    if isinstance(error, KeyAccessError):
        tensor = None  # the master key is the file's; that it was first needed for this tensor tells nobody anything
    return type(error)(error.message, hint=error.hint, path=error.path or path, tensor=error.tensor or tensor)
