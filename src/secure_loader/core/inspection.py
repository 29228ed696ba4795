"""Looking at encrypted models: what is there (no key, no trust needed), and whether it is what was signed (no key)."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import config as cfg
from ..errors import ConfigError, FormatError, MissingFileError, SecureLoaderError
from . import envelope as env
from . import manifest as mf
from . import oms_check
from .archive import TensorFile
from .checkpoint import Checkpoint
from .header import Header
from .pipeline import ClearBytes, Digests, Wanted, annotate, read
from .report import Advance, progress_bar
from .session import Session, TrustSources
from .source import FileSource, read_header, read_small_file
from .trust_chain import describe


@dataclass(frozen=True, slots=True)
class FileSummary:
    """One safetensors file as its header describes itself.

    Attributes:
        name: Path, relative to the folder.
        nbytes: Size of the file.
        tensors: Number of tensors.
        encrypted: How many of them are encrypted.
        tensor_bytes: Size of all tensors.
        dtypes: Number of tensors by dtype.
        version: CryptoTensors version, None for a plain file.
        profile: 1, or None for plain and CryptoTensors files.
        algorithm: AEAD, or None.
        chunk_size: Bytes per chunk, or None.
        key_id: Name of the master key, or None.
        signer_key_id: Name of the signing key, or None.
        model_id: As signed, or None.
        release: As signed, or None.
        created: As signed, or None.
        local_policy: Embedded Rego text, or None.
        recipients: For whom the master key is wrapped.
        remote_policy: Embedded Rego text for the key broker, or None.
        certificate: What the signer's certificate says, or None.
        post_quantum: Whether there is a second signature, ML-DSA-65.
    """

    name: str
    nbytes: int
    tensors: int
    encrypted: int
    tensor_bytes: int
    dtypes: dict[str, int]
    version: str | None
    profile: int | None
    algorithm: str | None
    chunk_size: int | None
    key_id: str | None
    signer_key_id: str | None
    model_id: str | None
    release: int | None
    created: str | None
    local_policy: str | None
    recipients: tuple[str, ...] = ()
    remote_policy: str | None = None
    certificate: str | None = None
    post_quantum: bool = False


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a file or folder says about itself. Nothing of it was verified.

    Attributes:
        path: What was looked at.
        files: Its safetensors files.
        other_files: Size by path of the other files.
        has_manifest: Whether the folder has a signed manifest.
        model_id: From the manifest, or the only file.
        release: Likewise.
        created: Likewise.
    """

    path: str
    files: tuple[FileSummary, ...]
    other_files: dict[str, int]
    has_manifest: bool
    model_id: str | None
    release: int | None
    created: str | None

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """One tensor as its file's header describes it. Nothing of it was verified.

    Attributes:
        file: Path of its file, relative to the folder.
        name: Its name.
        dtype: safetensors code.
        shape: Logical shape.
        nbytes: Stored size.
        encrypted: Whether it is sealed or stored in clear.
    """

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    encrypted: bool


@dataclass(frozen=True, slots=True)
class Verification:
    """What was verified.

    Attributes:
        path: What was looked at.
        model_id: As signed.
        release: As signed.
        signer: Who vouches for it, in the operator's words.
        signer_key_id: Name of the signer's key.
        files: Number of files checked.
        tensors: Number of tensors whose descriptions the signature covers.
        tensor_bytes: Their size.
        full: Whether every stored byte was compared with its signed digest.
        seconds: Wall time.
        model_signer: Whose ``model.sig`` was checked as well, in the operator's words, or None.
    """

    path: str
    model_id: str | None
    release: int | None
    signer: str
    signer_key_id: str
    files: int
    tensors: int
    tensor_bytes: int
    full: bool
    seconds: float
    model_signer: str | None = None

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """Describe a file or a model folder, without a key and without trusting it.

    Raises:
        FormatError: A header or the manifest is malformed.
        SourceError: Something cannot be read.
    """
    where = Path(path)
    if not where.is_dir():
        summary = _summary(where, where.name)
        return Inspection(
            str(where),
            (summary,),
            {},
            has_manifest=False,
            model_id=summary.model_id,
            release=summary.release,
            created=summary.created,
        )
    names = list(mf.list_files(where))
    files = tuple(_summary(where / n, n) for n in names if n.endswith(".safetensors"))
    others = {n: _size(where / n) for n in names if not n.endswith(".safetensors") and n != mf.MANIFEST}
    model_id = release = created = None
    if mf.MANIFEST in names:
        manifest = mf.peek(read_small_file(str(where / mf.MANIFEST), mf.MAX_MANIFEST))
        model_id, release, created = manifest.model_id, manifest.release, manifest.created
    elif not files:
        raise FormatError("holds no safetensors files", path=where)
    return Inspection(str(where), files, others, mf.MANIFEST in names, model_id, release, created)


