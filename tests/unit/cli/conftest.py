"""A home folder, a small model, and two ways to run the command: in this process, and as a user does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import secure_loader
from secure_loader.cli import main


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Stdout as JSON."""
        return json.loads(self.out)

    @property
    def error(self) -> dict[str, Any]:
        """The error on stderr, as JSON."""
        return json.loads(self.err.splitlines()[-1])["error"]


Run = Callable[..., Result]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder, not yet made."""
    for name in [name for name in os.environ if name.startswith("SECURE_LOADER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SECURE_LOADER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def cli(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process, in ``tmp_path``; ``code`` is what it must return; None takes any."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object, code: int | None = 0) -> Result:
        capsys.readouterr()
        got = main([str(word) for word in words])
        result = Result(got, *capsys.readouterr())
        assert code in (None, result.code), result
        return result

    return run


@pytest.fixture
def command(home: Path, tmp_path: Path) -> Run:
    """Run a command line in a process of its own, in ``tmp_path``; ``code`` as for ``cli``."""
    source = str(Path(secure_loader.__file__).parents[1])

    def run(*words: object, code: int | None = 0, stdin: bytes | None = None, **environment: str) -> Result:
        done = subprocess.run(
            [sys.executable, "-m", "secure_loader", *map(str, words)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": source} | environment,
            input=stdin,
            capture_output=True,
            timeout=60,
            check=False,
        )
        result = Result(done.returncode, done.stdout.decode(), done.stderr.decode())
        assert code in (None, result.code), result
        return result

    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A plain model folder in two shards."""
    folder = tmp_path / "model"
    folder.mkdir()
    rng = np.random.default_rng(7)
    shards = {
        "model-00001-of-00002.safetensors": {"embed.weight": rng.standard_normal((100, 64)).astype("f4")},
        "model-00002-of-00002.safetensors": {
            "layer.weight": rng.standard_normal((64, 64)).astype("f2"),
            "layer.bias": rng.standard_normal(64).astype("f2"),
            "steps": np.array(3, dtype="i8"),
        },
    }
    for name, tensors in shards.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "none"}')
    return folder


@pytest.fixture
def encrypted(cli: Run, model: Path, tmp_path: Path) -> Path:
    """The model, encrypted and signed by alice, the only one who has keys here."""
    cli("keygen", "alice")
    cli("encrypt", model, tmp_path / "encrypted", "--model-id", "alice/tiny")
    return tmp_path / "encrypted"
