"""Charts from results, and from nothing else: ``python -m benchmarks.charts`` writes ``docs/images/*.png``.

Colours are Okabe and Ito's, which people of all kinds of colour vision tell apart; shape and text say the same again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import cache, schema
from benchmarks.gpu import chart as gpu_chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RESULTS = cache.ROOT / "benchmarks" / "results"
IMAGES = cache.ROOT / "docs" / "images"
OURS, ENCRYPTED, PLAIN, FLOOR = "#0072B2", "#D55E00", "#8C8C8C", "#D9D9D9"
FILE = "#E5E5E5"
_LINES = {  # entry: colour, marker
    "secure": (OURS, "o"),
    "safetensors-owned-thp": (PLAIN, "s"),
    "cryptotensors": (ENCRYPTED, "^"),
}
_KINDS = (
    (OURS, "secure_loader, encrypted"),
    (ENCRYPTED, "other loaders, encrypted"),
    (PLAIN, "plain files"),
    (FLOOR, "floor"),
)
Document = dict[str, Any]


def _colour(entry: Document) -> str:
    if entry["ours"]:
        return OURS
    if entry["loader"] == "none":
        return FLOOR
    return ENCRYPTED if "encrypted" in entry["label"] else PLAIN


def _ran(case: Document) -> list[Document]:
    return [entry for entry in case["entries"].values() if entry["failure"] is None]


def _failed(case: Document) -> list[str]:
    return [entry["label"] for entry in case["entries"].values() if entry["failure"] is not None]


def _figure(width: float, height: float, **options: Any) -> tuple[Figure, Any]:
    from matplotlib import pyplot as plt

    return plt.subplots(figsize=(width, height), layout="constrained", **options)


def _bare(axes: Axes) -> None:
    """Only the lines that carry something."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0)


def _bars(axes: Axes, bars: list[tuple[str, float, str, bool]], form: str) -> None:
    """Horizontal bars with their figures: label, length, colour, and whether it is ours. The first one on top."""
    for place, (_, length, colour, _) in enumerate(bars):
        edge = "#777777" if colour == FLOOR else colour
        axes.barh(place, length, 0.72, color=colour, edgecolor=edge, hatch="////" if colour == FLOOR else "")
        axes.annotate(form.format(length), (length, place), (4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(bars)), [label for label, *_ in bars], fontsize=9.5)
    for label, (*_, ours) in zip(axes.get_yticklabels(), bars, strict=True):
        label.set_fontweight("bold" if ours else "normal")
    axes.invert_yaxis()
    axes.margins(x=0.14, y=0.02)
    axes.set_xlim(left=0)
    axes.spines["left"].set_visible(False)
    _bare(axes)


def _legend(figure: Figure, kinds: tuple[tuple[str, str], ...], used: set[str]) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor=colour, edgecolor="#777777" if colour == FLOOR else colour, hatch="////" * (colour == FLOOR))
        for colour, _ in kinds
        if colour in used
    ]
    names = [name for colour, name in kinds if colour in used]
    figure.legend(patches, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=9)


def load_chart(document: Document) -> Figure:
    """Time to have all tensors and to touch every byte, by loader, fastest first; a panel for each case."""
    cases = list(document["cases"].values())
    count = [len(_ran(case)) for case in cases]
    figure, panels = _figure(8, 1.5 + 0.3 * sum(count), nrows=len(cases), squeeze=False, height_ratios=count)
    used: set[str] = set()
    for axes, case in zip(panels[:, 0], cases, strict=True):
        entries = sorted(_ran(case), key=lambda entry: entry["median_seconds"]["touch"])
        used |= {_colour(entry) for entry in entries}
        bars = [(e["label"], e["median_seconds"]["touch"], _colour(e), e["ours"]) for e in entries]
        _bars(axes, bars, "{:.2f} s" if bars[-1][1] > 0.5 else "{:.3f} s")
        axes.set_title(case["title"], loc="left", fontsize=11, fontweight="bold")
        if failed := _failed(case):
            axes.set_title(f"does not run here: {', '.join(failed)}", loc="right", fontsize=8.5, color="#555555")
    panels[-1, 0].set_xlabel("seconds to load all tensors and read every byte of them (median)")
    _legend(figure, _KINDS, used)
    return figure


