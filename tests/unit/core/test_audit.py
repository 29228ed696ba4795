"""One record of every open: complete, about what was verified only, and without secrets."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from secure_loader import safe_open
from secure_loader.core.archive import Archive
from secure_loader.core.audit import FIELDS, LOGGER, note_source
from secure_loader.core.envelope import Policy
from secure_loader.core.keys.provider import KeyRing
from secure_loader.core.policy import ALLOW_ALL
from secure_loader.errors import (
    AuthenticationError,
    KeyAccessError,
    ManifestError,
    PolicyDeniedError,
    SecureLoaderError,
    UntrustedSignerError,
)
from tests.attacks.kit import (
    KEY,
    MALLORY,
    SIGN,
    Victim,
    arrays,
    assert_no_secret,
    build_file,
    build_folder,
    flip,
    master,
    shard,
    split,
    tensor_offset,
    trust,
)

DOCUMENT = Path(__file__).parents[3] / "docs" / "security.md"


@pytest.fixture
def records(caplog):
    """What was recorded, as a collector would read it."""
    caplog.set_level(logging.INFO, LOGGER)

    def read() -> list[dict]:
        found = [r for r in caplog.records if r.name == LOGGER]
        for record in found:
            assert json.loads(record.getMessage()) == record.audit
            assert record.levelno == logging.INFO
            assert tuple(record.audit) == FIELDS
            assert "\n" not in record.getMessage()
            assert record.getMessage().isascii()
            assert_no_secret(record.getMessage())
        caplog.clear()
        return [record.audit for record in found]

    return read


def test_a_file_that_opens(tmp_path, records):
    path = build_file(tmp_path / "x.safetensors", release=7)
    with Victim().open(path) as f:
        assert records() == [], "nothing is decided before the key"
        f.get_tensors()
        f.get_tensor("big")
    (record,) = records()
    profile = json.loads(split(path)[0]["__metadata__"]["__secure_loader__"])
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", record.pop("time"))
    assert 0 <= record.pop("ms") < 60_000
    assert record.pop("policy") == hashlib.sha256(ALLOW_ALL.encode()).hexdigest()
    assert record.pop("file_id") == profile["file_id"]
    assert record == {
        "event": "open",
        "path": str(path),
        "model": "demo/model",
        "release": 7,
        "signer": "sign-1",
        "signer_key": SIGN.verify_key().thumbprint(),
        "key": "enc-1",
        "source": "key 'enc-1'",
        "decision": "allowed",
        "error": None,
        "reason": None,
    }


def test_where_the_key_came_from(tmp_path, records):
    path = build_file(tmp_path / "x.safetensors")
    other, mine = tmp_path / "other.jwk", tmp_path / "mine.jwk"
    for place, key in ((other, master("other", 3)), (mine, KEY)):
        place.touch(0o600)
        place.write_text(json.dumps(key.document()))
    with safe_open(path, "numpy", keys=[other, mine, KEY], trust=trust()) as f:
        f.get_tensor("big")
    assert [r["source"] for r in records()] == [str(mine)], "the one that is used"
    with safe_open(path, "numpy", keys=[KEY, mine], trust=trust()) as f:
        f.get_tensor("big")
    assert [r["source"] for r in records()] == ["key 'enc-1'"]


def test_what_is_refused_before_anything_was_verified_says_nothing_of_itself(tmp_path, records):
    path = build_file(tmp_path / 'x"\n{"event": "open"}\n.safetensors', signing=MALLORY, model_id="evil")
    with pytest.raises(UntrustedSignerError):
        Victim().open(path)
    (record,) = records()
    assert (record["decision"], record["error"], record["path"]) == ("refused", "UntrustedSignerError", str(path))
    assert record["reason"]
    for field in ("model", "release", "file_id", "signer", "signer_key", "key", "source", "policy"):
        assert record[field] is None, field


def test_what_the_policy_refuses(tmp_path, records):
    text = "package model\nimport rego.v1\ndefault allow := false\nallow if input.file.release == 2"
    path = build_file(tmp_path / "x.safetensors", policy=Policy(text, ALLOW_ALL))
    with pytest.raises(PolicyDeniedError):
        Victim().open(path)
    (record,) = records()
    assert (record["decision"], record["error"]) == ("refused", "PolicyDeniedError")
    assert "data.model.allow" in record["reason"]
    assert (record["model"], record["signer"], record["key"], record["source"]) == (
        "demo/model",
        "sign-1",
        "enc-1",
        None,
    )


def test_a_key_that_is_not_there_and_then_is(tmp_path, records):
    path, victim = build_file(tmp_path / "x.safetensors"), Victim(keys=(master("other", 3),))
    with victim.open(path) as f:
        with pytest.raises(KeyAccessError):
            f.get_tensor("big")
        f.file._keys = KeyRing([KEY])
        f.get_tensor("big")
    refused, allowed = records()
    assert (refused["decision"], refused["error"], refused["source"]) == ("refused", "KeyAccessError", None)
    assert (allowed["decision"], allowed["error"], allowed["source"]) == ("allowed", None, "key 'enc-1'")
    assert allowed["ms"] >= refused["ms"], "all that this open took"


def test_altered_bytes_are_an_error_of_reading_and_no_second_decision(tmp_path, records):
    path = build_file(tmp_path / "x.safetensors")
    flip(path, tensor_offset(path, "big"))
    with Victim().open(path) as f, pytest.raises(AuthenticationError):
        f.get_tensor("big")
    assert [r["decision"] for r in records()] == ["allowed"]


def test_files_with_nothing_encrypted(tmp_path, records):
    path = build_file(tmp_path / "x.safetensors", clear=tuple(arrays()))
    with Victim().open(path) as f:
        f.get_tensors()
    (record,) = records()
    assert (record["decision"], record["signer"], record["source"]) == ("allowed", "sign-1", None)
    from safetensors.numpy import save_file

    save_file(arrays(), tmp_path / "plain.safetensors")
    with safe_open(tmp_path / "plain.safetensors", "numpy", keys=[], trust=trust()) as f:
        f.get_tensors()
    (record,) = records()
    assert (record["decision"], record["signer"], record["model"]) == ("allowed", None, None)


def test_a_folder(tmp_path, records):
    folder = build_folder(tmp_path / "model", shards=3)
    Victim().load_folder(folder)
    found = records()
    assert [(r["decision"], Path(r["path"]).name) for r in found] == [
        ("allowed", shard(folder, i).name) for i in (1, 2, 3)
    ]
    assert len({r["file_id"] for r in found}) == 3
    (folder / "config.json").write_text("{}")
    with pytest.raises(ManifestError):
        Victim().checkpoint(folder)
    (record,) = records()
    assert (record["decision"], record["error"], record["path"]) == ("refused", "ManifestError", str(folder))


def test_what_breaks_is_not_what_is_refused(tmp_path, records, monkeypatch):
    path, victim = build_file(tmp_path / "x.safetensors"), Victim()

    def interrupted(request):
        raise KeyboardInterrupt

    with victim.open(path) as f:
        monkeypatch.setattr(victim.ring, "resolve", interrupted)
        with pytest.raises(KeyboardInterrupt):
            f.get_tensor("big")
    (record,) = records()
    assert (record["decision"], record["error"], record["reason"]) == ("failed", "KeyboardInterrupt", None)


def test_threads_do_not_write_into_each_others_records(tmp_path, records):
    paths = [build_file(tmp_path / f"{i}.safetensors", model_id=f"demo/{i}") for i in range(8)]

    def load(path: Path) -> None:
        with contextlib.suppress(SecureLoaderError):
            Victim(keys=(KEY,) if path.stem in "0246" else ()).load(path)

    threads = [threading.Thread(target=load, args=(path,)) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {r["path"]: r for r in records()}
    for path in paths:
        opened = path.stem in "0246"
        assert found[str(path)]["model"] == f"demo/{path.stem}"
        assert found[str(path)]["source"] == ("key 'enc-1'" if opened else None)
    note_source("nobody's")


def test_nothing_is_written_unless_somebody_collects(tmp_path):
    path = build_file(tmp_path / "x.safetensors")
    code = "import sys; from tests.attacks.kit import Victim; import pathlib; Victim().load(pathlib.Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")


def test_collecting_as_the_document_says(tmp_path):
    text = DOCUMENT.read_text().split("\n## Audit\n")[1].split("\n## ")[0]
    assert [f for f in FIELDS if f"`{f}`" not in text] == [], "every field is explained"
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    place, model = tmp_path / "audit.jsonl", build_file(tmp_path / "x.safetensors")
    assert "/var/log/models.jsonl" in code
    script = code.replace("/var/log/models.jsonl", str(place))
    script += f"\nimport pathlib\nfrom tests.attacks.kit import Victim\nVictim().load(pathlib.Path({str(model)!r}))"
    subprocess.run([sys.executable, "-c", script], check=True)
    (line,) = place.read_text().splitlines()
    assert json.loads(line)["decision"] == "allowed"


def test_an_archive_of_a_shard_that_is_refused(tmp_path, records):
    """The record of a shard comes with its key, so one that does not belong to the folder has none that allows."""
    folder = build_folder(tmp_path / "model", shards=2)
    other = build_folder(tmp_path / "other", shards=2, model_id="demo/other")
    checkpoint = Victim().checkpoint(folder)
    shard(folder, 1).write_bytes(shard(other, 1).read_bytes())
    with pytest.raises(ManifestError):
        Archive(checkpoint.open(shard(folder, 1).name), "numpy")
    (record,) = records()
    assert (record["decision"], record["error"]) == ("refused", "ManifestError")
