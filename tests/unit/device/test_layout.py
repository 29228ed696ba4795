"""Tensors side by side in a file stay so, on borders that suit them, in pieces of bounded size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from secure_loader.core.device.layout import ALIGN, lay_out

SIZES = st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 64, 100, 4096, 100_000]), max_size=40)
GAPS = st.lists(st.sampled_from([0, 0, 0, 1, 16]), min_size=40, max_size=40)


@given(SIZES, GAPS, st.sampled_from([64, 4096, 1 << 20]))
def test_every_tensor_has_a_place_of_its_own(sizes, gaps, region_bytes):
    spans, end = [], 7
    for size, gap in zip(sizes, gaps, strict=False):
        spans.append((end + gap, size))
        end += gap + size
    regions, places = lay_out(spans, region_bytes)
    assert len(places) == len(spans)
    taken = [0] * len(regions)
    for (_, size), (region, at) in zip(spans, places, strict=True):
        assert at % ALIGN == 0
        assert at >= taken[region]
        taken[region] = at + size
    assert regions == taken
    for region, nbytes in enumerate(regions):
        assert (
            nbytes <= region_bytes
            or sum(p.region == region and s[1] > 0 for p, s in zip(places, spans, strict=True)) == 1
        )
    # Borders cost less than their own size for each tensor.
    assert sum(regions) < sum(sizes) + ALIGN * (len(sizes) + 1)


def test_neighbours_in_the_file_are_neighbours_on_the_device():
    regions, places = lay_out([(3, 32), (35, 64), (99, 16)])
    assert (regions, [p.at for p in places]) == ([112], [0, 32, 96])


def test_what_would_lie_askew_starts_on_the_next_border():
    _, places = lay_out([(0, 5), (5, 16), (21, 16), (37, 4)])
    assert [p.at for p in places] == [0, 16, 32, 48]


def test_a_tensor_larger_than_a_region_has_one_to_itself():
    regions, places = lay_out([(0, 32), (32, 1000), (1032, 32), (1064, 32)], 64)
    assert regions == [32, 1000, 64]
    assert [p.region for p in places] == [0, 1, 2, 2]


def test_tensors_without_bytes():
    assert lay_out([])[0] == []
    regions, places = lay_out([(0, 0), (0, 0)])
    assert (regions, places) == ([0], [(0, 0), (0, 0)])
