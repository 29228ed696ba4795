"""Bytes to framework tensors and back: the only core file that may import torch or numpy.

A :class:`Framework` allocates memory that a tensor will own, shows it as bytes to be filled, and wraps it as a tensor.
"""

from __future__ import annotations

import importlib
import mmap
from collections.abc import Sequence
from typing import Any, Protocol

from ..errors import ConfigError, DeviceError, OutOfMemoryError
from .memory import Region, lay_out
from .types import DTYPES, TensorInfo

_NUMPY_DIMS = 64
# Below this the framework's own allocator is as good, and a mapping of its own a waste.
_MIN_REGION = 1 << 20


class Framework(Protocol):
    """What the loader needs of a tensor library."""

    name: str

    def small(self, nbytes: int) -> tuple[Any, memoryview]:
        """A little memory from the library's own allocator; as :func:`empty`."""
        ...

    def wrap(self, mapping: mmap.mmap, offset: int, nbytes: int) -> Any:
        """The owner of part of a mapping, which keeps the mapping alive."""
        ...

    def view(self, owner: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        """The owner's bytes as a tensor of a safetensors dtype and logical shape, without a copy."""
        ...

    def to_device(self, tensor: Any, device: str) -> Any:
        """The tensor on ``device``."""
        ...

    def check_index(self, info: TensorInfo, index: Any) -> None:
        """Raise the framework's own error for an index that does not fit the shape, before anything is read."""
        ...

    def compact(self, tensor: Any, held: int) -> Any:
        """The tensor, copied when it is a small part of the ``held`` bytes that it keeps alive."""
        ...


def framework(name: str) -> Framework:
    """The framework that safetensors' spelling names: ``pt``, ``torch``, ``pytorch``, ``np``, ``numpy``.

    Raises:
        ConfigError: Another name.
        DeviceError: It is not installed.
    """
    kinds: dict[str, type[_Torch | _Numpy]] = {
        "pt": _Torch,
        "torch": _Torch,
        "pytorch": _Torch,
        "np": _Numpy,
        "numpy": _Numpy,
    }
    kind = kinds.get(name)
    if kind is None:
        raise ConfigError(f"framework {name!r} is unknown; there are pt and numpy")
    return kind()


def empty(fw: Framework, nbytes: int) -> tuple[Any, memoryview]:
    """Memory that a tensor will own.

    Args:
        fw: Whose tensor.
        nbytes: Its size.

    Returns:
        The owner, and a writable view of exactly ``nbytes`` bytes.

    Raises:
        OutOfMemoryError: The system gives no more.
    """
    if nbytes < _MIN_REGION:
        try:
            return fw.small(nbytes)
        except (MemoryError, RuntimeError):
            # As the allocators of numpy and of torch say it.
            raise OutOfMemoryError(f"{nbytes:,} bytes of memory are not to be had") from None
    region = Region(nbytes)
    return fw.wrap(region.mapping, region.offset, nbytes), region.view()


def empty_many(fw: Framework, sizes: Sequence[int]) -> list[tuple[Any, memoryview]]:
    """As :func:`empty` for many tensors, whose memory is laid out together: no page is shared by chance or wasted."""
    places = iter(lay_out([n for n in sizes if n]))
    out = []
    for n in sizes:
        if not n:
            out.append(empty(fw, 0))
            continue
        region, at = next(places)
        out.append((fw.wrap(region.mapping, region.offset + at, n), region.view(at, n)))
    return out


class _Torch:
    name = "pt"

    def __init__(self) -> None:
        self._torch = _import("torch")

    def small(self, nbytes: int) -> tuple[Any, memoryview]:
        owner = self._torch.empty(nbytes, dtype=self._torch.uint8, device="cpu")
        return owner, memoryview(owner.numpy()).cast("B") if nbytes else memoryview(bytearray())

    def wrap(self, mapping: mmap.mmap, offset: int, nbytes: int) -> Any:
        # frombuffer keeps the mapping alive for as long as the storage lives.
        return self._torch.frombuffer(mapping, dtype=self._torch.uint8, offset=offset, count=nbytes)

    def view(self, owner: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        return owner.view(self._dtype(dtype)).reshape(_storage_shape(dtype, shape))

    def to_device(self, tensor: Any, device: str) -> Any:
        return tensor if str(device) == "cpu" else tensor.to(device=device)

    def check_index(self, info: TensorInfo, index: Any) -> None:
        # Masks cannot be tried on a tensor without values; the whole tensor is read for them, and torch complains then.
        if is_basic(index):
            self._torch.empty(_storage_shape(info.dtype, info.shape), device="meta")[index]

    def compact(self, tensor: Any, held: int) -> Any:
        return tensor.clone() if tensor.nbytes * 2 < held else tensor

    def _dtype(self, code: str) -> Any:
        found = getattr(self._torch, DTYPES[code].torch or "", None)
        if found is None:
            raise DeviceError(f"this torch has no dtype for {code}")
        return found


class _Numpy:
    name = "numpy"

    def __init__(self) -> None:
        self._numpy = _import("numpy")

    def small(self, nbytes: int) -> tuple[Any, memoryview]:
        owner = self._numpy.empty(nbytes, dtype=self._numpy.uint8)
        return owner, memoryview(owner).cast("B") if nbytes else memoryview(bytearray())

    def wrap(self, mapping: mmap.mmap, offset: int, nbytes: int) -> Any:
        return self._numpy.frombuffer(mapping, dtype=self._numpy.uint8, offset=offset, count=nbytes)

    def view(self, owner: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        return owner.view(self._dtype(dtype)).reshape(self._shape(dtype, shape))

    def to_device(self, tensor: Any, device: str) -> Any:
        if str(device) != "cpu":
            raise DeviceError(f"numpy arrays live on the cpu, not on {device!r}")
        return tensor

    def check_index(self, info: TensorInfo, index: Any) -> None:
        # A broadcast scalar has the shape and none of the memory.
        if is_basic(index):
            self._numpy.broadcast_to(self._numpy.int8(0), self._shape(info.dtype, info.shape))[index]

    def compact(self, tensor: Any, held: int) -> Any:
        # An index of only ints gives a numpy scalar, which owns itself.
        return tensor.copy() if tensor.nbytes * 2 < held else tensor

    def _shape(self, dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) > _NUMPY_DIMS:
            raise DeviceError(f"numpy arrays have at most {_NUMPY_DIMS} dimensions", hint="load with framework 'pt'")
        return _storage_shape(dtype, shape)

    def _dtype(self, code: str) -> Any:
        name = DTYPES[code].numpy
        if name is not None:
            return self._numpy.dtype(name)
        try:
            # bfloat16 and the F8 kinds, where the numpy world's own extension types are installed.
            return self._numpy.dtype(getattr(importlib.import_module("ml_dtypes"), _ML_DTYPES[code]))
        except (ImportError, KeyError, AttributeError):
            raise DeviceError(
                f"numpy has no dtype for {code}", hint="install ml_dtypes, or load with framework 'pt'"
            ) from None


def is_basic(index: Any) -> bool:
    """Whether an index is made of ints, slices, ``None`` and ``...`` only, and so asks for no values of a tensor."""
    items = index if isinstance(index, tuple) else (index,)
    return all(i is None or i is Ellipsis or isinstance(i, slice) or type(i) is int for i in items)


_ML_DTYPES = {
    "BF16": "bfloat16",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise DeviceError(f"{name} is not installed", hint=f"pip install {name}") from None


def _storage_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    # torch packs two F4 values into one element, so its last dimension is half the logical one.
    if DTYPES[dtype].bits == 4 and shape:
        return (*shape[:-1], shape[-1] // 2)
    return shape


def bytes_of(tensor: Any) -> tuple[str, tuple[int, ...], memoryview]:
    """dtype code, logical shape and a byte view of a torch tensor or numpy array, for writing.

    Args:
        tensor: Moved to the CPU and made contiguous where needed.

    Raises:
        ConfigError: Neither kind, or of a dtype that safetensors does not have.
    """
    kind = type(tensor).__module__.partition(".")[0]
    if hasattr(tensor, "untyped_storage"):
        torch = _import("torch")
        code = _code_of(str(tensor.dtype).removeprefix("torch."), "torch")
        if tensor.layout is not torch.strided:
            raise ConfigError("sparse tensors cannot be saved; make it dense first")
        flat = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
        shape = tuple(tensor.shape)
        if DTYPES[code].bits == 4 and shape:
            shape = (*shape[:-1], shape[-1] * 2)
        return code, shape, memoryview(flat.numpy()).cast("B") if flat.numel() else memoryview(b"")
    if hasattr(tensor, "__array_interface__"):
        numpy = _import("numpy")
        array = numpy.ascontiguousarray(tensor).reshape(tensor.shape)
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        code = _code_of(array.dtype.name, "numpy")
        return (
            code,
            tuple(array.shape),
            memoryview(array.reshape(-1).view(numpy.uint8)) if array.size else memoryview(b""),
        )
    raise ConfigError(f"cannot save a {kind}.{type(tensor).__name__}; torch tensors and numpy arrays can be saved")


def _code_of(name: str, library: str) -> str:
    for code, dtype in DTYPES.items():
        if getattr(dtype, library) == name or (library == "numpy" and _ML_DTYPES.get(code) == name):
            return code
    raise ConfigError(f"safetensors has no dtype for {library}'s {name}")
