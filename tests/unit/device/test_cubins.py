"""The shipped cubins: made of this source, by this compiler, byte for byte; which one a device gets."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from secure_loader.core.device import cubins, nvrtc, sources
from secure_loader.core.device.cubins import ARCHITECTURES, IMAGES, Cubin, Index, read_index, shipped, write
from secure_loader.core.device.sources import Sources
from secure_loader.errors import DeviceError

ROOT = Path(__file__).parents[3]
SOURCE = Sources({"a.cu": "text"})


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    made = [Cubin(arch, b"\x7fELF for %d" % arch) for arch in (70, 75, 80, 86, 90, 100)]
    write(Index(SOURCE.fingerprint, "12.8", []), made, folder)
    return folder


def test_what_is_shipped_was_made_of_this_source():
    index = read_index()
    assert index.fingerprint == sources.read().fingerprint, "csrc/ has changed: make cubins"
    assert index.options == list(nvrtc.OPTIONS)
    assert index.nvrtc == "12.8", "with the NVRTC that runs on old drivers too: requirements/cubins.in"
    assert set(index.sha256) == {f"sm_{arch}" for arch in ARCHITECTURES}
    assert {p.name for p in IMAGES.iterdir()} == {f"{name}.cubin" for name in index.sha256} | {"index.json"}
    for arch in ARCHITECTURES:
        assert hashlib.sha256((IMAGES / f"sm_{arch}.cubin").read_bytes()).hexdigest() == index.sha256[f"sm_{arch}"]
        assert shipped(sources.read(), arch).arch == arch


def test_what_is_shipped_comes_out_again():
    python = ROOT / ".venv-cubins" / "bin" / "python"
    if not python.exists():
        pytest.skip("the compiler of the shipped cubins is not here: `make cubins ARGS=--check` installs and runs it")
    command = [python, ROOT / "tools" / "make_cubins.py", "--check"]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("device", "image"),
    [(70, 70), (72, 70), (75, 75), (80, 80), (86, 86), (89, 86), (90, 90), (100, 100), (103, 100)],
)
def test_which_cubin_a_device_gets(images, device, image):
    assert shipped(SOURCE, device, images) == Cubin(image, b"\x7fELF for %d" % image)


@pytest.mark.parametrize("device", [60, 110, 120, 121])
def test_an_architecture_that_is_not_shipped(images, device):
    with pytest.raises(DeviceError, match=f"no cubin for sm_{device} is shipped; there are sm_70, sm_75"):
        shipped(SOURCE, device, images)


def test_cubins_of_another_source(images):
    with pytest.raises(DeviceError, match="made of another source"):
        shipped(Sources({"a.cu": "text, changed"}), 90, images)


def test_a_cubin_that_was_changed(images):
    path = images / "sm_90.cubin"
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(DeviceError, match="installation is damaged"):
        shipped(SOURCE, 90, images)
    path.unlink()
    with pytest.raises(DeviceError, match="cannot be read"):
        shipped(SOURCE, 90, images)


def test_no_index_or_a_broken_one(tmp_path):
    with pytest.raises(DeviceError, match="no cubins are shipped"):
        read_index(tmp_path)
    for text in ("", "[]", "{}", json.dumps({"fingerprint": "", "nvrtc": "", "options": [], "more": 1})):
        (tmp_path / cubins.INDEX).write_text(text)
        with pytest.raises(DeviceError, match="cannot be read"):
            read_index(tmp_path)


def test_writing_removes_what_was_there(images):
    write(Index(SOURCE.fingerprint, "12.8", []), [Cubin(90, b"new")], images)
    assert sorted(p.name for p in images.iterdir()) == ["index.json", "sm_90.cubin"]
