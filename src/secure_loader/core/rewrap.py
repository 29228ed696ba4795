"""New keys for an encrypted model: DEKs are wrapped again, headers signed again, the payload is copied as it is."""

from __future__ import annotations

import datetime as dt
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import ConfigError
from . import envelope as env
from . import header as hdr
from . import manifest as mf
from .aead import NONCE_BYTES, wrap_key
from .archive import TensorFile
from .atomic import atomic_file, pwrite_all
from .checkpoint import Checkpoint
from .copying import copy_file, copy_range
from .keys.jwk import MasterKey, SigningKey
from .keys.provider import key_check_value
from .policy_lint import chosen
from .rekey import Change
from .report import Advance, progress_bar
from .seal import Publication
from .session import KeySources, Session, TrustSources
from .signing import sign_header, sign_hint
from .staging import discard, staged_folder
from .survey import is_signature
from .unwrapping import unwrap_deks
from .writer import ModelReport, resolve_signing, write_manifest


def rewrap_model(
    path: str | os.PathLike[str],
    *,
    key: str | MasterKey | None = None,
    new_key: bool = False,
    recipients: Sequence[str] = (),
    remove: Sequence[str] = (),
    policy: str | os.PathLike[str] | None = None,
    remote_policy: str | os.PathLike[str] | None = None,
    signing_key: str | SigningKey | None = None,
    certificate: str | os.PathLike[str] | None = None,
    keys: KeySources | None = None,
    trust: TrustSources | None = None,
    release: int | None = None,
    progress: bool | None = None,
) -> ModelReport:
    """Put a model folder under another master key, change for whom it is wrapped or its policies, and sign it again.

    The folder is rebuilt beside itself, sharing blocks where the file system can, and swapped in when complete; until
    then the old one stays as it is. Tensor bytes are not decrypted.

    Args:
        path: An encrypted folder.
        key: The new master key, as for :func:`core.writer.encrypt_model`; for the same algorithm as the old one. None
            keeps the old one where recipients change, else takes the only one in the home folder.
        new_key: Make a new master key, that nobody keeps but the recipients.
        recipients: Who can open it from now on besides those who can, as for :func:`core.writer.encrypt_model`.
        remove: Names of recipients who cannot any more.
        policy: A file with a new local policy, as for :func:`core.writer.encrypt_model`; None keeps the old one, which is not
            asked where ``signing_key`` is the one that signed it.
        remote_policy: Likewise, for the key broker.
        signing_key: Who signs from now on.
        certificate: As for :func:`core.writer.encrypt_model`.
        keys: Where the old master key is.
        trust: Whom to trust with the old signature.
        release: The new release; None keeps the old one.
        progress: Show a bar; None decides by the terminal.

    Raises:
        SecureLoaderError: As loading the model would; WriteError; ConfigError for a key of another algorithm, for recipients
            who are not known, or where nobody could open it any more.
    """
    started = time.perf_counter()
    folder = Path(path).absolute()
    if new_key and key is not None:
        raise ConfigError("a new master key and the name of one exclude each other")
    signing = resolve_signing(signing_key, key, certificate)
    checkpoint = Checkpoint(folder, Session(keys=keys, trust=trust, publisher=signing.verify_key()))
    manifest = checkpoint.manifest
    if manifest is None:
        raise ConfigError("is not an encrypted folder", path=folder)
    shards = checkpoint.shards()
    # One shard speaks for all: they share the master key.
    file = checkpoint.open(shards[0])
    with file.source:
        policies = chosen(policy, remote_policy, file.envelope.policy if file.envelope else None)
        master, entries = Change(key, new_key, tuple(recipients), tuple(remove)).apply(file, checkpoint.session)
    publication = Publication(
        master=master,
        signing=signing,
        model_id=manifest.model_id,
        release=manifest.release if release is None else release,
        created=dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        recipients=entries,
        policy=policies,
    )
    # What signs the old folder would be a bad signature in the new one.
    left_out = sorted(n for n in {*manifest.files, *mf.list_files(folder)} if is_signature(n))
    taken = [name for name in manifest.files if name not in left_out]
    total = sum(manifest.files[n].nbytes for n in shards)
    tensors = encrypted = nbytes = 0
    with (
        staged_folder(folder, fingerprint={"rewrap": secrets.token_hex(8)}, force=True) as staging,
        progress_bar(total, f"Rewrapping {folder.name}", show=progress) as advance,
    ):
        try:
            for name in taken:
                target = staging.folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                if name not in shards:
                    copy_file(folder / name, target)
                    mf.check_copy(target, name, manifest)  # it is about to be signed again
                    continue
                file = checkpoint.open(name)
                with file.source:
                    rewrap_file(file, target, publication, checkpoint.session, advance)
                    tensors += len(file.header.tensors)
                    nbytes += file.header.body_bytes
                    encrypted += len(file.envelope.records) if file.envelope else 0
            write_manifest(staging.folder, manifest.weights, publication)
        except BaseException:
            discard(folder)
            raise
    return ModelReport(
        folder=str(folder),
        model_id=publication.model_id,
        release=publication.release,
        shards=len(shards),
        tensors=tensors,
        encrypted=encrypted,
        tensor_bytes=nbytes,
        files=len(taken) - len(shards),
        left_out=tuple(left_out),
        reused_shards=0,
        seconds=time.perf_counter() - started,
        key_id=publication.master.kid,
        algorithm=publication.algorithm.name,
        recipients=tuple(r.kid for r in publication.recipients),
    )


