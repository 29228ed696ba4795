"""A process that loads files to a device with one of the loaders: ``python -m benchmarks.gpu.loader NAME BENCH``.

One line of JSON on standard input is one request, one line on standard output its answer, as in :mod:`benchmarks.worker`.
It lives as long as its loader is measured: what is made once in a process is made in its first load.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Tensors = dict[str, Any]


@dataclass(frozen=True)
class Loader:
    """A way of loading to a device.

    Attributes:
        label: What readers see.
        package: What does the work, and is imported first.
        variant: What it reads.
        load: Path and device to tensors.
    """

    label: str
    package: str
    variant: str
    load: Callable[[str, str], Tensors]


def _secure(path: str, device: str) -> Tensors:
    from secure_loader.torch import load_file

    return load_file(path, device=device)


def _safetensors(path: str, device: str) -> Tensors:
    from safetensors.torch import load_file

    return load_file(path, device=device)


def _fastsafetensors(path: str, device: str) -> Tensors:
    from fastsafetensors import SafeTensorsFileLoader
    from fastsafetensors.common import SingleGroup

    from benchmarks import peers

    loader = SafeTensorsFileLoader(SingleGroup(), device=device, nogds=True)
    loader.add_filenames({0: [path]})
    buffer = loader.copy_files_to_device()
    peers.KEEP += [loader, buffer]  # until the bytes were looked at
    return {name: buffer.get_tensor(name) for name in loader.get_keys()}


def _instanttensor(path: str, device: str) -> Tensors:
    from instanttensor import safe_open

    with safe_open([path], framework="pt", device=device) as f:
        return dict(f.tensors())


def _runai(path: str, device: str) -> Tensors:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(path, device=device)
        return {name: tensor.to(device) for name, tensor in streamer.get_tensors()}


def _cryptotensors(path: str, device: str) -> Tensors:
    import cryptotensors

    from benchmarks import peers

    with cryptotensors.safe_open(path, "pt", device=device, config=peers.cryptotensors_config()) as f:
        return {name: f.get_tensor(name).to(device) for name in f.keys()}  # noqa: SIM118 - not a mapping


LOADERS = {
    "secure": Loader("secure_loader, encrypted", "secure_loader", "secure", _secure),
    "safetensors": Loader("safetensors", "safetensors", "plain", _safetensors),
    "fastsafetensors": Loader("fastsafetensors", "fastsafetensors", "plain", _fastsafetensors),
    "instanttensor": Loader("instanttensor", "instanttensor", "plain", _instanttensor),
    "runai": Loader("runai-model-streamer", "runai_model_streamer", "plain", _runai),
    "cryptotensors": Loader("cryptotensors, encrypted", "cryptotensors", "cryptotensors", _cryptotensors),
}


def serve(name: str, bench_name: str) -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not get among the answers
    loader = LOADERS[name]
    try:
        import importlib

        start = time.perf_counter()
        importlib.import_module("torch")
        importlib.import_module(loader.package)
        imported = time.perf_counter() - start

        from benchmarks.gpu.child import make_bench

        start = time.perf_counter()
        bench = make_bench(bench_name)
        _warm(bench)
        answer: dict[str, Any] = {"import": imported, "context": time.perf_counter() - start}
    except Exception as e:  # noqa: BLE001 - a peer may fail in any way, and the way is the result
        answer = {"error": f"{type(e).__name__}: {e}"}
    print(json.dumps(answer), file=answers)
    if "error" in answer:
        return
    for line in sys.stdin:
        try:
            answer = _load(loader, bench, json.loads(line)["path"])
        except Exception as e:  # noqa: BLE001 - likewise
            answer = {"error": f"{type(e).__name__}: {e}"}
        print(json.dumps(answer), file=answers)


def _warm(bench: Any) -> None:
    """What a digest needs on the device is there before memory is looked at."""
    import torch

    from secure_loader.bench.measure import digest

    digest({"a": torch.ones(1 << 16, dtype=torch.bfloat16, device=bench.torch_device)})
    bench.wait()


def _load(loader: Loader, bench: Any, path: str) -> dict[str, Any]:
    from benchmarks import peers
    from benchmarks.gpu.device import wall_seconds
    from secure_loader.bench.measure import digest

    cpu = time.process_time()
    seconds, tensors = wall_seconds(bench, lambda: loader.load(path, bench.torch_device))
    cpu = time.process_time() - cpu
    wrong = [name for name, tensor in tensors.items() if str(tensor.device) != bench.torch_device]
    found = digest(tensors)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    tensors.clear()
    peers.KEEP.clear()
    gc.collect()
    _empty_cache()
    if wrong:
        raise RuntimeError(f"{len(wrong)} tensors are not on {bench.torch_device}")
    return {"seconds": seconds, "cpu": cpu, "digest": found, "bytes": nbytes, "pinned": _pinned_peak()}


def _empty_cache() -> None:
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _pinned_peak() -> int | None:
    """Bytes of host memory that torch had pinned at once; None where it does not tell."""
    import torch

    if not torch.cuda.is_initialized():
        return 0
    with contextlib.suppress(AttributeError, RuntimeError):
        stats = torch.cuda.host_memory_stats()
        for key in ("reserved_bytes.peak", "allocated_bytes.peak"):
            if key in stats:
                return int(stats[key])
    return None


if __name__ == "__main__":
    serve(*sys.argv[1:])
