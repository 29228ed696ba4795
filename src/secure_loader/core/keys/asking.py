"""Asking a person for a passphrase: only where a command said that there is one to ask."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

_commands = 0


@contextlib.contextmanager
def may_ask() -> Iterator[None]:
    """For as long as the block runs, a passphrase that is nowhere else may be asked for on the terminal."""
    global _commands  # noqa: PLW0603 - a command runs on a thread of its own choice, and reads files on others
    _commands += 1
    try:
        yield
    finally:
        _commands -= 1


def can_ask() -> bool:
    """Whether a command is running, and a terminal is there."""
    if not _commands:
        return False
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return sys.stdin is not None and sys.stdin.isatty()
    return True


def ask(prompt: str) -> bytearray:
    """What a person types, unseen. Python keeps copies of it that nobody can overwrite."""
    import getpass

    return bytearray(getpass.getpass(prompt).encode())
