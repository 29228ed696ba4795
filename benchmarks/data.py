"""Files and folders that are loaded: random weights in the shapes of real models, in every loader's format.

Each is made once, in a process of its own (writing starts threads, and a process with threads cannot be forked).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

from benchmarks import cache

RECIPE = 1  # raise it when what is written changes: older files are then not taken for new ones
Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class StateDict:
    """A file of random bfloat16 tensors.

    Attributes:
        name: Of the file.
        shapes: By tensor name, in file order.
    """

    name: str
    shapes: Shapes

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(2 * prod(shape) for _, shape in self.shapes)


@dataclass(frozen=True)
class Model:
    """A model folder.

    Attributes:
        name: Of the folder.
        kind: ``smollm2`` is the real one, ``qwen3`` has Qwen3-0.6B's shape with random weights, ``tiny`` is for tests,
            ``shards-N`` has N small tensors in four shards, and nothing else that a model needs.
        nbytes: About how much its weights take.
    """

    name: str
    kind: str
    nbytes: int


DataSet = StateDict | Model


def qwen3(
    name: str,
    *,
    hidden: int,
    intermediate: int,
    layers: int,
    query: int,
    key: int,
    vocabulary: int = 151_936,
    head: int = 128,
) -> StateDict:
    """A state dict shaped like a Qwen3 with tied embeddings: eleven tensors for each layer, and two more."""
    layer = (
        ("self_attn.q_proj.weight", (query, hidden)),
        ("self_attn.k_proj.weight", (key, hidden)),
        ("self_attn.v_proj.weight", (key, hidden)),
        ("self_attn.o_proj.weight", (hidden, query)),
        ("self_attn.q_norm.weight", (head,)),
        ("self_attn.k_norm.weight", (head,)),
        ("mlp.gate_proj.weight", (intermediate, hidden)),
        ("mlp.up_proj.weight", (intermediate, hidden)),
        ("mlp.down_proj.weight", (hidden, intermediate)),
        ("input_layernorm.weight", (hidden,)),
        ("post_attention_layernorm.weight", (hidden,)),
    )
    shapes: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (vocabulary, hidden))]
    shapes += [(f"model.layers.{number}.{part}", shape) for number in range(layers) for part, shape in layer]
    return StateDict(name, (*shapes, ("model.norm.weight", (hidden,))))


QWEN3_06B = qwen3("qwen3-0.6b", hidden=1024, intermediate=3072, layers=28, query=2048, key=1024)
QWEN3_4B_PART = qwen3("qwen3-4b-part", hidden=2560, intermediate=9728, layers=16, query=4096, key=1024)
TINY = qwen3("tiny", hidden=128, intermediate=384, layers=4, query=256, key=128, vocabulary=4096, head=64)
TINY_BIG = qwen3("tiny-big", hidden=256, intermediate=512, layers=4, query=256, key=128, vocabulary=4096, head=64)

SMOLLM2 = Model("SmolLM2-135M-Instruct", "smollm2", 269_060_552)
QWEN3_MODEL = Model("Qwen3-shaped", "qwen3", 1_503_264_768)
TINY_MODEL = Model("tiny-model", "tiny", 1_500_000)
OPENING = Model("opening", "shards-300", 300 << 16)
TINY_OPENING = Model("tiny-opening", "shards-12", 12 << 16)


def uniform(name: str, nbytes: int, count: int) -> StateDict:
    """``count`` tensors of equal size, ``nbytes`` in all or a little less; the size becomes part of the name."""
    each = nbytes // count // 2
    shape = (each // 1024, 1024) if each % 1024 == 0 else (each,)
    return StateDict(
        f"{name}-{nbytes // 1_000_000}mb", tuple((f"blocks.{number:05}.weight", shape) for number in range(count))
    )


def path(data: DataSet, variant: str) -> Path:
    """Where a variant lies: a folder for a model, else a file.

    Variants are ``plain``, ``secure``, ``cryptotensors``, ``tensorizer`` and ``tensorizer-encrypted``; ``secure`` may be
    followed by ``:chunk=BYTES`` and, like ``cryptotensors``, by ``:share=PERCENT`` of the bytes to encrypt.
    """
    if isinstance(data, Model) and data.kind == "smollm2" and variant == "plain":
        from examples.real_models import smollm2

        return smollm2()
    suffix = "" if isinstance(data, Model) else ".tensors" if variant.startswith("tensorizer") else ".safetensors"
    return cache.folder() / f"{data.name}.{RECIPE}" / (variant.replace(":", "-").replace("=", "-") + suffix)


def weight_files(data: DataSet, variant: str) -> list[Path]:
    """The files that hold the weights of a variant."""
    place = path(data, variant)
    return sorted(place.glob("*.safetensors")) if place.is_dir() else [place]


def expected(data: DataSet) -> str:
    """Digest of the plain tensors, from when they were written."""
    return str(json.loads((cache.folder() / f"{data.name}.{RECIPE}" / "expected.json").read_text())["digest"])


def drop(sets: Iterable[DataSet]) -> None:
    """Delete all variants of data sets."""
    for data in sets:
        shutil.rmtree(cache.folder() / f"{data.name}.{RECIPE}", ignore_errors=True)


def ensure(wanted: Sequence[tuple[DataSet, str]]) -> dict[tuple[DataSet, str], str | None]:
    """Make what is missing.

    Returns:
        For each pair why it could not be made, or None.
    """
    wanted = list(dict.fromkeys(wanted))
    found: dict[tuple[DataSet, str], str | None] = {pair: None for pair in wanted if _is_there(*pair)}
    missing = [pair for pair in wanted if pair not in found]
    if not missing:
        return found
    from secure_loader.bench.machine import scrub

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.make_data"],
        input=json.dumps([[type(data).__name__, asdict(data), variant] for data, variant in missing]),
        env=cache.environment(),
        cwd=cache.ROOT,
        text=True,
        capture_output=True,
        check=False,
    )
    try:
        reasons: list[str | None] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        reasons = [f"making data ended with {done.returncode}: {done.stderr[-600:]}"] * len(missing)
    return found | {
        pair: None if reason is None else scrub(reason, cache.folder())
        for pair, reason in zip(missing, reasons, strict=True)
    }


def _is_there(data: DataSet, variant: str) -> bool:
    if not (cache.folder() / f"{data.name}.{RECIPE}" / "expected.json").exists():
        return False
    return path(data, variant).exists()


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
