"""What a device reads from files itself: for which parts that is possible and worth it, and in which pieces."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise

from ...errors import DeviceError, ReadError
from ..pipeline import Options, SealedBytes
from ..source import DIRECT_ALIGN, FileSource
from .direct import DirectFile, DirectReader
from .plan import MOST_LOADS, Gathered, Load, Target, adjoins

_log = logging.getLogger(__name__)


class Straight:
    """Files that the device reads itself during one load."""

    def __init__(self) -> None:
        self._files: dict[FileSource, DirectFile] = {}

    def open(self, reader: DirectReader, targets: Sequence[Target], options: Options) -> None:
        """Prepare the files of all targets that can come directly, and try each of them: a block, where it belongs.

        Args:
            reader: What reads them.
            targets: What goes to the device; its memory must be free by now.
            options: Where ``gpu_direct`` is ``on``, a file that cannot be read so is an error.

        Raises:
            DeviceError: As said.
        """
        tried = set()
        for target in targets:
            source = target.wanted.stored.source
            if source in tried or not comes_sealed(target):
                continue
            tried.add(source)
            try:
                self._files[source] = reader.open(source)
                # Whether this memory of this device can be read into shows only now; a pinned ring can do it in any case.
                place = target.wanted.stored.offset + target.wanted.start
                self._files[source].read(place, min(target.nbytes, DIRECT_ALIGN), target.memory.address + target.at)
            except (DeviceError, ReadError) as e:
                if options.gpu_direct == "on":
                    hint = 'gpu_direct = "auto" goes by way of the host'
                    raise DeviceError(f"cannot be read directly: {e.message}", path=source.path, hint=hint) from None
                _log.debug("%s comes by way of the host: %s", source.path, e.message)
                if source in self._files:
                    self._files.pop(source).close()

    def takes(self, target: Target) -> bool:
        """Whether a target comes directly."""
        return target.wanted.stored.source in self._files and comes_sealed(target)

    def reads(self, filling: StraightFilling, size: int) -> list[Callable[[], None]]:
        """What fills the memory of a filling, to be called once each, by any threads.

        Args:
            filling: Of targets that come directly.
            size: Bytes to read with one call, a multiple of a page.
        """
        jobs: list[Callable[[], None]] = []
        for source, place, address, nbytes in filling.runs():
            # Cut on borders of the file's blocks, all but the ends of a run are aligned then.
            cuts = [place, *range((place // size + 1) * size, place + nbytes, size), place + nbytes]
            for start, stop in pairwise(cuts):
                jobs.append(partial(self._files[source].read, start, stop - start, address + start - place))
        return jobs

    def close(self) -> None:
        """Let go of all files, once no read runs any more. May be called again after an interruption."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def comes_sealed(target: Target) -> bool:
    """Whether the device opens all of a target as it is stored, and the host does not look at it."""
    stored = target.wanted.stored
    return target.key is not None and target.nbytes > 0 and isinstance(stored, SealedBytes) and stored.digests is None


class StraightFilling(Gathered):
    """Loads that are read directly, and opened together.

    Args:
        room: Bytes of them, at most.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room, self._nbytes = room, 0

    def add(self, load: Load) -> bool:
        """Take a load in; False where it does not fit any more."""
        if self.loads and (self._nbytes + load.nbytes > self._room or len(self.loads) >= MOST_LOADS):
            return False
        self.loads.append((self._nbytes, load))
        self._nbytes += load.nbytes
        return True

    def runs(self) -> list[tuple[FileSource, int, int, int]]:
        """File, place there, device address and size of what is read, as long as can be."""
        runs: list[tuple[FileSource, int, int, int]] = []
        last: Load | None = None
        for _, load in self.loads:
            address = load.memory.address + load.at
            if last is not None and adjoins(last, load) and last.memory is load.memory:
                source, place, to, nbytes = runs[-1]
                if to + nbytes == address:
                    runs[-1], last = (source, place, to, nbytes + load.nbytes), load
                    continue
            runs.append((load.source, load.place, address, load.nbytes))
            last = load
        return runs


def straight_fillings(cut: Iterable[Load], room: int) -> Iterator[StraightFilling]:
    """Gather loads, in order."""
    current = StraightFilling(room)
    for load in cut:
        if not current.add(load):
            yield current
            current = StraightFilling(room)
            current.add(load)
    if current.loads:
        yield current
