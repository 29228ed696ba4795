"""A weight that is decrypted when the model copies it, and only the part that it copies.

vLLM takes full weights from a loader; its parameters cut out the rows of their rank and copy them. Handed a
:class:`LazyTensor`, they cut without reading, and the copy decrypts straight into the parameter: no staging buffer, no
work for the rows of other ranks, for experts that live elsewhere, or for weights that the model drops.

Views that are one run of stored bytes stay lazy, and so do cuts across rows (they narrow what is read later). Any other
operation reads the weight and goes on with an ordinary tensor: correct, and no worse than reading it at once.
"""

# ruff: noqa: SLF001 - instances of one class read each other, and torch keeps the names for subclasses private

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch.utils import _pytree as pytree

from ..core.archive import TensorFile
from ..core.device.engine import Engine
from ..core.device.plan import Part
from ..core.device.torch_device import memory_of
from ..core.pipeline import JOB_BYTES
from ..core.tensors import empty, framework
from ..core.types import DTYPES, TensorInfo

_aten = torch.ops.aten
# What is no more than one job for one thread is better decrypted ahead, while vLLM places what came before.
MIN_BYTES = JOB_BYTES + 1


@dataclass(frozen=True, slots=True)
class _Part:
    """A run of a tensor's stored elements, shaped, and what is to be cut from it after reading.

    Attributes:
        offset: First element.
        shape: Of the run.
        cuts: ``(dim, start, length)``, at most one per dimension.
    """

    offset: int
    shape: tuple[int, ...]
    cuts: tuple[tuple[int, int, int], ...] = ()

    @property
    def size(self) -> tuple[int, ...]:
        """Shape after the cuts."""
        size = list(self.shape)
        for dim, _, length in self.cuts:
            size[dim] = length
        return tuple(size)

    @property
    def strides(self) -> tuple[int, ...]:
        """Of the run, in elements; cuts do not change them."""
        return tuple(max(1, math.prod(self.shape[dim + 1 :])) for dim in range(len(self.shape)))

    def _is_outermost(self, dim: int) -> bool:
        """Whether a range of this dimension is one run of elements."""
        return math.prod(self.shape[:dim]) == 1 and all(d != dim for d, _, _ in self.cuts)

    def narrow(self, dim: int, start: int, length: int) -> _Part:
        """As ``torch.narrow``."""
        if self._is_outermost(dim):
            offset = self.offset + start * math.prod(self.shape[dim + 1 :])
            return replace(self, offset=offset, shape=(*self.shape[:dim], length, *self.shape[dim + 1 :]))
        before = next((s for d, s, _ in self.cuts if d == dim), 0)
        cuts = (*(c for c in self.cuts if c[0] != dim), (dim, before + start, length))
        return replace(self, cuts=cuts)

    def select(self, dim: int, index: int) -> _Part | None:
        """As ``torch.select``; None where the result is no run."""
        if not self._is_outermost(dim):
            return None
        one = self.narrow(dim, index, 1)
        cuts = tuple((d - (d > dim), s, n) for d, s, n in self.cuts)
        return _Part(one.offset, (*self.shape[:dim], *self.shape[dim + 1 :]), cuts)

    def unsqueeze(self, dim: int) -> _Part:
        """As ``torch.unsqueeze``."""
        cuts = tuple((d + (d >= dim), s, n) for d, s, n in self.cuts)
        return _Part(self.offset, (*self.shape[:dim], 1, *self.shape[dim:]), cuts)

    def view(self, shape: Sequence[int]) -> _Part | None:
        """As ``Tensor.view``; None where a cut or a wrong shape stands in the way."""
        known = math.prod(n for n in shape if n != -1)
        size = tuple(math.prod(self.shape) // known if n == -1 and known else n for n in shape)
        if self.cuts or math.prod(size) != math.prod(self.shape):
            return None
        return replace(self, shape=size)


class LazyTensor(torch.Tensor):
    """A stored tensor, or a part of one, that is read when it is copied or computed with.

    Args:
        file: Where it is stored; kept open for as long as this tensor lives.
        info: What is stored.
    """

    _file: TensorFile
    _info: TensorInfo
    _part: _Part
    _parent: LazyTensor | None
    _value: torch.Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(
        cls, file: TensorFile, info: TensorInfo, part: _Part | None = None, root: LazyTensor | None = None
    ) -> Self:
        part = part or _Part(0, info.shape)
        dtype = getattr(torch, DTYPES[info.dtype].torch or "")
        # The strides that reading will give: torch decides by them whether a reshape is a view.
        self = torch.Tensor._make_wrapper_subclass(
            cls, part.size, strides=part.strides, dtype=dtype, device=torch.device("cpu")
        )
        self._file, self._info, self._part = file, info, part
        self._parent = root
        self._value = None
        return self

    @property
    def _root(self) -> LazyTensor:
        # Not kept by the root itself: a cycle would hold the file open until the garbage collector comes by.
        return self if self._parent is None else self._parent

    @classmethod
    def supports(cls, file: TensorFile, name: str, smallest: int | None = None) -> bool:
        """Whether a tensor gains from being lazy: encrypted, not tiny, and of a dtype that can be cut anywhere.

        Args:
            file: Where it is.
            name: Its name.
            smallest: Bytes that are not tiny any more; None says what holds on the CPU.
        """
        info = file.info(name)
        dtype = DTYPES[info.dtype]
        can_be_cut = dtype.bits % 8 == 0 and hasattr(torch, dtype.torch or "") and bool(info.shape)
        return can_be_cut and file.is_sealed(name) and info.nbytes >= (MIN_BYTES if smallest is None else smallest)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyTensor({self._info.name!r}, {tuple(self.shape)}, {self.dtype})"

    def read(self) -> torch.Tensor:
        """This part as an ordinary tensor.

        Raises:
            AuthenticationError: Its bytes are not those that were signed.
            KeyAccessError, ReadError: As they say.
        """
        if self._root._value is not None:
            return self._view_of(self._root._value)
        fw = framework("pt")
        owner, out = empty(fw, math.prod(self._part.shape) * self._item_bytes)
        self._read_into(out)
        return self._cut(fw.view(owner, self._info.dtype, self._part.shape))

    # What torch answers without asking __torch_dispatch__ would be about memory that this tensor does not have.

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The same part, lazily."""
        return self._like(self._part)

    def numpy(self, *, force: bool = False) -> Any:
        """As an array; reads it."""
        return self._shared().numpy(force=force)

    def tolist(self) -> Any:
        """As nested lists; reads it."""
        return self.read().tolist()

    def data_ptr(self) -> int:
        """Where it lies in memory; reads it, and keeps it."""
        return self._shared().data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.read().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @property
    def _item_bytes(self) -> int:
        return DTYPES[self._info.dtype].bits // 8

    def read_on(self, engine: Engine) -> torch.Tensor:
        """This part as an ordinary tensor on a device; only the chunks that it touches go there. Raises as :meth:`read`."""
        (owner,) = engine.load([self._stored], self._file.read_options, self._file.device_buffer_bytes)
        return self._cut(framework("pt").view(owner, self._info.dtype, self._part.shape))

    @property
    def _stored(self) -> Part:
        start = self._part.offset * self._item_bytes
        return self._file.part(self._info.name, start, start + math.prod(self._part.shape) * self._item_bytes)

    def _read_into(self, out: memoryview) -> None:
        self._file.read_into(self._info.name, out, self._part.offset * self._item_bytes)

    def _cut(self, run: torch.Tensor) -> torch.Tensor:
        for dim, start, length in self._part.cuts:
            run = run.narrow(dim, start, length)
        return run

    def _view_of(self, whole: torch.Tensor) -> torch.Tensor:
        part = self._part
        run = whole.reshape(-1).narrow(0, part.offset, math.prod(part.shape))
        return self._cut(run.view(part.shape))

    def _shared(self) -> torch.Tensor:
        """This part as a view of the whole value, which is kept from here on: it is about to be changed in place."""
        root = self._root
        if root._value is None:
            root._value = root.read()
        return self._view_of(root._value)

    def _like(self, part: _Part) -> LazyTensor:
        return LazyTensor(self._file, self._info, part, self._root)

    def _copy_to(self, target: torch.Tensor) -> None:
        """Fill an ordinary tensor with this part, by the shortest way."""
        if target.is_meta:
            return  # vLLM measures a reload on meta tensors first; there is nothing to fill
        direct = (
            target.dtype == self.dtype
            and target.shape == self.shape
            and target.is_contiguous()
            and not self._part.cuts
            and target.numel() > 0
        )
        engine = self._file.engine(str(target.device))
        if self._root._value is not None:
            target.copy_(self.read())
        elif engine is not None and direct:
            whole = [(self._stored, memory_of(target), 0)]
            engine.fill(whole, self._file.read_options, self._file.device_buffer_bytes)
        elif engine is not None:
            target.copy_(self.read_on(engine))
        elif direct and target.device.type == "cpu":
            array: Any = target.detach().reshape(-1).view(torch.uint8).numpy()
            self._read_into(memoryview(array))
        else:
            target.copy_(self.read())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        del types
        if func is _aten.copy_.default and isinstance(args[1], LazyTensor) and not isinstance(args[0], LazyTensor):
            args[1]._copy_to(args[0])
            return args[0]
        if func is _aten._to_copy.default and isinstance(args[0], LazyTensor) and args[0]._root._value is None:
            engine = args[0]._file.engine(str(kwargs.get("device")))
            if engine is not None:
                return func(args[0].read_on(engine), **kwargs)
        view = _VIEWS.get(func)
        if view is not None and isinstance(args[0], LazyTensor) and args[0]._root._value is None and not kwargs:
            parts = view(args[0]._part, *args[1:])
            if isinstance(parts, list):
                return [args[0]._like(part) for part in parts]
            if parts is not None:
                return args[0]._like(parts)
        return _compute(func, args, kwargs)


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on ordinary tensors; one that changes a lazy tensor changes all views of it."""
    changed = _changed(func, args, kwargs)

    def ordinary(value: Any) -> Any:
        if not isinstance(value, LazyTensor):
            return value
        shared = any(value is c for c in changed) or value is value._root
        return value._shared() if shared else value.read()

    result = func(*pytree.tree_map(ordinary, args), **pytree.tree_map(ordinary, kwargs))
    # An operation in place answers with the tensor that it was called on.
    return changed[0] if len(changed) == 1 and isinstance(result, torch.Tensor) else result


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[LazyTensor]:
    schema = func._schema
    if not schema.is_mutable:
        return []
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    written = [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [value for value in pytree.tree_leaves(written) if isinstance(value, LazyTensor)]


_View = Callable[..., "_Part | list[_Part] | None"]


def _slice(part: _Part, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> _Part | None:
    dim %= len(part.shape)
    low, high, step = slice(start, end, step).indices(part.size[dim])
    return part.narrow(dim, low, max(0, high - low)) if step == 1 else None


def _select(part: _Part, dim: int, index: int) -> _Part | None:
    dim %= len(part.shape)
    return part.select(dim, index % part.size[dim])


def _unbind(part: _Part, dim: int = 0) -> list[_Part] | None:
    dim %= len(part.shape)
    found = [part.select(dim, i) for i in range(part.size[dim])]
    return None if None in found else [p for p in found if p is not None]


def _split(part: _Part, size: int, dim: int = 0) -> list[_Part]:
    dim %= len(part.shape)
    total = part.size[dim]
    return [part.narrow(dim, i, min(size, total - i)) for i in range(0, total, size)]


def _split_with_sizes(part: _Part, sizes: Sequence[int], dim: int = 0) -> list[_Part]:
    dim %= len(part.shape)
    return [part.narrow(dim, sum(sizes[:i]), n) for i, n in enumerate(sizes)]


_VIEWS: dict[Any, _View] = {
    _aten.alias.default: lambda part: part,
    _aten.detach.default: lambda part: part,
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.unbind.int: _unbind,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split_with_sizes,
    _aten.unsqueeze.default: lambda part, dim: part.unsqueeze(dim % (len(part.shape) + 1)),
    _aten.view.default: lambda part, shape: part.view(shape),
    _aten._unsafe_view.default: lambda part, shape: part.view(shape),
}
