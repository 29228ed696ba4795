"""Encrypting a model folder: streaming, atomic, resumable."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import ConfigError, FormatError, SecureLoaderError
from . import envelope as env
from . import header as hdr
from . import index, strict_json
from . import manifest as mf
from .aead import CHUNK_SIZE
from .archive import public_metadata
from .atomic import write_bytes
from .copying import copy_file
from .home import keys_dir
from .keys.jwk import MasterKey, SigningKey
from .keys.local import find_master_key, find_signing_key
from .keys.provider import key_check_value
from .keys.recipients import Target, one_time_key, targets, wrap_for
from .policy_lint import chosen
from .recipient import Recipient, check_recipients
from .report import Advance, progress_bar
from .seal import PlainTensor, Publication, write_file
from .source import FileSource, read_header
from .staging import Staging, discard, staged_folder
from .survey import Survey, survey
from .trust import TrustedSigner, TrustStore, verify_header
from .trust_chain import certified


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What was done to a model folder.

    Attributes:
        folder: The new folder.
        model_id: As signed.
        release: As signed.
        shards: Number of safetensors files.
        tensors: Number of tensors.
        encrypted: How many of them are encrypted.
        tensor_bytes: Their size in all.
        files: Number of other files that were copied and signed.
        left_out: Files that were not taken over, because they hold weights in another format, or a signature
            (``model.sig``) that is not one of the new folder.
        reused_shards: Shards that an interrupted run had finished.
        seconds: Wall time.
        key_id: Name of the master key, or None in a plain folder.
        algorithm: What it is for, likewise.
        recipients: Names of those whom it is wrapped for.
    """

    folder: str
    model_id: str
    release: int
    shards: int
    tensors: int
    encrypted: int
    tensor_bytes: int
    files: int
    left_out: tuple[str, ...]
    reused_shards: int
    seconds: float
    key_id: str | None = None
    algorithm: str | None = None
    recipients: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _FileTensor:
    """Bytes of a tensor in a plain file."""

    source: FileSource
    offset: int

    def read_into(self, out: memoryview, start: int) -> None:
        self.source.read_into([out], self.offset + start)


