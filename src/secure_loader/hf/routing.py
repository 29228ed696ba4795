"""safetensors' primitives, routed call by call.

``safe_open``, ``_safe_open_handle``, ``deserialize``, ``serialize_file`` and ``serialize`` are replaced once and for
good, in the ``safetensors`` package and wherever else they were imported to. Each call then goes its way: under a
:mod:`context <.context>` to us; an encrypted file without one is refused; everything else goes to the original,
untouched. Nothing is swapped in and out, so there is no moment at which another thread gets the wrong one.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..core.archive import Ahead, Archive, TensorFile
from ..core.seal import PlainTensor, Publication, seal_bytes, write_file
from ..core.types import DTYPE_RANK
from ..errors import EncryptedFileError, FormatError, NotEncryptedError
from . import context
from .sniff import bytes_look_encrypted, holds_ciphertext, looks_encrypted

_SHARD_NUMBER = re.compile(r"-(\d{1,9})-of-(\d{1,9})\.safetensors$")

_originals: dict[str, Any] = {}
_install_lock = threading.Lock()


class Counter:
    """How many files were routed, for tests and for the pytest plugin's summary."""

    opened = 0
    written = 0


# ---------------------------------------------------------------------------------------------------------- reading


def refusal(what: str | os.PathLike[str] | None) -> EncryptedFileError:
    """The error for ciphertext in front of a reader that did not ask for it."""
    return EncryptedFileError(
        "is encrypted, and nobody asked for the secure loader" if what is not None else "these bytes are encrypted",
        path=what,
        hint='pass loader="secure" to from_pretrained or pipeline, or use "with secure_loader.hf.session():"',
    )


def _archive(file: TensorFile, framework: str, device: Any, ahead: Ahead | None = None) -> Archive:
    Counter.opened += 1
    return Archive(file, framework, device if isinstance(device, int) else str(device), ahead)


def _open(filename: Any, framework: str, device: Any, options: Mapping[str, Any]) -> Any:
    active = context.current()
    if active is not None:
        file = active.open(filename)
        if file is not None:
            return _archive(file, framework, device, active.ahead if framework == "pt" else None)
    elif holds_ciphertext(filename):
        raise refusal(filename)
    return _originals["safe_open"](filename, framework, device, **options)


class _SafeOpenType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (Archive, _originals["safe_open"]))


class safe_open(metaclass=_SafeOpenType):  # noqa: N801 - safetensors' name
    """safetensors' ``safe_open``, routed."""

    def __new__(cls, filename: Any, framework: str, device: Any = "cpu", **options: Any) -> Any:
        return _open(filename, framework, device, options)


class offload_safe_open(metaclass=_SafeOpenType):  # noqa: N801 - as above
    """For accelerate's disk offload alone, which reads again during the forward pass, outside of any load."""

    def __new__(cls, filename: Any, framework: str, device: Any = "cpu", **options: Any) -> Any:
        file = _offloaded.find(filename)
        return _open(filename, framework, device, options) if file is None else _archive(file, framework, device)


class _Offloaded:
    """Files that models with weights on disk still read: authority that ends with the model."""

    def __init__(self) -> None:
        self._files: dict[str, weakref.WeakSet[TensorFile]] = {}
        self._lock = threading.Lock()

    def keep(self, owner: object, files: Mapping[str, TensorFile]) -> None:
        with self._lock:
            for path, file in files.items():
                self._files.setdefault(path, weakref.WeakSet()).add(file)
        # The finalizer holds the only strong references.
        weakref.finalize(owner, list, list(files.values())).atexit = False

    def find(self, filename: Any) -> TensorFile | None:
        with self._lock:
            return next(iter(self._files.get(os.path.abspath(filename), ())), None)


_offloaded = _Offloaded()
keep_for_offload = _offloaded.keep


def _safe_open_handle(handle: Any, framework: str, device: Any = "cpu") -> Any:
    name, active = getattr(handle, "name", None), context.current()
    if isinstance(name, (str, os.PathLike)) and os.path.isfile(name) and (active is not None or looks_encrypted(name)):
        return _open(name, framework, device, {})
    if active is not None and not active.passive and not active.session.config.insecure_allow_plaintext:
        raise NotEncryptedError("a file object without a name cannot be checked against a signed folder")
    return _originals["_safe_open_handle"](handle, framework=framework, device=device)


