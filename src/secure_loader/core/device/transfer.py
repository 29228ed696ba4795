"""From files to the memory of a device: read, copy, decrypt there, and not a byte before its verdict.

The calling thread is the only one that talks to the device. Threads of the shared pool fill slots of pinned memory; it
sends each slot on its way when it is full, in order: a copy, and behind it the kernels that open what came. Slots are
filled again once they were copied. What the device can read from the disk itself needs no slot and no copy; otherwise it goes the
same way. The first error wins: nothing more is begun, what is under way is waited for, and all
memory that was to be filled is overwritten before the error is raised.
"""

from __future__ import annotations

import logging
import queue
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ...errors import AuthenticationError, DeviceError, SecureLoaderError
from ..pipeline import Options, annotate, release, will_wait
from ..pipeline import plan as plan_jobs
from ..pool import CLEANING_TRIES, WAITING_THREADS, Helpers, insist, submit, threads
from ..source import DIRECT_ALIGN, FileSource
from .batch import Kernels, Pending
from .device import Device, Memory
from .direct import DirectReader
from .layout import aligned
from .plan import Filling, Gathered, Scratch, Target, edge_bytes, file_places, fillings, loads, rounds
from .ring import SLOT_BYTES, Ring, Slot
from .straight import Straight, StraightFilling, comes_sealed, straight_fillings

# Device memory beside the tensors, for chunks of which only a part is wanted.
_SCRATCH_BYTES = 32 << 20
# The page cache is asked about a place in each of these; one alone is read by the calling thread.
_SAMPLE_EVERY = 2 << 20
_MAX_VERDICTS = 16
# Fillings that are being read directly; as many as the ring has slots by default.
_MAX_STRAIGHT = 8

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Way:
    """By what means a transfer is made.

    Attributes:
        device: Where to.
        kernels: What decrypts there; None where the host does.
        host_bytes: Host memory that may be taken.
        slot_bytes: Of a slot, at most.
        direct: What reads from the disk into the device; None where there is nothing.
    """

    device: Device
    kernels: Kernels | None
    host_bytes: int
    slot_bytes: int = SLOT_BYTES
    direct: DirectReader | None = None


def transfer(way: Way, targets: Sequence[Target], options: Options) -> None:
    """Fill memory of a device with verified plaintext. It is whole when this returns, for every stream.

    Args:
        way: By what means.
        targets: What goes where, best in file order. Only those may have keys that the kernels can open.
        options: How files are read.

    Raises:
        AuthenticationError: A tag or digest is wrong.
        ReadError: A file ends early or cannot be read.
        DeviceError: The device failed, or cannot read a file directly and has to.
        OutOfMemoryError: There is too little memory, on the device or on the host.
        Exception: Whatever else came up first; in any case all targets were overwritten.
    """
    scratches: list[Memory] = []
    flow = _Flow(
        way, sum(t.nbytes for t in targets) + edge_bytes(targets), options, file_places(targets, _SAMPLE_EVERY)
    )
    try:
        straight = _worth_straight(way, targets, options, cold=flow.waiting)
        if straight and way.direct is not None:
            way.device.follow()
            _wait_for_memory(way.device)
            flow.straight.open(way.direct, straight, options)
        for group in rounds(targets, _SCRATCH_BYTES):
            scratch = None
            if need := edge_bytes(group):
                scratches.append(way.device.allocate(need))
                scratch = Scratch(scratches[-1])
            way.device.follow()
            if straight:
                _wait_for_memory(way.device)
            flow.run(group, scratch)
            if scratch is not None:
                for start, memory, at, nbytes in scratch.moves:
                    way.device.move(scratch.memory, start, memory, at, nbytes)
                way.device.clear(scratch.memory, 0, scratch.memory.nbytes)
                way.device.synchronise()
                scratches.clear()
        flow.end(plaintext=any(t.key is None for t in targets))
        if options.page_cache == "drop":
            release(plan_jobs([t.wanted for t in targets]), options)
    except BaseException:
        insist(lambda: flow.abort(_ranges(targets, scratches)), CLEANING_TRIES)
        raise


def _worth_straight(way: Way, targets: Sequence[Target], options: Options, *, cold: bool) -> list[Target]:
    """Those that the device is to read itself, where it can."""
    sealed = [] if options.gpu_direct == "off" else [t for t in targets if comes_sealed(t)]
    if options.gpu_direct == "on":
        if sealed and way.direct is None:
            raise DeviceError(
                f"nothing reads files directly for {way.device.name}", path=sealed[0].wanted.stored.source.path
            )
        return sealed
    if way.direct is None or not sealed:
        return []
    if not cold and options.page_cache != "bypass":
        path = sealed[0].wanted.stored.source.path
        _log.debug("%s comes by way of the host: it is in the page cache, or little of it is wanted", path)
        return []
    return sealed


def _wait_for_memory(device: Device) -> None:
    """Wait until whoever used the memory before is done with it: what reads past the streams does not wait for them."""
    device.copied().wait()


def _ranges(targets: Sequence[Target], scratches: Sequence[Memory]) -> list[tuple[Memory, int, int]]:
    """All memory that may hold something, in few pieces: memory, first byte, first byte behind."""
    ranges = [(memory, 0, memory.nbytes) for memory in scratches]
    for target in targets:
        start, stop = target.at, target.at + target.nbytes
        if ranges and ranges[-1][0] is target.memory and ranges[-1][2] == start:
            ranges[-1] = (target.memory, ranges[-1][1], stop)
        elif target.nbytes:
            ranges.append((target.memory, start, stop))
    return ranges


class _Straight:
    """A filling that is read directly; as :class:`core.device.ring.Slot`, without memory of its own."""

    __slots__ = ("filling", "left")

    def __init__(self, filling: StraightFilling) -> None:
        self.filling = filling
        self.left = 0


_Reading = Slot | _Straight


