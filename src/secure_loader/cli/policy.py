"""policy lint and policy test."""

from __future__ import annotations

from ..core import policy_lint
from ..errors import ConfigError
from .grammar import Arguments
from .output import Output, clean, count, table


def lint(args: Arguments, out: Output) -> None:
    """``policy lint FILE``."""
    _read(args.file)
    out.result({"file": args.file, "ok": True}, [f"{out.paint('Fine', 'green')} {clean(args.file)}"], report=True)


def test(args: Arguments, out: Output) -> None:
    """``policy test FILE [CASES]``."""
    text = _read(args.file)
    where = args.cases or str(policy_lint.cases_beside(args.file))
    results = policy_lint.run_cases(text, policy_lint.read_cases(where, text))
    failed = [r for r in results if not r.passed]
    rows = [["ok" if r.passed else "FAILED", r.name, r.expect, r.found, r.why or ""] for r in results]
    document = {
        "file": args.file,
        "ok": not failed,
        "cases": [{"name": r.name, "expect": r.expect, "found": r.found, "why": r.why} for r in results],
    }
    out.result(document, table(["", "case", "expected", "found", "why"], rows), report=not failed)
    if failed:
        raise ConfigError(f"{count(len(failed), 'case')} of {len(results):,} failed", path=args.file)


def _read(file: str) -> str:
    text = policy_lint.read_policy(file)
    try:
        policy_lint.lint(text)
    except ConfigError as e:
        raise ConfigError(e.message, hint=e.hint, path=file) from None
    return text