def _size(path: Path) -> int:
    with FileSource(path) as source:
        return source.size


def list_tensors(path: str | os.PathLike[str]) -> Iterator[TensorSummary]:
    """The tensors of a file or a model folder, in the order in which they are stored; raises as :func:`inspect`."""
    where = Path(path)
    names = [n for n in mf.list_files(where) if n.endswith(".safetensors")] if where.is_dir() else [where.name]
    for name in names:
        with FileSource(where / name if where.is_dir() else where) as source:
            header, envelope = _read(source)
        sealed = envelope.records.keys() if envelope else ()
        for t in header.tensors.values():
            yield TensorSummary(name, t.name, t.dtype, t.shape, t.nbytes, t.name in sealed)


def _summary(path: Path, name: str) -> FileSummary:
    with FileSource(path) as source:
        return _describe(name, source.size, *_read(source))


def _read(source: FileSource) -> tuple[Header, env.Envelope | None]:
    header = read_header(source)
    try:
        return header, env.parse(header) if env.is_encrypted(header) else None
    except SecureLoaderError as e:
        raise annotate(e, source.path) from None


def _describe(name: str, nbytes: int, header: Header, envelope: env.Envelope | None) -> FileSummary:
    profile = None if envelope is None else envelope.profile
    return FileSummary(
        name=name,
        nbytes=nbytes,
        tensors=len(header.tensors),
        encrypted=0 if envelope is None else len(envelope.records),
        tensor_bytes=header.body_bytes,
        dtypes=dict(Counter(t.dtype for t in header.tensors.values())),
        version=None if envelope is None else envelope.version,
        profile=None if profile is None else 1,
        algorithm=None if envelope is None else envelope.algorithm.name,
        chunk_size=None if envelope is None else envelope.chunk_size,
        key_id=None if envelope is None else envelope.enc.kid,
        signer_key_id=None if envelope is None else envelope.sign.kid,
        certificate=describe(envelope.sign.x5c) if envelope is not None and envelope.sign.x5c else None,
        post_quantum=envelope is not None and envelope.second is not None,
        model_id=None if profile is None else profile.model_id,
        release=None if profile is None else profile.release,
        created=None if profile is None else profile.created,
        local_policy=None if envelope is None else envelope.policy.local,
        recipients=() if profile is None else tuple(r.kid for r in profile.recipients),
        remote_policy=None if envelope is None else envelope.policy.remote,
    )


def identify(path: str | os.PathLike[str]) -> dict[str, str]:
    """By what one file can be revoked: ``file_id`` of a file of profile 1, ``sha256`` of what a manifest signs.

    Raises:
        ConfigError: A folder, whose release or manifest is revoked; or a file without profile 1, in which everything
            that could name it can be changed under its signature.
        SecureLoaderError: It cannot be read, or is neither signed file nor manifest.
    """
    place = Path(path)
    if place.is_dir():
        raise ConfigError(
            "is a folder",
            path=place,
            hint=f"revoke the release with --model and --release, or --file {place / mf.MANIFEST}",
        )
    if place.name == mf.MANIFEST:
        return {"sha256": mf.revocable_digest(mf.peek(read_small_file(str(place), mf.MAX_MANIFEST)))}
    try:
        with FileSource(place) as source:
            header = read_header(source)
        profile = env.parse(header).profile
    except SecureLoaderError as e:
        raise annotate(e, str(place)) from None
    if profile is None:
        raise ConfigError("has no profile 1, and so nothing to revoke it by", path=place, hint="revoke its signer")
    return {"file_id": profile.file_id.hex()}


