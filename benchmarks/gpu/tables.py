"""Tables of ``make gpu`` for the documentation: ``<!-- bench:gpu-goals -->`` and the like, see :mod:`benchmarks.report`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.gpu.rounds import rate

Results = dict[str, dict[str, Any]]
Rows = Callable[[tuple[str, ...], list[tuple[str, ...]]], str]


def of_gpu(results: Results) -> Results:
    """Results of ``make gpu`` alone."""
    return {name: document for name, document in results.items() if "gpu" in document}


def rate_table(document: dict[str, Any], rows: Rows) -> str:
    """Everything that was timed, in GB/s, beside what was predicted."""
    parts = []
    for case in document["cases"].values():
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
                    "" if predicted is None else f"{predicted[0]:g}-{predicted[1]:g}",
                )
            )
        if lines:
            parts.append(rows((case["title"], "median", "GB/s", "predicted"), lines))
    return "\n".join(parts)


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
