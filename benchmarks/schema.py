"""What every result file holds. :func:`check` is called before one is written, and by whatever reads one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu import NAMES as GPU_NAMES
from benchmarks.suites import NAMES

SCHEMA = 1

_NUMBER = (int, float)
_NONE = type(None)
_DOCUMENT = {
    "schema": int,
    "suite": str,
    "title": str,
    "size": str,
    "created": str,
    "seconds": _NUMBER,
    "seconds_making_data": _NUMBER,
    "repetitions": int,
    "machine": dict,
    "cases": dict,
    "goals": list,
}
# What `make gpu` says beside that; a stage that failed keeps what it had measured.
_GPU_DOCUMENT = _DOCUMENT | {"gpu": dict, "failure": (str, _NONE), "skipped": (str, _NONE)}
_MACHINE = {
    "cpu": str,
    "cpu_flags": list,
    "architecture": str,
    "cores": int,
    "memory_bytes": int,
    "kernel": str,
    "huge_pages": dict,
    "file_system": str,
    "python": str,
    "openssl": str,
    "load_average": _NUMBER,
    "packages": dict,
}
_CASE = {"title": str, "cache": str, "entries": dict}
_ENTRY = {
    "label": str,
    "loader": str,
    "ours": bool,
    "environment": dict,
    "parameters": dict,
    "bytes_checked": bool,
    "failure": (str, _NONE),
    "median_seconds": dict,
    "min_seconds": dict,
    "median_cpu_seconds": dict,
    "samples": list,
    "memory": (dict, _NONE),
}
_SAMPLE = {
    "seconds": dict,
    "cpu_seconds": dict,
    "memory": dict,
    "peak": (dict, _NONE),
    "io": dict,
    "checksum": object,
    "imported": int,
    "evicted": (list, tuple),
}
_GOAL = {
    "what": str,
    "against": str,
    "compare": str,
    "bound": (*_NUMBER, _NONE),
    "unit": str,
    "measured": (*_NUMBER, _NONE),
    "of_rounds": (*_NUMBER, _NONE),
    "met": (bool, _NONE),
    "reason": (str, _NONE),
}


class SchemaError(Exception):
    """A result file is not what it should be; the text lists everything that is wrong."""


def check(document: Any) -> None:
    """Look at a whole document.

    Raises:
        SchemaError: A field is missing, unknown, or of the wrong type; or an entry has neither figures nor a reason.
    """
    problems = list(_problems(document))
    if problems:
        raise SchemaError("; ".join(problems))


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """All results of a folder, by suite, in the order of the suites; those of ``make gpu`` last. Raises SchemaError."""
    found = {}
    for file in (folder / f"{name}.json" for name in (*NAMES, *GPU_NAMES)):
        if file.exists():
            document = json.loads(file.read_text())
            check(document)
            found[document["suite"]] = document
    return found


def _problems(document: Any) -> Iterator[str]:
    of_gpu = isinstance(document, dict) and document.get("suite") in GPU_NAMES
    wrong = list(_fields("document", document, _GPU_DOCUMENT if of_gpu else _DOCUMENT))
    yield from wrong
    if wrong:
        return
    if document["schema"] != SCHEMA:
        yield f"schema {document['schema']}, not {SCHEMA}"
    yield from _fields("machine", document["machine"], _MACHINE)
    if of_gpu and not isinstance(document["gpu"].get("stand_in"), bool):
        yield "gpu: whether it was one is not said"
    for name, case in document["cases"].items():
        wrong = list(_fields(name, case, _CASE))
        yield from wrong
        for entry_name, entry in ({} if wrong else case["entries"]).items():
            yield from _entry_problems(f"{name}/{entry_name}", entry)
    for goal in document["goals"]:
        yield from _fields("goal", goal, _GOAL)
        if (goal.get("measured") is None) == (goal.get("reason") is None):
            yield f"goal {goal.get('what')}: neither a figure nor a reason, or both"


def _entry_problems(where: str, entry: Any) -> Iterator[str]:
    wrong = list(_fields(where, entry, _ENTRY))
    yield from wrong
    if wrong:
        return
    samples = [*entry["samples"], *([entry["memory"]] if entry["memory"] else [])]
    for sample in samples:
        yield from _fields(f"{where} sample", sample, _SAMPLE)
    if entry["failure"] == "" or (entry["failure"] is None and not samples):
        yield f"{where}: neither figures nor a reason"
    if entry["bytes_checked"] != (entry["failure"] is None):
        yield f"{where}: measured without a look at its bytes"


def _fields(where: str, found: Any, wanted: dict[str, Any]) -> Iterator[str]:
    if not isinstance(found, dict):
        yield f"{where}: not an object"
        return
    for name in wanted.keys() ^ found.keys():
        yield f"{where}: {name} is {'missing' if name in wanted else 'unknown'}"
    for name in wanted.keys() & found.keys():
        if not isinstance(found[name], wanted[name]):
            yield f"{where}: {name} is {type(found[name]).__name__}"
