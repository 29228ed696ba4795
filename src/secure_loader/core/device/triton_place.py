"""Where the Triton kernels run: on a device, behind a stream; or in Triton's interpreter, on the CPU, to be tested."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

from ...errors import DeviceError

if TYPE_CHECKING:
    import torch


class Mark(Protocol):
    """A point in the order of a stream; a ``torch.cuda.Event``, for one."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class Place(Protocol):
    """Where kernels run.

    Attributes:
        device: As PyTorch calls it.
        lanes: How many threads one warp has; a program is one warp.
    """

    device: torch.device
    lanes: int

    def behind(self, stream: int) -> AbstractContextManager[object]:
        """What is queued or allocated inside goes behind what ``stream`` was given before."""
        ...

    def host(self, nbytes: int) -> torch.Tensor:
        """Host memory that the device copies from and to by itself: uint8[nbytes], not filled."""
        ...

    def mark(self) -> Mark:
        """The point in the order of the stream that was reached now."""
        ...


class Gpu:
    """A GPU, as PyTorch sees it: CUDA's or ROCm's.

    Args:
        index: Which.

    Raises:
        DeviceError: There is none of this index, or no PyTorch.
    """

    def __init__(self, index: int) -> None:
        try:
            import torch

            self.device = torch.device("cuda", index)
            self.lanes = int(torch.cuda.get_device_properties(self.device).warp_size)
        except (ImportError, RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
            raise DeviceError(f"there is no GPU {index} that PyTorch can use: {error}") from error

    @contextmanager
    def behind(self, stream: int) -> Iterator[None]:
        import torch

        # The device first: on its way back to another one, a stream's own block would make a context there.
        with torch.cuda.device(self.device):
            # 0 is the default stream; ExternalStream would take one of torch's own in its place.
            one = torch.cuda.ExternalStream(stream) if stream else torch.cuda.default_stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(one):
                yield

    def host(self, nbytes: int) -> torch.Tensor:
        import torch

        # By name, as the caller may have set another default.
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def mark(self) -> Mark:
        import torch

        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event


class Interpreter:
    """Triton's interpreter, where addresses are those of the CPU; ``TRITON_INTERPRET=1`` must be set."""

    def __init__(self) -> None:
        import torch

        self.device = torch.device("cpu")
        self.lanes = 32

    def behind(self, stream: int) -> AbstractContextManager[object]:  # noqa: ARG002 - everything is done at once
        return nullcontext()

    def host(self, nbytes: int) -> torch.Tensor:
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def mark(self) -> Mark:
        return _Past()


class _Past:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass
