"""Repo ids, through a cache as huggingface_hub lays it out, offline."""

from __future__ import annotations

import hashlib
import shutil

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from secure_loader.errors import EncryptedFileError, ManifestError, OfflineError

from .conftest import flip, same_weights

REPO, COMMIT = "acme/tiny", "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, sharded):
    """A function that puts files of the encrypted model into a cache, and returns the cache and the snapshot."""

    def fill(leave_out=()):
        root = tmp_path / "hub" / "models--acme--tiny"
        snapshot = root / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        (root / "blobs").mkdir()
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text(COMMIT)
        for file in sharded.secure.iterdir():
            if file.name not in leave_out:
                blob = root / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
                shutil.copy(file, blob)
                (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
        return tmp_path / "hub", snapshot

    return fill


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_repo_id(revision, cache, sharded, publisher):
    hub, _ = cache()
    options = {"cache_dir": hub} | ({"revision": revision} if revision else {})
    secure = AutoModelForCausalLM.from_pretrained(REPO, **options, **publisher.load)
    assert same_weights(AutoModelForCausalLM.from_pretrained(sharded.plain), secure)
    assert AutoTokenizer.from_pretrained(REPO, **options, **publisher.load)("hi").input_ids


def test_repo_id_in_a_pipeline(cache, sharded, publisher):
    hub, _ = cache()
    secure = pipeline("text-generation", REPO, model_kwargs={"cache_dir": hub}, device="cpu", **publisher.load)
    assert secure("hi", do_sample=False, max_new_tokens=4)


def test_snapshot_by_path(cache, sharded, publisher):
    _, snapshot = cache()
    secure = AutoModelForCausalLM.from_pretrained(snapshot, **publisher.load)
    assert same_weights(AutoModelForCausalLM.from_pretrained(sharded.plain), secure)


def test_what_no_loader_needs_may_be_absent(cache, publisher):
    hub, _ = cache(leave_out=["chat_template.jinja", "tokenizer.json"])
    assert AutoModelForCausalLM.from_pretrained(REPO, cache_dir=hub, **publisher.load)


def test_without_the_argument(cache):
    hub, _ = cache()
    with pytest.raises(EncryptedFileError, match='loader="secure"'):
        AutoModelForCausalLM.from_pretrained(REPO, cache_dir=hub)


def test_absent_shard(cache, publisher):
    hub, _ = cache(leave_out=["model.secure-00002-of-00003.safetensors"])
    with pytest.raises(ManifestError, match="missing"):
        AutoModelForCausalLM.from_pretrained(REPO, cache_dir=hub, **publisher.load)


def test_absent_manifest(cache, publisher):
    hub, _ = cache(leave_out=["secure_manifest.json"])
    with pytest.raises(OfflineError, match="not in the cache"):
        AutoModelForCausalLM.from_pretrained(REPO, cache_dir=hub, **publisher.load)


def test_altered_config(cache, publisher):
    hub, snapshot = cache()
    flip((snapshot / "config.json").resolve())
    with pytest.raises(ManifestError, match=r"config\.json"):
        AutoModelForCausalLM.from_pretrained(REPO, cache_dir=hub, **publisher.load)


def test_repo_that_is_not_in_the_cache(tmp_path, publisher):
    with pytest.raises(OfflineError):
        AutoModelForCausalLM.from_pretrained("acme/unknown", cache_dir=tmp_path, **publisher.load)
