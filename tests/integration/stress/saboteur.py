"""A second process that does harm at a given moment: cuts a file, flips a byte of it in a loop, sends signals.

One JSON object a line comes in, one answer a line goes out; times are those of the monotonic clock, which processes
share. Started by :class:`Saboteur`, from the process that loads.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from typing import Any


class Saboteur:
    """The other process, as the one that loads sees it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def start(self, what: str, **how: Any) -> None:
        """Have it do something, and do not wait."""
        self._say({"do": what, **how})

    def finish(self) -> dict[str, Any]:
        """Stop it, and hear what it did: ``begun`` and ``ended``, and ``times`` for how often."""
        self._say({})
        return json.loads(self._process.stdout.readline())

    def _say(self, words: dict[str, Any]) -> None:
        # Not by a buffered file: a signal may come at any moment, and half a line would stay in there.
        os.write(self._process.stdin.fileno(), json.dumps(words).encode() + b"\n")

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


def _told_to_stop() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def _truncate(order: dict[str, Any]) -> int:
    os.truncate(order["path"], order["size"])
    return 1


def _flip(order: dict[str, Any]) -> int:
    fd, at, times = os.open(order["path"], os.O_RDWR), order["offset"], 0
    good = os.pread(fd, 1, at)
    bad = bytes([good[0] ^ order.get("bit", 1)])
    while not _told_to_stop():
        for _ in range(order.get("burst", 20)):
            os.pwrite(fd, bad, at)
            os.pwrite(fd, good, at)
        times += 1
    os.close(fd)
    return times


def _signal(order: dict[str, Any]) -> int:
    for n in range(order["presses"]):
        if n:
            time.sleep(order["gap"])
        os.kill(order["pid"], order["number"])
    return order["presses"]


def main() -> None:
    """Do as told until nobody is there to tell."""
    while line := sys.stdin.buffer.raw.readline():
        order = json.loads(line)
        time.sleep(order.get("delay", 0))
        begun = time.monotonic()
        times = {"truncate": _truncate, "flip": _flip, "signal": _signal}[order["do"]](order)
        ended = time.monotonic()
        sys.stdin.buffer.raw.readline()
        print(json.dumps({"begun": begun, "ended": ended, "times": times}), flush=True)


if __name__ == "__main__":
    main()
