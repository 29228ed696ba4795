"""Settings: where they come from, which wins, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from secure_loader import Session, safe_open
from secure_loader.config import LoaderConfig, explain, load
from secure_loader.core.device import choice
from secure_loader.errors import ConfigError
from tests.attacks.kit import KEY, assert_no_secret


@pytest.fixture
def toml(secure_loader_home):
    def write(text: str | bytes) -> Path:
        path = secure_loader_home / "config.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_defaults_are_the_strict_ones():
    config = load()
    assert config == LoaderConfig()
    assert (config.integrity, config.clear_tensors, config.keys, config.trust) == ("tags", "map", None, None)
    lax = [f.name for f in dataclasses.fields(config) if f.name.startswith(("insecure_", "allow_"))]
    assert len(lax) == 6
    assert not any(getattr(config, name) for name in lax)


def test_arguments_win_over_environment_wins_over_toml(toml, monkeypatch):
    path = toml('[loader]\nthreads = 2\nintegrity = "full"\nclear_tensors = "copy"\nkeys = "/a"\n')
    assert (load().threads, load().integrity, load().clear_tensors, load().keys) == (2, "full", "copy", ("/a",))
    monkeypatch.setenv("SECURE_LOADER_THREADS", "3")
    monkeypatch.setenv("SECURE_LOADER_INTEGRITY", "tags")
    assert (load().threads, load().integrity, load().clear_tensors) == (3, "tags", "copy")
    assert (load({"threads": 4}).threads, load({"threads": 4}).integrity) == (4, "tags")
    origins = {s.name: s.origin for s in explain()}
    assert (origins["threads"], origins["clear_tensors"], origins["trust"]) == (
        "SECURE_LOADER_THREADS",
        str(path),
        "default",
    )


def test_another_toml_file(tmp_path, monkeypatch):
    path = tmp_path / "other.toml"
    monkeypatch.setenv("SECURE_LOADER_CONFIG", str(path))
    with pytest.raises(ConfigError, match="SECURE_LOADER_CONFIG names a file that does not exist"):
        load()
    path.write_text("[loader]\nthreads = 5\n")
    assert load().threads == 5


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666, 0o622])
@pytest.mark.parametrize("named", [False, True])
def test_a_toml_file_that_others_may_write_decides_nothing(toml, tmp_path, monkeypatch, mode, named):
    path = toml("[loader]\nthreads = 5\n")
    if named:
        path = path.rename(tmp_path / "other.toml")
        monkeypatch.setenv("SECURE_LOADER_CONFIG", str(path))
    path.chmod(mode)
    with pytest.raises(ConfigError, match="configuration file could have been written by others") as caught:
        load()
    assert (caught.value.path, caught.value.hint) == (str(path), f"chmod go-w {path}")
    path.chmod(0o644)
    assert load().threads == 5


def test_a_toml_file_of_somebody_else_decides_nothing(toml, monkeypatch):
    path = toml("[loader]\nthreads = 5\n")
    mine = os.geteuid()
    if mine == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr("os.geteuid", lambda: mine + 1)
    with pytest.raises(ConfigError, match="configuration file could have been written by others"):
        load()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[loader]\nthread = 2\n", "unknown setting 'thread'"),
        ("[loaders]\nthreads = 2\n", "unknown section 'loaders'"),
        ("loader = 2\n", "loader is no section"),
        ("[loader\n", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        ("[loader]\nthreads = 0\n", "threads must be a number from 1 to 256"),
        ("[loader]\nthreads = true\n", "threads must be a number"),
        ("[loader]\nthreads = '2'\n", "threads must be a number"),
        ("[loader]\nintegrity = 'some'\n", "integrity must be one of tags, full"),
        ("[loader]\nclear_tensors = 'share'\n", "clear_tensors must be one of map, copy"),
        ("[loader]\ndevice_kernels = 'gpu'\n", "device_kernels must be one of auto, cubin, nvrtc, triton, cpu"),
        ("[loader]\ngpu_direct = true\n", "gpu_direct must be one of auto, on, off"),
        ("[loader]\ngpu_direct = 'on'\ndevice_kernels = 'cpu'\n", "contradicts"),
        ("[loader]\nrequire_device_kernels = 1\n", "require_device_kernels must be true or false"),
        ("[loader]\nrequire_device_kernels = true\ndevice_kernels = 'cpu'\n", "contradicts"),
        ("[loader]\ninsecure_allow_plaintext = 1\n", "insecure_allow_plaintext must be true or false"),
        ("[loader]\nharden = 'yes'\n", "harden must be true or false"),
        ("[loader]\nkey_timeout_seconds = 0\n", "key_timeout_seconds must be above 0 and at most 600"),
        ("[loader]\nkey_timeout_seconds = inf\n", "key_timeout_seconds must be above 0"),
        ("[loader]\nkey_timeout_seconds = nan\n", "key_timeout_seconds must be above 0"),
        ("[loader]\nkey_timeout_seconds = true\n", "key_timeout_seconds must be above 0"),
        ("[loader]\nkey_private_hosts = 5\n", "key_private_hosts takes names and addresses"),
        ("[loader]\nkey_private_hosts = ['https://h']\n", "key_private_hosts takes names and addresses"),
        ("[loader]\nkey_private_hosts = ['h:80/']\n", "key_private_hosts takes names and addresses"),
        ("[loader]\nkey_private_hosts = ['*']\n", "key_private_hosts takes names and addresses"),
        ("[loader]\nkey_ca_file = 5\n", "key_ca_file takes the path of a PEM file"),
        ("[loader]\nkey_client_key = '-----BEGIN PRIVATE KEY'\n", "key_client_key takes the path of a PEM file"),
        ("[loader]\nkey_client_key = '/a'\n", "key_client_certificate, which goes with it, is not"),
        ("[loader]\ninsecure_allow_http_loopback = 1\n", "insecure_allow_http_loopback must be true or false"),
        ("[loader]\noms_keys = 5\n", "oms_keys takes references"),
        ("[loader]\noms_keys = ['-----BEGIN PRIVATE KEY-----']\n", "never key material"),
        ("[loader]\nrequire_oms = 1\n", "require_oms must be true or false"),
        ("[loader]\nkeys = " + "[" * 5000, "cannot be read"),
        ("[loader]\nkeys = 5\n", "keys takes references"),
        ("[loader]\nkeys = [5]\n", "keys takes references"),
        ("[loader]\nkeys = {k = 'x'}\n", "keys takes references"),
        ('[loader]\nkeys = \'{"kty":"oct"}\'\n', "never key material"),
    ],
)
def test_refused_toml(toml, text, message):
    toml(text)
    with pytest.raises(ConfigError, match=message):
        load()


@pytest.mark.parametrize("value", ["0", "-1", "two", "257", "1.5"])
def test_refused_environment(monkeypatch, value):
    monkeypatch.setenv("SECURE_LOADER_THREADS", value)
    with pytest.raises(ConfigError, match=r"(?i)threads must be"):
        load()


def test_device_kernels_from_the_environment(monkeypatch):
    monkeypatch.setenv("SECURE_LOADER_DEVICE_KERNELS", "nvrtc")
    monkeypatch.setenv("SECURE_LOADER_REQUIRE_DEVICE_KERNELS", "1")
    monkeypatch.setenv("SECURE_LOADER_GPU_DIRECT", "off")
    found = load()
    assert (found.device_kernels, found.require_device_kernels, found.gpu_direct) == ("nvrtc", True, "off")
    monkeypatch.setenv("SECURE_LOADER_REQUIRE_DEVICE_KERNELS", "yes")
    with pytest.raises(ConfigError, match="must be 0 or 1"):
        load()


def test_device_kernels_are_those_that_there_are():
    for setting in choice.SETTINGS:
        assert load({"device_kernels": setting}).device_kernels == setting


def test_insecure_settings_do_not_come_from_the_environment(monkeypatch):
    for name in ("PLAINTEXT", "LEGACY", "UNVERIFIED_CLEAR", "HTTP_LOOPBACK"):
        monkeypatch.setenv(f"SECURE_LOADER_INSECURE_ALLOW_{name}", "1")
    assert load() == LoaderConfig()


def test_hosts_inside_the_network():
    assert load({"key_private_hosts": "Vault.Internal"}).key_private_hosts == ("vault.internal",)
    assert load({"key_private_hosts": ["10.0.0.5", "::1"]}).key_private_hosts == ("10.0.0.5", "::1")
    assert load({"key_ca_file": Path("/ca.pem"), "key_timeout_seconds": 2.5}).key_ca_file == "/ca.pem"


def test_references():
    assert load({"keys": Path("/a")}).keys == ("/a",)
    assert load({"keys": ["/a", Path("b"), "env:X"]}).keys == ("/a", "b", "env:X")
    assert LoaderConfig(keys="/a").keys == ("/a",), "not one reference for each letter"
    assert load({"keys": []}).keys == ()


def test_key_material_is_refused_and_not_echoed(tmp_path, monkeypatch):
    text = json.dumps(KEY.document())
    hexadecimal = bytes(KEY.secret.reveal()).hex()
    for attempt in (
        lambda: load({"keys": text}),
        lambda: load({"keys": [hexadecimal]}),
        lambda: load({"keys": KEY.document()}),
        lambda: load({"keys": bytes(KEY.secret.reveal())}),
        lambda: LoaderConfig(keys=(text,)),
        lambda: Session(keys=text),
        lambda: Session(keys=[text]),
        lambda: safe_open(tmp_path / "x", keys=hexadecimal),
    ):
        with pytest.raises(ConfigError, match="keys takes references") as caught:
            attempt()
        assert_no_secret(str(caught.value))
    monkeypatch.setenv("SECURE_LOADER_KEYS", text)
    with pytest.raises(ConfigError, match="SECURE_LOADER_KEYS takes references") as caught:
        Session()
    assert_no_secret(str(caught.value))


def test_a_session_takes_keys_as_objects(tmp_path):
    assert repr(Session.from_options({"keys": KEY})) == "<secure_loader session>"
    with pytest.raises(ConfigError, match="unknown setting 'key'"):
        Session.from_options({"key": KEY})
