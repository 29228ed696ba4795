"""The routing of safetensors' primitives, the finder, and the pytest plugin."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

import secure_loader.hf
from secure_loader import _autoload
from secure_loader.errors import ConfigError
from secure_loader.hf import hook, hub, routing, sniff
from secure_loader.hf.context import current, in_hub_cache, manifest_folder


def test_safe_open_stays_a_class(tied):
    assert isinstance(safetensors.safe_open, type)
    with safetensors.safe_open(tied.plain / "model.safetensors", framework="pt") as file:
        assert type(file) is routing.original("safe_open")
        assert isinstance(file, safetensors.safe_open)
    assert not isinstance(1, safetensors.safe_open)


def test_installing_again_changes_nothing():
    from transformers import PreTrainedModel

    before = safetensors.safe_open, PreTrainedModel.from_pretrained.__func__, list(sys.meta_path)
    secure_loader.hf.install()
    assert before == (safetensors.safe_open, PreTrainedModel.from_pretrained.__func__, list(sys.meta_path))


def test_plain_files_go_to_the_originals(tmp_path):
    tensors = {"a": torch.arange(5), "b": torch.ones(2, 3, dtype=torch.bfloat16)}
    file = tmp_path / "x.safetensors"
    safetensors.torch.save_file(tensors, file, metadata={"k": "v"})
    assert file.read_bytes() == safetensors.torch.save(tensors, metadata={"k": "v"})
    assert all(torch.equal(t, tensors[n]) for n, t in safetensors.torch.load_file(file).items())
    assert all(torch.equal(t, tensors[n]) for n, t in safetensors.torch.load(file.read_bytes()).items())
    with safetensors.safe_open(str(file), "pt", device="cpu", backend="pread") as opened:
        assert opened.metadata() == {"k": "v"}
    with file.open("rb") as handle:
        assert safetensors._safe_open_handle(handle, framework="pt").keys() == ["a", "b"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 8,
        b"\xff" * 16,
        b"\x05\0\0\0\0\0\0\0{}",
        b"\x02\0\0\0\0\0\0\0{}",
        b"\x10\0\0\0\0\0\0\0{'a'::}1234567",
    ],
    ids=range(6),
)
def test_broken_files_get_safetensors_own_errors(content, tmp_path):
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    outcomes = []
    for opener in (routing.original("safe_open"), safetensors.safe_open):
        try:
            outcomes.append(opener(str(file), framework="pt").keys())
        except Exception as e:  # noqa: BLE001 - whatever it is, it must be the same
            outcomes.append((type(e), str(e)))
    assert outcomes[0] == outcomes[1]


def test_missing_file_gets_safetensors_own_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="No such file or directory"):
        safetensors.safe_open(tmp_path / "x.safetensors", framework="pt")


def test_numpy(publisher, sharded):
    shard = min(sharded.secure.glob("*.safetensors"))
    with secure_loader.hf.session(publisher.config), safetensors.safe_open(shard, framework="np") as file:
        name = next(iter(file.keys()))
        assert file.get_slice(name).get_dtype() == "BF16"


def test_every_dtype_is_written_and_read_back(publisher, tmp_path):
    kinds = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16]
    kinds += [torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16]
    tensors = {str(k): torch.randint(0, 2, (3, 4), dtype=torch.int16).to(k) for k in kinds}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4)}
    file = tmp_path / "x.safetensors"
    with secure_loader.hf.session(publisher.config, encrypt_as="run", **publisher.keys):
        safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
        loaded = safetensors.torch.load_file(file)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("cut", ["__encryption__", "__crypto_keys__", "__signature__", "__policy__"])
def test_a_file_from_which_fields_were_cut_is_no_plain_file(cut, tied, tmp_path):
    from secure_loader.core import header as hdr

    data = (tied.secure / "model.secure.safetensors").read_bytes()
    (n,) = hdr.LENGTH.unpack(data[:8])
    import json

    doc = json.loads(data[8 : 8 + n])
    del doc["__metadata__"][cut]
    raw = json.dumps(doc).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(hdr.LENGTH.pack(len(raw)) + raw + data[8 + n :])
    assert sniff.looks_encrypted(file)
    assert sniff.bytes_look_encrypted(file.read_bytes())


def test_what_is_not_encrypted_does_not_look_so(tied, tmp_path):
    assert not sniff.looks_encrypted(tied.plain / "model.safetensors")
    assert not sniff.looks_encrypted(tied.plain / "config.json")
    assert not sniff.looks_encrypted(tmp_path)
    assert not sniff.looks_encrypted(tmp_path / "absent")
    assert not sniff.bytes_look_encrypted(b"123")


def test_shard_numbers():
    assert routing._shard_number("a/model.secure-00002-of-00003.safetensors") == (2, 3)
    assert routing._shard_number("model.safetensors") == (1, 1)
    with pytest.raises(secure_loader.errors.FormatError):
        routing._shard_number("model-00004-of-00003.safetensors")


def test_metadata_of_a_secure_file_can_be_written_again(publisher, tmp_path):
    metadata = {"format": "pt", "__signature__": "x", "__notice__": "y"}
    with secure_loader.hf.session(publisher.config, encrypt_as="run", **publisher.keys):
        safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors", metadata=metadata)
        with safetensors.safe_open(tmp_path / "x.safetensors", framework="pt") as file:
            assert file.metadata() == {"format": "pt"}


def test_session_ends_with_its_block(publisher):
    assert current() is None

    def fail():
        with secure_loader.hf.session(publisher.config):
            assert current() is not None
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert current() is None


def test_folders(tmp_path):
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / "a" / "secure_manifest.json").touch()
    assert manifest_folder(tmp_path / "a" / "b") == str(tmp_path / "a")
    assert manifest_folder(tmp_path) is None
    assert in_hub_cache("/x/models--a--b/snapshots/0123")
    assert not in_hub_cache("/x/models--a--b/other/0123")


# ---------------------------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize("version", ["5.17.0", "5.23.4", "5.20.0.dev0"])
def test_supported_versions(version, caplog):
    hook.check_supported(version)
    assert not caplog.records


def test_unsupported_versions(caplog, monkeypatch):
    monkeypatch.setattr(hook, "_warned", set())
    with pytest.raises(ConfigError, match="too old"):
        hook.check_supported("4.57.6")
    for version in ("5.24.0", "6.0"):
        hook.check_supported(version)
    assert len(caplog.records) == 1


# ------------------------------------------------------------------------------------------------------------ the Hub


def test_files_that_the_cache_lacks_are_fetched(sharded, publisher, tmp_path, monkeypatch):
    """Online: the manifest first, then what it lists, at the commit of the manifest."""
    import shutil

    import huggingface_hub

    from secure_loader.core.session import Session
    from secure_loader.hf.context import Context

    snapshot = tmp_path / "models--acme--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    asked = []

    def one(repo, name, **options):
        asked.append((repo, name, options["revision"]))
        shutil.copy(sharded.secure / name, snapshot)
        return str(snapshot / name)

    def many(repo, *, revision, allow_patterns, cache_dir, token):
        asked.append((repo, len(allow_patterns), revision, cache_dir, token))
        shutil.copytree(sharded.secure, snapshot, dirs_exist_ok=True)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", one)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", many)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    context = Context(Session.from_options(publisher.config))
    checkpoint = hub.checked(context, "acme/tiny", {"revision": "main", "token": "t"})
    assert hub.commit_of(checkpoint) == "abc"
    count = len(list(sharded.secure.iterdir()))  # not the manifest again, but a model.sig, should there be one
    assert asked == [("acme/tiny", "secure_manifest.json", "main"), ("acme/tiny", count, "abc", tmp_path, "t")]


@pytest.mark.parametrize("kind", ["EntryNotFoundError", "RepositoryNotFoundError", "LocalEntryNotFoundError"])
def test_errors_of_the_hub(kind, monkeypatch):
    from huggingface_hub import errors

    expected = {
        "EntryNotFoundError": secure_loader.errors.ManifestError,
        "RepositoryNotFoundError": secure_loader.errors.SourceError,
        "LocalEntryNotFoundError": secure_loader.errors.OfflineError,
    }[kind]
    cls = getattr(errors, kind)
    error = cls.__new__(cls)
    Exception.__init__(error, "no")
    with pytest.raises(expected), hub._hub_errors("acme/tiny", "x"):
        raise error


# ---------------------------------------------------------------------------------------------------------- the finder


def test_finder_hands_over_a_module_once(monkeypatch, tmp_path):
    (tmp_path / "waited_for.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(_autoload, "MODULES", {"waited_for"})
    seen = []
    monkeypatch.setattr(hook, "patch", seen.append)
    monkeypatch.setattr(sys, "meta_path", [_autoload._Finder(), *sys.meta_path])
    import waited_for

    assert seen == [waited_for]
    assert type(waited_for.__loader__).__name__ == "SourceFileLoader"
    assert waited_for.__spec__.loader is waited_for.__loader__
    assert importlib.util.find_spec("json") is not None
    del sys.modules["waited_for"]


def test_a_failing_hook_does_not_break_the_import(monkeypatch, tmp_path, caplog):
    (tmp_path / "waited_for.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(_autoload, "MODULES", {"waited_for"})
    monkeypatch.setattr(hook, "patch", lambda module: 1 / 0)
    monkeypatch.setattr(sys, "meta_path", [_autoload._Finder(), *sys.meta_path])
    import waited_for

    assert waited_for.value == 1
    assert "could not prepare waited_for" in caplog.text
    del sys.modules["waited_for"]


def test_register_never_raises(monkeypatch):
    def fail():
        raise RuntimeError

    monkeypatch.setattr(_autoload, "add_finder", fail)
    _autoload.register()


def test_register_imports_nothing_heavy():
    script = (
        "import sys\nfrom secure_loader import _autoload\n_autoload.register()\n_autoload.register()\n"
        "import secure_loader.testing.plugin\n"
        "assert sum(type(f).__name__ == '_Finder' for f in sys.meta_path) == 1\n"
        "heavy = {'torch', 'transformers', 'numpy', 'safetensors', 'cryptography', 'tqdm', 'secure_loader.hf'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
    )
    source = str(Path(secure_loader.__file__).parents[1])
    subprocess.run([sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {source!r})\n{script}"], check=True)


def test_switch(monkeypatch):
    called = []
    monkeypatch.setattr(_autoload, "add_finder", lambda: called.append(1))
    for value, expected in (("0", 0), ("off", 0), ("1", 1), ("", 2)):
        monkeypatch.setenv("SECURE_LOADER_AUTOLOAD", value)
        _autoload.register()
        assert len(called) == expected


# ---------------------------------------------------------------------------------------------------------- the plugin

SUITE = """
import torch, threading
from safetensors import safe_open
from safetensors.torch import load_file, save_file

