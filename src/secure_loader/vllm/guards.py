"""Where vLLM is changed outside its own extension points, each place with its reason.

vLLM 0.32 and 0.33; ``tests/contract/test_vllm_names.py`` pins every name. All changes are made once per process and do
nothing to models and adapters that are not encrypted and to loads that did not ask for ``secure``.

===============================================  ======================================================================
changed name                                     why
===============================================  ======================================================================
``EngineArgs.create_engine_config``              config, tokenizer and code of a ``secure`` model are verified before
                                                 vLLM reads them; an encrypted folder under another format is refused
                                                 at once instead of a minute later
``DefaultModelLoader._prepare_weights``,         no stock format hands out ciphertext as weights
``RunaiModelStreamerLoader._prepare_weights``
``dynamic_module_utils.get_cached_module_file``  of Transformers: with ``trust_remote_code``, only code of a signed folder
                                                 runs, wherever a config says that it is
``lora_model.safetensors``                       encrypted adapters: LoRA files do not go through load formats
``WorkerLoRAManager.__init__``                   adapters of a ``secure`` model are opened with its settings, and must
                                                 be encrypted as well
===============================================  ======================================================================
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from ..core import envelope as env
from ..core import manifest as mf
from ..core.archive import Archive
from ..core.checkpoint import Checkpoint
from ..core.session import Session
from ..core.source import FileSource, read_header
from ..errors import EncryptedFileError, ManifestError, NotEncryptedError, SecureLoaderError
from . import LOAD_FORMAT, code
from .fetch import Model, is_snapshot
from .options import LoaderOptions

_MARK = "__secure_loader__"
_CURE = "load it with --load-format secure"
# The other formats do not read the model's safetensors files: dummy, tensorizer, sharded_state, ipc_cache.
_READS_SAFETENSORS = frozenset(
    {"auto", "hf", "safetensors", "mistral", "fastsafetensors", "instanttensor", "runai_streamer", "modelexpress"}
)
# Settings of the engine that is just opening an adapter: vLLM's code in between has no place for them.
_adapter_options: ContextVar[LoaderOptions | None] = ContextVar("secure_loader_adapter_options", default=None)


def install() -> None:
    """Make all changes; those that are made already are left alone."""
    from transformers import dynamic_module_utils
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora import lora_model
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.runai_streamer_loader import RunaiModelStreamerLoader

    _wrap(EngineArgs, "create_engine_config", _verifying_first)
    _wrap(dynamic_module_utils, "get_cached_module_file", code.verifying)
    _wrap(DefaultModelLoader, "_prepare_weights", _refusing_encrypted)
    _wrap(RunaiModelStreamerLoader, "_prepare_weights", _refusing_encrypted)
    _wrap(WorkerLoRAManager, "__init__", _securing_adapters)
    _wrap(lora_model, "safetensors", _opening_encrypted)


def _wrap(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Replace a name of a class or module by what ``wrapper`` makes of it, once."""
    stock = vars(owner)[name]
    if not hasattr(stock, _MARK):
        changed = wrapper(stock)
        setattr(changed, _MARK, True)
        setattr(owner, name, changed)


