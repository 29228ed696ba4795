"""What is not what the publisher signed is refused, with our own error, and no model comes back."""

from __future__ import annotations

import json
import shutil

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline

import secure_loader.hf
from secure_loader.errors import (
    AuthenticationError,
    ConfigError,
    EncryptedFileError,
    KeyAccessError,
    ManifestError,
    MissingFileError,
    NotEncryptedError,
    RollbackError,
    SignatureError,
    UntrustedSignerError,
)

from .conftest import flip

BURIED_BY_PIPELINE = (OSError, ValueError, TypeError, RuntimeError)


def load(folder, publisher, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **publisher.load, **options)


# ------------------------------------------------------------------------------------------------ nobody asked


@pytest.mark.parametrize("use_safetensors", [None, True])
def test_encrypted_folder_without_the_argument(use_safetensors, sharded):
    with pytest.raises(EncryptedFileError, match='loader="secure"'):
        AutoModelForCausalLM.from_pretrained(sharded.secure, use_safetensors=use_safetensors)


def test_encrypted_folder_with_the_plain_variant_name(tied, publisher, tmp_path):
    folder = publisher.encrypt(tied.plain, tmp_path / "kept", keep_names=True)
    with pytest.raises(EncryptedFileError, match='loader="secure"'):
        AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(EncryptedFileError):
        AutoModelForCausalLM.from_pretrained(folder, disable_mmap=True)


def test_encrypted_variant_by_name(tied):
    with pytest.raises(EncryptedFileError):
        AutoModelForCausalLM.from_pretrained(tied.secure, variant="secure")


def test_encrypted_folder_in_a_pipeline(tied):
    with pytest.raises(EncryptedFileError):
        pipeline("text-generation", str(tied.secure))


def test_encrypted_file_in_safetensors(tied):
    file = tied.secure / "model.secure.safetensors"
    with pytest.raises(EncryptedFileError):
        load_file(file)
    with pytest.raises(EncryptedFileError):
        safetensors.safe_open(file, framework="pt")
    with pytest.raises(EncryptedFileError):
        safetensors.torch.load(file.read_bytes())
    with file.open("rb") as handle, pytest.raises(EncryptedFileError):
        safetensors._safe_open_handle(handle, framework="pt")


def test_a_plain_folder_that_is_incomplete_gets_upstreams_error(tmp_path, tied):
    shutil.copy(tied.plain / "config.json", tmp_path)
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


# --------------------------------------------------------------------------------------------- keys and trust


def test_wrong_key(tied, publisher, stranger):
    with pytest.raises(KeyAccessError):
        load(tied.secure, publisher.__class__(stranger.master, publisher.signing, publisher.trust))


def test_another_key_of_the_same_name(tied, publisher, stranger):
    from secure_loader import MasterKey

    other = MasterKey(publisher.master.kid, stranger.master.algorithm, stranger.master.secret)
    with pytest.raises(KeyAccessError, match="not the one"):
        load(tied.secure, publisher.__class__(other, publisher.signing, publisher.trust))


def test_untrusted_signer(tied, publisher, stranger):
    with pytest.raises(UntrustedSignerError):
        load(tied.secure, publisher.__class__(publisher.master, publisher.signing, stranger.trust))


def test_wrong_key_in_a_pipeline_is_not_buried(tied, publisher, stranger):
    config = {"keys": [stranger.master], "trust": [str(publisher.trust)]}
    with pytest.raises(KeyAccessError) as caught:
        pipeline("text-generation", str(tied.secure), loader="secure", loader_config=config)
    assert not isinstance(caught.value, BURIED_BY_PIPELINE)


# --------------------------------------------------------------------------------------------------- tampering


@pytest.mark.parametrize("how", ["eager", "lazy", "pipeline"])
def test_tampered_weights(how, sharded, publisher, copy_of):
    folder = copy_of(sharded.secure)
    flip(sorted(folder.glob("*.safetensors"))[1])
    calls = {
        "eager": lambda: load(folder, publisher, disable_mmap=True),
        "lazy": lambda: load(folder, publisher),
        "pipeline": lambda: pipeline("text-generation", str(folder), **publisher.load),
    }
    with pytest.raises(AuthenticationError) as caught:
        calls[how]()
    assert "-00002-of-" in str(caught.value)


