"""A slice of a stored tensor is what torch and numpy make of the same index, error or not."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secure_loader import Archive
from secure_loader.core import slicing
from secure_loader.core.source import FileSource
from secure_loader.core.types import DTYPES, TensorInfo

from .files import CHUNK, PROFILE, seal, session

KINDS = ("v2", "v1", "clear", "plain")
DTYPE_NAMES = ("bool", "uint8", "int16", "uint16", "float16", "float32", "complex64", "int64", "float64")
TORCH_ONLY = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
# What does not fit one chunk, so that an index is answered in several pieces. Rows and planes are larger and smaller
# than a chunk, and no multiple of it.
LARGE_SHAPES = ((100_001,), (7, 20_003), (301, 111), (3, 5, 9_001), (2, 3, 4, 5_003), (40_009, 2))


def tensor_of(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    made = torch.arange(math.prod(shape), dtype=torch.int64).reshape(shape)
    # Narrow kinds repeat: an odd period keeps rows apart all the same.
    return (made % 113).to(getattr(torch, dtype)) if dtype != "bool" else made % 3 == 0


def stored(tensors: dict[str, torch.Tensor], kind: str) -> bytes:
    if kind == "plain":
        return safetensors.torch.save(tensors)
    clear = sorted(tensors) if kind == "clear" else []
    return seal(tensors, version="1" if kind == "v1" else "2", clear=clear)


def archive(data: bytes, framework: str) -> Archive:
    return Archive(session().accept(FileSource.from_bytes(data), strict=False), framework)


def _bounds(size: int) -> st.SearchStrategy[int]:
    """Mostly inside, a little outside, and what no index can be."""
    near = st.integers(-size - 2, size + 1)
    inside = st.integers(-size, max(size - 1, 0))
    return st.one_of(inside, inside, inside, near, st.sampled_from([2**63 - 1, -(2**63)]))


def _slices(size: int) -> st.SearchStrategy[slice]:
    end = st.none() | st.integers(-size - 3, size + 3)
    step = st.none() | st.integers(1, 4) | st.integers(1, max(1, size)) | st.sampled_from([0, -1, -3])
    return st.builds(slice, end, end, step)


def _items(size: int) -> st.SearchStrategy[Any]:
    listed = st.lists(st.integers(-size, max(size - 1, 0)), max_size=4)
    return st.one_of(
        _bounds(size),
        _slices(size),
        _slices(size),
        _bounds(size).map(np.int64),
        listed,
        st.none(),
        st.booleans(),
        st.just(("word",)),
    )


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """Ints, slices and ``...`` mostly; lists, ``None``, masks of one value and nonsense now and then."""
    basic = draw(st.booleans())
    used = draw(st.integers(0, len(shape) + (0 if basic else 1)))
    sizes = [*shape, 1][:used]
    items = [draw((_bounds(n) | _slices(n)) if basic else _items(n)) for n in sizes]
    if draw(st.booleans()):
        items.insert(draw(st.integers(0, len(items))), ...)
    return items[0] if len(items) == 1 and draw(st.booleans()) else tuple(items)


@st.composite
def partial_indices(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Ints in range and slices with steps: all that is read in part."""
    items: list[Any] = []
    for size in shape:
        if size and draw(st.booleans()):
            items.append(draw(st.integers(-size, size - 1)))
            continue
        ends = sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size))))
        items.append(slice(*ends, draw(st.integers(1, 4))))
    first, last = sorted(draw(st.tuples(st.integers(0, len(shape)), st.integers(0, len(shape)))))
    # The rest may be left out, or stands for nothing or more behind dots in the middle.
    return tuple(draw(st.sampled_from([items, items[:last], [*items[:first], ..., *items[last:]]])))


def attempt(thing: Any, index: Any) -> Any:
    try:
        return thing[index]
    except Exception as e:  # noqa: BLE001 - which one is what is compared
        return type(e)


def check_same(got: Any, want: Any) -> None:
    if isinstance(want, type) or isinstance(got, type):
        assert got is want
    elif isinstance(want, torch.Tensor):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        bits = [t.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for t in (got, want)]
        assert torch.equal(*bits)
    else:
        # numpy makes a scalar of an index of ints, and an array without dimensions where ``...`` is among them.
        assert isinstance(got, (np.ndarray, np.generic))
        assert (got.dtype, got.shape, got.tobytes()) == (want.dtype, want.shape, want.tobytes())


