"""Where device source is found, what identifies it, and that a wheel carries all of it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from secure_loader.core.device import cubins, sources
from secure_loader.core.device.sources import Sources, read, read_from
from secure_loader.errors import DeviceError

ROOT = Path(__file__).parents[3]


def test_a_clone_compiles_its_own_csrc():
    assert sources.folder() == ROOT / "csrc"
    assert {p.name for p in (ROOT / "csrc").glob("*.cu*")} == set(read().files)


def test_files_include_only_each_other():
    for name, text in read().files.items():
        included = [line.split('"')[1] for line in text.splitlines() if line.startswith("#include")]
        assert set(included) <= set(read().files), name


def test_the_fingerprint_sees_every_name_and_byte():
    files = {"a.cuh": "x", "b.cu": "y"}
    prints = [
        Sources(f).fingerprint
        for f in (
            files,
            {"a.cuh": "xb.cuy"},
            {"a.cuh": "xy", "b.cu": ""},
            {"a.cuh": "x", "c.cu": "y"},
            {"a.cuh": "x", "b.cu": "y "},
            {},
        )
    ]
    assert len(set(prints)) == len(prints)
    assert Sources(dict(files)).fingerprint == prints[0]


def test_the_unit_holds_whatever_defines_kernels():
    assert Sources({"a.cuh": "", "b.cu": "", "c.cu": ""}).unit == '#include "b.cu"\n#include "c.cu"\n'


def test_folders_without_source(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(DeviceError, match="no source of device kernels"):
            read_from(path)
    (tmp_path / "a.cu").write_bytes(b"\xff")
    with pytest.raises(DeviceError, match="cannot be read"):
        read_from(tmp_path)


def test_a_wheel_carries_source_and_cubins_and_no_shim(tmp_path):
    build = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    pytest.importorskip("hatchling")
    made = subprocess.run([sys.executable, "-c", build, tmp_path], cwd=ROOT, check=True, capture_output=True, text=True)
    with zipfile.ZipFile(tmp_path / made.stdout.split()[-1]) as wheel:
        wheel.extractall(tmp_path / "installed")
    device = tmp_path / "installed" / "secure_loader" / "core" / "device"
    assert read_from(device / "csrc").fingerprint == read().fingerprint
    assert {p.name for p in device.glob("images/*")} == {p.name for p in cubins.IMAGES.glob("*")}
    assert sorted(p.name for p in (device / "csrc").iterdir()) == sorted(read().files)
    # And the installed package finds them there.
    code = "from secure_loader.core.device import sources; print(sources.folder(), sources.read().fingerprint)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "installed")}, check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    assert found.stdout.split() == [str(device / "csrc"), read().fingerprint]
