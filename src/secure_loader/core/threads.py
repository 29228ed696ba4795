"""Starting a thread where a signal may raise at any moment."""

from __future__ import annotations

import _thread
import logging
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)


def start(work: Callable[[], None], name: str) -> None:
    """Have a daemon thread do something, and do not wait for it.

    Signals raise in the main thread alone. Inside ``Thread.start`` one takes the entry away that the new thread is about
    to look for, and the thread ends with a traceback (``KeyError`` in ``_bootstrap``) before it has begun. So a first
    thread, of which Python keeps no entry, starts the one that does the work.

    Args:
        work: What it does.
        name: Of the thread.

    Raises:
        RuntimeError: There are no more threads to be had. One that ends between the two is logged: whoever needs the
            work done must be able to do without.
    """

    def begin() -> None:
        try:
            threading.Thread(target=work, name=name, daemon=True).start()
        except RuntimeError as e:
            _log.debug("no thread for %s: %s", name, e)

    _thread.start_new_thread(begin, ())
