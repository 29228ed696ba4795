"""What this process remembers of sources that can be read only once: variables, descriptors, a passphrase.

Everything else is read again for every load, and overwritten after it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from ..secrets import Secret
from .jwk import Jwk

_Held = dict[str, list[Jwk] | Secret | None]
_held: _Held = {}
_lock = threading.Lock()


def _new_lock() -> None:
    global _lock  # noqa: PLW0603 - a child must not wait for a thread that only its parent has
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)


@contextlib.contextmanager
def held() -> Iterator[_Held]:
    """What is remembered, by reference, for one thread at a time; None stands for what was read and forgotten."""
    with _lock:
        yield _held


def forget_keys() -> None:
    """Forget what was read from sources that can be read only once (``env:``, ``fd:``, a passphrase in the environment).

    A process that loads no more encrypted models need not remember how to. Models that are open are not touched; the
    keys are overwritten as soon as nothing uses them any more. The sources cannot be read again.
    """
    with held() as table:
        for reference in table:
            table[reference] = None
