"""Encrypted model weights that load as if they were not encrypted.

Names are resolved when they are first used (PEP 562): importing the package costs next to nothing and pulls in neither
torch nor transformers nor vllm.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import LoaderConfig as LoaderConfig
    from .core.archive import Archive as Archive
    from .core.export import decrypt_model as decrypt_model
    from .core.hardening import harden_process as harden_process
    from .core.inspection import inspect as inspect
    from .core.inspection import verify as verify
    from .core.keys.held import forget_keys as forget_keys
    from .core.keys.jwk import MasterKey as MasterKey
    from .core.keys.jwk import SigningKey as SigningKey
    from .core.rewrap import rewrap_model as rewrap_model
    from .core.session import Session as Session
    from .core.session import safe_open as safe_open
    from .core.trust import TrustedSigner as TrustedSigner
    from .core.trust import TrustStore as TrustStore
    from .core.writer import encrypt_model as encrypt_model
    from .errors import SecureLoaderError as SecureLoaderError

__version__ = "0.1.0"

_HOMES = {
    "Archive": "core.archive",
    "LoaderConfig": "config",
    "MasterKey": "core.keys.jwk",
    "SecureLoaderError": "errors",
    "Session": "core.session",
    "SigningKey": "core.keys.jwk",
    "TrustStore": "core.trust",
    "TrustedSigner": "core.trust",
    "decrypt_model": "core.export",
    "encrypt_model": "core.writer",
    "forget_keys": "core.keys.held",
    "harden_process": "core.hardening",
    "inspect": "core.inspection",
    "rewrap_model": "core.rewrap",
    "safe_open": "core.session",
    "verify": "core.inspection",
}
__all__ = [*_HOMES, "__version__"]  # noqa: PLE0604 - every item is a string


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
