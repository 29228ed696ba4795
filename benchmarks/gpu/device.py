"""What the stages ask of the device that they measure. Tests put host memory in its place, which is marked as such."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from secure_loader.core.device.batch import Kernels
    from secure_loader.core.device.device import Device
    from secure_loader.core.device.driver import Driver


class Bench(Protocol):
    """A device under measurement.

    Attributes:
        stand_in: Whether it is host memory in place of a GPU. Figures taken there say nothing, and are never published.
        torch_device: As torch spells it.
        ordinal: Its number for the driver.
    """

    stand_in: bool
    torch_device: str
    ordinal: int

    def seconds(self, work: Callable[[], None]) -> float:
        """Queue something on the stream, and how long the device took for it, by the device's own clock."""
        ...

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        ...

    @property
    def stream(self) -> int:
        """Handle of the stream that :meth:`seconds` measures."""
        ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Bytes of host memory that the device copies from and to by itself."""
        ...

    def free_memory(self) -> int:
        """Bytes of device memory that nobody has, whatever took the rest."""
        ...

    def driver(self) -> Driver:
        """The driver. Raises DeviceError."""
        ...

    def image(self) -> tuple[str, bytes]:
        """Machine code of the kernels, and what it is. Raises DeviceError."""
        ...

    def kernels(self, way: str) -> Kernels:
        """Kernels of one of :data:`secure_loader.core.device.choice.WAYS`, or ``auto``. Raises DeviceError."""
        ...

    def pipeline(self) -> Device:
        """The device as the pipeline sees it."""
        ...


class CudaBench:
    """A GPU, by way of torch.

    Args:
        ordinal: Its number.
    """

    stand_in = False

    def __init__(self, ordinal: int = 0) -> None:
        import torch

        self._torch = torch
        self.ordinal, self.torch_device = ordinal, f"cuda:{ordinal}"
        torch.cuda.set_device(ordinal)
        torch.empty(1, device=self.torch_device)  # makes the context
        self._stream = torch.cuda.Stream(self.torch_device)

    def seconds(self, work: Callable[[], None]) -> float:
        """As :meth:`Bench.seconds`, by two events."""
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._torch.cuda.synchronize()
        with self._torch.cuda.stream(self._stream):
            start.record()
            work()
            end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def wait(self) -> None:
        """As :meth:`Bench.wait`."""
        self._torch.cuda.synchronize()

    @property
    def stream(self) -> int:
        """As :attr:`Bench.stream`."""
        return int(self._stream.cuda_stream)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """As :meth:`Bench.pinned`."""
        return self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True)

    def free_memory(self) -> int:
        """As :meth:`Bench.free_memory`."""
        return int(self._torch.cuda.mem_get_info(self.ordinal)[0])

    def driver(self) -> Driver:
        """As :meth:`Bench.driver`."""
        from secure_loader.core.device.driver import Driver

        return Driver()

    def image(self) -> tuple[str, bytes]:
        """The shipped cubin; else what NVRTC makes of the source."""
        from secure_loader.core.device import cubins, sources
        from secure_loader.core.device.nvrtc import Nvrtc
        from secure_loader.errors import DeviceError

        source, arch = sources.read(), self.driver().gpu(self.ordinal).arch
        try:
            cubin = cubins.shipped(source, arch)
        except DeviceError as e:
            compiler = Nvrtc()
            return f"NVRTC {compiler.version} sm_{arch} ({e.message})", compiler.compile(source, arch)
        return f"cubin sm_{cubin.arch}", cubin.image

    def kernels(self, way: str) -> Kernels:
        """As the package chooses them, with its known-answer test; it keeps them, and closes them."""
        from secure_loader.core.device.choice import choose

        found = choose(self.ordinal, way, require=True).kernels
        assert found is not None  # require
        return found

    def pipeline(self) -> Device:
        """As :meth:`Bench.pipeline`."""
        from secure_loader.core.device.torch_device import TorchDevice

        return TorchDevice(self.ordinal)


def wall_seconds(bench: Bench, work: Callable[[], Any]) -> tuple[float, Any]:
    """What something took by the clock on the wall until the device was done, and what it gave."""
    bench.wait()
    start = time.perf_counter()
    result = work()
    bench.wait()
    return time.perf_counter() - start, result


def cuda() -> Bench:
    """The first GPU."""
    return CudaBench()
