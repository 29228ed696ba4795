"""Opening a file with many tensors: reading its header and, ours, verifying the signature above every key and tag."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import data, peers
from benchmarks.data import StateDict, uniform
from benchmarks.loaders import ready
from benchmarks.model import OURS, Case, Entry, Goal, Quantity, Size, Suite
from secure_loader.bench.measure import Task

TENSORS = 707


def _entry(
    what: StateDict,
    name: str,
    label: str,
    loader: str,
    variant: str,
    open_file: Callable[[Path], Any],
    module: str,
    *,
    first: bool,
) -> Entry:
    def make() -> Task:
        path = data.path(what, variant)

        def prepare() -> None:
            ready()
            with path.open("rb") as file:
                file.read(8 << 20)  # the header is in the page cache
            if not first:
                open_file(path).__enter__()

        def check(file: Any) -> dict[str, Any]:
            names = sorted(file.keys())
            return {"digest": hashlib.sha256("\0".join(names).encode()).hexdigest()[:16], "tensors": len(names)}

        return Task(
            name=name,
            prepare=prepare,
            phases={"open": lambda _: open_file(path).__enter__()},
            check=check,
        )

    return Entry(
        name=name,
        label=label,
        loader=loader,
        make=make,
        modules=("torch", "safetensors.torch", module),
        data=((what, variant),),
        parameters={"bytes": what.nbytes, "tensors": TENSORS},
    )


def _cases(size: Size) -> tuple[Case, ...]:
    what = uniform("tensors-707", 707 << 19 if size == "full" else 707 << 12, TENSORS)

    def open_plain(path: Path) -> Any:
        from safetensors import safe_open

        return safe_open(path, "pt")

    def open_secure(path: Path) -> Any:
        from secure_loader import safe_open

        return safe_open(path, "pt")

    crypto = peers.cryptotensors_open
    kinds = (
        ("secure", "secure_loader, encrypted", OURS, "secure", open_secure, "secure_loader.torch"),
        ("safetensors", "safetensors, plain", "safetensors", "plain", open_plain, "safetensors.torch"),
        ("cryptotensors", "cryptotensors, encrypted", "cryptotensors", "cryptotensors", crypto, "cryptotensors.torch"),
    )
    titles = {"707": "707 tensors", "first": "707 tensors, the first file of a process"}
    return tuple(
        Case(
            name=name,
            title=title,
            entries=tuple(_entry(what, *kind, first=name == "first") for kind in kinds),
            reference="safetensors",
        )
        for name, title in titles.items()
    )


def _goal(case: str, what: str, bound: float | None) -> Goal:
    return Goal(
        what=what,
        against="safetensors open",
        measured=Quantity(case, "secure", "seconds.open", scale=1e3),
        reference=Quantity(case, "safetensors", "seconds.open", scale=1e3),
        compare="difference",
        bound=bound,
        unit=" ms",
    )


SUITE = Suite(
    name="header",
    title="Opening and verifying a file",
    cases=_cases,
    goals=(
        _goal("707", "header: open, verify, 707 encrypted tensors", 10.0),
        _goal("first", "the same, the first file of a process", None),
    ),
)
