"""One launch of the CUDA kernels: what is queued for it on the stream, and how it is undone where the driver fails.

On the stream, in this order: keys and work go up in one copy; schedules are made; every segment is decrypted and hashed; every tag
is compared; keys, schedules and partial sums are overwritten; the verdicts come back together with the zeros where the keys were,
which overwrites these in pinned memory too; an event. Nothing of this waits for the host, so key material lives on the device as long as
the batch runs, whatever becomes of the thread that queued it.

Where the driver fails, the rest is done by hand: secrets and chunks are overwritten, in a second way if the first one is refused. A
context that is broken (an illegal address, a lost device) refuses everything; then pinned memory alone can be overwritten, the
workspace is never used again, and what is left on the device goes when the process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import DeviceError
from ..secrets import Secret, wipe
from . import abi
from .batch import Chunk
from .driver import Driver
from .workspace import Layout, Workspace, Workspaces

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """What one launch works on.

    Attributes:
        chunks: To be opened.
        layout: Of its memory.
        workspace: Its memory.
    """

    chunks: Sequence[Chunk]
    layout: Layout
    workspace: Workspace

    def verdicts(self) -> list[int]:
        """As the device left them."""
        data = self.workspace.read(self.layout.verdicts, abi.VERDICT_BYTES * len(self.chunks))
        return list(memoryview(data).cast("I"))


class Launcher:
    """The kernels of a cubin on one device. Any thread may call it.

    Args:
        driver: The driver.
        ordinal: Number of the device.
        image: A cubin for it.

    Raises:
        DeviceError: The cubin cannot be loaded there; and in every method the driver's own errors.
    """

    def __init__(self, driver: Driver, ordinal: int, image: bytes) -> None:
        self._driver, self._ordinal = driver, ordinal
        self._workspaces = Workspaces(driver)
        self._context = driver.retain(ordinal)
        self._module: Any = None
        try:
            with self.current():
                self._module = driver.load(image)
                self._expand, self._open, self._finish, self._ctr = (
                    driver.function(self._module, kernel)
                    for kernel in ("sl_expand_keys", "sl_gcm_open", "sl_gcm_finish", "sl_ctr")
                )
                resident = driver.residency(self._open, abi.THREADS)
            self._grid = max(1, resident) * driver.gpu(ordinal).multiprocessors
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give device memory back; no secrets are in it any more. Nothing may be under way."""
        context, self._context = self._context, None
        if context is None:
            return
        try:
            with contextlib.ExitStack() as steps:
                steps.callback(self._driver.release, self._ordinal)
                steps.enter_context(self._driver.current(context))
                if self._module is not None:
                    steps.callback(self._driver.unload, self._module)
                steps.callback(self._workspaces.close)
        except DeviceError as e:
            _log.warning("device %d does not take its memory back: %s", self._ordinal, e)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """The context of the device, in this thread, for as long as the block runs."""
        context = self._context
        if context is None:
            raise DeviceError("the kernels were closed")
        with self._driver.current(context):
            yield

    def start(
        self,
        keys: Sequence[Secret],
        chunks: Sequence[Chunk],
        stream: int,
        parts: list[Part],
        *,
        tags_were_compared: bool = False,
    ) -> None:
        """Queue one launch. It is among the parts as soon as there is something to :meth:`abandon`.

        Args:
            keys: DEKs.
            chunks: What to open.
            stream: Handle of the stream.
            parts: Where the launch is noted.
            tags_were_compared: On the host, so that the device only decrypts; the verdicts are good from the start.

        Raises:
            ValueError: A key, nonce, tag or size is not what AES-GCM has.
        """
        layout = Layout.of(
            chunks=len(chunks),
            segments=sum(abi.segments(chunk.nbytes) for chunk in chunks),
            aad=sum(len(chunk.aad) for chunk in chunks),
            keys=len(keys),
        )
        workspace = self._workspaces.take(layout)
        try:
            workspace.write(0, abi.pack_chunks(chunks, aad=workspace.device + layout.aad))
            workspace.write(layout.work, abi.pack_work(chunks))
            workspace.write(layout.aad, abi.pack_aad(chunks))
            verdict = abi.VERIFIED if tags_were_compared else 0
            workspace.write(layout.verdicts, verdict.to_bytes(abi.VERDICT_BYTES, "little") * len(chunks))
        except BaseException:
            self._workspaces.give(workspace)
            raise
        part = Part(chunks, layout, workspace)
        parts.append(part)
        packed = abi.pack_keys(keys)
        try:
            workspace.write(layout.keys, packed)
        finally:
            wipe(packed)
        self._queue(part, len(keys), stream, tags_were_compared=tags_were_compared)

    def _queue(self, part: Part, keys: int, stream: int, *, tags_were_compared: bool) -> None:
        driver, layout, workspace = self._driver, part.layout, part.workspace
        at = workspace.device
        work, verdicts, secrets = at + layout.work, at + layout.verdicts, at + layout.keys
        schedules, partial = at + layout.schedules, at + layout.partial
        blocks, segments = len(part.chunks), (layout.end - layout.partial) // abi.PARTIAL_BYTES
        nkeys, nwork, nchunks = map(ctypes.c_uint32, (keys, segments, blocks))
        driver.upload(at, workspace.host, layout.schedules, stream)
        driver.launch(self._expand, keys, abi.THREADS, stream, secrets, schedules, nkeys)
        grid = min(segments, self._grid)
        if segments and tags_were_compared:
            driver.launch(self._ctr, grid, abi.THREADS, stream, at, work, nwork, schedules)
        elif segments:
            driver.launch(self._open, grid, abi.THREADS, stream, at, work, nwork, schedules, partial)
        if not tags_were_compared:
            driver.launch(self._finish, blocks, abi.THREADS, stream, at, nchunks, schedules, partial, verdicts)
        driver.clear(secrets, layout.end - layout.keys, stream)
        driver.download(workspace.host + layout.verdicts, verdicts, layout.schedules - layout.verdicts, stream)
        driver.record(workspace.event, stream)

    def abandon(self, parts: list[Part], stream: int) -> None:
        """Overwrite secrets and chunks of launches that went wrong, and wait until that is done; warn where it cannot be.

        May be called again after an interruption: ``parts`` holds those that are still to be done.
        """
        while parts:
            part = parts[-1]
            try:
                self._scrub(part, stream)
            except DeviceError as e:
                # The device may still use its memory: it is neither used again nor freed.
                parts.pop()
                _log.warning("what a failed batch left on device %d cannot be overwritten: %s", self._ordinal, e)
            else:
                self.give(parts)

    def _scrub(self, part: Part, stream: int, tries: int = 2) -> None:
        workspace, layout = part.workspace, part.layout
        try:
            with self.current():
                workspace.overwrite(self._driver, workspace.device + layout.keys, layout.end - layout.keys, stream)
                for chunk in part.chunks:
                    workspace.overwrite(self._driver, chunk.address, chunk.nbytes, stream)
                self._driver.synchronise(stream)
        except DeviceError:
            if tries == 1:
                raise
            self._scrub(part, stream, tries - 1)
        finally:
            # Whatever the driver says. Only the keys: the device may still be reading the list of chunks.
            workspace.forget(layout.keys, layout.schedules)

    def give(self, parts: list[Part]) -> None:
        """Take the workspace of the last part back. Never twice, whatever interrupts: two launches would share it."""
        workspace = parts.pop().workspace
        try:
            with self.current():
                self._workspaces.give(workspace)
        except DeviceError as e:
            _log.warning("device %d does not take its memory back: %s", self._ordinal, e)

    def reached(self, parts: Sequence[Part]) -> bool:
        """Whether the device is done with launches."""
        with self.current():
            return all(self._driver.reached(part.workspace.event) for part in parts)

    def verdicts(self, parts: Sequence[Part]) -> list[int]:
        """Wait for launches; the verdicts of all their chunks."""
        with self.current():
            for part in parts:
                self._driver.wait(part.workspace.event)
        return [verdict for part in parts for verdict in part.verdicts()]
