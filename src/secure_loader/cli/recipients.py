"""recipients."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..core.keys import recipients
from ..core.keys.generate import generate_identity
from ..core.keys.hybrid import PublicIdentity
from ..core.source import read_small_file
from ..core.trust_files import check_name
from ..errors import ConfigError, SecureLoaderError
from .grammar import Arguments
from .output import Output, clean, facts, table


def new(args: Arguments, out: Output) -> None:
    """``recipients new NAME``."""
    made = generate_identity(args.name, force=args.force)
    if made.replaced:
        out.warn(
            f"replaced the identity named {made.name!r}. Models encrypted for the old one no longer load with the new one; the "
            f"old files are {', '.join(map(str, made.replaced))}"
        )
    out.result(
        asdict(made),
        [
            out.paint(f"Made an identity for {made.name}", "bold"),
            *facts([("key id", made.key_id), ("thumbprint", made.thumbprint)]),
            "",
            *table(
                ["file", "for whom"],
                [
                    [str(made.public_file), "those who encrypt for it: secure-loader recipients add FILE"],
                    [str(made.key_file), "nobody else; keep a backup"],
                ],
            ),
        ],
        report=True,
    )


def show(args: Arguments, out: Output) -> None:
    """``recipients list``."""
    del args
    found = list(recipients.list_files())
    rows = [_row(path, public) for path, public in found if isinstance(public, PublicIdentity)]
    problems = [(path, problem) for path, problem in found if isinstance(problem, SecureLoaderError)]
    lines = (
        table(["name", "key id", "thumbprint"], [[r["name"], r["key_id"], r["thumbprint"]] for r in rows], indent="")
        if rows
        else ["No recipient is known. Add one with: secure-loader recipients add FILE"]
    )
    out.result({"recipients": rows, "unusable": [str(path) for path, _ in problems]}, lines)
    for path, problem in problems[:-1]:
        out.warn(f"{path}: {problem.message}")
    if problems:
        raise problems[-1][1]


def add(args: Arguments, out: Output) -> None:
    """``recipients add FILE``."""
    public = recipients.parse_public(_read(args.file), "standard input" if args.file == "-" else args.file)
    path = recipients.add(public, _name(args.name, public, args.file), force=args.force)
    row = _row(path, public)
    out.result(
        row,
        [
            out.paint(f"Known from now on: {row['name']}", "bold"),
            *facts([("key id", public.kid), ("thumbprint", row["thumbprint"]), ("file", str(path))]),
        ],
        report=True,
    )
    out.note("Compare the thumbprint with the one that its owner tells you in another way.")


def remove(args: Arguments, out: Output) -> None:
    """``recipients remove NAME``."""
    path = recipients.remove(args.name)
    out.result({"removed": args.name, "file": str(path)}, [f"Forgotten: {clean(args.name)}"], report=True)


def export(args: Arguments, out: Output) -> None:
    """``recipients export NAME``."""
    path = recipients.recipient_file(args.name)
    if not path.exists():
        raise recipients.unknown(args.name)
    out.text(recipients.document_bytes(recipients.read_public(path)).decode())


def _read(file: str) -> bytes:
    if file != "-":
        return read_small_file(file, recipients.MAX_PUBLIC_FILE)
    data = sys.stdin.buffer.read(recipients.MAX_PUBLIC_FILE + 1)
    if len(data) > recipients.MAX_PUBLIC_FILE:
        raise ConfigError(f"standard input holds more than {recipients.MAX_PUBLIC_FILE:,} bytes")
    return data


def _row(path: Path, public: PublicIdentity) -> dict[str, Any]:
    return {"name": path.stem, "key_id": public.kid, "thumbprint": public.thumbprint(), "file": str(path)}


def _name(name: str | None, public: PublicIdentity, file: str) -> str:
    if name is not None:
        return check_name(name)
    for candidate in ("" if file == "-" else Path(file).stem, public.kid):
        try:
            return check_name(candidate)
        except ConfigError:
            continue
    raise ConfigError("neither the file nor its kid can serve as a name", hint="say one with --name")
