"""The folder is one thing: files swapped, mixed, added, removed, older. Checked before config is trusted or a key asked."""

from __future__ import annotations

import base64
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from secure_loader import decrypt_model, encrypt_model, inspect, rewrap_model, verify
from secure_loader.core import manifest as mf
from secure_loader.core.index import MAX_INDEX
from secure_loader.errors import (
    ConfigError,
    FormatError,
    ManifestError,
    MissingFileError,
    RollbackError,
    SignatureError,
    SourceError,
    UnsupportedVersionError,
    UntrustedSignerError,
)
from tests.attacks.kit import (
    CHUNK,
    KEY,
    MALLORY,
    MALLORY_KEY,
    SIGN,
    SigningKey,
    Victim,
    build_file,
    build_folder,
    build_source,
    flip,
    refused,
    rewrite,
    shard,
    signing,
    trust,
)

OTHERS = ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors.index.secure.json")


@pytest.fixture
def folder(tmp_path):
    return build_folder(tmp_path / "model")


@pytest.fixture
def victim():
    return Victim()


def expect(victim, folder, kind, *words):
    with refused(kind, *words, victim=victim, place=folder):
        victim.load_folder(folder)
    # Whoever verifies, decrypts or signs again is told the same.
    with refused(kind, *words):
        verify(folder, trust=victim.session.trust)
    with refused(kind, *words):
        decrypt_model(folder, folder.parent / "out", keys=KEY, trust=victim.session.trust)
    with refused(kind, *words):
        rewrap_model(folder, key=MALLORY_KEY, signing_key=SIGN, keys=KEY, trust=victim.session.trust)
    assert not (folder.parent / "out").exists()


