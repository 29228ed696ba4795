"""Reading the operator's TOML: who could have written it, and values that are what they must be."""

from __future__ import annotations

import datetime as dt
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import FormatError, MissingFileError, SourceError
from .home import refuse_foreign
from .source import FileSource

_MAX_FILE = 1 << 20


def read_own(path: Path, what: str, limit: int = _MAX_FILE) -> bytes:
    """The bytes of a file that decides whom or what to believe.

    Args:
        path: The file. What is looked at is what is open, whatever somebody puts in its place.
        what: What it is called in messages.
        limit: Longest that it may be.

    Raises:
        ConfigError: Others could have written it.
        MissingFileError: No such file.
        SourceError: Not a regular file, not readable, or too long.
    """
    try:
        with FileSource(path) as source:
            refuse_foreign(os.fstat(source.fileno()), path, what)
            if source.size > limit:
                raise SourceError(f"is larger than {limit:,} bytes", path=path)
            return source.read(0, source.size)
    except MissingFileError:
        raise MissingFileError(f"no such {what}", path=path) from None


def parse(data: bytes) -> dict[str, Any]:
    """A TOML document. Raises FormatError."""
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as e:  # UnicodeDecodeError and TOMLDecodeError are ValueErrors
        raise FormatError(f"is not TOML: {e}") from None


def tables(doc: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The tables ``[[name]]``. Raises FormatError for anything else of that name."""
    found = doc.get(name, [])
    if not isinstance(found, list) or not all(isinstance(t, dict) for t in found):
        raise FormatError(f"{name} must be written as [[{name}]]")
    return found


def only(doc: Mapping[str, Any], allowed: set[str], what: str) -> None:
    """Raises FormatError for a key that is not among those allowed."""
    unknown = sorted(doc.keys() - allowed)
    if unknown:
        raise FormatError(f"{what} has the unknown key {unknown[0][:80]!r}; there are {', '.join(sorted(allowed))}")


def flag(doc: Mapping[str, Any], name: str) -> bool:
    """A truth value, false where it is left out. Raises FormatError."""
    value = doc.get(name, False)
    if type(value) is not bool:
        raise FormatError(f"{name} must be true or false")
    return value


def texts(doc: Mapping[str, Any], name: str) -> tuple[str, ...] | None:
    """A list of texts, or None where it is left out. Raises FormatError."""
    value = doc.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
        raise FormatError(f"{name} must be a list of texts, none of them empty")
    return tuple(value)


def time(doc: Mapping[str, Any], name: str) -> dt.datetime | None:
    """A date or time, UTC, or None where it is left out. Raises FormatError."""
    value = doc.get(name)
    if value is not None and not isinstance(value, (str, dt.date)):
        raise FormatError(f"{name} must be a date or a time")
    return parse_time(value)


def parse_time(text: object) -> dt.datetime | None:
    """A UTC time from RFC 3339 text, a date or what TOML makes of one; None stays None.

    Raises:
        FormatError: Neither.
    """
    if text is None:
        return None
    try:
        when = dt.datetime.fromisoformat(str(text))
        return when.replace(tzinfo=dt.UTC) if when.tzinfo is None else when.astimezone(dt.UTC)
    except (ValueError, OverflowError):
        raise FormatError(f"{text!r} is not a date or an RFC 3339 time") from None


def time_text(when: dt.datetime) -> str:
    """RFC 3339, to the second, of a UTC time."""
    return when.strftime("%Y-%m-%dT%H:%M:%SZ").rjust(20, "0")
