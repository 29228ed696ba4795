"""The cost of encryption that the CryptoTensors paper reports (arXiv 2512.04580), next to what is measured here.

All figures are multiples of what plain safetensors takes for the same thing in the same run.
"""

from __future__ import annotations

from typing import Any

from benchmarks.goals import NoFigureError, evaluate
from benchmarks.model import Goal, Quantity

# What, the paper's figure; suite, case, plain entry, path; bytes that both have in memory anyway go to memory ratios.
_ROWS = (
    ("save, time", "1.6", "save", "0.6b", "safetensors", "seconds.sync"),
    ("load into own memory, time (the paper's NumPy)", "2.2", "load", "0.6b", "safetensors-owned", "seconds.load"),
    (
        "load, a map that nobody touches counts as loaded (PyTorch)",
        "59",
        "load",
        "0.6b",
        "safetensors-mapped",
        "seconds.load",
    ),
    ("load and touch every byte, time", "-", "load", "0.6b", "safetensors-mapped", "seconds.touch"),
    (
        "Transformers: load and first forward pass, SmolLM2",
        "2-5",
        "transformers",
        "smollm2",
        "plain",
        "seconds.forward",
    ),
    ("Transformers: load and first forward pass, 1.5 GB", "2-5", "transformers", "qwen3", "plain", "seconds.forward"),
    ("vLLM: loading weights, SmolLM2", "8-15", "vllm", "smollm2", "plain", "seconds.weights"),
    ("vLLM: loading weights, 1.5 GB", "8-15", "vllm", "qwen3", "plain", "seconds.weights"),
)


def paper_table(results: dict[str, dict[str, Any]]) -> str:
    """The paper's ratios, those of cryptotensors on this machine, and ours."""
    lines = [
        "| encrypted / plain | paper | cryptotensors here | **secure_loader** |\n",
        "| --- | ---: | ---: | ---: |\n",
    ]
    for what, theirs, suite, case, plain, path in _ROWS:
        cells = [_ratio(results, suite, case, entry, plain, path) for entry in ("cryptotensors", "secure")]
        lines.append(f"| {what} | {theirs} | {cells[0]} | {cells[1]} |\n")
    return "".join(lines)


def _ratio(results: dict[str, dict[str, Any]], suite: str, case: str, entry: str, plain: str, path: str) -> str:
    if suite not in results:
        return "-"
    goal = Goal(
        what="", against="", measured=Quantity(case, entry, path), reference=Quantity(case, plain, path), bound=None
    )
    try:
        found = evaluate(goal, results[suite]["cases"])
    except NoFigureError:
        return "-"
    return "-" if found["measured"] is None else f"{found['measured']:.2f}"
