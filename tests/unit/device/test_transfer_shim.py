"""The whole way with the real kernels in it, compiled for the CPU: files of ours, through the ring, opened in place."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from secure_loader.core import archive
from secure_loader.core.device.cuda import CudaKernels
from secure_loader.core.device.engine import Engine
from secure_loader.errors import AuthenticationError, SecureLoaderError

from .fake import COMPUTE, VERIFIED, FakeDevice
from .files import CHUNK, DEVICE, same, session, write
from .recording_driver import RecordingDriver


class OnTheStream:
    """Kernels that run when the fake device gets to them, and are done at once then."""

    name = "shim"

    def __init__(self, device, kernels, driver):
        self._device, self._kernels, self._driver = device, kernels, driver

    def open(self, batch, stream):
        for block in self._device.blocks:
            if block.memory.nbytes:
                known = (ctypes.c_ubyte * block.memory.nbytes).from_address(block.memory.address)
                self._driver.live[block.memory.address] = known
        return Later(self._device, lambda: self._kernels.open(batch, stream).wait(), batch)


class Later:
    """A batch on its way."""

    def __init__(self, device, work, batch):
        self._device, self._work, self._batch = device, work, batch
        self._ran, self._error = False, None
        device.queue(COMPUTE, self._run)

    def _run(self):
        try:
            self._work()
        except SecureLoaderError as e:
            self._error = e
        self._ran = True

    def done(self):
        return self._ran

    def wait(self):
        self._device.run_until(self.done)
        if self._error is not None:
            raise self._error
        for chunk in self._batch.chunks:
            self._device.bytes_at(chunk.address, chunk.nbytes)[1][:] = VERIFIED


@pytest.fixture
def device(shim, monkeypatch):
    """A fake device, in the place of the first GPU, that decrypts with the kernels of ``csrc/``."""

    def run(kernel, blocks, threads, args):
        if kernel == "sl_expand_keys":
            shim.expand(*args)
        elif kernel == "sl_gcm_open":
            shim.open(*args, grid=blocks)
        else:
            shim.finish(*args)

    device = FakeDevice(2)
    driver = RecordingDriver(run)
    kernels = CudaKernels(driver, 0, b"\x7fELF", "shim")
    engine = Engine(device, OnTheStream(device, kernels, driver), slot_bytes=64 << 10)
    monkeypatch.setattr(archive, "engine_for", lambda name, kernels, *, require: engine)
    yield device
    kernels.close()


def tensors():
    rng = np.random.default_rng(3)
    sizes = {"a": CHUNK + 1, "b": 1, "clear": 5, "c": 77, "d": CHUNK, "e": 3}
    return {name: torch.from_numpy(rng.integers(0, 256, n, np.uint8)) for name, n in sizes.items()}


@pytest.mark.parametrize("algorithm", ["aes256gcm", "aes128gcm"])
@pytest.mark.parametrize("version", ["1", "2"])
def test_the_same_bytes(device, tmp_path, version, algorithm):
    path = write(tmp_path / "x", tensors(), algorithm, version, clear=("clear",))
    with session(algorithm).open(path, device=DEVICE) as f:
        assert same(f.get_tensors(), tensors())
        assert torch.equal(f.get_slice("a")[CHUNK - 3 :], tensors()["a"][CHUNK - 3 :])
    assert device.problems == []


def test_a_byte_that_was_changed(device, tmp_path):
    path = write(tmp_path / "x", tensors(), clear=("clear",))
    with session().open(path) as f:
        place = f.file.header.body_start + f.get_tensor_info("e").stop - 1
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with session().open(path, device=DEVICE) as f, pytest.raises(AuthenticationError):
        f.get_tensors()
    assert not any(block.array[block.state != 0].any() for block in device.blocks)
