"""Memory that a launch of the CUDA kernels needs beside the tensors, and how it is given up without leaving a key behind."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from dataclasses import dataclass
from typing import Any

from ...errors import DeviceError
from . import abi
from .driver import Driver

_SMALLEST = 1 << 18
# A workspace above this was for an uncommon batch and is not kept.
_LARGEST_KEPT = 8 << 20
# As many as a few threads have under way at a time: to free device memory is to wait for all of the device.
_IDLE, _IDLE_BYTES = 32, 64 << 20


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets of what a launch needs, the same in pinned memory (up to ``schedules``) and on the device (up to ``end``).

    What is secret lies together at the end, so that one command overwrites it.
    """

    work: int
    aad: int
    verdicts: int
    keys: int
    schedules: int
    partial: int
    end: int

    @classmethod
    def of(cls, chunks: int, segments: int, aad: int, keys: int) -> Layout:
        """For numbers of chunks, segments and keys, and for bytes of associated data."""
        sizes = (
            chunks * abi.CHUNK_BYTES,
            segments * abi.WORK_BYTES,
            aad,
            chunks * abi.VERDICT_BYTES,
            keys * abi.KEY_BYTES,
            keys * abi.SCHEDULE_BYTES,
            segments * abi.PARTIAL_BYTES,
        )
        offsets, at = [], 0
        for size in sizes:
            at += -(-size // 16) * 16
            offsets.append(at)
        return cls(*offsets)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Pinned and device memory, and an event behind its last use.

    Attributes:
        host: Address of the pinned memory.
        host_bytes: Its size.
        device: Address on the device.
        device_bytes: Its size.
        event: Of :meth:`Driver.event`.
    """

    host: int
    host_bytes: int
    device: int
    device_bytes: int
    event: Any

    @classmethod
    def allocate(cls, driver: Driver, layout: Layout) -> Workspace:
        """A new one, with some room to grow into."""
        host_bytes, device_bytes = _rounded(layout.schedules), _rounded(layout.end)
        with contextlib.ExitStack() as undo:
            host = driver.allocate_host(host_bytes)
            undo.callback(driver.free_host, host)
            device = driver.allocate(device_bytes)
            undo.callback(driver.free, device)
            event = driver.event()
            undo.pop_all()
        return cls(host, host_bytes, device, device_bytes, event)

    def free(self, driver: Driver) -> None:
        """Give everything back, however much of it the driver refuses."""
        with contextlib.ExitStack() as all_of_it:
            all_of_it.callback(driver.destroy, self.event)
            all_of_it.callback(driver.free, self.device)
            all_of_it.callback(driver.free_host, self.host)

    def write(self, offset: int, data: bytes | bytearray) -> None:
        """Copy bytes into the pinned memory."""
        self._view()[offset : offset + len(data)] = data

    def read(self, offset: int, nbytes: int) -> bytes:
        """Copy bytes out of the pinned memory."""
        return bytes(self._view()[offset : offset + nbytes])

    def _view(self) -> memoryview:
        return memoryview((ctypes.c_char * self.host_bytes).from_address(self.host)).cast("B")

    def forget(self, start: int, end: int) -> None:
        """Overwrite a part of the pinned memory, from the host."""
        ctypes.memset(self.host + start, 0, end - start)

    def overwrite(self, driver: Driver, address: int, nbytes: int, stream: int) -> None:
        """Queue zeros over device memory of any size, in one of two ways.

        Raises:
            DeviceError: Neither way can be queued.
        """
        if nbytes == 0:
            return
        try:
            driver.clear(address, nbytes, stream)
        except DeviceError:
            # Copied from the pinned memory, once nothing reads it any more: half of a list of chunks would send kernels
            # astray.
            driver.synchronise(stream)
            self.forget(0, self.host_bytes)
            for offset in range(0, nbytes, self.host_bytes):
                driver.upload(address + offset, self.host, min(self.host_bytes, nbytes - offset), stream)


class Workspaces:
    """Workspaces that are used again; a few at most stay idle. Any thread may call it.

    Args:
        driver: Its context has to be current in every call.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._idle: list[Workspace] = []

    def take(self, layout: Layout) -> Workspace:
        """One that is large enough, for the caller alone."""
        with self._lock:
            for i, one in enumerate(self._idle):
                if one.host_bytes >= layout.schedules and one.device_bytes >= layout.end:
                    return self._idle.pop(i)
        return Workspace.allocate(self._driver, layout)

    def give(self, one: Workspace) -> None:
        """Take one back. The device is done with it, and it holds no secrets."""
        surplus = []
        with self._lock:
            if one.device_bytes <= _LARGEST_KEPT and one.host_bytes <= _LARGEST_KEPT:
                self._idle.append(one)
            else:
                surplus.append(one)
            while len(self._idle) > _IDLE or sum(w.device_bytes for w in self._idle) > _IDLE_BYTES:
                # The smallest goes: large ones serve every batch.
                surplus.append(min(self._idle, key=lambda w: w.device_bytes))
                self._idle.remove(surplus[-1])
        self._free(surplus)

    def close(self) -> None:
        """Give the idle ones back to the driver, however many of them it refuses."""
        with self._lock:
            idle, self._idle = self._idle, []
        self._free(idle)

    def _free(self, some: list[Workspace]) -> None:
        with contextlib.ExitStack() as all_of_them:
            for one in some:
                all_of_them.callback(one.free, self._driver)


def _rounded(nbytes: int) -> int:
    return max(_SMALLEST, 1 << (nbytes - 1).bit_length())
