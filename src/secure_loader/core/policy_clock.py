"""A floor below the system clock, for rules about time: a clock that was turned back ends no licence."""

from __future__ import annotations

import datetime as dt
import logging
import os

from ..errors import FormatError, PolicyDeniedError
from .home import private_folder, state_dir
from .trust_toml import parse_time

SKEW = dt.timedelta(minutes=5)
_REMEMBER = dt.timedelta(minutes=1)
_log = logging.getLogger(__name__)


def check_clock(now: dt.datetime, created: str | None) -> None:
    """Refuse a clock that is behind what was seen, and remember this moment.

    The modification time of ``state/clock`` in the home folder says when a policy was last decided here.

    Args:
        now: What the system clock says, UTC.
        created: When the file was signed, RFC 3339; None where it does not say.

    Raises:
        PolicyDeniedError: The clock is more than five minutes behind the signature or the last decision.
    """
    try:
        signed = parse_time(created)
    except FormatError:
        raise PolicyDeniedError(f"the file says it was signed at {created!r}, which is no time") from None
    # Nothing is taken off a time that somebody else chose: the year 1 has none before it.
    if signed is not None and now + SKEW < signed:
        raise PolicyDeniedError(
            f"the clock of this machine says {_show(now)}, and the file was signed at {_show(signed)}",
            hint="a policy is decided only under a clock that is right: set it",
        )
    path = state_dir() / "clock"
    last = _last(path)
    if last is not None and now + SKEW < last:
        raise PolicyDeniedError(
            f"the clock of this machine says {_show(now)}, and a policy was decided here at {_show(last)}",
            hint=f"set the clock; if it was ahead then, remove {path}",
        )
    if last is None or now > last + _REMEMBER:
        _remember(path, now)


def _last(path: os.PathLike[str]) -> dt.datetime | None:
    try:
        when = os.stat(path).st_mtime
    except OSError:
        return None
    try:
        return dt.datetime.fromtimestamp(when, dt.UTC)
    except (ValueError, OverflowError, OSError):  # a year that no calendar of Python's has
        return dt.datetime.max.replace(tzinfo=dt.UTC) if when > 0 else dt.datetime.min.replace(tzinfo=dt.UTC)


def _remember(path: os.PathLike[str], now: dt.datetime) -> None:
    try:
        private_folder(state_dir())
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        os.utime(path, (now.timestamp(), now.timestamp()))
    except OSError as e:  # a read-only home (a container image) still has the floor it was built with
        _log.debug("cannot remember in %s when a policy was decided: %s", path, e.strerror or e)


def _show(when: dt.datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M} UTC"
