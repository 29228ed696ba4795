"""keygen and trust."""

from __future__ import annotations

import datetime as dt
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..core import strict_json, trust_files
from ..core.home import keys_dir
from ..core.keys.generate import NewKeys, generate_keys
from ..core.keys.local import find_signing_key
from ..core.keys.passphrase import ask_for_new, check_new, read_passphrase
from ..core.secrets import Secret
from ..core.source import read_small_file
from ..core.trust import MAX_TRUST_FILE, TrustedSigner, parse_trusted, read_trust_file
from ..core.trust_chain import request
from ..core.trust_files import RulesFile, TrustFile
from ..core.trust_rules import Revocation, Rules
from ..core.trust_toml import parse_time, time_text
from ..errors import ConfigError, FormatError, KeyAccessError, SecureLoaderError
from .grammar import Arguments
from .output import Output, clean, facts, table

_FILE_ID_DIGITS = 32


def keygen(args: Arguments, out: Output) -> None:
    """``keygen NAME``."""
    made = generate_keys(
        args.name,
        algorithm=args.algorithm,
        models=_patterns(args.models) or ("*",),
        passphrase=_new_passphrase(args),
        post_quantum=args.post_quantum,
        force=args.force,
    )
    if made.replaced:
        out.warn(
            f"replaced the keys named {made.name!r}. Models encrypted with the old key no longer load, and models "
            f"signed with it are no longer trusted, unless you put the old files back under other names ending in .jwk "
            f"and .json: {', '.join(map(str, made.replaced))}"
        )
    out.result(asdict(made), _new_keys(made, out), report=True)


def _new_passphrase(args: Arguments) -> Secret | None:
    if args.passphrase_file is not None:
        return check_new(read_passphrase(args.passphrase_file))
    return ask_for_new() if args.passphrase else None


def _new_keys(made: NewKeys, out: Output) -> list[str]:
    folder = made.key_file.parent
    sealed = ["", f"The passphrase opens it: SECURE_LOADER_KEYS=passphrase:{made.key_file}"] if made.encrypted else []
    return [
        out.paint(f"Made keys for {made.name} in {clean(str(folder.parent))}", "bold"),
        *facts(
            [
                ("master key", f"{made.key_id}  ({made.algorithm})"),
                (
                    "signing key",
                    f"{made.signing_key_id}  ({_kinds(second=made.post_quantum)}, trusted here for {_for(made.models)})",
                ),
                ("thumbprint", made.thumbprint),
            ]
        ),
        "",
        *table(
            ["file", "for whom"],
            [
                [_under(made.trust_file), "everybody who shall trust your models: secure-loader trust add FILE"],
                [_under(made.key_file), "those who may load them; hand it over in secret, keep a backup"],
                [_under(made.signing_key_file), "nobody: who has it can sign in your name"],
            ],
        ),
        *sealed,
    ]


def _kinds(*, second: bool) -> str:
    return "Ed25519 and ML-DSA-65" if second else "Ed25519"


