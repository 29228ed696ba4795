"""Help: there for every command, with examples, at once."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import secure_loader
from secure_loader.cli.arguments import make_parser
from secure_loader.cli.arguments_keys import ALGORITHMS
from secure_loader.core import aead


def commands(parser=None, words=()):
    """The words and parser of every command."""
    for action in (parser or make_parser())._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                yield (*words, name), sub
                yield from commands(sub, (*words, name))


COMMANDS = dict(commands())
LEAVES = {words: p for words, p in COMMANDS.items() if p.get_default("run")}


def test_there_is_what_the_design_lists():
    assert {" ".join(words) for words in LEAVES} == {
        "keygen",
        "trust list",
        "trust add",
        "trust remove",
        "trust export",
        "trust request",
        "trust revoke",
        "recipients new",
        "recipients list",
        "recipients add",
        "recipients remove",
        "recipients export",
        "encrypt",
        "decrypt",
        "verify",
        "inspect",
        "rewrap",
        "sign",
        "publish",
        "policy lint",
        "policy test",
        "bench",
        "env",
        "config show",
    }


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_of_every_command(cli, words):
    out = cli(*words, "--help").out
    assert out.startswith(f"usage: secure-loader {' '.join(words)} ")
    assert "examples:\n  " in out
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
def test_every_command_has_the_common_options(words):
    options = {option for action in LEAVES[words]._actions for option in action.option_strings}
    assert {"--json", "-q", "--quiet", "-v", "--verbose", "-h", "--help"} <= options


@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
def test_examples_parse(words):
    lines = re.findall(r"^  .*?\bsecure-loader (.*)$", LEAVES[words].epilog, re.MULTILINE)
    assert lines
    for line in lines:
        for part in line.split(" | "):
            text = part.removeprefix("secure-loader ").split(" > ")[0]
            if part != "less":
                make_parser().parse_args([word.strip("'") for word in text.split()])


def test_main_help_and_version(cli):
    out = cli("--help").out
    for (first, *_), _ in commands():
        assert f"    {first}" in out
    assert "exit codes:" in out
    assert cli("--version").out == f"secure-loader {secure_loader.__version__}\n"


def test_algorithms_are_those_of_core():
    assert set(ALGORITHMS) == set(aead.ALGORITHMS)


def run_python(*args):
    source = str(Path(secure_loader.__file__).parents[1])
    return subprocess.run(
        [sys.executable, *args], env={"PYTHONPATH": source}, capture_output=True, text=True, check=True, timeout=60
    )


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from secure_loader.cli import main; code = main(['encrypt', '--help']);"
        "heavy = {'torch', 'numpy', 'transformers', 'vllm', 'safetensors', 'cryptography', 'tqdm'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy or code else 0)"
    )
    run_python("-c", code)


@pytest.mark.parametrize("words", [["env"], ["trust", "list"], ["config", "show"]])
def test_commands_import_no_framework(home, words):
    code = (
        f"import sys; from secure_loader.cli import main; code = main({words});"
        "heavy = {'torch', 'numpy', 'transformers', 'vllm', 'safetensors'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy or code else 0)"
    )
    source = str(Path(secure_loader.__file__).parents[1])
    subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": source, "SECURE_LOADER_HOME": str(home)}, check=True
    )


def test_help_comes_at_once():
    def seconds():
        start = time.perf_counter()
        run_python("-m", "secure_loader", "--help")
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.2
