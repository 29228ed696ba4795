"""An engine for frameworks that call it from several threads, over a device whose memory is the host's."""

from __future__ import annotations

import threading
from typing import Any

from secure_loader.core.device.engine import Engine

from .fake import FakeDevice, FakeKernels


class HostEngine(Engine):
    """As :class:`Engine`, one call at a time: the fake device takes orders from one thread.

    Attributes:
        device: The fake.
        asked: Bytes of each transfer.
    """

    def __init__(self, seed: int = 0) -> None:
        self.device = FakeDevice(seed)
        self.asked: list[int] = []
        self._turn = threading.RLock()
        super().__init__(self.device, FakeKernels(self.device), slot_bytes=256 << 10)

    def load(self, *args: Any) -> list[Any]:
        with self._turn:
            self.device._thread = threading.get_ident()
            return super().load(*args)

    def gather(self, *args: Any) -> Any:
        with self._turn:
            self.device._thread = threading.get_ident()
            return super().gather(*args)

    def fill(self, parts: Any, *args: Any) -> None:
        with self._turn:
            self.device._thread = threading.get_ident()
            self.asked.append(sum(p.wanted.stop - p.wanted.start for p, _, _ in parts))
            known = {id(block.memory) for block in self.device.blocks}
            for _, memory, _ in parts:
                if id(memory) not in known:
                    self.device.adopt(memory.owner, memory)
            super().fill(parts, *args)

    def overwrite(self, *args: Any) -> None:
        with self._turn:
            self.device._thread = threading.get_ident()
            super().overwrite(*args)
