"""Writing one encrypted file: layout, encryption in bounded memory, and the header last.

Tags and digests have fixed lengths, so the header's length is known before the first byte is sealed: the body is
written behind the room left for it, and the header goes in front when all tags are there. A file that was not
finished has no header at all.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from ..errors import ConfigError, FormatError, SecureLoaderError
from . import envelope as env
from . import header as hdr
from .aead import (
    CHUNK_SIZE,
    MAX_SINGLE_SEAL,
    NONCE_BYTES,
    TAG_BYTES,
    Algorithm,
    Cipher,
    chunk_count,
    chunk_nonce,
    seal_into,
    wrap_key,
)
from .atomic import atomic_file, pwrite_all
from .keys.jwk import MasterKey, SigningKey
from .keys.provider import key_check_value
from .output import Output, reserve
from .policy import default_policy
from .pool import run_jobs
from .recipient import Recipient, check_recipients
from .report import Advance, no_progress
from .secrets import Secret
from .signing import sign_header, sign_hint
from .source import memory_file
from .types import TensorInfo

NOTICE = "encrypted: load it with secure_loader (loader='secure', --load-format secure); other readers see noise"
MIN_WRITE_CHUNK, MAX_WRITE_CHUNK = 64 * 1024, 16 * 1024 * 1024


class TensorBytes(Protocol):
    """Where the plaintext of a tensor comes from that is not in memory."""

    def read_into(self, out: memoryview, start: int) -> None:
        """Fill ``out`` with the tensor's bytes from ``start`` on; called from several threads."""
        ...


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """A tensor to be written.

    Attributes:
        name: Its key in the file.
        dtype: safetensors code.
        shape: Logical shape.
        nbytes: Its size.
        data: Its bytes, or what reads them. Bytes in memory are sealed from where they are, without a copy.
        encrypt: Whether it is sealed or stored in clear.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    data: memoryview | TensorBytes
    encrypt: bool = True


@dataclass(frozen=True)
class Publication:
    """Who publishes what: everything that the files of one release of a model share.

    Attributes:
        master: Wraps the DEKs.
        signing: Signs headers and manifest.
        model_id: What the publisher calls the model.
        release: Grows with every publication.
        version: CryptoTensors version, ``"2"`` (chunks) or ``"1"`` (whole tensors; for old readers).
        chunk_size: Bytes per chunk, a power of two from 64 KiB to 16 MiB; version 2 only.
        created: RFC 3339, UTC.
        policy: Embedded rules.
        recipients: For whom the master key is wrapped, sorted.

    Raises:
        ConfigError: A value outside these bounds.
    """

    master: MasterKey
    signing: SigningKey
    model_id: str
    release: int = 1
    version: str = "2"
    chunk_size: int = CHUNK_SIZE
    created: str = field(default_factory=lambda: dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
    policy: env.Policy = field(default_factory=default_policy)
    recipients: tuple[Recipient, ...] = ()

    def __post_init__(self) -> None:
        size = self.chunk_size
        if size & (size - 1) or not MIN_WRITE_CHUNK <= size <= MAX_WRITE_CHUNK:
            raise ConfigError(f"chunk_size must be a power of two from 64 KiB to 16 MiB, not {size}")
        if self.version not in ("1", "2"):
            raise ConfigError(f"version must be '1' or '2', not {self.version!r}")
        if type(self.release) is not int or not 0 <= self.release <= env.MAX_RELEASE:
            raise ConfigError(f"release must be a whole number from 0 to 2**53 - 1, not {self.release!r}")
        try:
            env.check_model_id(self.model_id)
            check_recipients(self.recipients)
        except FormatError as e:
            raise ConfigError(e.message) from None

    @property
    def algorithm(self) -> Algorithm:
        """The AEAD, which the master key decides."""
        return self.master.algorithm


def write_file(
    path: Path,
    tensors: Sequence[PlainTensor],
    metadata: Mapping[str, str],
    publication: Publication,
    *,
    shard: tuple[int, int] = (1, 1),
    advance: Advance = no_progress,
    overwrite: bool = True,
) -> None:
    """Write one encrypted and signed file, atomically.

    Args:
        path: Final name.
        tensors: In the order in which they shall lie in the file. Empty ones are stored in clear, and moved between
            others so that no two share an offset.
        metadata: Free-form; names that begin with ``__`` are ours.
        publication: Keys and names.
        shard: Position and number of shards.
        advance: Called with the bytes just done.
        overwrite: Replace an existing file.

    Raises:
        ConfigError: Reserved metadata names, or a tensor too large for version 1.
        WriteError: Disk full, no permission.
    """
    layout = _Layout(_spread_empty(tensors), metadata, publication, shard)
    with atomic_file(path, overwrite=overwrite) as fd:
        _write(fd, layout, advance)


def seal_bytes(tensors: Sequence[PlainTensor], metadata: Mapping[str, str], publication: Publication) -> bytes:
    """The bytes of an encrypted and signed file; arguments and errors as for :func:`write_file`."""
    layout = _Layout(_spread_empty(tensors), metadata, publication, (1, 1))
    with memory_file() as file:
        _write(file.fileno(), layout, no_progress)
        file.seek(0)
        return file.read()


def _write(fd: int, layout: _Layout, advance: Advance) -> None:
    reserve(fd, len(layout.prefix) + layout.body_bytes)
    with Output(fd) as output:
        run_jobs(lambda piece: _seal_piece(output, layout, piece, advance), layout.pieces())
    prefix = layout.finish()
    if len(prefix) != len(layout.prefix):
        raise FormatError("the header changed its length while it was written")
    pwrite_all(fd, memoryview(prefix), 0)


@dataclass(frozen=True, slots=True)
class _Piece:
    """One chunk of one tensor to be sealed, or one step of a clear one to be copied."""

    tensor: int
    index: int
    start: int
    stop: int


class _Layout:
    """Where everything of a file goes, and the header that says so."""

    def __init__(
        self,
        tensors: Sequence[PlainTensor],
        metadata: Mapping[str, str],
        publication: Publication,
        shard: tuple[int, int],
    ) -> None:
        _check_names(tensors, metadata)
        self._publication = publication
        self._metadata = dict(metadata) | {env.NOTICE: NOTICE}
        self.tensors = tensors
        self.chunk_size = publication.chunk_size if publication.version == "2" else None
        self.digest_size = self.chunk_size or CHUNK_SIZE
        self.infos: list[TensorInfo] = []
        for t in tensors:
            start = self.infos[-1].stop if self.infos else 0
            self.infos.append(TensorInfo(t.name, t.dtype, t.shape, start, start + t.nbytes))
        self.body_bytes = self.infos[-1].stop if self.infos else 0
        self._envelope, self.ciphers = self._seal_keys(shard)
        self.tags = [bytearray(TAG_BYTES * self._chunks(t)) if t.encrypt else bytearray() for t in tensors]
        self.digests = [bytearray(32 * -(-t.nbytes // self.digest_size)) for t in tensors]
        self.prefix = hdr.file_prefix(self._header_json(pretend=True))

    def _chunks(self, t: PlainTensor) -> int:
        return 1 if self.chunk_size is None else chunk_count(t.nbytes, self.chunk_size)

    def _seal_keys(self, shard: tuple[int, int]) -> tuple[env.Envelope, list[Cipher | None]]:
        p = self._publication
        master = p.algorithm.cipher(p.master.secret)
        records: dict[str, env.TensorRecord] = {}
        ciphers: list[Cipher | None] = []
        nonces: set[bytes] = set()
        for t in self.tensors:
            if not t.encrypt:
                ciphers.append(None)
                continue
            if self.chunk_size is None and t.nbytes > MAX_SINGLE_SEAL:
                raise ConfigError("is too large for version 1; use version 2", tensor=t.name)
            with Secret(bytearray(secrets.token_bytes(p.algorithm.key_bytes))) as dek:
                key_iv = secrets.token_bytes(NONCE_BYTES)
                while key_iv in nonces:
                    key_iv = secrets.token_bytes(NONCE_BYTES)
                nonces.add(key_iv)
                wrapped, key_tag = wrap_key(master, key_iv, dek)
                ciphers.append(p.algorithm.cipher(dek))
            # A zero counter leaves room for 2**32 chunks, so it can never overflow.
            iv = secrets.token_bytes(NONCE_BYTES if self.chunk_size is None else 8).ljust(NONCE_BYTES, b"\0")
            records[t.name] = env.TensorRecord(wrapped, key_iv, key_tag, iv, b"")
        file_id = secrets.token_bytes(16)
        profile = env.Profile(
            file_id=file_id,
            model_id=p.model_id,
            release=p.release,
            shard=shard,
            created=p.created,
            kcv=key_check_value(p.master.secret, file_id),
            digest_chunk_size=self.digest_size,
            digests={},
            recipients=p.recipients,
        )
        envelope = env.Envelope(
            version=p.version,
            algorithm=p.algorithm,
            chunk_size=self.chunk_size,
            enc=env.KeyHint(p.master.kid, p.algorithm.name, "oct"),
            sign=sign_hint(p.signing),
            records=records,
            policy=p.policy,
            signature=b"",
            profile=profile,
        )
        return envelope, ciphers

    def nonce(self, piece: _Piece) -> bytes:
        iv = self._envelope.records[self.tensors[piece.tensor].name].iv
        return iv if self.chunk_size is None else chunk_nonce(iv, piece.index)

    def pieces(self) -> list[_Piece]:
        """Everything to be written, in file order."""
        out = []
        for i, t in enumerate(self.tensors):
            step = (self.chunk_size or max(1, t.nbytes)) if t.encrypt else self.digest_size
            out += [_Piece(i, n, s, min(s + step, t.nbytes)) for n, s in enumerate(range(0, t.nbytes, step))]
        return out

    def _header_json(self, *, pretend: bool) -> bytes:
        tagged = {
            t.name: replace(self._envelope.records[t.name], tags=bytes(tags))
            for t, tags in zip(self.tensors, self.tags, strict=True)
            if t.encrypt
        }
        assert self._envelope.profile is not None  # noqa: S101 - made above
        digests = {t.name: bytes(d) for t, d in zip(self.tensors, self.digests, strict=True)}
        envelope = replace(self._envelope, records=tagged, profile=replace(self._envelope.profile, digests=digests))
        metadata = self._metadata | env.metadata(envelope)
        return sign_header(metadata, self.infos, self._publication.signing, pretend=pretend)

    def finish(self) -> bytes:
        """The signed header, as it stands in the file."""
        return hdr.file_prefix(self._header_json(pretend=False))


def _seal_piece(output: Output, layout: _Layout, piece: _Piece, advance: Advance) -> None:
    tensor, cipher = layout.tensors[piece.tensor], layout.ciphers[piece.tensor]
    n = piece.stop - piece.start
    with output.buffer(n + TAG_BYTES) as sealed:
        stored = sealed[:n]
        if isinstance(tensor.data, memoryview):
            plain = tensor.data[piece.start : piece.stop]
        else:
            plain = stored
            try:
                tensor.data.read_into(stored, piece.start)
            except SecureLoaderError as e:
                raise type(e)(e.message, hint=e.hint, path=e.path, tensor=tensor.name) from None
        if cipher is not None:
            seal_into(cipher, layout.nonce(piece), plain, sealed)
            layout.tags[piece.tensor][TAG_BYTES * piece.index : TAG_BYTES * (piece.index + 1)] = sealed[n:]
        elif plain is not stored:
            # Its owner may change it at any time; what is digested must be what is written.
            stored[:] = plain
        digests = layout.digests[piece.tensor]
        for start in range(0, n, layout.digest_size):
            at = 32 * ((piece.start + start) // layout.digest_size)
            digests[at : at + 32] = hashlib.sha256(stored[start : start + layout.digest_size]).digest()
        output.write(stored, len(layout.prefix) + layout.infos[piece.tensor].start + piece.start)
    advance(n)


def _spread_empty(tensors: Sequence[PlainTensor]) -> list[PlainTensor]:
    """Keep the order, but put no two empty tensors at one offset while there are others to put between them.

    CryptoTensors 0.2.3 checks signatures over tensors sorted from a map without order, so equal offsets are a coin toss
    there. Empty tensors are stored in clear, because it cannot hand encrypted ones to torch.
    """
    full = [t for t in tensors if t.nbytes]
    empty = [replace(t, encrypt=False) for t in tensors if not t.nbytes]
    out: list[PlainTensor] = []
    for t in full:
        if empty:
            out.append(empty.pop(0))
        out.append(t)
    return out + sorted(empty, key=lambda t: t.name)


def _check_names(tensors: Sequence[PlainTensor], metadata: Mapping[str, str]) -> None:
    reserved = sorted(k for k in metadata if k.startswith("__"))
    if reserved:
        raise ConfigError(f"metadata name {reserved[0]!r} is reserved: it begins with '__'")
    names = [t.name for t in tensors]
    if "__metadata__" in names:
        raise ConfigError("a tensor cannot be called '__metadata__'")
    if len(set(names)) < len(names):
        raise ConfigError("two tensors have the same name")
