"""Has cryptotensors itself write files, over algorithms, versions, partial and full encryption, dtypes and names.

Its keys and IVs are random: a second run gives other bytes. The files are kept in data/ and not made again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import cryptotensors
import torch
from cryptotensors.torch import save_file

from .casebook import MASTERS, SIGNER, Case, Tensors

PROVENANCE = f"written by cryptotensors {cryptotensors.__version__}, torch {torch.__version__}"
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
PLAIN: Tensors = {
    "a": ("BF16", [3, 3], bytes(range(18))),
    "b": ("F32", [10], bytes(range(40))),
    "s": ("I64", [], bytes(range(8))),
    "ü/重\n\"'\x07": ("U8", [3], b"xyz"),
}
CHUNKS: Tensors = {"w": ("U8", [8200], bytes(i * 11 % 253 for i in range(8200))), "x": ("U8", [4096], bytes(4096))}


def torch_tensor(dtype: str, shape: list[int], data: bytes) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=DTYPES[dtype]) if data else torch.empty(0, dtype=DTYPES[dtype])
    return flat.reshape(shape)


def write(plain: Tensors, alg: str = "aes256gcm", **config) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        keys = {"enc_key": MASTERS[alg], "sign_key": SIGNER}
        save_file(
            {n: torch_tensor(*t) for n, t in plain.items()}, path, metadata={"format": "pt"}, config=keys | config
        )
        return path.read_bytes()


def genuine() -> Iterator[Case]:
    def case(name: str, comment: str, data: bytes, tensors: Tensors, allow: str = "legacy", **more) -> Case:
        return Case(f"genuine-{name}", "success", comment, data, tensors, allow=allow, provenance=PROVENANCE, **more)

    partly = "legacy unverified-clear"
    for alg in MASTERS:
        for version in "12":
            name = f"{alg}-v{version}"
            yield case(f"{name}-full", f"{alg}, version {version}", write(PLAIN, alg, version=version), PLAIN)
            data = write(PLAIN, alg, version=version, tensors=["b", "s"])
            yield case(f"{name}-partial", f"{alg}, version {version}, two of four", data, PLAIN, partly)
    every: Tensors = {f"t.{d}": (d, [2], (bytes(range(16)) * 2)[: 2 * DTYPES[d].itemsize]) for d in DTYPES}
    every["t.BOOL"] = ("BOOL", [2], b"\x01\x00")
    yield case("dtypes", "every dtype that torch and it share", write(every), every)
    yield case("chunks", "chunk_size 4096: three chunks, and exactly one", write(CHUNKS, chunk_size=4096), CHUNKS)
    empty: Tensors = {"e": ("F32", [0, 4], b""), "w": ("F32", [1], b"abcd")}
    for version in "12":
        comment = f"an empty tensor, encrypted, version {version}: it cannot read it back itself"
        yield case(f"empty-v{version}", comment, write(empty, version=version), empty, cryptotensors="refuses")
    policy = {"local": "package model\nallow = true", "remote": "package model\nallow = input.ok"}
    yield case("remote-policy", "a remote policy of its own", write(PLAIN, policy=policy), PLAIN)
    denied = {"local": "package model\ndefault allow = false", "remote": "package model\nallow = true"}
    yield Case(
        "genuine-policy-denies",
        "PolicyDeniedError",
        "a local policy that denies",
        write(PLAIN, policy=denied),
        allow="legacy",
        provenance=PROVENANCE,
        attacks="a51",
    )
    small = write(CHUNKS, chunk_size=1000)
    yield Case(
        "genuine-chunk-size-1000",
        "FormatError",
        "it writes any chunk_size from 1 up; readers here take 4096 and more",
        small,
        allow="legacy",
        provenance=PROVENANCE,
        attacks="a17",
    )
    plain = write(PLAIN, tensors=[])
    comment = "tensors=[]: it writes a plain file without a word"
    yield Case("genuine-plain", "NotEncryptedError", comment, plain, provenance=PROVENANCE, attacks="a65")
