"""Weights for a GPU go there as they are stored: here the GPU is a fake one, upstream and the files are real."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from secure_loader.core.archive import TensorFile
from secure_loader.core.device.ahead import DeviceAhead
from secure_loader.core.prefetch import Prefetch
from secure_loader.errors import AuthenticationError
from secure_loader.hf import context
from tests.attacks.kit import flip
from tests.unit.device.fake import CLEARED, NOTHING
from tests.unit.device.host_engine import HostEngine

# What torch takes for the CPU, and our side for a device of its own.
DEVICE = torch.device("cpu:0")


@pytest.fixture
def engine(monkeypatch):
    made = HostEngine()
    monkeypatch.setattr(TensorFile, "engine", lambda self, device: made if device in {"cuda", "cpu:0"} else None)
    return made


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Names of the tensors that were decrypted in host memory."""
    names: list[str] = []
    read_into, start = TensorFile.read_into, Prefetch.__init__

    def reads(self, name, out, begin=0):
        names.append(name)
        read_into(self, name, out, begin)

    def starts(self, tensors, *args, **kwargs):
        tensors = list(tensors)
        names.extend(name for _, name in tensors)
        start(self, tensors, *args, **kwargs)

    monkeypatch.setattr(TensorFile, "read_into", reads)
    monkeypatch.setattr(Prefetch, "__init__", starts)
    return names


def same(plain, secure) -> bool:
    a, b = plain.state_dict(), secure.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("model", ["tied", "sharded"])
def test_one_device_takes_all_at_once(request, model, publisher, engine, on_the_cpu):
    pair = request.getfixturevalue(model)
    secure = AutoModelForCausalLM.from_pretrained(pair.secure, device_map={"": DEVICE}, **publisher.load)
    assert same(AutoModelForCausalLM.from_pretrained(pair.plain), secure)
    assert len(engine.asked) == 1
    assert on_the_cpu == []
    assert engine.device.problems == []


def test_no_other_device_is_asked_for(tied, publisher, engine, monkeypatch):
    """To ask for its engine is to make a context there."""
    asked: set[str] = set()
    find = TensorFile.engine
    monkeypatch.setattr(TensorFile, "engine", lambda self, device: (asked.add(device), find(self, device))[1])
    AutoModelForCausalLM.from_pretrained(tied.secure, device_map={"": DEVICE}, **publisher.load)
    assert asked == {str(DEVICE)}


def test_in_batches(tied, publisher, engine, on_the_cpu):
    config = publisher.config | {"prefetch_bytes": 100_000}
    secure = AutoModelForCausalLM.from_pretrained(
        tied.secure, device_map={"": DEVICE}, loader="secure", loader_config=config
    )
    assert same(AutoModelForCausalLM.from_pretrained(tied.plain), secure)
    assert 1 < len(engine.asked) < len(list(secure.parameters()))
    assert on_the_cpu == []


def test_one_by_one(tied, publisher, engine, on_the_cpu):
    config = publisher.config | {"prefetch_bytes": 0}
    secure = AutoModelForCausalLM.from_pretrained(
        tied.secure, device_map={"": DEVICE}, loader="secure", loader_config=config
    )
    assert same(AutoModelForCausalLM.from_pretrained(tied.plain), secure)
    assert len(engine.asked) == len(list(secure.parameters()))
    assert on_the_cpu == []


def test_several_places_get_what_is_theirs(tied, publisher, engine, on_the_cpu, monkeypatch):
    # Upstream would hand the model to accelerate, which knows of no second CPU.
    monkeypatch.setattr("transformers.modeling_utils.accelerate_dispatch", lambda *args: None)
    places = {"model.embed_tokens": DEVICE, "lm_head": DEVICE, "model.norm": DEVICE, "model.rotary_emb": DEVICE}
    places |= {f"model.layers.{i}": DEVICE if i else torch.device("cpu") for i in range(8)}
    plain = AutoModelForCausalLM.from_pretrained(tied.plain)
    places = {k: v for k, v in places.items() if k in dict(plain.named_modules())}
    secure = AutoModelForCausalLM.from_pretrained(tied.secure, device_map=places, **publisher.load)
    assert same(plain, secure)
    first = {n for n, _ in plain.named_parameters() if n.startswith("model.layers.0.")}
    assert set(on_the_cpu) == first
    assert sum(engine.asked) == sum(p.nbytes for n, p in plain.named_parameters() if n not in first)


def test_upstream_shares_out(tied, publisher, engine, on_the_cpu, monkeypatch):
    from secure_loader.hf import hook

    shared_out = hook._flagged(lambda *args: {"": DEVICE}, hook._share_out)
    monkeypatch.setattr("transformers.modeling_utils._get_device_map", shared_out)
    secure = AutoModelForCausalLM.from_pretrained(tied.secure, device_map="auto", **publisher.load)
    assert same(AutoModelForCausalLM.from_pretrained(tied.plain), secure)
    assert len(engine.asked) == 1
    assert on_the_cpu == []


def test_auto_without_a_gpu_reads_ahead_as_ever(tied, publisher, on_the_cpu):
    secure = AutoModelForCausalLM.from_pretrained(tied.secure, device_map="auto", **publisher.load)
    assert same(AutoModelForCausalLM.from_pretrained(tied.plain), secure)
    assert set(on_the_cpu) == {n for n, _ in secure.named_parameters()}


def test_another_dtype_is_made_after_the_verdict(tied, publisher, engine, on_the_cpu):
    plain = AutoModelForCausalLM.from_pretrained(tied.plain, dtype=torch.float64)
    secure = AutoModelForCausalLM.from_pretrained(
        tied.secure, dtype=torch.float64, device_map={"": DEVICE}, **publisher.load
    )
    assert same(plain, secure)
    assert on_the_cpu == []


def test_without_a_device_map_nothing_goes_there(tied, publisher, engine, on_the_cpu):
    AutoModelForCausalLM.from_pretrained(tied.secure, **publisher.load)
    assert engine.asked == []
    assert on_the_cpu


def test_a_wrong_tag_ends_the_load(tied, publisher, engine, tmp_path, monkeypatch):
    made: list[DeviceAhead] = []
    start = DeviceAhead.__init__
    monkeypatch.setattr(
        DeviceAhead, "__init__", lambda self, *args: (made.append(self), start(self, *args))[1] and None
    )
    folder = publisher.encrypt(tied.plain, tmp_path / "broken")
    shard = next(folder.glob("*.safetensors"))
    flip(shard, shard.stat().st_size - 1)
    with pytest.raises(AuthenticationError):
        AutoModelForCausalLM.from_pretrained(folder, device_map={"": DEVICE}, **publisher.load)
    assert made
    # Upstream's other threads may have asked once more before they were stopped, for tensors that are in order.
    cleared = [block for block in engine.device.blocks if (block.state == CLEARED).any()]
    assert cleared
    assert not any(block.array[block.state != NOTHING].any() for block in cleared)
    assert context.current() is None
