"""What a load may leave behind: nothing. Each kind of thing that could stay is counted here."""

from __future__ import annotations

import gc
import mmap
import threading
import time
import traceback
import weakref
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from secure_loader.core import archive, memory, pipeline, pool
from secure_loader.errors import SecureLoaderError
from tests.attacks.conftest import descriptors, strange_threads
from tests.integration.stress.models import MARKER

# In seconds; a thread of the pool lets go of its last job a moment after the job is done.
_PATIENCE = 3
_BEFORE = 0xAA


class TrackedMap(mmap.mmap):
    """A mapping that is remembered for as long as it is there."""

    alive: ClassVar[weakref.WeakSet[TrackedMap]] = weakref.WeakSet()
    # Set by a fault: called before each one is made.
    before = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if cls.before is not None:
            cls.before()
        made = super().__new__(cls, *args, **kwargs)
        cls.alive.add(made)
        return made


class ScratchRegion(memory.Region):
    """The pipeline's own memory, which stays."""

    kept: ClassVar[weakref.WeakSet[TrackedMap]] = weakref.WeakSet()

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.kept.add(self.mapping)


class Destinations:
    """Looks at what a read that failed has left in the memory that it was to fill.

    Attributes:
        checked: How many failed reads were looked at.
        bad: What was wrong with them.
    """

    def __init__(self) -> None:
        self._real = pipeline.read
        self._failed: list[tuple[BaseException, list[memoryview], str]] = []
        self.checked = 0
        self.bad: list[str] = []

    def read(self, wanted: Any, options: Any) -> None:
        """As :func:`core.pipeline.read`."""
        outs = [w.out for w in wanted if w.out is not None]
        for out in outs:
            np.frombuffer(out, np.uint8)[:] = _BEFORE
        try:
            self._real(wanted, options)
        except BaseException as e:
            # A signal in this very frame comes before the read or after its good end.
            if e.__traceback__.tb_next is not None:
                self._failed.append((e, outs, place(e)))
            raise

    def check(self) -> None:
        """Look at the reads that failed since the last time."""
        while self._failed:
            error, outs, where = self._failed.pop()
            self.checked += 1
            out = data = None
            for out in outs:
                data = np.frombuffer(out, np.uint8)
                # What comes from outside may come before the first and after the last step of a read: then nothing
                # was filled. Whatever else there is must not be plaintext, not even verified one.
                clean = not data.any() or (not isinstance(error, SecureLoaderError) and bool((data == _BEFORE).all()))
                if not clean:
                    self.bad.append(f"{error!r} ({where}) left {int((data != 0).sum())} of {len(data)} bytes")
            # They keep their mappings alive, which are looked for next.
            del error, outs, out, data


class Leaks:
    """Compares what is there after a load with what was there before the first one."""

    def __init__(self) -> None:
        mmap.mmap = TrackedMap
        pipeline.Region = ScratchRegion
        self.destinations = Destinations()
        archive.read = self.destinations.read
        self._descriptors: dict[str, str] = {}
        self._threads: list[str] = []
        self._resident = 0
        self._maps = 0

    def begin(self) -> None:
        """From here on nothing may be added."""
        gc.collect()
        # What is there by now need not be looked through after each load.
        gc.freeze()
        self._descriptors, self._threads = descriptors(), strange_threads()
        self.begin_growth()

    def begin_growth(self) -> None:
        """From here on the process may not grow: allocators have settled."""
        self._resident, self._maps = resident(), maps()

    def problems(self) -> list[str]:
        """What the load that just ended has left behind, threads and memory of the pool apart."""
        self.destinations.check()
        deadline = time.monotonic() + _PATIENCE
        while (found := self._problems()) and time.monotonic() < deadline:
            time.sleep(0.005)
        return found + [self.destinations.bad.pop() for _ in self.destinations.bad[:]] + plaintext_in_scratch()

    def _problems(self) -> list[str]:
        gc.collect()
        now = descriptors()
        found = [f"descriptor {fd} of {what}" for fd, what in now.items() if self._descriptors.get(fd) != what]
        found += [f"closed descriptor {fd} of {what}" for fd, what in self._descriptors.items() if now.get(fd) != what]
        found += [f"a mapping of {len(m):,} bytes" for m in TrackedMap.alive if m not in ScratchRegion.kept]
        if (threads := strange_threads()) != self._threads:
            found.append(f"threads {threads}")
        # One that had no memory for its first step is never heard of again, but Python keeps its entry.
        ours = [t.name for t in threading.enumerate() if t.name.startswith("secure-loader") and t.is_alive()]
        if len(ours) > pool.WAITING_THREADS + pool.threads():
            found.append(f"{len(ours)} threads in pools")
        return found

    def growth(self) -> dict[str, int]:
        """Bytes resident and mappings more than when this began."""
        gc.collect()
        return {"resident": resident() - self._resident, "maps": maps() - self._maps}


def plaintext_in_scratch() -> list[str]:
    """Whether any thread's scratch memory holds bytes of an encrypted tensor, decrypted."""
    found = []
    for mapping in list(ScratchRegion.kept):
        with memoryview(mapping) as view:
            words = np.frombuffer(view[: view.nbytes // 8 * 8], np.uint64)
            n = int((words == MARKER).sum())
            del words
        if n:
            found.append(f"{n} words of plaintext in scratch memory")
    return found


def resident() -> int:
    """Bytes of memory that this process takes up."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmRSS in /proc/self/status")


def maps() -> int:
    """Mappings that this process has."""
    return len(Path("/proc/self/maps").read_text().splitlines())


def place(error: BaseException) -> str:
    """The last steps of where an error comes from."""
    steps = traceback.extract_tb(error.__traceback__)[-6:]
    return " > ".join(f"{Path(s.filename).name}:{s.lineno} {s.name}" for s in steps)
