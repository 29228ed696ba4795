"""Locks that a forked process finds open, whoever held them in its parent."""

from __future__ import annotations

import os
import threading
import weakref

_locks: weakref.WeakSet[ForkLock] = weakref.WeakSet()


class ForkLock:
    """A place for a lock that never waits for a thread that only the parent process has.

    Attributes:
        here: The lock of this process, for ``with lock.here:``. The block keeps to the lock that it has taken, so that
            a thread that forks inside gives back its own. A plain one: signals cannot interrupt its ``with``.
    """

    __slots__ = ("__weakref__", "here")

    def __init__(self) -> None:
        self.here = threading.Lock()
        _locks.add(self)


def _after_fork() -> None:
    for lock in _locks:
        lock.here = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
