"""The driver's place taken by host memory: commands run as late as the rules of streams allow, and any call can fail.

Kernels are either those of ``csrc/``, compiled for the CPU by the shim, or a model of them that needs no compiler: it does
what ``abi.cuh`` says they do, with OpenSSL, and keeps what must be wiped where the real ones keep it.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from secure_loader.core.device import abi
from secure_loader.core.device.driver import Driver, Gpu
from secure_loader.errors import DeviceError

POISON = 0xDB


class Model:
    """The kernels as ``abi.cuh`` describes them."""

    def __init__(self) -> None:
        self._genuine: dict[tuple[int, int], bool] = {}

    def __call__(self, kernel: str, blocks: int, threads: int, args: tuple[int, ...]) -> None:
        assert threads == abi.THREADS
        getattr(self, kernel)(blocks, *args)

    def sl_expand_keys(self, blocks: int, keys: int, schedules: int, nkeys: int) -> None:
        assert blocks == nkeys
        for i in range(nkeys):
            raw = ctypes.string_at(keys + i * abi.KEY_BYTES, abi.KEY_BYTES)
            # The raw key in it, so that tests find it where a schedule was left behind.
            write(schedules + i * abi.SCHEDULE_BYTES, raw * (abi.SCHEDULE_BYTES // len(raw)))

    def sl_gcm_open(self, blocks: int, chunks: int, work: int, nwork: int, schedules: int, partial: int) -> None:
        assert 0 < blocks <= nwork
        for i in range(nwork):
            chunk, segment = struct.unpack("<II", ctypes.string_at(work + i * abi.WORK_BYTES, abi.WORK_BYTES))
            self._segment(chunks + chunk * abi.CHUNK_BYTES, segment, schedules, partial)

    def sl_ctr(self, blocks: int, chunks: int, work: int, nwork: int, schedules: int) -> None:
        assert 0 < blocks <= nwork
        for i in range(nwork):
            chunk, segment = struct.unpack("<II", ctypes.string_at(work + i * abi.WORK_BYTES, abi.WORK_BYTES))
            self._segment(chunks + chunk * abi.CHUNK_BYTES, segment, schedules, None)

    def _segment(self, chunk: int, segment: int, schedules: int, partial: int | None) -> None:
        address, out, nbytes, _, _, nonce, _, _, first = self._read(chunk)
        assert address == out
        assert nbytes > segment * abi.SEGMENT_BYTES, "a list of chunks that was overwritten before it was used"
        key = self._key(chunk, schedules)
        if segment == 0 and partial is not None:
            self._genuine[partial, first] = self._is_genuine(chunk, schedules)
        start = segment * abi.SEGMENT_BYTES
        size = min(abi.SEGMENT_BYTES, nbytes - start)
        counter = nonce + (2 + start // 16).to_bytes(4, "big")
        text = ctypes.string_at(address + start, size)
        write(address + start, Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor().update(text))
        if partial is not None:
            write(partial + (first + segment) * abi.PARTIAL_BYTES, key[:16])

    def sl_gcm_finish(
        self, blocks: int, chunks: int, nchunks: int, schedules: int, partial: int, verdicts: int
    ) -> None:
        assert blocks == nchunks
        for i in range(nchunks):
            chunk = chunks + i * abi.CHUNK_BYTES
            nbytes, first = self._read(chunk)[2], self._read(chunk)[8]
            good = self._genuine.pop((partial, first)) if nbytes else self._is_genuine(chunk, schedules)
            write(verdicts + 4 * i, (abi.VERIFIED if good else abi.REJECTED).to_bytes(4, "little"))

    def _read(self, chunk: int) -> tuple[int, int, int, int, bytes, bytes, int, int, int]:
        return struct.unpack("<QQQQ16s12sIII4x4x", ctypes.string_at(chunk, abi.CHUNK_BYTES))

    def _key(self, chunk: int, schedules: int) -> bytes:
        index = self._read(chunk)[7]
        raw = ctypes.string_at(schedules + index * abi.SCHEDULE_BYTES, abi.KEY_BYTES)
        return raw[:32] if struct.unpack_from("<I", raw, 32)[0] == 32 else raw[:16]

    def _is_genuine(self, chunk: int, schedules: int) -> bool:
        address, _, nbytes, aad, tag, nonce, aad_nbytes, _, _ = self._read(chunk)
        text = ctypes.string_at(address, nbytes) + tag
        try:
            AESGCM(self._key(chunk, schedules)).decrypt(nonce, text, ctypes.string_at(aad, aad_nbytes))
        except InvalidTag:
            return False
        return True


class RecordingDriver(Driver):
    """A driver over host memory.

    Args:
        kernels: What runs them.
        gpus: The devices there are.

    Attributes:
        calls: Names of the calls so far.
        fails: Called with the number and name of each call; true makes it fail.
        live: Buffers in use, device and pinned, by address.
        everything: All buffers there ever were.
    """

    def __init__(self, kernels: Callable[[str, int, int, tuple[int, ...]], None] | None = None, gpus: int = 1) -> None:
        self.calls: list[str] = []
        self.fails: Callable[[int, str], bool] = lambda _number, _name: False
        self.live: dict[int, ctypes.Array] = {}
        self.everything: list[ctypes.Array] = []
        self.contexts: list[int] = []
        self.retained: Counter[int] = Counter()
        self.modules = 0
        self._kernels = kernels or Model()
        self._gpus = [Gpu(i, f"Recorder {i}", 90, 4) for i in range(gpus)]
        self._streams: dict[int, list[tuple[str, Callable[[], None]]]] = {}
        self._local, self._lock = threading.local(), threading.RLock()

    # What a real device would do

    def _call(self, name: str, *_args: object) -> None:
        with self._lock:
            self.calls.append(name)
            if self.fails(len(self.calls) - 1, name):
                raise DeviceError(f"{name}: told to fail")
        if name not in ("retain", "release", "push"):
            assert self._stack(), f"{name} without a context"

    def _stack(self) -> list[int]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        return self._local.stack

    def _queue(self, stream: int, name: str, command: Callable[[], None]) -> None:
        with self._lock:
            self._streams.setdefault(stream, []).append((name, command))

    def run(self, stream: int | None = None, until: object = None) -> None:
        """Let the device come to the end of a stream, of all, or to an event."""
        with self._lock:
            for commands in [self._streams.get(stream, [])] if stream is not None else list(self._streams.values()):
                while commands:
                    name, command = commands.pop(0)
                    command()
                    if until is not None and name == f"event {until}":
                        break

    def queued(self, stream: int) -> list[str]:
        """What is still to be done."""
        return [name for name, _ in self._streams.get(stream, [])]

    def memory(self) -> bytes:
        """All bytes that were ever handed out."""
        return b"\0\0\0\0".join(bytes(buffer) for buffer in self.everything)

    def _new(self, nbytes: int) -> int:
        buffer = (ctypes.c_ubyte * nbytes)(*[POISON] * 0)
        ctypes.memset(buffer, POISON, nbytes)
        with self._lock:
            self.live[ctypes.addressof(buffer)] = buffer
            self.everything.append(buffer)
        return ctypes.addressof(buffer)

    def _inside(self, address: int, nbytes: int) -> None:
        with self._lock:
            live = list(self.live.items())
        assert any(a <= address and address + nbytes <= a + len(b) for a, b in live), "outside of what was allocated"

    # What is asked of it

    def version(self) -> int:
        return 12080

    def gpus(self) -> list[Gpu]:
        return self._gpus

    def gpu(self, ordinal: int) -> Gpu:
        return self._gpus[ordinal]

    def retain(self, ordinal: int) -> int:
        self._call("retain")
        self.retained[ordinal] += 1
        return 1000 + ordinal

    def release(self, ordinal: int) -> None:
        self.retained[ordinal] -= 1

    @contextlib.contextmanager
    def current(self, context: int) -> Iterator[None]:
        self._call("push")
        self._stack().append(context)
        self.contexts.append(context)
        try:
            yield
        finally:
            self._stack().pop()
            with self._lock:
                self.calls.append("pop")
                if self.fails(len(self.calls) - 1, "pop"):
                    raise DeviceError("pop: told to fail")

    def load(self, image: bytes) -> bytes:
        self._call("load")
        if not image.startswith(b"\x7fELF"):
            raise DeviceError("cuModuleLoadData: CUDA_ERROR_INVALID_IMAGE")
        self.modules += 1
        return image

    def unload(self, module: bytes) -> None:
        self._call("unload")
        self.modules -= 1

    def function(self, module: bytes, name: str) -> str:
        self._call("function")
        return name

    def residency(self, function: str, threads: int) -> int:
        self._call("residency")
        return 3

    def launch(self, function: str, blocks: int, threads: int, stream: int, *args: int | ctypes.c_uint32) -> None:
        self._call("launch")
        values = tuple(a if isinstance(a, int) else a.value for a in args)
        self._queue(stream, function, lambda: self._kernels(function, blocks, threads, values))

    def allocate(self, nbytes: int) -> int:
        self._call("allocate")
        return self._new(nbytes)

    def free(self, address: int) -> None:
        self._call("free")
        del self.live[address]

    def allocate_host(self, nbytes: int) -> int:
        self._call("allocate_host")
        return self._new(nbytes)

    def free_host(self, address: int) -> None:
        self._call("free_host")
        del self.live[address]

    def upload(self, device: int, host: int, nbytes: int, stream: int) -> None:
        self._call("upload")
        self._copy(stream, "upload", device, host, nbytes)

    def download(self, host: int, device: int, nbytes: int, stream: int) -> None:
        self._call("download")
        self._copy(stream, "download", host, device, nbytes)

    def _copy(self, stream: int, name: str, to: int, source: int, nbytes: int) -> None:
        self._inside(to, nbytes)
        self._inside(source, nbytes)
        self._queue(stream, name, lambda: ctypes.memmove(to, source, nbytes))

    def clear(self, device: int, nbytes: int, stream: int) -> None:
        self._call("clear")
        self._inside(device, nbytes)
        self._queue(stream, "clear", lambda: ctypes.memset(device, 0, nbytes))

    def event(self) -> object:
        self._call("event")
        return object()

    def record(self, event: object, stream: int) -> None:
        self._call("record")
        self._queue(stream, f"event {event}", lambda: None)

    def reached(self, event: object) -> bool:
        self._call("reached")
        return not any(f"event {event}" in self.queued(stream) for stream in list(self._streams))

    def wait(self, event: object) -> None:
        self._call("wait")
        with self._lock:
            for stream in list(self._streams):
                if f"event {event}" in self.queued(stream):
                    self.run(stream, until=event)

    def destroy(self, event: object) -> None:
        self._call("destroy")

    def synchronise(self, stream: int) -> None:
        self._call("synchronise")
        self.run(stream)


def write(address: int, data: bytes) -> None:
    """Copy bytes to an address."""
    ctypes.memmove(address, data, len(data))
