"""Where this user keeps keys, trusted signers and what was seen: ``SECURE_LOADER_HOME``."""

from __future__ import annotations

import os
from pathlib import Path

HOME_VARIABLE = "SECURE_LOADER_HOME"
KEYS_VARIABLE = "SECURE_LOADER_KEYS"


def home() -> Path:
    """The home folder: ``$SECURE_LOADER_HOME``, or ``secure_loader`` in the user's configuration folder."""
    explicit = os.environ.get(HOME_VARIABLE)
    if explicit:
        return Path(explicit).expanduser().absolute()
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "secure_loader"


def keys_dir() -> Path:
    """Private JWK files; mode 0700, files 0600."""
    return home() / "keys"


def trust_dir() -> Path:
    """Trusted signers, one JSON file each."""
    return home() / "trust"


def state_dir() -> Path:
    """What was seen before: the rollback floor."""
    return home() / "state"


def default_key_sources() -> list[str]:
    """References to master keys when the caller named none: ``SECURE_LOADER_KEYS`` (comma-separated), then ``keys/``."""
    named = [item.strip() for item in os.environ.get(KEYS_VARIABLE, "").split(",")]
    sources = [item for item in named if item]
    if keys_dir().is_dir():
        sources.append(str(keys_dir()))
    return sources


def private_folder(path: Path) -> Path:
    """Create a folder that only its owner may enter, where it does not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    return path
