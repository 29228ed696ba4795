"""Encrypted weights in vLLM: ``--load-format secure``.

vLLM calls :func:`register` in each of its processes, by the entry point ``vllm.general_plugins``.
"""

from __future__ import annotations

__all__ = ["register"]

LOAD_FORMAT = "secure"


def register() -> None:
    """Teach vLLM the load format ``secure``, and its other load formats to refuse encrypted files.

    May be called any number of times. vLLM is imported here and not with this module.
    """
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader

    from . import guards
    from .loader import SecureModelLoader

    if _LOAD_FORMAT_TO_MODEL_LOADER.get(LOAD_FORMAT) is not SecureModelLoader:
        register_model_loader(LOAD_FORMAT)(SecureModelLoader)
    guards.install()
