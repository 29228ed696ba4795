"""Entry point of ``torch.backends``: ``import torch`` calls :func:`register`, in every process that uses torch.

It only puts a finder in front of the import system, which waits for the modules that the Transformers hook is about.
It imports nothing heavy and never raises. ``SECURE_LOADER_AUTOLOAD=0`` switches it off; ``import secure_loader.hf``
does the same openly.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Sequence
from types import ModuleType

VARIABLE = "SECURE_LOADER_AUTOLOAD"
MODULES = frozenset(
    {
        "transformers.modeling_utils",
        "transformers.dynamic_module_utils",
        "transformers.pipelines",
        "transformers.models.auto.modeling_auto",
        "transformers.models.auto.configuration_auto",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.auto.processing_auto",
        "transformers.models.auto.image_processing_auto",
        "transformers.models.auto.feature_extraction_auto",
        "transformers.models.auto.video_processing_auto",
        "accelerate.utils.offload",
        "peft.peft_model",
    }
)


_asking = threading.local()


class _Finder(importlib.abc.MetaPathFinder):
    """Hands each of :data:`MODULES` to the hook, right after it was executed."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the protocol
        target: ModuleType | None = None,  # noqa: ARG002 - the protocol
    ) -> importlib.machinery.ModuleSpec | None:
        # Other finders that ask around as this one does must not be sent in circles.
        if fullname not in MODULES or getattr(_asking, "now", False):
            return None
        _asking.now = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            _asking.now = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """The module's own loader, with the hook behind it; steps aside once the module is there."""

    def __init__(self, own: importlib.abc.Loader) -> None:
        self._own = own

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._own
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        self._own.exec_module(module)
        _prepare(module)


class _WatchedSpec(importlib.machinery.ModuleSpec):
    """The spec of a module that is being executed already; tells when that is done.

    Transformers' own modules import torch, so some of :data:`MODULES` are halfway through when torch calls
    :func:`register`. The import system marks the end by clearing ``_initializing`` (tests/contract pins the name).
    """

    @property
    def _initializing(self) -> bool:
        return bool(vars(self).get("_initializing"))

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        vars(self)["_initializing"] = value
        module = sys.modules.get(self.name)
        if not value and module is not None:
            self.__class__ = importlib.machinery.ModuleSpec  # type: ignore[assignment]
            _prepare(module)


def _prepare(module: ModuleType) -> None:
    try:
        from .hf import hook

        hook.patch(module)
    except Exception:
        # The import of somebody else's library must not fail over ours. Without the hook, loader="secure" is an
        # argument that nobody knows: Transformers refuses it.
        logging.getLogger(__name__).exception("secure_loader could not prepare %s", module.__name__)


def add_finder() -> None:
    """Put the finder in place, once, and watch the modules that came too early for it."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    for name in MODULES:
        module = sys.modules.get(name)
        spec = getattr(module, "__spec__", None)
        if type(spec) is importlib.machinery.ModuleSpec and getattr(spec, "_initializing", False):
            spec.__class__ = _WatchedSpec


def register() -> None:
    """What the entry point names."""
    try:
        if os.environ.get(VARIABLE, "1").strip().lower() in ("0", "false", "no", "off"):
            return
        add_finder()
    except Exception:
        logging.getLogger(__name__).debug("secure_loader was not registered", exc_info=True)
