"""Every name of other packages that secure_loader.hf leans on is there, and means what it is taken for.

Run at both ends of the supported range (``make test-transformers``).
"""

from __future__ import annotations

import importlib
import inspect

import pytest
import safetensors
import transformers

from secure_loader import _autoload
from secure_loader.hf import hook


def parameters(function):
    return list(inspect.signature(inspect.unwrap(function)).parameters)


def test_version():
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    assert hook.OLDEST <= version <= hook.NEWEST


@pytest.mark.parametrize("name", sorted(_autoload.MODULES))
def test_modules(name):
    package = name.partition(".")[0]
    pytest.importorskip(package)
    module = importlib.import_module(name)
    hook.patch(module)


def test_every_module_has_its_patch():
    assert hook._PATCHES.keys() == _autoload.MODULES


def test_from_pretrained():
    function = transformers.PreTrainedModel.from_pretrained.__func__
    assert hasattr(function, "_secure_loader")
    names = parameters(function)
    assert names[:2] == ["cls", "pretrained_model_name_or_path"]
    assert {"config", "cache_dir", "local_files_only", "token", "revision", "use_safetensors", "kwargs"} <= set(names)
    source = inspect.getsource(inspect.unwrap(function))
    for name in ("output_loading_info", "subfolder", "variant", "gguf_file", "state_dict"):
        assert f'kwargs.pop("{name}"' in source, name
    assert "return model, loading_info.to_dict()" in source


def test_save_pretrained():
    function = transformers.PreTrainedModel.save_pretrained
    assert hasattr(function, "_secure_loader")
    names = parameters(function)
    assert names[:2] == ["self", "save_directory"]
    assert {"variant", "max_shard_size", "push_to_hub", "is_main_process", "kwargs"} <= set(names)


def test_resolved_checkpoint_files():
    from transformers import modeling_utils

    names = parameters(modeling_utils._get_resolved_checkpoint_files)
    assert {"pretrained_model_name_or_path", "variant", "use_safetensors", "download_kwargs"} <= set(names)
    # The wrapper reads them by name.
    source = inspect.getsource(inspect.unwrap(transformers.PreTrainedModel.from_pretrained.__func__))
    call = source[source.index("_get_resolved_checkpoint_files(") :]
    for name in ("pretrained_model_name_or_path=", "variant=", "use_safetensors=", "download_kwargs="):
        assert name in call[: call.index("\n        )")]


def test_where_weights_go():
    from transformers import core_model_loading, modeling_utils

    assert parameters(core_model_loading.spawn_materialize)[:4] == ["thread_pool", "tensor", "device", "dtype"]
    assert hasattr(core_model_loading.spawn_materialize, "_secure_loader")
    assert hasattr(modeling_utils.check_and_set_device_map, "_secure_loader")
    assert hasattr(modeling_utils._get_device_map, "_secure_loader")
    # The device map is known before files are looked for; each weight is asked for by way of spawn_materialize.
    source = inspect.getsource(inspect.unwrap(transformers.PreTrainedModel.from_pretrained.__func__))
    assert source.index("check_and_set_device_map(") < source.index("_get_resolved_checkpoint_files(")
    loading = inspect.getsource(core_model_loading.convert_and_load_state_dict_in_model)
    assert (
        "spawn_materialize(\n                thread_pool,\n                tensor,\n                param_device,"
        in loading
    )


def test_variant_names():
    from transformers.modeling_utils import _add_variant
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

    from secure_loader.hf import hub

    assert (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME) == (hub.WEIGHTS, hub.INDEX)
    assert _add_variant(SAFE_WEIGHTS_NAME, hub.VARIANT) == hub.SECURE_WEIGHTS
    assert _add_variant(SAFE_WEIGHTS_INDEX_NAME, hub.VARIANT) == hub.SECURE_INDEX


def test_loading_info():
    from transformers.utils.loading_report import LoadStateDictInfo

    info = LoadStateDictInfo(
        set(), set(), {("a", (1,), (2,))}, [], {}, *[set()] * (len(_fields(LoadStateDictInfo)) - 5)
    )
    assert {"missing_keys", "mismatched_keys"} <= info.to_dict().keys()


def _fields(cls):
    import dataclasses

    return dataclasses.fields(cls)


def test_auto_classes():
    from transformers.models.auto import modeling_auto

    base = modeling_auto._BaseAutoModelClass
    classes = [c for c in vars(modeling_auto).values() if isinstance(c, type) and issubclass(c, base)]
    assert len(classes) > 30
    for cls in classes:
        assert hasattr(cls.from_pretrained.__func__, "_secure_loader"), cls
        # Upstream's copies are copies of a bound method, without cls.
        assert "pretrained_model_name_or_path" in parameters(cls.from_pretrained.__func__)[:2]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("configuration_auto", "AutoConfig"),
        ("tokenization_auto", "AutoTokenizer"),
        ("processing_auto", "AutoProcessor"),
        ("image_processing_auto", "AutoImageProcessor"),
        ("feature_extraction_auto", "AutoFeatureExtractor"),
        ("video_processing_auto", "AutoVideoProcessor"),
    ],
)
def test_other_auto_classes(module, name):
    # Not from transformers itself, which hands out a dummy where Pillow is not installed.
    found = getattr(importlib.import_module(f"transformers.models.auto.{module}"), name)
    function = found.from_pretrained.__func__
    assert hasattr(function, "_secure_loader")
    assert parameters(function)[:2] == ["cls", "pretrained_model_name_or_path"]


def test_dynamic_modules():
    from transformers import dynamic_module_utils

    assert parameters(dynamic_module_utils.get_cached_module_file)[:2] == [
        "pretrained_model_name_or_path",
        "module_file",
    ]
    # All remote code passes there.
    assert "get_cached_module_file(" in inspect.getsource(dynamic_module_utils.get_class_from_dynamic_module)


def test_pipeline():
    names = parameters(transformers.pipeline)
    assert names[:2] == ["task", "model"]
    assert "model_kwargs" in names
    assert hasattr(transformers.pipeline, "_secure_loader")


def test_device_map_of_a_model_on_disk():
    """Where the hook looks whether weights stay on disk."""
    accelerate = pytest.importorskip("accelerate")
    assert "hf_device_map" in inspect.getsource(accelerate.dispatch_model)


def test_accelerate_offload():
    offload = pytest.importorskip("accelerate.utils.offload")
    assert "safe_open(" in inspect.getsource(offload.OffloadedWeightsLoader.__getitem__)


def test_peft():
    peft = pytest.importorskip("peft")
    assert parameters(peft.PeftModel.from_pretrained.__func__)[:3] == ["cls", "model", "model_id"]


def test_safetensors_primitives():
    from secure_loader.hf import routing

    for name in routing._ROUTED:
        assert getattr(safetensors, name) is routing._ROUTED[name]
        assert routing.original(name) is getattr(safetensors._safetensors_rust, name)


def test_tensor_spec():
    spec = safetensors.TensorSpec(dtype="bfloat16", shape=[2], data_ptr=0, data_len=4)
    assert (spec.dtype, list(spec.shape), spec.data_ptr, spec.data_len) == ("BF16", [2], 0, 4)
