"""All targets, and where fuzzing of each starts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from tests.fuzz import seeds, targets, targets_local, targets_oms, targets_recipients, targets_services

TARGETS: dict[str, Callable[[bytes], None]] = (
    targets.TARGETS
    | targets_services.TARGETS
    | targets_local.TARGETS
    | targets_oms.TARGETS
    | targets_recipients.TARGETS
)


def by_target() -> dict[str, list[bytes]]:
    """Seeds of every target, each once, in a fixed order."""
    found = seeds.by_target()
    for part in (targets_services, targets_local, targets_oms, targets_recipients):
        found |= part.seeds()
    return {name: [s for s in dict.fromkeys(many) if len(s) <= seeds.MAX_SEED] for name, many in found.items()}


def write(folder: Path, target: str) -> None:
    """Put the seeds of a target into a corpus folder, by the digest of each, as libFuzzer does itself."""
    for seed in by_target()[target]:
        (folder / hashlib.sha1(seed, usedforsecurity=False).hexdigest()).write_bytes(seed)