def plain_as(tensor: torch.Tensor, framework: str) -> Any:
    return tensor if framework == "pt" else tensor.numpy()


@settings(PROFILE, max_examples=250)
@given(st.data())
def test_small_tensors(data: st.DataObject) -> None:
    framework = data.draw(st.sampled_from(["pt", "numpy"]), "framework")
    dtype = data.draw(st.sampled_from(DTYPE_NAMES + (TORCH_ONLY if framework == "pt" else ())), "dtype")
    shape = tuple(data.draw(st.lists(st.integers(0, 6), max_size=4), "shape"))
    tensor = tensor_of(shape, dtype)
    index = data.draw(indices(shape) | partial_indices(shape) if shape else indices(shape), "index")
    stored_slice = archive(stored({"t": tensor}, data.draw(st.sampled_from(KINDS), "kind")), framework).get_slice("t")
    assert stored_slice.get_shape() == list(shape)
    check_same(attempt(stored_slice, index), attempt(plain_as(tensor, framework), index))


LARGE = {str(shape): tensor_of(shape, "float32") for shape in LARGE_SHAPES} | {
    "bf16": tensor_of((5, 70_001), "bfloat16")
}


@pytest.fixture(scope="module", params=KINDS)
def large(request: pytest.FixtureRequest) -> bytes:
    return stored(LARGE, request.param)


@settings(PROFILE, max_examples=80)
@given(data=st.data())
def test_tensors_of_many_chunks(large: bytes, data: st.DataObject) -> None:
    framework = data.draw(st.sampled_from(["pt", "numpy"]), "framework")
    name = data.draw(st.sampled_from(sorted(n for n in LARGE if framework == "pt" or n != "bf16")), "tensor")
    shape = tuple(LARGE[name].shape)
    index = data.draw(indices(shape) | partial_indices(shape), "index")
    got = attempt(archive(large, framework).get_slice(name), index)
    check_same(got, attempt(plain_as(LARGE[name], framework), index))


@settings(PROFILE, max_examples=400)
@given(st.data())
def test_a_plan_names_the_bytes_of_the_answer(data: st.DataObject) -> None:
    """With chunks of a few bytes, which no file has, every way to cut an index into ranges is taken."""
    shape = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3), "shape"))
    array = np.arange(math.prod(shape), dtype=np.int16).reshape(shape)
    index = data.draw(partial_indices(shape), "index")
    plan = slicing.plan(TensorInfo("t", "I16", shape, 0, array.nbytes), index, data.draw(st.integers(1, 64), "chunk"))
    assert all(0 <= r.start < r.stop <= array.nbytes for r in plan.ranges) or not array.nbytes
    assert all(a.stop < b.start for a, b in zip(plan.ranges, plan.ranges[1:], strict=False))
    raw = array.tobytes()
    read = b"".join(raw[r.start : r.stop] for r in plan.ranges)
    assert plan.nbytes == len(read)
    check_same(np.frombuffer(read, np.int16).reshape(plan.shape)[plan.index], array[index])


