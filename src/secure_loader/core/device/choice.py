"""Which kernels decrypt on a device: the first of the ways below that passes its known-answer test there.

==========  ==========================================================================================================
``cubin``   the machine code that the wheel carries, by the driver's interface
``nvrtc``   the same source, compiled on this machine for an architecture that the wheel does not know, and cached
``triton``  the second implementation: AMD's devices, and NVIDIA's where the driver's interface cannot be used
(none)      the CPU decrypts, and verified tensors are copied to the device
==========  ==========================================================================================================

All of them authenticate; there is no way that does not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import DeviceError
from . import cubins, sources
from .batch import Kernels
from .cache import compiled
from .cuda import CudaKernels
from .driver import Driver, Gpu
from .nvrtc import Nvrtc
from .selftest import Scratch, TorchScratch, check, driver_scratch

WAYS = ("cubin", "nvrtc", "triton")
SETTINGS = ("auto", *WAYS, "cpu")
"""Values of the setting ``device_kernels``."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """What decrypts for a device.

    Attributes:
        kernels: The kernels, or None: the CPU.
        name: For people: ``"cubin sm_90"``, ``"NVRTC sm_103"``, ``"Triton"``, ``"CPU"``.
        reasons: Why each way that comes before was not taken, as ``"cubin: …"``.
    """

    kernels: Kernels | None
    name: str
    reasons: tuple[str, ...]


_made: dict[tuple[int, str], Choice] = {}
_lock = threading.Lock()


def _after_fork() -> None:
    # A child cannot use the driver that its parent has initialised; it finds that out for itself.
    global _made, _lock
    _made, _lock = {}, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def choose(ordinal: int, setting: str = "auto", *, require: bool = False) -> Choice:
    """Find kernels for a device, once in a process for each setting.

    Args:
        ordinal: Which device, as ``torch.device("cuda", ordinal)``.
        setting: ``"auto"`` tries all ways in order, ``"cpu"`` none, the name of a way only that one.
        require: Raise instead of leaving it to the CPU.

    Raises:
        DeviceError: ``require``, and no kernels can be used; the message says why.
    """
    with _lock:
        choice = _made.get((ordinal, setting))
        if choice is None:
            choice = _made[ordinal, setting] = _choose(ordinal, setting)
            _report(ordinal, choice)
    if require and choice.kernels is None:
        raise DeviceError(
            f"nothing can decrypt on device {ordinal}, and require_device_kernels is set: {'; '.join(choice.reasons)}",
            hint="`secure-loader env` says what is missing",
        )
    return choice


def _choose(ordinal: int, setting: str) -> Choice:
    if setting == "cpu":
        return Choice(None, "CPU", ("device_kernels is cpu",))
    return _first(ordinal, WAYS if setting == "auto" else (setting,))


def _first(ordinal: int, ways: tuple[str, ...]) -> Choice:
    failed: dict[str, list[str]] = {}
    for way in ways:
        try:
            kernels = _TRY[way](ordinal)
        except Exception as e:  # noqa: BLE001 - a way that does not work, however, is no reason to fail: the next one is tried
            _log.debug("device %d: %s cannot be used", ordinal, way, exc_info=True)
            failed.setdefault(" ".join(str(e).split()) or type(e).__name__, []).append(way)
        else:
            return Choice(kernels, kernels.name, _reasons(failed))
    return Choice(None, "CPU", _reasons(failed))


def _reasons(failed: dict[str, list[str]]) -> tuple[str, ...]:
    return tuple(f"{', '.join(ways)}: {reason}" for reason, ways in failed.items())


def _report(ordinal: int, choice: Choice) -> None:
    level = logging.INFO if choice.kernels is not None else logging.WARNING
    because = f" ({'; '.join(choice.reasons)})" if choice.reasons else ""
    _log.log(level, "what goes to device %d is decrypted by %s%s", ordinal, choice.name, because)


def _cubin(ordinal: int) -> Kernels:
    driver = Driver()
    gpu = driver.gpu(ordinal)
    cubin = cubins.shipped(sources.read(), gpu.arch)
    return _checked(driver, ordinal, cubin.image, f"cubin sm_{cubin.arch}")


def _nvrtc(ordinal: int) -> Kernels:
    driver = Driver()
    gpu, compiler = driver.gpu(ordinal), Nvrtc()
    # As with cubins: an older one of the same generation runs as well.
    fitting = [a for a in compiler.architectures() if a // 10 == gpu.arch // 10 and a <= gpu.arch]
    if not fitting:
        raise DeviceError(f"NVRTC {compiler.version} does not know sm_{gpu.arch}", hint="install a newer one")
    arch = max(fitting)
    return _checked(driver, ordinal, compiled(sources.read(), arch, compiler), f"NVRTC sm_{arch}")


def _checked(driver: Driver, ordinal: int, image: bytes, name: str) -> Kernels:
    kernels = CudaKernels(driver, ordinal, image, name)
    with _closed_unless_good(kernels), driver_scratch(driver, ordinal) as scratch:
        check(kernels, scratch)
    return kernels


def _triton(ordinal: int) -> Kernels:
    from .triton_kernels import TritonKernels

    kernels = TritonKernels(ordinal)
    with _closed_unless_good(kernels):
        check(kernels, _torch_scratch(ordinal))
    return kernels


def _torch_scratch(ordinal: int) -> Scratch:
    import torch

    return TorchScratch(f"cuda:{ordinal}", torch.cuda.current_stream(ordinal).cuda_stream)


@contextlib.contextmanager
def _closed_unless_good(kernels: Kernels) -> Iterator[None]:
    try:
        yield
    except BaseException:
        kernels.close()
        raise


_TRY: dict[str, Callable[[int], Kernels]] = {"cubin": _cubin, "nvrtc": _nvrtc, "triton": _triton}


class Finding(NamedTuple):
    """What decrypts on one device, for people.

    Attributes:
        gpu: The device.
        name: As :attr:`Choice.name`.
        reasons: As :attr:`Choice.reasons`.
    """

    gpu: Gpu
    name: str
    reasons: tuple[str, ...]


def survey(setting: str = "auto") -> list[Finding]:
    """Try the kernels on every device of NVIDIA's, without importing a framework; so Triton is not tried.

    Raises:
        DeviceError: There is no driver, or no device.
    """
    gpus = Driver().gpus()
    if not gpus:
        raise DeviceError("the CUDA driver knows no device")
    ways = tuple(way for way in WAYS if way != "triton" and setting in ("auto", way))
    findings = []
    for gpu in gpus:
        choice = _first(gpu.ordinal, ways)
        if choice.kernels is not None:
            choice.kernels.close()
        untried = choice.kernels is None and setting in ("auto", "triton")
        findings.append(Finding(gpu, "Triton or the CPU" if untried else choice.name, choice.reasons))
    return findings
