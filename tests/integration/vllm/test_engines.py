"""Whole engines: the same answers as with plain weights, and the same refusals as everywhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from secure_loader.core.keys.hybrid import Identity
from secure_loader.core.keys.jwk import b64url
from secure_loader.core.secrets import Secret
from tests import models
from tests.integration.keys.openbao import OpenBao, running
from tests.integration.vllm import engine_runs
from tests.integration.vllm.publisher import Publisher, write_key

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

MODELS: dict[str, dict[str, Any]] = {
    "qwen3-tied": {"arch": "qwen3", "tie": True},
    "qwen3-shards": {"arch": "qwen3", "shards": 3},
    "llama": {"arch": "llama"},
    "llama-tied-shards": {"arch": "llama", "shards": 3, "tie": True},
}


def _adapter(folder: Path, hidden: int = 128) -> Path:
    """A LoRA adapter for the query projections of a tiny Qwen3, as PEFT writes it."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    generator = torch.Generator().manual_seed(7)
    weights = {}
    for layer in range(2):
        stem = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{stem}.lora_A.weight"] = torch.randn(8, hidden, generator=generator)
        weights[f"{stem}.lora_B.weight"] = torch.randn(256, 8, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def openbao(tmp_path_factory: pytest.TempPathFactory, publisher: Publisher) -> Iterator[OpenBao]:
    """A key service that has the master key at ``secret/models/served``."""
    with running(tmp_path_factory.mktemp("openbao")) as server:
        server.put("models/served", publisher.master.document())
        policy = 'path "secret/data/models/*" { capabilities = ["read"] }'
        server.do("POST", "sys/policies/acl/models", {"policy": policy})
        yield server


def _by_reference(folder: Path, secure: Path, publisher: Publisher, openbao: OpenBao) -> dict[str, dict[str, Any]]:
    """The same model with its key from a service, and one that was encrypted for an identity."""
    identity = Identity("server-id", Secret(bytes(range(32))))
    private, public, token = folder / "server.id.jwk", folder / "server.jwk", folder / "token"
    write_key(private, identity.document(b64url))
    write_key(public, identity.public().document(b64url))
    token.touch(0o600)
    token.write_text(openbao.token("models"))
    for_server = publisher.publish(folder / "qwen3-shards", folder / "for-server", recipients=[str(public)])
    vault = {
        "keys": f"vault:https://127.0.0.1:{openbao.port}/secret/data/models/served",
        "key_private_hosts": ["127.0.0.1"],
    }
    return {
        "vault": {"llm": {"model": str(secure), "model_loader_extra_config": vault}, "reload": True},
        "identity": {"llm": {"model": str(for_server), "model_loader_extra_config": {"keys": str(private)}}},
    }


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory,
    publisher: Publisher,
    minilm: Path,
    engine_environment: dict[str, str],
    openbao: OpenBao,
) -> dict[str, Any]:
    """Every engine run of this module, in one process."""
    folder = tmp_path_factory.mktemp("engines")
    jobs: dict[str, dict[str, Any]] = {}
    for name, options in MODELS.items():
        plain = models.tiny_model(folder / name, **options)
        secure = publisher.publish(plain, folder / f"{name}-secure")
        jobs[f"{name} auto"] = {"llm": {"model": str(plain), "load_format": "auto"}}
        jobs[f"{name} secure"] = {"llm": {"model": str(secure), "load_format": "secure"}, "reload": True}
    secure = folder / "qwen3-shards-secure"
    eager = {"model": str(secure), "load_format": "secure", "model_loader_extra_config": {"lazy": False}}
    jobs["qwen3-shards eager"] = {"llm": eager, "reload": True}
    jobs["auto on encrypted"] = {"llm": {"model": str(secure), "load_format": "auto"}}
    jobs["secure on plain"] = {"llm": {"model": str(folder / "qwen3-tied"), "load_format": "secure"}}
    tampered = shutil.copytree(secure, folder / "tampered")
    with max(tampered.glob("*.safetensors")).open("r+b") as f:
        f.seek(-1, 2)
        last = f.read(1)[0]
        f.seek(-1, 2)
        f.write(bytes([last ^ 1]))
    jobs["tampered"] = {"llm": {"model": str(tampered), "load_format": "secure"}}
    adapter = _adapter(folder / "adapter")
    adapters = {"plain": str(adapter), "encrypted": str(publisher.publish(adapter, folder / "adapter-secure"))}
    lora = {"enable_lora": True, "max_lora_rank": 8}
    plain_base = {"model": str(folder / "qwen3-tied"), "load_format": "auto"}
    secure_base = {"model": str(folder / "qwen3-tied-secure"), "load_format": "secure"}
    jobs["adapters on plain"] = {"llm": plain_base | lora, "adapters": adapters}
    jobs["adapters on secure"] = {"llm": secure_base | lora, "adapters": adapters}
    embedding = {"embed": True, "llm": {"model": str(minilm), "load_format": "auto", "runner": "pooling"}}
    jobs["minilm auto"] = embedding
    secure_minilm = str(publisher.publish(minilm, folder / "minilm-secure"))
    jobs["minilm secure"] = embedding | {"llm": {"model": secure_minilm, "load_format": "secure", "runner": "pooling"}}
    for name, job in _by_reference(folder, secure, publisher, openbao).items():
        jobs[name] = job | {"llm": job["llm"] | {"load_format": "secure"}}
    vault = {"VAULT_CACERT": str(openbao.authority), "VAULT_TOKEN_FILE": str(folder / "token")}
    return engine_runs.run(jobs, folder, engine_environment | vault)


