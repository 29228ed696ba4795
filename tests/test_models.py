"""The models that other tests are given are what they say."""

from __future__ import annotations

import pytest

from tests import models


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("arch", models.ARCHITECTURES)
def test_a_tiny_model_loads_and_generates(tmp_path, arch, shards, tie):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = models.tiny_model(tmp_path / "model", arch, shards=shards, tie=tie)
    assert len(models.weight_files(folder)) == shards
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("naïve ✓", return_tensors="pt")
    assert tokenizer.decode(prompt["input_ids"][0]) == "naïve ✓"
    assert model.generate(**prompt, max_new_tokens=2, do_sample=False).shape[1] > prompt["input_ids"].shape[1]


def test_the_real_models_are_complete(smollm2, minilm):
    for folder in (smollm2, minilm):
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
            assert (folder / name).stat().st_size > 0
    assert (smollm2 / "chat_template.jinja").exists()
