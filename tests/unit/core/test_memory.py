"""Memory for tensors: on its borders, apart from its neighbours, and a typed error when there is none."""

from __future__ import annotations

import ctypes

import pytest

from secure_loader.core.memory import HUGE_PAGE, Region, lay_out, populate
from secure_loader.errors import OutOfMemoryError


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@pytest.mark.parametrize("nbytes", [1, 4096, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 5])
def test_a_region_is_zeroed_and_on_a_huge_page(nbytes):
    view = Region(nbytes).view()
    assert (len(view), view.readonly, address(view) % HUGE_PAGE) == (nbytes, False, 0)
    populate(view)
    assert not any(view)
    view[-1] = 1


def test_a_view_outlives_its_region():
    view = Region(5000).view(10, 20)
    view[:] = b"x" * 20
    assert bytes(view) == b"x" * 20


def test_tensors_share_regions_without_overlapping():
    sizes = [1, 63, 64, 65, 70 << 20, 30 << 20, 30 << 20, 5, 10 << 20, 1]
    places = lay_out(sizes)
    taken: dict[int, list[tuple[int, int]]] = {}
    for size, (region, at) in zip(sizes, places, strict=True):
        assert at % 64 == 0
        assert at + size <= region.nbytes
        taken.setdefault(id(region), []).append((at, at + size))
    for spans in taken.values():
        assert all(a[1] <= b[0] for a, b in zip(sorted(spans), sorted(spans)[1:], strict=False))
    assert len(taken) == 4
    assert sum({id(r): r.nbytes for r, _ in places}.values()) < sum(sizes) + 64 * len(sizes), "nothing is wasted"
    assert lay_out([]) == []


def test_no_more_memory():
    with pytest.raises(OutOfMemoryError, match="1,152,921,504,606,846,976 bytes"):
        Region(1 << 60)
    with pytest.raises(MemoryError):
        lay_out([5, 1 << 60])
