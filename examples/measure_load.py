"""Measure one load through Transformers in this process, and print it as JSON.

    python examples/measure_load.py FOLDER [LOADER]

seconds: from_pretrained and one forward pass over one token, without the imports. The pass is there because a plain
safetensors load only maps the file: its bytes are read when they are first used.
peak: the largest resident set of the process so far (VmHWM), which counts mapped file pages; base: before the load.
"""

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def peak_bytes() -> int:
    """VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def main(folder: str, *loader: str) -> None:
    """Load, run one token, report."""
    options = {"loader": loader[0]} if loader else {}
    base = peak_bytes()
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    loaded = time.perf_counter()
    with torch.inference_mode():
        model(input_ids=torch.tensor([[1]]))
    used = time.perf_counter()
    print(json.dumps({"load": loaded - start, "seconds": used - start, "base": base, "peak": peak_bytes()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
