"""Work done in a fork, so that this process starts no thread and can be forked again and again."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ..errors import OutOfMemoryError, SecureLoaderError

_T = TypeVar("_T")


class Fork:
    """A process that :func:`forked` has begun.

    Args:
        pid: Its number.

    Attributes:
        pid: Its number.
        status: How it ended, as :func:`os.waitpid` tells, or None while nobody has asked.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status: int | None = None

    def wait(self) -> int:
        """Wait for its end; gives :attr:`status`."""
        if self.status is None:
            self.status = os.waitpid(self.pid, 0)[1]
        return self.status


@contextmanager
def forked(child: Callable[[], None]) -> Iterator[Fork]:
    """Run something in a fork of this process, which is killed where the block does not wait for it.

    Args:
        child: What it does; it ends with exit code 1 if this returns or raises.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # Python throws away what is raised while fork's own hooks run: a ^C then would do nothing.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        pid = os.fork()
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise
    if pid == 0:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            child()
        finally:
            os._exit(1)  # nothing may get out of the fork, and no exit handler of the parent may run here
    process = Fork(pid)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield process
    finally:
        if process.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            process.wait()


def apart(work: Callable[[], _T]) -> _T:
    """Call something in a process of its own, and wait for it.

    Args:
        work: What it gives must be picklable.

    Returns:
        What ``work`` gave.

    Raises:
        SecureLoaderError, OSError: As ``work`` raised it.
        OutOfMemoryError: Likewise, or the system has killed the process, which it does when memory runs out.
        RuntimeError: ``work`` raised anything else, or its process was killed in another way.
    """
    theirs, ours = os.pipe()
    with forked(lambda: _answer(work, ours)) as process:
        os.close(ours)
        with open(theirs, "rb") as answers:
            answer = answers.read()
        status = process.wait()
    if status != 0:
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            raise OutOfMemoryError(
                "the system has killed the process that did the work", hint="is there enough memory?"
            )
        raise RuntimeError(f"the process that did the work ended with {os.waitstatus_to_exitcode(status)}")
    value, error = pickle.loads(answer)  # noqa: S301 - our own process wrote it
    if error is not None:
        raise error
    result: _T = value
    return result


def _answer(work: Callable[[], object], pipe: int) -> None:
    try:
        answer: tuple[object, BaseException | None] = (work(), None)
    except (SecureLoaderError, OSError) as e:
        answer = (None, e)
    except MemoryError:
        answer = (None, OutOfMemoryError("memory for the tensors is not to be had"))
    except Exception as e:  # noqa: BLE001 - it may be of a kind that cannot be pickled
        answer = (None, RuntimeError(f"{type(e).__name__}: {e}"))
    with open(pipe, "wb") as out:
        out.write(pickle.dumps(answer))
    sys.stderr.flush()
    os._exit(0)
