"""Everything else that opens safetensors files: peft, sentence-transformers, accelerate, Trainer."""

from __future__ import annotations

import shutil

import pytest
import safetensors.torch
import torch
import transformers
from transformers import AutoModelForCausalLM

import secure_loader
import secure_loader.hf
from secure_loader.errors import (
    EncryptedFileError,
    KeyAccessError,
    ManifestError,
    SecureLoaderError,
    UntrustedSignerError,
)

from .conftest import flip, logits, same_weights

# peft 0.21 uses what Transformers 5.23 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

# ------------------------------------------------------------------------------------------------------------- peft


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, tied, publisher):
    """A LoRA adapter of the tied model, plain and encrypted; the encrypted one names the encrypted base."""
    import peft

    root = tmp_path_factory.mktemp("adapter")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        base = AutoModelForCausalLM.from_pretrained(tied.plain)
        config = peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(base, config)
    for name, folder in (("plain", tied.plain), ("base", tied.secure)):
        model.peft_config["default"].base_model_name_or_path = str(folder)
        model.save_pretrained(root / name)
    publisher.encrypt(root / "base", root / "secure")
    return root


def test_adapter_keeps_its_name(adapter):
    assert (adapter / "secure" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("how", ["argument", "session"])
def test_adapter_over_a_secure_base(how, adapter, tied, publisher):
    import peft

    plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tied.plain), adapter / "plain")
    base = AutoModelForCausalLM.from_pretrained(tied.secure, **publisher.load)
    if how == "argument":
        secure = peft.PeftModel.from_pretrained(base, str(adapter / "secure"), **publisher.load)
    else:
        with secure_loader.hf.session(publisher.config):
            secure = peft.PeftModel.from_pretrained(base, str(adapter / "secure"))
    assert torch.equal(logits(plain), logits(secure))


def test_adapter_folder_opens_base_and_adapter(adapter, publisher):
    plain = AutoModelForCausalLM.from_pretrained(adapter / "plain")
    secure = AutoModelForCausalLM.from_pretrained(adapter / "secure", **publisher.load)
    assert same_weights(plain, secure)
    assert torch.equal(logits(plain), logits(secure))


def test_adapter_is_refused(adapter, tied, publisher, stranger, tmp_path):
    import peft

    base = AutoModelForCausalLM.from_pretrained(tied.plain)
    with pytest.raises(EncryptedFileError):
        peft.PeftModel.from_pretrained(base, str(adapter / "secure"))
    strange = stranger.encrypt(adapter / "base", tmp_path / "strange")
    with pytest.raises(UntrustedSignerError):
        peft.PeftModel.from_pretrained(base, str(strange), **publisher.load)
    shutil.copytree(adapter / "secure", tmp_path / "tampered")
    flip(tmp_path / "tampered" / "adapter_config.json", 2)
    with pytest.raises(ManifestError, match="adapter_config"):
        peft.PeftModel.from_pretrained(base, str(tmp_path / "tampered"), **publisher.load)


def test_adapter_saved_encrypted(adapter, tied, publisher, tmp_path):
    import peft

    base = AutoModelForCausalLM.from_pretrained(tied.secure, **publisher.load)
    model = peft.PeftModel.from_pretrained(base, str(adapter / "secure"), **publisher.load)
    secure_loader.hf.save_pretrained(model, tmp_path / "saved", **publisher.keys)
    base = AutoModelForCausalLM.from_pretrained(tied.secure, **publisher.load)
    again = peft.PeftModel.from_pretrained(base, str(tmp_path / "saved"), **publisher.load)
    assert torch.equal(logits(model), logits(again))


# ---------------------------------------------------------------------------------------------- sentence-transformers


