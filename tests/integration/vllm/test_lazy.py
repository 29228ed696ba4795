"""Lazy weights behave as the tensors that they stand for, and read no more than they must."""

from __future__ import annotations

import copy
import pickle
import random

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


@pytest.fixture
def opened(secure_moe, tiny_moe, monkeypatch):
    """The open encrypted file, and its plain weights of two dimensions."""
    from safetensors.torch import load_file

    from secure_loader import Session

    monkeypatch.setattr("secure_loader.vllm.lazy.MIN_BYTES", 0)
    file = Session().open_file(secure_moe / "model.secure.safetensors")
    return file, {n: t for n, t in load_file(tiny_moe / "model.safetensors").items() if t.ndim == 2}


def make(file, name):
    from secure_loader.vllm.lazy import LazyTensor

    return LazyTensor(file, file.info(name))


@pytest.fixture
def reads(monkeypatch):
    """Bytes that were asked for, one number per read."""
    from secure_loader.core.archive import TensorFile

    sizes = []
    stock = TensorFile.read_into

    def read_into(self, name, out, start=0):
        sizes.append(out.nbytes)
        stock(self, name, out, start)

    monkeypatch.setattr(TensorFile, "read_into", read_into)
    return sizes


def view(tensor, kind, a, b, c):
    """One random view or computation; the same for a lazy and for an ordinary tensor."""
    if tensor.ndim == 0 or 0 in tensor.shape:
        return tensor
    dim = int(a * tensor.ndim)
    size = tensor.shape[dim]
    start = int(b * size)
    length = 1 + int(c * (size - start - 1))
    return {
        "narrow": lambda: tensor.narrow(dim, start, length),
        "step": lambda: tensor[::2],
        "negative": lambda: tensor[-length:],
        "select": lambda: tensor.select(dim, start),
        "unsqueeze": lambda: tensor.unsqueeze(dim),
        "unbind": lambda: tensor.unbind(dim)[start],
        "split": lambda: tensor.split(length, dim)[-1],
        "sizes": lambda: tensor.split([start, size - start], dim)[1],
        "chunk": lambda: tensor.chunk(3, dim)[-1],
        "flat": lambda: tensor.reshape(-1),
        "view": lambda: tensor.reshape(1, *tensor.shape, 1),
        "transpose": lambda: tensor.transpose(0, dim),
        "multiply": lambda: tensor * 2,
        "data": lambda: tensor.data,
    }[kind]()


KINDS = "narrow step negative select unsqueeze unbind split sizes chunk flat view transpose multiply data".split()


def test_random_views_agree(opened):
    import torch

    file, plain = opened
    rng = random.Random(1)
    for _ in range(600):
        name = rng.choice(list(plain))
        lazy, ordinary = make(file, name), plain[name]
        steps = [(rng.choice(KINDS), rng.random(), rng.random(), rng.random()) for _ in range(rng.randint(0, 5))]
        for step in steps:
            lazy, ordinary = view(lazy, *step), view(ordinary, *step)
        assert (lazy.shape, lazy.dtype, lazy.is_contiguous()) == (
            ordinary.shape,
            ordinary.dtype,
            ordinary.is_contiguous(),
        ), steps
        target = torch.full(ordinary.shape, 7, dtype=ordinary.dtype)
        assert torch.equal(target.copy_(lazy), ordinary), steps
        assert torch.equal(torch.zeros(ordinary.shape).copy_(lazy), ordinary.float()), steps


def test_copy_reads_only_what_it_copies(opened, reads):
    import torch

    file, plain = opened
    name = "model.embed_tokens.weight"
    rows = make(file, name).narrow(0, 64, 32)
    columns = make(file, name).narrow(1, 0, 8)
    assert reads == []
    target = torch.nn.Parameter(torch.empty_like(plain[name][64:96]), requires_grad=False)
    target.data.copy_(rows)
    assert reads == [target.nbytes]
    assert torch.equal(target, plain[name][64:96])
    columns.clone()
    assert reads == [target.nbytes, plain[name].nbytes]


def test_copy_to_meta_reads_nothing(opened, reads):
    import torch

    file, plain = opened
    name = next(iter(plain))
    torch.empty(plain[name].shape, dtype=plain[name].dtype, device="meta").copy_(make(file, name))
    assert reads == []


def test_change_in_place_is_seen_by_every_view(opened):
    import torch

    file, plain = opened
    name = next(iter(plain))
    whole = make(file, name)
    part = whole[2:4]
    part.mul_(0)
    whole += 1
    expected = plain[name].clone()
    expected[2:4].mul_(0)
    expected += 1
    assert torch.equal(torch.empty_like(expected).copy_(whole), expected)
    assert torch.equal(part + 0, expected[2:4])
    assert torch.equal(make(file, name) + 0, plain[name]), "another read sees the stored weight"


def test_what_torch_does_not_dispatch(opened):
    import torch

    file, plain = opened
    name = next(iter(plain))
    for same in (
        pickle.loads(pickle.dumps(make(file, name))),
        copy.deepcopy(make(file, name)),
        torch.nn.Parameter(make(file, name), requires_grad=False),
        torch.tensor(make(file, name).tolist(), dtype=plain[name].dtype),
        make(file, name).float().numpy(),
    ):
        assert torch.equal(torch.as_tensor(same).to(plain[name].dtype), plain[name])
    assert make(file, name).data_ptr() != 0


def test_error_in_the_copy_is_ours_and_wipes(opened, monkeypatch):
    import torch

    from secure_loader.core.archive import TensorFile
    from secure_loader.core.secrets import Secret
    from secure_loader.errors import AuthenticationError

    file, plain = opened
    name = next(iter(plain))
    monkeypatch.setattr(TensorFile, "_dek_table", lambda _: {name: Secret(bytes(32))})
    target = torch.ones_like(plain[name])
    with pytest.raises(AuthenticationError, match=name):
        target.copy_(make(file, name))
    assert not target.any()
