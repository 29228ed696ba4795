"""encrypt, decrypt, verify, inspect and rewrap."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from ..core import inspection, trust_files
from ..core.aead import CHUNK_SIZE
from ..core.export import decrypt_model
from ..core.inspection import FileSummary, Inspection
from ..core.keys.jwk import MasterKey, SigningKey
from ..core.keys.local import keys_at
from ..core.keys.provider import LOCAL, split_reference
from ..core.policy import is_trivial
from ..core.rewrap import rewrap_model
from ..core.secrets import looks_like_key
from ..core.survey import is_signature
from ..core.trust import revocations
from ..core.writer import ModelReport, encrypt_model, resolve_master, resolve_signing
from ..errors import ConfigError, KeyAccessError
from .grammar import Arguments
from .output import Output, clean, count, facts, human_bytes, human_seconds, table

_K = TypeVar("_K", MasterKey, SigningKey)
_WHAT: dict[type, str] = {MasterKey: "master key", SigningKey: "signing key"}


def encrypt(args: Arguments, out: Output) -> None:
    """``encrypt SRC DST``."""
    master, signing = _own_keys(args, keyless=bool(args.recipients))
    report = encrypt_model(
        args.src,
        args.dst,
        key=master,
        signing_key=signing,
        certificate=args.certificate,
        model_id=args.model_id,
        release=args.release,
        version=args.format_version,
        chunk_size=CHUNK_SIZE if args.chunk_size is None else args.chunk_size,
        include=args.include,
        exclude=args.exclude,
        keep_names=args.keep_names,
        policy=args.policy,
        remote_policy=args.remote_policy,
        recipients=args.recipients,
        force=args.force,
        progress=out.progress,
    )
    _done(out, "Encrypted", report, signing)
    if master is not None and args.recipients:
        out.warn(f"the recipients get {master.kid}, and with it every model that is encrypted under it")
    if master is None:
        out.note(
            "Nobody keeps the master key: only the recipients can load it. To be one of them, say -r with your own name."
        )


def decrypt(args: Arguments, out: Output) -> None:
    """``decrypt SRC DST``."""
    report = decrypt_model(
        args.src, args.dst, keys=references(args.keys), trust=args.trust, force=args.force, progress=out.progress
    )
    _done(out, "Decrypted", report)


def rewrap(args: Arguments, out: Output) -> None:
    """``rewrap PATH``."""
    # Whether there are recipients is known when the folder was verified.
    master, signing = _own_keys(args, keyless=True)
    report = rewrap_model(
        args.path,
        key=master,
        new_key=args.new_key,
        recipients=args.recipients,
        remove=args.remove,
        policy=args.policy,
        remote_policy=args.remote_policy,
        signing_key=signing,
        certificate=args.certificate,
        keys=references(args.keys),
        trust=args.trust,
        release=args.release,
        progress=out.progress,
    )
    _done(out, "Rewrapped", report, signing)
    if args.remove:
        out.note(
            "Whoever was removed may have kept what he could open so far: only what you encrypt anew is kept from him."
        )


def _own_keys(args: Arguments, *, keyless: bool) -> tuple[MasterKey | None, SigningKey]:
    """The keys to write with: by NAME or kid from the home folder, or by reference; no master key need be named if ``keyless``."""
    key, signing = args.key, args.signing_key
    try:
        master: MasterKey | None = None
        together = None
        if key is None and keyless:
            pass
        elif _is_reference(key):
            master = _only(MasterKey, key)
        else:
            master, together = resolve_master(key), key
        signer = _only(SigningKey, signing) if _is_reference(signing) else resolve_signing(signing, together)
        _refuse_revoked(signer)
        return master, signer
    except KeyAccessError:
        # Only now: a kid may look like a key, and it was not the name of one.
        for option, value in (("--key", key), ("--signing-key", signing)):
            if value is not None:
                _refuse_material(option, value)
        raise


def _refuse_revoked(signing: SigningKey) -> None:
    """Raises ConfigError for a key whose models would load nowhere that its revocation is known, here to begin with."""
    gone = revocations().revocation_of(signing.verify_key().thumbprint())
    if gone is not None:
        raise ConfigError(
            f"the signing key {signing.kid!r} was revoked on {gone.since:%Y-%m-%d}: {gone.reason}",
            hint="make a new one with: secure-loader keygen NAME",
        )


def _is_reference(value: str | None) -> bool:
    if value is None or looks_like_key(value):
        return False
    return "/" in value or (":" in value and split_reference(value)[0] in LOCAL)


def _only(kind: type[_K], reference: str) -> _K:
    keys = [key for key in keys_at(reference) if isinstance(key, kind)]
    if len(keys) != 1:
        raise KeyAccessError(f"{reference} holds {count(len(keys), _WHAT[kind])} instead of one")
    return keys[0]


def references(keys: Sequence[str] | None) -> list[str] | None:
    """What ``--keys`` names. Raises ConfigError for what may be a key."""
    for reference in keys or ():
        _refuse_material("--keys", reference)
    return None if keys is None else list(keys)


def _refuse_material(option: str, value: str) -> None:
    """Raises ConfigError for what may be a key, without showing it. A file may well be called like one."""
    if looks_like_key(value) and not os.path.lexists(value):
        raise ConfigError(
            f"{option} takes the name of a key or the way to one, never key material itself",
            hint="every process of this machine can see arguments: if that was a key, replace it",
        )


def _done(out: Output, verb: str, report: ModelReport, signing: SigningKey | None = None) -> None:
    _warn_left_out(report, out)
    document: dict[str, Any] = asdict(report)
    if signing is not None:
        document["signer_key_id"] = signing.kid
    plain = report.key_id is None
    tensors = count(report.tensors, "tensor") if plain else _tensors(report.tensors, report.encrypted)
    speed = f" ({human_bytes(round(report.tensor_bytes / report.seconds))}/s)" if report.seconds > 0.05 else ""
    lines = [
        f"{out.paint(verb, 'green')} {clean(report.folder)}",
        *facts(
            [
                ("model", f"{report.model_id}, release {report.release}"),
                ("tensors", f"{tensors}, {human_bytes(report.tensor_bytes)}"),
                ("files", f"{count(report.shards, 'weight file')}, {count(report.files, 'other file')}"),
                ("key", "" if plain else f"{report.key_id} ({report.algorithm})"),
                ("recipients", ", ".join(report.recipients)),
                ("signed by", "" if signing is None else signing.kid),
                ("resumed", f"{count(report.reused_shards, 'finished weight file')}" if report.reused_shards else ""),
                ("took", human_seconds(report.seconds) + speed),
            ]
        ),
    ]
    out.result(document, lines, report=True)


def _warn_left_out(report: ModelReport, out: Output) -> None:
    signatures = [name for name in report.left_out if is_signature(name)]
    weights = [name for name in report.left_out if name not in signatures]
    if weights:
        out.warn(f"not taken over, weights in another format would lie there in clear: {', '.join(weights)}")
    if signatures:
        out.warn(
            f"not taken over, what it signs is not this folder: {', '.join(signatures)}. "
            f"Sign this one with: secure-loader sign --oms {clean(shlex.quote(report.folder))} --key PEM"
        )


def _tensors(tensors: int, encrypted: int) -> str:
    if encrypted == tensors:
        return f"{count(tensors, 'tensor')}, all encrypted"
    return f"{count(tensors, 'tensor')}, {encrypted:,} encrypted, {tensors - encrypted:,} in clear"


def verify(args: Arguments, out: Output) -> None:
    """``verify PATH``."""
    done = inspection.verify(args.path, trust=args.trust, full=args.full, oms_keys=args.oms_keys, progress=out.progress)
    checked = "signature, file set, headers" + (", every stored byte" if done.full else "")
    unread = "" if done.full else "tensor bytes: loading checks them as it decrypts, --full checks them now"
    lines = [
        f"{out.paint('Verified', 'green')} {clean(done.path)}",
        *facts(
            [
                ("model", "" if done.model_id is None else f"{done.model_id}, release {done.release}"),
                ("signer", f"{done.signer} ({done.signer_key_id})"),
                ("model.sig", "" if done.model_signer is None else f"by {done.model_signer}"),
                (
                    "holds",
                    f"{count(done.files, 'file')}, {count(done.tensors, 'tensor')}, {human_bytes(done.tensor_bytes)}",
                ),
                ("checked", checked),
                ("not read", unread),
                ("took", human_seconds(done.seconds)),
            ]
        ),
    ]
    out.result(done.document(), lines, report=True)


def inspect(args: Arguments, out: Output) -> None:
    """``inspect PATH``."""
    seen = inspection.inspect(args.path)
    signers = {kid: _who(kid, out) for kid in _values(f.signer_key_id for f in seen.files)}
    document = seen.document() | {"verified": False, "trusted_signers": {k: v[0] for k, v in signers.items()}}
    lines = _summary(seen, {kid: text for kid, (_, text) in signers.items()}, out)
    if args.tensors:
        tensors = list(inspection.list_tensors(args.path))
        document["tensors"] = [asdict(t) for t in tensors]
        lines += ["", *_tensor_table(tensors, len(seen.files))]
    encrypted = any(f.version is not None for f in seen.files)
    if encrypted or seen.has_manifest:
        lines += [
            "",
            f"Not verified: this is what it says about itself. Check with: secure-loader verify {clean(shlex.quote(args.path))}",
        ]
    out.result(document, lines)


def _summary(seen: Inspection, signers: dict[str, str], out: Output) -> list[str]:
    files = seen.files
    tensors, encrypted = sum(f.tensors for f in files), sum(f.encrypted for f in files)
    dtypes = sum((Counter(f.dtypes) for f in files), Counter[str]())
    kinds = ", ".join(f"{n:,} {code}" for code, n in dtypes.most_common())
    held = _tensors(tensors, encrypted) if encrypted else f"{count(tensors, 'tensor')}, none encrypted"
    made = f", {seen.created}" if seen.created else ""
    lines = [
        out.paint(clean(seen.path), "bold"),
        *facts(
            [
                ("model", "" if seen.model_id is None else f"{seen.model_id}, release {seen.release}{made}"),
                ("format", _join(_format(f) for f in files)),
                ("manifest", "signed" if seen.has_manifest else "none" if Path(seen.path).is_dir() else ""),
                ("tensors", f"{held}, {human_bytes(sum(f.tensor_bytes for f in files))} ({kinds or 'empty'})"),
                ("key", _join(f"{f.key_id} ({f.algorithm})" for f in files if f.key_id)),
                ("recipients", _join(", ".join(f.recipients) for f in files)),
                ("signer", _join(signers.values())),
                ("certificate", _join(f.certificate for f in files if f.certificate)),
                ("second", _join("ML-DSA-65" for f in files if f.post_quantum)),
                ("policy", _join(_policy(f) for f in files)),
                ("for brokers", _join(_broker_policy(f) for f in files)),
            ]
        ),
        "",
        *table(
            ["file", "size", "tensors", "encrypted"],
            [[f.name, human_bytes(f.nbytes), f"{f.tensors:,}", f"{f.encrypted:,}"] for f in files],
            right=(1, 2, 3),
        ),
    ]
    if seen.other_files:
        names = sorted(seen.other_files)
        more = f" and {len(names) - 6} more" if len(names) > 6 else ""
        size = human_bytes(sum(seen.other_files.values()))
        lines.append(f"  and {count(len(names), 'other file')}, {size}: {clean(', '.join(names[:6]))}{more}")
    return lines


def _format(file: FileSummary) -> str:
    if file.version is None:
        return "plain safetensors: not encrypted, not signed"
    profile = "with profile 1" if file.profile else "without profile 1"
    chunks = "" if file.chunk_size is None else f", chunks of {human_bytes(file.chunk_size)}"
    return f"CryptoTensors {file.version} {profile}{chunks}"


def _policy(file: FileSummary) -> str:
    if file.local_policy is None or is_trivial(file.local_policy):
        return ""
    return f"{len(file.local_policy):,} characters of Rego, evaluated when the model is loaded"


def _broker_policy(file: FileSummary) -> str:
    if file.remote_policy is None or is_trivial(file.remote_policy):
        return ""
    return f"{len(file.remote_policy):,} characters of Rego, which a key broker enforces if it is installed there"


def _who(kid: str, out: Output) -> tuple[list[str], str]:
    """The local names of a signer, and what to tell a person. A kid is only a name: verify is what checks it."""
    known = []
    for file in trust_files.list_trusted():
        if file.problem is not None:
            out.warn(f"{file.path}: {file.problem.message}")
        elif file.signer is not None and file.signer.key.kid == kid:
            known.append(file)
    if not known:
        return [], f"{kid}: not in your trust store"
    names = [f.path.stem for f in known]
    models = sorted({m for f in known if f.signer for m in f.signer.models})
    return (
        names,
        f"{kid}: in your trust store as {', '.join(names)}, for {'every model' if '*' in models else ', '.join(models)}",
    )


def _tensor_table(tensors: Iterable[inspection.TensorSummary], files: int) -> list[str]:
    head = ["tensor", "dtype", "shape", "bytes", "stored"]
    rows = [
        [t.name, t.dtype, f"[{', '.join(map(str, t.shape))}]", f"{t.nbytes:,}", "encrypted" if t.encrypted else "clear"]
        + ([t.file] if files > 1 else [])
        for t in tensors
    ]
    return table(head + (["file"] if files > 1 else []), rows, right=(3,))


def _values(items: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(item for item in items if item))


def _join(items: Iterable[str]) -> str:
    """What all files have in common, or everything that occurs."""
    return "; ".join(_values(items))
