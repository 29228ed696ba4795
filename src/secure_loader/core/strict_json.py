"""JSON for bytes that an attacker may have written.

The standard parser is fast and right, but it takes the last of two equal keys, accepts NaN, and will build whatever
it is told to. So a cheap scan first bounds what it may be made to build, and hooks refuse the rest.
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterator
from typing import Any, NoReturn

from ..errors import FormatError

MAX_INT = 2**63 - 1
# Ten million tensors must end in an error before anything is built: an object each, and two lists inside it.
MAX_OBJECTS = 1_000_100
MAX_LISTS = 2 * MAX_OBJECTS
_MAX_DEPTH = 16
# The garbage collector, looking again and again at what only grows, takes most of the time of reading large texts.
_LARGE = 1 << 18
# What is made of one piece on the way fits into memory that is at hand and in the processor's cache.
_PIECE = 1 << 16
_BLANKS = b" \t\n\r"
_NO_BRACKET = bytes(set(range(256)) - set(b"{}[]"))
_ONE_DIGIT = bytes.maketrans(b"123456789", b"000000000")
_LONG = b"0" * len(str(MAX_INT))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")


class Scanner:
    """Bounds nesting and the number of containers of a JSON text that arrives in pieces.

    Costs no more memory than one piece; must see every byte in order, then :meth:`finish`.

    Attributes:
        blanks: Number of white-space bytes outside strings.
        escapes: Whether any escape but of a quote or a backslash was seen.
        odd_numbers: Whether any number may have a sign or exceed ``MAX_INT``.

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
        self.blanks = 0
        self.escapes = False
        self.odd_numbers = False
        self._digits = b""
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
        for start in range(0, len(data), _PIECE):
            self._look(data[start : start + _PIECE])

    def _look(self, data: bytes) -> None:
        data = self._backslash + data
        # An escape split over two pieces waits for its second half. Only an odd run of backslashes leaves one open.
        tail = len(data) - len(data.rstrip(b"\\"))
        self._backslash = b"\\" if tail % 2 else b""
        if self._backslash:
            data = data[:-1]
        # Escapes matter only inside strings; outside, a backslash is an error that the parser will report.
        if b"\\" in data:
            # By something as long, which costs half of taking them out.
            data = data.replace(b"\\\\", b"__").replace(b'\\"', b"__")
            self.escapes |= b"\\" in data
        pieces = data.split(b'"')
        outside = pieces[1::2] if self._in_string else pieces[::2]
        if len(pieces) % 2 == 0:
            self._in_string = not self._in_string
        syntax = b"".join(outside)
        self._commas += syntax.count(b",")
        self.blanks += len(syntax) - len(syntax.translate(None, _BLANKS))
        digits = self._digits + syntax.translate(_ONE_DIGIT)
        self.odd_numbers |= b"-" in digits or _LONG in digits
        self._digits = digits[1 - len(_LONG) :]
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
            less = rest.replace(b"[]", b"")
            if len(less) == len(rest):
                break
            rest = less
        if b"]" in rest:
            raise FormatError(f"the {self._what} closes more brackets than it opens")
        self._depth = len(rest)

    def is_compact(self, padding: int = 0) -> bool:
        """Whether the text, if :func:`loads` accepts it, is proven to be what :func:`dumps` makes of it, unsorted.

        Compact JSON of whole numbers leaves a writer three choices: white space, escapes, and the order of members.
        True says that there is no white space and that only what must be escaped is. False says nothing.

        Args:
            padding: Spaces behind the document that do not count.
        """
        return self.blanks == padding and not self.escapes

    def finish(self) -> None:
        """Raises FormatError unless every bracket and string was closed, and there are not too many items."""
        if self._depth or self._in_string or self._backslash:
            raise FormatError(f"the {self._what} is not complete JSON")
        if self._max_items is not None and self._commas > self._max_items + self._per_object * self._objects:
            raise FormatError(f"the {self._what} holds too many items")


def scan_all(text: str, *, what: str, max_items: int | None = None) -> Scanner:
    """A scanner that has seen a whole text; arguments and errors as for :class:`Scanner`.

    Raises:
        FormatError: As :class:`Scanner`, or a lone surrogate.
    """
    scanner = Scanner(what, max_items=max_items)
    try:
        scanner.feed(text.encode("utf-8"))
    except UnicodeError:
        raise FormatError(f"the {what} is not valid UTF-8") from None
    scanner.finish()
    return scanner


def loads(
    text: bytes | str, *, what: str, scan: bool = False, scanned: Scanner | None = None, any_number: bool = False
) -> Any:
    """Parse JSON strictly.

    Args:
        text: UTF-8 bytes, or a string.
        what: What is parsed, for messages.
        scan: Run a :class:`Scanner` first; needed unless the caller already did.
        scanned: The scanner that has seen this text, for what it knows already.
        any_number: Accept fractions and negative numbers too (files of others, such as an index).

    Raises:
        FormatError: Not JSON, not UTF-8, a duplicate key, a number that is not a whole one below 2**63, a lone
            surrogate, or nested too deeply.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        if scan:
            scanned = scan_all(text, what=what)
        doc = json.loads(
            text,
            object_pairs_hook=_object,
            parse_float=float if any_number else _no_float,
            parse_constant=_no_float,
            # The parser knows int, and calls nothing for it.
            parse_int=int if any_number or (scanned is not None and not scanned.odd_numbers) else _integer,
        )
        if (scanned is None or scanned.escapes) and "\\u" in text:
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


@contextlib.contextmanager
def building(nbytes: int) -> Iterator[None]:
    """Hold the garbage collector off while objects are made of ``nbytes`` bytes of text, none of them in a cycle.

    Short texts do not need it, and a collector that somebody else switched off stays so.
    """
    if nbytes < _LARGE or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


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
    # A sign sorts before every digit. Called for every number of a header.
    if len(text) > 19 or text < "0" or (number := int(text)) > MAX_INT:
        raise _StrictError(f"holds a number out of range: {text[:40]}")
    return number
