"""The host side with the real kernels under it, compiled for the CPU: layouts, launches and verdicts fit together."""

from __future__ import annotations

import ctypes

import pytest

from secure_loader.core.device import cuda
from secure_loader.core.device.cuda import CudaKernels
from secure_loader.core.device.host_tags import authenticate
from secure_loader.core.device.selftest import check, driver_scratch
from secure_loader.errors import AuthenticationError, DeviceError
from tests.unit.device.recording_driver import RecordingDriver
from tests.unit.device.shim import Shim, build, compiler
from tests.unit.device.test_cuda import STREAM, Memory

if compiler() is None:
    pytest.skip("no g++ to compile csrc/ for the CPU", allow_module_level=True)


@pytest.fixture(scope="module")
def shim() -> Shim:
    return Shim(build())


@pytest.fixture
def driver(shim):
    def run(kernel: str, blocks: int, threads: int, args: tuple[int, ...]) -> None:
        assert threads == 256
        if kernel == "sl_expand_keys":
            assert blocks == args[2]
            shim.expand(*args)
        elif kernel == "sl_gcm_open":
            shim.open(*args, grid=blocks)
        elif kernel == "sl_ctr":
            shim.ctr(*args, grid=blocks)
        else:
            assert kernel == "sl_gcm_finish"
            assert blocks == args[1]
            shim.finish(*args)

    return RecordingDriver(run)


@pytest.fixture
def kernels(driver):
    kernels = CudaKernels(driver, 0, b"\x7fELF", "shim")
    yield kernels
    kernels.close()


def test_the_known_answers(driver, kernels):
    with driver_scratch(driver, 0) as scratch:
        check(kernels, scratch)


@pytest.mark.parametrize("aad", [b"", b"twenty bytes of data"])
def test_opens_and_leaves_no_key(driver, kernels, aad):
    memory = Memory(driver, aad=aad)
    kernels.open(memory.batch, STREAM).wait()
    assert memory.found() == memory.plain
    memory.assert_no_key(driver)


@pytest.mark.parametrize("which", range(4))
def test_one_wrong_tag_overwrites_everything(driver, kernels, which):
    memory = Memory(driver)
    memory.tamper(which)
    with pytest.raises(AuthenticationError, match="1 of 4"):
        kernels.open(memory.batch, STREAM).wait()
    memory.assert_overwritten()
    memory.assert_no_key(driver)


def test_more_keys_than_one_launch_takes(driver, kernels, monkeypatch):
    monkeypatch.setattr(cuda, "KEYS_PER_LAUNCH", 3)
    memory = Memory(driver, sizes=(1, 17, 40, 300) * 2, keys=8)
    kernels.open(memory.batch, STREAM).wait()
    assert driver.calls.count("launch") == 3 * 3
    assert memory.found() == memory.plain
    memory.assert_no_key(driver)


def test_any_call_may_fail_once(driver, kernels):
    number, failed = 0, 0
    while True:
        start = len(driver.calls)
        driver.fails = lambda i, _name, at=start + number: i == at
        memory = Memory(driver, sizes=(0, 33, 257))
        try:
            kernels.open(memory.batch, STREAM).wait()
        except DeviceError:
            failed += 1
            driver.run()
            assert not any(plain in bytes(memory.buffer) for plain in memory.plain if plain)
        else:
            assert memory.found() == memory.plain
        memory.assert_no_key(driver)
        number += 1
        if start + number > len(driver.calls):
            break
    assert failed > 8


def test_counter_mode_alone(driver, kernels):
    memory = Memory(driver)
    keys = memory.batch.keys
    text = [memoryview(ctypes.string_at(c.address, c.nbytes)) for c in memory.chunks]
    chunks = [authenticate(keys[c.key], t, c) for c, t in zip(memory.chunks, text, strict=True)]
    kernels.decrypt(keys, chunks, STREAM).wait()
    assert memory.found() == memory.plain
    memory.assert_no_key(driver)
