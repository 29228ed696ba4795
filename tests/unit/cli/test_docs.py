"""docs/cli.md names every command, option and exit code."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from secure_loader import errors
from secure_loader.cli.arguments import make_parser

TEXT = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()


def leaves(parser, words=()):
    subs = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not subs:
        yield " ".join(words), parser
    for name, sub in (item for a in subs for item in a.choices.items()):
        yield from leaves(sub, (*words, name))


LEAVES = dict(leaves(make_parser()))


@pytest.mark.parametrize("name", LEAVES)
def test_every_option_is_described(name):
    assert f"    secure-loader {name}" in TEXT
    section = TEXT.split(f"\n## {name if name == 'config show' else name.split()[0]}\n")[1].split("\n## ")[0]
    options = {o for a in LEAVES[name]._actions for o in a.option_strings if o.startswith("--")}
    for option in options - {"--help", "--json", "--quiet", "--verbose"}:
        assert option in section, option


def test_no_option_is_made_up():
    known = {o for p in LEAVES.values() for a in p._actions for o in a.option_strings}
    others = {"--load-format", "--signature", "--public"}  # vLLM's, model_signing's
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT)) - others <= known


def test_exit_codes_are_those_of_the_errors():
    rows = dict(re.findall(r"^\| (\d+) \| (?:[^|]|\\\|)+ \|(.*) ?\|$", TEXT, re.MULTILINE))
    for code, text in rows.items():
        for name in re.findall(r"`(\w+Error)`", text):
            assert getattr(errors, name).exit_code == int(code), name
    assert {"0", "1", "2", "3", "4", "5", "6", "7", "130", "141"} == rows.keys()
