"""GPUDirect Storage through the real cuda-bindings, over a libcufile and a libcuda whose devices' memory is the host's."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from secure_loader.core import environment
from secure_loader.core.device import direct
from secure_loader.core.device.direct import CuFile
from secure_loader.core.source import FileSource
from secure_loader.errors import DeviceError, SecureLoaderError

from .shim import compiler

ROOT = Path(__file__).parents[3]
needs_bindings = pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="cuda-bindings is not installed")

READ = """
import ctypes, os, sys, threading, warnings
warnings.simplefilter("error")
from secure_loader.core.device import direct
from secure_loader.core.source import FileSource
from secure_loader.errors import SecureLoaderError

folder = sys.argv[1]
direct._NVIDIA_FS = folder
reader, path = direct.CuFile(0), folder + "/file"
before = set(os.listdir("/proc/self/fd"))

def check(file, place, nbytes, at=5):
    memory = ctypes.create_string_buffer(b"\\x55" * (nbytes + 32), nbytes + 32)
    file.read(place, nbytes, ctypes.addressof(memory) + at)
    assert memory.raw[at : at + nbytes] == data[place : place + nbytes]
    assert set(memory.raw[:at] + memory.raw[at + nbytes :]) == {0x55}

with FileSource(path) as source:
    data = source.read(0, source.size)
    try:
        file, other = reader.open(source), reader.open(source)
    except SecureLoaderError as e:
        print(type(e).__name__, e)
        sys.exit()
    # Another file under the same name is of no interest.
    os.rename(path, path + ".old")
    with open(path, "wb") as f:
        f.write(bytes(len(data)))
    try:
        for place, nbytes in ((0, 1), (4096, 8192), (13, 100_001), (4095, 2), (len(data) - 3, 3), (7, 0)):
            check(file, place, nbytes)
            check(other, place, nbytes, 16)
        errors = []
        def work(n):
            try:
                for i in range(20):
                    check(file, 1000 * n + i, 50_000)
            except BaseException as e:
                errors.append(e)
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for t in threads: t.start()
        for t in threads: t.join()
        assert errors == [], errors
        os.truncate(path + ".old", 5000)
        check(file, 0, 5000)
        memory = ctypes.create_string_buffer(64)
        file.read(4990, 11, ctypes.addressof(memory))
    except SecureLoaderError as e:
        print(type(e).__name__, e)
    finally:
        for _ in range(2):
            file.close()
            other.close()
assert set(os.listdir("/proc/self/fd")) == before
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    if compiler() is None:
        pytest.skip("no g++ to compile the stand-ins")
    folder = tmp_path_factory.mktemp("libraries")
    for name, library in (("libcuda.cpp", "libcuda.so.1"), ("libcufile.cpp", "libcufile.so.0")):
        flags = ["-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{library}", "-pthread"]
        source = Path(__file__).with_name(name)
        command = [compiler(), *flags, "-o", folder / library, source, "-ldl"]
        subprocess.run(command, check=True, capture_output=True, text=True)
    return folder


@pytest.fixture
def run(libraries, tmp_path):
    def run(code: str, **settings: object) -> str:
        (tmp_path / "file").write_bytes(bytes(i * i % 251 for i in range(300_007)))
        # The bindings take what is loaded already before they look for a library.
        variables = {"NVFS": 2, "ARCH": 90, "LD_PRELOAD": libraries / "libcufile.so.0", "LD_LIBRARY_PATH": libraries}
        variables |= {"PYTHONPATH": ROOT / "src"} | settings
        done = subprocess.run(
            [sys.executable, "-c", code, tmp_path],
            env=os.environ | {name: str(value) for name, value in variables.items()},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip().replace(str(tmp_path), "")

    try:
        with FileSource(__file__) as source:
            os.close(source.reopen_directly())
    except OSError as e:
        pytest.skip(f"no O_DIRECT here: {e}")
    return run


TRUNCATED = "ReadError /file: ends at byte 5,000, where more was due: truncated since it was opened"


@needs_bindings
@pytest.mark.parametrize("settings", [{}, {"MOST": 4097}, {"NVFS": 0, "STATUS": 1 << 11}])
def test_what_is_read(run, settings):
    """Of any alignment, from many threads, in short reads, by the module or by the kernel's own peer-to-peer DMA."""
    assert run(READ, **settings) == TRUNCATED


@needs_bindings
def test_the_compatibility_mode_is_not_taken(run):
    assert "it runs in its compatibility mode" in run(READ, NVFS=0)
    assert "it runs in its compatibility mode" in run(READ, NVFS=0, STATUS=1 << 4)


@needs_bindings
@pytest.mark.parametrize(("code", "why"), [(-1, "the system reports an error"), (-5011, "cuFile's error 5011")])
def test_a_read_that_fails(run, code, why):
    assert run(READ, FAIL=code).startswith(f"ReadError /file: direct read failed at byte 0: {why}")


@needs_bindings
def test_without_the_module_cufile_is_not_started(monkeypatch, tmp_path):
    """It would write a log into the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(direct, "_NVIDIA_FS", str(tmp_path / "nothing"))
    assert direct.obstacle() is not None
    reader = CuFile(0)
    for _ in range(2):
        with FileSource(__file__) as source, pytest.raises(DeviceError, match=r"nvidia-fs is not loaded|no cuFile"):
            reader.open(source)
    assert list(tmp_path.iterdir()) == []


def test_without_the_bindings(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert direct.obstacle() == "cuda-bindings with cuFile is not installed"
    with FileSource(__file__) as source, pytest.raises(SecureLoaderError, match="cuFile is not installed"):
        CuFile(0).open(source)


def test_environment_shows_it(monkeypatch):
    assert environment.describe().gpu_direct == "no: there is no GPU of NVIDIA's"
    monkeypatch.setattr(environment, "_devices", lambda setting: [environment.Device("cuda:0 X (sm_90)", "x", ())])
    monkeypatch.setattr(environment, "obstacle", lambda: "for a reason")
    assert environment.describe().gpu_direct == "no: for a reason"
    monkeypatch.setattr(environment, "obstacle", lambda: None)
    assert environment.describe().gpu_direct == "where the file system can"
