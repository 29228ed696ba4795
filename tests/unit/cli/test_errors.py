"""Every refusal a command can meet: its exit code, its words, its JSON; and nothing but words when it is our fault."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import secure_loader
from secure_loader import errors
from secure_loader.cli import models
from secure_loader.core import envelope as env
from secure_loader.core import header as hdr
from secure_loader.core import strict_json
from secure_loader.core.base64_text import base64_text
from secure_loader.core.keys.local import read_keys
from secure_loader.core.source import FileSource, read_header

SHARD = "model.secure-00001-of-00002.safetensors"


def all_errors(kind=errors.SecureLoaderError):
    yield kind
    for sub in kind.__subclasses__():
        yield from all_errors(sub)


CODES = {
    errors.SecureLoaderError: 1,
    errors.ConfigError: 2,
    errors.TensorNameError: 2,
    errors.SourceError: 7,
    errors.FormatError: 6,
    errors.VerificationError: 3,
    errors.PolicyDeniedError: 4,
    errors.KeyAccessError: 5,
    errors.DeviceError: 1,
}


@pytest.mark.parametrize("kind", sorted(set(all_errors()), key=lambda k: k.__name__))
def test_every_error_has_its_code_and_shape(cli, monkeypatch, kind):
    def raising(*args, **kwargs):
        raise kind("it went wrong", hint="do better", path="some/path", tensor="a.b")

    monkeypatch.setattr(models.inspection, "verify", raising)
    code = next(CODES[base] for base in kind.__mro__ if base in CODES)
    result = cli("verify", "x", code=code)
    assert result.out == ""
    assert result.err == (
        "secure-loader: error: some/path: tensor 'a.b': it went wrong\nsecure-loader: hint: do better\n"
    )
    assert cli("verify", "x", "--json", code=code).error == {
        "type": kind.__name__,
        "exit_code": code,
        "message": "it went wrong",
        "hint": "do better",
        "path": "some/path",
        "tensor": "a.b",
    }


def resign(path: Path, key, change) -> None:
    """Rewrite a header and sign it again, as a publisher with other ideas would."""
    with FileSource(path) as source:
        header = read_header(source)
        body = source.read(header.body_start, header.body_bytes)
    metadata = {k: v for k, v in header.metadata.items() if k != env.SIGNATURE}
    change(metadata)
    infos = list(header.tensors.values())
    signature = base64_text(key.sign(hdr.canonical_json(metadata, infos)))
    path.write_bytes(hdr.file_prefix(hdr.canonical_json(metadata | {env.SIGNATURE: signature}, infos)) + body)


@pytest.fixture
def sign_key(encrypted, home):
    [key] = read_keys(home / "keys" / "alice.sign.jwk")
    return key


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_verification_failures(cli, encrypted, model, home, sign_key, tmp_path):
    def refused(kind, *words, code=3):
        error = cli(*words, "--json", code=code).error
        assert (error["type"], error["exit_code"]) == (kind, code), error
        return error

    refused("NotEncryptedError", "verify", model / "model-00001-of-00002.safetensors")
    refused("ManifestError", "verify", model)

    def copy(name):
        return Path(shutil.copytree(encrypted, tmp_path / name))

    extra = copy("extra")
    (extra / "modeling_evil.py").write_text("")
    refused("ManifestError", "verify", extra)
    (copy("missing") / "config.json").unlink()
    refused("ManifestError", "verify", tmp_path / "missing")

    body = copy("body") / SHARD
    flip(body, -1)
    cli("verify", body.parent)
    error = refused("AuthenticationError", "verify", body.parent, "--full")
    assert error["tensor"] == "embed.weight"
    assert error["path"].endswith(SHARD)
    refused("AuthenticationError", "decrypt", body.parent, "plain")
    assert not (tmp_path / "plain").exists()

    signed = copy("signed") / SHARD
    data = signed.read_bytes()
    signed.write_bytes(data.replace(b'\\"release\\":1', b'\\"release\\":9'))
    refused("SignatureError", "verify", signed)
    refused("ManifestError", "verify", signed.parent)

    cli("rewrap", encrypted, "--release", "5")
    cli("verify", encrypted)
    error = refused("RollbackError", "verify", extra)
    assert "release 1" in error["message"]

    cli("trust", "remove", "alice")
    error = refused("UntrustedSignerError", "verify", encrypted)
    assert sign_key.kid in error["message"]
    assert "trust add" in error["hint"]


def test_a_signer_is_trusted_only_for_its_models_and_time(cli, encrypted, tmp_path):
    public = tmp_path / "alice.json"
    public.write_text(cli("trust", "export", "alice").out)
    cli("trust", "add", public, "--force", "--model", "bob/*")
    assert "not for" in cli("verify", encrypted, code=3).err
    cli("trust", "add", public, "--force", "--model", "alice/*")
    cli("verify", encrypted)


def test_policy(cli, encrypted, sign_key):
    def deny(metadata):
        metadata[env.POLICY] = strict_json.dumps({"local": "package model\ndefault allow := false", "remote": ""})

    resign(encrypted / SHARD, sign_key, deny)
    assert "policy" in cli("verify", encrypted / SHARD, code=4).err
    assert "characters of Rego" in cli("inspect", encrypted / SHARD).out


def test_formats(cli, encrypted, sign_key, tmp_path):
    def newer(metadata):
        keys = json.loads(metadata[env.CRYPTO_KEYS])
        metadata[env.CRYPTO_KEYS] = strict_json.dumps(keys | {"version": "3"})

    resign(encrypted / SHARD, sign_key, newer)
    for verb in ("verify", "inspect"):
        assert cli(verb, encrypted / SHARD, "--json", code=6).error["type"] == "UnsupportedVersionError"
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 100)
    for verb in ("verify", "inspect"):
        assert cli(verb, "x.safetensors", "--json", code=6).error["type"] == "FormatError"
    (tmp_path / "empty").mkdir()
    assert cli("inspect", "empty", "--json", code=6).error["type"] == "FormatError"


def test_keys(cli, encrypted, home, model, tmp_path):
    def refused(*words):
        error = cli(*words, "--json", code=5).error
        assert error["type"] == "KeyAccessError"
        return error

    key = home / "keys" / "alice.enc.jwk"
    for mode in (0o640, 0o604, 0o660):
        key.chmod(mode)
        for words in (("decrypt", encrypted, "plain"), ("encrypt", model, "other"), ("rewrap", encrypted)):
            error = refused(*words)
            assert "can be read by others" in error["message"]
            assert "chmod 600" in error["hint"]
    key.chmod(0o600)
    real = key.rename(tmp_path / "elsewhere.jwk")
    assert "no master key with kid" in refused("decrypt", encrypted, "plain")["message"]
    assert "no master key" in refused("encrypt", model, "other")["message"]
    assert "keygen" in refused("encrypt", model, "other", "-k", "nobody")["hint"]
    key.symlink_to(real)
    assert "link" in refused("decrypt", encrypted, "plain")["message"]
    key.unlink()
    refused("decrypt", encrypted, "plain", "--keys", "nowhere.jwk")
    refused("decrypt", encrypted, "plain", "--keys", "env:NOT_SET")
    refused("decrypt", encrypted, "plain", "--keys", "../elsewhere.jwk")
    refused("encrypt", model, "other", "-k", "env:NOT_SET")
    refused("encrypt", model, "other", "-k", home / "keys")
    # Another key by the same name.
    [master] = read_keys(real)
    doc = replace(master, secret=type(master.secret)(b"\0" * 32)).document()
    key.write_text(json.dumps(doc))
    key.chmod(0o600)
    assert "key check value" in refused("decrypt", encrypted, "plain")["message"]
    assert not (tmp_path / "plain").exists()


def test_files(cli, encrypted, model, tmp_path):
    lines = (("verify", "nowhere"), ("inspect", "nowhere"), ("decrypt", "nowhere", "x"), ("encrypt", "nowhere", "x"))
    for words in lines:
        error = cli(*words, "--json", code=7).error
        assert error["type"] == "MissingFileError"
        assert "nowhere" in error["path"]
    assert cli("inspect", "/dev/null", "--json", code=7).error["type"] == "SourceError"
    (tmp_path / "file").write_text("")
    assert cli("decrypt", encrypted, "file", "--json", code=7).error["type"] == "WriteError"


def test_usage(cli, encrypted, model):
    def refused(*words):
        return cli(*words, code=2).err

    assert "hint: see: secure-loader --help" in refused()
    assert "invalid choice" in refused("encript")
    assert "required: SRC, DST" in refused("encrypt")
    assert "hint: see: secure-loader encrypt --help" in refused("encrypt", "--key")
    assert "unrecognized arguments: --nope" in refused("verify", "x", "--nope")
    assert "not allowed with" in refused("verify", "x", "-q", "-v")
    assert "COMMAND" in refused("trust")
    assert "COMMAND" in refused("config")
    assert "invalid choice" in refused("keygen", "x", "--algorithm", "aes-cbc")
    assert "not a size" in refused("encrypt", model, "x", "--chunk-size", "big")
    assert "power of two" in refused("encrypt", model, "x", "--chunk-size", "3MiB")
    assert "invalid int" in refused("encrypt", model, "x", "--release", "new")
    assert "release" in refused("encrypt", model, "x", "--release", "-1")
    assert "model_id" in refused("encrypt", model, "x", "--model-id", "")
    assert "encrypted already" in refused("encrypt", encrypted, "x")
    assert "different folders" in refused("encrypt", model, model / "x")
    assert "no key provider" in refused("decrypt", encrypted, "x", "--keys", "gopher:somewhere")
    assert "cannot be used to write" in refused("encrypt", model, "x", "-k", "alice", "--signing-key", "kms:/x")


def test_abbreviations_are_no_contract(cli, encrypted):
    assert "unrecognized" in cli("verify", encrypted, "--ful", code=2).err


def test_usage_errors_follow_json(cli):
    result = cli("verify", "--json", code=2)
    assert result.out == ""
    assert result.error["type"] == "ConfigError"
    assert result.error["hint"] == "see: secure-loader verify --help"


def test_unexpected_errors_are_one_line_and_a_traceback_on_request(cli, monkeypatch):
    def raising(*args, **kwargs):
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(models.inspection, "verify", raising)
    result = cli("verify", "x", code=1)
    assert result.err.startswith("secure-loader: error: unexpected ZeroDivisionError: oh\n")
    assert "-v" in result.err
    assert "Traceback" not in result.err
    assert "Traceback" in cli("verify", "x", "-v", code=1).err
    assert cli("verify", "x", "--json", code=1).error["type"] == "ZeroDivisionError"


def test_tracebacks_of_refusals_only_on_request(cli):
    assert "Traceback" not in cli("verify", "nowhere", code=7).err
    verbose = cli("verify", "nowhere", "-v", code=7).err
    assert "Traceback" in verbose
    assert "secure-loader: error: nowhere: no such file or folder" in verbose


def test_system_errors_name_the_file(cli, monkeypatch):
    def raising(*args, **kwargs):
        raise PermissionError(13, "Permission denied", "some/folder")

    monkeypatch.setattr(models.inspection, "verify", raising)
    assert cli("verify", "x", code=7).err == "secure-loader: error: some/folder: Permission denied\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")
def test_closed_folders(cli, tmp_path):
    (tmp_path / "closed").mkdir(mode=0)
    assert "Permission denied" in cli("inspect", "closed/x", code=7).err


def test_interrupt(cli, monkeypatch):
    def raising(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(models.inspection, "verify", raising)
    assert cli("verify", "x", code=130).err == "secure-loader: interrupted\n"
    assert cli("verify", "x", "--json", code=130).error["exit_code"] == 130


def process(home, tmp_path, *words, **options):
    source = str(Path(secure_loader.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-m", "secure_loader", *map(str, words)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": source},
        stderr=subprocess.PIPE,
        **options,
    )


def test_ctrl_c(home, tmp_path):
    with process(home, tmp_path, "trust", "add", "-", stdin=subprocess.PIPE) as running:
        time.sleep(1)  # it waits for stdin, which nobody writes
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=30)
    assert running.returncode == 130
    assert err == b"secure-loader: interrupted\n"


def test_a_closed_pipe_is_no_error(cli, home, tmp_path):
    names = {f"tensor.{i:05d}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(20_000)}
    text = json.dumps(names).encode()
    (tmp_path / "many.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    for words in (("inspect", "many.safetensors", "--tensors"), ("inspect", "many.safetensors", "--tensors", "--json")):
        with process(home, tmp_path, *words, stdout=subprocess.PIPE) as running:
            running.stdout.read(10)
            running.stdout.close()
            err = running.stderr.read()
            running.wait(timeout=30)
        assert (running.returncode, err) == (141, b"")


def test_a_pipe_that_was_closed_before(home, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    for words in (("--help",), ("trust", "list")):
        with process(home, tmp_path, *words, stdout=writer) as running:
            _, err = running.communicate(timeout=30)
        assert (running.returncode, err) == (141, b"")
    os.close(writer)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_behind_stdout(home, tmp_path):
    with Path("/dev/full").open("wb") as full, process(home, tmp_path, "trust", "list", stdout=full) as running:
        _, err = running.communicate(timeout=30)
    assert running.returncode == 7
    assert err == b"secure-loader: error: the output cannot be written: No space left on device\n"