def test_round_trip(tmp_path):
    save_file({"x": torch.arange(10)}, tmp_path / "x.safetensors", metadata={"a": "b"})
    data = (tmp_path / "x.safetensors").read_bytes()
    assert (b"__encryption__" in data) is EXPECTED
    assert torch.equal(load_file(tmp_path / "x.safetensors")["x"], torch.arange(10))
    with safe_open(tmp_path / "x.safetensors", "pt") as f:
        assert f.metadata() == {"a": "b"}
    result = []
    thread = threading.Thread(target=lambda: result.append(load_file(tmp_path / "x.safetensors")))
    thread.start(); thread.join()
    assert result

def test_models(tmp_path):
    from transformers import BertConfig, BertModel, AutoModel
    model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9))
    model.save_pretrained(tmp_path / "m")
    again, info = AutoModel.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")

def test_plain_fixture():
    assert load_file(PLAIN)
"""


@pytest.mark.parametrize("option", [True, False])
def test_plugin(option, tmp_path, tied):
    plain = str(tied.plain / "model.safetensors")
    suite = SUITE.replace("EXPECTED", str(option)).replace("PLAIN", repr(plain))
    (tmp_path / "test_other_project.py").write_text(suite)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "test_other_project.py"]
    if not _is_installed():
        command += ["-p", "secure_loader.testing.plugin"]
    if option:
        command += ["--secure-loader"]
    import os

    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    assert ("2 files written encrypted" in done.stdout) is option


def _is_installed():
    from importlib import metadata

    return any(e.name == "secure_loader" for e in metadata.entry_points(group="pytest11"))


def test_plugin_is_inert_without_its_option():
    from secure_loader.testing import plugin

    config = SimpleNamespace(getoption=lambda name: False)
    plugin.pytest_configure(config)
    assert plugin.pytest_report_header(config) is None
    assert current() is None
