"""publish."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from ..config import load
from ..core.keys.kbs import read_token
from ..core.keys.kbs_publish import admin_token, policy_of, publish, read_policy
from ..core.secrets import looks_like_key
from ..core.writer import resolve_master
from ..errors import ConfigError
from .grammar import Arguments
from .output import Output, clean, facts


def publish_key(args: Arguments, out: Output) -> None:
    """``publish REFERENCE``."""
    for option in ("admin_key", "admin_token_file"):
        if looks_like_key(getattr(args, option) or ""):
            raise ConfigError(f"--{option.replace('_', '-')} takes the path of a file, never what is in it")
    policy = None
    if args.policy is not None:
        policy = read_policy(args.policy)
    elif args.policy_of is not None:
        policy = policy_of(args.policy_of, args.trust)
    master = resolve_master(args.key)
    token = (
        read_token(Path(args.admin_token_file), "administrator's token file")
        if args.admin_key is None
        else admin_token(Path(args.admin_key), args.role)
    )
    with token:
        done = publish(args.reference, master, token, policy, load())
    out.result(
        asdict(done),
        [
            f"{out.paint('Published', 'green')} {done.key_id}",
            *facts(
                [
                    ("broker", clean(done.broker)),
                    ("resource", clean(done.resource)),
                    ("policy", "replaced" if done.policy else "as it was"),
                ]
            ),
        ],
        report=True,
    )
    if done.policy:
        out.note("A broker has one policy for all its resources: what the old one allowed is allowed no more.")
