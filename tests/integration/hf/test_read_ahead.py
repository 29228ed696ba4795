"""Weights are decrypted while upstream builds the model, and nothing of that outlives the load."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from secure_loader.core.prefetch import Prefetch
from secure_loader.errors import AuthenticationError, SecureLoaderError
from secure_loader.hf import context
from tests.attacks.kit import flip


@pytest.fixture
def made(monkeypatch):
    """Every prefetch that is made, and what was taken of it."""
    seen: list[tuple[Prefetch, list[str]]] = []
    start, take = Prefetch.__init__, Prefetch.take

    def starts(self, *args, **kwargs):
        seen.append((self, []))
        start(self, *args, **kwargs)

    def takes(self, file, name):
        tensor = take(self, file, name)
        if tensor is not None:
            next(names for ahead, names in seen if ahead is self).append(name)
        return tensor

    monkeypatch.setattr(Prefetch, "__init__", starts)
    monkeypatch.setattr(Prefetch, "take", takes)
    return seen


def same(plain, secure) -> bool:
    a, b = plain.state_dict(), secure.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("prefetch_bytes", [1, 1 << 30])
def test_every_weight_comes_from_it(tied, publisher, made, prefetch_bytes):
    config = publisher.config | {"prefetch_bytes": prefetch_bytes}
    secure = AutoModelForCausalLM.from_pretrained(tied.secure, loader="secure", loader_config=config)
    ((ahead, names),) = made
    assert sorted(names) == sorted(n for n in secure.state_dict() if n != "lm_head.weight")
    assert not ahead._active
    assert ahead._stopped, "closed with the load"
    assert same(AutoModelForCausalLM.from_pretrained(tied.plain), secure)


def test_it_can_be_left_out(tied, publisher, made):
    config = publisher.config | {"prefetch_bytes": 0, "page_cache": "drop"}
    secure = AutoModelForCausalLM.from_pretrained(tied.secure, loader="secure", loader_config=config)
    assert made == []
    assert same(AutoModelForCausalLM.from_pretrained(tied.plain), secure)


def test_another_dtype(tied, publisher, made):
    plain = AutoModelForCausalLM.from_pretrained(tied.plain, dtype=torch.float64)
    assert same(plain, AutoModelForCausalLM.from_pretrained(tied.secure, dtype=torch.float64, **publisher.load))
    assert made


def test_an_error_in_it_is_the_load_s_error(tied, publisher, made, tmp_path):
    folder = publisher.encrypt(tied.plain, tmp_path / "broken")
    shard = next(folder.glob("*.safetensors"))
    flip(shard, shard.stat().st_size - 1)
    with pytest.raises(AuthenticationError):
        AutoModelForCausalLM.from_pretrained(folder, **publisher.load)
    ((ahead, _),) = made
    assert not ahead._active


def test_a_load_that_fails_for_another_reason_leaves_nothing(tied, publisher, made, monkeypatch):
    def fails(self, *args, **kwargs):
        raise ZeroDivisionError

    monkeypatch.setattr("transformers.models.qwen3.modeling_qwen3.Qwen3ForCausalLM.__init__", fails)
    with pytest.raises(ZeroDivisionError):
        AutoModelForCausalLM.from_pretrained(tied.secure, **publisher.load)
    ((ahead, names),) = made
    assert (names, len(ahead._active), context.current()) == ([], 0, None)


def test_a_key_that_is_missing_is_said_at_once(tied, stranger, publisher, made):
    with pytest.raises(SecureLoaderError, match="key"):
        AutoModelForCausalLM.from_pretrained(
            tied.secure, loader="secure", loader_config={**publisher.config, "keys": [stranger.master]}
        )


def test_names_are_sorted_as_upstream_does():
    names = ["h.10.w", "h.2.w", "h.a.w", "a", "h.2", "10", "9"]
    assert sorted(names, key=context.natural_key) == ["9", "10", "a", "h.2", "h.2.w", "h.10.w", "h.a.w"]
