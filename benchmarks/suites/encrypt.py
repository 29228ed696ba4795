"""Encrypting a model folder, against copying it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from benchmarks import cache, data, peers
from benchmarks.data import QWEN3_MODEL, TINY_MODEL, Model
from benchmarks.loaders import ready
from benchmarks.model import OURS, Case, Entry, Goal, Quantity, Size, Suite
from benchmarks.suites.save import flush
from secure_loader.bench.measure import Task, digest


def _encrypt(source: Path, target: Path) -> None:
    from secure_loader import encrypt_model

    encrypt_model(source, target, progress=False)


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    for file in target.iterdir():
        flush(file)


def _read_back(target: Path, *, encrypted: bool) -> str:
    files = sorted(target.glob("*.safetensors"))
    if not encrypted:
        return digest(peers.load_plain(files))
    return digest({name: tensor for file in files for name, tensor in peers.secure(file).items()})


def _entry(what: Model, name: str, label: str, loader: str, modules: tuple[str, ...]) -> Entry:
    encrypted = loader == OURS

    def make() -> Task:
        source, target = data.path(what, "plain"), cache.folder() / f"folder-{name}"

        def prepare() -> None:
            ready()
            shutil.rmtree(target, ignore_errors=True)
            os.sync()

        def write(_: Any) -> None:
            (_encrypt if encrypted else _copy)(source, target)
            data.sync_folder(target)
            data.sync_folder(target.parent)

        def check(_: Any) -> str:
            try:
                return _read_back(target, encrypted=encrypted)
            finally:
                shutil.rmtree(target)

        return Task(
            name=name,
            prepare=prepare,
            phases={"write": write},
            check=check,
            files=data.weight_files(what, "plain"),
            memory=what.nbytes + (64 << 20),
        )

    return Entry(
        name=name,
        label=label,
        loader=loader,
        make=make,
        modules=modules,
        data=((what, "plain"),),
        parameters={"bytes": what.nbytes},
    )


def _cases(size: Size) -> tuple[Case, ...]:
    what = QWEN3_MODEL if size == "full" else TINY_MODEL
    modules = ("torch", "safetensors.torch", "secure_loader.torch", "secure_loader.core.writer")
    entries = (
        _entry(what, "secure", "secure_loader encrypt", OURS, modules),
        _entry(what, "copy", "copy of the folder", "none", modules),
    )
    return (Case(name="folder", title="Model folder of 1.5 GB, fsync", entries=entries, expected=what, watch=True),)


SUITE = Suite(
    name="encrypt",
    title="Encrypting a model folder",
    cases=_cases,
    goals=(
        Goal(
            what="encrypt a folder",
            against="plain copy of the folder, same fsync",
            measured=Quantity("folder", "secure", "seconds.write"),
            reference=Quantity("folder", "copy", "seconds.write"),
            bound=1.3,
        ),
    ),
)
