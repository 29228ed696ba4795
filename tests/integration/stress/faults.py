"""What goes wrong during a load. Each fault is a block around one load, and tells afterwards whether it took place."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from secure_loader import numpy as sl_numpy
from secure_loader.core import pipeline, tensors
from secure_loader.core.pool import set_threads, threads
from secure_loader.core.secrets import Secret
from secure_loader.core.source import FileSource
from secure_loader.errors import (
    AuthenticationError,
    FormatError,
    OutOfMemoryError,
    ReadError,
    SecureLoaderError,
    WriteError,
)
from tests.attacks.conftest import descriptors
from tests.attacks.kit import CHUNK, KEY, SIGN, flip
from tests.integration.stress.leaks import TrackedMap
from tests.integration.stress.models import Shard
from tests.integration.stress.saboteur import Saboteur
from tests.integration.stress.ways import WAYS, WHOLE, Load


class ConsumerError(Exception):
    """What the code that uses the tensors raises."""


class Terminated(Exception):  # noqa: N818 - what a handler of SIGTERM raises is no error
    """What a handler of SIGTERM raises."""


class Enough(Exception):  # noqa: N818 - nothing is wrong
    """The consumer has seen what it wanted."""


@dataclass
class Scene:
    """One load and the fault that befalls it.

    Attributes:
        rng: What chooses.
        load: The load.
        way: Its name.
        shards: All there are.
        folder: Where to put files.
        saboteur: The other process.
        duration: Seconds that such a load takes undisturbed.
        begun: When the load began; likewise ``ended``.
        error: What it raised.
        consume: Called with the number of things that were looked at, after each one.
        fired: Whether the fault took place, and during the load.
        problems: What the fault itself found wrong.
    """

    rng: random.Random
    load: Load
    way: str
    shards: list[Shard]
    folder: Path
    saboteur: Saboteur
    duration: float
    begun: float = 0.0
    ended: float = 0.0
    error: BaseException | None = None
    consume: Callable[[int], None] = field(default=lambda n: None)
    fired: bool = False
    problems: list[str] = field(default_factory=list)

    def delay(self) -> float:
        """A moment that most likely lies within the load."""
        return self.rng.uniform(0, 1.1) * self.duration

    def within(self, moment: float) -> bool:
        """Whether something happened during the load."""
        return self.begun <= moment <= self.ended

    def sealed_byte(self) -> int:
        """File offset of a random byte of an encrypted tensor, or of one between two of them."""
        return self.rng.randrange(self.load.shard.first, self.load.shard.last)


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        stage: Makes the block for a scene.
        allowed: The errors that a load may raise; where there are none, it must not.
        certain: Ways in which the load must raise when the fault took place.
        damages: Whether it needs a copy of the file to work on.
        ways: Ways in which it can happen.
    """

    stage: Callable[[Scene], AbstractContextManager[None]]
    allowed: tuple[type[BaseException], ...]
    certain: tuple[str, ...]
    damages: bool
    ways: tuple[str, ...]


FAULTS: dict[str, Fault] = {}


def fault(
    *allowed: type[BaseException],
    certain: tuple[str, ...] = (),
    damages: bool = False,
    but: tuple[str, ...] = (),
) -> Callable[[Callable[[Scene], Iterator[None]]], Callable[[Scene], Iterator[None]]]:
    """Register a fault under the name of its function; ``but`` lists the ways that it is not for."""

    def register(stage: Callable[[Scene], Iterator[None]]) -> Callable[[Scene], Iterator[None]]:
        excluded = (*but, "from_bytes") if damages else but
        ways = tuple(w for w in WAYS if w not in excluded)
        FAULTS[stage.__name__] = Fault(contextlib.contextmanager(stage), allowed, certain, damages, ways)
        return stage

    return register


@fault()
def none(scene: Scene) -> Iterator[None]:
    yield
    scene.fired = True


@fault(FormatError, ReadError, certain=tuple(WAYS), damages=True)
def truncated_before(scene: Scene) -> Iterator[None]:
    os.truncate(scene.load.path, scene.rng.randrange(scene.load.path.stat().st_size))
    yield
    scene.fired = True


# The kernel clears the rest of the last page first: a read that has begun finds zeros there.
@fault(FormatError, ReadError, AuthenticationError, damages=True)
def truncated_meanwhile(scene: Scene) -> Iterator[None]:
    size = scene.rng.randrange(scene.load.path.stat().st_size)
    scene.saboteur.start("truncate", path=str(scene.load.path), size=size, delay=scene.delay())
    yield
    scene.fired = scene.within(scene.saboteur.finish()["ended"])


@fault(AuthenticationError, damages=True)
def flipped_meanwhile(scene: Scene) -> Iterator[None]:
    order = {"offset": scene.sealed_byte(), "bit": 1 << scene.rng.randrange(8), "delay": 0}
    scene.saboteur.start("flip", path=str(scene.load.path), **order)
    yield
    done = scene.saboteur.finish()
    scene.fired = done["begun"] < scene.ended and done["ended"] > scene.begun and done["times"] > 0


