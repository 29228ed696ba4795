"""Asking a child process of our own for something secret, within a deadline."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from collections.abc import Mapping
from typing import IO

from ..secrets import wipe
from .net import Deadline

# What a child may take to end when it has answered, or was killed. One that the kernel cannot kill is left behind.
_PATIENCE = 1.0


class HelperError(Exception):
    """The child gave no answer.

    Args:
        message: What became of it.
    """


def ask_helper(
    script: str, question: bytearray, deadline: Deadline, *, env: Mapping[str, str], limit: int = 4096
) -> bytearray:
    """Run a file of this package by the interpreter, without site packages; write to its stdin, read its stdout.

    No copy of the question or of the answer is made that cannot be wiped.

    Args:
        script: Path of the file.
        question: For its stdin. The caller wipes it.
        deadline: When the answer must be there. The child is killed then.
        env: Its environment, the whole of it.
        limit: Longest answer, in bytes.

    Returns:
        Its answer; the caller wipes it.

    Raises:
        HelperError: It cannot be started, crashed, ended without an answer, or said too much.
        TimeoutError: The deadline is over.
    """
    words = [sys.executable, "-I", "-S", script]
    try:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and file; everything else goes by stdin
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
            cwd="/",
            bufsize=0,
            start_new_session=True,
        )
    except OSError as e:
        raise HelperError(f"cannot be started: {e.strerror}") from None
    answer = bytearray(limit + 1)
    try:
        size = _talk(process, question, answer, deadline)
        code = _wait(process)
        if not size:
            raise HelperError(f"crashed (signal {-code})" if code and code < 0 else f"ended without an answer ({code})")
        if size > limit:
            raise HelperError("said too much")
        return answer[:size]
    finally:
        wipe(answer)
        if process.poll() is None:
            process.kill()
            _wait(process)
        for end in (process.stdin, process.stdout):
            if end is not None:
                end.close()


def _talk(process: subprocess.Popen[bytes], question: bytearray, answer: bytearray, deadline: Deadline) -> int:
    """Write and read at the same time, until the child closes its end or ``answer`` is full; returns how much came."""
    out, back = process.stdin, process.stdout
    assert out is not None  # noqa: S101 - both are pipes
    assert back is not None  # noqa: S101
    left, room, size = memoryview(question), memoryview(answer), 0
    try:
        with selectors.DefaultSelector() as ready:
            os.set_blocking(out.fileno(), False)
            ready.register(out, selectors.EVENT_WRITE)
            ready.register(back, selectors.EVENT_READ)
            while size < len(answer):
                for key, _ in ready.select(deadline.left()):
                    if key.fileobj is back:
                        count = os.readv(back.fileno(), [room[size:]])
                        if not count:
                            return size
                        size += count
                    else:
                        left = left[_write(out, left) :]
                        if not left:
                            ready.unregister(out)
                            out.close()
        return size
    finally:
        left.release()
        room.release()


def _write(out: IO[bytes], data: memoryview) -> int:
    try:
        return os.write(out.fileno(), data)
    except BrokenPipeError:
        # It has ended; what it said, or did not say, tells why.
        return len(data)


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        return None
