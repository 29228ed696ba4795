"""Bytes in files to verified bytes in memory: read, check, decrypt, on the shared pool of threads.

What is wanted is cut into jobs of about :data:`JOB_BYTES`: a large tensor becomes many, and small ones that lie side by
side share one. A job makes the destination's pages, reads with one system call into scratch memory of its thread, and
decrypts out of place into the destination. The first error wins: no further job starts, those that run are waited for,
and everything that was to be filled is wiped before the error is raised.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..errors import AuthenticationError, KeyAccessError, SecureLoaderError
from .aead import TAG_BYTES, Cipher, chunk_nonce, open_into
from .memory import HUGE_PAGE, Region, populate
from .pool import CLEANING_TRIES, WAITING_THREADS, insist, run_jobs
from .secrets import wipe
from .source import DIRECT_ALIGN, FileSource

# One chunk of the usual size: enough to make system calls and hand-overs cheap, and it stays in the processor's cache
# between being read and being decrypted.
JOB_BYTES = 2 << 20
# Fewer bytes are not worth a system call of their own.
_POPULATE = 256 << 10
# Places that are asked whether they are in the page cache.
_SAMPLES = 8


class Stored(Protocol):
    """A tensor's bytes in a file, in pieces that are checked as a whole."""

    @property
    def source(self) -> FileSource:
        """The file."""
        ...

    @property
    def offset(self) -> int:
        """File offset of the tensor's first byte."""
        ...

    @property
    def nbytes(self) -> int:
        """Its size."""
        ...

    @property
    def step(self) -> int:
        """Bytes per piece, at least 1; the last one may be shorter."""
        ...

    def open(self, index: int, slot: memoryview, out: memoryview) -> None:
        """Check piece ``index`` and hand out its plaintext.

        Args:
            index: Number of the piece.
            slot: The bytes as stored, in private memory, and 16 writable bytes behind them.
            out: As many bytes as the piece has; wiped when this raises. May be the slot's own, for working in place.

        Raises:
            AuthenticationError: They are not the bytes that were signed.
        """
        ...


@dataclass(frozen=True, slots=True)
class SealedBytes:
    """One encrypted tensor's bytes in a file.

    Attributes:
        source: The file.
        offset: File offset of its first byte.
        nbytes: Its size.
        cipher: Of its DEK.
        chunk_size: Bytes per chunk, None when it was sealed in one call (v1).
        iv: Nonce of the first chunk.
        tags: 16 bytes per chunk.
        digests: The signed SHA-256 of its pieces, where they are to be checked as well.
    """

    source: FileSource
    offset: int
    nbytes: int
    cipher: Cipher
    chunk_size: int | None
    iv: bytes
    tags: bytes
    digests: Digests | None = None

    @property
    def step(self) -> int:
        """Bytes per chunk, at most the tensor's own; v1 has a single one."""
        whole = max(1, self.nbytes)
        return min(self.chunk_size or whole, whole)

    def open(self, index: int, slot: memoryview, out: memoryview) -> None:
        """Decrypt and verify one chunk; as :meth:`Stored.open`."""
        if self.digests is not None:
            self.digests.check(index * self.step, slot[:-TAG_BYTES])
        slot[-TAG_BYTES:] = self.tags[index * TAG_BYTES : (index + 1) * TAG_BYTES]
        nonce = self.iv if self.chunk_size is None else chunk_nonce(self.iv, index)
        open_into(self.cipher, nonce, slot, out)


@dataclass(frozen=True, slots=True)
class Digests:
    """Signed SHA-256 digests of a tensor's bytes as stored.

    Attributes:
        values: 32 bytes per piece, of the whole tensor.
        size: Bytes per piece.
    """

    values: bytes
    size: int

    def check(self, start: int, stored: memoryview) -> None:
        """Compare whole pieces with their digests.

        Args:
            start: Tensor byte at which ``stored`` begins, a multiple of ``size``.
            stored: Whole pieces, the tensor's last one may be shorter.

        Raises:
            AuthenticationError: They differ.
        """
        for offset in range(0, stored.nbytes, self.size):
            i = (start + offset) // self.size
            digest = hashlib.sha256(stored[offset : offset + self.size]).digest()
            if not hmac.compare_digest(digest, self.values[32 * i : 32 * i + 32]):
                raise AuthenticationError(f"bytes {start + offset:,} and up differ from the signed digest")


