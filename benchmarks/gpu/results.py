"""Result files of ``make gpu``: what other suites write, and which device it was. Figures of a stand-in are never among them."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

from benchmarks import cache, goals, schema
from benchmarks.gpu.stage import Stage
from benchmarks.run import write as write_checked

RESULTS = cache.ROOT / "benchmarks" / "results"


class NotPublishedError(Exception):
    """Figures that were not taken on a GPU were about to be put among the results."""


def document(
    stage: Stage,
    cases: dict[str, Any],
    *,
    gpu: dict[str, Any],
    machine: dict[str, Any],
    size: str,
    repetitions: int,
    seconds: float,
    seconds_making_data: float,
    failure: str | None,
    skipped: str | None,
) -> dict[str, Any]:
    """The result document of a stage, however it ended."""
    return {
        "schema": schema.SCHEMA,
        "suite": f"gpu-{stage.name}",
        "title": stage.title,
        "size": size,
        "created": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "seconds_making_data": round(seconds_making_data, 1),
        "repetitions": repetitions,
        "machine": machine,
        "gpu": gpu,
        "failure": failure,
        "skipped": skipped,
        "cases": cases,
        "goals": [goals.evaluate(goal, cases) for goal in stage.goals],
    }


def write(found: dict[str, Any], folder: Path) -> Path:
    """Write a document.

    Raises:
        NotPublishedError: It holds figures of a stand-in, or of the tests' size, and the folder is that of the results.
        SchemaError: It is not what it should be.
    """
    schema.check(found)
    # Device and inode where both exist: no link and no spelling leads around it.
    same = folder.resolve() == RESULTS.resolve() or (folder.exists() and RESULTS.exists() and folder.samefile(RESULTS))
    if same and (found["gpu"]["stand_in"] or found["size"] != "full"):
        raise NotPublishedError("these figures were not taken on a GPU, in full size: they are not published")
    return write_checked(found, folder)
