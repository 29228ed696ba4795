"""A few slots of bounded size, in turns."""

from __future__ import annotations

import pytest

from secure_loader.core.device.ring import SLOT_BYTES, Ring
from secure_loader.errors import OutOfMemoryError

from .fake import FakeDevice, no_memory

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("total", [1, 100, 5000, 3 * MIB, 40 * MIB, 200 * MIB, 1 << 40])
@pytest.mark.parametrize("limit", [16 * KIB, 1 * MIB, 100 * MIB, 256 * MIB])
def test_no_more_host_memory_than_allowed_whatever_the_size(total, limit):
    ring = Ring(FakeDevice(), total, limit)
    assert ring.room % 4096 == 0
    assert ring.room <= SLOT_BYTES
    sizes = []
    # Counted, not taken: the machine of the tests is small.
    ring._device.pin = sizes.append
    while ring.take(ring.room) is not None:
        pass
    assert len(sizes) >= 2
    assert sum(sizes) <= limit


def test_a_large_load_has_whole_slots():
    assert Ring(FakeDevice(), 100 << 30, 256 * MIB).room == SLOT_BYTES


@pytest.mark.parametrize("total", [1, 5000, 100 * KIB])
def test_a_small_load_takes_little(total):
    assert Ring(FakeDevice(), total, 256 * MIB).room <= 2 * (total + 2 * 4096)


def test_slots_are_used_again():
    ring = Ring(FakeDevice(), 1 << 30, 32 * KIB, 16 * KIB)
    first, second = ring.take(1), ring.take(16 * KIB)
    assert first is not None
    assert second is not None
    assert ring.take(1) is None
    ring.give(first)
    assert ring.take(1) is first
    assert ring.take(1) is None


def test_what_does_not_fit_has_memory_of_its_own_one_at_a_time():
    device = FakeDevice()
    ring = Ring(device, 1 << 30, 32 * KIB, 16 * KIB)
    large = ring.take(100_001)
    assert large is not None
    assert large.host.view.nbytes >= 100_001
    assert ring.take(100_000) is None
    assert ring.take(10) is not None
    large.host.view[:5] = b"plain"
    ring.give(large)
    assert not any(large.host.view)
    assert ring.take(100_000) is not large


def test_a_system_that_pins_less_gives_a_smaller_ring():
    device = FakeDevice()
    no_memory(device, after=1)
    ring = Ring(device, 1 << 30, 64 * KIB, 16 * KIB)
    only = ring.take(1)
    assert only is not None
    assert ring.take(1) is None
    ring.give(only)
    assert ring.take(1) is only


def test_a_system_that_pins_nothing():
    device = FakeDevice()
    no_memory(device, after=0)
    with pytest.raises(OutOfMemoryError):
        Ring(device, 1 << 30, 64 * KIB).take(1)


def test_wiping():
    ring = Ring(FakeDevice(), 1 << 30, 32 * KIB, 16 * KIB)
    slots = [ring.take(1), ring.take(1), ring.take(100_000)]
    ring.wipe()
    assert not any(any(slot.host.view) for slot in slots)
