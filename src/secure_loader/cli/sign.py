"""sign."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from ..core.keys.ec import read_signing_key
from ..core.keys.passphrase import read_passphrase
from ..core.oms_sign import sign_folder
from ..core.secrets import looks_like_key
from ..errors import ConfigError
from .grammar import Arguments
from .output import Output, clean, count, facts, human_bytes, human_seconds


def sign(args: Arguments, out: Output) -> None:
    """``sign --oms FOLDER``."""
    if looks_like_key(args.key):
        raise ConfigError("--key takes the path of a PEM file, never the key itself")
    passphrase = None if args.passphrase_file is None else read_passphrase(args.passphrase_file)
    key = read_signing_key(Path(args.key), passphrase)
    done = sign_folder(args.folder, key, trust=args.trust, force=args.force, progress=out.progress)
    lines = [
        f"{out.paint('Signed', 'green')} {clean(done.path)}",
        *facts(
            [
                ("model", f"{done.model_id}, release {done.release}"),
                ("signs", f"{count(done.files, 'file')}, {human_bytes(done.nbytes)}"),
                ("not signed", clean(", ".join(done.not_signed))),
                ("key", f"{done.fingerprint} ({done.curve})"),
                ("took", human_seconds(done.seconds)),
            ]
        ),
    ]
    out.result(asdict(done), lines, report=True)
