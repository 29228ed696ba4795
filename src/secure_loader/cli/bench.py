"""bench."""

from __future__ import annotations

from collections.abc import Mapping

from ..bench.measure import Result
from ..bench.model import Report
from ..bench.model import bench as run
from ..bench.report import Line, Row, load_lines, row_lines
from .grammar import Arguments
from .models import references
from .output import Output, clean, count, facts, table


def bench(args: Arguments, out: Output) -> None:
    """``bench MODEL``."""
    report = run(
        args.model,
        plain=args.plain,
        work=args.work,
        repeat=args.repeat,
        cold=args.cold,
        keys=references(args.keys),
        trust=args.trust,
        progress=out.progress,
        tell=out.note,
    )
    out.result(report.document(), _lines(report, out))


def _lines(report: Report, out: Output) -> list[str]:
    lines = [
        out.paint(clean(report.model), "bold"),
        *facts(
            [
                ("holds", _holds(report)),
                ("machine", _machine(report)),
                ("software", _software(report)),
                ("copy", "encrypted with throw-away keys for this run, and removed" if report.copied else ""),
                ("figures", f"medians of {report.repeat}; GB are 1e9 bytes of plaintext; all bytes were compared"),
            ]
        ),
        "",
        *_loads("load all tensors, files in the page cache", report.load, report),
    ]
    if report.cold:
        lines += ["", *_loads("load all tensors, files not in the page cache", report.cold, report, cold=True)]
    if (largest := report.secure.largest()) is not None:
        labels = report.labels()
        what = f"one row of {largest[1].name} ({_size(largest[1].nbytes)})"
        rows = [_row(line, labels[line.name]) for line in row_lines(report.row)]
        lines += ["", *table([what, "opening", "row"], rows, right=(1, 2))]
    failed = {n: r.failure for results in (report.load, report.row) for n, r in results.items() if r.failure}
    lines += [""] if failed or report.missing else []
    lines += [f"  {clean(name)} failed: {clean(why or '')}" for name, why in failed.items()]
    lines += [f"  not measured: {clean(name)} {clean(why)}" for name, why in _together(report.missing)]
    if report.hints:
        lines += ["", out.paint("What to change", "bold"), *(f"  {clean(hint)}" for hint in report.hints)]
    return lines


def _together(missing: Mapping[str, str]) -> list[tuple[str, str]]:
    """Names that lack the same are said at once."""
    by_reason: dict[str, list[str]] = {}
    for name, why in missing.items():
        by_reason.setdefault(why, []).append(name)
    return [(", ".join(names) + ":", why) for why, names in by_reason.items()]


def _holds(report: Report) -> str:
    files = count(len(report.secure.shards), "weight file")
    return f"{count(report.tensors, 'tensor')}, {_size(report.nbytes)}, in {files}"


def _machine(report: Report) -> str:
    f = report.facts
    parts = [
        f["cpu"],
        count(f["cores"], "processor"),
        f"{_size(f['memory_bytes'])} memory",
        f["kernel"],
        f["file_system"],
        f"huge pages: {f['huge_pages']['enabled'] or 'unknown'}",
    ]
    return ", ".join(parts)


def _software(report: Report) -> str:
    f, packages = report.facts, report.facts["packages"]
    versions = [
        f"{name} {packages[name]}" for name in ("torch", "numpy", "safetensors", "cryptotensors") if name in packages
    ]
    return f"{f['python']}, {f['openssl']}, {', '.join(versions)}; tensors of {report.framework}"


def _loads(title: str, results: Mapping[str, Result], report: Report, *, cold: bool = False) -> list[str]:
    lines, labels = load_lines(results, report.nbytes), report.labels(cold=cold)
    memory = any(line.memory_above is not None for line in lines)
    compared = any(line.over_safetensors is not None for line in lines)
    head = [title, "opening", "all", "GB/s", "x floor"]
    head += ["x safetensors"] if compared else []
    head += ["extra memory"] if memory else []
    rows = []
    for line in lines:
        cells = _load(line, labels[line.name])
        cells += [_number(line.over_safetensors)] if compared else []
        cells += ["-" if line.memory_above is None else _size(line.memory_above)] if memory else []
        rows.append(cells)
    return table(head, rows, right=range(1, len(head)))


def _load(line: Line, label: str) -> list[str]:
    if line.seconds is None or line.bytes_per_second is None:
        return [label, "-", "failed", "-", "-"]
    return [
        label,
        "-" if line.opening is None else _seconds(line.opening),
        _seconds(line.seconds),
        f"{line.bytes_per_second / 1e9:.2f}",
        _number(line.over_floor),
    ]


def _row(line: Row, label: str) -> list[str]:
    if line.opening is None or line.seconds is None:
        return [label, "-", "failed"]
    return [label, _seconds(line.opening), _seconds(line.seconds)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _seconds(seconds: float) -> str:
    """Three digits that count."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.{1 if seconds < 0.1 else 0}f} ms"
    return f"{seconds:.2f} s"


def _size(nbytes: float) -> str:
    """In the units of the GB/s beside it: 1e9 bytes."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes:.0f} B"
