"""What the commands' grammars are made of: the parser, and options that several commands have."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from ..errors import ConfigError

_MAX_COUNT = 1000
_SIZE = re.compile(r"(\d+)\s*(|b|k|ki|kib|m|mi|mib)", re.IGNORECASE)


class Arguments(argparse.Namespace):
    """Parsed arguments; the attributes that every command has."""

    run: str
    json: bool = False
    quiet: bool = False
    verbose: bool = False


class Parser(argparse.ArgumentParser):
    """Errors are ours."""

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """As upstream, but a closed pipe or a full disk is not passed over."""
        (file or sys.stdout).write(self.format_help())

    def error(self, message: str) -> NoReturn:
        """A usage error, reported like every other error."""
        raise ConfigError(message, hint=f"see: {self.prog} --help")


if TYPE_CHECKING:
    from _typeshed import SupportsWrite

    Commands = argparse._SubParsersAction[Parser]  # noqa: SLF001 - what add_subparsers returns has no public name


def wants_json(words: Sequence[str]) -> bool:
    """Whether a command line that may not even parse asks for JSON."""
    return "--json" in words


def wants_trace(words: Sequence[str]) -> bool:
    """Whether a command line that may not even parse asks for details."""
    return any(word in ("-v", "--verbose") for word in words)


def command(commands: Commands, name: str, run: str, summary: str, examples: str, about: str = "") -> Parser:
    """A command with the options that all have.

    Args:
        commands: Where it belongs.
        name: Of the command.
        run: Module of this package and function that run it, as ``module:function``.
        summary: One sentence.
        examples: Command lines, one a line.
        about: Further sentences.
    """
    parser = commands.add_parser(
        name,
        help=summary[0].lower() + summary[1:].rstrip("."),
        description=wrap(f"{summary} {about}"),
        epilog="examples:\n" + "".join(f"  {line}\n" for line in examples.splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="machine-readable: results on stdout, errors on stderr")
    loudness = group.add_mutually_exclusive_group()
    loudness.add_argument("-q", "--quiet", action="store_true", help="only errors, and results that were asked for")
    loudness.add_argument("-v", "--verbose", action="store_true", help="log messages, and tracebacks of errors")
    return parser


def group(commands: Commands, name: str, summary: str, about: str, examples: str) -> Commands:
    """A command that only has commands of its own.

    Args:
        commands: Where it belongs.
        name: Of the command.
        summary: One sentence, without capital and full stop.
        about: Further sentences.
        examples: Command lines, one a line.

    Returns:
        Where its commands belong.
    """
    parser = commands.add_parser(
        name,
        help=summary,
        description=wrap(about),
        epilog="examples:\n" + "".join(f"  {line}\n" for line in examples.splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="action")


def wrap(text: str) -> str:
    """Text as help shows it."""
    # The raw formatter, which the examples need, leaves this to us.
    return textwrap.fill(text, 79)


def models(parser: argparse.ArgumentParser, text: str) -> None:
    """``--model``, patterns of model ids."""
    parser.add_argument("--model", metavar="PATTERN", action="append", dest="models", help=f"{text}; may be repeated")


def policies(parser: argparse.ArgumentParser, default: str) -> None:
    """``--policy`` and ``--remote-policy``."""
    parser.add_argument(
        "--policy",
        metavar="FILE",
        help="embed the Rego policy of FILE, which decides on the user's machine whether the model loads; it is linted, and "
        f"tested with the cases beside it (default: {default})",
    )
    parser.add_argument(
        "--remote-policy", metavar="FILE", help="carry the Rego policy of FILE for the key broker, who enforces it"
    )


def for_whom(parser: argparse.ArgumentParser, text: str) -> None:
    """``--recipient``."""
    parser.add_argument(
        "-r",
        "--recipient",
        metavar="WHO",
        action="append",
        default=[],
        dest="recipients",
        help=f"{text}: a NAME as in recipients list, the path of a public identity, or the key of a service, SCHEME:WHERE "
        "(docs/keys.md); may be repeated",
    )


def new_keys(parser: argparse.ArgumentParser, text: str) -> None:
    """``--key`` and ``--signing-key``: what is written with."""
    parser.add_argument("-k", "--key", metavar="NAME", help=text)
    parser.add_argument(
        "--signing-key", metavar="NAME", help="signing key, likewise (default: the one made with --key)"
    )
    parser.add_argument(
        "--certificate",
        metavar="FILE",
        help="put these certificates of the signing key into what is signed, for readers who trust their root: PEM, "
        "the key's own first",
    )


def key_sources(parser: argparse.ArgumentParser, text: str = "where the master key is") -> None:
    """``--keys``: where master keys are looked for."""
    parser.add_argument(
        "--keys",
        metavar="REF",
        action="append",
        help=f"{text}: a path, or SCHEME:WHERE (docs/keys.md), never the key itself; may be repeated (default: SECURE_LOADER_KEYS "
        "and the home folder)",
    )


def trusting(parser: argparse.ArgumentParser) -> None:
    """``--trust``."""
    parser.add_argument(
        "--trust",
        metavar="PATH",
        action="append",
        help="trust the signers of this file or folder, and no others; may be repeated (default: the home folder's)",
    )


def force_folder(parser: argparse.ArgumentParser) -> None:
    """``--force`` for a destination."""
    parser.add_argument("--force", action="store_true", help="replace the model folder at DST")


def positive(text: str) -> int:
    """A number from 1 on."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= _MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {_MAX_COUNT}")
    return int(text)


def size(text: str) -> int:
    """A size in bytes, from text such as 2MiB."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 2MiB or 65536")
    factor = {"": 1, "b": 1, "k": 1024, "m": 1024 * 1024}[found[2][:1].lower()]
    return int(found[1]) * factor
