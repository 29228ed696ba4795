"""Models, keys and an installed plugin for the vLLM tests."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests import models
from tests.integration.vllm.publisher import Publisher

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def publisher(tmp_path_factory: pytest.TempPathFactory) -> Publisher:
    """Keys and a home folder that trusts them."""
    return Publisher.create(tmp_path_factory.mktemp("publisher") / "home")


@pytest.fixture(autouse=True)
def _trusting_home(secure_loader_home: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECURE_LOADER_HOME", str(publisher.home))


@pytest.fixture(scope="session")
def engine_environment(publisher: Publisher, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a process that runs vLLM with our plugin, whether or not the package is installed."""
    path = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    if not any(point.name == "secure_loader" for point in entry_points(group="vllm.general_plugins")):
        folder = tmp_path_factory.mktemp("site")
        info = folder / "secure_loader_entry_points-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: secure-loader-entry-points\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[vllm.general_plugins]\nsecure_loader = secure_loader.vllm:register\n")
        path.insert(0, str(folder))
    return {"SECURE_LOADER_HOME": str(publisher.home), "PYTHONPATH": os.pathsep.join(path)}


@pytest.fixture(scope="session")
def secure_qwen3(tiny_qwen3: Path, publisher: Publisher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``tiny_qwen3``, encrypted; read only."""
    return publisher.publish(tiny_qwen3, tmp_path_factory.mktemp("secure") / "qwen3")


@pytest.fixture(scope="session")
def secure_llama_shards(
    tiny_llama_shards: Path, publisher: Publisher, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """``tiny_llama_shards``, encrypted; read only."""
    return publisher.publish(tiny_llama_shards, tmp_path_factory.mktemp("secure") / "llama")


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random mixture-of-experts model; read only."""
    return models.tiny_model(tmp_path_factory.mktemp("tiny") / "moe", "qwen3_moe")


@pytest.fixture(scope="session")
def secure_moe(tiny_moe: Path, publisher: Publisher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``tiny_moe``, encrypted; read only."""
    return publisher.publish(tiny_moe, tmp_path_factory.mktemp("secure") / "moe")