def rewrap_file(file: TensorFile, target: Path, publication: Publication, session: Session, advance: Advance) -> None:
    """Write a copy of a verified file with its DEKs under the publication's master key.

    Raises:
        ConfigError: The file has no profile 1, or the new key is for another algorithm.
        KeyAccessError: The old master key is missing or wrong.
        WriteError: Disk full.
    """
    envelope, header = file.envelope, file.header
    if envelope is None or envelope.profile is None:
        raise ConfigError("has no profile 1; encrypt it with secure-loader first", path=file.source.path)
    if envelope.algorithm != publication.algorithm:
        raise ConfigError(
            f"the new master key is for {publication.algorithm.name}, the file uses {envelope.algorithm.name}",
            path=file.source.path,
        )
    deks = unwrap_deks(envelope, session.keys, file.source.path)
    master = publication.algorithm.cipher(publication.master.secret)
    records, nonces = {}, set()
    for name, record in envelope.records.items():
        iv = secrets.token_bytes(NONCE_BYTES)
        while iv in nonces:
            iv = secrets.token_bytes(NONCE_BYTES)
        nonces.add(iv)
        with deks[name] as dek:
            wrapped, tag = wrap_key(master, iv, dek)
        records[name] = replace(record, wrapped_key=wrapped, key_iv=iv, key_tag=tag)
    profile = replace(
        envelope.profile,
        kcv=key_check_value(publication.master.secret, envelope.profile.file_id),
        release=publication.release,
        created=publication.created,
        recipients=publication.recipients,
    )
    fresh = replace(
        envelope,
        records=records,
        profile=profile,
        policy=publication.policy,
        enc=env.KeyHint(publication.master.kid, publication.algorithm.name, "oct"),
        sign=sign_hint(publication.signing),
    )
    ours = {env.CRYPTO_KEYS, env.ENCRYPTION, env.POLICY, env.SIGNATURE, env.SECOND, env.PROFILE}
    metadata = {k: v for k, v in header.metadata.items() if k not in ours} | env.metadata(fresh)
    infos = list(header.tensors.values())
    prefix = hdr.file_prefix(sign_header(metadata, infos, publication.signing))
    with atomic_file(target) as fd:
        copy_range(file.source, fd, header.body_start, len(prefix), header.body_bytes)
        pwrite_all(fd, memoryview(prefix), 0)
    advance(file.source.size)
