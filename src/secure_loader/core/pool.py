"""Jobs on threads that the whole process shares: bounded, the first error wins, nobody is left behind.

Two pools: one as large as the number of processors, for work that computes, and one for work that waits for a disk.
One synchronous reader gets a third of what a disk can do (docs/performance.md), and a thread that waits costs nothing.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from .threads import start

_T = TypeVar("_T")
# Reads in flight while files are not in the page cache.
WAITING_THREADS = 16

# More often than anybody presses ^C within the few milliseconds that wiping takes.
CLEANING_TRIES = 8

_log = logging.getLogger(__name__)


class _Pool:
    """Threads that do what is put in a queue.

    Not a ThreadPoolExecutor: a signal inside its ``submit`` can leave a lock of its locked, and everybody hangs.

    Args:
        size: Threads at most; they are started as work comes in.
        name: Of the threads.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size, self._name = size, name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._alive = 0
        self._ended = False

    def submit(self, work: Callable[[], None]) -> None:
        """Have it done by one of them. Raises RuntimeError where the system gives no more threads."""
        if self._alive < self._size:
            start(self._run, f"{self._name}_{self._alive}")
        self._queue.put(work)

    def shutdown(self) -> None:
        """Let the threads end once the queue is empty."""
        with self._lock:
            self._ended = True
            for _ in range(self._alive):
                self._queue.put(None)

    def _run(self) -> None:
        with self._lock:
            # They count themselves: whoever starts them may be interrupted before he can.
            if self._ended or self._alive >= self._size:
                return
            self._alive += 1
        while (work := self._queue.get()) is not None:
            try:
                work()
            except BaseException:  # noqa: BLE001 - the thread goes on; jobs hand their errors on themselves
                _log.exception("an error that nobody waited for")
            del work  # nothing is kept alive while there is nothing to do


_pool_lock = threading.Lock()
_pools: dict[bool, _Pool] = {}
_threads = 0


def set_threads(n: int | None) -> None:
    """Number of threads that compute; None sizes it to the processors this process may use.

    Takes effect with the next job; running ones end on the old pool.
    """
    global _threads
    with _pool_lock:
        old, _threads = _pools.pop(False, None), n or 0
    if old is not None:
        old.shutdown()


def threads() -> int:
    """Threads that the shared pool has, or will have."""
    return _threads or min(16, len(os.sched_getaffinity(0)))


def _pool(*, waiting: bool) -> _Pool:
    with _pool_lock:
        if waiting not in _pools:
            n, name = (WAITING_THREADS, "secure-loader-read") if waiting else (threads(), "secure-loader")
            _pools[waiting] = _Pool(n, name)
        return _pools[waiting]


def _after_fork() -> None:
    # Threads do not survive a fork, nor does the state of the lock.
    global _pools, _pool_lock
    _pools, _pool_lock = {}, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def run_jobs(
    job: Callable[[_T], None],
    items: Sequence[_T],
    on_error: Callable[[], None] | None = None,
    *,
    waiting: bool = False,
) -> None:
    """Run a job per item on the shared pool, and on this thread when there is only one.

    Args:
        job: Called once per item, in order, by several threads.
        items: What to do.
        on_error: Called when no job runs any more, before the error is raised.
        waiting: The jobs mostly wait for a disk: run more of them at a time than there are processors.

    Raises:
        Exception: The first error of any job, after all that started have ended and ``on_error`` ran.
    """
    workers = min(len(items), WAITING_THREADS if waiting else threads())
    try:
        if workers <= 1:
            for item in items:
                job(item)
            return
        _fan_out(job, items, lambda work: submit(work, workers - 1, waiting=waiting))
    except BaseException:
        if on_error is not None:
            try:
                insist(on_error, CLEANING_TRIES)
            except BaseException:
                insist(on_error, CLEANING_TRIES)  # a signal may have come before it had begun
                raise
        raise


class Helpers:
    """Threads that help the calling one, for as long as it wants.

    A signal may raise between any two steps of the calling thread, so it counts nothing up and down. And these are plain
    locks: the ``with`` of a Condition is written in Python, and can be interrupted while it holds its lock, for ever.

    Args:
        work: What each of them does, to its end.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._work: Callable[[], None] | None = work
        self._busy: list[threading.Lock] = []

    def run(self) -> None:
        """Work, in the thread of a helper, unless it comes too late."""
        mine = threading.Lock()
        with mine:
            with self._lock:
                work = self._work
                if work is None:
                    return
                self._busy.append(mine)
            try:
                work()
            finally:
                with self._lock:
                    self._busy.remove(mine)

    def dismiss(self) -> None:
        """Let nobody begin any more, and wait for those who have. May be called again after an interruption."""
        with self._lock:
            # Whoever comes late, or never, must not keep files and buffers in sight.
            self._work = None
            busy = list(self._busy)
        for one in busy:
            with one:
                pass


def _fan_out(
    job: Callable[[_T], None],
    items: Sequence[_T],
    hire: Callable[[Callable[[], None]], int],
) -> None:
    todo: Iterator[_T] = iter(items)
    failed: list[BaseException] = []
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                item = None if failed else next(todo, None)
            if item is None:
                return
            try:
                job(item)
            except BaseException as e:  # noqa: BLE001 - raised again below, in the caller's thread
                failed.append(e)

    helpers = Helpers(work)
    try:
        hire(helpers.run)
        work()
    except BaseException as e:  # noqa: BLE001 - a signal in this thread, say; raised again below
        failed.append(e)
    # Until no job runs any more nobody may wipe or reuse the destination.
    for _ in range(3):  # a signal may come before it has begun
        try:
            insist(helpers.dismiss)
            break
        except BaseException as e:  # noqa: BLE001 - as above
            failed.append(e)
    if failed:
        error = failed[0]
        # An error and the frame that raises it would keep each other, and all buffers in sight, until the garbage
        # collector comes by.
        failed.clear()
        try:
            raise error
        finally:
            del error


def insist(action: Callable[[], None], tries: int | None = None) -> None:
    """Call an action until it comes to its end, however often the user presses ^C meanwhile.

    Args:
        action: May be called again after it was interrupted.
        tries: How often to begin, for an action that may fail for reasons of its own; None: until it succeeds.

    Raises:
        BaseException: The first interruption, once the action was done.
    """
    interrupted: BaseException | None = None
    for _ in itertools.count() if tries is None else range(tries):
        try:
            action()
        except BaseException as e:  # noqa: BLE001 - raised again below
            interrupted = interrupted or e
        else:
            break
    if interrupted is not None:
        # As in _fan_out: no cycle of error and frame.
        try:
            raise interrupted
        finally:
            del interrupted


def submit(work: Callable[[], None], n: int, *, waiting: bool = False) -> int:
    """Have up to ``n`` threads of a pool do the same work; returns how many, fewer where no more are to be had."""
    for i in range(n):
        try:
            _pool(waiting=waiting).submit(work)
        except RuntimeError:
            # The interpreter is on its way out, or there are no more threads. The caller does all the work itself then.
            return i
    return n
