"""The kernels of ``csrc/``, one by one: the package itself launches them only as a whole, from keys to verdicts."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks.gpu.device import Bench
from secure_loader.bench.measure import MeasurementError
from secure_loader.core.device import abi
from secure_loader.core.device.batch import Chunk
from secure_loader.core.device.driver import Driver
from secure_loader.core.secrets import Secret

KERNELS = ("sl_expand_keys", "sl_gcm_open", "sl_gcm_seal", "sl_ctr", "sl_gcm_finish", "sl_gcm_tag")


@contextlib.contextmanager
def opened(bench: Bench) -> Iterator[Raw]:
    """The kernels, with the device's context current in this thread."""
    driver = bench.driver()
    context = driver.retain(bench.ordinal)
    try:
        with driver.current(context):
            yield Raw(bench, driver)
    finally:
        driver.release(bench.ordinal)


class Raw:
    """Machine code on a device, the context of which is current.

    Args:
        bench: The device.
        driver: Its driver.
    """

    def __init__(self, bench: Bench, driver: Driver) -> None:
        self.bench, self._driver = bench, driver
        self.name, image = bench.image()
        module = self._driver.load(image)
        self._functions = {name: self._driver.function(module, name) for name in KERNELS}
        self.multiprocessors = self._driver.gpu(bench.ordinal).multiprocessors
        self.resident = self._driver.residency(self._functions["sl_gcm_open"], abi.THREADS)

    @property
    def grid(self) -> int:
        """Blocks that are resident at once: what the package takes at most."""
        return max(1, self.resident) * self.multiprocessors

    def launch(self, name: str, blocks: int, *args: int | ctypes.c_uint32) -> None:
        """Queue a kernel on the bench's stream."""
        self._driver.launch(self._functions[name], blocks, abi.THREADS, self.bench.stream, *args)


class Job:
    """Chunks in the memory of a device, and all tables that the kernels want for them.

    Args:
        raw: The kernels.
        chunks: What to work on; ``tag`` may be anything that has 16 bytes.
        keys: By number.
    """

    def __init__(self, raw: Raw, chunks: Sequence[Chunk], keys: Sequence[bytes]) -> None:
        self.raw, self.chunks, self.keys = raw, list(chunks), list(keys)
        self.nbytes = sum(chunk.nbytes for chunk in chunks)
        self.segments = sum(abi.segments(chunk.nbytes) for chunk in chunks)
        room = functools.partial(torch.zeros, dtype=torch.uint8, device=raw.bench.torch_device)
        self._keys = self._upload(abi.pack_keys([Secret(key) for key in keys]))
        self._work = self._upload(abi.pack_work(chunks))
        self._chunks = self._upload(abi.pack_chunks(chunks))
        self._schedules = room(len(keys) * abi.SCHEDULE_BYTES)
        self._partial = room(self.segments * abi.PARTIAL_BYTES)
        self._verdicts = room(len(chunks) * abi.VERDICT_BYTES)
        self._tags = room(len(chunks) * abi.TAG_BYTES)

    def _upload(self, data: bytes | bytearray) -> torch.Tensor:
        return torch.frombuffer(bytearray(data) or bytearray(16), dtype=torch.uint8).to(self.raw.bench.torch_device)

    def expand(self) -> None:
        """Queue: schedules from keys."""
        count = len(self.keys)
        at = self._keys.data_ptr(), self._schedules.data_ptr()
        self.raw.launch("sl_expand_keys", count, *at, ctypes.c_uint32(count))

    def segments_by(self, name: str, blocks: int | None = None) -> None:
        """Queue ``sl_gcm_open``, ``sl_gcm_seal`` or ``sl_ctr`` over all segments, with a grid of at most ``blocks``."""
        tables: list[int | ctypes.c_uint32] = [
            self._chunks.data_ptr(),
            self._work.data_ptr(),
            ctypes.c_uint32(self.segments),
        ]
        tables.append(self._schedules.data_ptr())
        if name != "sl_ctr":
            tables.append(self._partial.data_ptr())
        self.raw.launch(name, min(self.segments, blocks or self.raw.grid), *tables)

    def finish(self) -> None:
        """Queue: verdicts from partial sums."""
        self._ends("sl_gcm_finish", self._verdicts)

    def tag(self) -> None:
        """Queue: tags from partial sums."""
        self._ends("sl_gcm_tag", self._tags)

    def _ends(self, name: str, target: torch.Tensor) -> None:
        count = ctypes.c_uint32(len(self.chunks))
        at = self._schedules.data_ptr(), self._partial.data_ptr(), target.data_ptr()
        self.raw.launch(name, len(self.chunks), self._chunks.data_ptr(), count, *at)

    def do(self, *steps: Callable[[], None]) -> float:
        """Queue steps and wait for them; seconds."""
        return self.raw.bench.seconds(lambda: _all(steps))

    def seal(self) -> None:
        """Encrypt all chunks, and know their tags from then on."""
        self.do(self.expand, lambda: self.segments_by("sl_gcm_seal"), self.tag)
        tags = bytes(self._tags.cpu().numpy())
        self.chunks = [c._replace(tag=tags[16 * n : 16 * n + 16]) for n, c in enumerate(self.chunks)]
        self._chunks.copy_(self._upload(abi.pack_chunks(self.chunks)))

    def open(self) -> None:
        """Decrypt all chunks. Raises MeasurementError where a verdict is not good."""
        self._verdicts.zero_()
        self.raw.bench.wait()
        self.do(self.expand, lambda: self.segments_by("sl_gcm_open"), self.finish)
        good = self._verdicts.cpu().view(torch.int32) == abi.VERIFIED
        if not bool(good.all()):
            raise MeasurementError(f"{int((~good).sum())} of {len(self.chunks)} chunks were rejected")


def _all(steps: Sequence[Callable[[], None]]) -> None:
    for step in steps:
        step()
