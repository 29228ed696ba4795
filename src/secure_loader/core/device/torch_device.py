"""A GPU by way of torch: CUDA, and ROCm, which torch calls by the same names.

Memory comes from torch's own allocators, so that what a load takes is what torch reports, and is used again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from ...errors import DeviceError, OutOfMemoryError
from .device import Event, HostMemory, Memory

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _typed(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """The function, with torch's errors as ours."""

    @wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except torch.OutOfMemoryError as e:
            hint = "load on a device with more memory, or fewer tensors at once"
            raise OutOfMemoryError(f"the device has no more memory: {_first_line(e)}", hint=hint) from None
        except RuntimeError as e:  # AcceleratorError is one
            raise DeviceError(f"the device failed: {_first_line(e)}") from None

    return called


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


class _TorchEvent:
    """An event of torch."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    @_typed
    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    @_typed
    def wait(self) -> None:
        self.event.synchronize()


class TorchDevice:
    """As :class:`core.device.device.Device`.

    Args:
        index: Of the GPU, as torch counts them.

    Raises:
        DeviceError: It is not there.
    """

    @_typed
    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._copy = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._compute = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @property
    def name(self) -> str:
        """As torch spells it."""
        return str(self._device)

    @property
    def compute(self) -> int:
        """Handle of the stream that computes."""
        return int(self._compute.cuda_stream)

    @_typed
    def allocate(self, nbytes: int) -> Memory:
        """Memory of torch's caching allocator."""
        return memory_of(torch.empty(nbytes, dtype=torch.uint8, device=self._device))

    def pin(self, nbytes: int) -> HostMemory:
        """Memory of torch's pinned allocator, which keeps it for the next load."""
        try:
            owner = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as e:
            raise OutOfMemoryError(f"{nbytes:,} bytes of host memory cannot be pinned: {_first_line(e)}") from None
        array: Any = owner.numpy()
        return HostMemory(owner, memoryview(array).cast("B"))

    @_typed
    def follow(self) -> None:
        """Wait for the caller's current stream, on the device."""
        current = torch.cuda.current_stream(self._device)
        self._copy.wait_stream(current)
        self._compute.wait_stream(current)

    @_typed
    def copy_in(self, host: HostMemory, start: int, memory: Memory, at: int, nbytes: int) -> None:
        """Queue a copy from pinned memory."""
        with self._on(self._copy):
            memory.owner[at : at + nbytes].copy_(host.owner[start : start + nbytes], non_blocking=True)

    @_typed
    def copied(self) -> _TorchEvent:
        """An event on the copy stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._copy)
        return _TorchEvent(event)

    @_typed
    def compute_after(self, event: Event) -> None:
        """Let the other stream wait, on the device."""
        assert isinstance(event, _TorchEvent)  # noqa: S101 - made above
        self._compute.wait_event(event.event)

    @_typed
    def move(self, source: Memory, start: int, memory: Memory, at: int, nbytes: int) -> None:
        """Queue a copy within the device."""
        with self._on(self._compute):
            memory.owner[at : at + nbytes].copy_(source.owner[start : start + nbytes])

    @_typed
    def clear(self, memory: Memory, start: int, nbytes: int) -> None:
        """Queue a memset."""
        with self._on(self._compute):
            memory.owner[start : start + nbytes].zero_()

    @contextlib.contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        # The device first: on its way back to another one, a stream's own block would make a context there.
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield

    @_typed
    def synchronise(self) -> None:
        """Wait for both streams."""
        self._copy.synchronize()
        self._compute.synchronize()


def memory_of(tensor: torch.Tensor) -> Memory:
    """The memory of a contiguous tensor of any dtype. Raises RuntimeError, as torch, where it has gaps."""
    owner = tensor.detach().view(-1).view(torch.uint8) if tensor.numel() else tensor.detach()
    return Memory(owner, tensor.data_ptr(), tensor.nbytes)


def is_rocm() -> bool:
    """Whether this torch is one for AMD's devices, which it calls ``cuda`` as well."""
    return torch.version.hip is not None


def index_of(device: str) -> int | None:
    """Number of the GPU that torch means by a name; None where it is another kind of device, or torch cannot use it."""
    try:
        parsed = torch.device(device)
    except RuntimeError:
        return None
    if parsed.type != "cuda" or not torch.cuda.is_available():
        return None
    given: int | None = parsed.index
    index = torch.cuda.current_device() if given is None else given
    return index if index < torch.cuda.device_count() else None
