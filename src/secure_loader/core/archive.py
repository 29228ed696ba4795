"""One file: what ``safe_open`` returns, with safetensors' own names (safetensors 0.8)."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self

from ..errors import ConfigError, NotEncryptedError, ReadError, TensorNameError
from . import slicing
from .audit import Opening
from .device.engine import Engine, engine_for
from .device.plan import Part
from .envelope import Envelope, Profile
from .forks import ForkLock
from .header import Header
from .keys.provider import KeyRing
from .pipeline import ClearBytes, Digests, Options, SealedBytes, Stored, Wanted, read
from .secrets import Secret
from .source import FileSource
from .tensors import Framework, empty, empty_many, framework
from .trust import VerifiedHeader
from .types import TensorInfo
from .unwrapping import unwrap_deks

# Below this a copy is cheaper than a mapping of its own.
_MIN_MAP = 64 * 1024


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How the tensors of an open file are read.

    Attributes:
        full_integrity: Also check the signed SHA-256 digests of encrypted tensors.
        copy_clear: Copy clear tensors instead of mapping them.
        page_cache: ``keep``, ``drop`` or ``bypass``, as :class:`core.pipeline.Options`.
        device_buffer_bytes: Pinned host memory that a load to a device may take.
        device_kernels: What decrypts there, as :func:`core.device.choice.choose`.
        require_device_kernels: Whether it must.
        gpu_direct: As :class:`core.pipeline.Options`.
        insecure_allow_unverified_clear: Hand out clear tensors of files that carry no digests for them.
    """

    full_integrity: bool = False
    copy_clear: bool = False
    page_cache: str = "keep"
    device_buffer_bytes: int = 256 << 20
    device_kernels: str = "auto"
    require_device_kernels: bool = False
    gpu_direct: str = "auto"
    insecure_allow_unverified_clear: bool = False