def encrypt_model(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    key: str | MasterKey | None = None,
    signing_key: str | SigningKey | None = None,
    certificate: str | os.PathLike[str] | None = None,
    model_id: str | None = None,
    release: int = 1,
    version: str = "2",
    chunk_size: int = CHUNK_SIZE,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    keep_names: bool = False,
    policy: str | os.PathLike[str] | None = None,
    remote_policy: str | os.PathLike[str] | None = None,
    recipients: Sequence[str] = (),
    force: bool = False,
    progress: bool | None = None,
) -> ModelReport:
    """Encrypt and sign a model folder.

    Shard by shard in bounded memory; the new folder appears when it is complete. A run that was killed is completed by
    the next one with the same arguments, without redoing finished shards.

    Args:
        src: A folder as ``save_pretrained`` writes it. It is only read.
        dst: The new folder.
        key: Master key: a NAME given to ``keygen``, a kid, or the key; None takes the only one in the home folder, or,
            where there are recipients, makes one that nobody keeps but them.
        signing_key: Likewise; None takes the one that goes with ``key``, or the only one.
        certificate: A PEM file with the certificates of the signing key, for readers who trust their root.
        model_id: What the trust store matches; None takes the folder's name.
        release: Grows with every publication; loading remembers the highest and refuses older ones.
        version: CryptoTensors version, ``"2"`` or ``"1"``.
        chunk_size: Bytes per chunk, a power of two from 64 KiB to 16 MiB.
        include: Encrypt only tensors whose names match one of these shell patterns; none means all.
        exclude: Leave tensors that match in clear (signed all the same).
        keep_names: Keep ``model.safetensors`` instead of upstream's variant ``model.secure.safetensors``. Readers that
            do not know encryption then find the file and load noise.
        policy: A file with the local Rego policy, which is linted, and tested with the cases beside it; None allows.
        remote_policy: A file with a Rego policy that is carried for the key broker; None allows.
        recipients: Whom to wrap the master key for: names of known identities, paths of public ones, references of services'
            keys (:func:`core.keys.recipients.targets`). They load the model without having the master key.
        force: Replace a model folder at ``dst``.
        progress: Show a bar; None decides by the terminal.

    Returns:
        What was done.

    Raises:
        ConfigError: Encrypted already, a pattern that matches nothing, nothing to encrypt, a policy that is not fit to
            be signed.
        KeyAccessError: No key, or several to choose from; a service that does not wrap it.
        FormatError: A source file is malformed.
        WriteError: Destination in use, disk full.
    """
    started = time.perf_counter()
    source, target = Path(src).absolute(), Path(dst).absolute()
    for_whom = targets(recipients)
    publication = Publication(
        master=choose_master(key, for_whom),
        signing=resolve_signing(signing_key, key, certificate),
        model_id=source.resolve().name if model_id is None else model_id,
        release=release,
        version=version,
        chunk_size=chunk_size,
        policy=chosen(policy, remote_policy),
    )
    check_apart(source, target)
    plan = survey(source, keep_names=keep_names)
    sealed = _choose(plan, include, exclude)
    fingerprint = {
        "files": [[n, (source / n).stat().st_size, (source / n).stat().st_mtime_ns] for n in plan.everything],
        "keys": [
            publication.master.kid,
            # Another key may have got the same name since: half the shards would be sealed under either.
            key_check_value(publication.master.secret, b"resume").hex(),
            publication.signing.verify_key().thumbprint(),
            *(hashlib.sha256(certificate).hexdigest() for certificate in publication.signing.chain),
        ],
        "settings": [
            publication.model_id,
            release,
            version,
            chunk_size,
            keep_names,
            publication.policy.local,
            publication.policy.remote,
        ],
        "recipients": [[*target.name, target.thumbprint()] for target in for_whom],
        "sealed": hashlib.sha256("\0".join(sorted(sealed)).encode()).hexdigest(),
    }
    with staged_folder(target, fingerprint=fingerprint, force=force) as staging:
        publication, reused = _resume(staging, publication, for_whom)
        total = sum(h.body_bytes for h in plan.headers.values())
        with progress_bar(total, f"Encrypting {source.name}", show=progress) as advance:
            done = _write_shards(source, staging, plan, sealed, publication, advance, resumed=reused)
        _write_others(source, staging.folder, plan)
        write_manifest(staging.folder, plan.weights, publication)
    return ModelReport(
        folder=str(target),
        model_id=publication.model_id,
        release=release,
        shards=len(plan.headers),
        tensors=sum(len(h.tensors) for h in plan.headers.values()),
        encrypted=len(sealed),
        tensor_bytes=total,
        files=len(plan.others) + (plan.index is not None),
        left_out=tuple(plan.left_out),
        reused_shards=done,
        seconds=time.perf_counter() - started,
        key_id=publication.master.kid,
        algorithm=publication.algorithm.name,
        recipients=tuple(r.kid for r in publication.recipients),
    )


def _choose(plan: Survey, include: Sequence[str], exclude: Sequence[str]) -> set[str]:
    """``shard/tensor`` keys of the tensors to be sealed."""
    names = {tensor for h in plan.headers.values() for tensor in h.tensors}
    for pattern in (*include, *exclude):
        if not fnmatch.filter(names, pattern):
            near = sorted(names)[:3]
            raise ConfigError(f"pattern {pattern!r} matches no tensor; names look like {', '.join(near)}")
    chosen = {n for n in names if not include or any(fnmatch.fnmatchcase(n, p) for p in include)}
    chosen -= {n for n in names if any(fnmatch.fnmatchcase(n, p) for p in exclude)}
    sealed = {
        f"{shard}/{t.name}"
        for shard, h in plan.headers.items()
        for t in h.tensors.values()
        if t.name in chosen and t.nbytes
    }
    if not sealed:
        raise ConfigError("nothing is left to encrypt: the patterns leave every tensor in clear")
    return sealed


def _resume(staging: Staging, publication: Publication, for_whom: Sequence[Target]) -> tuple[Publication, bool]:
    """The publication with its recipients, and whether an interrupted run has begun it."""
    state = staging.resumed or {}
    if isinstance(state.get("created"), str):
        with contextlib.suppress(FormatError, LookupError, TypeError, ValueError):
            # The same entries in all files of the set, and a service is not asked again.
            kept = tuple(Recipient(alg, kid, bytes.fromhex(wrapped)) for alg, kid, wrapped in state["recipients"])
            return replace(publication, created=state["created"], recipients=check_recipients(kept)), True
    try:
        # Not before everything else is known to be right: services keep books.
        entries = wrap_for(for_whom, publication.master, publication.model_id)
    except BaseException:
        discard(staging.target)
        raise
    staging.remember({"created": publication.created, "recipients": [[e.alg, e.kid, e.wrapped.hex()] for e in entries]})
    return replace(publication, recipients=entries), False


