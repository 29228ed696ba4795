"""The files that are loaded under stress, and what must come out of them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.attacks.kit import CHUNK, KEY, build_file, tensor_offset, trust

# In all that is encrypted, and nowhere else: whatever the alignment, a word of it is this one.
MARKER = np.uint64(int.from_bytes(b"\xc7" * 8, "little"))
KEYS, TRUST = KEY, trust()


def _array(rng: np.random.Generator, dtype: str, shape: tuple[int, ...], *, marked: bool = True) -> np.ndarray:
    data = np.frombuffer(rng.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), np.uint8).copy()
    data[data == 0xC7] = 0
    if marked:
        for at in range(0, len(data), 512):
            data[at : at + 64] = 0xC7
    return data.view(dtype).reshape(shape)


def _shards(rng: np.random.Generator) -> list[tuple[dict[str, np.ndarray], tuple[str, ...]]]:
    return [
        # Large ones: of many chunks, none of which a row of the table fills.
        ({"table": _array(rng, "i4", (600, 700)), "wide": _array(rng, "i2", (20, 40_000))}, ()),
        # Many small ones, odd sizes between them.
        ({f"layer.{i}": _array(rng, "u1", (i + 1, 5077)) for i in range(24)}, ()),
        # Some in clear, large and small.
        (
            {
                "sealed": _array(rng, "i8", (90, 1024)),
                "clear": _array(rng, "i4", (300, 512), marked=False),
                "bias": _array(rng, "i4", (300,), marked=False),
                "last": _array(rng, "i4", (257, 513)),
            },
            ("clear", "bias"),
        ),
    ]


@dataclass(frozen=True)
class Shard:
    """A genuine file.

    Attributes:
        path: Never changed; faults get copies.
        arrays: What is in it.
        mixed: Whether some of it is in clear.
        last: File offset behind the last byte of the last encrypted tensor.
        first: File offset of the first encrypted byte.
    """

    path: Path
    arrays: dict[str, np.ndarray]
    mixed: bool
    first: int
    last: int

    def copy(self, path: Path) -> Path:
        """A file of the same bytes, to be damaged."""
        return Path(shutil.copyfile(self.path, path))


def build(folder: Path, seed: int = 7) -> list[Shard]:
    """Three shards of about 3 MB in all, in chunks of 64 KiB."""
    shards = []
    for n, (arrays, clear) in enumerate(_shards(np.random.default_rng(seed)), 1):
        path = folder / f"model-{n:05}-of-00003.safetensors"
        build_file(path, arrays, clear=clear, chunk_size=CHUNK)
        sealed = [name for name in arrays if name not in clear]
        last = sealed[-1]
        end = tensor_offset(path, last) + arrays[last].nbytes
        shards.append(Shard(path, arrays, bool(clear), tensor_offset(path, sealed[0]), end))
    return shards


def same(got: Any, expected: np.ndarray) -> bool:
    """Whether a tensor or an array is exactly the expected one."""
    found = got.numpy() if hasattr(got, "numpy") else got  # an int as an index gives one of numpy's scalars
    return found.dtype == expected.dtype and found.shape == expected.shape and bool((found == expected).all())
