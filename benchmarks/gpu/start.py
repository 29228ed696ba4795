"""A fresh process that loads one file a few times: ``python -m benchmarks.gpu.start VARIANT PATH BENCH``; JSON on its last line.

The device's context is made before the first load: every loader pays for it, ours no more than others.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

_LATER = 4


def main() -> None:
    """Print what each step took, in seconds, and the digest of what was loaded."""
    variant, path, bench_name = sys.argv[1:]
    start = time.perf_counter()
    import torch  # noqa: F401 - what it takes is measured

    imported = time.perf_counter() - start
    from benchmarks.gpu.child import make_bench
    from benchmarks.gpu.device import wall_seconds
    from benchmarks.gpu.loader import LOADERS

    start = time.perf_counter()
    bench = make_bench(bench_name)
    bench.wait()
    context = time.perf_counter() - start
    loader = LOADERS[variant]
    seconds = []
    tensors: dict[str, Any] = {}
    for _ in range(1 + _LATER):
        tensors.clear()
        taken, tensors = wall_seconds(bench, lambda: loader.load(path, bench.torch_device))
        seconds.append(taken)
    from secure_loader.bench.measure import digest

    print(json.dumps({"import": imported, "context": context, "seconds": seconds, "digest": digest(tensors)}))


if __name__ == "__main__":
    main()