def edit(folder: Path, change, sign: SigningKey = SIGN, *, kid: str | None = None, alg: str = "EdDSA") -> None:
    """Change the manifest and sign it, as somebody with a key could."""
    path = folder / mf.MANIFEST
    jws = json.loads(path.read_text())

    def unb64(text):
        return json.loads(base64.urlsafe_b64decode(text + "=="))

    def b64(data):
        return base64.urlsafe_b64encode(data).decode().rstrip("=")

    def dump(doc):
        return json.dumps(doc, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode()

    payload, protected = unb64(jws["payload"]), unb64(jws["protected"])
    changed = change(payload)
    data = changed if isinstance(changed, bytes) else dump(payload)
    jws["payload"] = b64(data)
    jws["protected"] = b64(dump(protected | {"kid": kid or protected["kid"], "alg": alg}))
    jws["signature"] = b64(sign.sign(f"{jws['protected']}.{jws['payload']}".encode()))
    path.write_text(json.dumps(jws))


def test_the_genuine_folder_is_accepted(folder):
    """Or every refusal below would prove nothing."""
    victim = Victim()
    assert sorted(victim.load_folder(folder)) == ["layer1.a", "layer1.b", "layer2.a", "layer2.b"]
    report = verify(folder, trust=trust(), full=True)
    assert (report.model_id, report.release, report.files, report.tensors, report.full) == ("demo/model", 1, 6, 4, True)
    edit(folder, lambda payload: None)
    assert Victim().load_folder(folder), "editing without a change keeps it genuine"


def test_a43_a_shard_of_another_model(folder, victim, tmp_path):
    other = build_folder(tmp_path / "other", seed=1, model_id="demo/other")
    shutil.copy(shard(other), shard(folder))
    expect(victim, folder, ManifestError, shard(folder).name, "not the file that was signed")


def test_a43_a_shard_of_another_release(folder, victim, tmp_path):
    other = build_folder(tmp_path / "other", release=2)
    shutil.copy(shard(other), shard(folder))
    expect(victim, folder, ManifestError, shard(folder).name, "not the file that was signed")


def test_a43_a_shard_of_another_run_of_the_same_release(folder, victim, tmp_path):
    other = build_folder(tmp_path / "other")
    shutil.copy(shard(other), shard(folder))
    expect(victim, folder, ManifestError, shard(folder).name)


def test_a43_shards_that_swapped_names(folder, victim):
    a, b = shard(folder, 1), shard(folder, 2)
    a.rename(folder / "x")
    b.rename(a)
    (folder / "x").rename(b)
    expect(victim, folder, ManifestError, "not the file that was signed")


def entry(path: Path, *, is_shard: bool = True) -> dict:
    return mf.digest_of(path, shard=is_shard).document()


def test_a43_a_signer_mixes_models(folder, tmp_path):
    """By mistake, or a careless script: manifest and shards do not belong together, though all are signed."""
    other = build_folder(tmp_path / "other", seed=1, model_id="demo/other")
    shutil.copy(shard(other), shard(folder))
    edit(folder, lambda payload: payload["files"].update({shard(folder).name: entry(shard(folder))}))
    with refused(ManifestError, "belongs to another model or release", place=folder):
        Victim().load_folder(folder)


def test_a43_a_signer_lists_other_tensors(folder):
    first = shard(folder).name
    index = folder / "model.safetensors.index.secure.json"

    def change(payload):
        payload["weights"]["ghost"] = first
        doc = json.loads(index.read_text())
        doc["weight_map"] = payload["weights"]
        index.write_text(json.dumps(doc))
        payload["files"][index.name] = entry(index, is_shard=False)

    edit(folder, change)
    with refused(ManifestError, "does not hold the tensors that the manifest says", place=folder):
        Victim().load_folder(folder)


def test_a43_index_and_manifest_disagree(folder, victim):
    index = folder / "model.safetensors.index.secure.json"

    def change(payload):
        doc = json.loads(index.read_text())
        doc["weight_map"].pop("layer1.a")
        index.write_text(json.dumps(doc))
        payload["files"][index.name] = entry(index, is_shard=False)

    edit(folder, change)
    expect(victim, folder, ManifestError, "weight_map differs from the signed manifest")


def test_an_index_that_names_an_extra_shard(folder, victim):
    extra = folder / "model.secure-00003-of-00003.safetensors"
    build_file(extra)
    index = folder / "model.safetensors.index.secure.json"
    doc = json.loads(index.read_text())
    doc["weight_map"]["evil"] = extra.name
    index.write_text(json.dumps(doc))
    expect(victim, folder, ManifestError, extra.name, "not part of the signed folder")
    extra.unlink()
    expect(victim, folder, ManifestError, index.name, "not the file that was signed")


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("how", ["changed", "grown", "cut", "emptied"])
def test_files_changed(folder, victim, name, how):
    path = folder / name
    data = path.read_bytes()
    path.write_bytes({"changed": data[:-1] + b"X", "grown": data + b" ", "cut": data[:-1], "emptied": b""}[how])
    expect(victim, folder, ManifestError, name, "not the file that was signed")


@pytest.mark.parametrize("name", [*OTHERS, "model.secure-00001-of-00002.safetensors"])
def test_files_missing(folder, victim, name):
    (folder / name).unlink()
    expect(victim, folder, ManifestError, f"{name} is missing")


@pytest.mark.parametrize("name", [*OTHERS, "model.secure-00001-of-00002.safetensors"])
def test_files_replaced_by_what_is_no_file(folder, name):
    path = folder / name
    path.unlink()
    os.mkfifo(path)
    victim = Victim()
    with refused(SourceError, "is not a regular file", victim=victim, place=path):
        victim.load_folder(folder)
    path.unlink()
    path.mkdir()
    with refused(ManifestError, f"{name} is missing", victim=victim, place=folder):
        victim.load_folder(folder)
    path.rmdir()
    path.symlink_to(folder / "nowhere")
    with refused(MissingFileError, victim=victim, place=path):
        victim.load_folder(folder)
    with refused(MissingFileError, place=path):
        inspect(folder)


@pytest.mark.parametrize(
    "name", ["modeling_evil.py", "pytorch_model.bin", "model.safetensors", "sub/x", "adapter_config.json"]
)
def test_files_added(folder, victim, name):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("import os")
    expect(victim, folder, ManifestError, name, "not part of the signed folder")


def test_a_folder_added_by_a_link(folder, victim, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "config.json").write_text("{}")
    (folder / "sub").symlink_to(tmp_path / "elsewhere")
    expect(victim, folder, ManifestError, "sub is not part of the signed folder")


def test_a_signed_folder_replaced_by_a_link(tmp_path, victim):
    source = build_source(tmp_path / "src")
    (source / "code").mkdir()
    (source / "code" / "modeling.py").write_text("x = 1")
    folder = tmp_path / "model"
    encrypt_model(source, folder, key=KEY, signing_key=SIGN, chunk_size=CHUNK)
    assert Victim().load_folder(folder)
    shutil.move(folder / "code", tmp_path / "code")
    (folder / "code").symlink_to(tmp_path / "code")
    expect(victim, folder, ManifestError, "code is not part of the signed folder")


def test_links_to_files_are_fine_when_the_bytes_are(folder, tmp_path):
    """The hub cache is made of them."""
    (tmp_path / "blobs").mkdir()
    for i, path in enumerate(sorted(folder.iterdir())):
        path.rename(tmp_path / "blobs" / str(i))
        path.symlink_to(tmp_path / "blobs" / str(i))
    assert Victim().load_folder(folder)


def test_a_large_file_is_refused_by_its_size(folder, victim):
    with (folder / "tokenizer.json").open("r+b") as f:
        f.truncate(1 << 42)
    started = time.monotonic()
    with refused(ManifestError, "tokenizer.json", "not the file that was signed", victim=victim, place=folder):
        victim.load_folder(folder)
    assert time.monotonic() - started < 5, "it was not hashed to the end"


def test_the_manifest_removed(folder, victim):
    (folder / mf.MANIFEST).unlink()
    expect(victim, folder, ManifestError, f"has no {mf.MANIFEST}")


def test_the_manifest_of_another_model(folder, tmp_path, victim):
    other = build_folder(tmp_path / "other", seed=1, model_id="demo/other")
    shutil.copy(other / mf.MANIFEST, folder)
    expect(victim, folder, ManifestError, "not the file that was signed")


def test_the_manifest_of_another_signer(folder):
    victim = Victim()
    edit(folder, lambda payload: None, MALLORY)
    expect(victim, folder, SignatureError, "'sign-1' does not match")
    edit(folder, lambda payload: None, MALLORY, kid=MALLORY.kid)
    expect(victim, folder, UntrustedSignerError, "'sign-mallory'")


def test_the_manifest_of_a_signer_of_other_models(folder):
    edit(folder, lambda payload: None, MALLORY, kid=MALLORY.kid)
    from secure_loader import TrustedSigner, TrustStore

    store = TrustStore([TrustedSigner("me", SIGN.verify_key()), TrustedSigner("m", MALLORY.verify_key(), ("evil/*",))])
    expect(Victim(store=store), folder, UntrustedSignerError, "'m' is trusted, but not for model 'demo/model'")


def test_a_folder_of_another_trusted_signer_under_a_borrowed_model_id(tmp_path):
    folder = build_folder(tmp_path / "model", signing_key=MALLORY, key=MALLORY_KEY)
    store = trust(SIGN, MALLORY)
    victim = Victim(keys=(MALLORY_KEY,), store=store)
    assert victim.load_folder(folder), "trusted for every model: the operator said so"


@pytest.mark.parametrize("where", ["payload", "protected", "signature"])
def test_a_bit_of_the_manifest(folder, where):
    path = folder / mf.MANIFEST
    jws = json.loads(path.read_text())
    raw = bytearray(base64.urlsafe_b64decode(jws[where] + "=="))
    for at in (0, len(raw) // 2, len(raw) - 1):
        changed = bytes(raw[:at]) + bytes([raw[at] ^ 1]) + bytes(raw[at + 1 :])
        path.write_text(json.dumps(jws | {where: base64.urlsafe_b64encode(changed).decode().rstrip("=")}))
        victim = Victim()
        with pytest.raises((FormatError, SignatureError, UntrustedSignerError)) as caught:
            victim.load_folder(folder)
        assert str(folder) in str(caught.value)
        assert victim.ring.asked == []


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda p: p.update(profile=2), UnsupportedVersionError, "manifest profile 2 is unknown"),
        (lambda p: p.update(profile=True), UnsupportedVersionError, "is unknown"),
        (lambda p: p.update(extra=1), FormatError, "missing or unknown members"),
        (lambda p: p.pop("weights"), FormatError, "missing or unknown members"),
        (lambda p: p.update(model_id=""), FormatError, "model_id"),
        (lambda p: p.update(model_id=5), FormatError, "model_id"),
        (lambda p: p.update(release=2**53), FormatError, "release"),
        (lambda p: p.update(release="1"), FormatError, "release"),
        (lambda p: p.update(created="yesterday"), FormatError, "created"),
        (lambda p: p.update(files=[]), FormatError, "must be objects"),
        (lambda p: p["files"].update({"../evil": p["files"]["config.json"]}), FormatError, "not a plain relative path"),
        (lambda p: p["files"].update({"/etc/passwd": p["files"]["config.json"]}), FormatError, "not a plain relative"),
        (lambda p: p["files"].update({"a//b": p["files"]["config.json"]}), FormatError, "not a plain relative"),
        (lambda p: p["files"].update({".hidden": p["files"]["config.json"]}), FormatError, "not a plain relative"),
        (lambda p: p["files"].update({"": p["files"]["config.json"]}), FormatError, "not a plain relative"),
        (lambda p: p["files"].update({"a\0b": p["files"]["config.json"]}), FormatError, "not a plain relative"),
        (lambda p: p["files"].update({mf.MANIFEST: p["files"]["config.json"]}), FormatError, "cannot list itself"),
        (lambda p: p["files"]["config.json"].update(bytes=-1), FormatError, "out of range"),
        (lambda p: p["files"]["config.json"].update(sha256="AB" * 32), FormatError, "malformed digest"),
        (lambda p: p["files"]["config.json"].update(sha256="ab" * 31), FormatError, "malformed digest"),
        (lambda p: p["files"]["config.json"].update(header_sha256="ab" * 32), FormatError, "one of sha256"),
        (lambda p: p["files"].update(x=5), FormatError, "needs bytes"),
        (lambda p: p["weights"].update(x="config.json"), FormatError, "not a listed shard"),
        (lambda p: p["weights"].update(x="nowhere"), FormatError, "not a listed shard"),
        (lambda p: p["weights"].update(x=None), FormatError, "not a listed shard"),
        (lambda p: json.dumps(p).encode(), FormatError, "not in canonical form"),
        (lambda p: b"[]", FormatError, "not an object"),
        (lambda p: b"[" * 100_000, FormatError, "nested deeper"),
        (lambda p: b'{"profile":1,"profile":1}', FormatError, "twice"),
        (lambda p: b"\xff", FormatError, "UTF-8"),
    ],
)
def test_a_malformed_manifest_though_signed(folder, victim, change, kind, words):
    edit(folder, change)
    expect(victim, folder, kind, words)


