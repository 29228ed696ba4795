"""``model.sig`` of OpenSSF's own package read here, and ours read by it."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import model_signing
import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from safetensors.numpy import save_file

from secure_loader import encrypt_model, verify
from secure_loader.core.keys.ec import read_signing_key
from secure_loader.core.oms_sign import sign_folder
from secure_loader.errors import (
    FormatError,
    KeyAccessError,
    ManifestError,
    SecureLoaderError,
    SignatureError,
    UnsupportedVersionError,
    UntrustedSignerError,
)

from .peers import SIGNING, TRUST, master

CURVES = {"P-256": ec.SECP256R1, "P-384": ec.SECP384R1, "P-521": ec.SECP521R1}
SIG = "model.sig"


def write_key(path: Path, private: Any) -> tuple[Path, Path]:
    """A private key and its public half, in PEM."""
    pem, public = serialization.Encoding.PEM, path.with_suffix(".pub.pem")
    none = serialization.NoEncryption()
    path.write_bytes(private.private_bytes(pem, serialization.PrivateFormat.PKCS8, none))
    path.chmod(0o600)
    spki = serialization.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(private.public_key().public_bytes(pem, spki))
    return path, public


@pytest.fixture
def key(tmp_path: Path) -> tuple[Path, Path]:
    return write_key(tmp_path / "release.pem", ec.generate_private_key(ec.SECP256R1()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An encrypted model, with names whose order depends on how paths are compared."""
    plain = tmp_path / "plain"
    for place in (plain / "sub", plain / "ünï cödé"):
        place.mkdir(parents=True)
    save_file({"w": np.arange(1000, dtype="f4")}, plain / "model.safetensors")
    for name in ("config.json", "sub/x", "sub-a", "sub.b", "ünï cödé/模型.txt", "empty"):
        (plain / name).write_text("" if name == "empty" else "{}")
    encrypt_model(plain, tmp_path / "model", key=master(), signing_key=SIGNING, model_id="demo")
    return tmp_path / "model"


def sign_ours(folder: Path, key: Path) -> None:
    sign_folder(folder, read_signing_key(key), trust=TRUST)


def sign_theirs(folder: Path, key: Path, *ignored: str, **how: Any) -> None:
    hashing = model_signing.hashing.Config()
    if how:
        getattr(hashing, how.pop("use"))(**how)
    hashing.set_ignored_paths(paths=[SIG, *ignored])
    config = model_signing.signing.Config().use_elliptic_key_signer(private_key=key)
    config.set_hashing_config(hashing).sign(folder, folder / SIG)


def check_ours(folder: Path, public: Path) -> None:
    done = verify(folder, trust=TRUST, full=True, oms_keys=[public])
    assert done.model_signer == public.stem
    # And without reading the weights.
    assert verify(folder, trust=TRUST, oms_keys=[public]).model_signer == public.stem


def check_theirs(folder: Path, public: Path) -> None:
    model_signing.verifying.Config().use_elliptic_key_verifier(public_key=public).verify(folder, folder / SIG)


def statement(folder: Path) -> dict[str, Any]:
    return json.loads(base64.b64decode(json.loads((folder / SIG).read_text())["dsseEnvelope"]["payload"]))


def test_the_release_of_record_is_the_one_tested() -> None:
    assert importlib.metadata.version("model-signing") == "1.1.1"


@pytest.mark.parametrize("curve", CURVES)
def test_ours_is_accepted_by_theirs_and_theirs_here(folder: Path, tmp_path: Path, curve: str) -> None:
    private, public = write_key(tmp_path / "k.pem", ec.generate_private_key(CURVES[curve]()))
    sign_ours(folder, private)
    check_theirs(folder, public)
    check_ours(folder, public)
    (folder / SIG).unlink()
    sign_theirs(folder, private)
    check_ours(folder, public)


def test_both_state_the_same(folder: Path, key: tuple[Path, Path]) -> None:
    sign_ours(folder, key[0])
    ours = statement(folder)
    (folder / SIG).unlink()
    sign_theirs(folder, key[0])
    theirs = statement(folder)
    ignored = [doc["predicate"]["serialization"].pop("ignore_paths") for doc in (ours, theirs)]
    assert ours == theirs
    assert set(ignored[1]) <= set(ignored[0])
    assert len(ours["predicate"]["resources"]) == 8


def test_as_users_call_it(folder: Path, key: tuple[Path, Path]) -> None:
    private, public = key
    signature = folder / SIG
    peer = [sys.executable, "-m", "model_signing"]
    for words in (
        ["sign", "key", folder, "--private_key", private, "--signature", signature],
        ["verify", "key", folder, "--public_key", public, "--signature", signature],
    ):
        subprocess.run([*peer, *map(str, words)], check=True, capture_output=True, timeout=60)
    check_ours(folder, public)
    signature.unlink()
    sign_ours(folder, private)
    subprocess.run([*peer, *map(str, words)], check=True, capture_output=True, timeout=60)
    (folder / "config.json").write_text("{ }")
    done = subprocess.run([*peer, *map(str, words)], check=False, capture_output=True, timeout=60)
    assert done.returncode == 1
    assert b"Hash mismatch for 'config.json'" in done.stderr


@pytest.mark.parametrize("change", ["altered", "added", "removed", "renamed", "weights"])
def test_both_see_the_same_changes(folder: Path, key: tuple[Path, Path], change: str) -> None:
    sign_ours(folder, key[0])
    [shard] = folder.glob("*.safetensors")
    if change == "weights":
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    else:
        {
            "altered": lambda: (folder / "sub/x").write_text("[]"),
            "added": lambda: (folder / "sub/y").write_text("{}"),
            "removed": (folder / "sub-a").unlink,
            "renamed": lambda: (folder / "sub-a").rename(folder / "sub-c"),
        }[change]()
    with pytest.raises(ValueError, match="Signature mismatch"):
        check_theirs(folder, key[1])
    with pytest.raises(SecureLoaderError):
        verify(folder, trust=TRUST, full=True, oms_keys=[key[1]])


