"""The attacks, and the tests that are found for each; the table in docs/security.md is made of them.

    python -m tests.attacks.coverage --write

``attacks.toml`` says what is attacked and what happens. Which tests show it is looked up: vectors that carry the id,
functions ``test_aNN_*`` of this folder, and what the file names beside them.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.vectors import iter_vectors

TESTS = Path(__file__).parents[1]
DOCUMENT = TESTS.parent / "docs" / "security.md"
ROWS = Path(__file__).with_name("attacks.toml")
BEGIN = "<!-- made of tests/attacks/attacks.toml and the tests, by: python -m tests.attacks.coverage --write -->"
END = "<!-- end of what is made -->"


@dataclass(frozen=True)
class Attack:
    """A row of the list.

    Attributes:
        id: Its number.
        what: What is attacked, and how.
        outcome: What happens.
        more: Names of tests elsewhere, or of files of them.
        untested: Why there is no test, where there is none.
    """

    id: int
    what: str
    outcome: str
    more: tuple[str, ...] = ()
    untested: str | None = None

    def tests(self) -> list[str]:
        """What shows it, as the table has it."""
        found = ["vectors"] if self.id in vector_ids() else []
        found += [f"`test_a{self.id:02}_*`"] if self.id in own_ids() else []
        return found + [f"`{name}`" for name in self.more]


def attacks() -> list[Attack]:
    """The list, by id."""
    rows = tomllib.loads(ROWS.read_text())["attack"]
    return sorted((Attack(**row | {"more": tuple(row.get("more", ()))}) for row in rows), key=lambda a: a.id)


@cache
def functions() -> frozenset[str]:
    """Names of all test functions."""
    return frozenset(
        node.name
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


@cache
def own_ids() -> frozenset[int]:
    """Attacks that functions are named after."""
    return frozenset(int(m[1]) for name in functions() if (m := re.match(r"test_a(\d+)_", name)))


@cache
def vector_ids() -> frozenset[int]:
    """Attacks that test vectors stand for."""
    return frozenset(int(name[1:]) for vector in iter_vectors() for name in vector.attacks)


def table() -> str:
    """The table, as the document has it between its marks."""
    lines = ["| id | attack | what happens | tests |", "|---|---|---|---|"]
    for attack in attacks():
        tests = ", ".join(attack.tests()) or f"none: {attack.untested}"
        lines.append(f"| {attack.id} | {attack.what} | {attack.outcome} | {tests} |")
    return "\n".join(lines)


def written(text: str) -> str:
    """A document, with the table as it is now."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("the document has no marks")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        DOCUMENT.write_text(written(DOCUMENT.read_text()))
    else:
        print(table())