@pytest.mark.parametrize("alg", ["none", "HS256", "eddsa", "ES256", "Ed25519"])
def test_a27_algorithms_of_the_manifest(folder, victim, alg):
    edit(folder, lambda p: None, alg=alg)
    expect(victim, folder, UnsupportedVersionError, "another algorithm or type")


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"payload":"","protected":"","signature":"","header":{}}', "x" * 100]
)
def test_what_is_no_manifest(folder, victim, text):
    (folder / mf.MANIFEST).write_text(text)
    expect(victim, folder, FormatError, mf.MANIFEST)


def test_a_manifest_of_terabytes(folder, victim):
    with (folder / mf.MANIFEST).open("r+b") as f:
        f.truncate(1 << 42)
    expect(victim, folder, SourceError, f"at most {mf.MAX_MANIFEST:,} are allowed")
    assert mf.MAX_MANIFEST == MAX_INDEX


def test_a_rolled_back_release(tmp_path):
    old, new = build_folder(tmp_path / "old", release=1), build_folder(tmp_path / "new", release=2)
    assert Victim().load_folder(old)
    assert Victim().load_folder(new)
    expect(Victim(), old, RollbackError, "release 1 of 'demo/model' is older than release 2")
    with refused(RollbackError, place=shard(old)):
        Victim().open(shard(old))
    assert Victim().load_folder(new)


