"""Goals: which figures of a suite's results they compare, and whether they are met."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.model import Goal, Quantity

LOWER = ("speedup", "share", "least")
"""Ways of comparing whose bound is a lower one."""


class NoFigureError(Exception):
    """A figure is not there; the text says why."""


def evaluate(goal: Goal, cases: dict[str, Any]) -> dict[str, Any]:
    """One row of the goals table.

    Args:
        goal: The goal.
        cases: ``cases`` of a suite's result document.
    """
    row: dict[str, Any] = {
        "what": goal.what,
        "against": goal.against,
        "compare": goal.compare,
        "bound": goal.bound,
        "unit": goal.unit,
        "measured": None,
        "of_rounds": None,
        "met": None,
        "reason": None,
    }
    try:
        measured, rounds = _compare(goal, cases)
    except NoFigureError as e:
        return row | {"reason": str(e)}
    row |= {"measured": measured, "of_rounds": rounds}
    if goal.bound is not None:
        row["met"] = measured >= goal.bound if goal.compare in LOWER else measured <= goal.bound
    return row


def _compare(goal: Goal, cases: dict[str, Any]) -> tuple[float, float | None]:
    ours = _values(goal.measured, cases)
    if goal.reference is None:
        return statistics.median(ours), None
    theirs = _values(goal.reference, cases)
    if goal.compare == "difference":
        return statistics.median(ours) - statistics.median(theirs), None
    if goal.compare in ("speedup", "share"):
        ours, theirs = theirs, ours
    ratio = statistics.median(ours) / statistics.median(theirs)
    if len(ours) != len(theirs) or len(ours) == 1:
        return ratio, None
    return ratio, statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _values(quantity: Quantity, cases: dict[str, Any]) -> list[float]:
    """By round, where there are rounds."""
    names = (quantity.entry,) if isinstance(quantity.entry, str) else quantity.entry
    entries = cases[quantity.case]["entries"] if quantity.case in cases else {}
    found, reasons = [], []
    for name in names:
        entry = entries.get(name)
        if entry is None:
            reasons.append(f"{name}: not in this run")
        elif entry["failure"] is not None:
            reasons.append(f"{entry['label']}: {entry['failure']}")
        else:
            values = _read(entry, quantity.path)
            if None in values:
                reasons.append(f"{entry['label']}: gave no figure")
            else:
                found.append(values)
    if not found:
        raise NoFigureError("; ".join(reasons))
    best = min(found, key=statistics.median)
    return [value * quantity.scale + quantity.plus for value in best]


def _read(entry: dict[str, Any], path: str) -> list[Any]:
    kind, _, name = path.partition(".")
    if kind == "parameters":
        return [entry["parameters"].get(name)]
    if kind == "peak":
        return [entry["memory"]["peak"][name]]
    samples = entry["samples"] or [entry["memory"]]
    if kind == "check":
        return [sample["checksum"][name] for sample in samples]
    if kind == "rate":
        return [entry["parameters"]["bytes"] / 1e9 / sample["seconds"][name] for sample in samples]
    if kind == "phase":
        return [_alone(sample["seconds"], name) for sample in samples]
    return [sample[kind][name] for sample in samples]


def _alone(seconds: dict[str, float], phase: str) -> float:
    """A phase without those before it."""
    names = list(seconds)
    before = names.index(phase) - 1
    return seconds[phase] - (seconds[names[before]] if before >= 0 else 0.0)
