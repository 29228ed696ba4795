"""Python code that comes with a model: under the load format ``secure`` it is signed, or does not run.

``trust_remote_code`` says that a model's own code may run, not whose that is: a config can name code in any repository,
and a tokenizer or a draft model can bring some along. All of it passes one function of Transformers on its way.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import config as cfg
from ..core.session import Session
from ..errors import ManifestError
from .fetch import Model, is_snapshot

# Of this process: its tokenizers, processors and model classes are made in several threads and from many places.
_settings: cfg.LoaderConfig | None = None
_unguarded: set[str] = set()


def guard(settings: cfg.LoaderConfig, *names: str | None) -> None:
    """From now on, this process runs only code from folders whose manifest it verified.

    Args:
        settings: Whom to trust.
        names: Models that count as secure ones from now on, whatever :func:`allow` said of them.
    """
    global _settings  # noqa: PLW0603 - the state of the process
    _settings = settings
    _unguarded.difference_update(filter(None, names))


def allow(*names: str | None) -> None:
    """Leave the code of these models to those who load them in another format."""
    _unguarded.update(filter(None, names))


def verifying(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Transformers' ``get_cached_module_file``, with a look at the manifest before it."""

    @functools.wraps(stock)
    def get_cached_module_file(
        pretrained_model_name_or_path: str | os.PathLike[str], module_file: str, *args: Any, **kwargs: Any
    ) -> Any:
        name = os.fspath(pretrained_model_name_or_path)
        if _settings is not None and name not in _unguarded:
            if kwargs.get("repo_type") not in (None, "model"):
                raise ManifestError(
                    "code of a repository that is no model does not run under --load-format secure", path=name
                )
            model = Model(name, kwargs.get("revision"), kwargs.get("cache_dir"))
            folder, manifest = model.verify_settings(Session(keys=[], config=_settings))
            if manifest is None or module_file not in manifest.files:
                raise ManifestError(
                    f"{module_file} is not part of a signed folder; code that nobody signed does not run under "
                    "--load-format secure",
                    path=name,
                )
            if is_snapshot(folder) and not Path(name).is_dir():
                kwargs["revision"] = folder.name  # the commit that was verified, whatever a branch says by now
        return stock(pretrained_model_name_or_path, module_file, *args, **kwargs)

    return get_cached_module_file
