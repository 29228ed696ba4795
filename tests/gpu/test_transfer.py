"""Files to a GPU: the bytes that the CPU path gives, nothing of them after a failure, and little memory beside them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from secure_loader.core.device.direct import obstacle
from secure_loader.core.device.engine import engine_for
from secure_loader.core.device.torch_device import memory_of
from secure_loader.errors import AuthenticationError, DeviceError, ReadError
from tests.unit.device.files import CHUNK, content, same, session, write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]

MIB = 1 << 20
DEVICE = "cuda:0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for version in ("1", "2"):
        write(folder / version, content(), version=version, clear=("small.1*", "n65537"))
    write(folder / "chacha", content(), "chacha20poly1305")
    generator = torch.Generator().manual_seed(1)
    large = {f"layer.{i}": torch.randn(4096, 4096, generator=generator).to(torch.bfloat16) for i in range(20)}
    write(folder / "large", large | {"odd": torch.arange(1001, dtype=torch.uint8)}, chunk_size=2 * MIB)
    return folder


def on_host(tensors):
    return {name: tensor.cpu() for name, tensor in tensors.items()}


@pytest.mark.parametrize("page_cache", ["keep", "drop", "bypass"])
@pytest.mark.parametrize("integrity", ["tags", "full"])
@pytest.mark.parametrize("kernels", ["auto", "cpu"])
@pytest.mark.parametrize("version", ["1", "2"])
def test_the_same_bytes(folder, version, kernels, integrity, page_cache):
    settings = {"device_kernels": kernels, "integrity": integrity, "page_cache": page_cache}
    with session(**settings).open(folder / version, device=DEVICE) as f:
        found = f.get_tensors()
        assert {str(t.device) for t in found.values()} == {DEVICE}
        assert same(on_host(found), content())
        assert torch.equal(f.get_tensor("matrix").cpu(), content()["matrix"])
        rows = f.get_slice("matrix")
        for index in (3, slice(100, 200), (slice(None), 5), (slice(3, 600, 7), slice(9, 80))):
            assert torch.equal(rows[index].cpu(), content()["matrix"][index])


@pytest.mark.parametrize("name", ["1", "2", "large"])
def test_straight_from_the_disk(folder, name):
    if (why := obstacle()) is not None:
        pytest.skip(f"no GPUDirect Storage: {why}")
    with session(gpu_direct="off").open(folder / name, device=DEVICE) as f:
        expected = on_host(f.get_tensors())
    try:
        with session(gpu_direct="on").open(folder / name, device=DEVICE) as f:
            # Memory that was just given back, and that a kernel of the caller still writes to.
            junk = [torch.full((64 << 20,), 0xAA, dtype=torch.uint8, device=DEVICE) for _ in range(8)]
            del junk
            assert same(on_host(f.get_tensors()), expected)
    except DeviceError as e:
        pytest.skip(f"no GPUDirect Storage for this file: {e}")


def test_a_cipher_for_the_cpu(folder):
    with session("chacha20poly1305").open(folder / "chacha", device=DEVICE) as f:
        assert same(on_host(f.get_tensors()), content())


@pytest.mark.parametrize("size", [1 * MIB, 64 * MIB, 256 * MIB])
def test_a_large_file_through_rings_of_any_size(folder, size):
    with session().open(folder / "large") as f:
        expected = f.get_tensors()
    with session(device_buffer_bytes=size).open(folder / "large", device=DEVICE) as f:
        assert same(on_host(f.get_tensors()), expected)


def test_little_memory_beside_the_tensors(folder):
    with session().open(folder / "large", device=DEVICE) as f:
        f.get_tensor("odd")  # streams, kernels
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = f.get_tensors()
        above = torch.cuda.max_memory_allocated() - before - sum(t.nbytes for t in found.values())
    assert above < 64 * MIB


def test_dropped_tensors_give_memory_back(folder):
    with session().open(folder / "large", device=DEVICE) as f:
        found = f.get_tensors()
        full = torch.cuda.memory_allocated()
        for i in range(10):
            del found[f"layer.{i}"]
        assert full - torch.cuda.memory_allocated() >= 8 * 32 * MIB


def test_the_callers_stream_and_memory_in_use(folder):
    """New memory may have been somebody's a moment ago, whose work is still queued."""
    with session().open(folder / "large") as f:
        expected = f.get_tensor("layer.3")
    with session().open(folder / "large", device=DEVICE) as f, torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(5):
            old = torch.empty(4096 * 4096, dtype=torch.bfloat16, device=DEVICE)
            torch.cuda._sleep(20_000_000)
            old.fill_(7)
            del old
            got = f.get_tensor("layer.3")
            assert torch.equal((got + 0).cpu(), expected)


