"""Pinned host memory that ciphertext passes through on its way to a device: a few slots, used again and again."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ...errors import OutOfMemoryError
from ..secrets import wipe
from ..source import DIRECT_ALIGN
from .device import Device, Event, HostMemory

if TYPE_CHECKING:
    from .plan import Filling

# Long enough that the cost of starting a copy does not show; short enough that the first one starts soon.
SLOT_BYTES = 32 << 20
# Of a small load, so that reading and copying overlap there as well.
_MIN_SLOT_BYTES = 8 << 20
_SLOTS_PER_LOAD = 8


class Slot:
    """One piece of the ring, and what it is used for.

    Attributes:
        host: Its memory.
        filling: What it holds, or is about to.
        left: Reads that are still to be done.
        copied: When the device has copied all of it; None before the copy was queued.
    """

    __slots__ = ("copied", "filling", "host", "left")

    def __init__(self, host: HostMemory) -> None:
        self.host = host
        self.filling: Filling | None = None
        self.left = 0
        self.copied: Event | None = None


class Ring:
    """Slots, made as they are needed, up to a number of bytes.

    Args:
        device: That copies from them.
        total: Bytes of the load that it is for; a small one gets smaller slots, and fewer.
        limit: Bytes of host memory that it may take.
        slot_bytes: Size of a slot at most.

    Attributes:
        room: Bytes in a slot, a multiple of a page.
    """

    def __init__(self, device: Device, total: int, limit: int, slot_bytes: int = SLOT_BYTES) -> None:
        # Powers of two, which is what torch's pinned allocator rounds to.
        small = _power_of_two(min(total + 2 * DIRECT_ALIGN, max(_MIN_SLOT_BYTES, total // _SLOTS_PER_LOAD)))
        self.room = max(DIRECT_ALIGN, min(slot_bytes, small, limit // 2 // DIRECT_ALIGN * DIRECT_ALIGN))
        self._device = device
        self._most = max(2, limit // self.room)
        self._slots: list[Slot] = []
        self._free: deque[Slot] = deque()
        self._large: Slot | None = None

    def take(self, nbytes: int) -> Slot | None:
        """A slot that nobody uses; None where one has to be given back first.

        Args:
            nbytes: What it must hold. Only what the host must verify in one piece may be larger than a slot, and gets
                memory for itself.

        Raises:
            OutOfMemoryError: There is no memory for a single one.
        """
        if nbytes > self.room:
            if self._large is not None:
                return None
            self._large = Slot(self._device.pin(-(-nbytes // DIRECT_ALIGN) * DIRECT_ALIGN))
            return self._large
        if not self._free and len(self._slots) < self._most:
            try:
                slot = Slot(self._device.pin(self.room))
            except OutOfMemoryError:
                if not self._slots:
                    raise
                self._most = len(self._slots)
            else:
                self._slots.append(slot)
                return slot
        return self._free.popleft() if self._free else None

    def give(self, slot: Slot) -> None:
        """Give a slot back whose copy was made."""
        slot.filling = slot.copied = None
        if slot is self._large:
            wipe(slot.host.view)
            self._large = None
        else:
            self._free.append(slot)

    def wipe(self) -> None:
        """Overwrite all slots. May be called again after an interruption."""
        for slot in [*self._slots, *([self._large] if self._large else [])]:
            wipe(slot.host.view)


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