def _under(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def trust_list(args: Arguments, out: Output) -> None:
    """``trust list``."""
    del args
    signers, others = list(trust_files.list_trusted()), list(trust_files.list_rules())
    unusable: list[TrustFile | RulesFile] = [*signers, *others]
    rules = sum((f.rules for f in others if f.rules is not None), Rules())
    rows = [_row(f.path, f.signer, rules) for f in signers if f.signer is not None]
    problems = [(f.path, f.problem) for f in unusable if f.problem is not None]
    lines = (
        table(
            ["name", "key id", "thumbprint", "models", "until"],
            [[r["name"], _key(r), r["thumbprint"], ", ".join(r["models"]), _when(r)] for r in rows],
            indent="",
        )
        if rows
        else ["No signer is trusted: no encrypted model will load. Add one with: secure-loader trust add FILE"]
    )
    document = {
        "signers": rows,
        "revoked": [entry.document() | {"file": entry.where} for entry in rules.revoked],
        "rules": [rule.document() | {"file": rule.where} for rule in rules.rules],
        "only_listed": rules.only_listed,
        "authorities": [authority.document() | {"file": authority.where} for authority in rules.authorities],
        "unusable": [str(path) for path, _ in problems],
    }
    out.result(document, [*lines, *_authority_lines(rules), *_rule_lines(rules), *_revoked_lines(rules)])
    for path, problem in problems[:-1]:
        out.warn(f"{path}: {problem.message}")
    if problems:
        # One bad file stops every load, so it must not look as if all were well.
        raise problems[-1][1]


def _authority_lines(rules: Rules) -> list[str]:
    if not rules.authorities:
        return []
    rows = []
    for authority in rules.authorities:
        said = [f"{k} = {v}" for k, v in authority.subject] + list(authority.san)
        until = "-" if authority.not_after is None else time_text(authority.not_after)
        rows.append([authority.name, "; ".join(said), ", ".join(authority.models), until])
    return ["", *table(["authority", "certificates that say", "models", "until"], rows, indent="")]


def _rule_lines(rules: Rules) -> list[str]:
    if not rules.rules:
        return []
    rows = []
    for rule in rules.rules:
        said = {k: v for k, v in rule.document().items() if k != "pattern"}
        texts = (f"{k} {', '.join(map(str, v)) if isinstance(v, list) else str(v).lower()}" for k, v in said.items())
        rows.append([", ".join(rule.patterns), "; ".join(texts) or "-"])
    rest = ["", "Models that no rule is about are refused."] if rules.only_listed else []
    return ["", *table(["models", "must have"], rows, indent=""), *rest]


def _revoked_lines(rules: Rules) -> list[str]:
    if not rules.revoked:
        return []
    rows = [[_what(entry), f"{entry.since:%Y-%m-%d}", entry.reason] for entry in rules.revoked]
    return ["", *table(["revoked", "since", "why"], rows, indent="")]


def _what(entry: Revocation) -> str:
    if entry.signer is not None:
        return f"signer {entry.signer}{f' ({entry.name})' if entry.name else ''}"
    if entry.model is not None:
        return f"model {entry.model}{'' if entry.release is None else f', release {entry.release}'}"
    return f"file {entry.file_id}" if entry.file_id is not None else f"SHA-256 {entry.sha256}"


def trust_revoke(args: Arguments, out: Output) -> None:
    """``trust revoke``."""
    asked = [name for name in ("who", "model", "file", "digest") if getattr(args, name) is not None]
    if len(asked) != 1:
        raise ConfigError("say what is revoked by one of NAME or THUMBPRINT, --model, --file and --digest")
    if args.release is not None and args.model is None:
        raise ConfigError("--release goes with --model")
    since = _date("--since", args.since) or dt.datetime.now(dt.UTC).replace(microsecond=0)
    what: dict[str, Any] = {"model": args.model, "release": args.release}
    if args.who is not None:
        what["signer"], what["name"] = trust_files.thumbprint_of(args.who)
    elif args.file is not None:
        from ..core.inspection import identify  # what reads files is not needed for the rest

        what |= identify(args.file)
    elif args.digest is not None:
        digest = args.digest.replace(":", "").lower()  # OpenSSL writes fingerprints in capitals, with colons
        what["file_id" if len(digest) == _FILE_ID_DIGITS else "sha256"] = digest
    entry = Revocation(args.reason, since, **what)
    path = trust_files.revoke(entry)
    out.result(
        entry.document() | {"file": str(path)},
        [
            out.paint(f"Revoked: {clean(_what(entry))}", "bold"),
            *facts([("since", time_text(since)), ("why", entry.reason), ("list", str(path))]),
        ],
        report=True,
    )
    out.note("It counts on this machine only. Copy the list to the others, or run the same command there.")


def _row(path: Path, signer: TrustedSigner, rules: Rules) -> dict[str, Any]:
    until, revoked = signer.not_after, rules.revocation_of(signer.key.thumbprint())
    return {
        "name": path.stem,
        "key_id": signer.key.kid,
        "thumbprint": signer.key.thumbprint(),
        "post_quantum": None if signer.key.second is None else signer.key.second.thumbprint(),
        "models": list(signer.models),
        "until": None if until is None else time_text(until),
        "expired": until is not None and dt.datetime.now(dt.UTC) >= until,
        "revoked": None if revoked is None else time_text(revoked.since),
        "file": str(path),
    }


def _key(row: dict[str, Any]) -> str:
    return f"{row['key_id']}{' + ML-DSA-65' if row['post_quantum'] else ''}"


def _when(row: dict[str, Any]) -> str:
    if row["revoked"]:
        return f"revoked {row['revoked'][:10]}"
    return f"{row['until']}{' (expired)' if row['expired'] else ''}" if row["until"] else "-"


def trust_add(args: Arguments, out: Output) -> None:
    """``trust add FILE``."""
    signer = _read_signer(args.file, args.name)
    models = _patterns(args.models) or signer.models
    signer = replace(signer, models=models, not_after=_date("--until", args.until) or signer.not_after)
    if signer.not_after is not None and signer.not_after <= dt.datetime.now(dt.UTC):
        raise ConfigError(f"that signer would be trusted only until {signer.not_after:%Y-%m-%d}, which is past")
    path = trust_files.add(signer, force=args.force)
    row = _row(path, signer, Rules())
    out.result(
        row,
        [
            out.paint(f"Trusted from now on: {signer.name}", "bold"),
            *facts(
                [
                    ("key id", signer.key.kid),
                    ("thumbprint", row["thumbprint"]),
                    ("ML-DSA-65", row["post_quantum"] or ""),
                    ("models", _for(signer.models)),
                    ("until", row["until"] or "you remove it"),
                    ("file", str(path)),
                ]
            ),
        ],
        report=True,
    )
    out.note("Compare the thumbprint with the one that the publisher tells you in another way.")


def trust_remove(args: Arguments, out: Output) -> None:
    """``trust remove NAME``."""
    path = trust_files.remove(args.name)
    out.result({"removed": args.name, "file": str(path)}, [f"Trusted no more: {args.name}"], report=True)


def trust_export(args: Arguments, out: Output) -> None:
    """``trust export NAME``."""
    path = trust_files.trust_file(args.name)
    if not path.exists():
        raise ConfigError(f"no signer named {args.name!r} is trusted", hint="see who is with: secure-loader trust list")
    out.text(trust_files.document_bytes(read_trust_file(path)).decode())


def trust_request(args: Arguments, out: Output) -> None:
    """``trust request NAME``."""
    signing = find_signing_key([keys_dir()], args.name)
    out.text(request(signing, args.subject or f"CN={args.name}"))


def _read_signer(file: str, name: str | None) -> TrustedSigner:
    """A signer from a trust file, a public JWK or a JWK set with one key; private keys are refused."""
    where = "standard input" if file == "-" else file
    try:
        data = sys.stdin.buffer.read(MAX_TRUST_FILE + 1) if file == "-" else read_small_file(file, MAX_TRUST_FILE)
        if len(data) > MAX_TRUST_FILE:
            raise FormatError(f"is larger than {MAX_TRUST_FILE:,} bytes")
        doc = strict_json.loads(data, what="file", scan=True)
        if isinstance(doc, dict) and "keys" in doc:
            doc = _only_key(doc["keys"])
        signer = parse_trusted(doc, "")
    except KeyAccessError as e:
        private = "private key material" in e.message
        raise KeyAccessError(
            "holds a private key, which is nobody else's business; only the public half is trusted"
            if private
            else e.message,
            path=where,
            hint="the publisher prints the public half with: secure-loader trust export NAME" if private else e.hint,
        ) from None
    except SecureLoaderError as e:
        raise type(e)(e.message, path=where, hint=e.hint) from None
    return replace(signer, name=_choose_name(name, signer, file))


def _only_key(keys: object) -> Any:
    """The one signer of a JWK set: a key, or an Ed25519 key and its ML-DSA-65 key as a trust file has them."""
    if isinstance(keys, list) and len(keys) == 1:
        return keys[0]
    seconds = [k for k in keys if isinstance(k, dict) and k.get("kty") == "AKP"] if isinstance(keys, list) else []
    if not isinstance(keys, list) or len(keys) != 2 or len(seconds) != 1:
        raise FormatError("is a JWK set that does not hold exactly one key, or an Ed25519 and an ML-DSA-65 key")
    first = keys[0] if keys[1] is seconds[0] else keys[1]
    return {"key": first, "post_quantum": seconds[0]}


def _choose_name(name: str | None, signer: TrustedSigner, file: str) -> str:
    if name is not None:
        return trust_files.check_name(name)
    for candidate in (signer.name, signer.key.kid, "" if file == "-" else Path(file).stem):
        try:
            return trust_files.check_name(candidate)
        except ConfigError:
            continue
    raise ConfigError("neither the file nor its kid can serve as a name", hint="say one with --name")


def _date(option: str, text: str | None) -> dt.datetime | None:
    try:
        return parse_time(text)
    except FormatError as e:
        raise ConfigError(f"{option}: {e.message}") from None


def _patterns(models: list[str] | None) -> tuple[str, ...]:
    if models and not all(models):
        raise ConfigError("a model pattern must not be empty")
    return tuple(models or ())


def _for(models: tuple[str, ...]) -> str:
    return "every model" if "*" in models else ", ".join(models)
