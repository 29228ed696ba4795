"""Which kernels a device gets: the order, every reason to go on to the next, and what the settings change."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from types import SimpleNamespace

import pytest

from secure_loader.core import environment
from secure_loader.core.device import choice, cubins, sources
from secure_loader.core.device.choice import choose, survey
from secure_loader.core.device.cubins import Cubin, Index
from secure_loader.core.device.sources import Sources
from secure_loader.errors import DeviceError
from tests.unit.device.recording_driver import Model, RecordingDriver

SOURCE = Sources({"a.cu": "text"})
IMAGE = b"\x7fELF"


class Compiler:
    version = "13.0"

    def architectures(self):
        return [80, 90, 100]

    def compile(self, source, arch):
        return IMAGE + b"compiled"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with a device, a wheel with a cubin for it, NVRTC, and Triton; tests take away what they like."""
    found = SimpleNamespace(driver=RecordingDriver(gpus=2), closed=[])
    cubins.write(Index(SOURCE.fingerprint, "12.8", []), [Cubin(90, IMAGE)], tmp_path / "images")

    class Triton:
        name = "Triton"

        def __init__(self, ordinal):
            self.ordinal = ordinal

        def close(self):
            found.closed.append(self.name)

    def absent(*_):
        raise DeviceError("no CUDA driver: none")

    found.no_driver = lambda: monkeypatch.setattr(choice, "Driver", absent)
    found.arch = lambda arch: setattr(found.driver, "_gpus", [g._replace(arch=arch) for g in found.driver.gpus()])
    monkeypatch.setattr(choice, "_made", {})
    monkeypatch.setattr(choice, "Driver", lambda: found.driver)
    monkeypatch.setattr(choice, "Nvrtc", Compiler)
    monkeypatch.setattr(sources, "read", lambda: SOURCE)
    shipped = cubins.shipped
    monkeypatch.setattr(cubins, "shipped", lambda source, arch: shipped(source, arch, tmp_path / "images"))
    monkeypatch.setitem(sys.modules, "secure_loader.core.device.triton_kernels", SimpleNamespace(TritonKernels=Triton))
    monkeypatch.setattr(choice, "_torch_scratch", lambda ordinal: f"cuda:{ordinal}")
    found.check_triton = lambda *_: None
    check = choice.check
    monkeypatch.setattr(choice, "check", lambda k, s: found.check_triton(k, s) if k.name == "Triton" else check(k, s))
    return found


def names(reasons: tuple[str, ...]) -> list[str]:
    return [reason.partition(":")[0] for reason in reasons]


def test_the_shipped_cubin_comes_first(machine):
    found = choose(0)
    assert (found.name, found.reasons) == ("cubin sm_90", ())
    assert found.kernels.name == "cubin sm_90"


def test_an_unknown_architecture_is_compiled_and_cached(machine, monkeypatch):
    machine.arch(103)
    found = choose(0)
    assert (found.name, names(found.reasons)) == ("NVRTC sm_100", ["cubin"])
    assert "no cubin for sm_103 is shipped" in found.reasons[0]
    monkeypatch.setattr(Compiler, "compile", lambda *_: pytest.fail("compiled again"))
    assert choose(1).name == "NVRTC sm_100"


def test_then_triton(machine):
    machine.arch(130)
    found = choose(0)
    assert (found.name, names(found.reasons)) == ("Triton", ["cubin", "nvrtc"])
    assert "NVRTC 13.0 does not know sm_130" in found.reasons[1]


def test_then_the_cpu(machine, monkeypatch, caplog):
    machine.no_driver()
    monkeypatch.setitem(sys.modules, "secure_loader.core.device.triton_kernels", None)
    found = choose(0)
    assert (found.kernels, found.name) == (None, "CPU")
    assert names(found.reasons) == ["cubin, nvrtc", "triton"]
    assert caplog.records[-1].levelno == logging.WARNING
    assert "what goes to device 0 is decrypted by CPU (cubin, nvrtc: no CUDA driver" in caplog.text


