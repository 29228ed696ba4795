"""What this process remembers of sources that can be read only once: variables, descriptors, a passphrase.

Everything else is read again for every load, and overwritten after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..forks import ForkLock
from ..secrets import Secret
from .jwk import Jwk

_Held = dict[str, list[Jwk] | Secret | None]
_held: _Held = {}
_lock = ForkLock()


@contextlib.contextmanager
def held() -> Iterator[_Held]:
    """What is remembered, by reference, for one thread at a time; None stands for what was read and forgotten."""
    with _lock.here:
        yield _held


def forget_keys() -> None:
    """Forget what was read from sources that can be read only once (``env:``, ``fd:``, a passphrase in the environment).

    A process that loads no more encrypted models need not remember how to. Models that are open are not touched; the
    keys are overwritten as soon as nothing uses them any more. The sources cannot be read again.
    """
    with held() as table:
        for reference in table:
            table[reference] = None
