"""AES-GCM on a device by Triton: the second implementation, for ROCm and for CUDA without the driver's interface.

Key schedules and powers of H are made on the device. All that holds key material there lies in two tensors, which are
overwritten on the stream behind the last kernel, on error paths too; so is the host memory that the keys were copied from.
The kernels use no shared memory and spill no registers: tests look at what the compiler made.

Triton compiles at the first launch (several seconds, and it needs a C compiler) and keeps what it made in its own cache,
``TRITON_CACHE_DIR``: whoever can write there can run code next to the keys, as with everything else that Triton compiles.
"""

from __future__ import annotations

import ctypes
import threading

from ...errors import AuthenticationError, DeviceError, SecureLoaderError
from ..secrets import wipe
from .batch import Batch
from .triton_place import Gpu, Mark, Place
from .triton_tables import Tables

_VERIFIED = 1  # as in triton_gcm
_WIPE = {"PROGRAMS": 64, "BLOCK": 1024}  # programs a chunk, bytes that one writes at once
_WARP = {"num_warps": 1, "num_stages": 1}  # of more warps, some would meet in shared memory; so would stages of a loop


class TritonKernels:
    """The ``Kernels`` of one device, by Triton.

    Args:
        device_index: Which GPU, as PyTorch counts them.
        place: Where to run instead; for tests.

    Raises:
        DeviceError: There is no such GPU, no PyTorch or Triton, or Triton cannot compile.
    """

    name = "Triton"

    def __init__(self, device_index: int, place: Place | None = None) -> None:
        self._place = Gpu(device_index) if place is None else place
        self._under_way: set[TritonPending] = set()
        try:
            import torch

            from .triton_gcm import wipe_chunks

            # Compiled before anything can go wrong: what must be overwritten must not wait for a compiler.
            with self._place.behind(0):
                nothing = torch.zeros(5, dtype=torch.int64, device=self._place.device)
                wipe_chunks[(1, 1)](nothing, **_WIPE, **_WARP)
        except Exception as error:
            raise DeviceError(f"Triton cannot be used: {_first_line(error)}") from error

    def open(self, batch: Batch, stream: int) -> TritonPending:
        """Queue a batch; see ``batch.Kernels.open``.

        Raises:
            DeviceError: It could not be queued, or a chunk has associated data. Chunks may have been overwritten.
        """
        pending = TritonPending(self._place, Tables(batch, self._place.lanes), stream, self._under_way)
        self._under_way.add(pending)
        return pending

    def close(self) -> None:
        """Wait for what is under way. Nothing is kept between batches, so there is nothing else to give back."""
        for pending in list(self._under_way):
            try:
                pending.wait()
            except SecureLoaderError:
                continue  # whoever holds the batch hears of it from a wait of their own


