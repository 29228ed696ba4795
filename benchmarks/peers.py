"""The other loaders: their keys, how they write, and how they read everything into tensors that outlive them.

Their packages are imported where they are used: not every environment has all of them.
"""

from __future__ import annotations

import base64
import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import cache

if TYPE_CHECKING:
    import torch

Tensors = dict[str, "torch.Tensor"]
HUGE = 2 << 20
KEEP: list[Any] = []  # what must live as long as tensors do, where a loader does not see to it


def load_plain(files: Sequence[Path]) -> Tensors:
    """Mapped tensors of plain files: the truth that others are compared with."""
    from safetensors.torch import load_file

    return {name: tensor for file in files for name, tensor in load_file(file).items()}


# --- secure_loader ------------------------------------------------------------------------------------------------


def secure(path: Path) -> Tensors:
    """As its users call it: keys and trust come from the home folder."""
    from secure_loader.torch import load_file

    return load_file(path)


# --- safetensors --------------------------------------------------------------------------------------------------


def safetensors_mapped(path: Path) -> Tensors:
    """Zero copy: nothing is read before it is touched."""
    from safetensors.torch import load_file

    return load_file(path)


def safetensors_owned(path: Path) -> Tensors:
    """Copies, one tensor after the other, while the file is mapped."""
    from safetensors import safe_open

    with safe_open(path, "pt") as f:
        return {name: f.get_tensor(name).clone() for name in f.keys()}  # noqa: SIM118 - not a mapping


def safetensors_pread(path: Path) -> Tensors:
    """Its other back end, which owns what it returns."""
    from safetensors.torch import load_file

    return load_file(path, backend="pread")


# --- the floor: what reading plain bytes costs at least -----------------------------------------------------------


def plain_pread(threads: int, block: int) -> Callable[[Path], Tensors]:
    """Plain ``preadv`` of the whole file into huge pages: no format, no checks, no framework. Nothing can do less.

    Args:
        threads: Reads in flight.
        block: Bytes of each.
    """

    def load(path: Path) -> Tensors:
        import json

        import torch

        fd = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            length = int.from_bytes(os.pread(fd, 8, 0), "little")
            header = json.loads(os.pread(fd, length, 8))
            start = 8 + length
            memory = huge_pages(size - start)
            _read_blocks(fd, memory, start, threads, block)
        finally:
            os.close(fd)
        header.pop("__metadata__", None)
        tensors = {}
        for name, info in header.items():
            low, high = info["data_offsets"]
            raw = torch.frombuffer(memory[low:high], dtype=torch.bfloat16)
            tensors[name] = raw.view(info["shape"])
        return tensors

    return load


def huge_pages(size: int) -> memoryview:
    """Anonymous memory that begins at a huge page, so that the kernel can give huge pages for all of it."""
    area = mmap.mmap(-1, size + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    offset = -ctypes.addressof(ctypes.c_char.from_buffer(area)) % HUGE
    return memoryview(area)[offset : offset + size]


def _read_blocks(fd: int, memory: memoryview, start: int, threads: int, block: int) -> None:
    """Each thread reads one contiguous part, so that the kernel's read-ahead follows it: from disk, blocks dealt out in
    turn took 1.7 times as long."""
    share = -(-memory.nbytes // threads)

    def work(number: int) -> None:
        part = memory[number * share : (number + 1) * share]
        done = 0
        while done < part.nbytes:
            count = os.preadv(fd, [part[done : done + block]], start + number * share + done)
            if count == 0:
                raise EOFError("the file ends early")
            done += count

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


# --- cryptotensors ------------------------------------------------------------------------------------------------


def cryptotensors_config(*, private: bool = False) -> dict[str, Any]:
    """Keys as it takes them."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    keys = {name: bytes.fromhex(text) for name, text in cache.peer_keys().items()}
    public = Ed25519PrivateKey.from_private_bytes(keys["signing"]).public_key().public_bytes_raw()
    sign = {"kty": "okp", "alg": "ed25519", "kid": "bench-sign", "x": base64.b64encode(public).decode()}
    if private:
        sign["d"] = base64.b64encode(keys["signing"]).decode()
    master = base64.b64encode(keys["master"]).decode()
    return {"enc_key": {"kty": "oct", "alg": "aes256gcm", "kid": "bench", "k": master}, "sign_key": sign}


def save_cryptotensors(path: Path, tensors: Mapping[str, torch.Tensor], names: list[str] | None) -> None:
    """Encrypt all tensors, or those of some names."""
    import cryptotensors.torch

    config = cryptotensors_config(private=True) | {"version": "2"}
    if names is not None:
        config["tensors"] = names
    cryptotensors.torch.save_file(dict(tensors), str(path), metadata={"format": "pt"}, config=config)


def cryptotensors_open(path: Path) -> Any:
    """Its ``safe_open`` with our keys."""
    import cryptotensors

    return cryptotensors.safe_open(str(path), "pt", config=cryptotensors_config())


def cryptotensors_encrypted(path: Path) -> Tensors:
    """Everything, tensor by tensor, as its own ``load_file`` does."""
    with cryptotensors_open(path) as f:
        return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 - not a mapping


# --- tensorizer ---------------------------------------------------------------------------------------------------


def save_tensorizer(path: Path, tensors: Mapping[str, torch.Tensor], *, encrypted: bool) -> None:
    """In its own format."""
    import tensorizer

    import benchmarks.sodium  # noqa: F401 - before tensorizer

    key = bytes.fromhex(cache.peer_keys()["tensorizer"])
    encryption = tensorizer.EncryptionParams(key=key) if encrypted else None
    serializer = tensorizer.TensorSerializer(str(path), encryption=encryption)
    try:
        serializer.write_state_dict(dict(tensors))
    finally:
        serializer.close()


def tensorizer_load(*, encrypted: bool) -> Callable[[Path], Tensors]:
    """Everything, with its own choice of readers."""

    def load(path: Path) -> Tensors:
        import tensorizer  # after benchmarks.sodium

        key = bytes.fromhex(cache.peer_keys()["tensorizer"])
        encryption = tensorizer.DecryptionParams.from_key(key) if encrypted else None
        deserializer = tensorizer.TensorDeserializer(str(path), device="cpu", encryption=encryption)
        KEEP.append(deserializer)
        return {name: deserializer[name].detach() for name in deserializer.keys()}  # noqa: SIM118 - reads by key

    return load


# --- loaders of plain files ---------------------------------------------------------------------------------------


def fastsafetensors_load(path: Path) -> Tensors:
    """One process, no GPU. FASTSAFETENSORS_ODIRECT=0 in the environment makes it read through the page cache."""
    from fastsafetensors import SafeTensorsFileLoader
    from fastsafetensors.common import SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), device="cpu", nogds=True)
    loader.add_filenames({0: [str(path)]})
    buffer = loader.copy_files_to_device()
    KEEP.extend((loader, buffer))
    return {name: buffer.get_tensor(name) for name in loader.get_keys()}


def runai_load(path: Path) -> Tensors:
    """Its tensors may be kept: ``owned=True`` is the default."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path))
        return dict(streamer.get_tensors())


def instanttensor_load(path: Path) -> Tensors:
    """For the record: it supports no CPU."""
    from instanttensor import safe_open

    with safe_open([str(path)], framework="pt", device="cpu") as f:
        return dict(f.tensors())
