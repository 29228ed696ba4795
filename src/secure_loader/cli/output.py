"""What the commands print: for a person, or as JSON.

Names inside a file were chosen by whoever wrote it: nothing reaches a terminal with control characters in it. And what
looks like key material on the command line is not repeated in any message.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from ..core.secrets import looks_like_key
from ..errors import SecureLoaderError, WriteError
from .grammar import Arguments, wants_json, wants_trace

_PROGRAM = "secure-loader"
_PIECE = 1 << 14
_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}


class Output:
    """Where a command's words go.

    Args:
        words: The command line. Errors found while it is parsed already follow its ``--json``.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.json = wants_json(words)
        self.quiet = False
        self.verbose = wants_trace(words)
        values = {word.partition("=")[2] if word.startswith("--") else word for word in words}
        self._secrets = sorted((v for v in values if v and looks_like_key(v)), key=len, reverse=True)
        for stream in (sys.stdout, sys.stderr):
            # A path may hold bytes that are no text, and a terminal may be no UTF-8.
            reconfigure: Callable[..., None] | None = getattr(stream, "reconfigure", None)
            if reconfigure is not None:
                reconfigure(errors="backslashreplace")

    def configure(self, args: Arguments) -> None:
        """Take over ``--json``, ``-q`` and ``-v``."""
        self.json, self.quiet, self.verbose = args.json, args.quiet, args.verbose

    @property
    def progress(self) -> bool | None:
        """For functions that can show a bar."""
        return False if self.quiet or self.json else None

    def result(self, document: Mapping[str, Any], lines: Iterable[str], *, report: bool = False) -> None:
        """Print the result on stdout.

        Args:
            document: As JSON.
            lines: For a person; :func:`clean` has been over whatever came from elsewhere.
            report: It only says that the work was done: ``-q`` leaves it out.
        """
        if self.json:
            self.text(json.dumps(document, indent=2, default=str) + "\n")
        elif not (self.quiet and report):
            self.text("".join(f"{line}\n" for line in lines))

    def text(self, text: str) -> None:
        """Print a document on stdout as it is.

        Raises:
            WriteError: The disk behind stdout is full, and the like.
        """
        with _writing():
            # In pieces: under PYTHONUNBUFFERED Python forgets what a closing pipe did not take of a long write.
            for start in range(0, len(text), _PIECE):
                sys.stdout.write(text[start : start + _PIECE])

    def flush(self) -> None:
        """Make sure that everything was printed; raises as :meth:`text`."""
        with _writing():
            sys.stdout.flush()

    def note(self, text: str) -> None:
        """Say something useful that is not the result."""
        if not (self.json or self.quiet):
            print(clean(text), file=sys.stderr)

    def warn(self, text: str) -> None:
        """Say something that should not be missed."""
        if self.quiet:
            return
        text = self._redact(text)
        if self.json:
            print(json.dumps({"warning": text}), file=sys.stderr)
        else:
            print(f"{_PROGRAM}: {self._paint_error('warning:', 'yellow')} {clean(text)}", file=sys.stderr)

    def error(self, error: SecureLoaderError) -> int:
        """Report an error on stderr; returns the exit code."""
        if self.verbose:
            self._trace(error)
        hint = None if error.hint is None else self._redact(error.hint)
        if self.json:
            document = {
                "type": type(error).__name__,
                "exit_code": error.exit_code,
                "message": self._redact(error.message),
                "hint": hint,
                "path": None if error.path is None else self._redact(error.path),
                "tensor": error.tensor,
            }
            print(json.dumps({"error": document}), file=sys.stderr)
            return error.exit_code
        where = f"{error.path}: " if error.path is not None else ""
        which = f"tensor {error.tensor!r}: " if error.tensor is not None else ""
        self._complain(f"{where}{which}{error.message}", hint)
        return error.exit_code

    def unexpected(self, error: Exception) -> int:
        """Report what should not have happened; returns the exit code."""
        if self.verbose:
            self._trace(error)
        what = self._redact(f"{type(error).__name__}: {error}")
        if self.json:
            document = {"type": type(error).__name__, "exit_code": 1, "message": self._redact(str(error))}
            print(json.dumps({"error": document}), file=sys.stderr)
        else:
            self._complain(f"unexpected {what}", None if self.verbose else "run it again with -v for the traceback")
        return 1

    def interrupted(self) -> None:
        """Say that Ctrl-C was heard."""
        if self.json:
            document = {"type": "KeyboardInterrupt", "exit_code": 130, "message": "interrupted"}
            print(json.dumps({"error": document}), file=sys.stderr)
        else:
            print(f"{_PROGRAM}: interrupted", file=sys.stderr)

    @property
    def log_level(self) -> int:
        """Which log records to show."""
        return logging.ERROR if self.quiet else logging.DEBUG if self.verbose else logging.WARNING

    def log_handler(self) -> logging.Handler:
        """Shows log records as warnings and notes."""
        return _LogHandler(self)

    def paint(self, text: str, style: str) -> str:
        """``text`` in a style, where stdout is a terminal."""
        return _paint(text, style, sys.stdout)

    def _complain(self, text: str, hint: str | None) -> None:
        label = self._paint_error("error:", "red")
        print(f"{_PROGRAM}: {label} {clean(self._redact(text))}", file=sys.stderr)
        if hint is not None:
            print(f"{_PROGRAM}: hint: {clean(hint)}", file=sys.stderr)

    def _paint_error(self, text: str, style: str) -> str:
        return _paint(text, style, sys.stderr)

    def _trace(self, error: BaseException) -> None:
        for line in self._redact("".join(traceback.format_exception(error))).splitlines():
            print(clean(line), file=sys.stderr)

    def _redact(self, text: str) -> str:
        for secret in self._secrets:
            for spelling in {secret, secret.strip(), repr(secret)[1:-1]}:
                text = text.replace(spelling, "(not shown: looks like key material)")
        return text


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as e:
        drop_stdout()
        raise WriteError(f"the output cannot be written: {e.strerror or e}") from None


