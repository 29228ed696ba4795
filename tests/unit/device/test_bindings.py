"""The whole way from the choice to a verdict through the real cuda-bindings, over a libcuda that runs our kernels on the CPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.device.shim import build, compiler

ROOT = Path(__file__).parents[3]

if compiler() is None:
    pytest.skip("no g++ to compile csrc/ for the CPU", allow_module_level=True)
if importlib.util.find_spec("cuda") is None:
    pytest.skip("cuda-bindings is not installed", allow_module_level=True)

LOAD = """
import warnings
warnings.simplefilter("error")
from secure_loader.core.device.choice import choose
found = choose(0, SETTING)
print(found.name, *found.reasons, sep="|")
if found.kernels:
    found.kernels.close()
"""


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory):
    folder = tmp_path_factory.mktemp("libcuda")
    source = Path(__file__).with_name("libcuda.cpp")
    flags = ["-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libcuda.so.1"]
    command = [compiler(), *flags, "-o", folder / "libcuda.so.1", source, "-ldl"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return folder


@pytest.fixture
def run(libcuda):
    def run(*arguments: str, arch: int = 90) -> str:
        environment = os.environ | {
            "LD_LIBRARY_PATH": str(libcuda),
            "SHIM": str(build()),
            "ARCH": str(arch),
            "PYTHONPATH": str(ROOT / "src"),
        }
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=100
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


@pytest.mark.parametrize(("arch", "name"), [(90, "cubin sm_90"), (103, "cubin sm_100"), (121, "cubin sm_120")])
def test_the_shipped_cubin_passes(run, arch, name):
    assert run("-c", LOAD.replace("SETTING", "'auto'"), arch=arch) == name


def test_nvrtc_compiles_and_the_next_process_takes_it_from_the_cache(run, secure_loader_home):
    nvrtc = LOAD.replace("SETTING", "'nvrtc'")
    found = run("-c", nvrtc)
    if "no NVRTC" in found:
        pytest.skip(found)
    assert found == "NVRTC sm_90"
    (kept,) = (secure_loader_home / "cache" / "cubins").iterdir()
    before = kept.stat().st_mtime_ns
    assert run("-c", nvrtc) == "NVRTC sm_90"
    assert kept.stat().st_mtime_ns == before


def test_an_unknown_architecture(run):
    first, *reasons = run("-c", LOAD.replace("SETTING", "'cubin'"), arch=130).split("|")
    assert first == "CPU"
    assert reasons[0].startswith("cubin: no cubin for sm_130 is shipped")


def test_env_shows_the_device(run):
    text = run("-m", "secure_loader", "env")
    assert "cuda:0 Stand-in (sm_90)  cubin sm_90" in text
