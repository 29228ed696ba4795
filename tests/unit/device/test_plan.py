"""Slots are filled so that nothing that was checked, or belongs to another run, is read over."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from secure_loader.core.device.device import Memory
from secure_loader.core.device.plan import Target, edge_bytes, fillings, loads, rounds
from secure_loader.core.pipeline import ClearBytes, Digests, Options, SealedBytes, Wanted
from secure_loader.core.secrets import Secret

PAGE, ROOM, CHUNK = 4096, 64 << 10, 10_000
KEY = Secret(bytes(32))
MEMORY = Memory(None, 1 << 20, 1 << 40)


class Log:
    """A file that notes what is read of it."""

    path = "log"

    def __init__(self):
        self.reads = []

    def read_into(self, buffers, offset):
        self.reads.append((offset, buffers[0].nbytes))

    def read_directly(self, memory, offset, length):
        assert memory.nbytes >= -(-(offset % PAGE + length) // PAGE) * PAGE
        self.reads.append((offset, length))
        return offset % PAGE


TENSORS = st.lists(
    st.tuples(
        st.sampled_from(["sealed", "single", "digests", "clear", "signed"]),
        st.sampled_from([0, 1, 5, 4096, 9_999, 10_000, 30_001, 100_000]),
        st.sampled_from([0, 0, 0, 1, 4096, 5000]),
    ),
    max_size=12,
)


def targets(source, tensors):
    made, end, at = [], 1003, 0
    for kind, nbytes, gap in tensors:
        end += gap
        digests = Digests(bytes(32 * (nbytes // CHUNK + 1)), CHUNK)
        tags = bytes(16 * max(1, -(-nbytes // CHUNK)))
        if kind in ("clear", "signed"):
            stored = ClearBytes(source, end, nbytes, digests if kind == "signed" else None)
        else:
            chunk = None if kind == "single" else CHUNK
            stored = SealedBytes(
                source, end, nbytes, None, chunk, bytes(12), tags, digests if kind == "digests" else None
            )
        key = None if kind in ("clear", "signed") else KEY
        made.append(Target(Wanted(kind, stored, None, 0, nbytes), MEMORY, at, key))
        end += nbytes
        at += nbytes
    return made


@settings(max_examples=200, deadline=None)
@given(TENSORS, st.sampled_from(["keep", "bypass"]))
def test_every_byte_has_one_place_and_blocks_are_not_shared(tensors, page_cache):
    source, seen = Log(), []
    wanted = targets(source, tensors)
    for filling in fillings(loads(wanted, None, ROOM), ROOM, Options(page_cache)):
        placed = [(at, load) for at, load in filling.loads if load.nbytes]
        assert filling.nbytes <= ROOM or len(placed) == 1
        spans = sorted((at, at + load.nbytes) for at, load in placed)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        raw = [(at, load) for at, load in placed if not load.checked]
        for at, load in raw if page_cache == "bypass" else []:
            assert at % PAGE == load.place % PAGE
            # Whole blocks come: nothing may lie there but what comes from the same blocks of the file.
            low, high = at // PAGE * PAGE, -(-(at + load.nbytes) // PAGE) * PAGE
            for other, its in placed:
                if other < high and other + its.nbytes > low:
                    assert not its.checked
                    assert other - at == its.place - load.place
        before = len(source.reads)
        runs = [
            job
            for job in filling.reads(memoryview(bytearray(filling.nbytes)), 16 << 10)
            if job.func.__name__ == "_read"
        ]
        for job in runs:
            job()
        fresh = sorted(source.reads[before:])
        assert sum(n for _, n in fresh) == sum(load.nbytes for _, load in raw)
        assert all(n <= 16 << 10 for _, n in fresh)
        for (start, n), (following, _) in pairwise(fresh):
            # No two calls read the same block.
            assert start + n != following or following % PAGE == 0
        seen += [(start, memory, at, n) for start, memory, at, n in filling.copies()]
    total = sum(t.nbytes for t in wanted)
    ends = sorted((at, at + n) for _, _, at, n in seen)
    assert sum(n for *_, n in seen) == total
    assert all(a[1] <= b[0] for a, b in pairwise(ends))


@settings(max_examples=200, deadline=None)
@given(TENSORS)
def test_every_chunk_is_opened_once_and_with_its_last_byte(tensors):
    wanted = targets(Log(), tensors)
    copied, opened = 0, []
    for filling in fillings(loads(wanted, None, ROOM), ROOM, Options()):
        copied = max([copied, *(at + n for _, _, at, n in filling.copies())])
        batch = filling.batch()
        for chunk in batch.chunks if batch else ():
            assert chunk.address + chunk.nbytes - MEMORY.address <= copied
            opened.append((chunk.address - MEMORY.address, chunk.nbytes))
    due = []
    for target, (kind, nbytes, _) in zip(wanted, tensors, strict=True):
        step = nbytes if kind == "single" else CHUNK
        if kind in ("sealed", "single", "digests"):
            due += [(target.at + i, min(step, nbytes - i)) for i in range(0, nbytes, max(1, step))] or [(target.at, 0)]
    assert sorted(opened) == sorted(due)


def test_edges_are_the_chunks_of_which_a_part_is_wanted():
    def edges(start, stop):
        stored = SealedBytes(Log(), 0, 35_000, None, CHUNK, bytes(12), bytes(64))
        return Target(Wanted("x", stored, None, start, stop), MEMORY, 0, KEY).edges()

    assert edges(0, 35_000) == edges(0, 10_000) == edges(30_000, 35_000) == edges(20_000, 20_000) == []
    assert edges(1, 35_000) == edges(1, 10_000) == edges(4, 5) == [(0, 10_000)]
    assert edges(9_999, 20_001) == [(0, 10_000), (20_000, 10_000)]
    assert edges(0, 34_999) == [(30_000, 5_000)]


def test_little_memory_beside_the_tensors():
    stored = SealedBytes(Log(), 0, 100 * CHUNK, None, CHUNK, bytes(12), bytes(1600))
    rows = [Target(Wanted("x", stored, None, n * CHUNK + 5, n * CHUNK + 6), MEMORY, n, KEY) for n in range(100)]
    groups = rounds(rows, 35_000)
    assert [t for group in groups for t in group] == rows
    assert all(edge_bytes(group) <= 35_000 for group in groups)
    assert len(groups) == 34
    assert len(rounds(rows, 1)) == 100  # a chunk has to fit