def test_kernels_that_fail_their_test_are_closed_and_not_used(machine):
    class Wrong(Model):
        def _is_genuine(self, chunk, schedules):
            return True

    machine.driver._kernels = Wrong()
    found = choose(0)
    assert found.name == "Triton"
    assert found.reasons == ("cubin, nvrtc: known-answer test: a chunk that was tampered with was accepted",)
    assert machine.driver.modules == 0
    assert not machine.driver.live
    assert machine.driver.retained[0] == 0


@pytest.mark.parametrize(
    "error", [DeviceError("failed"), RuntimeError("no compiler\nat all"), ImportError(), KeyError("x")]
)
def test_whatever_triton_raises_is_a_reason(machine, error):
    machine.no_driver()

    def broken(*_):
        raise error

    machine.check_triton = broken
    found = choose(0)
    assert found.name == "CPU"
    assert machine.closed == ["Triton"]
    assert "\n" not in found.reasons[-1]
    assert found.reasons[-1].startswith("triton: ")


@pytest.mark.parametrize(
    ("setting", "name"),
    [("auto", "cubin sm_90"), ("cubin", "cubin sm_90"), ("nvrtc", "NVRTC sm_90"), ("triton", "Triton"), ("cpu", "CPU")],
)
def test_the_setting(machine, setting, name):
    assert choose(0, setting).name == name


@pytest.mark.parametrize("setting", ["cubin", "nvrtc"])
def test_one_way_takes_no_other(machine, setting):
    machine.no_driver()
    found = choose(0, setting)
    assert (found.kernels, names(found.reasons)) == (None, [setting])


def test_required(machine, monkeypatch):
    assert choose(0, require=True).kernels is not None
    machine.no_driver()
    with pytest.raises(DeviceError, match=r"require_device_kernels is set: cubin: no CUDA driver: none \(hint: .*env"):
        choose(1, "cubin", require=True)
    with pytest.raises(DeviceError, match="device_kernels is cpu"):
        choose(1, "cpu", require=True)


def test_every_way_is_tested_on_the_device(machine):
    tested = []
    machine.check_triton = lambda kernels, scratch: tested.append((kernels.name, scratch))
    choose(1, "triton")
    assert tested == [("Triton", "cuda:1")]
    before = len(machine.driver.calls)
    choose(1, "cubin")
    assert machine.driver.calls[before:].count("launch") >= 6
    assert set(machine.driver.contexts) == {1001}


def test_remembered(machine):
    found = choose(0)
    machine.no_driver()
    assert choose(0) is found
    assert choose(1).kernels is None or choose(1).name == "Triton"


def test_a_fork_finds_out_for_itself(machine):
    choose(0)
    machine.no_driver()
    machine.check_triton = lambda *_: (_ for _ in ()).throw(DeviceError("none"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork where there are threads
        child = os.fork()
    if child == 0:
        os._exit(0 if choose(0).kernels is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert choose(0).name == "cubin sm_90"


def test_survey_imports_no_framework_and_gives_everything_back(machine):
    found = survey()
    assert [(f.gpu.ordinal, f.name, f.reasons) for f in found] == [(0, "cubin sm_90", ()), (1, "cubin sm_90", ())]
    assert machine.driver.modules == 0
    assert machine.driver.retained.total() == 0
    assert survey("cpu")[0].name == "CPU"
    machine.arch(130)
    (first, _) = survey()
    assert first.name == "Triton or the CPU"
    assert names(first.reasons) == ["cubin", "nvrtc"]
    assert survey("cubin")[0].name == "CPU"
    assert survey("triton")[0].name == "Triton or the CPU"


def test_survey_without_devices(machine):
    machine.driver._gpus = []
    with pytest.raises(DeviceError, match="knows no device"):
        survey()


def test_environment_shows_it(machine):
    first, _second = environment.describe().devices
    assert (first.name, first.kernels, first.reasons) == ("cuda:0 Recorder 0 (sm_90)", "cubin sm_90", ())
    machine.no_driver()
    (only,) = environment.describe().devices
    assert only.reasons == ("no CUDA driver: none",)
