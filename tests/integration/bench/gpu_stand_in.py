"""Host memory in place of a GPU, for ``benchmarks.gpu``: everything happens at once, and figures mean nothing.

The kernels are a model of what ``csrc/abi.cuh`` describes, by OpenSSL. The package's own host code for the driver runs on it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
import time
from pathlib import Path

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from secure_loader.core.device import abi
from secure_loader.core.device.cuda import CudaKernels
from secure_loader.core.device.device import HostMemory, Memory
from secure_loader.core.device.driver import Driver, Gpu
from secure_loader.errors import DeviceError

_CHUNK = struct.Struct("<QQQQ16s12sIIII4x")


class _Chunk:
    """One entry of a table of chunks, with its key."""

    def __init__(self, table: int, index: int, schedules: int) -> None:
        raw = ctypes.string_at(table + index * abi.CHUNK_BYTES, abi.CHUNK_BYTES)
        self.source, self.out, self.nbytes, _, self.tag, self.nonce, _, number, *_ = _CHUNK.unpack(raw)
        schedule = ctypes.string_at(schedules + number * abi.SCHEDULE_BYTES, abi.KEY_BYTES)
        self.key = schedule[: struct.unpack_from("<I", schedule, 32)[0]]

    def cipher(self, segment: int) -> None:
        start = segment * abi.SEGMENT_BYTES
        counter = self.nonce + (2 + start // 16).to_bytes(4, "big")
        text = ctypes.string_at(self.source + start, min(abi.SEGMENT_BYTES, self.nbytes - start))
        _write(self.out + start, Cipher(algorithms.AES(self.key), modes.CTR(counter)).encryptor().update(text))

    def tag_of(self, *, plain: bool) -> bytes:
        """The tag of what lies there: the plaintext, or the ciphertext."""
        text = ctypes.string_at(self.out, self.nbytes)
        if not plain:
            counter = modes.CTR(self.nonce + (2).to_bytes(4, "big"))
            text = Cipher(algorithms.AES(self.key), counter).decryptor().update(text)
        return AESGCM(self.key).encrypt(self.nonce, text, None)[-16:]


class StandInDriver(Driver):
    """As the driver; kernels by their names."""

    def __init__(self) -> None:
        self._live: dict[int, ctypes.Array] = {}

    def version(self) -> int:
        return 0

    def gpus(self) -> list[Gpu]:
        return [self.gpu(0)]

    def gpu(self, ordinal: int) -> Gpu:
        return Gpu(ordinal, "host memory", 0, 2)

    def retain(self, ordinal: int) -> int:
        return ordinal

    def release(self, ordinal: int) -> None:
        pass

    @contextlib.contextmanager
    def current(self, context):
        yield

    def load(self, image: bytes) -> bytes:
        return image

    def unload(self, module: bytes) -> None:
        pass

    def function(self, module: bytes, name: str) -> str:
        return name

    def residency(self, function: str, threads: int) -> int:
        return 2

    def launch(self, function: str, blocks: int, threads: int, stream: int, *args) -> None:
        assert threads == abi.THREADS
        assert blocks > 0
        getattr(self, f"_{function}")(*[a if isinstance(a, int) else a.value for a in args])

    def _sl_expand_keys(self, keys: int, schedules: int, nkeys: int) -> None:
        for n in range(nkeys):
            _write(schedules + n * abi.SCHEDULE_BYTES, ctypes.string_at(keys + n * abi.KEY_BYTES, abi.KEY_BYTES))

    def _sl_ctr(self, chunks: int, work: int, nwork: int, schedules: int, partial: int = 0) -> None:
        for n in range(nwork):
            chunk, segment = struct.unpack("<II", ctypes.string_at(work + n * abi.WORK_BYTES, abi.WORK_BYTES))
            _Chunk(chunks, chunk, schedules).cipher(segment)

    _sl_gcm_open = _sl_gcm_seal = _sl_ctr

    def _sl_gcm_finish(self, chunks: int, nchunks: int, schedules: int, partial: int, verdicts: int) -> None:
        for n in range(nchunks):
            chunk = _Chunk(chunks, n, schedules)
            verdict = abi.VERIFIED if chunk.tag_of(plain=True) == chunk.tag else abi.REJECTED
            _write(verdicts + 4 * n, verdict.to_bytes(4, "little"))

    def _sl_gcm_tag(self, chunks: int, nchunks: int, schedules: int, partial: int, tags: int) -> None:
        for n in range(nchunks):
            _write(tags + 16 * n, _Chunk(chunks, n, schedules).tag_of(plain=False))

    def allocate(self, nbytes: int) -> int:
        buffer = (ctypes.c_ubyte * (nbytes + 256))()
        address = -(-ctypes.addressof(buffer) // 256) * 256
        self._live[address] = buffer
        return address

    def free(self, address: int) -> None:
        del self._live[address]

    allocate_host, free_host = allocate, free

    def upload(self, device: int, host: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(device, host, nbytes)

    def download(self, host: int, device: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(host, device, nbytes)

    def clear(self, device: int, nbytes: int, stream: int) -> None:
        ctypes.memset(device, 0, nbytes)

    def event(self) -> object:
        return object()

    def record(self, event: object, stream: int) -> None:
        pass

    def reached(self, event: object) -> bool:
        return True

    def wait(self, event: object) -> None:
        pass

    def destroy(self, event: object) -> None:
        pass

    def synchronise(self, stream: int) -> None:
        pass


class _HostDevice:
    """As ``core.device.device.Device``, as far as the stages use it."""

    name, compute = "cpu", 0

    def allocate(self, nbytes: int) -> Memory:
        owner = torch.empty(nbytes, dtype=torch.uint8)
        return Memory(owner, owner.data_ptr(), nbytes)

    def pin(self, nbytes: int) -> HostMemory:
        array = np.empty(nbytes, np.uint8)
        return HostMemory(array, memoryview(array).cast("B"))

    def follow(self) -> None:
        pass

    def copy_in(self, host: HostMemory, start: int, memory: Memory, at: int, nbytes: int) -> None:
        memory.owner.numpy()[at : at + nbytes] = host.owner[start : start + nbytes]

    def copied(self) -> None:
        pass

    def compute_after(self, event: None) -> None:
        pass

    def synchronise(self) -> None:
        pass


class StandIn:
    """As ``benchmarks.gpu.device.Bench``."""

    stand_in = True
    torch_device, ordinal, stream = "cpu", 0, 0

    def __init__(self, driver: Driver | None = None) -> None:
        self._driver = driver or StandInDriver()
        self._kernels = CudaKernels(self._driver, 0, b"", "model")

    def seconds(self, work) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def wait(self) -> None:
        pass

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def free_memory(self) -> int:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024

    def driver(self) -> Driver:
        return self._driver

    def image(self) -> tuple[str, bytes]:
        return "model", b""

    def kernels(self, way: str) -> CudaKernels:
        return self._kernels

    def pipeline(self) -> _HostDevice:
        return _HostDevice()


def make() -> StandIn:
    """For ``--bench tests.integration.bench.gpu_stand_in:make``."""
    return StandIn()


def broken() -> StandIn:
    """Cannot be opened."""
    raise DeviceError("there was a device, and now there is none")


def stuck() -> StandIn:
    """Does not answer."""
    time.sleep(60)
    raise AssertionError


def dying() -> StandIn:
    """Takes the whole process with it behind its first case."""
    bench = StandIn()
    measured = bench.seconds
    left = [9]  # three works: two warm-ups and one round each

    def seconds(work) -> float:
        if not left[0]:
            print("illegal address", file=sys.stderr, flush=True)
            os._exit(3)
        left[0] -= 1
        return measured(work)

    bench.seconds = seconds
    return bench


def _write(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))