@fault(AuthenticationError, certain=WHOLE, damages=True)
def bad_tag_at_the_very_end(scene: Scene) -> Iterator[None]:
    flip(scene.load.path, scene.load.shard.last - 1, scene.rng.randrange(8))
    yield
    scene.fired = True


@fault(damages=True, but=("crowd",))
def replaced_meanwhile(scene: Scene) -> Iterator[None]:
    # The name is another file's all of a sudden; what is open stays what it is.
    other = scene.rng.choice([s for s in scene.shards if s is not scene.load.shard]).copy(scene.folder / "other")

    def opened(archive: Any) -> None:
        other.replace(scene.load.path)
        scene.fired = True

    scene.load.opened = opened
    yield
    other.unlink(missing_ok=True)


@fault(ReadError)
def input_output_error(scene: Scene) -> Iterator[None]:
    real, countdown, sticky = os.preadv, iter(range(scene.rng.randrange(30))), scene.rng.random() < 0.7
    number = scene.rng.choice((errno.EIO, errno.ESTALE, errno.ENXIO))
    path = str(scene.load.path)

    def fails(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        mine = str(Path(f"/proc/self/fd/{fd}").readlink()) == path
        if mine and not flags and next(countdown, None) is None and (sticky or not scene.fired):
            scene.fired = True
            raise OSError(number, os.strerror(number))
        return real(fd, buffers, offset, flags)

    os.preadv = fails
    try:
        yield
    finally:
        os.preadv = real


@fault()
def short_reads(scene: Scene) -> Iterator[None]:
    """Which the system may give at any time, and which are no fault at all."""
    real = os.preadv

    def gives_less(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        first = memoryview(buffers[0])
        if len(first) > 1 and scene.rng.random() < 0.5:
            scene.fired = True
            return real(fd, [first[: scene.rng.randrange(1, len(first))]], offset, flags)
        return real(fd, buffers, offset, flags)

    os.preadv = gives_less
    try:
        yield
    finally:
        os.preadv = real


@fault(ReadError, certain=WHOLE, but=("load_file", "from_bytes", "crowd"))
def bad_descriptor(scene: Scene) -> Iterator[None]:
    """The system's own error, at every read: the open file is a folder all of a sudden."""

    def opened(archive: Any) -> None:
        folder = os.open(scene.folder, os.O_RDONLY | os.O_DIRECTORY)
        os.dup2(folder, archive.file.source.fileno(), inheritable=False)
        os.close(folder)
        scene.fired = True

    scene.load.opened = opened
    yield


# A signal handler may raise between any two steps. Between `os.open` and the name that its result is given, and within
# a destructor, Python offers no way to be safe from that; there, the signal is taken to come at another time.
_SPARED = {
    f.__code__ for f in (FileSource.__init__, FileSource.__del__, FileSource.close, FileSource._direct, Secret.__del__)
} | {FileSource.from_bytes.__func__.__code__}


def raises_within(attempt: Callable[..., Any], error: Callable[[], BaseException], scene: Scene) -> Any:
    """A signal handler that raises when the load is what it interrupts."""

    def handler(number: int, frame: FrameType | None) -> None:
        codes = []
        while frame is not None:
            codes.append(frame.f_code)
            frame = frame.f_back
        destructor = any(c.co_name in ("__del__", "_remove") for c in codes)
        if attempt.__code__ in codes and not destructor and not _SPARED.intersection(codes):
            scene.fired = True
            raise error()

    return handler


@contextlib.contextmanager
def _signals(scene: Scene, number: int, error: Callable[[], BaseException]) -> Iterator[None]:
    from tests.integration.stress.worker import attempt

    before = signal.signal(number, raises_within(attempt, error, scene))
    presses, gap = scene.rng.choice((1, 1, 2, 3)), scene.rng.uniform(0, 0.2) * scene.duration
    order = {"pid": os.getpid(), "number": int(number), "presses": presses, "gap": gap}
    scene.saboteur.start("signal", delay=scene.delay(), **order)
    try:
        yield
    finally:
        scene.saboteur.finish()
        signal.signal(number, before)


@fault(KeyboardInterrupt, certain=tuple(WAYS))
def interrupted(scene: Scene) -> Iterator[None]:
    with _signals(scene, signal.SIGINT, KeyboardInterrupt):
        yield


@fault(Terminated, certain=tuple(WAYS))
def terminated(scene: Scene) -> Iterator[None]:
    with _signals(scene, signal.SIGTERM, Terminated):
        yield


@fault(ConsumerError, certain=tuple(WAYS))
def consumer_fails(scene: Scene) -> Iterator[None]:
    when = scene.rng.randrange(3)

    def consume(n: int) -> None:
        if n == when:
            scene.fired = True
            raise ConsumerError

    scene.consume = consume
    yield


@fault(Enough, certain=tuple(WAYS))
def abandoned(scene: Scene) -> Iterator[None]:
    when = scene.rng.randrange(3)

    def consume(n: int) -> None:
        if n == when:
            scene.fired = True
            raise Enough

    scene.consume = consume
    yield


@fault(OutOfMemoryError, ReadError, but=("rows", "columns", "into_own_memory"))
def no_mapping_to_be_had(scene: Scene) -> Iterator[None]:
    countdown = iter(range(scene.rng.randrange(3)))
    # New threads have no scratch memory yet.
    set_threads(threads())

    def before() -> None:
        if next(countdown, None) is None:
            scene.fired = True
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    TrackedMap.before = staticmethod(before)
    try:
        yield
    finally:
        TrackedMap.before = None


@fault(OutOfMemoryError, but=("all_at_once", "some_at_once", "load_file", "from_bytes", "into_own_memory"))
def allocator_has_none(scene: Scene) -> Iterator[None]:
    """The frameworks' own allocators are asked for more than there is."""
    countdown = iter(range(scene.rng.randrange(3)))
    kinds = (tensors._Numpy, tensors._Torch)
    real = {kind: kind.small for kind in kinds}

    def small(self: Any, nbytes: int) -> Any:
        if nbytes and next(countdown, None) is None:
            scene.fired = True
            return real[type(self)](self, nbytes << 42)
        return real[type(self)](self, nbytes)

    for kind in kinds:
        kind.small = small
    try:
        yield
    finally:
        for kind in kinds:
            kind.small = real[kind]


@fault(OutOfMemoryError, ReadError, but=("crowd",))
def out_of_address_space(scene: Scene) -> Iterator[None]:
    """For real; and no thread gets a stack either."""
    set_threads(threads())
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + scene.rng.randrange(8 << 20), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    scene.fired = scene.error is not None


@fault(but=("crowd", "rows", "columns"))
def no_thread_to_be_had(scene: Scene) -> Iterator[None]:
    real, countdown = threading._start_new_thread, iter(range(scene.rng.randrange(2)))
    # Many jobs, for the pool that is not there yet.
    pipeline.JOB_BYTES, scene.load.page_cache = CHUNK, "keep"
    set_threads(scene.rng.randint(2, 4))

    def start(*args: Any) -> int:
        if next(countdown, None) is None:
            scene.fired = True
            raise RuntimeError("can't start new thread")
        return real(*args)

    threading._start_new_thread = start
    try:
        yield
    finally:
        threading._start_new_thread = real


@fault(but=("load_file", "from_bytes", "crowd"))
def forked_meanwhile(scene: Scene) -> Iterator[None]:
    """The child loads as well, with threads of its own. Not while a file is opened; see test_stress.py for that."""
    from tests.integration.stress.worker import clean_load

    children: list[int] = []
    moments: list[float] = []
    delay = scene.delay() / 2

    def forks() -> None:
        time.sleep(delay)
        moment = time.monotonic()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                clean_load(scene.load.shard)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
        moments.append(moment)

    forker = threading.Thread(target=forks)
    scene.load.opened = lambda archive: forker.start()
    yield
    forker.join()
    deadline = time.monotonic() + 30
    while (done := os.waitpid(children[0], os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.002)
    if done == (0, 0):
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)
        scene.problems.append("the child of a fork hangs")
    elif os.waitstatus_to_exitcode(done[1]):
        scene.problems.append(f"the child of a fork ended with {os.waitstatus_to_exitcode(done[1])}")
    scene.fired = scene.within(moments[0])


@fault(SecureLoaderError, but=("crowd",))
def no_descriptor_to_be_had(scene: Scene) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = set(map(int, descriptors()))
    free = (n for n in itertools.count() if n not in taken)
    limit = next(itertools.islice(free, scene.rng.randrange(4), None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    scene.fired = scene.error is not None


@fault()
def disk_full_before(scene: Scene) -> Iterator[None]:
    """A write that finds no room, for real; the file that was there stays as it was, and can be loaded."""
    target = scene.load.shard.path
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (scene.rng.randrange(target.stat().st_size // 2), hard))
    try:
        sl_numpy.save_file(
            scene.load.shard.arrays, target, key=KEY, signing_key=SIGN, model_id="demo/model", chunk_size=CHUNK
        )
        scene.problems.append("a file was written beyond the limit")
    except WriteError:
        scene.fired = True
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    left = [p.name for p in target.parent.iterdir() if ".tmp" in p.name]
    if left:
        scene.problems.append(f"{left} left of a write that failed")
    yield


# In the usual draw; the limit of address space is tried in a process of its own.
USUAL = tuple(name for name in FAULTS if name != "out_of_address_space")
