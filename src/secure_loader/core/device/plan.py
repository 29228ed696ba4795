"""What goes to a device, cut into loads, and loads gathered into fillings of a slot.

A load is what lies together in a file and in the memory of the device: a chunk, or part of one. Where the device decrypts,
chunks travel as they are stored and are opened where they are going to stay; one of which only a part is wanted is
opened beside, and the part is moved. What the host has to check comes by way of :mod:`core.pipeline`, whose jobs fill
the slot with nothing but what was verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from ..aead import TAG_BYTES, chunk_nonce
from ..pipeline import ClearBytes, Options, SealedBytes, Stored, Wanted, run
from ..pipeline import plan as plan_jobs
from ..secrets import Secret
from ..source import DIRECT_ALIGN, FileSource
from .batch import Batch, Chunk
from .device import Memory
from .layout import aligned

# A file may have a million tensors of one byte.
MOST_LOADS = 1 << 14


class Part(NamedTuple):
    """Part of a tensor that goes to a device.

    Attributes:
        wanted: Which; its ``out`` is not used.
        key: The DEK, where kernels can use it: AES-GCM.
    """

    wanted: Wanted
    key: Secret | None


class Target(NamedTuple):
    """Part of a tensor, and where on the device it goes.

    Attributes:
        wanted: The part; its ``out`` is not used.
        memory: Where it goes.
        at: First byte there.
        key: The DEK, where the device decrypts it; None where the host does, or there is nothing to decrypt.
    """

    wanted: Wanted
    memory: Memory
    at: int
    key: Secret | None

    @property
    def nbytes(self) -> int:
        """Bytes that are wanted."""
        return max(0, self.wanted.stop - self.wanted.start)

    def edges(self) -> list[tuple[int, int]]:
        """First byte and size of the chunks of which only a part is wanted, where the device decrypts."""
        start, stop = self.wanted.start, self.wanted.stop
        if self.key is None or start >= stop:
            return []
        stored = self.wanted.stored
        # The first chunk and the last; all between are wanted as a whole.
        ends = sorted({start // stored.step, (stop - 1) // stored.step})
        chunks = [(i * stored.step, min(stored.step, stored.nbytes - i * stored.step)) for i in ends]
        return [(first, nbytes) for first, nbytes in chunks if first < start or first + nbytes > stop]


class Opening(NamedTuple):
    """A chunk that the device opens once its last byte has come. As :class:`core.device.batch.Chunk`."""

    memory: Memory
    at: int
    nbytes: int
    key: Secret
    nonce: bytes
    tag: bytes


class Load(NamedTuple):
    """Bytes that travel together.

    Attributes:
        wanted: The part of a tensor that they are.
        checked: Whether the host verifies them on their way into the slot; otherwise they come as they are stored.
        nbytes: How many.
        memory: Where they go.
        at: First byte there.
        opening: The chunk that is whole once they have come.
    """

    wanted: Wanted
    checked: bool
    nbytes: int
    memory: Memory
    at: int
    opening: Opening | None

    @property
    def source(self) -> FileSource:
        """Their file."""
        return self.wanted.stored.source

    @property
    def place(self) -> int:
        """Where in the file they begin."""
        return self.wanted.stored.offset + self.wanted.start


class Move(NamedTuple):
    """A part of a chunk that was opened beside, and where it goes."""

    start: int
    memory: Memory
    at: int
    nbytes: int


class Scratch:
    """Device memory for chunks of which only a part is wanted.

    Args:
        memory: As much as :func:`edge_bytes` says.

    Attributes:
        moves: What to move where once everything was verified; complete when all loads were made.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.moves: list[Move] = []
        self._end = 0

    def place(self, target: Target, first: int, nbytes: int) -> int:
        """Where in the scratch memory a chunk goes that begins at tensor byte ``first``."""
        at = self._end
        self._end += aligned(nbytes)
        wanted = target.wanted
        low, high = max(first, wanted.start), min(first + nbytes, wanted.stop)
        self.moves.append(Move(at + low - first, target.memory, target.at + low - wanted.start, high - low))
        return at


def edge_bytes(targets: Iterable[Target]) -> int:
    """Bytes of scratch memory that targets need on the device."""
    return sum(aligned(nbytes) for target in targets for _, nbytes in target.edges())


def rounds(targets: Iterable[Target], most: int) -> list[list[Target]]:
    """Targets in groups of which each needs at most ``most`` bytes of scratch memory, as far as chunks are that small."""
    groups: list[list[Target]] = [[]]
    used = 0
    for target in targets:
        need = edge_bytes([target])
        if used and used + need > most:
            groups.append([])
            used = 0
        groups[-1].append(target)
        used += need
    return groups


