"""env and config show."""

from __future__ import annotations

import os
from typing import Any

from .. import config
from ..core import environment
from ..core.environment import Environment, Package
from ..core.home import KEYS_VARIABLE, default_key_sources, home, keys_dir, oms_dir, trust_dir
from ..core.pool import threads
from .grammar import Arguments
from .output import Output, clean, count, facts, table


def env(args: Arguments, out: Output) -> None:
    """``env``."""
    del args
    found = environment.describe()
    out.result(found.document(), _environment(found, out))


def _environment(found: Environment, out: Output) -> list[str]:
    flags = set(found.cpu_flags)
    speed = (
        "hardware AES, many blocks at a time" if "vaes" in flags else "hardware AES" if "aes" in flags else "unknown"
    )
    return [
        out.paint(f"secure_loader {found.version}", "bold") + f" in {clean(found.location)}",
        *facts(
            [
                ("python", found.python),
                ("system", found.system),
                ("crypto", found.openssl),
                ("processor", f"{speed} ({' '.join(found.cpu_flags) or 'no flags known'})"),
                ("threads", str(found.threads)),
                ("gpu direct", found.gpu_direct),
            ]
        ),
        "",
        *table(["device", "decrypted by"], [[clean(d.name), d.kernels] for d in found.devices]),
        *(f"    {clean(reason)}" for d in found.devices for reason in d.reasons),
        "",
        *table(
            ["package", "installed", "supported"],
            [[p.name, (p.version or "-") + _remark(p), p.supported or "-"] for p in found.packages],
        ),
        "",
        *table(
            ["hook", "active", "what for"],
            [[h.group, "yes" if h.active else f"no: {h.why_not}", h.purpose] for h in found.hooks],
        ),
        "",
        *facts(
            [
                ("home", found.home),
                ("keys", f"{count(found.master_keys, 'master key')}, {count(found.signing_keys, 'signing key')}"),
                ("trust", count(found.trusted_signers, "trusted signer")),
                ("key sources", ", ".join(found.key_sources) or "none"),
            ]
        ),
        "",
        *(
            [out.paint("Problems", "red"), *(f"  {clean(p)}" for p in found.problems)]
            if found.problems
            else ["No problems."]
        ),
    ]


def _remark(package: Package) -> str:
    return " (!)" if package.fits is False else ""


def config_show(args: Arguments, out: Output) -> None:
    """``config show``."""
    del args
    settings = config.explain()
    file = config.toml_path()
    document: dict[str, Any] = {
        "home": str(home()),
        "config_file": str(file) if file.exists() else None,
        "settings": {s.name: {"value": s.value, "origin": s.origin} for s in settings},
    }
    # What None stands for is what a person wants to know.
    meant = {
        "keys": ", ".join(default_key_sources()) or str(keys_dir()),
        "trust": str(trust_dir()),
        "oms_keys": str(oms_dir()),
        "threads": str(threads()),
        "key_private_hosts": "none",
        "key_ca_file": "those of the system",
        "key_client_certificate": "none",
        "key_client_key": "none",
        "kbs_url": "none",
        "kbs_token_file": "none",
        "kbs_token_key_file": "none",
    }
    origins = {"keys": f"{KEYS_VARIABLE} and home" if os.environ.get(KEYS_VARIABLE) else "default"}
    rows = [
        [s.name, meant[s.name], origins.get(s.name, s.origin)]
        if s.value is None
        else [s.name, _value(s.value), s.origin]
        for s in settings
    ]
    lines = [
        *facts([("home", str(home())), ("file", f"{file}{'' if file.exists() else ' (there is none)'}")], indent=""),
        "",
        *table(["setting", "value", "from"], rows, indent=""),
    ]
    out.result(document, lines)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