def test_a_rolled_back_release_signed_by_somebody_else_is_not_a_rollback(tmp_path):
    new = build_folder(tmp_path / "new", release=2)
    assert Victim().load_folder(new)
    other = signing("sign-2", 7)
    old = build_folder(tmp_path / "old", release=1, signing_key=other)
    assert Victim(store=trust(other)).load_folder(old)


def test_a_manifest_rolled_back_alone(tmp_path):
    old, new = build_folder(tmp_path / "old", release=1), build_folder(tmp_path / "new", release=2)
    shutil.copy(old / mf.MANIFEST, new)
    expect(Victim(), new, ManifestError, "not the file that was signed")


def test_a_shard_swapped_after_the_folder_was_checked(folder, tmp_path):
    """What counts is the file that is open, not the one that was looked at."""
    other = build_folder(tmp_path / "other", seed=1)
    victim = Victim()
    checkpoint = victim.checkpoint(folder)
    name = checkpoint.shards()[0]
    shutil.copy(shard(other), folder / name)
    with refused(ManifestError, name, "not the file that was signed", victim=victim, place=folder):
        checkpoint.open(name)
    with refused(ManifestError, "is not a shard of the signed folder", victim=victim, place=folder):
        checkpoint.open("config.json")


@pytest.mark.parametrize("work", ["rewrap", "decrypt"])
def test_a_file_swapped_while_the_folder_is_rebuilt(folder, tmp_path, monkeypatch, work):
    """Between the check and the copy: the attacker's config must not be signed, or handed out as verified."""
    from secure_loader.core import export, rewrap

    real = rewrap.copy_file

    def swaps(source, target):
        if source.name == "config.json":
            source.write_text('{"auto_map": {"AutoConfig": "evil.C"}}')
        real(source, target)

    for module in (rewrap, export):
        monkeypatch.setattr(module, "copy_file", swaps)
    with refused(ManifestError, "config.json is not the file that was signed"):
        if work == "rewrap":
            rewrap_model(folder, key=MALLORY_KEY, signing_key=SIGN, keys=KEY, trust=trust())
        else:
            decrypt_model(folder, tmp_path / "out", keys=KEY, trust=trust())
    assert not (tmp_path / "out").exists()


