"""Every attack of the list has a test or a reason, and every test that docs/security.md names exists."""

from __future__ import annotations

import ast
import fnmatch
import re
from pathlib import Path

import numpy as np

from tests.attacks.coverage import NOT_IN_THIS_RELEASE, TESTED_ELSEWHERE
from tests.attacks.kit import build_file, split

TESTS = Path(__file__).parents[1]
DOCUMENT = TESTS.parent / "docs" / "security.md"


def functions() -> set[str]:
    return {
        node.name
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def rows() -> dict[int, str]:
    found = re.findall(r"^\| (\d+) \|(.*)$", DOCUMENT.read_text(), re.MULTILINE)
    table = {int(number): text for number, text in found}
    assert len(table) == len(found), "an id stands twice"
    return table


def test_every_attack_has_a_test_or_a_reason():
    names = functions()
    table = rows()
    assert len(table) > 50
    tested = {int(m[1]) for name in names if (m := re.match(r"test_a(\d\d)_", name))}
    assert sorted(tested | NOT_IN_THIS_RELEASE.keys() | TESTED_ELSEWHERE.keys()) == sorted(table)
    assert not tested & NOT_IN_THIS_RELEASE.keys()
    assert not tested & TESTED_ELSEWHERE.keys()
    assert set(TESTED_ELSEWHERE.values()) <= names


def test_every_test_that_the_document_names_exists():
    names = functions()
    named = set(re.findall(r"`(test_[a-z0-9_]+\*?)`", DOCUMENT.read_text()))
    assert len(named) > 50
    assert sorted(n for n in named if not fnmatch.filter(names, n)) == []


def test_ciphertext_is_as_long_as_the_tensor(tmp_path):
    """48: nothing is compressed, so that a length tells nothing about the bytes."""
    sizes = set()
    for i, array in enumerate(
        (np.zeros(100_000, np.uint8), np.random.default_rng(0).integers(0, 256, 100_000, np.uint8))
    ):
        doc, body = split(build_file(tmp_path / f"{i}.safetensors", {"t": array}))
        sizes.add((len(body), len(doc["__metadata__"]["__encryption__"])))
    assert sizes == {(100_000, next(iter(sizes))[1])}
