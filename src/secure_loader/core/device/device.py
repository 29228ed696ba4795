"""What a load asks of a device: memory, copies from pinned host memory, and two streams that run beside each other.

Whatever is called here is queued, and runs when the device gets to it: copies from the host on one stream, everything
else on the other, each in order. Streams wait for each other, and the host for them, only where that was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Memory of a device.

    Attributes:
        owner: The framework's tensor of ``nbytes`` bytes, which keeps it alive.
        address: Device address of its first byte.
        nbytes: Its size.
    """

    owner: Any = field(repr=False)
    address: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class HostMemory:
    """Host memory that the device copies from while the host goes on.

    Attributes:
        owner: What keeps it alive.
        view: Its bytes, from a page border on.
    """

    owner: Any = field(repr=False)
    view: memoryview = field(repr=False)


class Event(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """Whether the device got there."""
        ...

    def wait(self) -> None:
        """Wait until it does. Raises DeviceError."""
        ...


class Device(Protocol):
    """One device. Everything raises DeviceError where the device or its driver fails."""

    @property
    def name(self) -> str:
        """As the framework spells it: ``"cuda:0"``."""
        ...

    @property
    def compute(self) -> int:
        """Handle of the stream that computes, for :meth:`core.device.batch.Kernels.open`."""
        ...

    def allocate(self, nbytes: int) -> Memory:
        """Memory that tensors will own, of any content; used only behind :meth:`follow`.

        Raises:
            OutOfMemoryError: The device has no more.
        """
        ...

    def pin(self, nbytes: int) -> HostMemory:
        """Host memory to copy from.

        Raises:
            OutOfMemoryError: The system gives no more.
        """
        ...

    def follow(self) -> None:
        """Let both streams wait for what the caller's own stream was given, such as the last use of the memory."""
        ...

    def copy_in(self, host: HostMemory, start: int, memory: Memory, at: int, nbytes: int) -> None:
        """Queue a copy from the host on the copy stream."""
        ...

    def copied(self) -> Event:
        """The point behind all copies that were queued so far."""
        ...

    def compute_after(self, event: Event) -> None:
        """Let the stream that computes wait for copies."""
        ...

    def move(self, source: Memory, start: int, memory: Memory, at: int, nbytes: int) -> None:
        """Queue a copy within the device, on the stream that computes."""
        ...

    def clear(self, memory: Memory, start: int, nbytes: int) -> None:
        """Queue zeros, on the stream that computes."""
        ...

    def synchronise(self) -> None:
        """Wait for both streams."""
        ...
