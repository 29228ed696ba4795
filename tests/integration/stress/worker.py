"""Loads under stress, in a process of their own: its report is one JSON object.

python -W error -m tests.integration.stress.worker FOLDER SEED LOADS [FAULT ...]
"""

from __future__ import annotations

import collections
import faulthandler
import json
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from secure_loader import safe_open
from secure_loader.core import pipeline
from secure_loader.core.pool import set_threads, threads
from tests.attacks.kit import CHUNK
from tests.integration.stress.faults import FAULTS, USUAL, Fault, Scene
from tests.integration.stress.leaks import Leaks, place
from tests.integration.stress.models import KEYS, TRUST, Shard, build, same
from tests.integration.stress.saboteur import Saboteur
from tests.integration.stress.ways import PAGE_CACHE, WAYS, Load

# Seconds after which a load hangs.
_HANGS = 60
_MAX_PROBLEMS = 20
# Loads after which allocators and pools have settled.
_WARM = 0.3


class WrongBytesError(Exception):
    """The one thing that must never happen."""


def attempt(way: str, load: Load, consume: Callable[[int], None]) -> None:
    """One load, every byte of which is compared before the next ones are asked for."""
    for n, (name, index, got) in enumerate(WAYS[way](load)):
        compare(load.shard, name, index, got)
        consume(n)


def compare(shard: Shard, name: str, index: Any, got: Any) -> None:
    """Raise unless a thing is what it should be."""
    expected = shard.arrays[name]
    good = bytes(got) == expected.tobytes() if index is bytes else same(got, expected[index])
    if not good:
        raise WrongBytesError(f"{name}[{index}]")


def clean_load(shard: Shard) -> None:
    """A load that nothing befalls."""
    with safe_open(shard.path, "numpy", keys=KEYS, trust=TRUST, strict=True) as f:
        for name, got in f.get_tensors().items():
            compare(shard, name, ..., got)


class Worker:
    """Draws loads and faults, and keeps the books."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.folder = folder
        self.shards = build(folder)
        os.sync()
        self.leaks = Leaks()
        self.saboteur = Saboteur()
        self.problems: list[str] = []
        self.faults: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.ways: collections.Counter[str] = collections.Counter()
        self.durations: dict[str, list[float]] = collections.defaultdict(list)
        self.unraisable: list[tuple[str, BaseException | None]] = []

    def warm_up(self) -> None:
        """Import, allocate and start all that stays."""
        for page_cache in PAGE_CACHE:
            for framework in ("pt", "numpy"):
                for n, way in enumerate(WAYS):
                    shard = self.shards[n % len(self.shards)]
                    self._time(way, self._load(shard, shard.path, framework, page_cache))
        pipeline.JOB_BYTES = CHUNK
        pipeline.run_jobs(lambda item: time.sleep(0.01), range(64), waiting=True)
        self.leaks.begin()

    def _load(self, shard: Shard, path: Path, framework: str, page_cache: str) -> Load:
        return Load(shard, path, self.rng, framework, page_cache, data=shard.path.read_bytes())

    def _time(self, way: str, load: Load) -> None:
        begun = time.perf_counter()
        attempt(way, load, lambda n: None)
        self.durations[way].append(time.perf_counter() - begun)

    def run(self, name: str) -> None:
        """One load with a fault."""
        rng, fault = self.rng, FAULTS[name]
        shard, way = rng.choice(self.shards), rng.choice(fault.ways)
        if fault.damages and shard.mixed and way == "load_file":
            way = "all_at_once"  # it takes no settings, and would map what is in clear
        pipeline.JOB_BYTES = rng.choice((CHUNK, 4 * CHUNK, 2 << 20))
        if rng.random() < 0.25:
            set_threads(rng.randint(1, 4))
        path = shard.copy(self.folder / "damaged") if fault.damages else shard.path
        load = self._load(shard, path, rng.choice(("pt", "numpy")), rng.choice(PAGE_CACHE))
        load.untrusted = fault.damages
        if rng.random() < 0.3:
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        duration = statistics.median(self.durations[way])
        scene = Scene(rng, load, way, self.shards, self.folder, self.saboteur, duration)
        with fault.stage(scene):
            scene.begun = time.monotonic()
            try:
                attempt(way, load, scene.consume)
            except BaseException as e:  # noqa: BLE001 - looked at below
                scene.error = e
            scene.ended = time.monotonic()
        self._judge(name, fault, scene)

    def _judge(self, name: str, fault: Fault, scene: Scene) -> None:
        error, load = scene.error, scene.load
        problems = list(scene.problems)
        if error is not None and not isinstance(error, fault.allowed):
            problems.append(f"raised {error!r} (at {place(error)})")
        if scene.fired and error is None and scene.way in fault.certain:
            problems.append("raised nothing")
        scene.error = None
        kind = "none" if error is None else type(error).__name__
        if error is not None:
            # The frames hold whatever the load had in its hands.
            error.__traceback__ = error.__context__ = error.__cause__ = None
        del error
        clean_load(load.shard)
        problems += self.leaks.problems()
        # Between `open` and the block that closes a file there is room for a signal: its object closes it, with a warning.
        spared = ResourceWarning if kind in ("KeyboardInterrupt", "Terminated") else ()
        problems += [f"in {what}: {e!r}" for what, e in self.unraisable if not isinstance(e, spared)]
        self.unraisable.clear()
        self.ways[scene.way] += 1
        self.faults[name].update(("runs", kind, *(["fired"] if scene.fired else [])))
        drawn = (
            f"{name}, {scene.way} of {load.shard.path.name}, {load.framework}, {load.page_cache}, {threads()} threads"
        )
        self.problems += [f"load {self.ways.total()} ({drawn}, jobs of {pipeline.JOB_BYTES}): {p}" for p in problems]

    def hook(self, unraisable: Any) -> None:
        """Destructors that fail are problems as well."""
        self.unraisable.append((repr(unraisable.object), unraisable.exc_value))

    def report(self) -> dict[str, Any]:
        """What was seen."""
        return {
            "loads": self.ways.total(),
            "faults": self.faults,
            "ways": self.ways,
            "failed_reads_looked_at": self.leaks.destinations.checked,
            "growth": self.leaks.growth(),
            "problems": self.problems,
        }


def main(folder: str, seed: str, loads: str, *faults: str) -> None:
    """Run the loads, each kind of fault as often as any other."""
    # Threads of the pool are there when a test forks; that the child is safe from them is what is tested.
    warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
    torch.set_num_threads(1)
    os.environ["SECURE_LOADER_HOME"] = str(Path(folder) / "home")
    worker = Worker(Path(tempfile.mkdtemp(dir=folder)), int(seed))
    sys.unraisablehook = worker.hook
    worker.warm_up()
    deck: list[str] = []
    for n in range(int(loads)):
        if not deck:
            deck = list(faults or USUAL)
            worker.rng.shuffle(deck)
        faulthandler.dump_traceback_later(_HANGS, exit=True)
        worker.run(deck.pop())
        if n == int(_WARM * int(loads)):
            worker.leaks.begin_growth()
        if len(worker.problems) >= _MAX_PROBLEMS:
            break
    faulthandler.cancel_dump_traceback_later()
    worker.saboteur.close()
    print(json.dumps(worker.report()))


if __name__ == "__main__":
    main(*sys.argv[1:])
