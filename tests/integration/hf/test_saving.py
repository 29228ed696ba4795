"""``save_pretrained`` that encrypts, and what the plain one does with a secure model."""

from __future__ import annotations

import logging

import pytest
import safetensors
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import secure_loader
import secure_loader.hf
from secure_loader.errors import ConfigError, WriteError
from secure_loader.hf import hook

from .conftest import same_weights


@pytest.fixture
def model(tied):
    return AutoModelForCausalLM.from_pretrained(tied.plain)


@pytest.fixture
def no_plaintext(monkeypatch, model):
    """Fails the test when safetensors' own writer is called, or the plaintext of a weight gets to a file."""
    from secure_loader.hf import routing

    def refuse(*args, **kwargs):
        raise AssertionError("plaintext was written")

    secure_loader.hf.install()
    monkeypatch.setitem(routing._originals, "serialize_file", refuse)
    monkeypatch.setitem(routing._originals, "serialize", refuse)
    needle = model.state_dict()["model.layers.0.mlp.up_proj.weight"].view(torch.uint8).numpy().tobytes()[:256]

    def check(folder):
        for file in folder.rglob("*"):
            assert file.is_dir() or needle not in file.read_bytes()

    return check


@pytest.mark.parametrize("shards", [1, 3])
def test_round_trip(shards, model, tied, publisher, no_plaintext, tmp_path):
    size = None if shards == 1 else "250KB"
    tokenizer = AutoTokenizer.from_pretrained(tied.plain)
    folder = tmp_path / "saved"
    secure_loader.hf.save_pretrained(model, folder, max_shard_size=size, tokenizer=tokenizer, **publisher.keys)
    names = sorted(p.name for p in folder.glob("*.safetensors*"))
    if shards == 1:
        assert names == ["model.secure.safetensors"]
    else:
        assert "model.safetensors.index.secure.json" in names
        assert len(names) > 3
    no_plaintext(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]
    again = AutoModelForCausalLM.from_pretrained(folder, **publisher.load)
    assert same_weights(model, again)
    assert AutoTokenizer.from_pretrained(folder, **publisher.load)("hi") == tokenizer("hi")
    assert secure_loader.verify(folder, trust=publisher.trust, full=True)


def test_saver_argument(model, publisher, no_plaintext, tmp_path):
    model.save_pretrained(tmp_path / "saved", saver="secure", saver_config={**publisher.keys, "model_id": "me/it"})
    no_plaintext(tmp_path)
    assert same_weights(model, AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **publisher.load))
    assert secure_loader.inspect(tmp_path / "saved").model_id == "me/it"


def test_saved_files_are_what_encrypt_model_writes(model, tied, publisher, tmp_path):
    """Decrypted, they are the files that the plain save_pretrained writes."""
    secure_loader.hf.save_pretrained(model, tmp_path / "saved", **publisher.keys)
    secure_loader.decrypt_model(tmp_path / "saved", tmp_path / "plain", keys=publisher.master, trust=publisher.trust)
    model.save_pretrained(tmp_path / "stock")
    ours, theirs = tmp_path / "plain" / "model.safetensors", tmp_path / "stock" / "model.safetensors"
    assert ours.read_bytes() == theirs.read_bytes()


def test_secure_model_saved_again(tied, publisher, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tied.secure, **publisher.load)
    secure_loader.hf.save_pretrained(model, tmp_path / "saved", **publisher.keys)
    assert same_weights(model, AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **publisher.load))


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_model_on_disk_saved_again(sharded, publisher, tmp_path):
    places = {"model": "cpu", "lm_head": "disk"}
    model = AutoModelForCausalLM.from_pretrained(
        sharded.secure, device_map=places, offload_folder=tmp_path / "offload", **publisher.load
    )
    secure_loader.hf.save_pretrained(model, tmp_path / "saved", **publisher.keys)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **publisher.load)
    assert same_weights(AutoModelForCausalLM.from_pretrained(sharded.plain), again)


def test_destination_in_use(model, publisher, tmp_path):
    secure_loader.hf.save_pretrained(model, tmp_path / "saved", **publisher.keys)
    before = (tmp_path / "saved" / "secure_manifest.json").read_bytes()
    with pytest.raises(WriteError):
        secure_loader.hf.save_pretrained(model, tmp_path / "saved", **publisher.keys)
    assert (tmp_path / "saved" / "secure_manifest.json").read_bytes() == before
    secure_loader.hf.save_pretrained(model, tmp_path / "saved", force=True, release=2, **publisher.keys)
    assert secure_loader.inspect(tmp_path / "saved").release == 2


@pytest.mark.parametrize(
    "options",
    [{"push_to_hub": True}, {"distributed_checkpoint": True}, {"variant": "fp16"}, {"loader": "secure"}],
    ids=str,
)
def test_refused_arguments(options, model, publisher, tmp_path):
    with pytest.raises(ConfigError):
        secure_loader.hf.save_pretrained(model, tmp_path / "saved", **publisher.keys, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [{"loader": "secure"}, {"saver": "x"}, {"saver_config": {}}], ids=str)
def test_misspelt_arguments_write_nothing(options, model, tmp_path):
    """Upstream ignores arguments that it does not know, and writes plaintext."""
    with pytest.raises(ConfigError):
        model.save_pretrained(tmp_path / "saved", **options)
    assert list(tmp_path.iterdir()) == []


def test_models_that_write_something_else(publisher, tmp_path):
    class Other:
        def save_pretrained(self, folder):
            torch.save({}, f"{folder}/pytorch_model.bin")

    class Bypass:
        def save_pretrained(self, folder):
            from safetensors import _safetensors_rust as rust

            spec = rust.TensorSpec(dtype="uint8", shape=[0], data_ptr=0, data_len=0)
            rust.serialize_file({"x": spec}, f"{folder}/model.safetensors")

    for kind in (Other, Bypass):
        with pytest.raises(ConfigError, match="written"):
            secure_loader.hf.save_pretrained(kind(), tmp_path / "saved", **publisher.keys)
        assert not (tmp_path / "saved").exists()


def test_plain_save_of_a_secure_model_warns_once(tied, publisher, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(hook, "_warned", set())
    model = AutoModelForCausalLM.from_pretrained(tied.secure, **publisher.load)
    with caplog.at_level(logging.WARNING, "secure_loader"):
        model.save_pretrained(tmp_path / "meant", saver="plain")
        assert not caplog.records
        model.save_pretrained(tmp_path / "one")
        model.save_pretrained(tmp_path / "two")
    (record,) = caplog.records
    assert "in clear" in record.getMessage()
    assert same_weights(model, AutoModelForCausalLM.from_pretrained(tmp_path / "one"))


def test_plain_save_of_a_plain_model_is_silent(model, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(hook, "_warned", set())
    model.save_pretrained(tmp_path / "one")
    assert not [r for r in caplog.records if r.name.startswith("secure_loader")]


def test_session_for_reading_writes_nothing(model, publisher, tmp_path):
    with secure_loader.hf.session(publisher.config):
        with pytest.raises(ConfigError, match="encrypt_as"):
            model.save_pretrained(tmp_path / "saved")
        with pytest.raises(ConfigError, match="encrypt_as"):
            safetensors.torch.save({"x": torch.zeros(1)})
    assert not list((tmp_path / "saved").glob("*.safetensors"))
    with pytest.raises(ConfigError, match="encrypt_as"), secure_loader.hf.session(**publisher.keys):
        pass