def _deserialize(data: Any) -> Any:
    active = context.current()
    file = None
    if active is not None:
        file = active.open_bytes(data)
    elif bytes_look_encrypted(data):
        raise refusal(None)
    if file is None:
        return _originals["deserialize"](data)
    Counter.opened += 1
    out = []
    with file.source:
        for info in file.header.tensors.values():
            buffer = bytearray(info.nbytes)
            file.read_into(info.name, memoryview(buffer))
            out.append((info.name, {"dtype": info.dtype, "shape": list(info.shape), "data": buffer}))
    return out


# ---------------------------------------------------------------------------------------------------------- writing


def _borrowed(address: int, nbytes: int) -> memoryview:
    """The memory that a ``TensorSpec`` points to; whoever made the spec keeps it alive during the call."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B") if nbytes else memoryview(b"")


def _plain_tensors(specs: Mapping[str, Any]) -> list[PlainTensor]:
    tensors = [
        PlainTensor(name, s.dtype, tuple(s.shape), s.data_len, _borrowed(s.data_ptr, s.data_len))
        for name, s in specs.items()
    ]
    # safetensors' own order.
    return sorted(tensors, key=lambda t: (-DTYPE_RANK[t.dtype], t.name))


def _serialize_file(tensor_dict: Mapping[str, Any], filename: Any, metadata: Mapping[str, str] | None = None) -> None:
    active = context.current()
    if active is None:
        _originals["serialize_file"](tensor_dict, filename, metadata=metadata)
        return
    by = active.writing_as(filename)
    write_file(Path(filename), _plain_tensors(tensor_dict), _metadata(metadata), by, shard=_shard_number(filename))
    Counter.written += 1


def _serialize(tensor_dict: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> Any:
    active = context.current()
    if active is None:
        return _originals["serialize"](tensor_dict, metadata=metadata)
    by: Publication = active.writing_as("<bytes>")
    Counter.written += 1
    return seal_bytes(_plain_tensors(tensor_dict), _metadata(metadata), by)


def _metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    # A file that was read under the secure loader and is written again must not carry the old signature along.
    return {k: v for k, v in (metadata or {}).items() if not k.startswith("__")}


def _shard_number(filename: Any) -> tuple[int, int]:
    found = _SHARD_NUMBER.search(os.fspath(filename))
    if found is None:
        return 1, 1
    number, count = int(found[1]), int(found[2])
    if not 1 <= number <= count:
        raise FormatError("the file name numbers a shard that cannot be", path=filename)
    return number, count


# ------------------------------------------------------------------------------------------------------ installation

_ROUTED: dict[str, Any] = {
    "safe_open": safe_open,
    "_safe_open_handle": _safe_open_handle,
    "deserialize": _deserialize,
    "serialize_file": _serialize_file,
    "serialize": _serialize,
}


def install() -> None:
    """Route the primitives; a second call changes nothing."""
    import safetensors

    with _install_lock:
        if _originals:
            return
        # safetensors._safetensors_rust keeps its own: whoever reaches into that asks for the unrouted ones.
        found = {name: getattr(safetensors, name) for name in _ROUTED if hasattr(safetensors, name)}
        _originals.update(found)
        replace_everywhere({id(old): _ROUTED[name] for name, old in found.items()}, except_in=(__name__,))


def replace_everywhere(new_by_id: Mapping[int, Any], except_in: Iterable[str] = ()) -> None:
    """Rebind objects in the namespaces of all loaded modules; later imports find the new ones by themselves."""
    skipped = {*except_in, "safetensors._safetensors_rust"}
    for name, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", None)
        if name in skipped or not isinstance(namespace, dict):
            continue
        # Most modules have none of them, and this test runs at the speed of C.
        if new_by_id.keys().isdisjoint(map(id, list(namespace.values()))):
            continue
        for key, value in list(namespace.items()):
            if id(value) in new_by_id:
                namespace[key] = new_by_id[id(value)]


def original(name: str) -> Callable[..., Any]:
    """The unrouted primitive, for tests."""
    return _originals[name]  # type: ignore[no-any-return]