def verify(
    path: str | os.PathLike[str],
    *,
    trust: TrustSources | None = None,
    full: bool = False,
    oms_keys: Sequence[str | os.PathLike[str]] | None = None,
    progress: bool | None = None,
) -> Verification:
    """Check a file or a model folder against its publisher's signature. No key is needed.

    Args:
        path: A file, or a folder.
        trust: Whom to trust, as for :func:`core.session.safe_open`.
        full: Also compare every stored byte of every tensor with its signed SHA-256 digest, and that of every file with
            ``model.sig`` where that is checked.
        oms_keys: Public EC keys (PEM files, and folders of them): demand a ``model.sig`` that one of them signed. None
            takes the settings', then the user's own, and demands what the settings do; an empty list pays no heed to any.
        progress: Show a bar with ``full``; None decides by the terminal.

    Returns:
        What was verified. There is no other way to return: whatever is wrong raises.

    Raises:
        VerificationError: Not what a trusted publisher signed; the subclass says how.
        FormatError, SourceError: As they say.
    """
    started = time.perf_counter()
    where = Path(path)
    config = cfg.load({} if oms_keys is None else {"oms_keys": oms_keys, "require_oms": len(oms_keys) > 0})
    session = Session(keys=[], trust=trust, config=config)
    if not where.exists():
        raise MissingFileError("no such file or folder", path=where)
    folder = where if where.is_dir() else None
    if folder is None and oms_keys:
        raise ConfigError(f"is one file, and {mf.MODEL_SIGNATURE} signs folders", path=where)
    checkpoint = None if folder is None else Checkpoint(folder, session)
    names = [""] if checkpoint is None else checkpoint.shards()
    tensors = nbytes = 0
    model_id: str | None = None
    release: int | None = None
    signer = None if checkpoint is None else checkpoint.signer
    hashed = list(mf.list_files(where)) if checkpoint is not None and checkpoint.model_signer is not None else []
    total = _total(where, [*names, *hashed]) if full else 0
    with progress_bar(total, "Verifying", show=progress if full else False) as advance:
        for name in names:
            file = session.open_file(where) if checkpoint is None else checkpoint.open(name)
            with file.source:
                if full:
                    _check_all(file, advance)
                tensors += len(file.header.tensors)
                nbytes += file.header.body_bytes
                if file.profile is not None:
                    model_id, release = file.profile.model_id, file.profile.release
                if signer is None and file.verified is not None:
                    signer = file.verified.signer
        if full and checkpoint is not None and hashed:
            oms_check.check(checkpoint.folder, session.config, advance=advance)
    if checkpoint is not None and checkpoint.manifest is not None:
        model_id, release = checkpoint.manifest.model_id, checkpoint.manifest.release
        count = len(checkpoint.manifest.files)
    else:
        count = len(names)
    return Verification(
        path=str(where),
        model_id=model_id,
        release=release,
        signer=signer.name if signer else "nobody",
        signer_key_id=signer.key.kid if signer else "",
        files=count,
        tensors=tensors,
        tensor_bytes=nbytes,
        full=full,
        seconds=time.perf_counter() - started,
        model_signer=None if checkpoint is None or checkpoint.model_signer is None else checkpoint.model_signer.name,
    )


def _total(where: Path, names: list[str]) -> int:
    return sum((where / n).stat().st_size for n in names if (where / n).is_file())


def _check_all(file: TensorFile, advance: Advance) -> None:
    profile = file.profile
    for t in _tensors(file):
        if profile is None:
            raise FormatError(
                "carries no digests; only files with profile 1 can be verified in full", path=file.source.path
            )
        # Encrypted ones too: the digests are of the bytes as stored.
        digests = Digests(profile.digests[t.name], profile.digest_chunk_size)
        stored = ClearBytes(file.source, file.header.body_start + t.start, t.nbytes, digests)
        read([Wanted(t.name, stored, None, 0, t.nbytes)])
        advance(t.nbytes)


def _tensors(file: TensorFile) -> Iterator[Any]:
    return iter(file.header.tensors.values())