def _write_shards(
    source: Path,
    staging: Staging,
    plan: Survey,
    sealed: set[str],
    publication: Publication,
    advance: Advance,
    *,
    resumed: bool,
) -> int:
    """Write the shards that are not there yet; returns how many were."""
    mine = TrustStore([TrustedSigner("self", publication.signing.verify_key())])
    reused = 0
    root = sorted(set(plan.weights.values()))
    for name, header in sorted(plan.headers.items()):
        # Files beside the root checkpoint (adapters, heads in subfolders) stand alone.
        place = (root.index(plan.names[name]) + 1, len(root)) if plan.names[name] in root else (1, 1)
        target = staging.folder / plan.names[name]
        if resumed and _is_finished(target, header, mine):
            reused += 1
            advance(header.body_bytes)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileSource(source / name) as opened:
            tensors = [
                PlainTensor(
                    t.name,
                    t.dtype,
                    t.shape,
                    t.nbytes,
                    _FileTensor(opened, header.body_start + t.start),
                    encrypt=f"{name}/{t.name}" in sealed,
                )
                for t in header.tensors.values()
            ]
            metadata = public_metadata(header)
            write_file(target, tensors, metadata, publication, shard=place, advance=advance)
    return reused


def _is_finished(target: Path, header: hdr.Header, mine: TrustStore) -> bool:
    """Whether an interrupted run completed this shard: it has its name, and its signature is ours."""
    try:
        with FileSource(target) as source:
            # No session: its policy may well deny the publisher's own machine.
            found = read_header(source)
            verify_header(found, env.parse(found), mine)
    except SecureLoaderError:
        return False
    return found.tensors.keys() == header.tensors.keys() and found.body_bytes == header.body_bytes


def _write_others(source: Path, folder: Path, plan: Survey) -> None:
    for name in plan.others:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        copy_file(source / name, folder / name)
    if plan.index is not None:
        doc = index.load(source / plan.index)
        doc["weight_map"] = plan.weights
        text = strict_json.dumps(doc, sort_keys=False)
        write_bytes(folder / plan.names[plan.index], text.encode())


def write_manifest(folder: Path, weights: Mapping[str, str], publication: Publication) -> mf.Manifest:
    """Describe and sign a folder as it is."""
    names = [n for n in mf.list_files(folder) if n != mf.MANIFEST]
    files = {n: mf.digest_of(folder / n, shard=n.endswith(".safetensors")) for n in names}
    manifest = mf.Manifest(publication.model_id, publication.release, publication.created, files, dict(weights))
    write_bytes(folder / mf.MANIFEST, manifest.sign(publication.signing))
    return manifest


def check_apart(source: Path, target: Path) -> None:
    """Raises ConfigError when one folder lies inside the other, or both are the same."""
    a, b = source.resolve(), target.resolve()
    if a == b or a in b.parents or b in a.parents:
        raise ConfigError("source and destination must be different folders, neither inside the other", path=target)


def resolve_master(key: str | MasterKey | None) -> MasterKey:
    """A master key by NAME, kid or as it is; None takes the only one in the home folder. Raises KeyAccessError."""
    return key if isinstance(key, MasterKey) else find_master_key([keys_dir()], key)


def choose_master(key: str | MasterKey | None, for_whom: Sequence[Target]) -> MasterKey:
    """As :func:`resolve_master`; a new one that nobody keeps, where there are recipients and no key was named."""
    return one_time_key() if for_whom and key is None else resolve_master(key)


def resolve_signing(
    signing_key: str | SigningKey | None,
    key: str | MasterKey | None,
    certificate: str | os.PathLike[str] | None = None,
) -> SigningKey:
    """A signing key by NAME, kid or as it is; None takes the one made together with ``key``, or the only one."""
    if not isinstance(signing_key, SigningKey):
        together = (
            key if signing_key is None and isinstance(key, str) and (keys_dir() / f"{key}.sign.jwk").exists() else None
        )
        signing_key = find_signing_key([keys_dir()], signing_key or together)
    return signing_key if certificate is None else certified(signing_key, Path(certificate))
