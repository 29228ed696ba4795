"""72: key providers of other packages, installed as packages are, and imported only when they are asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import secure_loader
from tests.attacks.kit import KEY, SIGN, build_file

EXAMPLE = Path(__file__).parents[2] / "examples" / "key_provider.py"
LOAD = """
import sys
from secure_loader import safe_open
path, reference, trust = sys.argv[1:]
try:
    with safe_open(path, "numpy", keys=reference.split(","), trust=trust, strict=True) as f:
        print(sorted(f.get_tensors()))
finally:
    print(sorted({"key_provider", "hostile"} & sys.modules.keys()))
"""


@pytest.fixture
def site(tmp_path):
    """A folder of installed packages: the example's, and one that claims schemes nobody asked it to serve."""
    site = tmp_path / "site"
    for name, module, points in (
        ("pass-keys", EXAMPLE.read_text(), {"pass": "key_provider:PassProvider"}),
        ("hostile", "print('HOSTILE')", dict.fromkeys(("file", "env", "fd", "age", "evil"), "hostile:Provider")),
    ):
        info = site / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{scheme} = {target}" for scheme, target in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[secure_loader.key_providers]", *lines, ""]))
        (site / f"{points.popitem()[1].partition(':')[0]}.py").write_text(module)
    return site


@pytest.fixture
def load(tmp_path, site):
    """Load a model in a process of its own, with a ``pass`` that knows one entry; returns exit code and output."""
    model = build_file(tmp_path / "x.safetensors")
    (tmp_path / "trust.json").write_text(json.dumps(SIGN.verify_key().document()))
    key = tmp_path / "key.jwk"
    key.write_text(json.dumps(KEY.document()))
    key.chmod(0o600)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "pass").write_text(f'#!/bin/sh\n[ "$1 $2" = "show models/alice" ] && cat {key}\n')
    (programs / "pass").chmod(0o755)
    source = Path(secure_loader.__file__).parents[1]
    environment = os.environ | {
        "PYTHONPATH": f"{site}:{source}",
        "PATH": f"{programs}:{os.environ['PATH']}",
        "THE_KEY": key.read_text(),
    }

    def run(reference: str) -> tuple[int, str]:
        words = [sys.executable, "-c", LOAD, model, reference.replace("@", str(key)), tmp_path / "trust.json"]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout + done.stderr

    return run


def test_a72_a_provider_that_breaks_says_so_in_our_words(load, site):
    (site / "hostile.py").write_text(
        "class Provider:\n    def resolve(self, reference, request):\n        raise ValueError('token=hvs.1234567')\n"
    )
    code, text = load("evil:somewhere/secret-path")
    assert code == 1
    assert "KeyAccessError" in text
    assert "the key provider of evil:… failed: ValueError in hostile.py:3" in text
    assert "hvs.1234567" not in text
    assert "secret-path" not in text.replace("evil:somewhere/secret-path']", "")


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= 50


def test_a72_a_provider_of_another_package(load):
    assert load("pass:models/alice") == (0, "['big', 'clear', 'small']\n['key_provider']\n")


@pytest.mark.parametrize("reference", ["@", "file:@", "env:THE_KEY"])
def test_a72_no_other_package_is_imported_or_takes_over(load, reference):
    assert load(reference) == (0, "['big', 'clear', 'small']\n[]\n")


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("pass:models/bob", "pass cannot show 'models/bob'"),
        ("pass:../x y", "is not the name of an entry"),
        ("pass:--help", "is not the name of an entry"),
    ],
)
def test_a72_what_the_example_refuses(load, reference, message):
    code, text = load(reference)
    assert code == 1
    assert "KeyAccessError" in text
    assert message in text
    assert "hostile" not in text
