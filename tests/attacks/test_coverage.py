"""Every attack of the list has a test or a reason, and docs/security.md shows which."""

from __future__ import annotations

import fnmatch
import re

import numpy as np
import pytest

from tests.attacks.coverage import BEGIN, DOCUMENT, END, TESTS, attacks, functions, own_ids, vector_ids, written
from tests.attacks.kit import build_file, split


def test_every_attack_has_a_test_or_a_reason():
    found = attacks()
    assert len(found) > 50
    assert len({a.id for a in found}) == len(found), "an id stands twice"
    assert own_ids() | vector_ids() <= {a.id for a in found}, "a test is named after an attack that is not in the list"
    for attack in found:
        assert bool(attack.tests()) == (attack.untested is None), f"attack {attack.id}: tests, or why there are none"


def test_the_table_is_that_of_the_tests():
    text = DOCUMENT.read_text()
    assert text == written(text), "run: python -m tests.attacks.coverage --write"
    assert text.count(BEGIN) == text.count(END) == 1
    with pytest.raises(ValueError, match="marks"):
        written("no marks")


def test_every_test_that_is_named_exists():
    named = {name for a in attacks() for name in a.more}
    files = {path.name for path in TESTS.rglob("test_*.py")}
    assert sorted(named - functions() - files) == []
    mentioned = set(re.findall(r"`(test_[a-z0-9_]+\*?)`", DOCUMENT.read_text()))
    assert len(mentioned) > 50
    assert sorted(n for n in mentioned if not fnmatch.filter(functions(), n)) == []


def test_ciphertext_is_as_long_as_the_tensor(tmp_path):
    """48: nothing is compressed, so that a length tells nothing about the bytes."""
    sizes = set()
    for i, array in enumerate(
        (np.zeros(100_000, np.uint8), np.random.default_rng(0).integers(0, 256, 100_000, np.uint8))
    ):
        doc, body = split(build_file(tmp_path / f"{i}.safetensors", {"t": array}))
        sizes.add((len(body), len(doc["__metadata__"]["__encryption__"])))
    assert sizes == {(100_000, next(iter(sizes))[1])}
