"""Writes the vectors: `python -m tests.vectors.make` from the root of the repository.

Everything is reproducible byte for byte, except what cryptotensors itself wrote (`--genuine`, needs cryptotensors and
torch): those files hold its random keys and are made once and kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from . import DATA
from .casebook import KEY_FILES, Case
from .cases_envelope import envelope
from .cases_folder import folder
from .cases_good import good
from .cases_header import header
from .cases_recipients import recipients
from .cases_signers import signers
from .cases_tamper import tamper
from .naive_writer import SECOND_SIGNATURES, USED, WRAPPED, WRAPPED_KEYS

GENUINE = "genuine-"


def cases() -> Iterator[Case]:
    """Every reproducible case."""
    for part in (good, header, envelope, tamper, folder, signers, recipients):
        yield from part()


def files() -> dict[str, bytes]:
    """Path under data/ -> bytes."""
    out = {path: json.dumps({"keys": keys}, indent=1).encode() + b"\n" for path, keys in KEY_FILES.items()}
    for case in cases():
        path = f"{case.name.replace('_', '-')}.vector"
        if path in out:
            raise ValueError(f"two cases are called {case.name}")
        out[path] = case.raw()
    for path, made in ((SECOND_SIGNATURES, USED), (WRAPPED_KEYS, WRAPPED)):
        out[path.relative_to(DATA).as_posix()] = json.dumps(made, indent=1, sort_keys=True).encode() + b"\n"
    return out


def main() -> None:
    made = files()
    (DATA / "keys").mkdir(parents=True, exist_ok=True)
    kept = {p for p in DATA.glob("*.vector") if p.name.startswith(GENUINE)}
    for old in [p for p in DATA.glob("*.vector") if p not in kept and p.name not in made]:
        old.unlink()
    if "--genuine" in sys.argv[1:]:
        from .genuine import genuine

        made |= {f"{case.name}.vector": case.raw() for case in genuine()}
    for path, data in made.items():
        (DATA / path).write_bytes(data)
    print(f"{len(made)} files, {sum(map(len, made.values())):,} bytes; {len(kept)} genuine ones kept")


if __name__ == "__main__":
    main()