def _verifying_first(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_engine_args(self)
        return stock(self, *args, **kwargs)

    return create_engine_config


def check_engine_args(args: Any) -> None:
    """Verify what a ``secure`` load will read, or refuse to read encrypted files in another format.

    Args:
        args: vLLM's ``EngineArgs``.

    Raises:
        EncryptedFileError: The model is encrypted, and another load format was asked for.
        SecureLoaderError: The model is not what a trusted publisher signed, or the settings are wrong.
    """
    load_format = str(args.load_format).lower()
    if load_format == LOAD_FORMAT:
        session = Session(config=LoaderOptions.parse(args.model_loader_extra_config).config)
        code.guard(session.config, args.model)
        if "://" not in args.model:  # object storage: vLLM itself says that this load format cannot
            # Config and tokenizer come from the Hub's own cache, whatever download_dir says for weights.
            folder, manifest = Model(args.model, args.revision).verify_settings(session)
            if manifest is None and args.trust_remote_code:
                raise ManifestError(
                    f"has no {mf.MANIFEST}; code that nobody signed does not run under --load-format secure",
                    path=args.model,
                    hint="drop --trust-remote-code, or encrypt the folder",
                )
            _pin(args, folder)
        return
    code.allow(args.model, args.tokenizer)
    if load_format in _READS_SAFETENSORS and Path(args.model).is_dir():
        refuse_encrypted(sorted(str(path) for path in Path(args.model).glob("*.safetensors")))


def _pin(args: Any, folder: Path) -> None:
    """Have vLLM read the very commit that was verified, whatever a branch of the repository says a moment later."""
    if Path(args.model).is_dir() or not is_snapshot(folder) or args.hf_config_path is not None:
        return  # a config elsewhere would be looked up by the same revision
    if args.tokenizer not in (None, args.model) and args.tokenizer_revision is None:
        args.tokenizer_revision = args.revision or "main"  # so would a tokenizer elsewhere
    args.revision = folder.name


def _refusing_encrypted(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def _prepare_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = stock(self, *args, **kwargs)
        # The list of files itself, or a tuple with it: what else is in there differs between versions.
        refuse_encrypted(_paths(found))
        return found

    return _prepare_weights


def _paths(found: Any) -> Iterator[str]:
    for item in found:
        if isinstance(item, str):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _paths(item)


def refuse_encrypted(paths: Iterable[str]) -> None:
    """Raise for encrypted files among these.

    Raises:
        EncryptedFileError: There is one.
    """
    for path in paths:
        if path.endswith(".safetensors") and is_encrypted(path):
            raise EncryptedFileError("is encrypted: read as it is, it is noise", path=path, hint=_CURE)


def is_encrypted(path: str | os.PathLike[str]) -> bool:
    """Whether a file says in its header that it is encrypted; False for what cannot be read as safetensors."""
    try:
        with FileSource(path) as source:
            return env.is_encrypted(read_header(source))
    except SecureLoaderError:
        return False  # not ours: vLLM says what is wrong with it


def _opening_encrypted(stock: ModuleType) -> SimpleNamespace:
    """The module ``safetensors`` as vLLM's LoRA code sees it, whose ``safe_open`` opens encrypted adapters as well."""

    def safe_open(filename: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        options = _adapter_options.get()
        must_be_ours = options is not None and not options.accepts_plaintext_adapters
        if must_be_ours or is_encrypted(filename):
            return open_adapter(filename)
        return stock.safe_open(filename, *args, **kwargs)

    return SimpleNamespace(**{**vars(stock), "safe_open": safe_open})


def open_adapter(filename: str | os.PathLike[str]) -> Archive:
    """An encrypted adapter's file, after its folder's manifest was verified.

    Args:
        filename: In the adapter's folder.

    Raises:
        SecureLoaderError: As :class:`core.checkpoint.Checkpoint`.
    """
    path = Path(filename)
    options = _adapter_options.get()
    session = Session(config=None if options is None else options.config)
    checkpoint = Checkpoint(path.parent, session, partial=is_snapshot(path.parent))
    return Archive(checkpoint.open(path.name), "pt")


def _securing_adapters(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it is one
        stock(self, vllm_config, *args, **kwargs)
        load = vllm_config.load_config
        if load.load_format == LOAD_FORMAT:
            options = LoaderOptions.parse(load.model_loader_extra_config)
            self._lora_model_cls = _secured(self._lora_model_cls, options)

    return __init__


def _secured(base: Any, options: LoaderOptions) -> Any:
    """vLLM's class of LoRA models, which reads checkpoints under these settings."""

    class SecureLoRAModel(base):  # type: ignore[misc]
        @classmethod
        def from_local_checkpoint(cls, lora_dir: str, *args: Any, **kwargs: Any) -> Any:
            if not options.accepts_plaintext_adapters:
                demand_encrypted_adapter(lora_dir)
            token = _adapter_options.set(options)
            try:
                return super().from_local_checkpoint(lora_dir, *args, **kwargs)
            finally:
                _adapter_options.reset(token)

    return SecureLoRAModel


def demand_encrypted_adapter(lora_dir: str | os.PathLike[str]) -> None:
    """Raise for a LoRA adapter that is not encrypted.

    Raises:
        NotEncryptedError: It is not; its weights could be anybody's.
    """
    folder = Path(lora_dir)
    if not is_encrypted(folder / "adapter_model.safetensors"):
        raise NotEncryptedError(
            "this adapter is not encrypted, but the model it changes is",
            path=folder,
            hint=f"encrypt it (a signed folder with {mf.MANIFEST}), or set insecure_allow_plaintext_adapters",
        )