@pytest.fixture(scope="module")
def sentences(tmp_path_factory, minilm, publisher):
    """MiniLM as sentence-transformers saves it, with a dense layer of its own in a folder of its own."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer import modules as parts

    root = tmp_path_factory.mktemp("sentences")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        transformer = parts.Transformer(str(minilm))
        modules = [transformer, parts.Pooling(384), parts.Dense(384, 32)]
        model = sentence_transformers.SentenceTransformer(modules=modules, device="cpu")
    model.save(str(root / "plain"))
    publisher.encrypt(root / "plain", root / "secure")
    sentence_transformers.SentenceTransformer(modules=modules[:2], device="cpu").save(str(root / "flat"))
    publisher.encrypt(root / "flat", root / "flat_secure")
    return root


def test_sentence_transformers_by_model_kwargs(sentences, publisher):
    from sentence_transformers import SentenceTransformer

    plain = SentenceTransformer(str(sentences / "flat"), device="cpu")
    secure = SentenceTransformer(str(sentences / "flat_secure"), device="cpu", model_kwargs=publisher.load)
    assert torch.equal(torch.tensor(plain.encode("A test.")), torch.tensor(secure.encode("A test.")))


def test_sentence_transformers_in_a_session(sentences, publisher):
    """Modules with weights of their own are read by load_file: that takes a session."""
    from sentence_transformers import SentenceTransformer

    plain = SentenceTransformer(str(sentences / "plain"), device="cpu")
    with secure_loader.hf.session(publisher.config):
        secure = SentenceTransformer(str(sentences / "secure"), device="cpu")
    assert torch.equal(torch.tensor(plain.encode("A test.")), torch.tensor(secure.encode("A test.")))
    with pytest.raises(EncryptedFileError):
        SentenceTransformer(str(sentences / "secure"), device="cpu", model_kwargs=publisher.load)


# --------------------------------------------------------------------------------------------------------- accelerate


def test_accelerate(tied, publisher, tmp_path):
    import accelerate

    with accelerate.init_empty_weights():
        config = transformers.AutoConfig.from_pretrained(tied.plain)
        empty = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    empty.tie_weights()
    file = tied.secure / "model.secure.safetensors"
    with secure_loader.hf.session(publisher.config):
        model = accelerate.load_checkpoint_and_dispatch(empty, str(file), device_map={"": "cpu"})
    plain = AutoModelForCausalLM.from_pretrained(tied.plain)
    loaded = model.state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in plain.state_dict().items())


def test_safetensors_functions_in_a_session(sharded, publisher):
    file = min(sharded.secure.glob("*.safetensors"))
    plain = safetensors.torch.load_file(sharded.plain / file.name.replace("model.secure", "model"))
    with secure_loader.hf.session(publisher.config):
        secure = safetensors.torch.load_file(file)
        assert secure.keys() == plain.keys()
        assert all(torch.equal(plain[n], secure[n]) for n in plain)
        with safetensors.safe_open(file, framework="pt") as opened:
            assert isinstance(opened, safetensors.safe_open)
            assert opened.metadata()["format"] == "pt"
        with file.open("rb") as handle:
            assert safetensors._safe_open_handle(handle, framework="pt").keys() == sorted(plain)
    with pytest.raises(EncryptedFileError):
        safetensors.torch.load_file(file)


def test_from_pretrained_in_a_session(tied, publisher):
    with secure_loader.hf.session(publisher.config):
        secure = AutoModelForCausalLM.from_pretrained(tied.secure)
        with pytest.raises(ManifestError):
            AutoModelForCausalLM.from_pretrained(tied.plain)
        model = AutoModelForCausalLM.from_pretrained(tied.secure, loader="secure")
    assert same_weights(secure, model)


# ------------------------------------------------------------------------------------------------------------ Trainer


def trainer(model, folder, steps):
    data = [{"input_ids": torch.arange(i, i + 8), "labels": torch.arange(i, i + 8)} for i in range(8)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_steps=2,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
        lr_scheduler_type="constant",
        dataloader_pin_memory=False,
    )
    return transformers.Trainer(model=model, args=arguments, train_dataset=data)


def test_trainer_saves_and_resumes(tied, publisher, stranger, tmp_path):
    def fresh():
        return AutoModelForCausalLM.from_pretrained(tied.plain, dtype=torch.float32)

    straight = fresh()
    trainer(straight, tmp_path / "plain", 4).train()
    model = AutoModelForCausalLM.from_pretrained(tied.secure, dtype=torch.float32, **publisher.load)
    with secure_loader.hf.session(publisher.config, encrypt_as="run", **publisher.keys):
        trainer(model, tmp_path / "secure", 2).train()
    checkpoint = tmp_path / "secure" / "checkpoint-2"
    with pytest.raises(EncryptedFileError):
        safetensors.torch.load_file(checkpoint / "model.safetensors")
    resumed = AutoModelForCausalLM.from_pretrained(tied.secure, dtype=torch.float32, **publisher.load)
    with secure_loader.hf.session(publisher.config, encrypt_as="run", **publisher.keys):
        trainer(resumed, tmp_path / "secure", 4).train(resume_from_checkpoint=str(checkpoint))
    assert same_weights(straight, resumed)
    with secure_loader.hf.session(publisher.config, encrypt_as="run", **publisher.keys):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "secure" / "checkpoint-4", dtype=torch.float32)
    assert same_weights(straight, again)
    # Somebody else's session does not take it, nor does this one take somebody else's, nor another run's.
    for sign, run in ((stranger, "run"), (publisher, "run*"), (publisher, "other")):
        with (
            secure_loader.hf.session(publisher.config, encrypt_as=run, **sign.keys),
            pytest.raises(UntrustedSignerError),
        ):
            safetensors.torch.load_file(checkpoint / "model.safetensors")
    with secure_loader.hf.session(publisher.config), pytest.raises(ManifestError):
        safetensors.torch.load_file(checkpoint / "model.safetensors")


def test_training_folder_with_a_plain_file(publisher, tied, tmp_path):
    shutil.copy(tied.plain / "model.safetensors", tmp_path)
    with (
        secure_loader.hf.session(publisher.config, encrypt_as="run", **publisher.keys),
        pytest.raises(SecureLoaderError),
    ):
        safetensors.torch.load_file(tmp_path / "model.safetensors")


def test_bytes_in_a_writing_session(publisher):
    tensors = {"x": torch.arange(10)}
    with secure_loader.hf.session(publisher.config, encrypt_as="run", **publisher.keys):
        data = safetensors.torch.save(tensors)
        assert torch.equal(safetensors.torch.load(data)["x"], tensors["x"])
    with pytest.raises(EncryptedFileError):
        safetensors.torch.load(data)


def test_session_without_a_key(tied, publisher):
    with secure_loader.hf.session({"trust": [str(publisher.trust)]}), pytest.raises(KeyAccessError):
        safetensors.torch.load_file(tied.secure / "model.secure.safetensors")
