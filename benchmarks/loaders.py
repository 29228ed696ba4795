"""Every way of getting all tensors of a file, as entries of a case."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import data, peers
from benchmarks.data import StateDict
from benchmarks.model import OURS, Entry
from secure_loader.bench.measure import Task, digest, touch


@dataclass(frozen=True)
class Loader:
    """A way of loading.

    Attributes:
        label: What readers see.
        package: What does the work.
        variant: What it reads.
        load: Path to tensors.
        modules: What it imports.
        environment: What must be set before that.
        mapped: Whether it returns without having read anything.
    """

    label: str
    package: str
    variant: str
    load: Callable[[Path], peers.Tensors]
    modules: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    mapped: bool = False


_ST = ("torch", "safetensors.torch")
_TENSORIZER = ("torch", "benchmarks.sodium", "tensorizer")
_THP = {"THP_MEM_ALLOC_ENABLE": "1"}

LOADERS = {
    "secure": Loader("secure_loader, encrypted", OURS, "secure", peers.secure, (*_ST, "secure_loader.torch")),
    "secure-bypass": Loader(
        "secure_loader, O_DIRECT",
        OURS,
        "secure",
        peers.secure,
        (*_ST, "secure_loader.torch"),
        {"SECURE_LOADER_PAGE_CACHE": "bypass"},
    ),
    "floor": Loader("floor: plain pread, 2 threads", "none", "plain", peers.plain_pread(2, 4 << 20), _ST),
    "floor-cold": Loader("floor: plain pread, 16 in flight", "none", "plain", peers.plain_pread(16, 1 << 20), _ST),
    "safetensors-owned-thp": Loader(
        "safetensors, clone, huge pages", "safetensors", "plain", peers.safetensors_owned, _ST, _THP
    ),
    "safetensors-owned": Loader("safetensors, clone", "safetensors", "plain", peers.safetensors_owned, _ST),
    "safetensors-pread": Loader('safetensors, backend="pread"', "safetensors", "plain", peers.safetensors_pread, _ST),
    "safetensors-mapped": Loader(
        "safetensors, mapped", "safetensors", "plain", peers.safetensors_mapped, _ST, mapped=True
    ),
    "cryptotensors": Loader(
        "cryptotensors, encrypted",
        "cryptotensors",
        "cryptotensors",
        peers.cryptotensors_encrypted,
        ("torch", "cryptotensors.torch"),
    ),
    "tensorizer-encrypted": Loader(
        "tensorizer, encrypted",
        "tensorizer",
        "tensorizer-encrypted",
        peers.tensorizer_load(encrypted=True),
        _TENSORIZER,
    ),
    "tensorizer": Loader(
        "tensorizer, plain", "tensorizer", "tensorizer", peers.tensorizer_load(encrypted=False), _TENSORIZER
    ),
    "runai": Loader(
        "runai-model-streamer", "runai-model-streamer", "plain", peers.runai_load, (*_ST, "runai_model_streamer")
    ),
    "fastsafetensors": Loader(
        "fastsafetensors", "fastsafetensors", "plain", peers.fastsafetensors_load, (*_ST, "fastsafetensors")
    ),
    "fastsafetensors-buffered": Loader(
        "fastsafetensors, buffered",
        "fastsafetensors",
        "plain",
        peers.fastsafetensors_load,
        (*_ST, "fastsafetensors"),
        {"FASTSAFETENSORS_ODIRECT": "0"},
    ),
    "instanttensor": Loader(
        "instanttensor", "instanttensor", "plain", peers.instanttensor_load, (*_ST, "instanttensor")
    ),
    "secure-clear": Loader(
        "secure_loader, plain file", OURS, "plain", peers.secure, (*_ST, "secure_loader.torch"), mapped=True
    ),
}


def ready(threads: int | None = None) -> None:
    """Before the clock starts: torch's threads run, as many as there are processors."""
    import torch

    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    torch.ones(1 << 18).sum()


def entry(
    what: StateDict,
    name: str,
    *,
    variant: str | None = None,
    threads: int | None = None,
    environment: Mapping[str, str] | None = None,
    called: str | None = None,
    **parameters: Any,
) -> Entry:
    """One loader over one data set, as an entry.

    Args:
        what: What it loads.
        name: Of the loader.
        variant: Another one than it usually reads.
        threads: Of torch; None takes all processors.
        environment: Added to the loader's.
        called: Name of the entry where it is not the loader's.
        **parameters: Of the entry.
    """
    loader = LOADERS[name]
    reads = variant or loader.variant

    def make() -> Task:
        path = data.path(what, reads)
        return Task(
            name=called or name,
            prepare=lambda: ready(threads),
            phases={"load": lambda _: loader.load(path), "touch": touch},
            check=digest,
            files=(path,),
            memory=int(what.nbytes * 1.05) + (64 << 20),
        )

    return Entry(
        name=called or name,
        label=loader.label,
        loader=loader.package,
        make=make,
        modules=loader.modules,
        environment=dict(loader.environment) | dict(environment or {}),
        data=((what, reads),),
        parameters={"bytes": what.nbytes, "tensors": len(what.shapes), "mapped": loader.mapped, **parameters},
    )


def entries(what: StateDict, names: Iterable[str]) -> tuple[Entry, ...]:
    """Several loaders over one data set."""
    return tuple(entry(what, name) for name in names)
