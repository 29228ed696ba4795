"""Every test runs offline, with a key and trust store of its own, and with no setting of the person who runs it."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import models


def pytest_configure(config: pytest.Config) -> None:
    """Before any framework is imported: most of these are read once, at import."""
    for name in [name for name in os.environ if name.startswith("SECURE_LOADER_")]:
        del os.environ[name]
    os.umask(0o022)  # a settings or trust file that the group may write is refused
    scratch = Path(tempfile.mkdtemp(prefix="secure-loader-tests-"))
    config.add_cleanup(lambda: shutil.rmtree(scratch, ignore_errors=True))
    os.environ |= {
        "SECURE_LOADER_HOME": str(scratch / "home"),  # for fixtures that live longer than one test
        "HF_HOME": str(scratch / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",  # or tokenizers warns whenever a test forks
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; unset, vLLM takes nearly all memory of the machine, and fails if it cannot
    }
    for name in ("HF_HUB_CACHE", "HF_TOKEN", "VLLM_PLUGINS", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        os.environ.pop(name, None)


@pytest.fixture
def no_collections() -> Iterator[None]:
    """For tests that send signals to this process: Python drops what a signal raises while the collector deletes something."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def secure_loader_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty ``SECURE_LOADER_HOME`` for this test alone."""
    for name in [name for name in os.environ if name.startswith("SECURE_LOADER_")]:
        monkeypatch.delenv(name)
    home = tmp_path_factory.mktemp("home", numbered=True)
    monkeypatch.setenv("SECURE_LOADER_HOME", str(home))
    return home


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, plain; read only."""
    return models.smollm2()


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2, plain; read only."""
    return models.minilm()


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 in one file, with tied embeddings; read only."""
    return models.tiny_model(tmp_path_factory.mktemp("tiny") / "qwen3", tie=True)


@pytest.fixture(scope="session")
def tiny_llama_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in three files with an index; read only."""
    return models.tiny_model(tmp_path_factory.mktemp("tiny") / "llama", "llama", shards=3)
