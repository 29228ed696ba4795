"""``make gpu``: facts, then all stages, then results, tables and a chart.

Exit code 0: everything ran, and nothing of ours failed, whatever the figures; 1: something failed; 2: there is no GPU here,
or something is missing.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import environment
from benchmarks.gpu.environment import NotReadyError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for."""
    options = _parser().parse_args(arguments)
    # Asked to stop, leave by way of the exceptions that end stages and delete files.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda signum, _: sys.exit(128 + signum))
    wheels: list[str] = []
    try:
        if options.bench == "cuda":
            environment.gpus()
            wheels = environment.complete(options.wheels)
            environment.torch_sees_gpu()
        # What it imports is there from here on.
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(environment.ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        sys.path.insert(0, str(environment.ROOT / "src"))
        from benchmarks.gpu.command import run

        return run(options, wheels)
    except NotReadyError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Measure the device path on a GPU.")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="some of the stages")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="where missing packages are taken from")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where results go (default: benchmarks/results)")
    parser.add_argument("--seconds", type=float, help="for everything (default: a little under ten minutes)")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="for the files that are loaded: its disk is measured"
    )
    # For the tests: what takes the GPU's place.
    parser.add_argument("--bench", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--size", choices=("tiny", "full"), default="full", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
