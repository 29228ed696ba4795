"""Tables of ``make gpu`` for the documentation: ``<!-- bench:gpu-goals -->`` and the like, see :mod:`benchmarks.report`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.gpu.rounds import rate, span

Results = dict[str, dict[str, Any]]
Rows = Callable[[tuple[str, ...], list[tuple[str, ...]]], str]


def of_gpu(results: Results) -> Results:
    """Results of ``make gpu`` alone."""
    return {name: document for name, document in results.items() if "gpu" in document}


def rate_table(document: dict[str, Any], rows: Rows) -> str:
    """Everything that was timed, in GB/s, beside what was predicted."""
    parts = []
    for name, case in document["cases"].items():
        if name in _OTHERS:
            parts.append(_figures(case, _OTHERS[name], rows))
            continue
        lines = []
        for entry in case["entries"].values():
            label = f"**{entry['label']}**" if entry["ours"] else entry["label"]
            if entry["failure"] is not None:
                reason = " ".join(entry["failure"].split()).replace("|", "\\|")[:120]
                lines.append((label, f"does not run: {reason}", "", ""))
                continue
            found, predicted = rate(entry), entry["parameters"].get("predicted")
            seconds = next(iter(entry["median_seconds"].values()))
            lines.append(
                (
                    label,
                    f"{seconds * 1e3:.2f} ms" if seconds < 0.1 else f"{seconds:.3f} s",
                    "" if found is None else f"{found:.1f}",
                    "" if predicted is None else span(predicted),
                )
            )
        if lines:
            parts.append(rows((case["title"], "median", "GB/s", "predicted"), lines))
    return "\n".join(parts)


# Cases that are about something else than GB/s: heading, parameter, scale.
_OTHERS = {
    "memory": (
        ("host, MB", "host_bytes", 1e-6),
        ("of it pinned", "pinned_bytes", 1e-6),
        ("mapped files, MB", "mapped_bytes", 1e-6),
        ("device above the tensors, MB", "device_above_bytes", 1e-6),
    ),
    "start": (
        ("above a later load, s", "above_seconds", 1.0),
        ("predicted", "predicted_seconds", 1.0),
        ("later loads, s", "steady_seconds", 1.0),
        ("making the context, s", "context_seconds", 1.0),
    ),
}


def _figures(case: dict[str, Any], columns: tuple[tuple[str, str, float], ...], rows: Rows) -> str:
    lines = []
    for entry in case["entries"].values():
        label, found = f"**{entry['label']}**" if entry["ours"] else entry["label"], entry["parameters"]
        if entry["failure"] is not None:
            reason = " ".join(entry["failure"].split()).replace("|", "\\|")[:120]
            lines.append((label, f"does not run: {reason}", *[""] * (len(columns) - 1)))
        else:
            lines.append((label, *(_number(found.get(name), scale) for _, name, scale in columns)))
    return rows((case["title"], *(heading for heading, _, _ in columns)), lines)


def _number(value: Any, scale: float) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return span(value)
    return f"{value * scale:,.0f}" if scale != 1 else f"{value:.2f}"


def machine_table(results: Results, rows: Rows) -> str:
    """What the figures were measured on."""
    document = next(iter(results.values()))
    gpu, facts = document["gpu"], document["machine"]
    smi = gpu.get("smi") or {}
    bus = f"PCIe {smi.get('pcie.link.gen.current', '?')} x{smi.get('pcie.link.width.current', '?')}"
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    return rows(
        ("", ""),
        [
            ("GPU", f"{gpu.get('name')}, {gpu.get('multiprocessors')} multiprocessors, {bus}"),
            ("driver", f"{smi.get('driver_version', '?')}, CUDA {gpu.get('cuda')}, torch {gpu.get('torch')}"),
            ("kernels", ", ".join(f"{way}: {name}" for way, name in gpu["kernels"].items())),
            ("processor", f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_bytes'] / 2**30:.0f} GiB"),
            ("packages", packages),
            ("measured", f"{document['created'][:10]}, up to {document['repetitions']} repetitions, in turn"),
        ],
    )