def test_a_part_into_a_parameter(folder):
    with session().open(folder / "2") as f:
        whole = f.get_tensor("matrix").reshape(-1)
    parameter = torch.full((50_000,), 7.0, device=DEVICE)
    with session().open(folder / "2", device=DEVICE) as f:
        engine = f.file.engine(DEVICE)
        part = f.file.part("matrix", 4 * 1001, 4 * 41_001)
        engine.fill([(part, memory_of(parameter), 4 * 5)], f.file.read_options, 64 * MIB)
    assert torch.equal(parameter[5:40_005].cpu(), whole[1001:41_001])
    assert (parameter[:5] == 7).all()
    assert (parameter[40_005:] == 7).all()


@pytest.mark.parametrize("kernels", ["auto", "cpu"])
@pytest.mark.parametrize("version", ["1", "2"])
def test_after_a_changed_byte_nothing_is_left(folder, tmp_path, version, kernels):
    with session().open(folder / version) as f:
        info, start = f.get_tensor_info("matrix"), f.file.header.body_start
    data = bytearray((folder / version).read_bytes())
    data[start + info.stop - 1] ^= 1
    path = Path(tmp_path / "x")
    path.write_bytes(data)
    parameter = torch.full((700 * 300,), 7.0, device=DEVICE)
    with session(device_kernels=kernels).open(path, device=DEVICE) as f:
        with pytest.raises(AuthenticationError):
            f.get_tensors()
        engine, part = f.file.engine(DEVICE), f.file.part("matrix")
        with pytest.raises(AuthenticationError):
            engine.fill([(part, memory_of(parameter), 0)], f.file.read_options, 64 * MIB)
        assert not parameter.any()
        assert torch.equal(f.get_tensor("n327687").cpu(), content()["n327687"])


def test_a_file_that_shrinks_meanwhile(folder, tmp_path):
    path = Path(tmp_path / "x")
    path.write_bytes((folder / "2").read_bytes())
    with session().open(path, device=DEVICE) as f:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - CHUNK)
        with pytest.raises(ReadError):
            f.get_tensors()


def test_many_threads_at_once(folder):
    with session().open(folder / "2", device=DEVICE) as f:
        expected, wrong = content(), []

        def get(n):
            mine = sorted(expected)[n::4]
            wrong.extend(name for name in mine if not torch.equal(f.get_tensor(name).cpu(), expected[name]))

        threads = [threading.Thread(target=get, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_several_devices_in_one_process(folder):
    assert engine_for("cuda:0") is not engine_for("cuda:1")
    for device in ("cuda:1", "cuda:0", 1):
        with session().open(folder / "2", device=device) as f:
            found = f.get_tensors()
        assert {str(t.device) for t in found.values()} == {f"cuda:{device}" if device == 1 else device}
        assert same(on_host(found), content())


CONTEXTS = """
import sys
from cuda.bindings import driver
from tests.unit.device.files import session
with session(device_kernels=sys.argv[2]).open(sys.argv[1], device="cuda:1") as f:
    f.get_tensors()
    f.get_slice("matrix")[3:5]
print(*(driver.cuDevicePrimaryCtxGetState(driver.cuDeviceGet(i)[1])[2] for i in range(2)))
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
@pytest.mark.parametrize("kernels", ["auto", "triton", "cpu"])
def test_nothing_is_taken_of_the_current_device_where_another_one_is_meant(folder, kernels):
    pytest.importorskip("cuda.bindings.driver")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", CONTEXTS, folder / "2", kernels]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.split() == ["0", "1"]
