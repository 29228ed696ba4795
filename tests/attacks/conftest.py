"""Whatever an attack does, it leaves no descriptor and no thread behind."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from secure_loader.core.pool import run_jobs


def descriptors() -> dict[str, str]:
    found = {}
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists the folder
            found[fd.name] = str(fd.readlink())
    return found


def strange_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if not t.name.startswith("secure-loader")]


@pytest.fixture(scope="package", autouse=True)
def quick_collections() -> Iterator[None]:
    """What is there before the first attack need not be looked through after each one."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No descriptor is leaked, and no thread beyond those of the shared pool."""
    run_jobs(lambda item: None, range(64))
    gc.collect()
    before, threads = descriptors(), strange_threads()
    yield
    deadline = time.monotonic() + 5
    while True:
        gc.collect()
        left = {fd: what for fd, what in descriptors().items() if before.get(fd) != what}
        # A thread of the pool lets go of its last job a moment after the job is done.
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    assert not left
    assert strange_threads() == threads
