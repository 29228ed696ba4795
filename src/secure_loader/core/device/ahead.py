"""Tensors brought to devices many at a time, for a framework that asks for them one by one.

A transfer of one tensor hardly begins before it ends; one of many keeps disk, bus and device busy at once. What is brought
is the final storage, so nothing is kept twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from ...errors import ReadError
from ..archive import TensorFile
from ..tensors import Framework
from .engine import Engine

_Key = tuple[int, str]


class _Batch:
    """Tensors that are brought together, by whoever asks for one of them first."""

    def __init__(self, engine: Engine, lock: threading.Lock) -> None:
        self.engine, self.lock = engine, lock
        self.tensors: list[tuple[TensorFile, str]] = []
        self.nbytes = 0
        self.owners: dict[_Key, Any] | None = None
        self.error: BaseException | None = None


class DeviceAhead:
    """Hands out each tensor once, on its device; as :class:`core.archive.Ahead`. Any thread may ask. A context manager.

    Args:
        tensors: Files, names and the engines of their devices, in the order in which they will be asked for.
        fw: Whose tensors to make.
        budget: Bytes that are brought to a device together; a tensor that is larger comes alone.
    """

    def __init__(self, tensors: Iterable[tuple[TensorFile, str, Engine]], fw: Framework, budget: int) -> None:
        self._fw = fw
        self._of: dict[_Key, _Batch] = {}
        self._batches: list[_Batch] = []
        # Whoever holds a device's lock talks to it; the others wait for the very tensors that he brings.
        locks: dict[int, threading.Lock] = {}
        current: dict[int, _Batch] = {}
        for file, name, engine in tensors:
            nbytes, batch = file.info(name).nbytes, current.get(id(engine))
            if batch is None or batch.nbytes + nbytes > budget:
                batch = _Batch(engine, locks.setdefault(id(engine), threading.Lock()))
                current[id(engine)] = batch
                self._batches.append(batch)
            batch.tensors.append((file, name))
            batch.nbytes += nbytes
            self._of[id(file), name] = batch

    def take(self, file: TensorFile, name: str) -> Any:
        """A tensor, brought together with its neighbours where nobody has asked for one of them before.

        Args:
            file: As it was given.
            name: Likewise.

        Returns:
            The tensor, or None where it is not, or no longer, one of these.

        Raises:
            SecureLoaderError: It could not be read or verified; everything that was brought with it was overwritten.
        """
        key = (id(file), name)
        batch = self._of.pop(key, None)
        if batch is None:
            return None
        with batch.lock:
            if batch.owners is None and batch.error is None:
                self._bring(batch)
            if batch.error is not None or batch.owners is None:
                raise batch.error or ReadError("the load has ended")
            owner = batch.owners.pop(key)
        info = file.info(name)
        return self._fw.view(owner, info.dtype, info.shape)

    def _bring(self, batch: _Batch) -> None:
        # In file order, so that neighbours are read and copied together.
        tensors = sorted(batch.tensors, key=lambda t: (id(t[0]), t[0].info(t[1]).start))
        first = tensors[0][0]
        try:
            parts = [file.part(name) for file, name in tensors]
            owners = batch.engine.load(parts, first.read_options, first.device_buffer_bytes)
        except BaseException as e:
            # The others that wait for this batch are told the same; an interruption is the business of one thread alone.
            batch.error = e if isinstance(e, Exception) else ReadError("the load was interrupted")
            raise
        batch.owners = {(id(f), n): owner for (f, n), owner in zip(tensors, owners, strict=True)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Overwrite what nobody has asked for, and forget it. May be called again after an interruption."""
        self._of.clear()
        for batch in self._batches:
            with batch.lock:
                batch.error = batch.error or ReadError("the load has ended")
                if batch.owners:
                    batch.engine.overwrite(list(batch.owners.values()))
                batch.owners = None
