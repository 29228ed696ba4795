"""The load format ``secure``.

vLLM's default loader with another way to read: everything that happens to a weight after it was read, and everything
around it (quantisation, checks for missing weights, messages), stays vLLM's.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from tqdm.auto import tqdm
from vllm.logger import init_logger
from vllm.model_executor.model_loader import weight_utils
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

from ..core import index
from ..core.archive import Archive, TensorFile
from ..core.device.ahead import DeviceAhead
from ..core.device.engine import Engine
from ..core.memory import advise_huge
from ..core.prefetch import Prefetch
from ..core.session import Session
from ..core.source import read_small_file
from ..core.tensors import framework
from ..errors import ConfigError, EncryptedFileError, FormatError, MissingFileError
from . import code
from .fetch import Model
from .lazy import LazyTensor
from .options import LoaderOptions

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.config import ModelConfig
    from vllm.config.load import LoadConfig

    from ..core.checkpoint import Checkpoint

# vLLM configures its own logger only; under its name our lines look and go as all others do.
_log = init_logger("vllm.secure_loader")

_MAX_MODULES = 1 << 20
# vLLM copies what it is handed, so this comes on top of the model: enough to keep the processors busy.
_MAX_AHEAD = 128 << 20
# On a GPU such copies cost next to nothing, but a transfer of few megabytes ends before disk and bus are busy (ADR 0012).
_MAX_AHEAD_ON_DEVICE = 64 << 20
_MIN_LAZY_ON_DEVICE = 32 << 20
_DESCRIPTION = "Loading encrypted safetensors checkpoint shards"


class SecureModelLoader(DefaultModelLoader):
    """Loads encrypted and signed model folders.

    Args:
        load_config: vLLM's settings. They are shared with other loaders and stay as they are.

    Raises:
        ConfigError: ``model_loader_extra_config`` holds an unknown key, a wrong value, or key material.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        self.options = LoaderOptions.parse(load_config.model_loader_extra_config)
        code.guard(self.options.config)
        self._device = "cpu"
        # The base class knows neither our format nor our keys, and writes to its load_config.
        super().__init__(
            dataclasses.replace(
                load_config, load_format="safetensors", model_loader_extra_config=self.options.for_stock()
            )
        )

    def download_model(self, model_config: ModelConfig) -> None:
        """Fetch and verify a model, so that it can be loaded at once."""
        self._open(model_config.model, model_config.revision)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fill a model's parameters; as vLLM's own, which calls it."""
        devices = (parameter.device for parameter in model.parameters() if not parameter.is_meta)
        self._device = str(next(devices, "cpu"))
        for parameter in model.parameters():
            if parameter.device.type == "cpu":
                # New, untouched memory: in huge pages it is filled several times faster.
                storage = parameter.untyped_storage()
                advise_huge(storage.data_ptr(), storage.nbytes())
        super().load_weights(model, model_config)

    def _open(self, name: str, revision: str | None) -> Checkpoint:
        # A session of its own each time: after a sleep that dropped the weights, keys and trust are asked for anew.
        return Model(name, revision, self.load_config.download_dir).open(Session(config=self.options.config))

    def _get_weights_iterator(
        self, source: DefaultModelLoader.Source
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """vLLM's hook: the weights of one source, by their names in the checkpoint with the source's prefix."""
        if self.load_config.safetensors_load_strategy not in (None, "lazy"):
            self._explain_strategy()
        checkpoint = self._open(source.model_or_path, source.revision)
        shards = self._wanted(checkpoint, source)
        _refuse_unreachable(checkpoint)
        if checkpoint.manifest is not None and checkpoint.signer is not None:
            _log.info_once(
                "Verified %s: model %s, release %d, signed by %s",
                source.model_or_path,
                checkpoint.manifest.model_id,
                checkpoint.manifest.release,
                checkpoint.signer.name,
            )
        if self.counter_before_loading_weights == 0.0:
            self.counter_before_loading_weights = time.perf_counter()
        return self._read(checkpoint, shards, source.prefix)

    def _explain_strategy(self) -> None:
        strategy = self.load_config.safetensors_load_strategy
        if strategy == "torchao":
            raise ConfigError("load format secure cannot rebuild torchao's tensor subclasses yet")
        _log.info_once("safetensors_load_strategy=%s does not apply to load format secure", strategy)

    def _wanted(self, checkpoint: Checkpoint, source: DefaultModelLoader.Source) -> list[str]:
        """The shards of a source, in the order in which vLLM reads them, without those that it says to skip."""
        weights = _weights(checkpoint, source.subfolder, source.allow_patterns_overrides)
        shards = sorted(weights, key=weight_utils._natural_sort_key)  # noqa: SLF001
        if self._encoder_only_lm_prefixes is not None:
            shards = self._without_language_model(checkpoint, shards, source)
        unused = source.is_unused_weight
        if unused is not None:
            # As in vLLM, a shard is left out only as a whole, and never all of them.
            shards = [s for s in shards if not all(unused(name) for name in weights[s])] or shards
        return shards

    def _without_language_model(
        self, checkpoint: Checkpoint, shards: list[str], source: DefaultModelLoader.Source
    ) -> list[str]:
        folder = checkpoint.folder / (source.subfolder or "")
        found = index.find(folder, [PurePosixPath(s).name for s in shards])
        if found is None:
            return shards
        paths = {str(checkpoint.folder / shard): shard for shard in shards}
        kept = weight_utils.filter_mm_encoder_only_safetensors_files(
            list(paths),
            str(folder),
            found[0].name,
            self._encoder_only_lm_prefixes or (),
            weights_mapper=self._encoder_only_weights_mapper,
        )
        if not kept:
            raise ConfigError("mm-encoder-only leaves no shard of this model to load", path=checkpoint.folder)
        return [paths[path] for path in kept]

    def _read(
        self, checkpoint: Checkpoint, shards: Sequence[str], prefix: str
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        for shard in tqdm(
            shards,
            desc=_DESCRIPTION,
            disable=not weight_utils.enable_tqdm(self.load_config.use_tqdm_on_load),
            bar_format=weight_utils._BAR_FORMAT,  # noqa: SLF001
        ):
            file = checkpoint.open(shard)
            if file.envelope is None:
                _log.warning("%s is not encrypted; insecure_allow_plaintext accepts it", file.source.path)
            names = list(self._local_names(file))
            engine = file.engine(self._device)
            smallest = None if engine is None else _MIN_LAZY_ON_DEVICE
            late = {name for name in names if self.options.lazy and LazyTensor.supports(file, name, smallest)}
            with self._ahead(file, [name for name in names if name not in late], engine) as ahead:
                archive = Archive(file, "pt", self._device if engine is not None else "cpu", ahead)
                for name in names:
                    yield prefix + name, LazyTensor(file, file.info(name)) if name in late else archive.get_tensor(name)
            # Lazy weights that the model has kept for later hold the file open for themselves.
            del archive, ahead, file

    def _ahead(self, file: TensorFile, names: Sequence[str], engine: Engine | None) -> Prefetch | DeviceAhead:
        """What reads whole tensors ahead of vLLM, which copies them."""
        budget = self.options.config.prefetch_bytes
        tensors = [(file, name) for name in names] if budget else []
        if engine is not None:
            placed = [(file, name, engine) for file, name in tensors]
            return DeviceAhead(placed, framework("pt"), min(budget, _MAX_AHEAD_ON_DEVICE))
        return Prefetch(tensors, framework("pt"), min(budget, _MAX_AHEAD), file.read_options)

    def _local_names(self, file: TensorFile) -> Iterator[str]:
        """Names in file order, without the experts of other ranks: those are not even decrypted."""
        return (name for name in file.header.tensors if not should_skip_weight(name, self.local_expert_ids))


def _refuse_unreachable(checkpoint: Checkpoint) -> None:
    """Refuse encrypted weights that vLLM reads past all load formats, where it would take noise and say nothing.

    Raises:
        EncryptedFileError: The model has some.
    """
    modules = checkpoint.folder / "modules.json"
    if not modules.exists():
        return
    try:
        listed = json.loads(read_small_file(str(modules), _MAX_MODULES))
        dense = [str(m["path"]) for m in listed if str(m["type"]).endswith(".Dense")]
    except (ValueError, TypeError, KeyError):
        raise FormatError("is not a list of modules", path=modules) from None
    for shard in checkpoint.shards():
        if str(PurePosixPath(shard).parent) not in dense:
            continue
        file = checkpoint.open(shard)
        with file.source:
            sealed = [name for name in file.header.tensors if file.is_sealed(name)]
        if sealed:
            raise EncryptedFileError(
                "vLLM reads this dense layer past all load formats",
                path=checkpoint.folder / shard,
                hint=f"encrypt the model again and leave it in clear: --exclude {sealed[0].partition('.')[0]}.*",
            )


def _weights(checkpoint: Checkpoint, subfolder: str | None, patterns: Iterable[str] | None) -> dict[str, list[str]]:
    """Tensor names by shard, for the checkpoint that a source means.

    Raises:
        MissingFileError: There is none.
        FormatError: The folder does not say which shards it means.
    """
    where = PurePosixPath(subfolder or "")
    here = [s for s in checkpoint.shards() if PurePosixPath(s).parent == where]
    if patterns is not None:
        here = [s for s in here if any(fnmatch.fnmatchcase(PurePosixPath(s).name, p) for p in patterns)]
        return _found(checkpoint, {s: list(_header_names(checkpoint, s)) for s in here}, where)
    if subfolder is None and checkpoint.manifest is not None:
        weight_map = dict(checkpoint.manifest.weights)
    else:
        by_name = {PurePosixPath(s).name: s for s in here}
        found = index.find(checkpoint.folder / where, by_name)
        weight_map = {} if found is None else {t: by_name[s] for t, s in found[1].items()}
    if not weight_map:
        # No index: vLLM reads every safetensors file that lies there.
        return _found(checkpoint, {s: list(_header_names(checkpoint, s)) for s in here}, where)
    shards: dict[str, list[str]] = {}
    for tensor, shard in weight_map.items():
        shards.setdefault(shard, []).append(tensor)
    return shards


def _found(checkpoint: Checkpoint, shards: dict[str, list[str]], where: PurePosixPath) -> dict[str, list[str]]:
    if not shards:
        raise MissingFileError("holds no safetensors files to load", path=checkpoint.folder / where)
    seen: dict[str, str] = {}
    for shard, names in shards.items():
        for name in names:
            if seen.setdefault(name, shard) != shard:
                raise FormatError(f"{seen[name]} and {shard} both hold {name!r}, and no index says which counts")
    return shards


def _header_names(checkpoint: Checkpoint, shard: str) -> list[str]:
    file = checkpoint.open(shard)
    with file.source:
        return list(file.header.tensors)