def drop_stdout() -> None:
    """Keep the interpreter from flushing into a closed pipe or a full disk once more at exit."""
    with suppress(OSError, ValueError):  # where it is not a real file, nothing will be flushed either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _LogHandler(logging.Handler):
    def __init__(self, out: Output) -> None:
        super().__init__()
        self._out = out

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self._out.warn(record.getMessage())
        else:
            self._out.note(f"{record.name}: {record.getMessage()}")


def clean(text: str) -> str:
    """``text`` with everything escaped that could move a terminal's cursor or turn the direction of writing."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def human_bytes(n: int) -> str:
    """``270,000,000`` as ``257.5 MiB``."""
    if n < 1024:
        return f"{n} B"
    size = float(n)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1023.95:
            return f"{size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{size / 1024:.1f}".removesuffix(".0") + " TiB"


def human_seconds(seconds: float) -> str:
    """``0.0213`` as ``21 ms``."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def count(n: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def facts(pairs: Iterable[tuple[str, str]], indent: str = "  ") -> list[str]:
    """Lines of labels and values, aligned; pairs without value are left out."""
    kept = [(label, value) for label, value in pairs if value]
    width = max((len(label) for label, _ in kept), default=0)
    return [f"{indent}{label:<{width}}  {clean(value)}" for label, value in kept]


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = (), indent: str = "  "
) -> list[str]:
    """Lines of a table; the columns whose indices are in ``right`` are flush right."""
    cells = [list(head), *([clean(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    flush = set(right)
    return [
        (
            indent
            + "  ".join(
                c.rjust(w) if i in flush else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
            )
        ).rstrip()
        for row in cells
    ]


def _paint(text: str, style: str, stream: TextIO) -> str:
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"
