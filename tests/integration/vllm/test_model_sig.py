"""``model.sig`` and vLLM: fetched from the Hub with the manifest, checked before the config is read."""

from __future__ import annotations

import shutil

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from secure_loader.config import load
from secure_loader.core import manifest as mf
from secure_loader.core.keys.ec import EcSigningKey
from secure_loader.core.oms_sign import sign_folder
from secure_loader.core.session import Session
from secure_loader.errors import ManifestError, UntrustedSignerError
from secure_loader.vllm import fetch

OWNER, STRANGER = (EcSigningKey(ec.derive_private_key(n, ec.SECP521R1())) for n in (11, 12))


@pytest.fixture
def session(tmp_path):
    path = tmp_path / "owner.pem"
    pem, spki = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    path.write_bytes(OWNER.verify_key("").public.public_bytes(pem, spki))
    return Session(config=load({"oms_keys": str(path), "require_oms": True}))


@pytest.fixture
def signed(secure_llama_shards, tmp_path):
    folder = shutil.copytree(secure_llama_shards, tmp_path / "signed")
    sign_folder(folder, OWNER)
    return folder


@pytest.fixture
def repository(signed, tmp_path, monkeypatch):
    """A Hub that has the folder, and a cache that is empty."""
    snapshot = tmp_path / "hub" / "models--me--llama" / "snapshots" / ("b" * 40)
    snapshot.mkdir(parents=True)

    class Hub:
        def snapshot_download(self, repo_id, *, allow_patterns, **_):
            from huggingface_hub.utils import filter_repo_objects

            for name in filter_repo_objects(mf.list_files(signed), allow_patterns=allow_patterns):
                shutil.copy(signed / name, snapshot / name)
            return str(snapshot)

    monkeypatch.setattr(fetch, "hf_api", Hub)
    return snapshot


def test_settings_and_weights(signed, session):
    model = fetch.Model(str(signed))
    model.verify_settings(session)
    assert model.open(session).model_signer.name == "owner"
    sign_folder(signed, STRANGER, force=True)
    for check in (model.verify_settings, model.open):
        with pytest.raises(UntrustedSignerError, match=r"model\.sig"):
            check(session)


def test_from_the_hub(signed, repository, session, tmp_path):
    model = fetch.Model("me/llama", None, str(tmp_path / "hub"))
    model.verify_settings(session)
    assert (repository / mf.MODEL_SIGNATURE).exists()
    assert not list(repository.glob("*.safetensors"))
    assert model.open(session).model_signer.name == "owner"


def test_a_hub_that_hides_it(signed, repository, session, tmp_path):
    (signed / mf.MODEL_SIGNATURE).unlink()
    model = fetch.Model("me/llama", None, str(tmp_path / "hub"))
    for check in (model.verify_settings, model.open):
        with pytest.raises(ManifestError, match=r"has no model\.sig"):
            check(session)
