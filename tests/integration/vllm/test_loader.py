"""The loader by itself, without an engine around it."""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from secure_loader.core import manifest as mf
from secure_loader.errors import (
    AuthenticationError,
    ConfigError,
    EncryptedFileError,
    KeyAccessError,
    ManifestError,
    NotEncryptedError,
    OfflineError,
    UntrustedSignerError,
)
from tests.integration.vllm.publisher import Publisher, write_key

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

KEY = bytes(range(200, 232))


@pytest.fixture(scope="module", autouse=True)
def _registered():
    from secure_loader.vllm import register

    register()
    register()


def loader(extra=None, **settings):
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    return get_model_loader(LoadConfig(load_format="SECURE", model_loader_extra_config=extra or {}, **settings))


def source(folder, **options):
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    return DefaultModelLoader.Source(str(folder), None, **options)


def read(folder, extra=None, **options):
    import torch

    found = {}
    for name, tensor in loader(extra, use_tqdm_on_load=False)._get_weights_iterator(source(folder, **options)):
        assert name not in found
        found[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return found


def plain(folder):
    from safetensors.torch import load_file

    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def same(a, b):
    import torch

    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def copy(folder, target):
    return shutil.copytree(folder, target)


def flip(path, offset):
    with path.open("r+b") as f:
        f.seek(offset, 2 if offset < 0 else 0)
        byte = f.read(1)[0]
        f.seek(offset, 2 if offset < 0 else 0)
        f.write(bytes([byte ^ 1]))


def open_files(folder):
    gc.collect()
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that listed them
            found.append(descriptor.readlink())
    return [path for path in found if path.is_relative_to(folder) and path.suffix == ".safetensors"]


def test_registered_once_and_for_all():
    from secure_loader.vllm.loader import SecureModelLoader

    assert type(loader()) is SecureModelLoader


@pytest.mark.parametrize("lazy", [True, False])
def test_reads_every_weight(tiny_llama_shards, secure_llama_shards, lazy):
    import torch
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_default_torch_dtype(torch.float16):
        found = read(secure_llama_shards, {"lazy": lazy})
    assert same(found, plain(tiny_llama_shards))
    assert (
        found.keys()
        == json.loads((tiny_llama_shards / "model.safetensors.index.json").read_text())["weight_map"].keys()
    )


@pytest.mark.parametrize("lazy", [True, False])
def test_weights_own_their_memory(secure_qwen3, tiny_qwen3, lazy):
    kept = dict(loader({"lazy": lazy})._get_weights_iterator(source(secure_qwen3)))
    for tensor in kept.values():
        clone = tensor.clone()
        tensor.zero_()
        assert not tensor.any()
        del clone
    assert same(read(secure_qwen3), plain(tiny_qwen3))


def test_shared_settings_stay_as_they_are():
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    shared = LoadConfig(load_format="secure", model_loader_extra_config={"threads": 2, "enable_weights_track": False})
    made = get_model_loader(shared)
    made.load_config.safetensors_load_strategy = "torchao"
    assert shared.load_format == "secure"
    assert shared.model_loader_extra_config == {"threads": 2, "enable_weights_track": False}
    assert shared.safetensors_load_strategy is None
    assert made.enable_weights_track is False


@pytest.mark.parametrize(
    "extra",
    [
        {"keyz": "file:/x"},
        {"threads": True},
        {"threads": 0},
        {"num_threads": 2, "threads": 2},
        {"lazy": "no"},
        {"insecure_allow_plaintext": 1},
        {"integrity": "none"},
        {"enable_multithread_load": 1},
    ],
)
def test_wrong_settings(extra):
    with pytest.raises(ConfigError):
        loader(extra)


@pytest.mark.parametrize(
    "keys",
    [
        base64.b64encode(KEY).decode(),
        base64.urlsafe_b64encode(KEY).decode().rstrip("="),
        KEY.hex(),
        f"env:{KEY.hex()}",
        [base64.b64encode(KEY[:16]).decode()],
        {"kty": "oct", "k": "secret"},
        [{"kty": "oct", "k": "secret"}],
        '{"kty": "oct", "k": "secret"}',
        "-----BEGIN PRIVATE KEY-----",
    ],
)
@pytest.mark.parametrize("name", ["keys", "key"])
def test_key_material_is_refused_and_not_echoed(keys, name):
    with pytest.raises(ConfigError) as caught:
        loader({name: keys})
    for secret in (KEY.hex(), base64.b64encode(KEY).decode()[:20], "c2Vj", "secret"):
        assert secret not in str(caught.value).replace("load format secure", "")


@pytest.mark.parametrize(
    "keys",
    [
        "env:MASTER",
        "file:/run/secrets/master.jwk",
        "/home/somebody/configuration/keys",
        ["env:MODEL_MASTER_KEY_2026", "keys/master.jwk"],
    ],
)
def test_references_are_taken(keys):
    assert loader({"keys": keys, "num_threads": 2, "enable_multithread_load": True}).options.config.threads == 2


def test_key_by_reference(secure_qwen3, tiny_qwen3, publisher, monkeypatch, tmp_path):
    (tmp_path / "trust").mkdir()
    shutil.copy(publisher.home / "trust" / "publisher.json", tmp_path / "trust")
    monkeypatch.setenv("SECURE_LOADER_HOME", str(tmp_path))
    with pytest.raises(KeyAccessError):
        read(secure_qwen3)
    monkeypatch.setenv("MY_MASTER", json.dumps(publisher.master.document()))
    assert same(read(secure_qwen3, {"keys": "env:MY_MASTER"}), plain(tiny_qwen3))


def test_wrong_key(secure_qwen3, publisher, tmp_path):
    wrong = publisher.master.document() | {"k": base64.urlsafe_b64encode(KEY).decode().rstrip("=")}
    write_key(tmp_path / "wrong.jwk", wrong)
    with pytest.raises(KeyAccessError):
        read(secure_qwen3, {"keys": str(tmp_path / "wrong.jwk")})


def test_stranger_is_refused(secure_qwen3, tmp_path, monkeypatch):
    stranger = Publisher.create(tmp_path / "stranger")
    monkeypatch.setenv("SECURE_LOADER_HOME", str(stranger.home))
    (stranger.home / "trust" / "publisher.json").unlink()
    with pytest.raises(UntrustedSignerError):
        read(secure_qwen3)


@pytest.mark.parametrize("lazy", [True, False])
def test_tampered_bytes(secure_llama_shards, tmp_path, lazy):
    folder = copy(secure_llama_shards, tmp_path / "model")
    flip(max(folder.glob("*.safetensors")), -1)
    with pytest.raises(AuthenticationError):
        read(folder, {"lazy": lazy})
    assert open_files(folder) == []


def test_missing_shard(secure_llama_shards, tmp_path):
    folder = copy(secure_llama_shards, tmp_path / "model")
    max(folder.glob("*.safetensors")).unlink()
    with pytest.raises(ManifestError, match="missing"):
        read(folder)


def test_shard_of_another_folder(secure_llama_shards, secure_qwen3, tmp_path):
    folder = copy(secure_llama_shards, tmp_path / "model")
    shutil.copy(secure_qwen3 / "model.secure.safetensors", max(folder.glob("*.safetensors")))
    with pytest.raises(ManifestError):
        read(folder)


def test_plain_folder(tiny_qwen3, caplog):
    with pytest.raises(ManifestError):
        read(tiny_qwen3)
    assert same(read(tiny_qwen3, {"insecure_allow_plaintext": True}), plain(tiny_qwen3))


@pytest.mark.parametrize("lazy", [True, False])
def test_closing_early_leaves_nothing_open(secure_llama_shards, lazy):
    weights = loader({"lazy": lazy})._get_weights_iterator(source(secure_llama_shards))
    name, tensor = next(weights)
    assert open_files(secure_llama_shards)
    weights.close()
    del name, tensor
    assert open_files(secure_llama_shards) == []


def test_lazy_weights_outlive_the_iterator(secure_llama_shards, tiny_llama_shards):
    kept = dict(loader()._get_weights_iterator(source(secure_llama_shards)))
    assert same({name: t.clone() for name, t in kept.items()}, plain(tiny_llama_shards))
    del kept
    assert open_files(secure_llama_shards) == []


def test_all_weights_of_a_model_with_secondary_ones(secure_qwen3, secure_llama_shards, tiny_qwen3, tiny_llama_shards):
    model = SimpleNamespace(secondary_weights=[source(secure_llama_shards, prefix="second.")])
    config = SimpleNamespace(model=str(secure_qwen3), revision=None)
    names = [name for name, _ in loader().get_all_weights(config, model)]
    expected = [*plain(tiny_qwen3), *(f"second.{name}" for name in plain(tiny_llama_shards))]
    assert sorted(names) == sorted(expected)


def test_plain_secondary_weights_need_consent(secure_qwen3, tiny_llama_shards):
    model = SimpleNamespace(secondary_weights=[source(tiny_llama_shards, prefix="second.")])
    config = SimpleNamespace(model=str(secure_qwen3), revision=None)
    with pytest.raises(ManifestError):
        list(loader().get_all_weights(config, model))
    weights = loader({"insecure_allow_plaintext": True}).get_all_weights(config, model)
    assert any(name.startswith("second.") for name, _ in weights)


def test_experts_of_other_ranks_are_not_even_decrypted(secure_moe, tiny_moe, tmp_path):
    from secure_loader import safe_open

    folder = copy(secure_moe, tmp_path / "moe")
    shard = folder / "model.secure.safetensors"
    with safe_open(shard) as f:
        name = next(n for n in f.keys() if ".experts.3." in n)  # noqa: SIM118
        offset = f.file.header.body_start + f.get_tensor_info(name).start
    flip(shard, offset)
    reader = loader({"lazy": False})
    reader.local_expert_ids = {0, 1}
    names = {name for name, _ in reader._get_weights_iterator(source(folder))}
    assert names == {n for n in plain(tiny_moe) if not (".experts." in n and int(n.split(".experts.")[1][0]) > 1)}
    with pytest.raises(AuthenticationError):
        read(folder, {"lazy": False})


def test_shards_that_the_model_does_not_use(secure_llama_shards, tiny_llama_shards):
    weight_map = json.loads((tiny_llama_shards / "model.safetensors.index.json").read_text())["weight_map"]
    last = max(weight_map.values())
    found = read(secure_llama_shards, is_unused_weight=lambda name: weight_map[name] == last)
    assert found.keys() == {name for name, shard in weight_map.items() if shard != last}
    assert same(read(secure_llama_shards, is_unused_weight=lambda _: True), plain(tiny_llama_shards))


def test_subfolder_and_patterns(tiny_qwen3, tiny_llama_shards, publisher, tmp_path):
    nested = copy(tiny_qwen3, tmp_path / "plain")
    copy(tiny_llama_shards, nested / "second")
    folder = publisher.publish(nested, tmp_path / "secure")
    assert same(read(folder), plain(tiny_qwen3))
    assert same(read(folder, subfolder="second"), plain(tiny_llama_shards))
    some = read(folder, subfolder="second", allow_patterns_overrides=["*-00001-of-*.safetensors"])
    assert 0 < len(some) < len(plain(tiny_llama_shards))


def test_dense_layers_that_vllm_reads_by_itself(tiny_qwen3, publisher, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    folder = copy(tiny_qwen3, tmp_path / "plain")
    modules = [{"path": "", "type": "a.Transformer"}, {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "2_Dense").mkdir()
    save_file({"linear.weight": torch.ones(2, 2)}, folder / "2_Dense" / "model.safetensors")
    with pytest.raises(EncryptedFileError, match=r"--exclude linear\.\*"):
        read(publisher.publish(folder, tmp_path / "secure"))
    clear = publisher.publish(folder, tmp_path / "clear", exclude=["linear.*"])
    assert same(read(clear), plain(tiny_qwen3))
    assert load_file(clear / "2_Dense" / "model.safetensors")["linear.weight"].all()


def test_torchao_is_not_supported(secure_qwen3):
    reader = loader(safetensors_load_strategy="torchao")
    with pytest.raises(ConfigError, match="torchao"):
        reader._get_weights_iterator(source(secure_qwen3))


# The hub.


@pytest.fixture
def cache(tmp_path, secure_llama_shards):
    """A hub cache as it is after a download: a link per file, and only what was asked for."""
    repository = tmp_path / "hub" / "models--me--llama"
    snapshot = repository / "snapshots" / ("a" * 40)
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    (repository / "blobs").mkdir()
    snapshot.mkdir(parents=True)
    for file in secure_llama_shards.iterdir():
        shutil.copy(file, repository / "blobs" / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    return tmp_path / "hub"


def test_offline_repository(cache, tiny_llama_shards, secure_llama_shards):
    (snapshot,) = (cache / "models--me--llama" / "snapshots").iterdir()
    (snapshot / "tokenizer.json").unlink()
    reader = loader(download_dir=str(cache))
    assert len(list(reader._get_weights_iterator(source("me/llama")))) == len(plain(tiny_llama_shards))
    reader.download_model(SimpleNamespace(model="me/llama", revision=None))
    # With HF_HUB_OFFLINE vLLM has replaced the id by the snapshot's folder.
    assert same(read(snapshot), plain(tiny_llama_shards))
    blob = cache / "models--me--llama" / "blobs" / "tokenizer_config.json"
    blob.write_text(blob.read_text() + " ")
    with pytest.raises(ManifestError, match="tokenizer_config"):
        read(snapshot)


def test_offline_without_the_repository(tmp_path):
    with pytest.raises(OfflineError):
        loader(download_dir=str(tmp_path))._get_weights_iterator(source("me/nothing"))


class Hub:
    """What the loader needs of the hub's client: ``snapshot_download``, from a folder, with a list of what was taken."""

    def __init__(self, origin, cache):
        self.origin, self.cache, self.fetched = origin, cache, []

    def snapshot_download(self, repo_id, *, allow_patterns, **_):
        from huggingface_hub.utils import filter_repo_objects

        for name in filter_repo_objects(mf.list_files(self.origin), allow_patterns=allow_patterns):
            target = self.cache / name
            if not target.exists():
                self.fetched.append(name)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.origin / name, target)
        return str(self.cache)


@pytest.fixture
def hub(secure_llama_shards, tmp_path, monkeypatch):
    from secure_loader.vllm import fetch

    origin = copy(secure_llama_shards, tmp_path / "origin")
    (origin / "pytorch_model.bin").write_bytes(b"not signed, and not asked for")
    client = Hub(origin, tmp_path / "hub" / "models--me--llama" / "snapshots" / ("b" * 40))
    client.cache.mkdir(parents=True)
    monkeypatch.setattr(fetch, "hf_api", lambda: client)
    return client


def test_download(hub, tiny_llama_shards, tmp_path):
    found = dict(loader(download_dir=str(tmp_path))._get_weights_iterator(source("me/llama")))
    assert found.keys() == plain(tiny_llama_shards).keys()
    assert hub.fetched[0] == mf.MANIFEST
    assert "model.safetensors.index.secure.json" in hub.fetched
    assert "pytorch_model.bin" not in hub.fetched


def test_settings_are_verified_without_weights(hub, tmp_path):
    from secure_loader.vllm.guards import check_engine_args

    settings = {"load_format": "secure", "model_loader_extra_config": {}, "download_dir": str(tmp_path)}
    # EngineArgs itself would look for the repository in the cache: the tests are offline.
    args = SimpleNamespace(model="me/llama", revision=None, tokenizer=None, hf_config_path=None, **settings)
    args.trust_remote_code = False
    check_engine_args(args)
    assert args.revision == "b" * 40  # what vLLM goes on to read is what was verified
    assert "config.json" in hub.fetched
    assert not any(name.endswith(".safetensors") for name in hub.fetched)
    hub.cache.joinpath("config.json").write_text("{}")
    with pytest.raises(ManifestError):
        check_engine_args(args)


def test_untrusted_repository_costs_one_small_file(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("SECURE_LOADER_HOME", str(tmp_path / "nobody"))
    with pytest.raises(UntrustedSignerError):
        loader(download_dir=str(tmp_path))._get_weights_iterator(source("me/llama"))
    assert hub.fetched == [mf.MANIFEST]


# The guards.


def engine_args(model, load_format, **settings):
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=str(model), load_format=load_format, **settings)


@pytest.mark.parametrize("load_format", ["auto", "hf", "safetensors", "mistral", "fastsafetensors", "runai_streamer"])
def test_other_formats_refuse_at_once(secure_qwen3, load_format):
    with pytest.raises(EncryptedFileError, match="--load-format secure"):
        engine_args(secure_qwen3, load_format).create_engine_config()


def test_other_formats_leave_plain_models_and_dummies_alone(secure_qwen3, tiny_qwen3):
    from secure_loader.vllm.guards import check_engine_args

    check_engine_args(engine_args(secure_qwen3, "dummy"))
    check_engine_args(engine_args(tiny_qwen3, "auto"))


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "fastsafetensors", "instanttensor"])
@pytest.mark.parametrize("keep_names", [True, False])
def test_stock_loader_refuses(tiny_llama_shards, publisher, tmp_path, load_format, keep_names):
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    folder = publisher.publish(tiny_llama_shards, tmp_path / "secure", keep_names=keep_names)
    with pytest.raises(EncryptedFileError, match="--load-format secure"):
        get_model_loader(LoadConfig(load_format=load_format))._get_weights_iterator(source(folder))


def test_stock_loader_reads_plain_models(tiny_llama_shards):
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    weights = get_model_loader(LoadConfig(use_tqdm_on_load=False))._get_weights_iterator(source(tiny_llama_shards))
    assert same(dict(weights), plain(tiny_llama_shards))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_settings_are_verified_before_vllm_reads_them(secure_qwen3, tmp_path, name):
    folder = copy(secure_qwen3, tmp_path / "model")
    (folder / name).write_text((folder / name).read_text() + " ")
    with pytest.raises(ManifestError, match=name):
        engine_args(folder, "secure").create_engine_config()


def test_added_code_is_refused(secure_qwen3, tmp_path):
    folder = copy(secure_qwen3, tmp_path / "model")
    (folder / "modeling.py").write_text("raise SystemExit")
    with pytest.raises(ManifestError, match=r"modeling\.py"):
        engine_args(folder, "secure", trust_remote_code=True).create_engine_config()


def test_tied_embeddings_are_seen_through_the_secure_names(secure_qwen3, secure_llama_shards):
    from vllm.transformers_utils.config import checkpoint_has_lm_head, get_safetensors_params_metadata

    assert checkpoint_has_lm_head(str(secure_qwen3)) is False
    assert checkpoint_has_lm_head(str(secure_llama_shards)) is True
    metadata = get_safetensors_params_metadata(str(secure_qwen3))
    assert metadata["model.norm.weight"]["dtype"] == "BF16"


def test_plain_adapter_is_refused(tmp_path, tiny_qwen3):
    from secure_loader.vllm.guards import demand_encrypted_adapter

    shutil.copy(tiny_qwen3 / "model.safetensors", tmp_path / "adapter_model.safetensors")
    with pytest.raises(NotEncryptedError):
        demand_encrypted_adapter(tmp_path)
    with pytest.raises(NotEncryptedError):
        demand_encrypted_adapter(tmp_path / "nothing")
