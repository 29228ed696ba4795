"""A reader that writes into the memory of a fake device as a disk would: from a thread of its own, in pieces, in any order.

It notes what must not happen: memory that is written while the caller may still use it, while it is being opened or
afterwards, and files that are let go of while they are being read.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from secure_loader.core.source import FileSource
from secure_loader.errors import DeviceError, ReadError

from .fake import CALLER, CLEARED, COPIED, NOTHING, FakeDevice

# What a byte of device memory is while a disk writes to it.
IN_FLIGHT = 5
PIECES = 4


@dataclass
class FakeDirect:
    """As ``core.device.direct.DirectReader``.

    Attributes:
        device: Whose memory.
        refuse: Message with which it opens no file.
        fail_at: Number of the read that fails half way, from 1 on.
        error: What it fails with.
        before: Called with the number of each read, before it begins.
        reads: Place, size and address of each.
    """

    device: FakeDevice
    refuse: str | None = None
    fail_at: int = 0
    error: BaseException = field(default_factory=lambda: ReadError("as the test wants it"))
    before: Callable[[int], None] = lambda number: None
    reads: list[tuple[int, int, int]] = field(default_factory=list)
    files: list[FakeDirectFile] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self, source: FileSource) -> FakeDirectFile:
        if self.refuse is not None:
            raise DeviceError(self.refuse)
        self.files.append(FakeDirectFile(self, os.dup(source.fileno())))
        return self.files[-1]

    def under_way(self) -> list[str]:
        """What has not come to its end."""
        left = [f"file {n} is open" for n, file in enumerate(self.files) if file.fd >= 0]
        return left + [t.name for t in threading.enumerate() if t.name == "fake disk"]


class FakeDirectFile:
    """As ``core.device.direct.DirectFile``."""

    def __init__(self, reader: FakeDirect, fd: int) -> None:
        self.reader, self.fd = reader, fd
        self.busy = 0

    def read(self, place: int, nbytes: int, address: int) -> None:
        reader, device = self.reader, self.reader.device
        with reader.lock:
            reader.reads.append((place, nbytes, address))
            number = len(reader.reads)
            self.busy += 1
        try:
            reader.before(number)
            if device._streams[CALLER]:
                device.problems.append("memory was written while the caller may still use it")
            data, state = device.bytes_at(address, nbytes)
            if not np.isin(state, (NOTHING, COPIED, CLEARED)).all():
                device.problems.append("memory was written a second time, or after it was opened")
            state[:] = IN_FLIGHT
            stored = np.frombuffer(os.pread(self.fd, nbytes, place), np.uint8)
            disk = threading.Thread(target=self._write, args=(number, data, stored), name="fake disk")
            disk.start()
            disk.join()
            if number == reader.fail_at:
                raise reader.error
            if len(stored) < nbytes:
                raise ReadError("truncated since it was opened")
            state[:] = COPIED
        finally:
            with reader.lock:
                self.busy -= 1

    def _write(self, number: int, data: np.ndarray, stored: np.ndarray) -> None:
        chance = random.Random(number)
        cuts = sorted(chance.randrange(len(stored) + 1) for _ in range(PIECES - 1))
        pieces = list(zip([0, *cuts], [*cuts, len(stored)], strict=True))
        chance.shuffle(pieces)
        for start, stop in pieces[: PIECES // 2 if number == self.reader.fail_at else PIECES]:
            time.sleep(chance.choice((0, 0, 0.0005)))
            data[start:stop] = stored[start:stop]

    def close(self) -> None:
        if self.fd >= 0:
            if self.busy:
                self.reader.device.problems.append("a file was closed while it was being read")
            fd, self.fd = self.fd, -1
            os.close(fd)
