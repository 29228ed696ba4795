"""Tensors on a device: one engine for each, which decides who decrypts, and where everything goes."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from ...errors import DeviceError
from ..pipeline import Options, SealedBytes
from ..source import FileSource
from .batch import Kernels
from .choice import choose
from .device import Device, Memory
from .direct import CuFile, DirectReader
from .layout import REGION_BYTES, lay_out
from .plan import Part, Target
from .ring import SLOT_BYTES
from .transfer import Way, transfer

_log = logging.getLogger(__name__)


class Engine:
    """Brings verified tensors to one device. Any thread may use it.

    Args:
        device: The device.
        kernels: What decrypts there; None leaves it to the host.
        require: Raise where the host would have to decrypt.
        slot_bytes: Size of a piece of pinned memory, at most.
        region_bytes: Size of what tensors share, at most.
        direct: What reads from the disk into the device, where there is something.
    """

    def __init__(
        self,
        device: Device,
        kernels: Kernels | None,
        *,
        require: bool = False,
        slot_bytes: int = SLOT_BYTES,
        region_bytes: int = REGION_BYTES,
        direct: DirectReader | None = None,
    ) -> None:
        self._device, self._kernels, self._require = device, kernels, require
        self._slot_bytes, self._region_bytes = slot_bytes, region_bytes
        self._direct = direct
        self._told: weakref.WeakSet[FileSource] = weakref.WeakSet()

    def load(self, parts: Sequence[Part], options: Options, host_bytes: int) -> list[Any]:
        """Parts of tensors in new memory.

        Args:
            parts: In file order, best: what lies side by side in a file is laid out so.
            options: How files are read.
            host_bytes: Pinned host memory that may be taken for it.

        Returns:
            For each part the framework's tensor of its bytes; neighbours share memory.

        Raises:
            SecureLoaderError: As :func:`core.device.transfer.transfer`.
        """
        spans = [(p.wanted.stored.offset + p.wanted.start, p.wanted.stop - p.wanted.start) for p in parts]
        sizes, places = lay_out(spans, self._region_bytes)
        regions = [self._device.allocate(size) for size in sizes]
        self.fill([(p, regions[n], at) for p, (n, at) in zip(parts, places, strict=True)], options, host_bytes)
        return [regions[n].owner[at : at + span[1]] for (n, at), span in zip(places, spans, strict=True)]

    def gather(self, parts: Sequence[Part], options: Options, host_bytes: int) -> Any:
        """Parts of tensors, one behind the other without a gap, in new memory of their own; otherwise as :meth:`load`."""
        ends = list(itertools.accumulate((p.wanted.stop - p.wanted.start for p in parts), initial=0))
        memory = self._device.allocate(ends.pop())
        self.fill([(part, memory, at) for part, at in zip(parts, ends, strict=True)], options, host_bytes)
        return memory.owner

    def fill(self, parts: Sequence[tuple[Part, Memory, int]], options: Options, host_bytes: int) -> None:
        """Parts of tensors in memory that is there already, such as a parameter's.

        Args:
            parts: What, where to, and from which byte on; as many bytes as the part has.
            options: How files are read.
            host_bytes: Pinned host memory that may be taken for it.

        Raises:
            DeviceError: The device has to decrypt, and has no kernels for a file's cipher.
            SecureLoaderError: As :func:`core.device.transfer.transfer`. That memory was overwritten then.
        """
        for part, _, _ in parts:
            self._look_at(part)
        kernels = self._kernels
        targets = [Target(p.wanted, memory, at, p.key if kernels else None) for p, memory, at in parts]
        transfer(Way(self._device, kernels, host_bytes, self._slot_bytes, self._direct), targets, options)

    def overwrite(self, owners: Sequence[Any]) -> None:
        """Zeros in what :meth:`load` gave and nobody is going to use.

        Raises:
            DeviceError: The device failed.
        """
        # Not on the stream of whoever calls: the memory may be given to somebody on another one before the zeros come.
        self._device.follow()
        for owner in owners:
            if owner.nbytes:
                self._device.clear(Memory(owner, owner.data_ptr(), owner.nbytes), 0, owner.nbytes)
        self._device.synchronise()

    def _look_at(self, part: Part) -> None:
        """Say once for each file who decrypts it."""
        stored = part.wanted.stored
        if stored.source in self._told or not isinstance(stored, SealedBytes):
            return
        path, device = stored.source.path, self._device.name
        if self._kernels is not None and part.key is not None:
            _log.debug("%s is decrypted on %s: %s", path, device, self._kernels.name)
        else:
            why = "there are no kernels" if self._kernels is None else "there are none for its cipher"
            if self._require:
                raise DeviceError(f"cannot be decrypted on {device}, as the settings demand: {why}", path=path)
            _log.info("%s is decrypted on the CPU and copied to %s: %s", path, device, why)
        self._told.add(stored.source)


_engines: dict[tuple[int, str, bool], Engine] = {}
_lock = threading.Lock()


def _after_fork() -> None:
    # What belongs to the parent's driver is of no use in a child, nor is the state of the lock.
    global _engines, _lock
    _engines, _lock = {}, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def engine_for(device: str, kernels: str = "auto", *, require: bool = False) -> Engine | None:
    """The engine of a GPU, made at its first use.

    Args:
        device: As torch spells it.
        kernels: What decrypts there, as :func:`core.device.choice.choose`.
        require: Raise rather than leave it to the CPU.

    Returns:
        None for another kind of device, and where torch cannot use it: the framework's own copy says why.

    Raises:
        DeviceError: ``require``, and nothing can decrypt there.
    """
    if not device.startswith("cuda"):
        return None
    from .torch_device import TorchDevice, index_of, is_rocm

    index = index_of(device)
    if index is None:
        return None
    key = (index, kernels, require)
    with _lock:
        if key not in _engines:
            # Another driver's device of the same number would pass its known-answer test, and then be given AMD's addresses.
            ways = "triton" if kernels == "auto" and is_rocm() else kernels
            chosen = choose(index, ways, require=require)
            _engines[key] = Engine(TorchDevice(index), chosen.kernels, require=require, direct=CuFile(index))
        return _engines[key]
