"""Where this user keeps keys, trusted signers and what was seen: ``SECURE_LOADER_HOME``."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ..errors import ConfigError
from .secrets import looks_like_key

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


def recipients_dir() -> Path:
    """Public identities of others, one JWK file each."""
    return home() / "recipients"


def oms_dir() -> Path:
    """Public keys (PEM) of those whose ``model.sig`` counts."""
    return trust_dir() / "oms"


def state_dir() -> Path:
    """What was seen before: the rollback floor."""
    return home() / "state"


def cache_dir() -> Path:
    """What can be made again: ``cache`` in a home folder that was named, or a folder in the user's cache."""
    if os.environ.get(HOME_VARIABLE):
        return home() / "cache"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "secure_loader"


def default_key_sources() -> list[str]:
    """References to master keys when the caller named none: ``SECURE_LOADER_KEYS`` (comma-separated), then ``keys/``.

    Raises:
        ConfigError: The variable holds a key instead of the way to one.
    """
    named = os.environ.get(KEYS_VARIABLE, "")
    sources = [item.strip() for item in named.split(",") if item.strip()]
    if any(looks_like_key(item) for item in (named, *sources)):
        # Not shown: messages travel further than the environment does.
        raise ConfigError(
            f"{KEYS_VARIABLE} takes references (paths, file:…, env:NAME), never key material itself",
            hint=f"put the key into another variable, and {KEYS_VARIABLE}=env:THAT_VARIABLE",
        )
    if keys_dir().is_dir():
        sources.append(str(keys_dir()))
    return sources


def refuse_foreign(info: os.stat_result, path: Path, what: str) -> None:
    """Refuse a file that decides whom or what to believe, where others could have written it.

    Raises:
        ConfigError: It belongs to neither this user nor root, or its group or everybody may write it.
    """
    if info.st_uid not in (0, os.geteuid()) or stat.S_IMODE(info.st_mode) & 0o022:
        raise ConfigError(f"{what} could have been written by others", path=path, hint=f"chmod go-w {path}")


def private_folder(path: Path) -> Path:
    """Create a folder that only its owner may enter, where it does not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    return path
