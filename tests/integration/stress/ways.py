"""The ways in which a file is loaded: generators that hand out each thing they got, to be looked at before the next."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from secure_loader import numpy as sl_numpy
from secure_loader import safe_open
from secure_loader import torch as sl_torch
from secure_loader.config import LoaderConfig
from secure_loader.core.archive import Archive
from tests.integration.stress.models import KEYS, TRUST, Shard

# What was loaded: the tensor's name, the index into it, and the tensor, array or bytes.
Got = tuple[str, Any, Any]
PAGE_CACHE = ("keep", "drop", "bypass")


@dataclass
class Load:
    """One load, as it was drawn.

    Attributes:
        shard: What is loaded, and must come out.
        path: Where; the shard's own file, or a copy that is being damaged.
        rng: What chooses names and indices.
        framework: ``pt`` or ``numpy``.
        page_cache: As in the settings.
        untrusted: Whether somebody writes the file meanwhile, so that mapping clear tensors is out of the question.
        data: The bytes of the shard's own file.
        opened: Called with each archive once it is open.
    """

    shard: Shard
    path: Path
    rng: random.Random
    framework: str = "numpy"
    page_cache: str = "keep"
    untrusted: bool = False
    data: bytes = b""
    opened: Callable[[Archive], None] = field(default=lambda archive: None)

    def open(self) -> Archive:
        config = LoaderConfig(
            page_cache=self.page_cache,
            clear_tensors="copy" if self.untrusted else self.rng.choice(("map", "copy")),
            integrity=self.rng.choice(("tags", "tags", "full")),
        )
        archive = safe_open(self.path, self.framework, keys=KEYS, trust=TRUST, config=config, strict=True)
        self.opened(archive)
        return archive

    def names(self) -> list[str]:
        return self.rng.sample(list(self.shard.arrays), len(self.shard.arrays))


def one_by_one(load: Load) -> Iterator[Got]:
    with load.open() as f:
        for name in load.names():
            yield name, ..., f.get_tensor(name)


def all_at_once(load: Load) -> Iterator[Got]:
    with load.open() as f:
        for name, tensor in f.get_tensors().items():
            yield name, ..., tensor


def some_at_once(load: Load) -> Iterator[Got]:
    names = load.names()
    with load.open() as f:
        for some in (names[::2], names[1::2]):
            for name, tensor in f.get_tensors(some).items():
                yield name, ..., tensor


def unclosed(load: Load) -> Iterator[Got]:
    f = load.open()
    for name in load.names():
        yield name, ..., f.get_tensor(name)


def _slices(load: Load, index: Callable[[tuple[int, ...]], Any]) -> Iterator[Got]:
    with load.open() as f:
        parts = [(name, f.get_slice(name)) for name in load.names()[:6]]
    # Slices outlive their archive.
    for name, part in parts:
        at = index(tuple(part.get_shape()))
        yield name, at, part[at]


def rows(load: Load) -> Iterator[Got]:
    def some(shape: tuple[int, ...]) -> Any:
        start = load.rng.randrange(shape[0])
        return load.rng.choice((start, slice(start, load.rng.randint(start, shape[0]))))

    return _slices(load, some)


def columns(load: Load) -> Iterator[Got]:
    def some(shape: tuple[int, ...]) -> Any:
        start = load.rng.randrange(shape[-1])
        cut = slice(start, load.rng.randint(start, shape[-1]), load.rng.choice((1, 1, 3)))
        return cut if len(shape) == 1 else (slice(None), cut)

    return _slices(load, some)


def load_file(load: Load) -> Iterator[Got]:
    # Its settings come from the environment, and clear tensors are mapped: it is not drawn for mixed files under attack.
    os.environ["SECURE_LOADER_PAGE_CACHE"] = load.page_cache
    module = sl_torch if load.framework == "pt" else sl_numpy
    for name, tensor in module.load_file(load.path, keys=KEYS, trust=TRUST, strict=True).items():
        yield name, ..., tensor


def from_bytes(load: Load) -> Iterator[Got]:
    module = sl_torch if load.framework == "pt" else sl_numpy
    tensors = module.load(load.data, keys=KEYS, trust=TRUST, strict=True)
    for name, tensor in tensors.items():
        yield name, ..., tensor


def into_own_memory(load: Load) -> Iterator[Got]:
    with load.open() as f:
        for name in load.names():
            out = bytearray(b"\xaa") * load.shard.arrays[name].nbytes
            f.file.read_into(name, memoryview(out))
            yield name, bytes, out


def crowd(load: Load) -> Iterator[Got]:
    """Several Python threads with a file each, and one that they share; the first error is everybody's."""
    found: list[Got] = []
    errors: list[Exception] = []
    with load.open() as shared:

        def member(number: int, names: list[str]) -> None:
            try:
                if number == 0:
                    found.extend(one_by_one(load))
                    return
                found.extend((name, ..., shared.get_tensor(name)) for name in names)
                found.extend((name, ..., tensor) for name, tensor in shared.get_tensors().items())
            except Exception as e:  # noqa: BLE001 - raised again below
                errors.append(e)

        members = [threading.Thread(target=member, args=(n, load.names())) for n in range(3)]
        started = []
        try:
            for thread in members:
                started.append(thread)
                thread.start()
        finally:
            _join(started)
    if errors:
        error = errors[0]
        # As the pool does: no cycle of frame and error, which would keep all buffers until the garbage collector comes.
        errors.clear()
        try:
            raise error
        finally:
            del error
    yield from found


def _join(threads: list[threading.Thread]) -> None:
    interrupted: BaseException | None = None
    while True:
        try:
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            break
        except BaseException as e:  # noqa: BLE001 - raised again below
            interrupted = e
    if interrupted is not None:
        raise interrupted


WAYS: dict[str, Callable[[Load], Iterator[Got]]] = {
    f.__name__: f
    for f in (
        one_by_one,
        all_at_once,
        some_at_once,
        rows,
        columns,
        load_file,
        from_bytes,
        into_own_memory,
        unclosed,
        crowd,
    )
}
# Those that read every byte.
WHOLE = tuple(name for name in WAYS if name not in ("rows", "columns"))
