"""How much is measured: in earnest, and in the tests, where only that everything runs counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.data import QWEN3_06B, QWEN3_4B_PART, TINY, TINY_BIG, StateDict, qwen3

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
QWEN3_4B = qwen3("qwen3-4b", hidden=2560, intermediate=9728, layers=36, query=4096, key=1024)


@dataclass(frozen=True)
class Sizes:
    """Sizes in bytes.

    Attributes:
        repetitions: Rounds of everything that is timed.
        spin: Seconds that the device is kept busy before kernels and copies are timed.
        proofs: How much the tests decrypt.
        sanitized: The same, for compute-sanitizer.
        copies: Of one copy each.
        copied: In all, for each of these.
        kernel: What kernels work on.
        piece: A launch of the small kind, and a slot of the pipeline.
        chunk: Of the file format.
        grids: Thread blocks that a launch is limited to.
        pinned: What the pipeline without a file works on.
        loads: State dicts that are loaded, the smallest first.
    """

    repetitions: int
    spin: float
    proofs: Sequence[int]
    sanitized: int
    copies: Sequence[int]
    copied: int
    kernel: int
    piece: int
    chunk: int
    grids: Sequence[int]
    pinned: int
    loads: Sequence[StateDict]


FULL = Sizes(
    repetitions=7,
    spin=0.3,
    proofs=(8 * MIB, GIB),
    sanitized=8 * MIB,
    copies=tuple(64 * KIB << 2 * n for n in range(7)),  # 64 KiB ... 256 MiB
    copied=256 * MIB,
    kernel=GIB,
    piece=32 * MIB,
    chunk=2 * MIB,
    grids=(24, 32, 48, 64, 132),
    pinned=GIB,
    loads=(QWEN3_06B, QWEN3_4B_PART, QWEN3_4B),
)
TINY_SIZES = Sizes(
    repetitions=1,
    spin=0.0,
    proofs=(192 * KIB,),
    sanitized=64 * KIB,
    copies=(4 * KIB, 64 * KIB),
    copied=128 * KIB,
    kernel=256 * KIB,
    piece=128 * KIB,
    chunk=64 * KIB,
    grids=(1, 2),
    pinned=256 * KIB,
    loads=(TINY, TINY_BIG),
)
SIZES = {"full": FULL, "tiny": TINY_SIZES}
