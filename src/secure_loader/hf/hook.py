"""The only file that knows Transformers', accelerate's and peft's own names.

Supported: Transformers 5.17 to 5.23 (the contract tests pin every name that is used here, at both ends of the range).
Older ones are refused when ``loader="secure"`` is asked for; newer ones are tried, with a warning.

==========================================  =============================================================
name                                        what is done to it
==========================================  =============================================================
``PreTrainedModel.from_pretrained``         takes ``loader`` and ``loader_config``
``PreTrainedModel.save_pretrained``         takes ``saver``; warns before it writes secure weights in clear
``check_and_set_device_map``                tells where weights are going to be
``_get_device_map``                         tells how a model is shared out between devices
``_get_resolved_checkpoint_files``          checks the folder, picks the variant, names the cure
``core_model_loading.spawn_materialize``    reads a weight on the device that it belongs to
``AutoModel*.from_pretrained``              checks the folder before its config is read
``AutoConfig``, ``AutoTokenizer``, …        the same, where the folder is a signed one
``get_cached_module_file``                  runs code only from folders whose manifest was checked
``pipeline``                                takes ``loader`` and ``loader_config``
``accelerate.utils.offload.safe_open``      reads weights on disk again during the forward pass
``PeftModel.from_pretrained``               takes ``loader`` and ``loader_config``
==========================================  =============================================================
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from types import ModuleType
from typing import Any

from .. import _autoload
from ..core.archive import TensorSlice
from ..core.checkpoint import Checkpoint
from ..errors import ConfigError, ManifestError, NotEncryptedError
from . import hub, routing
from .context import Context, current, loading

OLDEST, NEWEST = (5, 17), (5, 23)
_FLAG = "_secure_loader"
_log = logging.getLogger(__name__)
_warned: set[str] = set()


def install() -> None:
    """Activate: patch what is imported, and wait for what is not. A second call changes nothing.

    Raises:
        ImportError: safetensors is not installed.
    """
    routing.install()
    _autoload.add_finder()
    for name in _autoload.MODULES & sys.modules.keys():
        module = sys.modules[name]
        # One that is being imported this very moment meets the finder at its end.
        if not getattr(module.__spec__, "_initializing", False):
            patch(module)


def patch(module: ModuleType) -> None:
    """Patch one of :data:`_autoload.MODULES`, once."""
    routing.install()
    _PATCHES[module.__name__](module)


def check_supported(version: str) -> None:
    """Refuse a Transformers that is too old, and warn about one that is newer than what was tested.

    Raises:
        ConfigError: Too old.
    """
    major, minor = (int("".join(c for c in part if c.isdigit()) or 0) for part in [*version.split("."), "0"][:2])
    supported = f"secure_loader supports Transformers {_dots(OLDEST)} to {_dots(NEWEST)}"
    if (major, minor) < OLDEST:
        raise ConfigError(f"Transformers {version} is too old: {supported}", hint="pip install -U transformers")
    if (major, minor) > NEWEST:
        _warn_once("version", "%s; %s has not been tested", supported, version)


def _dots(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _warn_once(what: str, message: str, *values: object) -> None:
    if what not in _warned:
        _warned.add(what)
        _log.warning(message, *values)


# ------------------------------------------------------------------------------------------------- loading a model


def _patch_modeling_utils(module: Any) -> None:
    base = module.PreTrainedModel
    _wrap_classmethod(base, _model_from_pretrained)
    if not hasattr(base.save_pretrained, _FLAG):
        base.save_pretrained = _flagged(base.save_pretrained, _model_save_pretrained)
    if not hasattr(module._get_resolved_checkpoint_files, _FLAG):  # noqa: SLF001 - the point of this file
        inner = module._get_resolved_checkpoint_files  # noqa: SLF001 - likewise
        module._get_resolved_checkpoint_files = _flagged(inner, _resolved_checkpoint_files)  # noqa: SLF001 - likewise
    if not hasattr(module.check_and_set_device_map, _FLAG):
        module.check_and_set_device_map = _flagged(module.check_and_set_device_map, _check_device_map)
    if not hasattr(module._get_device_map, _FLAG):  # noqa: SLF001 - likewise
        module._get_device_map = _flagged(module._get_device_map, _share_out)  # noqa: SLF001 - likewise
    loading_module: Any = sys.modules["transformers.core_model_loading"]
    if not hasattr(loading_module.spawn_materialize, _FLAG):
        loading_module.spawn_materialize = _flagged(loading_module.spawn_materialize, _spawn_materialize)


def _model_from_pretrained(
    inner: Callable[..., Any],
    cls: type,
    pretrained_model_name_or_path: Any = None,
    *args: Any,
    loader: str | None = None,
    loader_config: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    name = pretrained_model_name_or_path
    with loading(loader, loader_config) as context:
        if context is None or (name is None and loader != "secure"):
            return inner(cls, name, *args, **kwargs)
        _check_arguments(name, kwargs)
        checkpoint = _check_folder(context, name, kwargs)
        kwargs["use_safetensors"] = True
        wanted = kwargs.pop("output_loading_info", False)
        model, info = inner(cls, name, *args, output_loading_info=True, **kwargs)
        _check_complete(context, checkpoint, kwargs, info)
        # Plain attributes survive deepcopy and pickle, as the reason for the warning does.
        model.__dict__[_FLAG] = True
        if "disk" in (getattr(model, "hf_device_map", None) or {}).values():
            routing.keep_for_offload(model, context.files_on_disk())
        return (model, info) if wanted else model


def _check_arguments(name: Any, kwargs: Mapping[str, Any]) -> None:
    check_supported(sys.modules["transformers"].__version__)
    if name is None:
        raise ConfigError('loader="secure" needs a folder or repo id: there is nothing to load securely')
    if kwargs.get("use_safetensors") is False:
        raise ConfigError('loader="secure" reads safetensors files only; drop use_safetensors=False')
    if kwargs.get("gguf_file"):
        raise ConfigError('loader="secure" reads safetensors files only; drop gguf_file')
    if kwargs.get("state_dict") is not None:
        raise ConfigError('loader="secure" takes the weights from the folder; drop state_dict')


def _check_folder(context: Context, name: Any, kwargs: MutableMapping[str, Any]) -> Checkpoint | None:
    """Check the folder behind a name, and pin a Hub repo to the commit that was checked.

    A session that writes also reads folders without manifest: then None.
    """
    if _is_own_output(context, name, kwargs):
        return None
    checkpoint = hub.checked(context, name, kwargs)
    commit = hub.commit_of(checkpoint)
    # An adapter's commit says nothing about the base model, which upstream looks up by the same revision.
    if commit is not None and not os.path.isdir(name) and not (checkpoint.folder / "adapter_config.json").exists():
        kwargs["revision"] = commit
    return checkpoint


def _is_own_output(context: Context, name: Any, kwargs: Mapping[str, Any]) -> bool:
    writes = context.writer is not None and not context.writer.ephemeral
    return writes and os.path.isdir(name) and not hub.has_manifest(name, kwargs)


def _check_complete(
    context: Context, checkpoint: Checkpoint | None, kwargs: Mapping[str, Any], info: Mapping[str, Any]
) -> None:
    """Upstream fills what it does not find with random numbers, and warns. That must not pass for a verified model."""
    folder = None if checkpoint is None else checkpoint.folder
    if checkpoint is not None and checkpoint.manifest is not None and not kwargs.get("subfolder"):
        left_out = sorted(set(checkpoint.manifest.weights.values()) - context.opened(checkpoint))
        if left_out and kwargs.get("variant") in (None, hub.VARIANT) and not _is_adapter(checkpoint):
            raise ManifestError(f"{left_out[0]} is part of the signed checkpoint, but was not read", path=folder)
    missing = sorted(info["missing_keys"]) + sorted(str(m[0]) for m in info["mismatched_keys"])
    if missing and not context.session.config.allow_missing_weights:
        more = f" (and {len(missing) - 1} more)" if missing[1:] else ""
        raise ManifestError(
            f"the checkpoint holds no weights for {missing[0]}{more}; upstream would make them up at random",
            path=folder,
            hint='a new head that is going to be trained: loader_config={"allow_missing_weights": True}',
        )


def _is_adapter(checkpoint: Checkpoint) -> bool:
    return (checkpoint.folder / "adapter_config.json").exists() and not (checkpoint.folder / "config.json").exists()


def _check_device_map(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    device_map = inner(*args, **kwargs)
    context = current()
    if context is not None:
        context.device_map = device_map
    return device_map


def _share_out(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    device_map = inner(*args, **kwargs)
    context = current()
    if context is not None:
        context.share_out(device_map)
    return device_map


def _spawn_materialize(
    inner: Callable[..., Any], thread_pool: Any, tensor: Any, device: Any = None, *args: Any, **kwargs: Any
) -> Any:
    # Upstream reads on the CPU and copies; to a GPU, ciphertext is copied and decrypted there.
    if isinstance(tensor, TensorSlice) and device is not None:
        tensor = tensor.on(device)
    return inner(thread_pool, tensor, device, *args, **kwargs)


def _resolved_checkpoint_files(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    context = current()
    name = kwargs.get("pretrained_model_name_or_path")
    where = {**(kwargs.get("download_kwargs") or {})}
    if context is None or context.passive:
        try:
            return inner(*args, **kwargs)
        except OSError:
            # "No file named model.safetensors" is true of an encrypted folder, and helps nobody.
            if context is None and name is not None and hub.has_manifest(name, where):
                raise routing.refusal(name) from None
            raise
    if name is None:
        return inner(*args, **kwargs)
    checkpoint = None if _is_own_output(context, name, where) else hub.checked(context, name, where)
    if checkpoint is not None and kwargs.get("variant") is None:
        kwargs["variant"] = hub.variant_of(checkpoint, where.get("subfolder") or "")
    kwargs["use_safetensors"] = True
    try:
        files, metadata = inner(*args, **kwargs)
    except OSError as e:
        raise ManifestError(f"the checkpoint is not where it should be: {e}", path=name) from e
    for file in files or []:
        if not str(file).endswith(".safetensors"):
            raise NotEncryptedError('is no safetensors file, and loader="secure" reads no others', path=file)
    # While upstream builds the model, in Python and on one processor.
    context.read_ahead(files or [])
    return files, metadata


# --------------------------------------------------------------------------------------- Auto classes, code, pipeline


def _patch_modeling_auto(module: Any) -> None:
    base = module._BaseAutoModelClass  # noqa: SLF001 - the point of this file
    for cls in {base, *(c for c in vars(module).values() if isinstance(c, type) and issubclass(c, base))}:
        # Each Auto class holds a copy of the function: upstream copies it to give each a docstring of its own.
        if "from_pretrained" in vars(cls):
            _wrap_classmethod(cls, _auto_model_from_pretrained)


def _auto_model_from_pretrained(
    inner: Callable[..., Any],
    cls: type,
    pretrained_model_name_or_path: Any,
    *args: Any,
    loader: str | None = None,
    loader_config: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    name = pretrained_model_name_or_path
    with loading(loader, loader_config) as context:
        if context is not None:
            # Before the config is read: it decides which code runs.
            _check_arguments(name, kwargs)
            _check_folder(context, name, kwargs)
        # The wrapped from_pretrained of the model class meets the context; upstream would deep-copy the settings.
        return inner(cls, name, *args, **kwargs)


def _patch_auto(module: ModuleType) -> None:
    for name, cls in list(vars(module).items()):
        own = isinstance(cls, type) and cls.__module__ == module.__name__
        if own and name.startswith("Auto") and "from_pretrained" in vars(cls):
            _wrap_classmethod(cls, _auto_from_pretrained)


def _auto_from_pretrained(
    inner: Callable[..., Any],
    cls: type,
    pretrained_model_name_or_path: Any,
    *args: Any,
    loader: str | None = None,
    loader_config: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    name = pretrained_model_name_or_path
    with loading(loader, loader_config) as context:
        # In a session, a tokenizer may as well come from a folder that is not encrypted; code may not (see below).
        if context is not None and (loader == "secure" or hub.has_manifest(name, kwargs)):
            _check_folder(context, name, kwargs)
        return inner(cls, name, *args, **kwargs)


def _patch_dynamic_modules(module: Any) -> None:
    if not hasattr(module.get_cached_module_file, _FLAG):
        module.get_cached_module_file = _flagged(module.get_cached_module_file, _cached_module_file)


def _cached_module_file(
    inner: Callable[..., Any], pretrained_model_name_or_path: Any, module_file: str, *args: Any, **kwargs: Any
) -> Any:
    context = current()
    if context is not None and not context.passive:
        checkpoint = hub.checked(context, pretrained_model_name_or_path, kwargs)
        if checkpoint.manifest is None or module_file not in checkpoint.manifest.files:
            raise ManifestError(
                f"{module_file} is not part of a signed folder; code that nobody signed does not run under "
                'loader="secure"',
                path=pretrained_model_name_or_path,
            )
        commit = hub.commit_of(checkpoint)
        if commit is not None and not os.path.isdir(pretrained_model_name_or_path):
            kwargs["revision"] = commit
    return inner(pretrained_model_name_or_path, module_file, *args, **kwargs)


def _patch_pipelines(module: Any) -> None:
    if not hasattr(module.pipeline, _FLAG):
        wrapped = _flagged(module.pipeline, _pipeline)
        # Callers that have it by name already get this one too.
        routing.replace_everywhere({id(module.pipeline): wrapped}, except_in=(__name__,))


def _pipeline(
    inner: Callable[..., Any],
    *args: Any,
    loader: str | None = None,
    loader_config: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    # Left where they are, upstream hands model_kwargs to the tokenizer as well, which stores them.
    options = dict(kwargs.get("model_kwargs") or {})
    for name in ("loader", "loader_config"):
        if name in options and {"loader": loader, "loader_config": loader_config}[name] is not None:
            raise ConfigError(f"{name} is given twice: to pipeline and in model_kwargs")
    loader, loader_config = options.pop("loader", loader), options.pop("loader_config", loader_config)
    if kwargs.get("model_kwargs") is not None:
        kwargs["model_kwargs"] = options
    with loading(loader, loader_config) as context:
        model = kwargs.get("model", args[1] if len(args) > 1 else None)
        if context is not None and loader == "secure" and not isinstance(model, (str, os.PathLike)):
            raise ConfigError(
                'loader="secure" is about a folder or repo id, and pipeline was given none',
                hint='load the model itself with from_pretrained(..., loader="secure")',
            )
        return inner(*args, **kwargs)


# ------------------------------------------------------------------------------------------- saving, offload, adapters


def _model_save_pretrained(
    inner: Callable[..., Any],
    model: Any,
    save_directory: Any,
    *args: Any,
    saver: str | None = None,
    saver_config: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    if saver not in (None, "plain", "secure"):
        raise ConfigError(f'unknown saver {saver!r}; there are "plain" and "secure"')
    if kwargs.get("loader") is not None:
        raise ConfigError('save_pretrained takes saver="secure"; loader is for loading')
    if saver_config is not None and saver != "secure":
        raise ConfigError('saver_config needs saver="secure"')
    if saver == "secure":
        from .saving import save_pretrained

        return save_pretrained(model, save_directory, *args, **(saver_config or {}), **kwargs)
    context = current()
    in_clear = context is None or context.writer is None
    if in_clear and saver is None and model.__dict__.get(_FLAG) and kwargs.get("is_main_process", True):
        _warn_once(
            "plain save",
            "%s was loaded from encrypted weights, and save_pretrained writes them in clear to %s. "
            'Use secure_loader.hf.save_pretrained or saver="secure"; saver="plain" says that it is meant.',
            type(model).__name__,
            save_directory,
        )
    return inner(model, save_directory, *args, **kwargs)


def _patch_offload(module: Any) -> None:
    module.safe_open = routing.offload_safe_open


def _patch_peft(module: Any) -> None:
    _wrap_classmethod(module.PeftModel, _peft_from_pretrained)


def _peft_from_pretrained(
    inner: Callable[..., Any],
    cls: type,
    model: Any,
    model_id: Any,
    *args: Any,
    loader: str | None = None,
    loader_config: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    with loading(loader, loader_config) as context:
        if context is not None and not _is_own_output(context, model_id, kwargs):
            hub.checked(context, model_id, kwargs)
        return inner(cls, model, model_id, *args, **kwargs)


# ------------------------------------------------------------------------------------------------------------ wrapping


def _flagged(inner: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(inner, *args, **kwargs)

    setattr(wrapper, _FLAG, True)
    return wrapper


def _wrap_classmethod(cls: type, around: Callable[..., Any]) -> None:
    inner = vars(cls)["from_pretrained"].__func__
    if not hasattr(inner, _FLAG):
        cls.from_pretrained = classmethod(_flagged(inner, around))  # type: ignore[attr-defined]


_PATCHES: dict[str, Callable[[Any], None]] = {
    "transformers.modeling_utils": _patch_modeling_utils,
    "transformers.dynamic_module_utils": _patch_dynamic_modules,
    "transformers.pipelines": _patch_pipelines,
    "transformers.models.auto.modeling_auto": _patch_modeling_auto,
    "transformers.models.auto.configuration_auto": _patch_auto,
    "transformers.models.auto.tokenization_auto": _patch_auto,
    "transformers.models.auto.processing_auto": _patch_auto,
    "transformers.models.auto.image_processing_auto": _patch_auto,
    "transformers.models.auto.feature_extraction_auto": _patch_auto,
    "transformers.models.auto.video_processing_auto": _patch_auto,
    "accelerate.utils.offload": _patch_offload,
    "peft.peft_model": _patch_peft,
}
