"""Copies: what the bus and the device's memory give, by size. Everything else is held against it."""

from __future__ import annotations

import torch

from benchmarks.gpu.rounds import Work, measure
from benchmarks.gpu.stage import Context
from secure_loader.bench.measure import MeasurementError


def run(context: Context) -> None:
    """Host to device, device to host, within the device; a copy after the other on one stream."""
    bench, total = context.bench, context.sizes.copied
    host, back = bench.pinned(total), bench.pinned(total)
    source, up, across = (torch.empty(total, dtype=torch.uint8, device=bench.torch_device) for _ in range(3))
    host.random_(0, 256)
    source.copy_(host)
    bench.wait()

    def work(kind: str, label: str, target: torch.Tensor, origin: torch.Tensor, truth: torch.Tensor, size: int) -> Work:
        def queue() -> None:
            for start in range(0, total, size):
                target[start : start + size].copy_(origin[start : start + size], non_blocking=True)

        def check() -> None:
            if not torch.equal(target, truth):
                raise MeasurementError("gave other bytes than were copied")

        return Work(
            name=kind,
            label=label,
            loader="none",
            run=lambda: bench.seconds(queue),
            check=check,
            parameters={"bytes": total, "each": size} | _prediction(label, size),
        )

    for size in context.sizes.copies:
        works = [
            work("h2d", "pinned to device", up, host, source, size),
            work("d2h", "device to pinned", back, source, host, size),
            work("d2d", "within the device", across, source, source, size),
        ]
        measure(context, f"copy-{size}", f"Copies of {size_text(size)}, {size_text(total)} in all", works)


def _prediction(label: str, size: int) -> dict[str, list[float]]:
    """GB/s of an H200 by its data sheet and others' measurements; for copies that are long enough to show it."""
    if size < 32 << 20:
        return {}
    # Within the device, a byte that is copied is read and written.
    known = {"pinned to device": [55.0], "within the device": [4300 / 2]}
    return {"predicted": known[label]} if label in known else {}


def size_text(nbytes: int) -> str:
    """``32 MiB``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:g} {unit}"
    return f"{nbytes} bytes"