@pytest.mark.parametrize("framework", ["pt", "numpy"])
@pytest.mark.parametrize(
    "index", [7, -8, (0, 20_003), (0, 0, 0), ("word",), 1.5, slice(None, None, 0), ([0, 99],), {}, 2**70], ids=repr
)
def test_a_bad_index_is_the_framework_s_own_error(large: bytes, framework: str, index: Any) -> None:
    name = str((7, 20_003))
    want = attempt(plain_as(LARGE[name], framework), index)
    assert issubclass(want, Exception)
    with pytest.raises(Exception) as got:
        archive(large, framework).get_slice(name)[index]
    assert got.type is want


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(offset, bytes) of every read from now on."""
    seen: list[tuple[int, int]] = []
    original = FileSource.read_into

    def spy(self: FileSource, buffers: Any, offset: int) -> None:
        seen.append((offset, sum(len(b) for b in buffers)))
        original(self, buffers, offset)

    monkeypatch.setattr(FileSource, "read_into", spy)
    return seen


MATRIX = tensor_of((500, 1000), "float32")  # 4000 bytes a row, 31 chunks
WIDE = tensor_of((12, 50_000), "float32")  # 200,000 bytes a row, more than three chunks


def chunks_of(spans: list[tuple[int, int]], nbytes: int) -> dict[int, int]:
    """Chunk number to its length, for each chunk that a span of tensor bytes touches."""
    numbers = {n for start, stop in spans for n in range(start // CHUNK, (stop - 1) // CHUNK + 1)}
    return {n: min(CHUNK, nbytes - n * CHUNK) for n in numbers}


@pytest.mark.parametrize("clear", [(), ("m", "w")], ids=["sealed", "clear"])
@pytest.mark.parametrize(
    ("name", "index", "spans"),
    [
        ("m", 0, [(0, 4000)]),
        ("m", -1, [(499 * 4000, 500 * 4000)]),
        ("m", 16, [(64_000, 68_000)]),  # lies across the border of two chunks
        ("m", (3, slice(5, 9)), [(12_020, 12_036)]),
        ("m", slice(10, 40), [(40_000, 160_000)]),
        ("w", slice(None, None, 5), [(r * 200_000, (r + 1) * 200_000) for r in (0, 5, 10)]),
        ("w", (slice(None), 49_999), [(r * 200_000 + 199_996, (r + 1) * 200_000) for r in range(12)]),
        ("w", (slice(1, 9, 3), slice(0, 10)), [(r * 200_000, r * 200_000 + 40) for r in (1, 4, 7)]),
        ("w", (..., 2, slice(None)), [(400_000, 600_000)]),
        ("m", slice(7, 7), []),
    ],
)
def test_only_the_chunks_that_an_index_touches_are_read(
    reads: list[tuple[int, int]], clear: tuple[str, ...], name: str, index: Any, spans: list[tuple[int, int]]
) -> None:
    tensors = {"m": MATRIX, "w": WIDE}
    file = archive(seal(tensors, clear=clear), "pt")
    part = file.get_slice(name)
    begin = file.file.header.body_start + file.get_tensor_info(name).start
    reads.clear()
    check_same(attempt(part, index), attempt(tensors[name], index))
    touched = chunks_of(spans, tensors[name].nbytes)
    got = {n for offset, length in reads for n in chunks_of([(offset - begin, offset - begin + length)], 1 << 40)}
    assert got == touched.keys()
    # A chunk may be needed by two rows, but no read goes beyond the chunks that its own row touches.
    assert sum(length for _, length in reads) <= sum(sum(chunks_of([s], tensors[name].nbytes).values()) for s in spans)


def test_one_row_costs_less_than_two_chunks(reads: list[tuple[int, int]]) -> None:
    part = archive(seal({"m": MATRIX}), "pt").get_slice("m")
    reads.clear()
    assert torch.equal(part[1], MATRIX[1])
    assert 0 < sum(length for _, length in reads) < 2 * CHUNK


def test_packed_dtypes_are_not_cut_inside_a_byte() -> None:
    """F4 holds two values a byte: whatever the index, the plan reads whole tensors."""
    assert DTYPES["F4"].bits == 4
    info = TensorInfo("t", "F4", (4, 6), 0, 12)
    for index in (0, (1, 2), slice(0, 3, 2)):
        assert [(r.start, r.stop) for r in slicing.plan(info, index, 1).ranges] == [(0, 12)]


@pytest.mark.parametrize(
    "index",
    [
        slice(None, None, -1),
        (slice(None), slice(90, 20, -3)),
        (2, slice(None, None, -1)),
        [3, 0, -1],
        (slice(0, 6, 2), [5, 20_000]),
        (None, 3),
        True,
        np.arange(7) % 2 == 0,
    ],
    ids=repr,
)
def test_numpy_s_other_indices_read_the_whole_tensor(large: bytes, index: Any) -> None:
    """Backwards, by lists and by masks: no ranges are planned for these."""
    name = str((7, 20_003))
    check_same(archive(large, "numpy").get_slice(name)[index], LARGE[name].numpy()[index])


def test_adjacent_rows_are_one_read() -> None:
    plan = slicing.plan(TensorInfo("t", "I16", (4, 1), 0, 8), (slice(None), 0), 1)
    assert [(r.start, r.stop) for r in plan.ranges] == [(0, 8)]


@pytest.mark.parametrize("index", [[[0, 1], [1, 0]], [0, 2], [True, False, True]])
def test_lists_mean_what_they_mean_to_torch(index):
    tensor = torch.arange(12).reshape(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to change its mind about nested lists; so shall we, with it
        expected = tensor[index]
        got = archive(seal({"t": tensor}), "pt").get_slice("t")[index]
    assert torch.equal(got, expected)