def loads(targets: Iterable[Target], scratch: Scratch | None, room: int) -> Iterator[Load]:
    """Cut targets into loads.

    Args:
        targets: In file order, best.
        scratch: For the chunks of which only a part is wanted, where there are such.
        room: Bytes of a slot.
    """
    for target in targets:
        if target.key is None:
            yield from _by_the_host(target, room // 4)
        else:
            yield from _by_the_device(target, target.key, scratch, room)


def _by_the_host(target: Target, size: int) -> Iterator[Load]:
    wanted = target.wanted
    stored = wanted.stored
    checked = not (isinstance(stored, ClearBytes) and stored.digests is None)
    if wanted.start >= wanted.stop:
        # Where an empty tensor has a tag, the pipeline knows.
        yield Load(wanted, checked, 0, target.memory, target.at, None)
    for start, stop in _cut(wanted.start, wanted.stop, stored.step if checked else 1, size):
        part = _part(wanted, stored, start, stop)
        yield Load(part, checked, stop - start, target.memory, target.at + start - wanted.start, None)


def _by_the_device(target: Target, key: Secret, scratch: Scratch | None, room: int) -> Iterator[Load]:
    wanted, stored = target.wanted, target.wanted.stored
    assert isinstance(stored, SealedBytes)  # noqa: S101 - only those have keys
    step, checked = stored.step, stored.digests is not None
    # Digests are about the bytes as stored, so the host can check them without a key.
    as_stored = ClearBytes(stored.source, stored.offset, stored.nbytes, stored.digests)
    for index in _indexes(wanted, stored):
        first = index * step
        nbytes = max(0, min(step, stored.nbytes - first))
        memory, at = target.memory, target.at + first - wanted.start
        if nbytes and (first < wanted.start or first + nbytes > wanted.stop):
            assert scratch is not None  # noqa: S101 - edge_bytes says so
            memory, at = scratch.memory, scratch.place(target, first, nbytes)
        # The only chunk of v1 is number 0, whose nonce is the IV itself.
        nonce = chunk_nonce(stored.iv, index)
        opening = Opening(memory, at, nbytes, key, nonce, stored.tags[index * TAG_BYTES : (index + 1) * TAG_BYTES])
        if nbytes <= room:
            yield Load(_part(wanted, as_stored, first, first + nbytes), checked, nbytes, memory, at, opening)
            continue
        for start, stop in _cut(first, first + nbytes, as_stored.step if checked else 1, room // 4):
            last = opening if stop == first + nbytes else None
            part = _part(wanted, as_stored, start, stop)
            yield Load(part, checked, stop - start, memory, at + start - first, last)


def _indexes(wanted: Wanted, stored: SealedBytes) -> range:
    if wanted.start < wanted.stop:
        return range(wanted.start // stored.step, -(-wanted.stop // stored.step))
    # v2 gives an empty tensor one tag all the same.
    return range(1 if not stored.nbytes and stored.tags else 0)


def _part(wanted: Wanted, stored: Stored, start: int, stop: int) -> Wanted:
    return Wanted(wanted.name, stored, None, start, stop)


def _cut(start: int, stop: int, step: int, size: int) -> Iterator[tuple[int, int]]:
    """Parts of about ``size`` bytes on borders of ``step``."""
    unit = max(1, size // step) * step
    cuts = [start, *range((start // unit + 1) * unit, stop, unit), stop]
    return ((a, b) for a, b in pairwise(cuts) if a < b)


class Gathered:
    """Loads that are sent, and opened, together.

    Attributes:
        loads: With their places in the slot.
    """

    def __init__(self) -> None:
        self.loads: list[tuple[int, Load]] = []

    def batch(self) -> Batch | None:
        """What the device opens once it has come; None where there is nothing."""
        keys: dict[int, int] = {}
        secrets: list[Secret] = []
        chunks = []
        for _, load in self.loads:
            opening = load.opening
            if opening is None:
                continue
            number = keys.setdefault(id(opening.key), len(secrets))
            if number == len(secrets):
                secrets.append(opening.key)
            address = opening.memory.address + opening.at
            chunks.append(Chunk(address, opening.nbytes, number, opening.nonce, opening.tag))
        return Batch(secrets, chunks) if chunks else None

    def opened(self) -> tuple[str, list[str]]:
        """For errors: a file, and the tensors that the device opens."""
        of = [load for _, load in self.loads if load.opening is not None]
        return of[0].source.path, list(dict.fromkeys(load.wanted.name for load in of))


class Filling(Gathered):
    """What a slot is filled with.

    Args:
        room: Bytes of a slot.
        options: How files are read. Past the page cache whole blocks are read, so everything keeps its place within its
            block, and no two runs share one.
    """

    def __init__(self, room: int, options: Options) -> None:
        super().__init__()
        self._room, self._options = room, options
        self._align = DIRECT_ALIGN if options.page_cache == "bypass" else 1
        self._end = 0
        self._last: Load | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the slot that it takes."""
        return aligned(self._end, self._align)

    def add(self, load: Load) -> bool:
        """Take a load in; False where it does not fit any more."""
        at = self._place(load)
        if self.loads and (aligned(at + load.nbytes, self._align) > self._room or len(self.loads) >= MOST_LOADS):
            return False
        self.loads.append((at, load))
        if load.nbytes:
            self._end, self._last = at + load.nbytes, load
        return True

    def _place(self, load: Load) -> int:
        last = self._last
        if last is None:
            return load.place % self._align
        if load.checked == last.checked and (load.checked or adjoins(last, load)):
            return self._end
        return aligned(self._end, self._align) + load.place % self._align

    def reads(self, view: memoryview, size: int) -> list[Callable[[], None]]:
        """What fills the slot, to be called once each, by any threads.

        Args:
            view: The slot, on a page border.
            size: Bytes to read with one call, a multiple of a page.
        """
        jobs: list[Callable[[], None]] = []
        for at, source, place, nbytes in self._runs():
            # Cut on borders of the file's blocks: no two calls read the same one.
            cuts = [place, *range((place // size + 1) * size, place + nbytes, size), place + nbytes]
            for start, stop in pairwise(cuts):
                jobs.append(partial(self._read, view, at + start - place, source, start, stop - start))
        checked = [replace(load.wanted, out=view[at : at + load.nbytes]) for at, load in self.loads if load.checked]
        jobs += [partial(run, job, self._options, make_pages=False) for job in plan_jobs(checked)]
        return jobs

    def _runs(self) -> Iterator[tuple[int, FileSource, int, int]]:
        """Place in the slot, file, place there and size of what is read as it is stored, as long as can be."""
        begin: tuple[int, Load] | None = None
        end = 0
        last: Load | None = None
        for at, load in self.loads:
            if load.checked or not load.nbytes:
                continue
            if begin is not None and last is not None and at == end and adjoins(last, load):
                end, last = end + load.nbytes, load
                continue
            if begin is not None:
                yield begin[0], begin[1].source, begin[1].place, end - begin[0]
            begin, end, last = (at, load), at + load.nbytes, load
        if begin is not None:
            yield begin[0], begin[1].source, begin[1].place, end - begin[0]

    def _read(self, view: memoryview, at: int, source: FileSource, place: int, nbytes: int) -> None:
        if self._align == 1:
            source.read_into([view[at : at + nbytes]], place)
            return
        block = at // DIRECT_ALIGN * DIRECT_ALIGN
        source.read_directly(view[block : block + nbytes + 2 * DIRECT_ALIGN], place, nbytes)

    def copies(self) -> list[tuple[int, Memory, int, int]]:
        """Place in the slot, memory, place there and size of what is copied to the device, as long as can be."""
        runs: list[tuple[int, Memory, int, int]] = []
        for at, load in self.loads:
            if not load.nbytes:
                continue
            if runs:
                start, memory, to, nbytes = runs[-1]
                if memory is load.memory and start + nbytes == at and to + nbytes == load.at:
                    runs[-1] = (start, memory, to, nbytes + load.nbytes)
                    continue
            runs.append((at, load.memory, load.at, load.nbytes))
        return runs


def adjoins(last: Load, load: Load) -> bool:
    """Whether a load lies right behind another one in its file."""
    return last.source is load.source and last.place + last.nbytes == load.place


def fillings(cut: Iterable[Load], room: int, options: Options) -> Iterator[Filling]:
    """Gather loads into fillings, in order; one that is larger than a slot is alone."""
    current = Filling(room, options)
    for load in cut:
        if not current.add(load):
            yield current
            current = Filling(room, options)
            current.add(load)
    if current.loads:
        yield current


def file_places(targets: Sequence[Target], every: int) -> list[tuple[FileSource, int]]:
    """A place in the files for each ``every`` bytes that will be read."""
    return [
        (t.wanted.stored.source, t.wanted.stored.offset + at)
        for t in targets
        for at in range(t.wanted.start, t.wanted.stop, every)
    ]
