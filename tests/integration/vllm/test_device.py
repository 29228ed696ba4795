"""Weights for a GPU go there as they are stored: here the GPU is a fake one, vLLM's parameters and the files are real."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


@pytest.fixture
def engine(monkeypatch):
    """Stands in for the CPU, which is where vLLM's parameters are."""
    from secure_loader.core.archive import TensorFile
    from tests.unit.device.host_engine import HostEngine

    made = HostEngine()
    monkeypatch.setattr(TensorFile, "engine", lambda self, device: made if device == "cpu" else None)
    return made


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Names of the tensors that were decrypted in host memory."""
    from secure_loader.core.archive import TensorFile

    names = []
    monkeypatch.setattr(TensorFile, "read", lambda self, wanted: names.extend(w.name for w in wanted))
    return names


@pytest.fixture
def opened(secure_moe, tiny_moe):
    from safetensors.torch import load_file

    from secure_loader import Session

    file = Session().open_file(secure_moe / "model.secure.safetensors")
    return file, {n: t for n, t in load_file(tiny_moe / "model.safetensors").items() if t.ndim == 2}


def lazy(file, name):
    from secure_loader.vllm.lazy import LazyTensor

    return LazyTensor(file, file.info(name))


def test_copied_into_a_parameter_without_a_detour(opened, engine, on_the_cpu):
    import torch

    file, plain = opened
    for name, tensor in plain.items():
        rows = tensor.shape[0]
        target = torch.zeros(rows * 2, *tensor.shape[1:], dtype=tensor.dtype)
        # A rank's rows, and where they are in a parameter that several weights share.
        half = rows // 2
        target[rows : rows + half].copy_(lazy(file, name).narrow(0, half, half))
        assert torch.equal(target[rows : rows + half], tensor[half : 2 * half])
        assert not target[:rows].any()
        assert engine.asked[-1] == tensor[:half].nbytes
    assert on_the_cpu == []
    assert engine.device.problems == []


def test_other_columns_and_dtypes_are_made_there(opened, engine, on_the_cpu):
    import torch

    file, plain = opened
    for name, tensor in plain.items():
        columns = tensor.shape[1] // 2
        target = torch.zeros(tensor.shape[0], columns, dtype=torch.float64)
        target.copy_(lazy(file, name).narrow(1, columns, columns))
        assert torch.equal(target, tensor[:, columns : 2 * columns].double())
        assert torch.equal(lazy(file, name).to(device="cpu", dtype=torch.float64), tensor.double())
    assert on_the_cpu == []


def test_a_lazy_tensor_that_was_changed_is_copied_as_it_is_now(opened, engine):
    import torch

    file, plain = opened
    name, tensor = next(iter(plain.items()))
    weight = lazy(file, name)
    weight.mul_(2)
    target = torch.zeros_like(tensor)
    target.copy_(weight)
    assert torch.equal(target, tensor * 2)


def test_a_wrong_tag_leaves_zeros_in_the_parameter(secure_moe, tmp_path, engine):
    import torch

    from secure_loader import Session
    from secure_loader.errors import AuthenticationError
    from tests.attacks.kit import flip

    path = tmp_path / "model.secure.safetensors"
    path.write_bytes((secure_moe / "model.secure.safetensors").read_bytes())
    file = Session().open_file(path)
    info = max(file.header.tensors.values(), key=lambda t: t.nbytes)
    flip(path, file.header.body_start + info.stop - 1)
    target = torch.ones(info.shape, dtype=lazy(file, info.name).dtype)
    with pytest.raises(AuthenticationError, match=r"authentication|tag"):
        target.copy_(lazy(file, info.name))
    assert not target.any()


@pytest.mark.parametrize("lazily", [True, False])
def test_the_loader_sends_all_of_it_there(secure_moe, tiny_moe, engine, on_the_cpu, monkeypatch, lazily):
    import torch
    from safetensors.torch import load_file
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from secure_loader.vllm import register

    register()
    monkeypatch.setattr("secure_loader.vllm.loader._MIN_LAZY_ON_DEVICE", 4096)
    monkeypatch.setattr("secure_loader.vllm.loader._MAX_AHEAD_ON_DEVICE", 20_000)
    loader = get_model_loader(LoadConfig(load_format="secure", model_loader_extra_config={"lazy": lazily}))
    loader._device = "cpu"
    plain = load_file(tiny_moe / "model.safetensors")
    seen = {}
    for name, weight in loader._get_weights_iterator(DefaultModelLoader.Source(str(secure_moe), None)):
        seen[name] = torch.empty_like(plain[name]).copy_(weight)
    assert seen.keys() == plain.keys()
    assert all(torch.equal(seen[name], tensor) for name, tensor in plain.items())
    assert sum(engine.asked) == sum(t.nbytes for t in plain.values())
    assert 1 < len(engine.asked) < len(plain)
    assert on_the_cpu == []
