"""The driver's interface: every name that is used exists with as many parameters, and results are read as they are meant."""

from __future__ import annotations

import ast
import ctypes
import inspect
import sys
from types import SimpleNamespace

import pytest

from secure_loader.core.device import driver as module
from secure_loader.core.device.driver import Driver
from secure_loader.errors import DeviceError


def calls() -> list[tuple[str, int]]:
    """Every function of the driver that is called, and with how many arguments."""
    tree = ast.parse(inspect.getsource(module))
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "_call"]
    return sorted({(n.args[0].value, len(n.args) - 1) for n in nodes})


@pytest.mark.parametrize(("name", "arguments"), [*calls(), ("cuInit", 1), ("cuEventQuery", 1), ("cuGetErrorString", 1)])
def test_the_bindings_have_what_is_called(name, arguments):
    api = pytest.importorskip("cuda.bindings.driver")
    signature = (getattr(api, name).__doc__ or "").splitlines()[0]
    assert signature.startswith(f"{name}(")
    inside = signature[len(name) + 1 : signature.rindex(")")]
    assert len([p for p in inside.split(",") if p.strip()]) == arguments, signature


def test_numbers_that_stand_for_names():
    api = pytest.importorskip("cuda.bindings.driver")
    kinds = api.CUdevice_attribute
    assert kinds(module._MULTIPROCESSORS) is kinds.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    assert kinds(module._MAJOR) is kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    assert kinds(module._MINOR) is kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
    flags = api.CUevent_flags
    assert module._EVENT_FLAGS == flags.CU_EVENT_DISABLE_TIMING | flags.CU_EVENT_BLOCKING_SYNC
    assert {"CUDA_SUCCESS", "CUDA_ERROR_NOT_READY"} <= set(dir(api.CUresult))


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DeviceError, match="cuda-bindings is not installed"):
        Driver()


def test_without_a_driver(monkeypatch):
    api = pytest.importorskip("cuda.bindings.driver")

    def missing(_flags):
        raise RuntimeError("Failed to dlopen libcuda.so.1\nand more")

    monkeypatch.setattr(api, "cuInit", missing)
    with pytest.raises(DeviceError, match=r"^no CUDA driver: Failed to dlopen libcuda\.so\.1$"):
        Driver()


class Api:
    """Answers as the bindings do: a code, and what comes with it."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_NOT_READY=600)

    def __init__(self) -> None:
        self.answers: dict[str, tuple] = {}
        self.asked: list[tuple] = []

    def cuGetErrorString(self, code):  # noqa: N802
        return 0, b"an illegal memory access was encountered"

    def CUdevice_attribute(self, number):  # noqa: N802
        return number

    def __getattr__(self, name):
        def call(*args):
            self.asked.append((name, *args))
            return self.answers.get(name, (0,))

        return call


@pytest.fixture
def api(monkeypatch):
    api = Api()
    bindings = SimpleNamespace(driver=api)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    return api


def test_a_code_becomes_an_error_that_names_the_call(api):
    driver = Driver()
    api.answers["cuMemAlloc"] = (SimpleNamespace(name="CUDA_ERROR_ILLEGAL_ADDRESS"), 0)
    with pytest.raises(
        DeviceError, match=r"^cuMemAlloc: CUDA_ERROR_ILLEGAL_ADDRESS \(an illegal memory access was encountered\)$"
    ):
        driver.allocate(1)
    api.answers["cuInit"] = (SimpleNamespace(name="CUDA_ERROR_NO_DEVICE"),)
    with pytest.raises(DeviceError, match="cuInit: CUDA_ERROR_NO_DEVICE"):
        Driver()


def test_devices(api):
    api.answers |= {
        "cuDeviceGetCount": (0, 2),
        "cuDeviceGet": (0, "device"),
        "cuDeviceGetName": (0, b"NVIDIA H200\0\0\0"),
        "cuDeviceGetAttribute": (0, 9),
    }
    assert Driver().gpus() == [(0, "NVIDIA H200", 99, 9), (1, "NVIDIA H200", 99, 9)]


def test_launch(api):
    Driver().launch("kernel", 5, 256, 77, 1 << 40, ctypes.c_uint32(3))
    assert api.asked[-1] == (
        *("cuLaunchKernel", "kernel", 5, 1, 1, 256, 1, 1, 0, 77),
        ((1 << 40, 3), (ctypes.c_void_p, ctypes.c_uint32)),
        0,
    )


@pytest.mark.parametrize(("code", "reached"), [(0, True), (600, False), (700, True)])
def test_events(api, code, reached):
    driver = Driver()
    api.answers["cuEventQuery"] = (code,)
    assert driver.reached("event") is reached


def test_the_context_before_comes_back(api):
    driver = Driver()
    with pytest.raises(KeyError), driver.current("context"):
        raise KeyError
    assert [call[0] for call in api.asked[-2:]] == ["cuCtxPushCurrent", "cuCtxPopCurrent"]


def test_memory_and_copies(api):
    driver = Driver()
    api.answers |= {"cuMemAlloc": (0, 512), "cuMemHostAlloc": (0, 4096)}
    assert (driver.allocate(9), driver.allocate_host(9)) == (512, 4096)
    driver.upload(512, 4096, 9, 7)
    driver.download(4096, 512, 9, 7)
    driver.clear(512, 9, 7)
    assert api.asked[-3:] == [
        ("cuMemcpyHtoDAsync", 512, 4096, 9, 7),
        ("cuMemcpyDtoHAsync", 4096, 512, 9, 7),
        ("cuMemsetD8Async", 512, 0, 9, 7),
    ]
