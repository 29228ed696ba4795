"""Keys, and models encrypted with them once for all tests of this folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import secure_loader
from secure_loader import MasterKey, SigningKey
from secure_loader.core.aead import ALGORITHMS
from secure_loader.core.secrets import Secret
from tests import models


@dataclass(frozen=True)
class Publisher:
    """A publisher's keys, and what a licensee configures to read their models."""

    master: MasterKey
    signing: SigningKey
    trust: Path

    @property
    def config(self) -> dict[str, Any]:
        return {"keys": [self.master], "trust": [str(self.trust)]}

    @property
    def load(self) -> dict[str, Any]:
        """Keyword arguments for from_pretrained."""
        return {"loader": "secure", "loader_config": self.config}

    @property
    def keys(self) -> dict[str, Any]:
        """Keyword arguments for writing."""
        return {"key": self.master, "signing_key": self.signing}

    def encrypt(self, plain: Path, target: Path, **options: Any) -> Path:
        secure_loader.encrypt_model(plain, target, **self.keys, **options)
        return target


def make_publisher(folder: Path, name: str) -> Publisher:
    master = MasterKey(f"{name}-master", ALGORITHMS["aes256gcm"], Secret(bytearray(os.urandom(32))))
    signing = SigningKey(f"{name}-sign", Secret(bytearray(os.urandom(32))))
    trust = folder / f"{name}.json"
    trust.write_text(json.dumps({"name": name, "key": signing.verify_key().document()}))
    trust.chmod(0o644)
    return Publisher(master, signing, trust)


@dataclass(frozen=True)
class Pair:
    """A model, plain and encrypted."""

    plain: Path
    secure: Path


@pytest.fixture(scope="session")
def publisher(tmp_path_factory) -> Publisher:
    return make_publisher(tmp_path_factory.mktemp("trust"), "publisher")


@pytest.fixture(scope="session")
def stranger(tmp_path_factory) -> Publisher:
    return make_publisher(tmp_path_factory.mktemp("trust"), "stranger")


@pytest.fixture(scope="session")
def tied(tmp_path_factory, publisher, tiny_qwen3) -> Pair:
    """Qwen3 in one file, tied embeddings."""
    return Pair(tiny_qwen3, publisher.encrypt(tiny_qwen3, tmp_path_factory.mktemp("secure") / "tied"))


@pytest.fixture(scope="session")
def sharded(tmp_path_factory, publisher, tiny_llama_shards) -> Pair:
    """Llama in three files."""
    return Pair(tiny_llama_shards, publisher.encrypt(tiny_llama_shards, tmp_path_factory.mktemp("secure") / "shards"))


@pytest.fixture(scope="session")
def moe(tmp_path_factory, publisher) -> Pair:
    """A mixture of experts, whose weights upstream merges while it loads them."""
    plain = models.tiny_model(tmp_path_factory.mktemp("plain") / "moe", "qwen3_moe")
    return Pair(plain, publisher.encrypt(plain, tmp_path_factory.mktemp("secure") / "moe"))


@pytest.fixture
def copy_of(tmp_path) -> Callable[[Path], Path]:
    """A copy of a folder, to be tampered with."""

    def copy(folder: Path) -> Path:
        target = tmp_path / "copy" / folder.name
        shutil.copytree(folder, target)
        return target

    return copy


def flip(path: Path, offset: int = -1) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def same_weights(a: Any, b: Any) -> bool:
    """Whether two models have the same weights, bit for bit, dtypes included."""
    import torch

    one, two = a.state_dict(), b.state_dict()
    return one.keys() == two.keys() and all(
        t.dtype == two[n].dtype
        and torch.equal(t.view(torch.uint8) if t.dim() else t, two[n].view(torch.uint8) if t.dim() else two[n])
        for n, t in one.items()
    )


def logits(model: Any) -> Any:
    """Of one fixed prompt."""
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor([[1, 7, 42, 101, 256, 3]])).logits