def test_tampered_weights_on_disk(sharded, publisher, copy_of, tmp_path):
    """With disk offload, weights are read during the forward pass: the error comes then."""
    folder = copy_of(sharded.secure)
    flip(max(folder.glob("*.safetensors")))
    places = {"model": "cpu", "lm_head": "disk"}
    from .conftest import logits

    with pytest.raises(AuthenticationError):
        logits(load(folder, publisher, device_map=places, offload_folder=tmp_path / "offload"))


def test_tampered_header(tied, publisher, copy_of):
    folder = copy_of(tied.secure)
    flip(folder / "model.secure.safetensors", 200)
    with pytest.raises(ManifestError):
        load(folder, publisher)


def test_missing_shard(sharded, publisher, copy_of):
    folder = copy_of(sharded.secure)
    sorted(folder.glob("*.safetensors"))[1].unlink()
    with pytest.raises(ManifestError, match="missing"):
        load(folder, publisher)


def test_tensor_dropped_from_the_index(sharded, publisher, copy_of):
    folder = copy_of(sharded.secure)
    index = folder / "model.safetensors.index.secure.json"
    doc = json.loads(index.read_text())
    doc["weight_map"].popitem()
    index.write_text(json.dumps(doc))
    with pytest.raises(ManifestError, match="index"):
        load(folder, publisher)


def test_signed_config_that_names_one_shard_of_three(sharded, publisher, tmp_path):
    """Everything is signed, and yet most weights would be random."""
    plain = tmp_path / "plain"
    shutil.copytree(sharded.plain, plain)
    doc = json.loads((plain / "config.json").read_text())
    doc["transformers_weights"] = min(p.name for p in sharded.secure.glob("*.safetensors"))
    (plain / "config.json").write_text(json.dumps(doc))
    folder = publisher.encrypt(plain, tmp_path / "secure")
    with pytest.raises(ManifestError, match="was not read"):
        load(folder, publisher)
    config = publisher.config | {"allow_missing_weights": True}
    with pytest.raises(ManifestError, match="was not read"):
        AutoModelForCausalLM.from_pretrained(folder, loader="secure", loader_config=config)


