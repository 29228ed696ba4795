"""What a reader must know about a GPU to judge figures; no serial number, no name of a host."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from secure_loader.bench import machine

_FIELDS = (
    "name",
    "driver_version",
    "memory.total",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.limit",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "mig.mode.current",
)
# What decides about figures. A user's own environment may hold much else, which is nobody's business.
_PACKAGES = (
    "secure-loader",
    "cryptography",
    "torch",
    "triton",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12",
    "numpy",
    "safetensors",
    "cryptotensors",
    "fastsafetensors",
    "instanttensor",
    "runai-model-streamer",
    "pytest",
)


def gather(bench_name: str, folder: Path) -> dict[str, Any]:
    """Facts about the device and the machine, by a look at a device that works.

    Returns:
        ``gpu`` and ``machine``, JSON-able.
    """
    from benchmarks.gpu.child import make_bench

    bench = make_bench(bench_name)
    found = machine.facts(folder)
    found["packages"] = {name: version for name, version in found["packages"].items() if name in _PACKAGES}
    gpu: dict[str, Any] = {"stand_in": bench.stand_in, "torch_device": bench.torch_device}
    if not bench.stand_in:
        gpu |= _of_torch(bench.ordinal) | {"smi": _of_smi(bench.ordinal, _busy(bench))}
    gpu["kernels"] = _kernels(bench)
    return {"gpu": gpu, "machine": found}


def _of_torch(ordinal: int) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(ordinal)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "devices": torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def _busy(bench: Any) -> Callable[[], None]:
    """Something to do, so that clocks and the bus are in the state that they work in."""
    import torch

    host = bench.pinned(64 << 20)
    target = torch.empty(64 << 20, dtype=torch.uint8, device=bench.torch_device)
    count = 400  # half a second at 50 GB/s

    def work() -> None:
        for _ in range(count):
            target.copy_(host, non_blocking=True)

    return work


def _of_smi(ordinal: int, busy: Callable[[], None]) -> dict[str, str] | None:
    """What ``nvidia-smi`` says while the device works; None where it is not there."""
    # Ordinals of a process follow CUDA_VISIBLE_DEVICES; where there are several devices, this may tell of another one.
    command = ["nvidia-smi", f"--id={ordinal}", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    busy()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        values = [value.strip() for value in done.stdout.strip().splitlines()[0].split(",")]
        return dict(zip(_FIELDS, values, strict=False))
    return None


def _kernels(bench: Any) -> dict[str, str]:
    """What the package chooses on this device, or why it finds nothing."""
    try:
        return {"auto": bench.kernels("auto").name}
    except Exception as e:  # noqa: BLE001 - that they cannot be used, however, is a fact
        return {"auto": f"none: {type(e).__name__}: {str(e).partition(chr(10))[0]}"[:300]}


def main() -> None:
    """Print them as JSON, on the last line."""
    bench_name, folder = sys.argv[1:]
    print(json.dumps(gather(bench_name, Path(folder))))


if __name__ == "__main__":
    main()
