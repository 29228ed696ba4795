"""A device that does what it was told as late, as early and in as odd an order as streams and events allow.

Its memory is host memory. Nothing runs when it is queued: operations run while somebody waits, or in between, taken by
chance from the streams whose next operation may run. It notes what a real device would not tell: a slot that was changed
before its copy ran, memory that was read before anything was copied there, and which bytes have had their verdict.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from secure_loader.core.device.batch import Batch
from secure_loader.core.device.device import HostMemory, Memory
from secure_loader.errors import AuthenticationError, DeviceError, OutOfMemoryError

CALLER, COPY, COMPUTE = 0, 1, 2
# What a byte of device memory is.
NOTHING, COPIED, OPENED, VERIFIED, CLEARED = range(5)
PAGE = 4096
POISON = 0x55


@dataclass(eq=False)
class Operation:
    """What a stream does next, once ``after`` has been reached."""

    run: Callable[[], None]
    after: FakeEvent | None = None


class FakeEvent:
    """A point in a stream of a :class:`FakeDevice`."""

    def __init__(self, device: FakeDevice) -> None:
        self._device, self.reached = device, False

    def done(self) -> bool:
        self._device.call("done")
        return self.reached

    def wait(self) -> None:
        self._device.call("wait")
        self._device.run_until(lambda: self.reached)


@dataclass
class Block:
    """One allocation: its memory, its bytes, and what became of each of them."""

    memory: Memory
    array: np.ndarray
    state: np.ndarray


@dataclass
class FakeDevice:
    """As ``core.device.device.Device``.

    Attributes:
        seed: Of the order in which operations run.
        fail_at: Numbers of the calls that fail, from 1 on.
        error: What it fails with.
        problems: What must never happen, and did.
        blocks: All allocations there ever were.
        log: Names of the calls.
        hosts: All pinned memory there ever was.
    """

    seed: int = 0
    fail_at: tuple[int, ...] = ()
    error: type[BaseException] = DeviceError
    problems: list[str] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    hosts: list[HostMemory] = field(default_factory=list)
    name: str = "fake:0"
    compute: int = 4711

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        # Some streams are slow in some runs.
        self._weights = [self._random.choice((0.02, 1, 50)) for _ in range(3)]
        self._streams: list[deque[Operation]] = [deque(), deque(), deque()]
        self._thread = threading.get_ident()
        self.followed = 0

    # Time.

    def call(self, name: str) -> None:
        """Count a call, fail where that is wanted, and let some time pass."""
        if threading.get_ident() != self._thread:
            self.problems.append(f"{name} was called by another thread")
        self.log.append(name)
        if len(self.log) in self.fail_at:
            raise self.error("as the test wants it")
        for _ in range(self._random.choice((0, 0, 1, 2, 9))):
            self.step()

    def step(self) -> bool:
        """Run one operation; False where none may run."""
        able = [n for n, s in enumerate(self._streams) if s and (s[0].after is None or s[0].after.reached)]
        if not able:
            return False
        chosen = self._random.choices(able, [self._weights[n] for n in able])[0]
        self._streams[chosen].popleft().run()
        return True

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            if not self.step():
                raise AssertionError("the host waits for what will never happen")

    def run_all(self) -> None:
        while self.step():
            pass

    @property
    def idle(self) -> bool:
        """Whether everything has run that does not belong to the caller, and does more than wait for him."""
        return not any(op.after is None for stream in (COPY, COMPUTE) for op in self._streams[stream])

    def queue(self, stream: int, run: Callable[[], None], after: FakeEvent | None = None) -> None:
        self._streams[stream].append(Operation(run, after))

    def _record(self, stream: int) -> FakeEvent:
        event = FakeEvent(self)

        def reach() -> None:
            event.reached = True

        self.queue(stream, reach)
        return event

    # What a device can do.

    def allocate(self, nbytes: int) -> Memory:
        self.call("allocate")
        array = np.full(nbytes + 64, 0xAA, np.uint8)
        at = -array.ctypes.data % 16
        array = array[at : at + nbytes]
        memory = Memory(torch.from_numpy(array), array.ctypes.data, nbytes)
        self.blocks.append(Block(memory, array, np.full(nbytes, NOTHING, np.uint8)))
        # The caller's stream may not be done with what had this memory before.
        self.queue(CALLER, lambda: array.fill(0xAA))
        return memory

    def adopt(self, tensor: torch.Tensor, memory: Memory) -> None:
        """Memory that a test allocated itself."""
        array = tensor.reshape(-1).view(torch.uint8).numpy()
        self.blocks.append(Block(memory, array, np.full(memory.nbytes, NOTHING, np.uint8)))

    def pin(self, nbytes: int) -> HostMemory:
        self.call("pin")
        array = np.full(nbytes + PAGE, POISON, np.uint8)
        at = -array.ctypes.data % PAGE
        array = array[at : at + nbytes]
        host = HostMemory(array, memoryview(array).cast("B"))
        self.hosts.append(host)
        return host

    def follow(self) -> None:
        self.call("follow")
        self.followed += 1
        event = self._record(CALLER)
        for stream in (COPY, COMPUTE):
            self.queue(stream, lambda: None, event)

    def copy_in(self, host: HostMemory, start: int, memory: Memory, at: int, nbytes: int) -> None:
        self.call("copy_in")
        due = bytes(host.view[start : start + nbytes])
        block = self._block(memory.address + at, nbytes)

        def copy() -> None:
            if bytes(host.view[start : start + nbytes]) != due:
                self.problems.append("a slot was changed before its copy ran")
            block.array[at : at + nbytes] = np.frombuffer(due, np.uint8)
            block.state[at : at + nbytes] = COPIED

        self.queue(COPY, copy)

    def copied(self) -> FakeEvent:
        self.call("copied")
        return self._record(COPY)

    def compute_after(self, event: FakeEvent) -> None:
        self.call("compute_after")
        self.queue(COMPUTE, lambda: None, event)

    def move(self, source: Memory, start: int, memory: Memory, at: int, nbytes: int) -> None:
        self.call("move")
        here, there = self._block(source.address + start, nbytes), self._block(memory.address + at, nbytes)
        if not (here.state[start : start + nbytes] == VERIFIED).all():
            self.problems.append("bytes were moved before their verdict")

        def move() -> None:
            there.array[at : at + nbytes] = here.array[start : start + nbytes]
            there.state[at : at + nbytes] = VERIFIED

        self.queue(COMPUTE, move)

    def clear(self, memory: Memory, start: int, nbytes: int) -> None:
        self.call("clear")
        block = self._block(memory.address + start, nbytes)
        at = memory.address + start - block.memory.address  # it may be part of what was allocated

        def clear() -> None:
            block.array[at : at + nbytes] = 0
            block.state[at : at + nbytes] = CLEARED

        self.queue(COMPUTE, clear)

    def synchronise(self) -> None:
        self.call("synchronise")
        self.run_until(lambda: self.idle)

    def hosts_are_empty(self) -> bool:
        """Whether pinned memory was overwritten, or never used."""
        arrays = [np.frombuffer(host.view, np.uint8) for host in self.hosts]
        return all(not array.any() or (array == POISON).all() for array in arrays)

    def _block(self, address: int, nbytes: int) -> Block:
        for block in self.blocks:
            if block.memory.address <= address and address + nbytes <= block.memory.address + block.memory.nbytes:
                return block
        raise AssertionError("memory that was never allocated")

    def bytes_at(self, address: int, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
        """Device memory by its address: the bytes, and what became of them."""
        if not nbytes:
            return np.empty(0, np.uint8), np.empty(0, np.uint8)
        block = self._block(address, nbytes)
        at = address - block.memory.address
        return block.array[at : at + nbytes], block.state[at : at + nbytes]


class FakeKernels:
    """As ``core.device.batch.Kernels``; ``cryptography`` decrypts.

    Args:
        device: Whose memory.
        late_error: Raised by the verdict of this batch, counted from 0, rather than at its launch.
    """

    name = "fake"

    def __init__(self, device: FakeDevice, late_error: int | None = None) -> None:
        self._device, self._late_error = device, late_error
        self.batches: list[Batch] = []

    def open(self, batch: Batch, stream: int) -> FakePending:
        self._device.call("open")
        assert stream == self._device.compute
        assert batch.chunks
        broken = self._late_error == len(self.batches)
        self.batches.append(batch)
        spans = sorted((c.address, c.address + c.nbytes) for c in batch.chunks if c.nbytes)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), "chunks overlap"
        # As uploaded: secrets may be wiped by their owner as soon as this returns.
        pending = FakePending(self._device, batch, [bytes(k.reveal()) for k in batch.keys], broken=broken)
        self._device.queue(COMPUTE, pending.run)
        return pending

    def close(self) -> None:
        pass


class FakePending:
    """A batch on its way."""

    def __init__(self, device: FakeDevice, batch: Batch, keys: list[bytes], *, broken: bool) -> None:
        self._device, self._batch, self._keys, self._broken = device, batch, keys, broken
        self._ran, self._good = False, True

    def run(self) -> None:
        for chunk in self._batch.chunks:
            data, state = self._device.bytes_at(chunk.address, chunk.nbytes)
            if not (state == COPIED).all():
                self._device.problems.append("a chunk was opened before all of it was copied")
            key = self._keys[chunk.key]
            try:
                plain = AESGCM(key).decrypt(chunk.nonce, bytes(data) + chunk.tag, chunk.aad or None)
            except InvalidTag:
                self._good = False
                # As a device does: by the time the tag is compared, the memory holds plaintext.
                counter = modes.CTR(chunk.nonce + (2).to_bytes(4, "big"))
                plain = Cipher(algorithms.AES(key), counter).decryptor().update(bytes(data))
            data[:] = np.frombuffer(plain, np.uint8)
            state[:] = OPENED
        self._ran = True

    def done(self) -> bool:
        self._device.call("done")
        return self._ran

    def wait(self) -> None:
        self._device.call("verdict")
        self._device.run_until(lambda: self._ran)
        if self._broken:
            raise DeviceError("the kernel failed while it ran")
        for chunk in self._batch.chunks:
            data, state = self._device.bytes_at(chunk.address, chunk.nbytes)
            if not self._good:
                data[:] = 0
            state[:] = VERIFIED if self._good else CLEARED
        if not self._good:
            raise AuthenticationError("a tag is wrong")


def no_memory(device: FakeDevice, after: int) -> None:
    """Let no more than ``after`` pieces of host memory be pinned."""
    real, seen = device.pin, []

    def pin(nbytes: int) -> HostMemory:
        seen.append(nbytes)
        if len(seen) > after:
            raise OutOfMemoryError("no more pinned memory")
        return real(nbytes)

    device.pin = pin  # type: ignore[method-assign]