@dataclass(frozen=True, slots=True)
class ClearBytes:
    """One clear tensor's bytes in a file.

    Attributes:
        source: The file.
        offset: File offset of its first byte.
        nbytes: Its size.
        digests: What was signed about them; None in a file that signs nothing.
    """

    source: FileSource
    offset: int
    nbytes: int
    digests: Digests | None

    @property
    def step(self) -> int:
        """Bytes per digest."""
        return JOB_BYTES if self.digests is None else self.digests.size

    def open(self, index: int, slot: memoryview, out: memoryview) -> None:
        """Check one piece; as :meth:`Stored.open`."""
        stored = slot[:-TAG_BYTES]
        if self.digests is not None:
            self.digests.check(index * self.step, stored)
        out[:] = stored


@dataclass(frozen=True, slots=True)
class Wanted:
    """Part of a tensor, and where it goes.

    Attributes:
        name: Of the tensor, for errors.
        stored: Where it is.
        out: Writable bytes, filled only with what was verified. None checks the bytes and keeps nothing.
        start: First byte of the tensor that is wanted.
        stop: First byte that is not.
    """

    name: str
    stored: Stored
    out: memoryview | None
    start: int
    stop: int


class Piece(NamedTuple):
    """One piece of a tensor to be read: how much is stored, and which part of it was asked for.

    There are as many as chunks: what is asked of each of them several times is worked out once.

    Attributes:
        wanted: What it is a piece of.
        number: Which one of the tensor.
        first: Tensor byte at which it begins.
        nbytes: Its size as stored.
        place: File offset.
    """

    wanted: Wanted
    number: int
    first: int
    nbytes: int
    place: int

    def target(self) -> memoryview | None:
        """The destination of its plaintext where all of it is wanted."""
        w, first, last = self.wanted, self.first, self.first + self.nbytes
        return None if w.out is None or first < w.start or last > w.stop else w.out[first - w.start : last - w.start]


@dataclass(frozen=True, slots=True)
class Options:
    """How files are read.

    Attributes:
        page_cache: What becomes of the system's copy of the file. ``keep`` it: the next process, and the next load, find
            it there. ``drop`` it behind the reader: for machines short of memory. ``bypass`` it (O_DIRECT): nothing is
            copied or displaced, and every load waits for the disk.
        gpu_direct: Whether devices read files themselves: ``auto``, where that is possible and the page cache does not
            have them, ``on`` or ``off``.
    """

    page_cache: str = "keep"
    gpu_direct: str = "auto"


