"""Which tensors share a piece of device memory, and where in it they lie.

Tensors that lie side by side in a file stay side by side, so that a run of them is copied as one. A tensor whose place
would not suit its kernels starts on the next border instead. A piece is small enough that a model which drops a layer gets
its memory back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# As on the host: see core.memory.
REGION_BYTES = 64 << 20
# No dtype needs more, nor do loads of whole vectors, ours or a framework's.
ALIGN = 16


class Place(NamedTuple):
    """Where a tensor goes.

    Attributes:
        region: Number of the region.
        at: Offset in it.
    """

    region: int
    at: int


def lay_out(spans: Sequence[tuple[int, int]], region_bytes: int = REGION_BYTES) -> tuple[list[int], list[Place]]:
    """Memory for many tensors.

    Args:
        spans: First byte and size of each tensor in its file, in file order.
        region_bytes: Size of a region at most, unless one tensor is larger.

    Returns:
        Size of each region, and the place of each tensor.
    """
    sizes: list[int] = []
    places = []
    file_end = -1
    for start, nbytes in spans:
        end = sizes[-1] if sizes else 0
        at = end if start == file_end and end % ALIGN == 0 else aligned(end)
        if not sizes or (nbytes and at + nbytes > region_bytes):
            sizes.append(0)
            at = 0
        sizes[-1] = at + nbytes
        places.append(Place(len(sizes) - 1, at))
        file_end = start + nbytes
    return sizes, places


def aligned(nbytes: int, align: int = ALIGN) -> int:
    """Rounded up to a border."""
    return -(-nbytes // align) * align
