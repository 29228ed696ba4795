"""Measures a few tasks and prints the results: ``python -m tests.integration.bench.measuring``.

A process of its own: measuring forks, and a process that has run other tests has threads.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

from secure_loader.bench import machine, measure
from secure_loader.bench.measure import Task

SIZE = 32 << 20


def _refuse(_):
    raise ValueError(f"cannot read {Path.home() / 'model'}")


def tasks(file: Path) -> list[Task]:
    """One that works, and every way not to."""
    return [
        Task(
            name="works",
            prepare=lambda: bytes(2 * SIZE),  # what prepare needs is not the task's
            phases={"first": lambda data: bytearray(data[:SIZE]), "second": lambda data: (data, file.read_bytes())},
            check=lambda got: [len(got[0]), len(got[1])],
            files=(file,),
            memory=SIZE,
        ),
        Task(name="raises", phases={"first": _refuse}),
        Task(name="killed", phases={"first": lambda _: os.kill(os.getpid(), 9)}),
        Task(name="exits", phases={"first": lambda _: (print("last words"), sys.stdout.flush(), os._exit(3))}),
        Task(name="hangs", phases={"first": lambda _: time.sleep(60)}, timeout=0.5),
        Task(name="no file", phases={"first": lambda _: None}, files=(file.with_name("missing"),)),
    ]


def _threaded(task: Task) -> str:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        measure.sample(task)
    except RuntimeError as e:
        return str(e)
    finally:
        done.set()
        thread.join()
    return "forked"


def main() -> None:
    """Print JSON."""
    file = Path(sys.argv[1])
    missing = measure.import_quietly(["json", "no_such_module"])
    lines: list[str] = []
    results = measure.compare(tasks(file), repetitions=2, progress=lines.append)
    evicted = machine.evict([file])
    cold = machine.resident(file)
    machine.warm([file])
    print(
        json.dumps(
            {
                "results": {name: result.document() for name, result in results.items()},
                "lines": lines,
                "missing": missing,
                "evicted": evicted,
                "resident": [cold, machine.resident(file)],
                "threaded": _threaded(tasks(file)[0]),
                "facts": machine.facts(file.parent),
                "scrubbed": machine.scrub(f"{file.parent}/x", file.parent),
            }
        )
    )


if __name__ == "__main__":
    main()
