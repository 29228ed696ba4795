"""One structured record of every open: what was asked for, who vouched for it, what was decided, and by which key.

Records go to the logger ``secure_loader.audit`` at level INFO, as one line of JSON, and as a dictionary in the record's
attribute ``audit``. They hold names, digests and messages of our errors: no key, no token, no path of a key service.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import logging
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from ..errors import SecureLoaderError

LOGGER = "secure_loader.audit"
# Every record has all of these, null where it is not known.
FIELDS = (
    "event", "time", "path", "model", "release", "file_id", "signer", "signer_key", "key", "source", "policy",
    "decision", "error", "reason", "ms",
)  # fmt: skip

_log = logging.getLogger(LOGGER)
_now: ContextVar[Opening | None] = ContextVar("secure_loader_opening", default=None)


class Opening:
    """What there is to say about one open, from its beginning to its decision.

    Args:
        path: What is opened.
    """

    def __init__(self, path: str) -> None:
        self._known: dict[str, Any] = {"path": path}
        self._seconds = 0.0

    def describe(self, **known: Any) -> None:
        """Add fields, from what was verified only: what a file says of itself is nothing that happened."""
        self._known |= known

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        """A part of the work of opening. An error in there is the decision."""
        started, token = time.monotonic(), _now.set(self)
        error: BaseException | None = None
        try:
            yield
        except BaseException as e:
            error = e
            raise
        finally:
            _now.reset(token)
            self._seconds += time.monotonic() - started
            if isinstance(error, SecureLoaderError):
                self._conclude("refused", type(error).__name__, error.message)
            elif error is not None:
                self._conclude("failed", type(error).__name__)
            del error

    def allow(self) -> None:
        """The open is decided: weights may be read."""
        self._conclude("allowed")

    def _conclude(self, decision: str, error: str | None = None, reason: str | None = None) -> None:
        if not _log.isEnabledFor(logging.INFO):
            return
        found = dict.fromkeys(FIELDS) | self._known
        found |= {"event": "open", "decision": decision, "error": error, "reason": reason}
        found["time"] = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        found["ms"] = round(1000 * self._seconds, 1)
        # ASCII on one line, whatever a file calls itself: nobody writes records of their own into the log.
        _log.info("%s", json.dumps(found), extra={"audit": found})


def note_source(source: str) -> None:
    """Say where the key of the open that is under way came from."""
    opening = _now.get()
    if opening is not None:
        opening.describe(source=source)
