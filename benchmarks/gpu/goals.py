"""The goals of the device path, on an H200; a figure counts only when it was measured there."""

from __future__ import annotations

from benchmarks.data import QWEN3_06B, QWEN3_4B_PART
from benchmarks.gpu.sizes import QWEN3_4B
from benchmarks.model import Goal, Quantity

_BEST_PLAIN = ("safetensors", "fastsafetensors", "instanttensor", "runai")
_LARGE = f"memory-{QWEN3_4B_PART.name}"

KERNELS = (
    Goal(
        what="fused GCM kernel, AES-256, 1 GiB",
        against="the clock of the device",
        measured=Quantity("aes256", "open", "rate.run"),
        compare="least",
        bound=150.0,
        unit=" GB/s",
    ),
    Goal(
        what="constant time: slowest over fastest of nine pairs of key and data",
        against="zeros, ones, random",
        measured=Quantity("constant-time", "random-random", "parameters.spread"),
        compare="value",
        bound=None,
    ),
)
PIPELINE = (
    Goal(
        what="from pinned memory to verified plaintext, 1 GiB",
        against="bare pinned copy, its rate",
        measured=Quantity("pinned", "secure", "seconds.run"),
        reference=Quantity("pinned", "bare", "seconds.run"),
        compare="share",
        bound=0.97,
    ),
    *(
        Goal(
            what=f"encrypted file in memory to verified tensors, {what.nbytes / 1e9:.1f} GB",
            against="bare pinned copy, its rate",
            measured=Quantity(f"memory-{what.name}", "secure", "seconds.run"),
            reference=Quantity(f"memory-{what.name}", "bare", "seconds.run"),
            compare="share",
            bound=0.97,
        )
        for what in (QWEN3_06B, QWEN3_4B_PART, QWEN3_4B)
    ),
)
LOAD = (
    Goal(
        what="encrypted file in memory to the device, 4.0 GB",
        against="the best plain loader, its rate",
        measured=Quantity(_LARGE, "secure", "seconds.run"),
        reference=Quantity(_LARGE, _BEST_PLAIN, "seconds.run"),
        compare="share",
        bound=0.95,
    ),
    Goal(
        what="the same",
        against='plain safetensors, `load_file(device="cuda")`',
        measured=Quantity(_LARGE, "secure", "seconds.run"),
        reference=Quantity(_LARGE, "safetensors", "seconds.run"),
        compare="speedup",
        bound=3.0,
    ),
    Goal(
        what="encrypted file in memory to the device, 1.2 GB",
        against="cryptotensors, encrypted",
        measured=Quantity(f"memory-{QWEN3_06B.name}", "secure", "seconds.run"),
        reference=Quantity(f"memory-{QWEN3_06B.name}", "cryptotensors", "seconds.run"),
        compare="speedup",
        bound=20.0,
    ),
    Goal(
        what="host memory, anonymous and pinned, peak of a first load",
        against="the process before it",
        measured=Quantity("memory", "secure", "parameters.host_bytes", scale=1e-6),
        compare="value",
        bound=512.0,
        unit=" MB",
    ),
    Goal(
        what="device memory above the tensors, peak of a first load",
        against="the tensors' size",
        measured=Quantity("memory", "secure", "parameters.device_above_bytes", scale=1e-6),
        compare="value",
        bound=64.0,
        unit=" MB",
    ),
)
COLD = (
    Goal(
        what="first load in a process, cubin",
        against="later loads in the same process",
        measured=Quantity("start", "cubin", "parameters.above_seconds"),
        compare="value",
        bound=0.5,
        unit=" s",
    ),
    Goal(
        what="first load in a process, NVRTC with nothing cached",
        against="later loads in the same process",
        measured=Quantity("start", "nvrtc", "parameters.above_seconds"),
        compare="value",
        bound=None,
        unit=" s",
    ),
    Goal(
        what="first load in a process, Triton with nothing cached",
        against="later loads in the same process",
        measured=Quantity("start", "triton", "parameters.above_seconds"),
        compare="value",
        bound=None,
        unit=" s",
    ),
)
