"""safetensors' functions under our roof: same names, same signatures, encrypted files."""

from __future__ import annotations

import copy
import inspect
import io
import multiprocessing
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

import secure_loader.numpy
import secure_loader.torch
from secure_loader import MasterKey, SigningKey, TrustedSigner, TrustStore, safe_open
from secure_loader.core.aead import ALGORITHMS
from secure_loader.core.secrets import Secret
from secure_loader.errors import ConfigError, NotEncryptedError, UntrustedSignerError

MASTER = MasterKey("m", ALGORITHMS["aes256gcm"], Secret(os.urandom(32)))
SIGNING = SigningKey("s", Secret(os.urandom(32)))
TRUST = TrustStore([TrustedSigner("me", SIGNING.verify_key())])
WRITE = {"key": MASTER, "signing_key": SIGNING}
READ = {"keys": MASTER, "trust": TRUST, "strict": True}
DTYPES = [d for d in safetensors.torch._TYPES.values() if d.itemsize * 8 >= 8]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit: NaNs of narrow floats compare unequal to themselves."""
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("exclude", [(), ("*int*",)])
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, version: str, exclude: tuple[str, ...]) -> None:
    tensors = {str(d): (torch.randn(33, 5) * 10).to(d) for d in DTYPES}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0), "also empty": torch.empty(3, 0)}
    secure_loader.torch.save_file(tensors, tmp_path / "x", {"format": "pt"}, version=version, exclude=exclude, **WRITE)
    loaded = secure_loader.torch.load_file(tmp_path / "x", **READ)
    assert loaded.keys() == tensors.keys()
    assert all(same_bytes(loaded[name], tensor) for name, tensor in tensors.items())
    with safe_open(tmp_path / "x", **READ) as f:
        assert f.metadata() == {"format": "pt"}


def test_bytes_round_trip_for_both_frameworks() -> None:
    tensors = {"a": torch.arange(12).reshape(3, 4)}
    assert torch.equal(secure_loader.torch.load(secure_loader.torch.save(tensors, **WRITE), **READ)["a"], tensors["a"])
    arrays = {"a": np.arange(12, dtype=">i4").reshape(3, 4), "s": np.array(3.0)}
    loaded = secure_loader.numpy.load(secure_loader.numpy.save(arrays, **WRITE), **READ)
    assert all(np.array_equal(loaded[k], v) and loaded[k].shape == v.shape for k, v in arrays.items())


def test_a_plain_file_opens_unless_strictness_is_asked(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(300, 300)}
    safetensors.torch.save_file(tensors, tmp_path / "plain")
    assert torch.equal(secure_loader.torch.load_file(tmp_path / "plain", trust=TRUST)["a"], tensors["a"])
    arrays = secure_loader.numpy.load_file(tmp_path / "plain", trust=TRUST)
    assert np.array_equal(arrays["a"], tensors["a"].numpy())
    with pytest.raises(NotEncryptedError, match="plain safetensors"):
        secure_loader.torch.load_file(tmp_path / "plain", trust=TRUST, strict=True)


def test_a_stranger_is_refused_even_without_strictness(tmp_path: Path) -> None:
    secure_loader.torch.save_file({"a": torch.ones(3)}, tmp_path / "x", **WRITE)
    with pytest.raises(UntrustedSignerError, match="trust add"):
        secure_loader.torch.load_file(tmp_path / "x", keys=MASTER, trust=TrustStore([]))


def test_tied_weights_of_a_module_are_stored_once(tmp_path: Path) -> None:
    def module() -> torch.nn.Sequential:
        made = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        made[1].weight = made[0].weight
        return made

    saved, loaded = module(), module()
    secure_loader.torch.save_model(saved, tmp_path / "m", **WRITE)
    assert secure_loader.torch.load_model(loaded, tmp_path / "m", keys=MASTER, trust=TRUST) == ([], [])
    assert torch.equal(saved[0].weight, loaded[1].weight)
    with pytest.raises(ConfigError, match="share memory"):
        secure_loader.torch.save_file(saved.state_dict(), tmp_path / "n", **WRITE)
    with pytest.raises(RuntimeError, match="missing"):
        secure_loader.torch.load_model(torch.nn.Linear(3, 3), tmp_path / "m", keys=MASTER, trust=TRUST)


@pytest.mark.parametrize("exclude", [(), ("*",)], ids=["encrypted", "clear"])
def test_loaded_tensors_are_ordinary(tmp_path: Path, exclude: tuple[str, ...]) -> None:
    """Copied, pickled, saved, shared and changed like any other; the next read is not affected."""
    tensors = {"big": torch.randn(256, 256), "sealed": torch.ones(4)}
    if exclude:
        secure_loader.torch.save_file(tensors, tmp_path / "x", include=["sealed"], **WRITE)
    else:
        secure_loader.torch.save_file(tensors, tmp_path / "x", **WRITE)
    with safe_open(tmp_path / "x", **READ) as f:
        first = f.get_tensor("big")
        assert torch.equal(copy.deepcopy(first), tensors["big"])
        assert torch.equal(pickle.loads(pickle.dumps(first)), tensors["big"])
        buffer = io.BytesIO()
        torch.save(first, buffer)
        assert len(buffer.getvalue()) < first.nbytes + 4096
        buffer.seek(0)
        assert torch.equal(torch.load(buffer), tensors["big"])
        first.zero_()
        assert torch.equal(f.get_tensor("big"), tensors["big"])
        assert torch.equal(f.get_slice("big")[3], tensors["big"][3])
    assert torch.equal(secure_loader.torch.load_file(tmp_path / "x", **READ)["big"], tensors["big"])


def _total(tensor: torch.Tensor, answer: multiprocessing.SimpleQueue[float]) -> None:
    answer.put(float(tensor.sum()))


def test_loaded_tensors_travel_to_a_spawned_process(tmp_path: Path) -> None:
    secure_loader.torch.save_file({"a": torch.full((100, 100), 2.0)}, tmp_path / "x", **WRITE)
    tensor = secure_loader.torch.load_file(tmp_path / "x", **READ)["a"]
    context = torch.multiprocessing.get_context("spawn")
    answer = context.SimpleQueue()
    process = context.Process(target=_total, args=(tensor, answer))
    process.start()
    assert answer.get() == 20_000.0
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize("name", ["save", "save_file", "load", "load_file", "save_model", "load_model"])
def test_torch_signatures_begin_as_those_of_safetensors(name: str) -> None:
    theirs = inspect.signature(getattr(safetensors.torch, name)).parameters
    ours = inspect.signature(getattr(secure_loader.torch, name)).parameters
    assert [p for p in ours if p in theirs] == list(theirs)
    assert all(ours[p].default == theirs[p].default for p in theirs if theirs[p].default is not inspect.Parameter.empty)


@pytest.mark.parametrize("name", ["save", "save_file", "load", "load_file"])
def test_numpy_signatures_begin_as_those_of_safetensors(name: str) -> None:
    theirs = inspect.signature(getattr(safetensors.numpy, name)).parameters
    ours = inspect.signature(getattr(secure_loader.numpy, name)).parameters
    assert [p for p in ours if p in theirs] == list(theirs)


def test_what_cannot_be_saved_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a torch tensor"):
        secure_loader.torch.save_file({"a": [1, 2]}, tmp_path / "x", **WRITE)
    with pytest.raises(ConfigError, match="sparse"):
        secure_loader.torch.save_file({"a": torch.eye(3).to_sparse()}, tmp_path / "x", **WRITE)
    with pytest.raises(ConfigError, match="matches no tensor"):
        secure_loader.torch.save_file({"a": torch.ones(1)}, tmp_path / "x", exclude=["b"], **WRITE)
    with pytest.raises(ConfigError, match="reserved"):
        secure_loader.torch.save_file({"a": torch.ones(1)}, tmp_path / "x", {"__x__": ""}, **WRITE)
    assert list(tmp_path.iterdir()) == []
