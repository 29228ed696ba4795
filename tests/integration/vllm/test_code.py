"""Code that comes with a model, under ``--load-format secure`` and ``--trust-remote-code``: signed, or it does not run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from secure_loader import Session, TrustStore
from secure_loader.core.trust_chain import Authority
from secure_loader.core.trust_rules import Rules
from secure_loader.errors import ManifestError, RollbackError
from secure_loader.vllm import code, register
from secure_loader.vllm.fetch import Model
from tests.attacks.kit import MALLORY, SIGN, build_folder
from tests.certificates import ders, pem, root
from tests.integration.vllm.publisher import Publisher

CODE = """
import pathlib
pathlib.Path({mark!r}).touch()
from transformers import Qwen3Config
class OtherConfig(Qwen3Config):
    model_type = "other_qwen3"
"""


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    """A process that has loaded nothing yet, and has copied no code."""
    register()
    monkeypatch.setattr(code, "_settings", None)
    monkeypatch.setattr(code, "_unguarded", set())
    import transformers.dynamic_module_utils

    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))


@pytest.fixture
def mark(tmp_path):
    """A file that is there once the model's code has run."""
    return tmp_path / "ran"


@pytest.fixture
def plain(tiny_qwen3, tmp_path, mark):
    return with_code(shutil.copytree(tiny_qwen3, tmp_path / "plain"), mark)


def with_code(folder, mark, where=""):
    config = folder / "config.json"
    doc = json.loads(config.read_text())
    doc |= {"auto_map": {"AutoConfig": f"{where}other.OtherConfig"}, "model_type": "other_qwen3"}
    config.write_text(json.dumps(doc))
    (folder / "other.py").write_text(CODE.format(mark=str(mark)))
    return folder


def configure(model, load_format="secure", **settings):
    from vllm.engine.arg_utils import EngineArgs

    settings = {"trust_remote_code": True, "enforce_eager": True, "max_model_len": 64} | settings
    return EngineArgs(model=str(model), load_format=load_format, **settings).create_engine_config()


def get_config(model):
    from vllm.transformers_utils.config import get_config

    return get_config(str(model), trust_remote_code=True)


def test_signed_code_runs(plain, publisher: Publisher, tmp_path, mark):
    folder = publisher.publish(plain, tmp_path / "secure")
    config = configure(folder)
    assert type(config.model_config.hf_config).__name__ == "OtherConfig"
    assert mark.exists()


@pytest.mark.parametrize("setting", ["insecure_allow_plaintext", "insecure_allow_legacy"])
def test_a85_code_in_a_folder_without_a_manifest(plain, mark, setting):
    with pytest.raises(ManifestError, match="code that nobody signed"):
        configure(plain, model_loader_extra_config={setting: True})
    assert not mark.exists()


def test_a85_added_code(tiny_qwen3, publisher: Publisher, tmp_path, mark):
    folder = publisher.publish(tiny_qwen3, tmp_path / "secure")
    with_code(folder, mark)
    with pytest.raises(ManifestError):
        configure(folder)
    assert not mark.exists()


def test_a85_a_signed_config_that_names_code_elsewhere(tiny_qwen3, plain, publisher: Publisher, tmp_path, mark):
    source = with_code(shutil.copytree(tiny_qwen3, tmp_path / "source"), mark, f"{plain}--")
    (source / "other.py").unlink()
    folder = publisher.publish(source, tmp_path / "secure")
    with pytest.raises(ManifestError):
        configure(folder)
    assert not mark.exists()


def test_a85_code_of_another_model_in_the_same_process(secure_qwen3, plain, publisher: Publisher, tmp_path, mark):
    """A tokenizer, a processor, a draft model, or what a config names as its language model."""
    configure(secure_qwen3, trust_remote_code=False)
    with pytest.raises(ManifestError):
        get_config(plain)
    assert not mark.exists()
    get_config(publisher.publish(plain, tmp_path / "secure"))
    assert mark.exists()


def test_a85_code_in_a_worker(plain, mark):
    """Which sees no arguments of the engine, only its loader's."""
    from vllm.config.load import LoadConfig

    from secure_loader.vllm.loader import SecureModelLoader

    SecureModelLoader(LoadConfig(load_format="secure"))
    with pytest.raises(ManifestError):
        get_config(plain)
    assert not mark.exists()


def test_a85_code_that_changed_after_the_check(plain, publisher: Publisher, tmp_path, mark):
    folder = publisher.publish(plain, tmp_path / "secure")
    configure(folder)
    mark.unlink()
    (folder / "other.py").write_text(CODE.format(mark=str(mark)) + "x = 1\n")
    with pytest.raises(ManifestError, match=r"other\.py"):
        get_config(folder)
    assert not mark.exists()


def test_models_in_other_formats_are_left_alone(plain, secure_qwen3, mark):
    configure(plain, "auto")
    assert mark.exists()
    mark.unlink()
    configure(secure_qwen3, trust_remote_code=False)
    # Loaded as a plain model by whoever runs this process, before or after.
    configure(plain, "auto")
    with pytest.raises(ManifestError):
        configure(plain, "secure", model_loader_extra_config={"insecure_allow_plaintext": True})


def test_a85_a_branch_that_moves_on(publisher: Publisher, plain, tmp_path, monkeypatch):
    """The Hub may hand out another commit than the one that was verified a moment before."""
    folder = publisher.publish(plain, tmp_path / "secure")
    snapshot = tmp_path / "hub" / "models--me--model" / "snapshots" / ("c" * 40)
    shutil.copytree(folder, snapshot)

    class Hub:
        def snapshot_download(self, repo_id, **_):
            return str(snapshot)

    from secure_loader.vllm import fetch

    monkeypatch.setattr(fetch, "hf_api", Hub)
    asked = []
    guarded = code.verifying(lambda *args, **kwargs: asked.append((args, kwargs)))
    from secure_loader.config import load

    guarded("me/model", "other.py", revision="main")
    code.guard(load())
    guarded("me/model", "other.py", revision="main")
    with pytest.raises(ManifestError, match=r"missing\.py"):
        guarded("me/model", "missing.py", revision="main")
    assert [kwargs["revision"] for _, kwargs in asked] == ["main", "c" * 40]


def test_a85_an_older_release_under_another_certificate(tmp_path):
    """Keys of an authority are new ones often: what holds them together is its name, before any code runs as after."""
    ca = root()
    rules = Rules(
        authorities=(Authority("acme", (pem(tmp_path / "root.pem", ca.certificate),), ("demo/*",), (("O", "Acme"),)),)
    )
    session = Session(keys=[], trust=TrustStore([], rules=rules))
    for release, key in ((5, SIGN), (4, MALLORY)):
        signing = replace(key, chain=ders(ca.issue(key)))
        folder = build_folder(tmp_path / f"release-{release}", signing_key=signing, release=release)
        if release == 5:
            Model(str(folder)).verify_settings(session)
    with pytest.raises(RollbackError, match="release 4"):
        Model(str(folder)).verify_settings(session)
