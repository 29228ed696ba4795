"""Encrypted weights in vLLM: ``--load-format secure``.

vLLM calls :func:`register` in each of its processes, by the entry point ``vllm.general_plugins``.
"""

from __future__ import annotations

import logging

__all__ = ["register"]

LOAD_FORMAT = "secure"


def register() -> None:
    """Teach vLLM the load format ``secure``, and its other load formats to refuse encrypted files.

    May be called any number of times. vLLM is imported here and not with this module. Under a vLLM whose insides have
    other names nothing is changed, and the log says so: vLLM would end here otherwise, also for those who never asked.
    """
    try:
        from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader

        from . import guards
        from .loader import SecureModelLoader

        guards.install()
        if _LOAD_FORMAT_TO_MODEL_LOADER.get(LOAD_FORMAT) is not SecureModelLoader:
            register_model_loader(LOAD_FORMAT)(SecureModelLoader)
    except (ImportError, AttributeError, KeyError):
        # Under vLLM's name, which is the only one that it shows.
        logging.getLogger("vllm.secure_loader").exception(
            "load format %s is not there: this vLLM is not one that secure_loader supports (0.32 and 0.33)", LOAD_FORMAT
        )
