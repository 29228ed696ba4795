"""Which bytes of a tensor an index needs.

An index is planned against the tensor's shape before anything is read: the outermost dimensions are walked one by one
while a step inside them is larger than a chunk, and the rest is one run of bytes. So a row of a large matrix touches the
chunks of that row, and a column touches every row only when the rows are smaller than a chunk anyway.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .types import DTYPES, ByteRange, TensorInfo


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """How to answer an index.

    Attributes:
        ranges: Tensor bytes to read, in order; their concatenation is a tensor of ``shape``.
        shape: Logical shape of what is read.
        index: What remains to be applied to it; where the whole tensor is read, the caller's own index.
    """

    ranges: tuple[ByteRange, ...]
    shape: tuple[int, ...]
    index: Any

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return sum(len(r) for r in self.ranges)


def plan(info: TensorInfo, index: Any, granule: int) -> SlicePlan:
    """Plan an index.

    Args:
        info: The tensor.
        index: Anything the framework accepts; ints, slices, ``...`` and tuples of them are read partially, everything
            else reads the whole tensor. Bounds must have been checked by the framework.
        granule: Bytes per chunk: what is read anyway to get one byte.
    """
    whole = SlicePlan((ByteRange(0, info.nbytes),), info.shape, index)
    dims = _basic(index, info.shape)
    # Packed dtypes do not fall on byte borders everywhere: only their rows are cut, never their last dimension.
    bits = DTYPES[info.dtype].bits
    if dims is None or info.nbytes == 0 or bits % 8:
        return whole
    inner = [bits // 8 * math.prod(info.shape[i + 1 :]) for i in range(len(dims))]
    outer = _outer_dimensions(dims, info.shape, inner, granule)
    rest_shape: tuple[int, ...] = ()
    rest_index: tuple[Any, ...] = ()
    walked = [list(_positions(d)) for d in dims[:outer]]
    if outer == len(dims):
        run, base = bits // 8, 0
    else:
        low, high = _span(dims[outer])
        run, base = (high - low) * inner[outer], low * inner[outer]
        rest_shape = (high - low, *info.shape[outer + 1 :])
        rest_index = (_shift(dims[outer], low), *dims[outer + 1 :])
    starts = (sum(p * i for p, i in zip(at, inner, strict=False)) + base for at in itertools.product(*walked))
    ranges = tuple(ByteRange(s, s + run) for s in starts if run)
    kept = tuple(len(w) for w in walked)
    index_kept = tuple(0 if isinstance(d, int) else slice(None) for d in dims[:outer])
    return SlicePlan(_merge(ranges), kept + rest_shape, index_kept + rest_index)


Dim = int | slice  # an int in range, or a slice with a positive step and concrete bounds


def _basic(index: Any, shape: tuple[int, ...]) -> list[Dim] | None:
    """One entry per dimension, or None when the index is more than ints and slices."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(not (i is Ellipsis or isinstance(i, slice) or type(i) is int) for i in items):
        return None
    dots = [n for n, i in enumerate(items) if i is Ellipsis]
    if len(dots) > 1 or len(items) - len(dots) > len(shape):
        return None
    fill = [slice(None)] * (len(shape) - len(items) + len(dots))
    at = dots[0] if dots else len(items)
    items = items[:at] + fill + items[at + len(dots) :]
    dims: list[Dim] = []
    for item, size in zip(items, shape, strict=True):
        if isinstance(item, int):
            dims.append(item + size if item < 0 else item)
            continue
        start, stop, step = item.indices(size)
        if step < 1:
            return None
        dims.append(slice(start, max(start, stop), step))
    return dims


def _outer_dimensions(dims: list[Dim], shape: tuple[int, ...], inner: list[int], granule: int) -> int:
    """How many leading dimensions to walk position by position."""
    outer = 0
    for n, dim in enumerate(dims):
        if isinstance(dim, int):
            outer = n + 1
            continue
        cut = any(_narrow(d, size) for d, size in zip(dims[n + 1 :], shape[n + 1 :], strict=True))
        # Whole dimensions that follow are one run; it is worth walking only across gaps larger than a chunk.
        if (dim.step > 1 and dim.step * inner[n] > granule) or (cut and inner[n] > granule):
            outer = n + 1
            continue
        break
    return outer


def _narrow(dim: Dim, size: int) -> bool:
    return isinstance(dim, int) or len(range(dim.start, dim.stop, dim.step)) < size


def _positions(dim: Dim) -> Iterator[int]:
    return iter((dim,)) if isinstance(dim, int) else iter(range(dim.start, dim.stop, dim.step))


def _span(dim: Dim) -> tuple[int, int]:
    if isinstance(dim, int):
        return dim, dim + 1
    count = len(range(dim.start, dim.stop, dim.step))
    return dim.start, dim.start + ((count - 1) * dim.step + 1 if count else 0)


def _shift(dim: Dim, low: int) -> Dim:
    return 0 if isinstance(dim, int) else slice(0, dim.stop - low, dim.step)


def _merge(ranges: tuple[ByteRange, ...]) -> tuple[ByteRange, ...]:
    merged: list[ByteRange] = []
    for r in ranges:
        if merged and merged[-1].stop == r.start:
            merged[-1] = ByteRange(merged[-1].start, r.stop)
        else:
            merged.append(r)
    return tuple(merged)
