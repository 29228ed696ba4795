"""Decrypting a model folder: back to what other tools read, everything verified on the way."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from ..errors import ConfigError
from . import header as hdr
from . import index, strict_json
from . import manifest as mf
from .archive import TensorFile, public_metadata
from .atomic import atomic_file, pwrite_all, write_bytes
from .checkpoint import Checkpoint
from .copying import copy_file
from .output import reserve, start_writeback
from .report import Advance, progress_bar
from .secrets import wipe
from .session import KeySources, Session, TrustSources
from .staging import discard, staged_folder
from .survey import plain_name
from .writer import ModelReport, check_apart

# Read at once: several chunks, so that several threads decrypt.
_STEP = 16 << 20


def decrypt_model(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    keys: KeySources | None = None,
    trust: TrustSources | None = None,
    force: bool = False,
    progress: bool | None = None,
) -> ModelReport:
    """Turn an encrypted model folder back into a plain one. Everything is verified on the way.

    Args:
        src: An encrypted folder.
        dst: The new folder, in clear.
        keys: As for :func:`core.session.safe_open`.
        trust: As for :func:`core.session.safe_open`.
        force: Replace a model folder at ``dst``.
        progress: Show a bar; None decides by the terminal.

    Raises:
        SecureLoaderError: As loading the model would; and WriteError.
    """
    started = time.perf_counter()
    source, target = Path(src).absolute(), Path(dst).absolute()
    check_apart(source, target)
    checkpoint = Checkpoint(source, Session(keys=keys, trust=trust))
    manifest = checkpoint.manifest
    if manifest is None:
        raise ConfigError("is not an encrypted folder", path=source)
    shards = checkpoint.shards()
    others = [n for n in manifest.files if n not in shards]
    total = sum(manifest.files[n].nbytes for n in shards)
    tensors = encrypted = nbytes = 0
    fingerprint = {"decrypt": str(source), "created": manifest.created, "at": time.time_ns()}
    with (
        staged_folder(target, fingerprint=fingerprint, force=force) as staging,
        progress_bar(total, f"Decrypting {source.name}", show=progress) as advance,
    ):
        try:
            for shard in shards:
                file = checkpoint.open(shard)
                with file.source:
                    out = _place(staging.folder, shard)
                    _write_plain(file, out, advance)
                    tensors += len(file.header.tensors)
                    nbytes += file.header.body_bytes
                    encrypted += len(file.envelope.records) if file.envelope else 0
            for name in others:
                out = _place(staging.folder, name)
                copy_file(source / name, out)
                mf.check_copy(out, name, manifest)
                if name.endswith(".json") and ".safetensors.index" in name:
                    _rename_shards(out, shards)
        except BaseException:
            # What was written so far is plaintext; nobody asked for half a model in clear.
            discard(target)
            raise
    return ModelReport(
        folder=str(target),
        model_id=manifest.model_id,
        release=manifest.release,
        shards=len(shards),
        tensors=tensors,
        encrypted=encrypted,
        tensor_bytes=nbytes,
        files=len(others),
        left_out=(),
        reused_shards=0,
        seconds=time.perf_counter() - started,
    )


def _place(folder: Path, name: str) -> Path:
    out = folder / plain_name(name)
    out.parent.mkdir(parents=True, exist_ok=True)
    return out


def _rename_shards(path: Path, shards: list[str]) -> None:
    doc = index.load(path)
    doc["weight_map"] = {t: plain_name(s) for t, s in index.parse(path, shards).items()}
    write_bytes(path, strict_json.dumps(doc, sort_keys=False).encode())


def _write_plain(file: TensorFile, target: Path, advance: Advance) -> None:
    """One plain safetensors file; its tensors keep their place."""
    header, metadata = file.header, public_metadata(file.header)
    doc = json.loads(hdr.canonical_json(metadata, header.tensors.values()))
    if not metadata:
        del doc["__metadata__"]
    prefix = hdr.file_prefix(strict_json.dumps(doc, sort_keys=False).encode(), alignment=8)
    with atomic_file(target) as fd:
        reserve(fd, len(prefix) + header.body_bytes)
        pwrite_all(fd, memoryview(prefix), 0)
        for t in header.tensors.values():
            # Whole chunks, so that none is decrypted twice; v1 tensors come in one piece.
            granule = file.granule(t.name)
            step = max(granule, _STEP // granule * granule)
            buffer = memoryview(bytearray(min(step, t.nbytes)))
            try:
                for start in range(0, t.nbytes, step):
                    view = buffer[: min(step, t.nbytes - start)]
                    file.read_into(t.name, view, start)
                    pwrite_all(fd, view, len(prefix) + t.start + start)
                    start_writeback(fd, len(prefix) + t.start + start, view.nbytes)
                    advance(view.nbytes)
            finally:
                wipe(buffer)
