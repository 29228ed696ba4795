"""What ``loader="secure"`` returns is bit for bit what the plain load returns."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline

import secure_loader
import secure_loader.hf
from secure_loader.errors import ConfigError, ManifestError

from .conftest import logits, same_weights


@pytest.mark.parametrize("kind", ["tied", "sharded", "moe"])
def test_causal_lm(kind, request, publisher):
    pair = request.getfixturevalue(kind)
    plain = AutoModelForCausalLM.from_pretrained(pair.plain)
    secure = AutoModelForCausalLM.from_pretrained(pair.secure, **publisher.load)
    assert same_weights(plain, secure)
    assert torch.equal(logits(plain), logits(secure))
    assert secure.config.name_or_path == str(pair.secure)
    assert not secure.training


def test_embeddings_stay_tied(tied, publisher):
    model = AutoModelForCausalLM.from_pretrained(tied.secure, **publisher.load)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_base_model(sharded, publisher):
    plain, info = AutoModel.from_pretrained(sharded.plain, output_loading_info=True)
    secure, ours = AutoModel.from_pretrained(sharded.secure, output_loading_info=True, **publisher.load)
    assert same_weights(plain, secure)
    assert info == ours
    assert ours["unexpected_keys"]  # the head, which a base model has no use for


def test_concrete_class(tied, publisher):
    plain = transformers.Qwen3ForCausalLM.from_pretrained(tied.plain)
    secure = transformers.Qwen3ForCausalLM.from_pretrained(tied.secure, **publisher.load)
    assert same_weights(plain, secure)


def test_concrete_class_with_a_config_of_ones_own(tied, publisher):
    config = transformers.Qwen3Config.from_pretrained(tied.plain)
    secure = transformers.Qwen3ForCausalLM.from_pretrained(tied.secure, config=config, **publisher.load)
    assert same_weights(transformers.Qwen3ForCausalLM.from_pretrained(tied.plain), secure)


@pytest.mark.parametrize("dtype", ["auto", torch.float32, torch.float16, "bfloat16"])
def test_dtypes(dtype, sharded, publisher):
    plain = AutoModelForCausalLM.from_pretrained(sharded.plain, dtype=dtype)
    secure = AutoModelForCausalLM.from_pretrained(sharded.secure, dtype=dtype, **publisher.load)
    assert same_weights(plain, secure)
    assert torch.equal(logits(plain), logits(secure))


@pytest.mark.parametrize(
    "options",
    [
        {"device_map": "cpu"},
        {"device_map": "auto"},
        {"device_map": "auto", "max_memory": {"cpu": "1GB"}},
        {"low_cpu_mem_usage": True},
        {"disable_mmap": True},
        {"weights_only": True},
    ],
    ids=str,
)
def test_ways_of_loading(options, sharded, publisher):
    plain = AutoModelForCausalLM.from_pretrained(sharded.plain, **options)
    secure = AutoModelForCausalLM.from_pretrained(sharded.secure, **options, **publisher.load)
    assert same_weights(plain, secure)


@pytest.mark.parametrize("kind", ["sharded", "moe"])
def test_disk_offload(kind, request, publisher, tmp_path):
    """The forward pass reads weights from the encrypted files; what upstream writes anew is encrypted."""
    pair = request.getfixturevalue(kind)
    layers = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    places = layers | {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    plain = AutoModelForCausalLM.from_pretrained(pair.plain, device_map=places, offload_folder=tmp_path / "plain")
    secure = AutoModelForCausalLM.from_pretrained(
        pair.secure, device_map=places, offload_folder=tmp_path / "secure", **publisher.load
    )
    assert torch.equal(logits(plain), logits(secure))
    written = list((tmp_path / "secure").rglob("*.safetensors")) if (tmp_path / "secure").exists() else []
    assert bool(written) == (kind == "moe")
    for file in written:
        assert b"__secure_loader__" in file.read_bytes()[:4096]
        with pytest.raises(secure_loader.SecureLoaderError):
            secure_loader.safe_open(file, keys=publisher.master, trust=publisher.trust, strict=True)


def test_offload_ends_with_the_model(sharded, publisher, tmp_path):
    from secure_loader.hf import routing

    places = {"model": "disk", "lm_head": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(
        sharded.secure, device_map=places, offload_folder=tmp_path / "offload", **publisher.load
    )
    shard = next(sharded.secure.glob("*.safetensors"))
    assert routing._offloaded.find(shard) is not None
    del model
    import gc

    gc.collect()
    assert routing._offloaded.find(shard) is None
    with pytest.raises(secure_loader.errors.EncryptedFileError):
        routing.offload_safe_open(shard, framework="pt")


@pytest.mark.parametrize("how", ["argument", "model_kwargs"])
def test_pipeline(how, tied, publisher):
    options = publisher.load if how == "argument" else {"model_kwargs": publisher.load}
    plain = pipeline("text-generation", str(tied.plain), device="cpu")
    secure = pipeline("text-generation", str(tied.secure), device="cpu", **options)
    assert secure("Hello", do_sample=False, max_new_tokens=8) == plain("Hello", do_sample=False, max_new_tokens=8)
    assert "loader" not in secure.tokenizer.init_kwargs


def test_pipeline_wants_a_name(tied, publisher):
    model = AutoModelForCausalLM.from_pretrained(tied.secure, **publisher.load)
    with pytest.raises(ConfigError, match="folder or repo id"):
        pipeline("text-generation", model=model, **publisher.load)


def test_tokenizer_and_config_take_the_argument_too(tied, publisher):
    secure = AutoTokenizer.from_pretrained(tied.secure, **publisher.load)
    assert secure("Hello").input_ids == AutoTokenizer.from_pretrained(tied.plain)("Hello").input_ids
    assert "loader" not in secure.init_kwargs
    config = AutoConfig.from_pretrained(tied.secure, **publisher.load)
    assert not hasattr(config, "loader")


def test_plain_names(tied, publisher, tmp_path):
    folder = publisher.encrypt(tied.plain, tmp_path / "kept", keep_names=True)
    assert (folder / "model.safetensors").exists()
    secure = AutoModelForCausalLM.from_pretrained(folder, **publisher.load)
    assert same_weights(AutoModelForCausalLM.from_pretrained(tied.plain), secure)


def test_clear_tensors(tied, publisher, tmp_path):
    folder = publisher.encrypt(tied.plain, tmp_path / "partly", include=["*mlp*"])
    secure = AutoModelForCausalLM.from_pretrained(folder, **publisher.load)
    assert same_weights(AutoModelForCausalLM.from_pretrained(tied.plain), secure)


def test_subfolder(tied, publisher, tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "text_model").symlink_to(tied.plain, target_is_directory=True)
    import shutil

    shutil.copytree(tied.plain, tmp_path / "whole" / "text_model")
    folder = publisher.encrypt(tmp_path / "whole", tmp_path / "secure")
    plain = AutoModelForCausalLM.from_pretrained(tied.plain)
    secure = AutoModelForCausalLM.from_pretrained(folder, subfolder="text_model", **publisher.load)
    assert same_weights(plain, secure)
    # The folder below is part of the signed one above.
    assert same_weights(plain, AutoModelForCausalLM.from_pretrained(folder / "text_model", **publisher.load))


def test_path_through_a_link(tied, publisher, tmp_path):
    (tmp_path / "link").symlink_to(tied.secure, target_is_directory=True)
    secure = AutoModelForCausalLM.from_pretrained(tmp_path / "link", **publisher.load)
    assert same_weights(AutoModelForCausalLM.from_pretrained(tied.plain), secure)


def test_new_head(tied, publisher):
    """Weights that the checkpoint cannot have are an error, unless they are asked for."""
    auto = transformers.AutoModelForSequenceClassification
    with pytest.raises(ManifestError, match="allow_missing_weights"):
        auto.from_pretrained(tied.secure, num_labels=3, **publisher.load)
    config = publisher.config | {"allow_missing_weights": True}
    model, info = auto.from_pretrained(
        tied.secure, num_labels=3, output_loading_info=True, loader="secure", loader_config=config
    )
    plain, theirs = auto.from_pretrained(tied.plain, num_labels=3, output_loading_info=True)
    assert info == theirs
    assert same_weights(model.model, plain.model)


def test_without_the_argument_nothing_changes(tied):
    for loader in (None, "auto", "safetensors"):
        model = AutoModelForCausalLM.from_pretrained(tied.plain, loader=loader)
        assert not hasattr(model, "_secure_loader")
    with pytest.raises(TypeError):
        AutoModelForCausalLM.from_pretrained(tied.plain, lodaer="secure")


def test_keys_of_the_home_folder(tied, tmp_path):
    """No loader_config: keys and trust of the person who loads."""
    from secure_loader.core.keys.generate import generate_keys

    generate_keys("mine")
    secure_loader.encrypt_model(tied.plain, tmp_path / "secure", key="mine")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "secure", loader="secure")
    assert same_weights(AutoModelForCausalLM.from_pretrained(tied.plain), model)