class _Flow:
    """Fillings on their way.

    Args:
        way: By what means.
        total: Bytes in all.
        options: How files are read.
        places: Samples of where.
    """

    def __init__(self, way: Way, total: int, options: Options, places: Sequence[tuple[FileSource, int]]) -> None:
        self.ring = Ring(way.device, total, way.host_bytes, way.slot_bytes)
        self.straight = Straight()
        self.waiting = will_wait(places, options)
        self._way, self._options = way, options
        self._threads = (WAITING_THREADS if self.waiting else threads()) if len(places) > 1 else 0
        # Of a full slot 8 MiB: a call for less is not worth its overhead; for more, too few threads have something to do.
        self._read_bytes = aligned(self.ring.room // 4, DIRECT_ALIGN)
        self._todo: deque[tuple[_Reading, Callable[[], None]]] = deque()
        self._done: queue.SimpleQueue[tuple[_Reading, BaseException | None]] = queue.SimpleQueue()
        self._helpers = Helpers(self._help)
        # In the order in which they were begun; copies and verdicts come in that order, too.
        self._reading: deque[_Reading] = deque()
        self._copying: deque[Slot] = deque()
        self._verdicts: deque[tuple[Pending, Gathered]] = deque()

    def run(self, targets: Sequence[Target], scratch: Scratch | None) -> None:
        """Bring targets to the device, and wait for their verdicts."""
        room = self.ring.room
        straight = [t for t in targets if self.straight.takes(t)]
        others = [t for t in targets if not self.straight.takes(t)]
        for direct in straight_fillings(loads(straight, scratch, room), room):
            while len(self._reading) >= _MAX_STRAIGHT:
                self._send_first()
            self._begin(_Straight(direct), self.straight.reads(direct, self._read_bytes))
            self._send_full()
        for filling in fillings(loads(others, scratch, room), room, self._options):
            slot = self._free_slot(filling.nbytes)
            slot.filling = filling
            self._begin(slot, filling.reads(slot.host.view, self._read_bytes))
            self._send_full()
        while self._reading:
            self._send_first()
        while self._copying:
            self._recycle()
        while self._verdicts:
            self._judge()

    def end(self, *, plaintext: bool) -> None:
        """Let go of everything; what the host has decrypted is overwritten in its slots."""
        insist(self._helpers.dismiss)
        self.straight.close()
        if plaintext:
            self.ring.wipe()

    def abort(self, ranges: Sequence[tuple[Memory, int, int]]) -> None:
        """Stop, wait until neither a thread nor the device works on it any more, and overwrite everything.

        May be called again after an interruption.

        Args:
            ranges: Device memory, first byte and first byte behind.
        """
        device = self._way.device
        self._todo.clear()
        # Nobody reads any more, directly or not: whatever is overwritten below stays so.
        insist(self._helpers.dismiss)
        while not self._done.empty():
            self._done.get()  # errors keep frames and buffers in sight
        steps = [device.synchronise, *(pending.wait for pending, _ in self._verdicts)]
        steps += [partial(device.clear, memory, start, stop - start) for memory, start, stop in ranges]
        failed: list[SecureLoaderError] = []
        for step in [*steps, device.synchronise]:
            try:
                step()
            except AuthenticationError:
                pass  # a second one is no news
            except SecureLoaderError as e:
                failed.append(e)
        self.ring.wipe()
        self.straight.close()
        if failed:
            # Nobody gets to see that memory from here; a device that fails for good lets nobody else see it either.
            _log.error("memory of %s could not be overwritten: %s", device.name, failed[0])

    def _free_slot(self, nbytes: int) -> Slot:
        while True:
            while self._copying and self._is_copied(self._copying[0]):
                self._recycle()
            slot = self.ring.take(nbytes)
            if slot is not None:
                return slot
            self._send_full()
            if self._copying:
                self._recycle()
            else:
                self._send_first()

    def _begin(self, slot: _Reading, jobs: Sequence[Callable[[], None]]) -> None:
        slot.left = len(jobs)
        self._reading.append(slot)
        self._todo.extend((slot, job) for job in jobs)
        submit(self._helpers.run, min(len(jobs), self._threads), waiting=self.waiting)

    def _help(self) -> None:
        """What threads of the pool do."""
        while True:
            try:
                slot, job = self._todo.popleft()
            except IndexError:
                return
            error = None
            try:
                job()
            except BaseException as e:  # noqa: BLE001 - raised again in the calling thread
                error = e
            self._done.put((slot, error))
            del slot, job, error

    def _work(self) -> bool:
        """Do in this thread what nobody has begun yet; False where there is nothing."""
        try:
            slot, job = self._todo.popleft()
        except IndexError:
            return False
        job()
        slot.left -= 1
        return True

    def _hear(self, *, wait: bool = False) -> bool:
        """Take in that a read was done; False where none was."""
        try:
            slot, error = self._done.get(block=wait)
        except queue.Empty:
            return False
        if error is not None:
            # An error and the frame that raises it would keep each other in sight.
            try:
                raise error
            finally:
                del error
        slot.left -= 1
        return True

    def _send_full(self) -> None:
        """Send what is full, as far as nothing that came before is still being read."""
        while self._hear():
            pass
        while self._reading and not self._reading[0].left:
            self._send(self._reading.popleft())

    def _send_first(self) -> None:
        """Send the next slot, once it is full."""
        first = self._reading[0]
        while first.left:
            # With nobody else to do it, or all of them elsewhere, this thread reads as well.
            if not self._hear() and not self._work():
                self._hear(wait=True)
        self._send_full()

    def _send(self, slot: _Reading) -> None:
        device, filling = self._way.device, slot.filling
        assert filling is not None  # noqa: S101 - set in run
        if isinstance(slot, Slot):
            assert isinstance(filling, Filling)  # noqa: S101 - likewise
            for start, memory, at, nbytes in filling.copies():
                device.copy_in(slot.host, start, memory, at, nbytes)
            slot.copied = device.copied()
        batch = filling.batch()
        if batch is not None:
            assert self._way.kernels is not None  # noqa: S101 - or no target had a key
            if isinstance(slot, Slot) and slot.copied is not None:
                device.compute_after(slot.copied)
            self._verdicts.append((self._way.kernels.open(batch, device.compute), filling))
        if isinstance(slot, Slot):
            self._copying.append(slot)
        while self._verdicts and (len(self._verdicts) > _MAX_VERDICTS or self._verdicts[0][0].done()):
            self._judge()

    def _is_copied(self, slot: Slot) -> bool:
        return slot.copied is not None and slot.copied.done()

    def _recycle(self) -> None:
        """Wait for the oldest copy, and give its slot back."""
        slot = self._copying[0]
        assert slot.copied is not None  # noqa: S101 - set in _send
        slot.copied.wait()
        self._copying.popleft()
        self.ring.give(slot)

    def _judge(self) -> None:
        """Wait for the oldest verdict."""
        pending, filling = self._verdicts[0]
        try:
            pending.wait()
            self._verdicts.popleft()
        except AuthenticationError as e:
            path, names = filling.opened()
            if len(names) == 1:
                raise annotate(e, path, names[0]) from None
            among = AuthenticationError(f"{e.message} (one of {len(names)} tensors from {names[0]!r} to {names[-1]!r})")
            raise annotate(among, path) from None