def test_weights_that_the_publisher_forgot(sharded, publisher, tmp_path):
    plain = tmp_path / "plain"
    shutil.copytree(sharded.plain, plain)
    tensors = {}
    for shard in plain.glob("*.safetensors"):
        tensors |= load_file(shard)
        shard.unlink()
    (plain / "model.safetensors.index.json").unlink()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    folder = publisher.encrypt(plain, tmp_path / "secure")
    with pytest.raises(ManifestError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        load(folder, publisher)


def test_weights_of_another_shape(tied, publisher):
    import transformers

    config = transformers.Qwen3Config.from_pretrained(tied.secure, vocab_size=384)
    with pytest.raises(ManifestError, match="random"):
        load(tied.secure, publisher, config=config, ignore_mismatched_sizes=True)


def test_shard_of_another_model(sharded, tied, publisher, copy_of):
    folder = copy_of(sharded.secure)
    shutil.copy(tied.secure / "model.secure.safetensors", min(folder.glob("*.safetensors")))
    with pytest.raises(ManifestError):
        load(folder, publisher)


def test_shard_swapped_after_the_check(sharded, tied, publisher, copy_of, monkeypatch):
    """The folder is checked by path; what counts is the file that is open in the end."""
    from secure_loader.hf import hub

    folder, check = copy_of(sharded.secure), hub.variant_of
    other = publisher.encrypt(sharded.plain, folder.parent / "again", model_id=folder.name)

    def swap(*args):
        name = sorted(p.name for p in folder.glob("*.safetensors"))[2]
        shutil.copy(other / name, folder / name)
        return check(*args)

    monkeypatch.setattr(hub, "variant_of", swap)
    with pytest.raises(ManifestError, match="not the file that was signed"):
        load(folder, publisher)


def test_older_release(tied, publisher, tmp_path):
    new = publisher.encrypt(tied.plain, tmp_path / "new", model_id="m", release=7)
    old = publisher.encrypt(tied.plain, tmp_path / "old", model_id="m", release=6)
    load(new, publisher)
    with pytest.raises(RollbackError):
        load(old, publisher)


# ------------------------------------------------------------------------------------- everything else in the folder


def test_changed_config(tied, publisher, copy_of):
    folder = copy_of(tied.secure)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-02'))
    for auto in (AutoModelForCausalLM, AutoTokenizer):
        with pytest.raises(ManifestError, match=r"config\.json"):
            auto.from_pretrained(folder, **publisher.load)


def test_config_that_points_elsewhere(sharded, publisher, copy_of):
    folder = copy_of(sharded.secure)
    config = folder / "config.json"
    doc = json.loads(config.read_text())
    config.write_text(json.dumps(doc | {"transformers_weights": min(folder.glob("*.safetensors")).name}))
    with pytest.raises(ManifestError, match=r"config\.json"):
        load(folder, publisher)


CODE = """
import pathlib
pathlib.Path(__file__).with_name("ran").touch()
pathlib.Path({mark!r}).touch()
from transformers import Qwen3Config, Qwen3ForCausalLM
class OtherConfig(Qwen3Config):
    model_type = "other_qwen3"
class OtherModel(Qwen3ForCausalLM):
    config_class = OtherConfig
"""


def with_code(folder, mark):
    config = folder / "config.json"
    doc = json.loads(config.read_text())
    doc["auto_map"] = {"AutoConfig": "other.OtherConfig", "AutoModelForCausalLM": "other.OtherModel"}
    doc["model_type"] = "other_qwen3"
    doc["architectures"] = ["OtherModel"]
    config.write_text(json.dumps(doc))
    (folder / "other.py").write_text(CODE.format(mark=str(mark)))


def test_added_code_does_not_run(tied, publisher, copy_of, tmp_path):
    folder, mark = copy_of(tied.secure), tmp_path / "ran"
    with_code(folder, mark)
    for remove in (False, True):
        if remove:
            (folder / "secure_manifest.json").unlink()
        with pytest.raises(ManifestError):
            load(folder, publisher, trust_remote_code=True)
        with pytest.raises(ManifestError):
            pipeline("text-generation", str(folder), trust_remote_code=True, **publisher.load)
        with pytest.raises(ManifestError):
            load(folder, publisher, trust_remote_code=True, device_map="cpu")
    # Not even where folders without a manifest are accepted.
    for setting in ("insecure_allow_legacy", "insecure_allow_plaintext"):
        config = publisher.config | {setting: True}
        for auto in (AutoModel, AutoConfig):
            with pytest.raises(ManifestError, match="nobody signed"):
                auto.from_pretrained(folder, trust_remote_code=True, loader="secure", loader_config=config)
    assert not mark.exists()


def test_signed_code_runs(tied, publisher, tmp_path):
    plain, mark = tmp_path / "plain", tmp_path / "ran"
    shutil.copytree(tied.plain, plain)
    with_code(plain, mark)
    folder = publisher.encrypt(plain, tmp_path / "secure")
    model = load(folder, publisher, trust_remote_code=True)
    assert type(model).__name__ == "OtherModel"
    assert mark.exists()
    with pytest.raises(ValueError, match="trust_remote_code"):
        load(folder, publisher, trust_remote_code=False)


def test_signed_config_that_names_code_elsewhere(tied, publisher, tmp_path, copy_of):
    """The config is signed; the repository that it takes code from is not."""
    plain, elsewhere, mark = tmp_path / "plain", tmp_path / "elsewhere", tmp_path / "ran"
    shutil.copytree(tied.plain, plain)
    shutil.copytree(tied.plain, elsewhere)
    with_code(elsewhere, mark)
    doc = json.loads((elsewhere / "config.json").read_text())
    doc["auto_map"] = {auto: f"{elsewhere}--{name}" for auto, name in doc["auto_map"].items()}
    (plain / "config.json").write_text(json.dumps(doc))
    folder = publisher.encrypt(plain, tmp_path / "secure")
    with pytest.raises(ManifestError):
        load(folder, publisher, trust_remote_code=True)
    assert not mark.exists()


def test_extra_file(tied, publisher, copy_of):
    folder = copy_of(tied.secure)
    (folder / "conversion.py").write_text("")
    with pytest.raises(ManifestError, match=r"conversion\.py"):
        load(folder, publisher)


def test_no_manifest(tied, publisher, copy_of):
    folder = copy_of(tied.secure)
    (folder / "secure_manifest.json").unlink()
    with pytest.raises(ManifestError, match=r"secure_manifest\.json"):
        load(folder, publisher)
    with pytest.raises(EncryptedFileError):
        AutoModelForCausalLM.from_pretrained(folder)


# ---------------------------------------------------------------------------------------- plaintext where not wanted


def test_plain_folder(tied, publisher):
    with pytest.raises(ManifestError, match="not encrypted"):
        load(tied.plain, publisher)


def test_plain_folder_where_that_is_allowed(tied, publisher):
    config = publisher.config | {"insecure_allow_plaintext": True}
    AutoModelForCausalLM.from_pretrained(tied.plain, loader="secure", loader_config=config)


def test_plain_file_among_the_encrypted(tied, sharded, publisher, copy_of):
    folder = copy_of(sharded.secure)
    name = min(p.name for p in folder.glob("*.safetensors"))
    shutil.copy(sharded.plain / name.replace("model.secure", "model"), folder / name)
    with pytest.raises(ManifestError):
        load(folder, publisher)


def test_plain_file_in_a_session(tied, publisher):
    file = tied.plain / "model.safetensors"
    with secure_loader.hf.session(publisher.config):
        with pytest.raises(NotEncryptedError):
            load_file(file)
        with pytest.raises(NotEncryptedError):
            safetensors.torch.load(file.read_bytes())
        with file.open("rb") as handle, pytest.raises(NotEncryptedError):
            safetensors._safe_open_handle(handle, framework="pt")
    assert load_file(file)


def test_encrypted_file_of_an_unknown_folder_in_a_session(tied, publisher, tmp_path):
    file = tmp_path / "adapter_model.safetensors"
    shutil.copy(tied.secure / "model.secure.safetensors", file)
    with secure_loader.hf.session(publisher.config):
        with pytest.raises(ManifestError):
            load_file(file)
        with pytest.raises(ManifestError):
            safetensors.torch.load(file.read_bytes())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"use_safetensors": False}, ConfigError),
        ({"gguf_file": "model.gguf"}, ConfigError),
        ({"variant": "fp16"}, ManifestError),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_honoured(options, error, tied, publisher):
    with pytest.raises(error):
        load(tied.secure, publisher, **options)


