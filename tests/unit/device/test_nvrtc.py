"""Compiling without a GPU, a driver or a toolkit; skipped where NVRTC is not installed."""

from __future__ import annotations

import sys

import pytest

from secure_loader.core.device.nvrtc import Nvrtc
from secure_loader.core.device.sources import Sources, read
from secure_loader.errors import DeviceError

SMALL = Sources(
    {
        "types.cuh": "#pragma once\ntypedef unsigned u32;\n",
        "small.cu": '#include "types.cuh"\nextern "C" __global__ void small(u32 *p) { p[threadIdx.x] ^= 7; }\n',
    }
)


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    try:
        return Nvrtc()
    except DeviceError as e:
        pytest.skip(str(e))


def test_a_cubin_with_named_headers(nvrtc):
    image = nvrtc.compile(SMALL, 90)
    assert image.startswith(b"\x7fELF")
    assert b"small" in image
    assert nvrtc.compile(SMALL, 90) == image, "the same bytes each time"
    assert nvrtc.compile(SMALL, 80) != image


def test_programs_are_destroyed_whatever_becomes_of_them(nvrtc, monkeypatch):
    destroyed = []
    destroy = nvrtc._api.nvrtcDestroyProgram
    monkeypatch.setattr(
        nvrtc._api, "nvrtcDestroyProgram", lambda program: destroyed.append(program) or destroy(program)
    )
    nvrtc.compile(SMALL, 90)
    with pytest.raises(DeviceError):
        nvrtc.compile(Sources({"broken.cu": "nonsense"}), 90)
    assert len(destroyed) == 2


def test_names_of_the_bindings(nvrtc):
    """What is used of ``cuda.bindings.nvrtc`` is there, and means what it is taken for."""
    major, minor = map(int, nvrtc.version.split("."))
    assert (major, minor) >= (12, 8)
    assert {80, 90, 100} <= set(nvrtc.architectures())


def test_errors_come_with_the_compilers_own_words(nvrtc):
    with pytest.raises(DeviceError, match="NVRTC_ERROR_COMPILATION for sm_90") as caught:
        nvrtc.compile(Sources({"broken.cu": "nonsense"}), 90)
    assert "broken.cu(1): error" in str(caught.value)
    with pytest.raises(DeviceError, match="sm_10"):
        nvrtc.compile(SMALL, 10)


def test_our_kernels_compile(nvrtc):
    image = nvrtc.compile(read(), 90)
    for kernel in (b"sl_expand_keys", b"sl_gcm_open", b"sl_gcm_seal", b"sl_gcm_finish", b"sl_gcm_tag", b"sl_ctr"):
        assert kernel in image


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DeviceError, match="cuda-bindings is not installed"):
        Nvrtc()


def test_without_the_library(monkeypatch):
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")

    def missing():
        raise RuntimeError("Failed to find libnvrtc.so\nsearched in: here")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", missing)
    with pytest.raises(DeviceError, match=r"no NVRTC: Failed to find libnvrtc\.so \(hint") as caught:
        Nvrtc()
    assert "searched" not in str(caught.value)
