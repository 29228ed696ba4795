"""What a local policy is told: one document, every field always there, null when unknown.

Only ``file`` is proven, by the signature. The rest is what this machine says about itself, and its owner can make it say
anything: a local policy is advice to them.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from .. import __version__
from .header import LENGTH
from .secrets import looks_like_key
from .trust import VerifiedHeader

_ENV = re.compile(r"""\binput\s*\.\s*env\s*(?:\.\s*([A-Za-z_]\w*)|\[\s*"([A-Za-z_]\w*)"\s*\])""", re.ASCII)
# Ways to the environment on which the names that a policy asks for are not seen, and so not told; escapes can spell any of them.
_OTHER_ENV = re.compile(r"""\binput\s*\[\s*["`]env["`]|\bimport\s+input\b(?!\s*\.\s*(?!env\b)\w)|\\u""")
_DRIVER = re.compile(r"Kernel Module(?: for \S+)?\s+(\d[\d.]*)")
_IMAGE = re.compile(r'^(image|imageid)="(.*)"$', re.MULTILINE)
_MAX_VALUE = 4096
_ADAPTERS = (("vllm", "secure_loader.vllm.loader"), ("transformers", "secure_loader.hf.context"))
_TEES = (("tdx", "dev/tdx_guest"), ("sev-snp", "dev/sev-guest"), ("sgx", "dev/sgx_enclave"))


def describe(policy: str, verified: VerifiedHeader, now: dt.datetime) -> dict[str, Any]:
    """The input for a policy.

    Args:
        policy: Its text, which says by ``input.env.NAME`` what it wants of the environment.
        verified: The file's header, whose signature was checked.
        now: What the system clock says, UTC.
    """
    return {"time": time_of(now), "file": _file(verified), **_machine(), "env": _environment(policy)}


def time_of(now: dt.datetime) -> dict[str, Any]:
    """``time`` of the input. The nanoseconds are exact to the microsecond, which is what a datetime holds."""
    since = now - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    micros = (since.days * 86400 + since.seconds) * 10**6 + since.microseconds
    return {"now_ns": micros * 1000, "rfc3339": f"{now:%Y-%m-%dT%H:%M:%SZ}".rjust(20, "0"), "source": "system"}


def hides_environment(policy: str) -> str | None:
    """How a policy reaches the environment by another way than ``input.env.NAME``; None where it does not.

    What is not told is undefined, and `not` of that is true.
    """
    found = _OTHER_ENV.search(policy)
    return None if found is None else found.group()


def declared(policy: str) -> list[str]:
    """Names of the environment variables that a policy asks for, literally."""
    return sorted({a or b for a, b in _ENV.findall(policy)})


def _file(verified: VerifiedHeader) -> dict[str, Any]:
    profile, raw, signer = verified.envelope.profile, verified.header.raw, verified.signer
    digest = hashlib.sha256(LENGTH.pack(len(raw)))
    digest.update(raw)
    return {
        "file_id": None if profile is None else profile.file_id.hex(),
        "model_id": None if profile is None else profile.model_id,
        "release": None if profile is None else profile.release,
        "shard": None if profile is None else {"number": profile.shard[0], "of": profile.shard[1]},
        "header_sha256": digest.hexdigest(),
        "signer": {"name": signer.name, "key_id": signer.key.kid, "thumbprint": signer.key.thumbprint()},
    }


def _machine() -> dict[str, Any]:
    framework = next((name for name, module in _ADAPTERS if module in sys.modules), None)
    return {
        "loader": {
            "name": "secure_loader",
            "version": __version__,
            "framework": framework,
            "purpose": None,
            "ranks": _ranks(),
        },
        "host": host(),
        "gpus": gpus(),
        "tee": tee(),
        "claims": None,
    }


def _environment(policy: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in declared(policy):
        value = None if name.startswith("SECURE_LOADER_") else os.environ.get(name)
        # A policy needs no secrets, and the names that it asks for were chosen by somebody else.
        usable = value is not None and len(value) <= _MAX_VALUE and not looks_like_key(value)
        found[name] = value if usable else None
    return found


def _ranks() -> int:
    """Processes that work together: the process group's size, else what the launcher says, else one."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    said = os.environ.get("WORLD_SIZE", "")
    return int(said) if said.isdecimal() and len(said) < 7 else 1


@cache
def host(root: Path = Path("/")) -> dict[str, str | None]:
    """``host`` of the input. Podman writes down what image it runs; Docker and containerd do not tell."""
    names = os.uname()
    image = dict(_IMAGE.findall(_read(root / "run/.containerenv")))
    return {
        "os": names.sysname,
        "kernel": names.release,
        "container_image": image.get("image"),
        "container_image_id": image.get("imageid"),
    }


@cache
def gpus(root: Path = Path("/")) -> list[dict[str, str | None]] | None:
    """``gpus`` of the input: what NVIDIA's driver shows under /proc, which wakes no GPU; None without that driver."""
    folder = root / "proc/driver/nvidia"
    driver = _DRIVER.search(_read(folder / "version"))
    if driver is None or not (folder / "gpus").is_dir():
        return None
    found: list[dict[str, str | None]] = []
    for place in sorted((folder / "gpus").iterdir()):
        pairs = (line.partition(":") for line in _read(place / "information").splitlines())
        about = {name.strip(): value.strip() for name, _, value in pairs}
        found.append({"model": about.get("Model"), "uuid": about.get("GPU UUID"), "driver": driver[1], "cc_mode": None})
    return found


@cache
def tee(root: Path = Path("/")) -> dict[str, Any]:
    """``tee`` of the input: what kind the devices suggest. Nothing here verifies evidence, so ``verified`` is false."""
    kind = next((name for name, device in _TEES if (root / device).exists()), None)
    return {"kind": kind, "verified": False, "claims": None}


def _read(path: Path) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return f.read(1 << 16)
    except OSError:
        return ""