def test_no_pickle(tied, publisher, copy_of):
    folder = copy_of(tied.secure)
    (folder / "model.secure.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ManifestError):
        load(folder, publisher)


@pytest.mark.parametrize(
    "options",
    [
        {"loader": "secret"},
        {"loader_config": {}},
        {"loader": "secure", "loader_config": {"key": "x"}},
        {"loader": "secure", "loader_config": "x"},
        {"loader": "secure", "loader_config": {"keys": '{"kty": "oct"}'}},
    ],
    ids=str,
)
def test_wrong_settings(options, tied):
    for call in (
        lambda: AutoModel.from_pretrained(tied.secure, **options),
        lambda: pipeline("text-generation", str(tied.secure), **options),
        lambda: AutoTokenizer.from_pretrained(tied.secure, **options),
    ):
        with pytest.raises(ConfigError):
            call()


def test_no_such_folder(publisher, tmp_path):
    with pytest.raises(MissingFileError):
        load(tmp_path / "not" / "there", publisher)


def test_signature_of_the_manifest(tied, publisher, copy_of):
    folder = copy_of(tied.secure)
    manifest = json.loads((folder / "secure_manifest.json").read_text())
    first = manifest["signature"][0]
    manifest["signature"] = ("B" if first == "A" else "A") + manifest["signature"][1:]
    (folder / "secure_manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(SignatureError):
        load(folder, publisher)
