"""The chart of ``make gpu``: how fast the same weights come onto the GPU, by loader, and what the bus and the kernels give."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import cache
from benchmarks.gpu.rounds import rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGES = cache.ROOT / "docs" / "images"
_OURS, _ENCRYPTED, _PLAIN, _FLOOR = "#0072B2", "#D55E00", "#8C8C8C", "#D9D9D9"  # as in benchmarks.charts
_KERNELS = ("open", "ctr", "triton")
Bar = tuple[str, float, str]


def draw(results: dict[str, Any], folder: Path) -> Path | None:
    """Draw ``gpu.png``.

    Args:
        results: By suite.
        folder: Where it goes.

    Returns:
        The file; None where nothing was measured that could be drawn.

    Raises:
        ImportError: matplotlib is not there.
    """
    panels = _panels(results)
    if not panels:
        return None
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure = _figure(panels, _device(results))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "gpu.png"
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
    return path


def _panels(results: dict[str, Any]) -> list[tuple[str, list[Bar]]]:
    """Titles, and bars in GB/s, the fastest first."""
    panels = []
    loads = results.get("gpu-load", {}).get("cases", {})
    bare = results.get("gpu-pipeline", {}).get("cases", {})
    for name, case in loads.items():
        if name == "memory":
            continue
        bars = [(e["label"], r, _colour(e)) for e in case["entries"].values() if (r := rate(e)) is not None]
        floor = bare.get(name, {}).get("entries", {}).get("bare")
        if floor is not None and (r := rate(floor)) is not None:
            bars.append(("bare copy from pinned memory", r, _FLOOR))
        if bars:
            panels.append((case["title"], sorted(bars, key=lambda bar: -bar[1])))
    kernels = results.get("gpu-kernels", {}).get("cases", {}).get("aes256")
    if kernels is not None:
        entries = [kernels["entries"][name] for name in _KERNELS if name in kernels["entries"]]
        bars = [(e["label"], r, _OURS) for e in entries if (r := rate(e)) is not None]
        if bars:
            panels.append((kernels["title"], sorted(bars, key=lambda bar: -bar[1])))
    return panels


def _colour(entry: dict[str, Any]) -> str:
    if entry["ours"]:
        return _OURS
    return _ENCRYPTED if "encrypted" in entry["label"] else _PLAIN


def _device(results: dict[str, Any]) -> str:
    gpu = next(document["gpu"] for name, document in results.items() if name.startswith("gpu-"))
    return str(gpu.get("name", "host memory in place of a GPU"))


def _figure(panels: list[tuple[str, list[Bar]]], device: str) -> Figure:
    from matplotlib import pyplot as plt

    count = [len(bars) for _, bars in panels]
    figure, axes = plt.subplots(
        nrows=len(panels),
        squeeze=False,
        height_ratios=count,
        figsize=(8, 0.8 + 0.5 * len(panels) + 0.3 * sum(count)),
        layout="constrained",
    )
    for panel, (title, bars) in zip(axes[:, 0], panels, strict=True):
        _bars(panel, bars)
        panel.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
    axes[-1, 0].set_xlabel(f"GB/s on {device} (median)")
    return figure


def _bars(panel: Axes, bars: list[Bar]) -> None:
    for place, (_, length, colour) in enumerate(bars):
        hatch, edge = ("////", "#777777") if colour == _FLOOR else ("", colour)
        panel.barh(place, length, 0.72, color=colour, edgecolor=edge, hatch=hatch)
        panel.annotate(f"{length:.1f}", (length, place), (4, 0), textcoords="offset points", va="center", fontsize=9)
    panel.set_yticks(range(len(bars)), [label for label, *_ in bars], fontsize=9.5)
    for label, (*_, colour) in zip(panel.get_yticklabels(), bars, strict=True):
        label.set_fontweight("bold" if colour == _OURS else "normal")
    panel.invert_yaxis()
    panel.margins(x=0.12, y=0.02)
    panel.set_xlim(left=0)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(length=0)