def test_rewrapping_does_not_launder_altered_bytes(folder):
    """The payload is copied unseen; its old tags and digests stay, and refuse it."""
    bad = shard(folder)
    flip(bad, bad.stat().st_size - 1)
    rewrap_model(folder, key=MALLORY_KEY, signing_key=SIGN, keys=KEY, trust=trust(), release=2)
    from secure_loader.errors import AuthenticationError

    with refused(AuthenticationError, place=bad):
        Victim(keys=(MALLORY_KEY,)).load_folder(folder)
    with refused(AuthenticationError, place=bad):
        verify(folder, trust=trust(), full=True)


def test_after_rewrapping_only_the_new_key_opens(folder):
    from secure_loader.errors import KeyAccessError

    before = Victim().load_folder(folder)
    rewrap_model(folder, key=MALLORY_KEY, signing_key=MALLORY, keys=KEY, trust=trust())
    after = Victim(keys=(MALLORY_KEY,), store=trust(MALLORY)).load_folder(folder)
    assert all((after[n] == a).all() for n, a in before.items())
    with refused(UntrustedSignerError):
        Victim().load_folder(folder)
    with refused(KeyAccessError, "no master key with kid 'enc-mallory'"):
        Victim(store=trust(MALLORY)).load_folder(folder)


def test_nothing_is_encrypted_twice(folder, tmp_path):
    with refused(ConfigError, "is encrypted already", place=folder):
        encrypt_model(folder, tmp_path / "twice", key=KEY, signing_key=SIGN)
    (folder / mf.MANIFEST).unlink()
    with refused(ConfigError, "is encrypted already", place=folder):
        encrypt_model(folder, tmp_path / "twice", key=KEY, signing_key=SIGN)
    assert not (tmp_path / "twice").exists()


def test_one_folder_inside_the_other(tmp_path):
    source = build_source(tmp_path / "src")
    for target in (source / "dst", source, tmp_path):
        with refused(ConfigError, "must be different folders"):
            encrypt_model(source, target, key=KEY, signing_key=SIGN)
    (tmp_path / "link").symlink_to(source)
    with refused(ConfigError, "must be different folders"):
        encrypt_model(tmp_path / "link", source / "dst", key=KEY, signing_key=SIGN)


def test_names_that_are_not_text(tmp_path):
    source = build_source(tmp_path / "src")
    (Path(os.fsdecode(os.fsencode(source) + b"/bad\xff.txt"))).write_text("x")
    with refused(ConfigError, "is not UTF-8", place=source):
        encrypt_model(source, tmp_path / "dst", key=KEY, signing_key=SIGN)


def test_names_that_are_not_text_beside_a_signed_model(folder, victim):
    (Path(os.fsdecode(os.fsencode(folder) + b"/bad\xff.txt"))).write_text("x")
    expect(victim, folder, ManifestError, "not part of the signed folder")


def test_a_source_with_odd_files(tmp_path):
    source = build_source(tmp_path / "src")
    os.mkfifo(source / "fifo")
    with refused(ConfigError, "fifo is a link to a folder, or no regular file", place=source):
        encrypt_model(source, tmp_path / "dst", key=KEY, signing_key=SIGN)
    (source / "fifo").unlink()
    (source / "sub").symlink_to(tmp_path)
    with refused(ConfigError, "sub is a link to a folder, or no regular file", place=source):
        encrypt_model(source, tmp_path / "dst", key=KEY, signing_key=SIGN)


def test_without_a_manifest_by_leave(folder, caplog):
    (folder / mf.MANIFEST).unlink()
    victim = Victim(insecure_allow_legacy=True)
    assert len(victim.load_folder(folder)) == 4
    assert "are unprotected" in caplog.text
    rewrite(shard(folder), lambda doc: None, sign=MALLORY)
    with refused(SignatureError):
        Victim(insecure_allow_legacy=True).load_folder(folder)
