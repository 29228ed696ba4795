"""Transformers: ``from_pretrained(..., loader="secure")``, ``pipeline(..., loader="secure")``, and encrypted saving.

Importing this package activates it. That is rarely needed: when the package is installed, ``import torch`` does it by
an entry point (:mod:`secure_loader._autoload`).
"""

from __future__ import annotations

from .context import session as session
from .hook import install as install
from .saving import save_pretrained as save_pretrained

__all__ = ["install", "save_pretrained", "session"]

install()
