"""What the `fuzz_*.py` share: `make fuzz` runs them as scripts, with libFuzzer's arguments."""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

ROOT = Path(__file__).resolve().parents[2]


def run(name: str) -> None:
    """Fuzz one of the targets; the first folder among the arguments gets the seeds."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    # Only what parses untrusted bytes: branches of the standard library would drown the ones that matter.
    with atheris.instrument_imports(include=["secure_loader.core", "secure_loader.config"]):
        # These import everything that the targets use.
        import secure_loader.core.keys.kbs
        import secure_loader.core.keys.vault
        import secure_loader.core.manifest
        import secure_loader.core.policy  # noqa: F401
    from tests.fuzz import every

    corpus = next((Path(arg) for arg in sys.argv[1:] if not arg.startswith("-") and Path(arg).is_dir()), None)
    if corpus is not None:
        every.write(corpus, name)
    atheris.Setup(sys.argv, every.TARGETS[name])
    atheris.Fuzz()
