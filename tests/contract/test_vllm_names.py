"""The names of vLLM that are not its public interface and that this package leans on, for vLLM 0.32 to 0.33.

When one of these fails, look at ``secure_loader/vllm`` before widening the supported range.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from importlib import metadata

import pytest

vllm = pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


def names(function):
    return list(inspect.signature(function).parameters)


def test_supported_version():
    assert (0, 32) <= tuple(int(part) for part in metadata.version("vllm").split("+")[0].split(".")[:2]) < (0, 34)


def test_registry():
    from vllm.model_executor import model_loader

    assert isinstance(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, dict)
    assert names(model_loader.register_model_loader) == ["load_format"]


def test_default_loader():
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    assert names(DefaultModelLoader.__init__) == ["self", "load_config"]
    assert names(DefaultModelLoader._get_weights_iterator) == ["self", "source"]
    assert names(DefaultModelLoader.get_all_weights) == ["self", "model_config", "model"]
    assert names(DefaultModelLoader.download_model) == ["self", "model_config"]
    assert DefaultModelLoader.counter_before_loading_weights == 0.0
    fields = [field.name for field in dataclasses.fields(DefaultModelLoader.Source)]
    assert fields == [
        "model_or_path",
        "revision",
        "subfolder",
        "prefix",
        "fall_back_to_pt",
        "allow_patterns_overrides",
        "is_unused_weight",
    ]
    body = inspect.getsource(DefaultModelLoader)
    assert "self.local_expert_ids: set[int] | None = None" in body
    assert "self._encoder_only_lm_prefixes: tuple[str, ...] | None = None" in body
    assert "self._encoder_only_weights_mapper" in body
    assert '"enable_weights_track"' in body


def test_load_config():
    from vllm.config.load import LoadConfig

    fields = {field.name for field in dataclasses.fields(LoadConfig)}
    assert {
        "load_format",
        "model_loader_extra_config",
        "download_dir",
        "use_tqdm_on_load",
        "safetensors_load_strategy",
    } <= fields
    assert LoadConfig(load_format="SECURE").load_format == "secure"


def test_weight_utils():
    from vllm.model_executor.model_loader import weight_utils
    from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
    from vllm.transformers_utils.repo_utils import hf_api

    assert weight_utils._BAR_FORMAT.endswith("\n")
    assert names(weight_utils.enable_tqdm) == ["use_tqdm_on_load"]
    assert weight_utils._natural_sort_key("model-00010-of-00012.safetensors")
    assert names(weight_utils.get_lock) == ["model_name_or_path", "cache_dir"]
    assert names(weight_utils.maybe_download_from_modelscope)[:3] == ["model", "revision", "download_dir"]
    assert names(weight_utils.filter_mm_encoder_only_safetensors_files) == [
        "hf_weights_files",
        "hf_folder",
        "index_file",
        "language_model_prefixes",
        "weights_mapper",
    ]
    assert issubclass(weight_utils.DisabledTqdm, weight_utils.tqdm)
    assert names(should_skip_weight) == ["weight_name", "local_expert_ids"]
    assert "snapshot_download" in dir(hf_api())


def test_what_the_guards_replace():
    from transformers import dynamic_module_utils
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora import lora_model
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.runai_streamer_loader import RunaiModelStreamerLoader

    assert "create_engine_config" in vars(EngineArgs)
    fields = {field.name for field in dataclasses.fields(EngineArgs)}
    assert {"model", "revision", "load_format", "model_loader_extra_config"} <= fields
    assert {"trust_remote_code", "tokenizer", "tokenizer_revision", "hf_config_path"} <= fields
    assert "get_cached_module_file(" in inspect.getsource(dynamic_module_utils.get_class_from_dynamic_module)
    for loader in (DefaultModelLoader, RunaiModelStreamerLoader):
        assert "_prepare_weights" in vars(loader)
        assert "self._prepare_weights(" in inspect.getsource(loader._get_weights_iterator)
    assert hasattr(lora_model.safetensors, "safe_open")
    assert "safetensors.safe_open(" in inspect.getsource(lora_model.LoRAModel.from_local_checkpoint)
    assert names(WorkerLoRAManager.__init__)[:2] == ["self", "vllm_config"]
    assert "self._lora_model_cls.from_local_checkpoint(" in inspect.getsource(WorkerLoRAManager._load_adapter)


def test_plugins_are_found_by_entry_point():
    from vllm import plugins

    assert plugins.DEFAULT_PLUGINS_GROUP == "vllm.general_plugins"


def test_another_vllm_is_left_alone(monkeypatch, caplog):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor import model_loader

    from secure_loader.vllm import register

    monkeypatch.delattr(EngineArgs, "create_engine_config")
    monkeypatch.delitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, "secure", raising=False)
    said = []
    monkeypatch.setattr(
        logging.getLogger("vllm.secure_loader"), "exception", lambda text, *args: said.append(text % args)
    )
    register()
    assert "secure" not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER
    assert "not one that secure_loader supports" in said[0]