class TensorFile:
    """An open file whose header was accepted: plain, or encrypted and verified. Safe to use from many threads.

    It stays open for as long as an archive or a slice refers to it.

    Args:
        source: The file; owned from here on.
        header: Its header.
        verified: The same header, verified, or None for a plain file.
        keys: Where to ask for the master key; not asked before the first encrypted tensor is read.
        options: How to read.
        opening: What is recorded once it is decided: by the key, or now where nothing is encrypted.
    """

    def __init__(
        self,
        source: FileSource,
        header: Header,
        verified: VerifiedHeader | None,
        keys: KeyRing,
        options: ReadOptions,
        opening: Opening | None = None,
    ) -> None:
        self.source = source
        self.header = header
        self.verified = verified
        self.envelope: Envelope | None = None if verified is None else verified.envelope
        self._keys = keys
        self._options = options
        self._deks: dict[str, Secret] | None = None
        self._lock = ForkLock()
        self._opening = opening
        if opening is not None and not (self.envelope and self.envelope.records):
            opening.allow()

    @property
    def profile(self) -> Profile | None:
        """Profile 1 of the file, if it has it."""
        return None if self.envelope is None else self.envelope.profile

    def info(self, name: str) -> TensorInfo:
        """The tensor of that name.

        Raises:
            TensorNameError: There is none.
        """
        try:
            return self.header.tensors[name]
        except (KeyError, TypeError):
            raise TensorNameError(f"File does not contain tensor {name}", path=self.source.path) from None

    def is_sealed(self, name: str) -> bool:
        """Whether the tensor is encrypted."""
        return self.envelope is not None and name in self.envelope.records

    def granule(self, name: str) -> int:
        """Bytes that are read at least, to get one byte of the tensor."""
        if self.envelope is None or not self.is_sealed(name):
            # A clear tensor of a signed file is checked by whole pieces.
            return mmap.PAGESIZE if self.profile is None else self.profile.digest_chunk_size
        return self.envelope.chunk_size or max(1, self.info(name).nbytes)

    def unlock(self) -> None:
        """Get the DEKs now rather than at the first read: one request for the whole file.

        Raises:
            KeyAccessError: No master key, or the wrong one.
        """
        self._dek_table()

    def _dek_table(self) -> dict[str, Secret]:
        with self._lock.here:
            if self._deks is None:
                assert self.envelope is not None  # noqa: S101 - only sealed tensors get here
                self._deks = self._unwrap(self.envelope) if self.envelope.records else {}
            return self._deks

    def _unwrap(self, envelope: Envelope) -> dict[str, Secret]:
        if self._opening is None:
            return unwrap_deks(envelope, self._keys, self.source.path)
        with self._opening.part():
            deks = unwrap_deks(envelope, self._keys, self.source.path)
        self._opening.allow()
        return deks

    def wanted(self, name: str, out: memoryview | None, start: int = 0, stop: int | None = None) -> Wanted:
        """Part of a tensor, to be handed to :meth:`read`.

        Args:
            name: The tensor.
            out: Writable bytes, as many as are wanted; None only checks a clear tensor.
            start: First byte wanted.
            stop: First byte that is not; None takes the length of ``out``.

        Raises:
            KeyAccessError: No master key, or the wrong one.
            NotEncryptedError: A clear tensor that nothing is signed about, and nobody said to accept that.
        """
        info = self.info(name)
        if stop is None:
            stop = info.nbytes if out is None else start + out.nbytes
        return Wanted(name, self._sealed(info) if self.is_sealed(name) else self._clear(info), out, start, stop)

    def part(self, name: str, start: int = 0, stop: int | None = None) -> Part:
        """Part of a tensor, to be handed to an :class:`core.device.engine.Engine`; arguments and errors as :meth:`wanted`."""
        stop = self.info(name).nbytes if stop is None else stop
        wanted, envelope = self.wanted(name, None, start, stop), self.envelope
        if envelope is None or not self.is_sealed(name) or envelope.algorithm.name.startswith("chacha"):
            return Part(wanted, None)
        return Part(wanted, self._dek_table()[name])

    def engine(self, device: str) -> Engine | None:
        """What brings tensors of this file to a device; None where the framework has to copy them from the CPU.

        Args:
            device: As torch spells it.

        Raises:
            DeviceError: The device has to decrypt, by the settings, and cannot.
        """
        return engine_for(device, self._options.device_kernels, require=self._options.require_device_kernels)

    @property
    def device_buffer_bytes(self) -> int:
        """Pinned host memory that a load to a device may take."""
        return self._options.device_buffer_bytes

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Fill every destination with plaintext, as fast as the machine allows.

        Args:
            wanted: From :meth:`wanted`, of this file, best in file order.

        Raises:
            AuthenticationError: Bytes are not those that were signed. As for all errors, every destination was wiped.
            ReadError: The file cannot be read.
        """
        read(wanted, self.read_options)

    @property
    def read_options(self) -> Options:
        """How the pipeline reads this file."""
        return Options(self._options.page_cache, self._options.gpu_direct)

    def read_into(self, name: str, out: memoryview, start: int = 0) -> None:
        """Fill ``out`` with the tensor's plaintext from byte ``start`` on. Raises as :meth:`wanted` and :meth:`read`."""
        self.read([self.wanted(name, out, start)])

    def _sealed(self, info: TensorInfo) -> Stored:
        envelope = self.envelope
        assert envelope is not None  # noqa: S101 - only sealed tensors get here
        record, digests = envelope.records[info.name], None
        if self._options.full_integrity and envelope.profile is not None:
            digests = Digests(envelope.profile.digests[info.name], envelope.profile.digest_chunk_size)
        return SealedBytes(
            self.source,
            self.header.body_start + info.start,
            info.nbytes,
            envelope.algorithm.cipher(self._dek_table()[info.name]),
            envelope.chunk_size,
            record.iv,
            record.tags,
            digests,
        )

    def _clear(self, info: TensorInfo) -> Stored:
        offset, digests = self.header.body_start + info.start, None
        if self.profile is not None:
            digests = Digests(self.profile.digests[info.name], self.profile.digest_chunk_size)
        elif self.envelope is not None and info.nbytes and not self._options.insecure_allow_unverified_clear:
            raise NotEncryptedError(
                "is stored in clear, and this CryptoTensors file signs no digest of it: anybody could have changed it",
                hint="ask for insecure_allow_unverified_clear to read it all the same, or encrypt with secure-loader",
                path=self.source.path,
                tensor=info.name,
            )
        return ClearBytes(self.source, offset, info.nbytes, digests)

    def check_clear(self, name: str, start: int = 0, stop: int | None = None) -> list[Wanted]:
        """What has to be read and checked before part of a clear tensor is mapped; plain files have nothing to check.

        Raises:
            NotEncryptedError: The file signs no digests, and nobody said to accept that.
        """
        wanted = self.wanted(name, None, start, stop)
        return [] if self.profile is None else [wanted]

    def can_map(self, info: TensorInfo, *, alone: bool = True) -> bool:
        """Whether a tensor is in clear, and better mapped than copied; of a plain file, many are mapped at once."""
        smallest = _MIN_MAP if alone or self.profile is not None else 1
        return not self.is_sealed(info.name) and not self._options.copy_clear and info.nbytes >= smallest

    def map_clear(self, first: TensorInfo, last: TensorInfo | None = None) -> tuple[mmap.mmap, int]:
        """A private, writable mapping of a clear tensor, or of all from ``first`` to ``last``, and the offset of
        ``first`` in there.

        Each call maps anew, so that a change to one tensor is not seen by the next read.

        Raises:
            ReadError: The file was truncated, or the system maps no more.
        """
        begin = self.header.body_start + first.start
        base = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        length = self.header.body_start + (last or first).stop - base
        try:
            mapping = mmap.mmap(self.source.fileno(), length, access=mmap.ACCESS_COPY, offset=base)
        except (OSError, ValueError) as e:
            why = f"cannot be mapped, truncated since it was opened? ({e})"
            raise ReadError(why, path=self.source.path, tensor=first.name) from None
        return mapping, begin - base


