"""One stage, in a process of its own: ``python -m benchmarks.gpu.child STAGE`` with its options as JSON on standard input.

What it finds goes back line by line as JSON, so that what was measured before a crash is kept.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu.device import Bench
from benchmarks.gpu.sizes import SIZES
from benchmarks.gpu.stage import Context, SkippedError


def make_bench(name: str) -> Bench:
    """The device by its name: ``cuda``, or ``module:function`` for what the tests put in its place."""
    if name == "cuda":
        from benchmarks.gpu.device import CudaBench

        return CudaBench()
    module, _, function = name.partition(":")
    bench: Bench = getattr(importlib.import_module(module), function)()
    return bench


def make_context(options: dict[str, Any], answers: IO[str]) -> Context:
    """What a stage works with, from what the command sent."""

    def say(**what: Any) -> None:
        print(json.dumps(what), file=answers, flush=True)

    memory = options["memory_folder"]
    return Context(
        make_bench=lambda: make_bench(options["bench"]),
        bench_name=options["bench"],
        sizes=SIZES[options["size"]],
        folder=Path(options["folder"]),
        memory_folder=None if memory is None else Path(memory),
        deadline=time.monotonic() + options["seconds"],
        tell=lambda text: say(tell=text),
        emit=lambda name, document: say(case=name, document=document),
    )


def main() -> int:
    """Run the stage; 0 if it did what it should."""
    from benchmarks.gpu.stages import find

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not get among the answers
    options = json.load(sys.stdin)
    context = make_context(options, answers)
    try:
        find(sys.argv[1]).run(context)
    except SkippedError as e:
        print(json.dumps({"skipped": str(e)}), file=answers)
        return 0
    except Exception as e:  # noqa: BLE001 - whatever it is, it is the stage's result
        traceback.print_exc()
        print(json.dumps({"failure": f"{type(e).__name__}: {e}"}), file=answers)
        return 1
    print(json.dumps({"done": True}), file=answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
