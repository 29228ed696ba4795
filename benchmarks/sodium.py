"""Imported before tensorizer: lets its encryption find libsodium, the system's or the one that the package rbcl carries.

Where there is neither, tensorizer says so itself when it is asked to encrypt.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib.util
from pathlib import Path

_find = ctypes.util.find_library

if _find("sodium") is None and importlib.util.find_spec("rbcl") is not None:
    from rbcl._sodium import lib_path  # importing it writes the library to a temporary file, and loads it

    ctypes.util.find_library = lambda name: lib_path if name == "sodium" else _find(name)
    try:
        with contextlib.suppress(ImportError):
            import libnacl  # noqa: F401 - it looks for the library when it is imported
    finally:
        ctypes.util.find_library = _find
        Path(lib_path).unlink()
