"""The suites, by name: one module each."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.model import Suite

NAMES = (
    "load",
    "memory",
    "slice",
    "save",
    "encrypt",
    "header",
    "keys",
    "transformers",
    "vllm",
    "cold",
    "clear",
    "scaling",
)


def find(name: str) -> Suite:
    """The suite of a module, by name."""
    suite: Suite = importlib.import_module(f"benchmarks.suites.{name}").SUITE
    return suite
