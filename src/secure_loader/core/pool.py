"""Jobs on threads that the whole process shares: bounded, the first error wins, nobody is left behind.

Two pools: one as large as the number of processors, for work that computes, and one for work that waits for a disk.
One synchronous reader gets a third of what a disk can do (docs/performance.md), and a thread that waits costs nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")
# Reads in flight while files are not in the page cache.
WAITING_THREADS = 16

_pool_lock = threading.Lock()
_pools: dict[bool, ThreadPoolExecutor] = {}
_threads = 0


def set_threads(n: int | None) -> None:
    """Number of threads that compute; None sizes it to the processors this process may use.

    Takes effect with the next job; running ones end on the old pool.
    """
    global _threads
    with _pool_lock:
        old, _threads = _pools.pop(False, None), n or 0
    if old is not None:
        old.shutdown(wait=False)


def threads() -> int:
    """Threads that the shared pool has, or will have."""
    return _threads or min(16, len(os.sched_getaffinity(0)))


def _executor(*, waiting: bool) -> ThreadPoolExecutor:
    with _pool_lock:
        if waiting not in _pools:
            n, name = (WAITING_THREADS, "secure-loader-read") if waiting else (threads(), "secure-loader")
            _pools[waiting] = ThreadPoolExecutor(n, thread_name_prefix=name)
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
            on_error()
        raise


def _fan_out(
    job: Callable[[_T], None],
    items: Sequence[_T],
    start: Callable[[Callable[[], None]], Iterator[Future[None]]],
) -> None:
    todo: Iterator[_T] = iter(items)
    changed = threading.Condition()
    running = 0
    failed: list[BaseException] = []

    def work() -> None:
        nonlocal running
        while True:
            with changed:
                item = None if failed else next(todo, None)
                if item is None:
                    return
                running += 1
            try:
                job(item)
            except BaseException as e:  # noqa: BLE001 - raised again below, in the caller's thread
                failed.append(e)
            finally:
                with changed:
                    running -= 1
                    changed.notify_all()

    helpers: list[Future[None]] = []
    try:
        helpers.extend(start(work))
        work()
    except BaseException as e:  # noqa: BLE001 - a signal in this thread, say; raised again below
        failed.append(e)
    # Until no job runs any more nobody may wipe or reuse the destination, however often the user presses ^C.
    while True:
        try:
            for helper in helpers:
                helper.cancel()
            with changed:
                while running:
                    changed.wait()
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


def submit(work: Callable[[], None], n: int, *, waiting: bool = False) -> Iterator[Future[None]]:
    """Have up to ``n`` threads of a pool do the same work; fewer where no more are to be had."""
    for _ in range(n):
        try:
            yield _executor(waiting=waiting).submit(work)
        except RuntimeError:
            # Somebody changed the number of threads this moment, the interpreter is on its way out, or there are no
            # more threads to be had. The calling thread does all the work itself then.
            return
