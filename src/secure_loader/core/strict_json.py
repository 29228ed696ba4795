"""JSON for bytes that an attacker may have written.

The standard parser is fast and right, but it takes the last of two equal keys, accepts NaN, and will build whatever
it is told to. So a cheap scan first bounds what it may be made to build, and hooks refuse the rest.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from ..errors import FormatError

MAX_INT = 2**63 - 1
# Ten million tensors must end in an error before anything is built: an object each, and two lists inside it.
MAX_OBJECTS = 1_000_100
MAX_LISTS = 2 * MAX_OBJECTS
_MAX_DEPTH = 16
_NO_BRACKET = bytes(set(range(256)) - set(b"{}[]"))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")


class Scanner:
    """Bounds nesting and the number of containers of a JSON text that arrives in pieces.

    Costs no more memory than one piece; must see every byte in order, then :meth:`finish`.

    Args:
        what: What is scanned, for messages.
        max_depth: Deepest nesting allowed.
        max_items: Most commas allowed outside strings: members and elements of everything together. None: any number.
        per_object: Further commas allowed for every object.
    """

    def __init__(
        self,
        what: str = "header",
        max_depth: int = _MAX_DEPTH,
        *,
        max_items: int | None = None,
        per_object: int = 0,
    ) -> None:
        self._what = what
        self._max_depth = max_depth
        self._max_items = max_items
        self._per_object = per_object
        self._commas = 0
        self._in_string = False
        self._backslash = b""
        self._objects = self._lists = 0
        self._depth = 0

    def feed(self, data: bytes) -> None:
        """Scan the next piece.

        Raises:
            FormatError: Nested too deeply, or too many containers.
        """
        data = self._backslash + data
        # An escape split over two pieces waits for its second half. Only an odd run of backslashes leaves one open.
        tail = len(data) - len(data.rstrip(b"\\"))
        self._backslash = b"\\" if tail % 2 else b""
        if self._backslash:
            data = data[:-1]
        # Escapes matter only inside strings; outside, a backslash is an error that the parser will report.
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = data.split(b'"')
        outside = pieces[1::2] if self._in_string else pieces[::2]
        if len(pieces) % 2 == 0:
            self._in_string = not self._in_string
        syntax = b"".join(outside)
        self._commas += syntax.count(b",")
        brackets = syntax.translate(None, _NO_BRACKET)
        self._objects += brackets.count(b"{")
        self._lists += brackets.count(b"[")
        if self._objects > MAX_OBJECTS or self._lists > MAX_LISTS:
            raise FormatError(f"the {self._what} holds too many objects and lists")
        self._nest(brackets)

    def _nest(self, brackets: bytes) -> None:
        # Which kind closes which is for the parser to say; here only depth counts.
        rest = b"[" * self._depth + brackets.translate(_ONE_KIND)
        peaks = rest
        for _ in range(self._max_depth):
            # Taking valleys out leaves every peak at its height, until what goes up only once shows the highest.
            lower = peaks.replace(b"][", b"")
            if len(lower) == len(peaks):
                break
            peaks = lower
        if b"][" in peaks or peaks.count(b"[") > self._max_depth:
            raise FormatError(f"the {self._what} is nested deeper than {self._max_depth} levels")
        for _ in range(self._max_depth):
            # Matched pairs vanish from the inside out; what is left over is open, or closes what never was.
            rest = rest.replace(b"[]", b"")
        if b"]" in rest:
            raise FormatError(f"the {self._what} closes more brackets than it opens")
        self._depth = len(rest)

    def finish(self) -> None:
        """Raises FormatError unless every bracket and string was closed, and there are not too many items."""
        if self._depth or self._in_string or self._backslash:
            raise FormatError(f"the {self._what} is not complete JSON")
        if self._max_items is not None and self._commas > self._max_items + self._per_object * self._objects:
            raise FormatError(f"the {self._what} holds too many items")


def loads(
    text: bytes | str, *, what: str, scan: bool = False, any_number: bool = False, max_items: int | None = None
) -> Any:
    """Parse JSON strictly.

    Args:
        text: UTF-8 bytes, or a string.
        what: What is parsed, for messages.
        scan: Run a :class:`Scanner` first; needed unless the caller already did.
        max_items: As for :class:`Scanner`, with ``scan``.
        any_number: Accept fractions and negative numbers too (files of others, such as an index).

    Raises:
        FormatError: Not JSON, not UTF-8, a duplicate key, a number that is not a whole one below 2**63, a lone
            surrogate, or nested too deeply.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        if scan:
            scanner = Scanner(what, max_items=max_items)
            scanner.feed(text.encode("utf-8"))
            scanner.finish()
        doc = json.loads(
            text,
            object_pairs_hook=_object,
            parse_float=float if any_number else _no_float,
            parse_constant=_no_float,
            parse_int=int if any_number else _integer,
        )
        if "\\u" in text or "\\U" in text:
            # Escaped lone surrogates decode to strings that no UTF-8 file could hold.
            json.dumps(doc, ensure_ascii=False).encode("utf-8")
    except _StrictError as e:
        raise FormatError(f"the {what} {e}") from None
    except UnicodeError:
        raise FormatError(f"the {what} is not valid UTF-8") from None
    except (ValueError, RecursionError) as e:
        reason = e.msg if isinstance(e, json.JSONDecodeError) else type(e).__name__
        raise FormatError(f"the {what} is not valid JSON: {reason}") from None
    return doc


def dumps(doc: Any, *, sort_keys: bool = True) -> str:
    """Compact JSON, non-ASCII kept: byte for byte what CryptoTensors writes."""
    return json.dumps(doc, ensure_ascii=False, separators=(",", ":"), sort_keys=sort_keys)


def is_count(value: object) -> bool:
    """Whether a parsed value is a non-negative whole number (``True`` is not one)."""
    return type(value) is int and 0 <= value <= MAX_INT


class _StrictError(Exception):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    doc = dict(pairs)
    if len(doc) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise _StrictError(f"has the key {twice[:80]!r} twice")
    return doc


def _no_float(text: str) -> NoReturn:
    raise _StrictError(f"holds {text[:40]!r}, which is not a whole number")


def _integer(text: str) -> int:
    if len(text) > 19 or text.startswith("-") or int(text) > MAX_INT:
        raise _StrictError(f"holds a number out of range: {text[:40]}")
    return int(text)
