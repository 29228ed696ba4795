"""One row of a big tensor: what is not asked for is neither read nor decrypted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import data, peers
from benchmarks.data import StateDict
from benchmarks.loaders import ready
from benchmarks.model import OURS, Case, Entry, Goal, Quantity, Size, Suite
from secure_loader.bench.measure import Task, digest
from secure_loader.core.aead import CHUNK_SIZE

_NAME = "embedding.weight"


def _data(size: Size) -> StateDict:
    rows = 146_484 if size == "full" else 8_192  # 300 MB, 16 MB
    return StateDict(f"row-of-{rows}", ((_NAME, (rows, 1024)),))


def _entry(
    what: StateDict, name: str, label: str, variant: str, open_file: Callable[[Path], Any], module: str
) -> Entry:
    row = what.shapes[0][1][0] // 3

    def make() -> Task:
        path = data.path(what, variant)

        def prepare() -> None:
            # The first one in a process also makes scratch memory and whatever else is made once.
            ready()
            open_file(path).__enter__().get_slice(_NAME)[row // 2 : row // 2 + 1]

        def opened(_: Any) -> Any:
            return open_file(path).__enter__()

        def one_row(file: Any) -> tuple[Any, Any]:
            return file, file.get_slice(_NAME)[row : row + 1]

        def check(found: tuple[Any, Any]) -> dict[str, Any]:
            file, tensor = found
            before = _bytes_read()
            again = file.get_slice(_NAME)[2 * row : 2 * row + 1]  # another part of the tensor, nothing else of the file
            return {"digest": digest({"first": tensor, "second": again}), "bytes_read": _bytes_read() - before}

        return Task(
            name=name,
            prepare=prepare,
            phases={"open": opened, "row": one_row},
            check=check,
            files=(path,),
            memory=what.nbytes + (64 << 20),
        )

    return Entry(
        name=name,
        label=label,
        loader=name if name != "secure" else OURS,
        make=make,
        modules=("torch", module),
        data=((what, variant),),
        parameters={"bytes": what.nbytes, "chunk_size": CHUNK_SIZE},
    )


def _bytes_read() -> int:
    """By all read calls of this process so far; what is read through a mapping does not count."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    # Reading the counters counts as well, but only in the next reading of them.
    return int(counters["rchar"])


def _cases(size: Size) -> tuple[Case, ...]:
    what = _data(size)

    def open_plain(path: Path) -> Any:
        from safetensors import safe_open

        return safe_open(path, "pt")

    def open_secure(path: Path) -> Any:
        from secure_loader import safe_open

        archive = safe_open(path, "pt")
        archive.file.unlock()  # as cryptotensors, which asks for its keys when it opens
        return archive

    entries = (
        _entry(what, "secure", "secure_loader, encrypted", "secure", open_secure, "secure_loader.torch"),
        _entry(
            what,
            "cryptotensors",
            "cryptotensors, encrypted",
            "cryptotensors",
            peers.cryptotensors_open,
            "cryptotensors.torch",
        ),
        _entry(what, "safetensors", "safetensors, mapped", "plain", open_plain, "safetensors.torch"),
    )
    return (Case(name="row", title="One row of a tensor of 300 MB", entries=entries, reference="safetensors"),)


SUITE = Suite(
    name="slice",
    title="One row by get_slice",
    cases=_cases,
    goals=(
        Goal(
            what="one row of a 300 MB tensor by `get_slice`",
            against="cryptotensors",
            measured=Quantity("row", "secure", "phase.row"),
            reference=Quantity("row", "cryptotensors", "phase.row"),
            compare="speedup",
            bound=100.0,
        ),
        Goal(
            what="the same, with opening and verifying the file",
            against="cryptotensors",
            measured=Quantity("row", "secure", "seconds.row"),
            reference=Quantity("row", "cryptotensors", "seconds.row"),
            compare="speedup",
            bound=None,
        ),
        Goal(
            what="chunks read and decrypted for one row",
            against="bytes that read calls returned, in chunks",
            measured=Quantity("row", "secure", "check.bytes_read", scale=1 / CHUNK_SIZE),
            compare="value",
            bound=2.0,
            unit=" chunks",
        ),
    ),
)
