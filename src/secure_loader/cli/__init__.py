"""The ``secure-loader`` command.

Results go to stdout, everything else to stderr. Exit codes: 0 fine, 1 unexpected, 2 usage, 3 verification failed,
4 policy denied, 5 key unavailable, 6 bad format, 7 files; 130 interrupted, 141 nobody reads the output any more.

What a command needs is imported when it runs: help and usage errors come at once.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ..core.keys.asking import may_ask
from ..errors import SecureLoaderError, SourceError
from .arguments import make_parser
from .grammar import Arguments
from .output import Output, drop_stdout

INTERRUPTED = 128 + signal.SIGINT
NO_READER = 128 + signal.SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments; None takes those of the process.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    out = Output(words)
    try:
        try:
            args = make_parser().parse_args(words, Arguments())
            out.configure(args)
            with _logging(out), may_ask():
                _command(args.run)(args, out)
        except SystemExit as e:  # --help and --version have printed what was asked for
            code = e.code if isinstance(e.code, int) else 0
            out.flush()
            return code
        out.flush()
    except BrokenPipeError:
        drop_stdout()
        return NO_READER
    except KeyboardInterrupt:
        out.interrupted()
        return INTERRUPTED
    except SecureLoaderError as e:
        return out.error(e)
    except OSError as e:
        where = None if e.filename is None else os.fsdecode(e.filename)
        return out.error(SourceError(e.strerror or "input or output failed", path=where))
    except Exception as e:  # noqa: BLE001 - the last resort: one line for the user, the traceback on request
        return out.unexpected(e)
    return 0


def _command(name: str) -> Callable[[Arguments, Output], None]:
    module, _, function = name.partition(":")
    command: Callable[[Arguments, Output], None] = getattr(importlib.import_module(f".{module}", __name__), function)
    return command


@contextmanager
def _logging(out: Output) -> Iterator[None]:
    """Show the package's log records for as long as a command runs."""
    logger, handler = logging.getLogger("secure_loader"), out.log_handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(out.log_level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
