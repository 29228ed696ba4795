"""One file: what ``safe_open`` returns, with safetensors' own names (safetensors 0.8)."""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Self

from ..errors import ConfigError, NotEncryptedError, ReadError, SecureLoaderError, TensorNameError
from . import slicing
from .envelope import Envelope, Profile
from .header import Header
from .keys.provider import KeyRequest, KeyRing, WrappedKey
from .pipeline import ClearBytes, SealedBytes, annotate, decrypt_into, read_clear_into, run_jobs, verify_clear
from .secrets import Secret
from .source import FileSource
from .tensors import Framework, framework
from .trust import VerifiedHeader
from .types import TensorInfo

# Below this a copy is cheaper than a mapping of its own.
_MIN_MAP = 64 * 1024


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How the tensors of an open file are read.

    Attributes:
        full_integrity: Also check the signed SHA-256 digests of encrypted tensors.
        copy_clear: Copy clear tensors instead of mapping them.
        insecure_allow_unverified_clear: Hand out clear tensors of files that carry no digests for them.
    """

    full_integrity: bool = False
    copy_clear: bool = False
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
    """

    def __init__(
        self,
        source: FileSource,
        header: Header,
        verified: VerifiedHeader | None,
        keys: KeyRing,
        options: ReadOptions,
    ) -> None:
        self.source = source
        self.header = header
        self.verified = verified
        self.envelope: Envelope | None = None if verified is None else verified.envelope
        self._keys = keys
        self._options = options
        self._deks: dict[str, Secret] | None = None
        self._lock = threading.Lock()

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
        with self._lock:
            if self._deks is None:
                assert self.envelope is not None  # noqa: S101 - only sealed tensors get here
                sealed = self.envelope.records
                self._deks = unwrap_deks(self.envelope, self._keys, self.source.path) if sealed else {}
            return self._deks

    def read_into(self, name: str, out: memoryview, start: int = 0) -> None:
        """Fill ``out`` with the tensor's plaintext from byte ``start`` on.

        Raises:
            AuthenticationError: The bytes are not those that were signed; ``out`` was wiped.
            KeyAccessError, ReadError: As they say.
        """
        info = self.info(name)
        try:
            if not self.is_sealed(name):
                clear = self._clear(info)
                if clear is None:
                    self.source.read_into([out], self.header.body_start + info.start + start)
                else:
                    read_clear_into(clear, out, start)
                return
            envelope = self.envelope
            assert envelope is not None  # noqa: S101 - is_sealed says so
            record = envelope.records[name]
            digests = None
            if self._options.full_integrity and envelope.profile is not None:
                digests = envelope.profile.digests[name]
            sealed = SealedBytes(
                self.source,
                self.header.body_start + info.start,
                info.nbytes,
                envelope.chunk_size,
                record.iv,
                record.tags,
                digests,
                envelope.profile.digest_chunk_size if envelope.profile is not None else 0,
            )
            decrypt_into(sealed, envelope.algorithm.cipher(self._dek_table()[name]), out, start)
        except SecureLoaderError as e:
            raise annotate(e, self.source.path, name) from None

    def _clear(self, info: TensorInfo) -> ClearBytes | None:
        """A clear tensor of a signed file with its digests; None where nothing is signed about its bytes."""
        if self.envelope is None:
            return None
        profile = self.profile
        if profile is None:
            if info.nbytes and not self._options.insecure_allow_unverified_clear:
                raise NotEncryptedError(
                    "is stored in clear, and this CryptoTensors file signs no digest of it: anybody could have changed it",
                    hint="ask for insecure_allow_unverified_clear to read it all the same, or encrypt with secure-loader",
                )
            return None
        offset, digests = self.header.body_start + info.start, profile.digests[info.name]
        return ClearBytes(self.source, offset, info.nbytes, digests, profile.digest_chunk_size)

    def check_clear(self, name: str, start: int, stop: int) -> None:
        """Check the signed digests of part of a clear tensor that is about to be mapped; plain files have none.

        Raises:
            AuthenticationError: They differ.
            NotEncryptedError: The file signs no digests, and nobody said to accept that.
        """
        try:
            clear = self._clear(self.info(name))
            if clear is not None and start < stop:
                verify_clear(clear, start, stop)
        except SecureLoaderError as e:
            raise annotate(e, self.source.path, name) from None

    def map_clear(self, info: TensorInfo) -> tuple[mmap.mmap, int] | None:
        """A private, writable mapping of a clear tensor and its offset in there, or None where a copy is better.

        Each call maps anew, so that a change to one tensor is not seen by the next read.
        """
        if self._options.copy_clear or info.nbytes < _MIN_MAP:
            return None
        begin = self.header.body_start + info.start
        base = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        length = begin + info.nbytes - base
        try:
            mapping = mmap.mmap(self.source.fileno(), length, access=mmap.ACCESS_COPY, offset=base)
        except (OSError, ValueError) as e:
            why = f"cannot be mapped, truncated since it was opened? ({e})"
            raise ReadError(why, path=self.source.path, tensor=info.name) from None
        return mapping, begin - base


