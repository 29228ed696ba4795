"""env and config show; and the examples in configs/ are what they claim to be."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import re
from pathlib import Path

import pytest

import secure_loader
from secure_loader.config import LoaderConfig
from secure_loader.core import environment
from secure_loader.core.environment import within
from secure_loader.core.trust import read_trust_file

CONFIGS = Path(__file__).parents[3] / "configs"


def test_env_of_an_empty_home(cli, home):
    doc = cli("env", "--json").json
    assert doc["version"] == secure_loader.__version__
    assert doc["home"] == str(home)
    assert (doc["master_keys"], doc["signing_keys"], doc["trusted_signers"]) == (0, 0, 0)
    assert {p["name"] for p in doc["packages"]} == set(environment.PACKAGES)
    installed = {p["name"]: p["version"] for p in doc["packages"]}
    assert installed["cryptography"] == importlib.metadata.version("cryptography")
    assert "OpenSSL" in doc["openssl"]
    assert doc["threads"] >= 1
    assert not home.exists()


def test_env_for_a_person(cli):
    cli("keygen", "alice")
    out = cli("env").out
    for part in (
        f"secure_loader {secure_loader.__version__}",
        "OpenSSL",
        "1 master key, 1 signing key",
        "No problems.",
    ):
        assert part in out


def test_env_names_what_is_wrong(cli, home, monkeypatch):
    cli("keygen", "alice")
    (home / "keys" / "alice.enc.jwk").chmod(0o644)
    (home / "keys" / "bad.jwk").write_text("{")
    (home / "keys" / "bad.jwk").chmod(0o600)
    (home / "trust" / "alice.json").chmod(0o666)
    home.chmod(0o777)
    (home / "keys").chmod(0o755)
    (home / "config.toml").write_text("[loader]\nnope = 1\n")
    monkeypatch.setenv("SECURE_LOADER_KEYS", "/nowhere/x.jwk")
    problems = cli("env", "--json").json["problems"]
    for part in (
        "alice.enc.jwk",
        "bad.jwk",
        "alice.json",
        f"{home} can be written",
        "can be entered",
        "nope",
        "/nowhere/x.jwk",
    ):
        assert any(part in p for p in problems), (part, problems)
    assert "Problems" in cli("env").out


def test_env_tells_whether_hooks_are_on(cli, monkeypatch):
    found = importlib.metadata.EntryPoints(
        importlib.metadata.EntryPoint("secure_loader", "x:y", group)
        for group in ("torch.backends", "vllm.general_plugins")
    )
    monkeypatch.setattr(importlib.metadata, "entry_points", found.select)

    def hooks():
        return {h["group"]: h["why_not"] for h in cli("env", "--json").json["hooks"]}

    for name in ("VLLM_PLUGINS", "TORCH_DEVICE_BACKEND_AUTOLOAD", "SECURE_LOADER_AUTOLOAD"):
        monkeypatch.delenv(name, raising=False)
    assert hooks() == {"torch.backends": None, "vllm.general_plugins": None}
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    monkeypatch.setenv("SECURE_LOADER_AUTOLOAD", "0")
    assert hooks() == {
        "torch.backends": "SECURE_LOADER_AUTOLOAD=0",
        "vllm.general_plugins": "VLLM_PLUGINS does not name secure_loader",
    }
    monkeypatch.setenv("VLLM_PLUGINS", "other,secure_loader")
    assert hooks()["vllm.general_plugins"] is None
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **params: ())
    assert "not installed" in hooks()["torch.backends"]


def test_env_compares_versions_with_what_we_declare(cli, monkeypatch):
    requires = ["cryptography>=50", "transformers<5.24,>=5.17; extra == 'hf'", "torch>=2.10; extra == 'test'", "vllm"]
    versions = {"cryptography": "49.1", "transformers": "5.19.0", "vllm": "0.32.0+cpu", "torch": "1.0"}

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requires)
    monkeypatch.setattr(importlib.metadata, "version", version)
    packages = {p["name"]: p for p in cli("env", "--json").json["packages"]}
    assert packages["cryptography"]["fits"] is False
    assert packages["transformers"]["supported"] == ">=5.17,<5.24"
    assert packages["transformers"]["fits"] is True
    assert packages["torch"]["fits"] is None
    assert packages["numpy"]["version"] is None
    out = cli("env").out
    assert "cryptography 49.1 is outside >=50" in out
    assert "49.1 (!)" in out


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("5.17.0", ">=5.17,<5.24", True),
        ("5.24.0", ">=5.17,<5.24", False),
        ("5.24.0rc1", ">=5.17,<5.24", False),
        ("0.32.0+cpu", ">=0.32,<0.34", True),
        ("5.9", ">=5.17", False),
        ("2", "==2.0", True),
        ("2.1", "!=2.1", False),
        ("2.1", ">2.1", False),
        ("2.1", "<=2.1", True),
        ("2.1", "~=2.0", True),
    ],
)
def test_within(version, wanted, fits):
    assert within(version, wanted) is fits


def test_config_show_defaults(cli, home):
    doc = cli("config", "show", "--json").json
    assert doc["config_file"] is None
    assert doc["settings"].keys() == {f.name for f in dataclasses.fields(LoaderConfig)}
    assert {s["origin"] for s in doc["settings"].values()} == {"default"}
    out = cli("config", "show").out
    assert f"{home}/keys" in out
    assert "there is none" in out


def test_config_show_says_where_from(cli, home, monkeypatch):
    home.mkdir()
    (home / "config.toml").write_text('[loader]\nintegrity = "full"\nthreads = 3\nkeys = ["/a.jwk", "env:B"]\n')
    monkeypatch.setenv("SECURE_LOADER_THREADS", "5")
    settings = cli("config", "show", "--json").json["settings"]
    assert settings["integrity"] == {"value": "full", "origin": f"{home}/config.toml"}
    assert settings["threads"] == {"value": 5, "origin": "SECURE_LOADER_THREADS"}
    assert settings["keys"]["value"] == ["/a.jwk", "env:B"]
    out = cli("config", "show").out
    assert re.search(r"keys +/a.jwk, env:B +\S+/config.toml", out)
    assert re.search(r"threads +5 +SECURE_LOADER_THREADS", out)
    assert re.search(r"insecure_allow_plaintext +false +default", out)


def test_config_show_refuses_what_loading_would(cli, home, monkeypatch):
    monkeypatch.setenv("SECURE_LOADER_CONFIG", "/nowhere.toml")
    assert "does not exist" in cli("config", "show", code=2).err
    monkeypatch.delenv("SECURE_LOADER_CONFIG")
    home.mkdir()
    (home / "config.toml").write_text('[loader]\nkeys = \'{"k": "AAAA"}\'\n')
    err = cli("config", "show", code=2).err
    assert "never key material" in err
    assert "AAAA" not in err


def test_example_config_is_complete_and_loads(cli, tmp_path, monkeypatch):
    copy = tmp_path / "copy.toml"
    copy.write_bytes((CONFIGS / "config.toml").read_bytes())
    copy.chmod(0o644)
    monkeypatch.setenv("SECURE_LOADER_CONFIG", str(copy))
    settings = cli("config", "show", "--json").json["settings"]
    text = (CONFIGS / "config.toml").read_text()
    for field in dataclasses.fields(LoaderConfig):
        assert re.search(rf"^#? ?{field.name} = ", text, re.MULTILINE), field.name
        value = settings[field.name]["value"]
        # What it sets is what would be in force anyway: copying it changes nothing.
        assert value == json.loads(json.dumps(field.default)), field.name


def test_commented_lines_of_the_example_config_load_too(cli, tmp_path, monkeypatch):
    text = (CONFIGS / "config.toml").read_text()
    (tmp_path / "all.toml").write_text(re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE))
    monkeypatch.setenv("SECURE_LOADER_CONFIG", str(tmp_path / "all.toml"))
    settings = cli("config", "show", "--json").json["settings"]
    assert {s["origin"] for s in settings.values()} == {str(tmp_path / "all.toml")}


def test_example_trust_file(cli, home, tmp_path):
    copy = tmp_path / "publisher.json"
    copy.write_bytes((CONFIGS / "trust.json").read_bytes())
    copy.chmod(0o644)
    signer = read_trust_file(copy)
    assert signer.models == ("example-org/*",)
    assert signer.not_after is not None
    assert json.loads(copy.read_text()) == signer.document()
    cli("trust", "add", copy)
    assert "example-org/*" in cli("trust", "list").out