def test_hidden_files(folder: Path, key: tuple[Path, Path]) -> None:
    """They are no part of a model; the other side is told which of them were there, and looks past them."""
    for name in (".DS_Store", "sub/.keep", ".git/config", ".hidden/x"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    report = sign_folder(folder, read_signing_key(key[0]), trust=TRUST)
    assert report.not_signed == (".DS_Store", ".git", ".hidden", "sub/.keep")
    # What the Hub's client writes into a folder that it fills.
    (folder / ".cache/huggingface").mkdir(parents=True)
    (folder / ".cache/huggingface/download.lock").write_text("")
    (folder / ".DS_Store").write_text("changed")
    check_theirs(folder, key[1])
    check_ours(folder, key[1])


def test_hidden_files_that_theirs_signs(folder: Path, key: tuple[Path, Path]) -> None:
    (folder / ".keep").write_text("x")
    sign_theirs(folder, key[0])
    check_ours(folder, key[1])
    (folder / ".keep").write_text("y")
    with pytest.raises(ManifestError, match=r"\.keep"):
        check_ours(folder, key[1])
    (folder / ".keep").unlink()
    check_ours(folder, key[1])


def test_what_theirs_ignores_is_not_ignored_here(folder: Path, key: tuple[Path, Path]) -> None:
    sign_theirs(folder, key[0], "sub")
    check_theirs(folder, key[1])
    with pytest.raises(ManifestError, match=r"sub/x is not signed by model\.sig"):
        check_ours(folder, key[1])


@pytest.mark.parametrize(
    "how",
    [
        {"use": "use_file_serialization", "hashing_algorithm": "blake2"},
        {"use": "use_file_serialization", "hashing_algorithm": "blake3"},
        {"use": "use_shard_serialization"},
        {"use": "use_shard_serialization", "shard_size": 1000},
    ],
    ids=lambda how: f"{how['use']}-{how.get('hashing_algorithm', how.get('shard_size', ''))}",
)
def test_other_digests_are_refused(folder: Path, key: tuple[Path, Path], how: dict[str, Any]) -> None:
    """Its command line has no option for them, and it cannot check most of them itself."""
    sign_theirs(folder, key[0], **how)
    with pytest.raises(UnsupportedVersionError, match="SHA-256 of whole files"):
        check_ours(folder, key[1])


def test_keys_that_are_not_ours(folder: Path, key: tuple[Path, Path], tmp_path: Path) -> None:
    sign_theirs(folder, key[0])
    _, other = write_key(tmp_path / "other.pem", ec.generate_private_key(ec.SECP256R1()))
    with pytest.raises(UntrustedSignerError):
        check_ours(folder, other)
    bundle = json.loads((folder / SIG).read_text())
    # Signatures of before 1.0 have no hint; both sides then try the key.
    bundle["verificationMaterial"]["publicKey"] = {}
    (folder / SIG).write_text(json.dumps(bundle))
    check_theirs(folder, key[1])
    check_ours(folder, key[1])
    with pytest.raises(UntrustedSignerError):
        check_ours(folder, other)


def test_the_signature_of_version_0_2_is_refused(folder: Path, key: tuple[Path, Path]) -> None:
    """Its encoding was wrong: it signed the text that Python prints of bytes. Theirs still accepts it."""
    from model_signing._signing.sign_sigstore_pb import pae_compat

    sign_ours(folder, key[0])
    bundle = json.loads((folder / SIG).read_text())
    payload = base64.b64decode(bundle["dsseEnvelope"]["payload"])
    sig = base64.b64encode(read_signing_key(key[0]).sign(pae_compat(payload))).decode()
    bundle["dsseEnvelope"]["signatures"][0]["sig"] = sig
    (folder / SIG).write_text(json.dumps(bundle))
    check_theirs(folder, key[1])
    with pytest.raises(SignatureError):
        check_ours(folder, key[1])


def test_ed25519_is_not_a_key_of_this_format(folder: Path, tmp_path: Path) -> None:
    private, _ = write_key(tmp_path / "ed.pem", ed25519.Ed25519PrivateKey.generate())
    with pytest.raises(AttributeError, match="curve"):  # theirs does not see it coming
        sign_theirs(folder, private)
    with pytest.raises(KeyAccessError, match="does not hold an EC key on the curve P-256"):
        sign_ours(folder, private)


def test_a_file_twice(folder: Path, key: tuple[Path, Path]) -> None:
    """Theirs takes the last; which one is meant nobody knows."""
    sign_ours(folder, key[0])
    bundle, doc = json.loads((folder / SIG).read_text()), statement(folder)
    resources = doc["predicate"]["resources"]
    resources.insert(0, resources[0] | {"digest": "0" * 64})
    root = hashlib.sha256(b"".join(bytes.fromhex(r["digest"]) for r in resources)).hexdigest()
    doc["subject"][0]["digest"]["sha256"] = root
    payload = json.dumps(doc).encode()
    kind = bundle["dsseEnvelope"]["payloadType"].encode()
    message = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(payload).decode()
    bundle["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(read_signing_key(key[0]).sign(message)).decode()
    (folder / SIG).write_text(json.dumps(bundle))
    check_theirs(folder, key[1])
    with pytest.raises(FormatError, match="twice"):
        check_ours(folder, key[1])