class TritonPending:
    """A batch that was queued; see ``batch.Pending``.

    Args:
        place: Where it runs.
        tables: What to open.
        stream: Behind what.
        under_way: It leaves this set when it is settled.

    Raises:
        DeviceError: It could not be queued.
    """

    def __init__(self, place: Place, tables: Tables, stream: int, under_way: set[TritonPending]) -> None:
        self._place, self._stream, self._under_way = place, stream, under_way
        self._lock, self._settled = threading.Lock(), False
        self._error: type[SecureLoaderError] | None = None
        self._message = ""
        try:
            with place.behind(stream):
                self._memory: _Memory | None = _Memory(place, tables)
        except RuntimeError as error:  # out of memory, for one; nothing was decrypted yet
            raise DeviceError(f"Triton failed: {_first_line(error)}") from error
        try:
            with place.behind(stream):
                _queue(self._memory, tables)
                self._mark: Mark = place.mark()
        except BaseException as error:
            self._overwrite()
            if isinstance(error, Exception):
                raise DeviceError(f"Triton failed: {_first_line(error)}") from error
            raise

    def done(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        if self._settled:
            return True
        try:
            return self._mark.query()
        except RuntimeError:
            return True  # wait says what happened

    def wait(self) -> None:
        """Wait for the verdicts; see ``batch.Pending.wait``.

        Raises:
            AuthenticationError: A tag is wrong. All chunks of the batch were overwritten.
            DeviceError: The device failed.
        """
        with self._lock:
            if not self._settled:
                self._settle()
        if self._error is not None:
            raise self._error(self._message)

    def _settle(self) -> None:
        assert self._memory is not None  # noqa: S101 - it is given back below
        try:
            self._mark.synchronize()
            good = all(verdict == _VERIFIED for verdict in self._memory.verdicts.tolist())
        except RuntimeError as error:
            self._fail(DeviceError, f"the device failed: {_first_line(error)}")
            self._overwrite()
        else:
            self._memory.forget()
            if not good:
                self._fail(
                    AuthenticationError, "authentication failed: these bytes were altered, or belong to another key"
                )
                if not self._overwrite():
                    self._fail(
                        DeviceError, "authentication failed, and the device failed to overwrite what it decrypted"
                    )
        self._memory = None
        self._settled = True
        self._under_way.discard(self)

    def _fail(self, error: type[SecureLoaderError], message: str) -> None:
        self._error, self._message = error, message

    def _overwrite(self) -> bool:
        """Overwrite chunks, keys and what was made of them, and wait for it. False if the device fails even here."""
        assert self._memory is not None  # noqa: S101 - it is given back behind this
        from .triton_gcm import wipe_chunks

        try:
            with self._place.behind(self._stream):
                self._memory.overwrite_secrets()
                if self._memory.uploaded:  # else there are no addresses there, and nothing was decrypted
                    wipe_chunks[(self._memory.chunks, _WIPE["PROGRAMS"])](self._memory.places, **_WIPE, **_WARP)
                self._place.mark().synchronize()
        except Exception:  # noqa: BLE001 - whatever it is, the caller raises an error of its own
            return False
        finally:
            self._memory.forget()
        return True


class _Memory:
    """The memory of one batch, on both sides.

    Attributes:
        chunks: How many chunks there are.
        uploaded: Whether the tables are on the device.
        verdicts: int32[chunks] on the host, once the stream is through.
        places, tags, blocks, sizes, counts, raw: Tables on the device; ``raw`` are the keys.
        schedules, encrypted, encrypted_keys, partials, sums: Results there.
        verdicts_there: int32[chunks].
    """

    def __init__(self, place: Place, tables: Tables) -> None:
        import torch

        self.chunks = tables.chunks
        self.uploaded = False
        self._host = place.host(tables.upload_bytes)
        self._upload = torch.empty(tables.upload_bytes, dtype=torch.uint8, device=place.device)
        self._scratch = torch.empty(tables.scratch_bytes, dtype=torch.uint8, device=place.device)
        self.verdicts = place.host(4 * tables.chunks).view(torch.int32)
        self.verdicts_there = torch.zeros(tables.chunks, dtype=torch.int32, device=place.device)
        upload, scratch = self._upload, self._scratch
        self.places = upload[tables.places].view(torch.int64)
        self.tags = upload[tables.tags].view(torch.int32)
        self.blocks = upload[tables.blocks].view(torch.int32)
        self.sizes = upload[tables.sizes].view(torch.int32)
        self.counts = upload[tables.counts].view(torch.int32)
        self.raw = upload[tables.raw].view(torch.int32)
        self.schedules = scratch[tables.schedules].view(torch.int32)
        self.encrypted = scratch[tables.encrypted].view(torch.int32)
        self.partials = scratch[tables.partials].view(torch.int32)
        self.sums = scratch[tables.sums].view(torch.int32)
        try:
            tables.fill(self._view())
        except BaseException:
            self.forget()
            raise

    def upload(self) -> None:
        self._upload.copy_(self._host, non_blocking=True)
        self.uploaded = True

    def overwrite_secrets(self) -> None:
        self.raw.zero_()
        self._scratch.zero_()

    def forget(self) -> None:
        """Overwrite the host's copy of the keys. The device must be through with it."""
        if self._host.numel():
            wipe(self._view())

    def _view(self) -> memoryview:
        return memoryview((ctypes.c_ubyte * self._host.numel()).from_address(self._host.data_ptr())).cast("B")


def _queue(memory: _Memory, tables: Tables) -> None:
    """Queue everything on the current stream."""
    if not tables.chunks:
        return
    import torch

    from .triton_aes import encrypt_blocks, expand_keys
    from .triton_gcm import judge, open_segments, sum_segments
    from .triton_ghash import raise_key

    n, m, lanes = tables.chunks, tables.keys, tables.lanes
    memory.upload()
    memory.sums.zero_()
    stride = {"STRIDE": tables.stride} | _WARP
    expand_keys[(m,)](memory.raw, memory.sizes, memory.schedules, **stride)
    encrypt_blocks[(n + m,)](memory.blocks, memory.schedules, memory.encrypted, **stride)
    stride["BLOCK"] = lanes
    raise_key[(m,)](memory.encrypted[tables.encrypted_keys :], memory.schedules, **stride)
    chunk_of = torch.repeat_interleave(memory.counts, output_size=tables.segments)
    schedules, partials = memory.schedules, memory.partials
    if tables.segments:
        open_segments[(tables.segments,)](memory.places, memory.encrypted, schedules, chunk_of, partials, **stride)
        sum_segments[(-(-tables.segments // lanes),)](
            memory.places,
            schedules,
            chunk_of,
            partials,
            memory.sums,
            tables.segments,
            tables.bits,
            SHIFT=tables.shift,
            **stride,
        )
    judge[(-(-n // lanes),)](
        memory.places, memory.encrypted, schedules, memory.sums, memory.tags, memory.verdicts_there, n, **stride
    )
    memory.overwrite_secrets()
    memory.verdicts.copy_(memory.verdicts_there, non_blocking=True)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
