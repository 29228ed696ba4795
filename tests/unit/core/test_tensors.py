"""Tensors that come out of a file are ordinary ones."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from secure_loader import encrypt_model, safe_open
from secure_loader.core.tensors import bytes_of
from secure_loader.errors import ConfigError, DeviceError, TensorNameError
from tests.attacks.kit import KEY, SIGN, build_file, join, trust

LARGE = torch.arange(40_000, dtype=torch.float32).reshape(200, 200)
TENSORS = {"sealed": LARGE, "clear": LARGE + 1, "small": torch.tensor([1, 2, 3]), "scalar": torch.tensor(2.5)}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """The same tensors in files of all kinds; "sealed" is encrypted in all but the plain one."""
    folder = tmp_path_factory.mktemp("tensors")
    (folder / "plain").mkdir()
    save_file(TENSORS, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    found = {"plain": folder / "plain" / "model.safetensors"}
    for version in ("1", "2"):
        out = folder / f"v{version}"
        encrypt_model(
            folder / "plain", out, key=KEY, signing_key=SIGN, exclude=["clear"], version=version, chunk_size=65536
        )
        found[f"v{version}"] = out / "model.secure.safetensors"
    return found


KINDS = ("plain", "v1", "v2")


@pytest.fixture(params=KINDS)
def path(request, paths):
    return paths[request.param]


def open_it(path, framework="pt", **config):
    return safe_open(path, framework, keys=KEY, trust=trust(), config=config)


@pytest.mark.parametrize("name", ["sealed", "clear", "small", "scalar"])
def test_tensors_are_ordinary(path, name):
    with open_it(path) as f:
        tensor = f.get_tensor(name)
    expected = TENSORS[name]
    assert type(tensor) is torch.Tensor
    assert tensor.is_contiguous()
    assert not tensor.requires_grad
    assert torch.equal(tensor, expected)
    assert torch.equal(copy.deepcopy(tensor), expected)
    assert torch.equal(pickle.loads(pickle.dumps(tensor)), expected)
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), expected)
    assert torch.equal(torch.nn.Parameter(tensor, requires_grad=False), expected)
    assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("framework", ["pt", "numpy"])
@pytest.mark.parametrize("name", ["sealed", "clear", "small"])
@pytest.mark.parametrize(
    "read", [lambda f, n: f.get_tensor(n), lambda f, n: f.get_slice(n)[...], lambda f, n: f.get_slice(n)[:]]
)
def test_changing_one_does_not_change_the_next_read(path, framework, name, read):
    before = path.read_bytes()
    with open_it(path, framework) as f:
        first = read(f, name)
        first += 1
        second = read(f, name)
    assert bool((second == first - 1).all())
    assert bool((np.asarray(second) == TENSORS[name].numpy()).all())
    assert path.read_bytes() == before


def test_a_tensor_outlives_its_file(path):
    with open_it(path) as f:
        tensor, part = f.get_tensor("clear"), f.get_slice("clear")
    del f
    assert torch.equal(tensor, TENSORS["clear"])
    assert torch.equal(part[3], TENSORS["clear"][3])


def test_a_small_slice_does_not_keep_the_large_tensor_alive(path):
    with open_it(path, clear_tensors="copy") as f:
        for name in ("sealed", "clear"):
            part = f.get_slice(name)[:, 3]
            assert torch.equal(part, TENSORS[name][:, 3])
            assert part.untyped_storage().nbytes() < LARGE.nbytes // 2


def test_a_closed_archive(path):
    f = open_it(path)
    f.close()
    for use in (f.keys, f.metadata, lambda: f.get_tensor("small"), lambda: f.get_slice("small"), f.__enter__):
        with pytest.raises(ConfigError, match="File is closed"):
            use()
    f.close()
    assert repr(f) == "<Archive, closed>"


def test_an_open_file_does_not_travel(path):
    with open_it(path) as f:
        for thing in (f, f.get_slice("small")):
            for travel in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(TypeError, match="cannot be pickled or copied"):
                    travel(thing)


def test_names_and_descriptions(path):
    with open_it(path) as f:
        assert f.keys() == sorted(TENSORS)
        assert sorted(f.offset_keys()) == sorted(TENSORS)
        assert f.metadata() == {"format": "pt"}
        assert f.get_slice("sealed").get_shape() == [200, 200]
        assert f.get_slice("sealed").get_dtype() == "F32"
        assert f.get_tensor_info("scalar").shape == ()
        assert {n: t.shape for n, t in f.get_tensors().items()} == {n: t.shape for n, t in TENSORS.items()}
        for name in ("nope", None, 3, []):
            with pytest.raises(TensorNameError, match="File does not contain tensor"):
                f.get_tensor(name)
            with pytest.raises(KeyError):
                f.get_slice(name)


def test_frameworks_and_devices(path):
    with pytest.raises(ConfigError, match="framework 'tf' is unknown"):
        open_it(path, "tf")
    with (
        safe_open(path, "numpy", "cuda:0", keys=KEY, trust=trust()) as f,
        pytest.raises(DeviceError, match="live on the cpu"),
    ):
        f.get_tensor("small")
    with safe_open(path, "pt", "meta", keys=KEY, trust=trust()) as f:
        assert f.get_tensor("small").device.type == "meta"


def _child(queue, tensor):
    queue.put((float(tensor.sum()), torch.nn.functional.relu(tensor).shape))
    tensor.zero_()


@pytest.mark.parametrize("name", ["sealed", "clear"])
def test_tensors_cross_processes(paths, name):
    with open_it(paths["v2"]) as f:
        tensor = f.get_tensor(name)
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=_child, args=(queue, tensor))
    child.start()
    total, shape = queue.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0
    assert total == float(TENSORS[name].sum())
    assert shape == TENSORS[name].shape
    assert not tensor.any(), "shared, as any tensor is"


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3).to_sparse(),
        lambda: [1, 2],
        lambda: None,
        lambda: np.array(["a"]),
        lambda: np.array([object()]),
    ],
)
def test_what_cannot_be_saved(make):
    with pytest.raises(ConfigError):
        bytes_of(make())


def test_views_are_saved_as_what_they_show():
    base = torch.arange(12).reshape(3, 4)
    for view in (base.T, base[:, 1], base[1:], base.expand(2, 3, 4), base[::2, ::2]):
        code, shape, data = bytes_of(view)
        assert (code, shape, bytes(data)) == ("I64", tuple(view.shape), view.contiguous().numpy().tobytes())
        assert bytes(bytes_of(view.numpy())[2]) == bytes(data)
    assert bytes(bytes_of(np.arange(3, dtype=">i4"))[2]) == np.arange(3, dtype="<i4").tobytes()
    conj = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert bytes(bytes_of(conj)[2]) == conj.resolve_conj().numpy().tobytes()


def test_a_truncated_file_cannot_be_mapped(tmp_path):
    path = build_file(tmp_path / "x.safetensors")
    from secure_loader.errors import ReadError

    with open_it(path) as f:
        with path.open("r+b") as out:
            out.truncate(4096)
        with pytest.raises(ReadError, match="truncated since it was opened") as caught:
            f.get_tensor("clear")
    assert caught.value.tensor == "clear"


@pytest.mark.parametrize(
    "read", [lambda f: f.get_tensor("a"), lambda f: f.get_slice("a")[0], lambda f: f.get_slice("a")[...]]
)
def test_more_dimensions_than_numpy_has(tmp_path, read):
    path = join(tmp_path / "x", {"a": {"dtype": "U8", "shape": [1] * 65, "data_offsets": [0, 1]}}, b"x")
    with safe_open(path, "numpy") as f, pytest.raises(DeviceError, match="at most 64 dimensions"):
        read(f)
    with safe_open(path, "pt") as f:
        assert read(f).ndim in (64, 65)