def unwrap_deks(envelope: Envelope, keys: KeyRing, path: str) -> dict[str, Secret]:
    """The DEKs of a verified file, by tensor name: one request.

    Raises:
        KeyAccessError: No master key, or the wrong one.
    """
    profile = envelope.profile
    request = KeyRequest(
        envelope.enc.kid,
        envelope.algorithm,
        None if profile is None else profile.model_id,
        None if profile is None else profile.file_id,
        None if profile is None else profile.kcv,
    )
    wrapped = [WrappedKey(r.wrapped_key, r.key_iv, r.key_tag) for r in envelope.records.values()]
    try:
        unwrapper = keys.resolve(request)
        try:
            deks = unwrapper.unwrap_many(wrapped)
        finally:
            unwrapper.close()
    except SecureLoaderError as e:
        raise annotate(e, path) from None
    return dict(zip(envelope.records, deks, strict=True))


class Archive:
    """A file of tensors, open for reading; the protocol of ``safetensors.safe_open``.

    Tensors are ordinary ones that own their memory (clear tensors of at least 64 KiB are private mappings); nothing is
    cached, reading twice gives two tensors. Use it in a ``with`` block.

    Args:
        file: The open file.
        framework_name: ``pt`` or ``numpy``.
        device: Where tensors go.
    """

    def __init__(self, file: TensorFile, framework_name: str = "pt", device: str | int = "cpu") -> None:
        self._file: TensorFile | None = file
        self._framework = framework(framework_name)
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
        return self._framework.to_device(_whole(file, self._framework, file.info(name)), self._device)

    def get_tensors(self) -> dict[str, Any]:
        """All tensors by name, in file order; several are decrypted at a time."""
        names = self.offset_keys()
        found: dict[str, Any] = {}

        def job(name: str) -> None:
            found[name] = self.get_tensor(name)

        run_jobs(job, names)
        return {name: found[name] for name in names}

    def get_slice(self, name: str) -> TensorSlice:
        """A tensor to be indexed: only the chunks that an index touches are read and verified.

        It stays usable after the archive was closed.

        Raises:
            TensorNameError: No such tensor.
        """
        file = self._open()
        return TensorSlice(file, self._framework, self._device, file.info(name))

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
    """

    def __init__(self, file: TensorFile, fw: Framework, device: str, info: TensorInfo) -> None:
        self._file, self._framework, self._device, self._info = file, fw, device, info

    def get_shape(self) -> list[int]:
        """Logical shape."""
        return list(self._info.shape)

    def get_dtype(self) -> str:
        """safetensors dtype code, for example ``"BF16"``."""
        return self._info.dtype

    def __getitem__(self, index: Any) -> Any:
        fw, info = self._framework, self._info
        fw.check_index(info, index)
        if index is Ellipsis:
            return fw.to_device(_whole(self._file, fw, info), self._device)
        plan = slicing.plan(info, index, self._file.granule(info.name))
        if not self._file.is_sealed(info.name):
            mapped = self._file.map_clear(info)
            if mapped is not None:
                for r in plan.ranges:
                    self._file.check_clear(info.name, r.start, r.stop)
                return fw.to_device(fw.map(*mapped, info)[index], self._device)
        owner, out = fw.empty(plan.nbytes)
        at = 0
        for r in plan.ranges:
            self._file.read_into(info.name, out[at : at + len(r)], r.start)
            at += len(r)
        part = fw.view(owner, info.dtype, plan.shape)[plan.index]
        # A result much smaller than what was read would keep all of it alive.
        return fw.to_device(fw.compact(part, plan.nbytes), self._device)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a slice of an open file cannot be pickled or copied")


def _whole(file: TensorFile, fw: Framework, info: TensorInfo) -> Any:
    if not file.is_sealed(info.name):
        mapped = file.map_clear(info)
        if mapped is not None:
            file.check_clear(info.name, 0, info.nbytes)
            return fw.map(*mapped, info)
    owner, out = fw.empty(info.nbytes)
    file.read_into(info.name, out)
    return fw.view(owner, info.dtype, info.shape)


def public_metadata(header: Header) -> dict[str, str]:
    """Metadata without the names that begin with ``__``."""
    return {k: v for k, v in header.metadata.items() if not k.startswith("__")}
