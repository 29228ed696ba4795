"""A policy embedded in a model decides whether Transformers gets it."""

from __future__ import annotations

import json

import pytest
from transformers import AutoModelForCausalLM

from secure_loader.core import policy
from secure_loader.errors import PolicyDeniedError

from .conftest import same_weights

pytest.importorskip("regorus", reason="the environments of single Transformers releases have no policy engine")

RULES = """\
package model

import rego.v1

default allow := false

allow if {
	here
	input.loader.framework in {"transformers", "vllm"} # what other tests have loaded
	input.loader.ranks == 1
}

here if input.env.REGION == "eu"
"""


@pytest.fixture
def licensed(publisher, tiny_llama_shards, tmp_path):
    policy._allowed.clear()
    (path := tmp_path / "region.rego").write_text(RULES)
    return publisher.encrypt(tiny_llama_shards, tmp_path / "licensed", policy=path)


def test_one_decision_for_three_shards(licensed, publisher, tiny_llama_shards, monkeypatch):
    asked, real = [], policy.decide
    monkeypatch.setattr(policy, "decide", lambda text, given: asked.append(json.loads(given)) or real(text, given))
    monkeypatch.setenv("REGION", "eu")
    model = AutoModelForCausalLM.from_pretrained(licensed, **publisher.load)
    assert same_weights(model, AutoModelForCausalLM.from_pretrained(tiny_llama_shards))
    assert len(asked) == 1
    assert asked[0]["file"]["shard"]["of"] == 3


@pytest.mark.parametrize("region", ["us", None])
def test_denied(licensed, publisher, monkeypatch, region):
    if region is None:
        monkeypatch.delenv("REGION", raising=False)
    else:
        monkeypatch.setenv("REGION", region)
    with pytest.raises(PolicyDeniedError, match=r"data\.model\.allow is false; not met: here"):
        AutoModelForCausalLM.from_pretrained(licensed, **publisher.load)