def memory_chart(document: Document) -> Figure:
    """Peak memory by loader: what the process needs for itself, and mapped pages of the file."""
    (case,) = document["cases"].values()
    entries = sorted(
        _ran(case), key=lambda e: (sum(e["memory"]["peak"].values()), e["memory"]["peak"]["anon"], not e["ours"])
    )
    size = entries[0]["parameters"]["bytes"]
    used = {FILE}
    figure, axes = _figure(8, 1.6 + 0.32 * len(entries))
    for place, entry in enumerate(entries):
        peak = entry["memory"]["peak"]
        own, mapped = (peak["anon"] + peak["shmem"]) / size, peak["file"] / size
        colour = PLAIN if _colour(entry) == FLOOR else _colour(entry)
        used.add(colour)
        axes.barh(place, own, 0.72, color=colour)
        axes.barh(place, mapped, 0.72, left=own, color=FILE)
        axes.annotate(
            f"{own + mapped:.2f}", (own + mapped, place), (4, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(entries)), [entry["label"] for entry in entries], fontsize=9.5)
    for label, entry in zip(axes.get_yticklabels(), entries, strict=True):
        label.set_fontweight("bold" if entry["ours"] else "normal")
    axes.invert_yaxis()
    axes.margins(x=0.1, y=0.02)
    axes.spines["left"].set_visible(False)
    _bare(axes)
    axes.set_title(f"{case['title']}: peak memory", loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("peak memory above the start, as a multiple of the tensors' size")
    kinds = (
        (OURS, "own memory: secure_loader"),
        (ENCRYPTED, "others, encrypted"),
        (PLAIN, "plain files"),
        (FILE, "mapped file pages"),
    )
    _legend(figure, kinds, used)
    return figure


_AXES = {
    "size": ("size of all tensors, GB", "log", 1),
    "tensors": ("number of tensors, 0.54 GB in all", "log", 1),
    "threads": ("threads, 1.2 GB", "linear", 1),
    "chunk": ("chunk size, KiB, 0.27 GB", "log", 1024),
    "share": ("share of bytes encrypted, %, 0.27 GB", "linear", 1),
}


def scaling_chart(document: Document) -> Figure:
    """One panel for each axis, in GB per second: what does not depend on the axis is flat."""
    axes_cases: dict[str, list[Document]] = {}
    for name, case in document["cases"].items():
        axes_cases.setdefault(name.partition(":")[0], []).append(case)
    figure, panels = _figure(9, 5.6, nrows=2, ncols=3)
    labels: dict[str, Any] = {}
    for panel, (axis, cases) in zip(panels.flat, axes_cases.items(), strict=False):
        title, scale, divisor = _AXES[axis]
        for name, (colour, marker) in _LINES.items():
            points = [
                (
                    e["parameters"]["x"] / divisor,
                    e["parameters"]["bytes"] / 1e9 / e["median_seconds"]["load"],
                    e["label"],
                )
                for case in cases
                if (e := case["entries"].get(name)) is not None and e["failure"] is None
            ]
            if points:
                xs, ys, names = zip(*points, strict=True)
                width = 2.2 if name == "secure" else 1.4
                (line,) = panel.plot(xs, ys, color=colour, marker=marker, linewidth=width, markersize=5)
                labels[names[0]] = line
        ticks = [next(iter(case["entries"].values()))["parameters"]["x"] / divisor for case in cases]
        panel.set_xscale(scale)
        panel.set_xticks(ticks, [f"{tick:,g}" if tick < 1000 else f"{tick:,.0f}" for tick in ticks], fontsize=8.5)
        panel.minorticks_off()
        panel.margins(x=0.08)
        panel.set_ylim(0, 1.12 * panel.dataLim.ymax)
        panel.set_xlabel(title, fontsize=9)
        panel.grid(axis="y", color="#E5E5E5", linewidth=0.8)
        panel.set_axisbelow(True)
        _bare(panel)
    for row in panels:
        row[0].set_ylabel("GB/s of tensors, owned")
    for panel in list(panels.flat)[len(axes_cases) :]:
        panel.set_axis_off()
    panels.flat[-1].legend(labels.values(), labels.keys(), loc="center", frameon=False, fontsize=9.5)
    return figure


def frameworks_chart(results: dict[str, Document]) -> Figure:
    """Transformers and vLLM: one panel for each of them and each model."""
    panels_wanted = [
        (f"{framework}: {case['title']}", case, phase)
        for suite, framework, phase in (("transformers", "Transformers", "forward"), ("vllm", "vLLM", "weights"))
        if suite in results
        for name, case in results[suite]["cases"].items()
        if name != "engine"
    ]
    count = [max(1, len(_ran(case))) for _, case, _ in panels_wanted]
    figure, panels = _figure(
        8, 0.3 + 0.45 * len(count) + 0.3 * sum(count), nrows=len(count), squeeze=False, height_ratios=count
    )
    what = {"forward": "load and first forward pass, seconds", "weights": "loading weights, seconds"}
    for axes, (title, case, phase) in zip(panels[:, 0], panels_wanted, strict=True):
        bars = [(e["label"], e["median_seconds"][phase], _colour(e), e["ours"]) for e in _ran(case)]
        _bars(axes, bars, "{:.2f} s" if max(bar[1] for bar in bars) > 0.5 else "{:.3f} s")
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
        axes.set_title(what[phase], loc="right", fontsize=9)
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
    return figure


_CHARTS: dict[str, tuple[str, Callable[[Document], Figure]]] = {
    "load": ("load", load_chart),
    "load-cold": ("cold", load_chart),
    "memory": ("memory", memory_chart),
    "scaling": ("scaling", scaling_chart),
}


def draw(results: dict[str, Document], folder: Path) -> list[Path]:
    """Draw what there are results for.

    Args:
        results: By suite, see :func:`schema.read`.
        folder: Where ``NAME.png`` are written.

    Returns:
        The files.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figures = {name: make(results[suite]) for name, (suite, make) in _CHARTS.items() if suite in results}
    if {"transformers", "vllm"} & results.keys():
        figures["frameworks"] = frameworks_chart(results)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in figures.items():
        path = folder / f"{name}.png"
        # No software version in the file: the same results give the same bytes.
        figure.savefig(path, dpi=130, metadata={"Software": None})
        plt.close(figure)
        written.append(path)
    of_gpu = gpu_chart.draw(results, folder)
    return written if of_gpu is None else [*written, of_gpu]


def main() -> int:
    """Draw the charts of the documentation."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.charts", description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--out", type=Path, default=IMAGES, metavar="DIR")
    arguments = parser.parse_args()
    for path in draw(schema.read(arguments.results), arguments.out):
        print(path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
