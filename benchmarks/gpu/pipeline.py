"""The pipeline against the bare copy of the same bytes, in the same run: what is hidden behind the bus, and what is not."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from benchmarks.gpu import files
from benchmarks.gpu.copies import size_text
from benchmarks.gpu.device import wall_seconds
from benchmarks.gpu.rounds import Work, measure
from benchmarks.gpu.stage import Context, SkippedError
from secure_loader.bench.measure import MeasurementError, digest
from secure_loader.core.device.batch import Batch, Chunk, Kernels, Pending
from secure_loader.core.device.device import Device, HostMemory, Memory
from secure_loader.core.secrets import Secret

_READERS = 16
_READ = 8 << 20
_MOST_PENDING = 16  # as in core.device.transfer


def run(context: Context) -> None:
    """From pinned memory, without a file; then files, in memory and on the disk, by size."""
    _pinned(context)
    try:
        found = files.made(context)
    except SkippedError as e:
        context.tell(f"   {e}")
        raise
    cases = [(place, one) for one in found for place in ("memory", "disk")]
    for number, (place, one) in enumerate(cases):
        _file(context, place, one, context.left() / (len(cases) - number))


@dataclass
class _Ring:
    """Pinned memory with one sealed piece after the other, and device memory for all of them.

    All pieces have the same ciphertext: they are copied and opened one by one all the same.
    """

    device: Device
    host: HostMemory
    memory: Memory
    piece: int
    plain: torch.Tensor
    chunks: Sequence[Chunk]
    key: bytes

    def go(self, kernels: Kernels | None) -> None:
        """Copy everything, and open it where there are kernels; back when the device is done."""
        pending: deque[Pending] = deque()
        self.device.follow()
        for start in range(0, self.memory.nbytes, self.piece):
            self.device.copy_in(self.host, start, self.memory, start, self.piece)
            if kernels is None:
                continue
            self.device.compute_after(self.device.copied())
            chunks = [c._replace(address=self.memory.address + start + c.address) for c in self.chunks]
            pending.append(kernels.open(Batch([Secret(self.key)], chunks), self.device.compute))
            while len(pending) > _MOST_PENDING or (pending and pending[0].done()):
                pending.popleft().wait()
        self.device.synchronise()
        for one in pending:
            one.wait()

    def check(self) -> None:
        """Every piece is plaintext. Raises MeasurementError."""
        plain = self.plain.to(self.memory.owner.device)
        for start in range(0, self.memory.nbytes, self.piece):
            if not torch.equal(self.memory.owner[start : start + self.piece], plain):
                raise MeasurementError("gave other bytes than were sealed")


def _ring(context: Context) -> _Ring:
    sizes, device = context.sizes, context.bench.pipeline()
    plain = torch.randint(0, 256, (sizes.piece,), dtype=torch.uint8)
    text, key = plain.numpy().tobytes(), os.urandom(32)
    host, memory = device.pin(sizes.pinned), device.allocate(sizes.pinned)
    chunks = []
    for start in range(0, sizes.piece, sizes.chunk):
        nonce = os.urandom(12)
        found = AESGCM(key).encrypt(nonce, text[start : start + sizes.chunk], None)
        host.view[start : start + len(found) - 16] = found[:-16]
        chunks.append(Chunk(start, len(found) - 16, 0, nonce, found[-16:]))
    for start in range(sizes.piece, sizes.pinned, sizes.piece):
        host.view[start : start + sizes.piece] = host.view[: sizes.piece]
    return _Ring(device, host, memory, sizes.piece, plain, chunks, key)


def _pinned(context: Context) -> None:
    ring = _ring(context)
    bench = context.bench

    def work(
        name: str, label: str, loader: str, kernels: Callable[[], Kernels | None], check: Callable[[], None]
    ) -> Work:
        return Work(
            name=name,
            label=label,
            loader=loader,
            run=lambda: wall_seconds(bench, lambda: ring.go(kernels()))[0],
            check=check,
            parameters={"bytes": ring.memory.nbytes, "piece": ring.piece},
        )

    works = [
        work("bare", "bare copy", "none", lambda: None, lambda: None),
        work("secure", "copy, decrypt, verify", "secure_loader", lambda: bench.kernels("auto"), ring.check),
    ]
    measure(context, "pinned", f"From pinned memory, {size_text(ring.memory.nbytes)}", works)


def _file(context: Context, place: str, one: files.Files, seconds: float) -> None:
    from secure_loader.torch import load_file

    bench = context.bench
    path = Path(one.paths[place]["secure"])
    size = min(context.sizes.pinned, one.nbytes)
    host = bench.pinned(size)
    last: list[dict[str, Any]] = [{}]

    def bare() -> float:
        # New memory, as a load takes it; torch keeps it from the last time.
        def copy() -> None:
            target = torch.empty(one.nbytes, dtype=torch.uint8, device=bench.torch_device)
            for start in range(0, one.nbytes, context.sizes.piece):
                part = target[start : start + context.sizes.piece]
                at = start % size if start % size + part.numel() <= size else 0
                part.copy_(host[at : at + part.numel()], non_blocking=True)

        return wall_seconds(bench, copy)[0]

    def read() -> float:
        files.prepare(one, place, path)
        start = time.perf_counter()
        _read_into(path, host.numpy())
        return time.perf_counter() - start

    def load() -> float:
        last[0] = {}
        files.prepare(one, place, path)
        taken, last[0] = wall_seconds(bench, lambda: load_file(path, device=bench.torch_device))
        return taken

    def check() -> None:
        if digest(last[0]) != one.digest:
            raise MeasurementError("gave other bytes than were written")
        last[0] = {}

    parameters = {"bytes": one.nbytes, "tensors": one.tensors}
    works = [
        Work(name="bare", label="bare copy from pinned memory", loader="none", run=bare, parameters=parameters),
        Work(name="read", label=f"reading alone, {_READERS} threads", loader="none", run=read, parameters=parameters),
        Work(name="secure", label="encrypted file to verified tensors", run=load, check=check, parameters=parameters),
    ]
    title = f"{one.nbytes / 1e9:.1f} GB {files.where(one, place)}"
    cache = "cold" if place == "disk" else "as is"
    measure(context, f"{place}-{one.name}", title, works, cache=cache, warm_ups=1, seconds=seconds)


def _read_into(path: Path, target: Any) -> None:
    """All of a file into a smaller piece of memory, over and over: what the file side can give, and no more."""
    view = memoryview(target).cast("B")
    size, slots = path.stat().st_size, max(1, len(view) // _READ)
    blocks = iter(range(0, size, _READ))
    lock, failed = threading.Lock(), []
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def work() -> None:
        try:
            while True:
                with lock:
                    start = next(blocks, None)
                if start is None:
                    return
                at = start // _READ % slots * _READ
                os.preadv(fd, [view[at : at + _READ]], start)
        except OSError as e:
            failed.append(e)

    threads = [threading.Thread(target=work) for _ in range(_READERS)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        os.close(fd)
    if failed:
        raise failed[0]