class Ahead(Protocol):
    """Somebody who may have decrypted a tensor already."""

    def take(self, file: TensorFile, name: str) -> Any:
        """The tensor, handed out once; None where there is none. Raises as :meth:`Archive.get_tensor`."""
        ...


class Archive:
    """A file of tensors, open for reading; the protocol of ``safetensors.safe_open``.

    Tensors are ordinary ones that own their memory (clear tensors of at least 64 KiB are private mappings); nothing is
    cached, reading twice gives two tensors. Use it in a ``with`` block.

    Args:
        file: The open file.
        framework_name: ``pt`` or ``numpy``.
        device: Where tensors go.
        ahead: Who is asked first for whole tensors; it must make them for the same framework.
    """

    def __init__(
        self, file: TensorFile, framework_name: str = "pt", device: str | int = "cpu", ahead: Ahead | None = None
    ) -> None:
        self._file: TensorFile | None = file
        self._framework = framework(framework_name)
        self._ahead = ahead
        self._device = f"cuda:{device}" if isinstance(device, int) else str(device)

    def _open(self) -> TensorFile:
        if self._file is None:
            raise ConfigError("File is closed")
        return self._file

    def keys(self) -> list[str]:
        """Names of the tensors, sorted."""
        return sorted(self._open().header.tensors)

    def offset_keys(self) -> list[str]:
        """Names of the tensors in the order in which they lie in the file."""
        return list(self._open().header.tensors)

    def metadata(self) -> dict[str, str] | None:
        """The file's free-form metadata; names that begin with ``__`` are hidden. None when there is none at all."""
        header = self._open().header
        return public_metadata(header) if header.has_metadata else None

    def get_tensor(self, name: str) -> Any:
        """The whole tensor, decrypted into its own memory.

        Args:
            name: As in the file.

        Returns:
            A tensor of the file's dtype and shape.

        Raises:
            TensorNameError: No such tensor.
            AuthenticationError: Its bytes are not those that were signed.
            KeyAccessError: The master key is missing or wrong.
            ReadError: The file cannot be read.
        """
        file = self._open()
        return _whole(file, self._framework, self._device, file.info(name), self._ahead)

    def get_tensors(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Several tensors at once, the fastest way to get them.

        Args:
            names: As in the file; None takes all.

        Returns:
            Tensors by name, in file order.

        Raises:
            SecureLoaderError: As :meth:`get_tensor`; then none of them is handed out.
        """
        file, fw = self._open(), self._framework
        chosen = None if names is None else {file.info(name).name for name in names}
        infos = [t for t in file.header.tensors.values() if chosen is None or t.name in chosen]
        engine = _engine(file, fw, self._device)
        if engine is not None:
            return dict(zip((t.name for t in infos), _on_device(file, fw, engine, infos), strict=True))
        mapped = [t for t in infos if file.can_map(t, alone=False)]
        copied = [t for t in infos if not file.can_map(t, alone=False)]
        memory = empty_many(fw, [t.nbytes for t in copied])
        checks = [w for t in mapped for w in file.check_clear(t.name)]
        file.read(checks + [file.wanted(t.name, out) for t, (_, out) in zip(copied, memory, strict=True)])
        owners = {t.name: owner for t, (owner, _) in zip(copied, memory, strict=True)}
        if mapped:
            mapping, base = file.map_clear(mapped[0], mapped[-1])
            base -= mapped[0].start
            owners |= {t.name: fw.wrap(mapping, base + t.start, t.nbytes) for t in mapped}
        return {t.name: fw.to_device(fw.view(owners[t.name], t.dtype, t.shape), self._device) for t in infos}

    def get_slice(self, name: str) -> TensorSlice:
        """A tensor to be indexed: only the chunks that an index touches are read and verified.

        It stays usable after the archive was closed.

        Raises:
            TensorNameError: No such tensor.
        """
        file = self._open()
        return TensorSlice(file, self._framework, self._device, file.info(name), self._ahead)

    def get_tensor_info(self, name: str) -> TensorInfo:
        """dtype, shape and place of a tensor, from the header alone."""
        return self._open().info(name)

    @property
    def file(self) -> TensorFile:
        """The open file below, for adapters."""
        return self._open()

    def close(self) -> None:
        """Let go of the file; slices that were taken keep it open for themselves."""
        self._file = None

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Archive {self._file.source.path!r}>" if self._file else "<Archive, closed>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an open file cannot be pickled or copied")


class TensorSlice:
    """A tensor that is read when it is indexed; the protocol of safetensors' ``PySafeSlice``.

    Args:
        file: The open file.
        fw: Its framework.
        device: Where results go.
        info: The tensor.
        ahead: Who is asked first for all of it.
    """

    def __init__(
        self, file: TensorFile, fw: Framework, device: str, info: TensorInfo, ahead: Ahead | None = None
    ) -> None:
        self._file, self._framework, self._device, self._info = file, fw, device, info
        self._ahead = ahead

    def get_shape(self) -> list[int]:
        """Logical shape."""
        return list(self._info.shape)

    def get_dtype(self) -> str:
        """safetensors dtype code, for example ``"BF16"``."""
        return self._info.dtype

    def on(self, device: str | int) -> TensorSlice:
        """The same tensor, with results on another device, where there is a short way to it; otherwise as it is."""
        where = f"cuda:{device}" if isinstance(device, int) else str(device)
        if _engine(self._file, self._framework, where) is None:
            return self
        return TensorSlice(self._file, self._framework, where, self._info, self._ahead)

    def __getitem__(self, index: Any) -> Any:
        fw, info = self._framework, self._info
        fw.check_index(info, index)
        if index is Ellipsis:
            return _whole(self._file, fw, self._device, info, self._ahead)
        plan = slicing.plan(info, index, self._file.granule(info.name))
        file = self._file
        engine = _engine(file, fw, self._device)
        if engine is not None:
            parts = [file.part(info.name, r.start, r.stop) for r in plan.ranges]
            owner = engine.gather(parts, file.read_options, file.device_buffer_bytes)
            return fw.compact(fw.view(owner, info.dtype, plan.shape)[plan.index], plan.nbytes)
        if file.can_map(info):
            file.read([w for r in plan.ranges for w in file.check_clear(info.name, r.start, r.stop)])
            return fw.to_device(_mapped(file, fw, info)[index], self._device)
        owner, out = empty(fw, plan.nbytes)
        at, wanted = 0, []
        for r in plan.ranges:
            wanted.append(file.wanted(info.name, out[at : at + len(r)], r.start))
            at += len(r)
        file.read(wanted)
        part = fw.view(owner, info.dtype, plan.shape)[plan.index]
        # A result much smaller than what was read would keep all of it alive.
        return fw.to_device(fw.compact(part, plan.nbytes), self._device)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a slice of an open file cannot be pickled or copied")


def _whole(file: TensorFile, fw: Framework, device: str, info: TensorInfo, ahead: Ahead | None = None) -> Any:
    found = None if ahead is None else ahead.take(file, info.name)
    if found is not None:
        return fw.to_device(found, device)
    engine = _engine(file, fw, device)
    if engine is not None:
        return _on_device(file, fw, engine, [info])[0]
    if file.can_map(info):
        file.read(file.check_clear(info.name))
        return fw.to_device(_mapped(file, fw, info), device)
    owner, out = empty(fw, info.nbytes)
    file.read_into(info.name, out)
    return fw.to_device(fw.view(owner, info.dtype, info.shape), device)


def _engine(file: TensorFile, fw: Framework, device: str) -> Engine | None:
    return file.engine(device) if fw.name == "pt" and device != "cpu" else None


def _on_device(file: TensorFile, fw: Framework, engine: Engine, infos: Sequence[TensorInfo]) -> list[Any]:
    parts = [file.part(t.name) for t in infos]
    owners = engine.load(parts, file.read_options, file.device_buffer_bytes)
    return [fw.view(owner, t.dtype, t.shape) for owner, t in zip(owners, infos, strict=True)]


def _mapped(file: TensorFile, fw: Framework, info: TensorInfo) -> Any:
    return fw.view(fw.wrap(*file.map_clear(info), info.nbytes), info.dtype, info.shape)


def public_metadata(header: Header) -> dict[str, str]:
    """Metadata without the names that begin with ``__``."""
    return {k: v for k, v in header.metadata.items() if not k.startswith("__")}