def read(wanted: Sequence[Wanted], options: Options = Options()) -> None:
    """Fill every destination, on the shared pool.

    Args:
        wanted: In file order, best; only the pieces that they touch are read.
        options: How.

    Raises:
        AuthenticationError: A tag or digest is wrong.
        ReadError: A file ends early or cannot be read.
        Exception: Whatever else came up first; in any case all destinations were wiped.
    """
    jobs = plan(wanted)

    def clean_up() -> None:
        wipe_all(wanted)

    waiting = will_wait([(job[0].wanted.stored.source, job[0].place) for job in jobs], options)
    # A disk is fastest when each of its readers follows a stretch of its own, rather than all of them in turns.
    length = -(-len(jobs) // (2 * WAITING_THREADS)) if waiting else 1
    stretches = [jobs[i : i + length] for i in range(0, len(jobs), length)]

    def work(stretch: list[list[Piece]]) -> None:
        for job in stretch:
            run(job, options)

    run_jobs(work, stretches, on_error=clean_up, waiting=waiting)
    try:
        release(jobs, options)
    except BaseException:
        # A signal, at the last moment: nobody gets to see what was read.
        insist(clean_up, CLEANING_TRIES)
        raise


def release(jobs: Sequence[Sequence[Piece]], options: Options) -> None:
    """Let go of the page cache under jobs that were done, if that is wanted."""
    if options.page_cache != "drop":
        return
    spans: dict[FileSource, tuple[int, int]] = {}
    for job in jobs:
        source, start, stop = job[0].wanted.stored.source, job[0].place, job[-1].place + job[-1].nbytes
        low, high = spans.get(source, (start, stop))
        spans[source] = min(low, start), max(high, stop)
    for source, (low, high) in spans.items():
        # In one go and with its surroundings: the system caches in pieces of up to a huge page, and only drops whole ones.
        start, stop = low // HUGE_PAGE * HUGE_PAGE, -(-high // HUGE_PAGE) * HUGE_PAGE
        source.drop_cache(start, stop - start)


def will_wait(places: Sequence[tuple[FileSource, int]], options: Options) -> bool:
    """Whether reading will wait for a disk more than it computes: a few samples tell. The system is told to read ahead.

    Args:
        places: Files and offsets of what will be read; fewer than eight are not worth asking.
        options: How to read.
    """
    if len(places) < _SAMPLES:
        return False
    if options.page_cache == "bypass":
        return True
    samples = places[:: len(places) // _SAMPLES]
    if all(source.is_cached(offset) for source, offset in samples):
        return False
    for source in {source for source, _ in samples}:
        source.read_ahead()
    return True


def wipe_all(wanted: Sequence[Wanted]) -> None:
    """Overwrite every destination."""
    for w in wanted:
        if w.out is not None:
            wipe(w.out)


def plan(wanted: Sequence[Wanted]) -> list[list[Piece]]:
    """Cut what is wanted into jobs: pieces that lie side by side in one file."""
    jobs: list[list[Piece]] = []
    room, end, source = 0, -1, None
    for w in wanted:
        stored = w.stored
        step = stored.step
        if w.start < w.stop:
            indexes = range(w.start // step, -(-w.stop // step))
        else:
            # v2 gives an empty tensor one tag all the same; v1 and clear ones have nothing to check.
            indexes = range(1 if isinstance(stored, SealedBytes) and not stored.nbytes and stored.tags else 0)
        for index in indexes:
            first = index * step
            nbytes, place = max(0, min(step, stored.nbytes - first)), stored.offset + first
            if nbytes > room or place != end or stored.source is not source:
                jobs.append([])
                room = JOB_BYTES
            jobs[-1].append(Piece(w, index, first, nbytes, place))
            room -= nbytes
            end, source = place + nbytes, stored.source
    return jobs


def run(job: Sequence[Piece], options: Options = Options(), *, make_pages: bool = True) -> None:
    """Read, check and decrypt the pieces of one job; on an error their own destinations are wiped, others are not.

    Args:
        job: From :func:`plan`.
        options: How to read.
        make_pages: Have the destination's pages made first. It saves page faults and costs one more turn at the
            interpreter lock, which is not worth it while other threads are busy in Python.

    Raises:
        AuthenticationError, ReadError: As :func:`read`.
    """
    total = sum(piece.nbytes for piece in job)
    source, direct = job[0].wanted.stored.source, options.page_cache == "bypass"
    memory = scratch(total + TAG_BYTES + 2 * DIRECT_ALIGN)
    piece = job[0]
    try:
        # Before the scratch memory is filled: the kernel's zeroing would drive it out of the cache.
        for piece in job:
            if make_pages and piece.nbytes >= _POPULATE and (out := piece.target()) is not None:
                populate(out)
        piece = job[0]
        at = source.read_directly(memory, piece.place, total) if direct else 0
        if not direct and total:
            source.read_into([memory[:total]], piece.place)
        # From the last to the first: a tag goes behind its chunk, where the next chunk has had its turn by then.
        end = at + total
        for piece in reversed(job):
            start = end - piece.nbytes
            _open(piece, memory[start : end + TAG_BYTES])
            end = start
    except SecureLoaderError as e:
        raise annotate(e, source.path, piece.wanted.name) from None


def _open(piece: Piece, slot: memoryview) -> None:
    wanted, target = piece.wanted, piece.target()
    if target is not None:
        wanted.stored.open(piece.number, slot, target)
        return
    # Only part of this piece is wanted, or nothing of it but the check, which covers all of it: work in place.
    whole = slot[:-TAG_BYTES]
    try:
        wanted.stored.open(piece.number, slot, whole)
        if wanted.out is not None:
            first, low = piece.first, max(piece.first, wanted.start)
            high = min(first + piece.nbytes, wanted.stop)
            wanted.out[low - wanted.start : high - wanted.start] = whole[low - first : high - first]
    finally:
        wipe(whole)


_local = threading.local()


def scratch(nbytes: int) -> memoryview:
    """Scratch memory of this thread, in huge pages. Whoever leaves plaintext in it wipes it."""
    kept: memoryview | None = getattr(_local, "scratch", None)
    if kept is None or kept.nbytes < nbytes:
        kept = Region(max(nbytes, JOB_BYTES)).view()
        # v1 tensors and foreign chunks may be huge; do not keep memory of that size for ever.
        if nbytes <= 4 * JOB_BYTES:
            _local.scratch = kept
    return kept[:nbytes]


def annotate(error: SecureLoaderError, path: str, tensor: str | None = None) -> SecureLoaderError:
    """The same error, saying where it happened."""
    if isinstance(error, KeyAccessError):
        tensor = None  # the master key is the file's; that it was first needed for this tensor tells nobody anything
    return type(error)(error.message, hint=error.hint, path=error.path or path, tensor=error.tensor or tensor)