@pytest.mark.parametrize("name", MODELS)
def test_same_tokens_and_probabilities(results, name):
    assert results[f"{name} secure"]["first"] == results[f"{name} auto"]["first"]


@pytest.mark.parametrize("name", MODELS)
def test_reload_weights(results, name):
    assert results[f"{name} secure"]["reloaded"] == results[f"{name} auto"]["first"]


def test_eager_is_the_same(results):
    assert results["qwen3-shards eager"]["first"] == results["qwen3-shards auto"]["first"]
    assert results["qwen3-shards eager"]["reloaded"] == results["qwen3-shards auto"]["first"]


@pytest.mark.parametrize("way", ["vault", "identity"])
def test_keys_by_reference(results, publisher, way):
    assert results[way].get("first") == results["qwen3-shards auto"]["first"]
    assert publisher.master.document()["k"] not in results["log"]


def test_a_key_service_is_asked_again_for_a_reload(results):
    assert results["vault"]["reloaded"] == results["qwen3-shards auto"]["first"]


def test_embeddings_are_the_same(results):
    assert results["minilm secure"]["vectors"] == results["minilm auto"]["vectors"]


def test_log_reads_as_usual(results):
    assert "Loading encrypted safetensors checkpoint shards: 100% Completed | 3/3" in results["log"]
    assert "release 1, signed by publisher" in results["log"]


def test_auto_on_encrypted_names_the_cure(results):
    refusal = results["auto on encrypted"]
    assert refusal["error"] == "EncryptedFileError"
    assert "--load-format secure" in refusal["message"]


def test_plain_folder_is_refused(results):
    assert results["secure on plain"]["error"] == "ManifestError"


def test_tampered_shard_is_refused(results):
    refusal = results["tampered"]
    assert refusal["error"] == "AuthenticationError"
    assert "tensor '" in refusal["message"]


def test_encrypted_adapter(results):
    on_plain, on_secure = results["adapters on plain"], results["adapters on secure"]
    assert on_plain["plain"] != on_plain["first"], "the adapter does nothing: the test is worthless"
    assert on_plain["encrypted"] == on_plain["plain"]
    assert on_secure["encrypted"] == on_plain["plain"]


def test_secure_model_refuses_plain_adapter(results):
    refusal = results["adapters on secure"]["plain"]
    assert refusal["error"] == "NotEncryptedError"
    assert "insecure_allow_plaintext_adapters" in refusal["message"]
