"""The first load in a fresh process, above what the later ones take, by where the kernels come from."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import cache
from benchmarks.gpu import files
from benchmarks.gpu.loader import LOADERS
from benchmarks.gpu.rounds import Work, amend, measure
from benchmarks.gpu.stage import Context
from benchmarks.model import OURS
from secure_loader.bench import machine
from secure_loader.bench.measure import MeasurementError

_ROUNDS = 3


@dataclass(frozen=True)
class _Way:
    """Where the kernels come from.

    Attributes:
        label: What readers see.
        predicted: Seconds above a later load, from trials without a GPU.
        loader: Of :data:`LOADERS`.
        environment: What chooses it.
        forget: Called before, so that nothing is found ready.
    """

    label: str
    predicted: tuple[float, ...] = ()
    loader: str = "secure"
    environment: Mapping[str, str] = field(default_factory=dict)
    forget: Callable[[], None] = lambda: None


def _only(way: str, **more: str) -> dict[str, str]:
    return {"SECURE_LOADER_DEVICE_KERNELS": way, "SECURE_LOADER_REQUIRE_DEVICE_KERNELS": "1", **more}


def run(context: Context) -> None:
    """Each way in turn, one process after the other."""
    one = files.made(context)[0]
    with tempfile.TemporaryDirectory(dir=context.folder) as folder:
        triton = Path(folder) / "triton"
        ways = {
            "cubin": _Way("cubin", environment=_only("cubin")),
            "nvrtc": _Way("NVRTC, nothing cached", (0.3, 1.3), environment=_only("nvrtc"), forget=_forget_cubins),
            "nvrtc-cached": _Way("NVRTC, cached", environment=_only("nvrtc")),
            "triton": _Way(
                "Triton, nothing cached",
                (5, 12),
                environment=_only("triton", TRITON_CACHE_DIR=str(triton)),
                forget=lambda: shutil.rmtree(triton, ignore_errors=True),
            ),
            "triton-cached": _Way("Triton, cached", environment=_only("triton", TRITON_CACHE_DIR=str(triton))),
            "safetensors": _Way("safetensors, plain", loader="safetensors"),
        }
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}

        def work(name: str, way: _Way) -> Work:
            def start() -> float:
                way.forget()
                path = one.paths["memory"][LOADERS[way.loader].variant]
                files.prepare(one, "memory", path)
                found = _start(context, way, path)
                if found["digest"] != one.digest:
                    raise MeasurementError("gave other bytes than were written")
                answers[name].append(found)
                return float(found["seconds"][0])

            return Work(
                name=name,
                label=way.label,
                loader=OURS if way.loader == "secure" else way.loader,
                run=start,
                cpu=lambda: 0.0,
                parameters={"bytes": one.nbytes, "predicted_seconds": list(way.predicted)},
            )

        works = [work(name, way) for name, way in ways.items()]
        title = f"First load of {one.nbytes / 1e9:.1f} GB in a process"
        found = measure(context, "start", title, works, warm_ups=0, repetitions=_ROUNDS)
    for name, several in answers.items():
        if several:
            amend(context, "start", found, name, **_figures(several))


def _forget_cubins() -> None:
    shutil.rmtree(cache.home() / "cache" / "cubins", ignore_errors=True)


def _start(context: Context, way: _Way, path: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.start", way.loader, path, context.bench_name]
    # Where the stand-in loads, there are no kernels to insist on.
    environment = way.environment if context.bench_name == "cuda" else {}
    try:
        done = subprocess.run(
            command,
            env=os.environ | environment,
            cwd=cache.ROOT,
            capture_output=True,
            text=True,
            timeout=max(1.0, context.left()),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise MeasurementError("not done in time") from None
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"ended with {done.returncode}"]
        raise MeasurementError(machine.scrub(reason[0], cache.folder())[:400])
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _figures(several: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over processes; the later loads of one process stand for its steady state."""
    steady = [statistics.median(one["seconds"][1:]) for one in several]
    return {
        "above_seconds": statistics.median(one["seconds"][0] - s for one, s in zip(several, steady, strict=True)),
        "steady_seconds": statistics.median(steady),
        "import_seconds": statistics.median(one["import"] for one in several),
        "context_seconds": statistics.median(one["context"] for one in several),
    }
