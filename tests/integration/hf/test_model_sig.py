"""``model.sig`` and Transformers: checked before the config is read, in a folder and in the Hub's cache."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from transformers import AutoConfig, AutoModelForCausalLM

from secure_loader.core.keys.ec import EcSigningKey
from secure_loader.core.oms_sign import sign_folder
from secure_loader.errors import ManifestError, UnsupportedVersionError, UntrustedSignerError

from .conftest import same_weights

REPO, COMMIT = "acme/tiny", "0123456789abcdef0123456789abcdef01234567"
OWNER, STRANGER = (EcSigningKey(ec.derive_private_key(n, ec.SECP384R1())) for n in (11, 12))


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "owner.pem"
    pem, spki = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    path.write_bytes(OWNER.verify_key("").public.public_bytes(pem, spki))
    return {"oms_keys": [str(path)]}


@pytest.fixture
def signed(sharded, publisher, copy_of):
    folder = copy_of(sharded.secure)
    sign_folder(folder, OWNER, trust=publisher.config["trust"])
    return folder


def load(name, publisher, auto=AutoModelForCausalLM, /, *, settings, **options):
    return auto.from_pretrained(name, loader="secure", loader_config=publisher.config | settings, **options)


def in_cache(folder, root, leave_out=()):
    """The folder as the Hub's client would have fetched it."""
    repository = root / "hub" / "models--acme--tiny"
    snapshot = repository / "snapshots" / COMMIT
    for place in (snapshot, repository / "blobs", repository / "refs"):
        place.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for file in folder.iterdir():
        if file.name not in leave_out:
            blob = repository / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
            shutil.copy(file, blob)
            (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    return root / "hub"


def test_a_signed_folder_loads(signed, sharded, publisher, keys):
    plain = AutoModelForCausalLM.from_pretrained(sharded.plain)
    assert same_weights(plain, load(signed, publisher, settings={}))
    assert same_weights(plain, load(signed, publisher, settings=keys | {"require_oms": True}))


def test_a_bad_one_is_refused_before_the_config_is_read(signed, publisher, keys):
    bundle = json.loads((signed / "model.sig").read_text())
    sign_folder(signed, STRANGER, trust=publisher.config["trust"], force=True)
    for auto in (AutoModelForCausalLM, AutoConfig):
        with pytest.raises(UntrustedSignerError, match=r"model\.sig"):
            load(signed, publisher, auto, settings=keys)
    (signed / "model.sig").write_text(json.dumps(bundle))
    load(signed, publisher, AutoConfig, settings=keys)
    (signed / "model.sig").unlink()
    with pytest.raises(ManifestError, match=r"has no model\.sig"):
        load(signed, publisher, AutoConfig, settings=keys | {"require_oms": True})


def test_in_the_cache_of_the_hub(signed, sharded, publisher, keys, tmp_path):
    settings = keys | {"require_oms": True}
    cache = in_cache(signed, tmp_path, leave_out=["tokenizer.json", "chat_template.jinja"])
    assert load(REPO, publisher, settings=settings, cache_dir=cache)
    blob = (cache / "models--acme--tiny" / "snapshots" / COMMIT / "model.sig").resolve()
    blob.write_text(blob.read_text().replace("application/vnd.dev.sigstore", "application/vnd.dev.other"))
    with pytest.raises(UnsupportedVersionError, match="another kind"):
        load(REPO, publisher, settings=settings, cache_dir=cache)
