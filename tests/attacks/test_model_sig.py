"""``model.sig`` under attack: the folder changed, the signature changed, the trust in it changed.

The manifest refuses most of this by itself. So the attacker here also has the publisher's manifest key, and signs the
manifest anew: what is left is what ``model.sig`` adds.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from secure_loader import encrypt_model, rewrap_model, verify
from secure_loader.core import manifest as mf
from secure_loader.core.home import oms_dir
from secure_loader.core.keys.ec import EcSigningKey, read_signing_key
from secure_loader.core.oms import _signed
from secure_loader.core.oms_check import check
from secure_loader.core.oms_sign import sign_folder
from secure_loader.core.writer import write_manifest
from secure_loader.errors import (
    AuthenticationError,
    ConfigError,
    FormatError,
    KeyAccessError,
    ManifestError,
    MissingFileError,
    SignatureError,
    SourceError,
    UnsupportedVersionError,
    UntrustedSignerError,
    WriteError,
)
from tests.attacks.kit import (
    CHUNK,
    KEY,
    MALLORY,
    SIGN,
    Publication,
    Victim,
    build_folder,
    build_source,
    flip,
    refused,
    shard,
    tensor_offset,
    trust,
)

SIG = mf.MODEL_SIGNATURE
OWNER, STRANGER = (EcSigningKey(ec.derive_private_key(n, ec.SECP256R1())) for n in (0x1234567, 0x7654321))


def write_public(path, key):
    path.parent.mkdir(parents=True, exist_ok=True)
    pem, spki = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    path.write_bytes(key.verify_key("").public.public_bytes(pem, spki))
    return path


@pytest.fixture
def folder(tmp_path):
    folder = build_folder(tmp_path / "model")
    sign_folder(folder, OWNER, trust=trust())
    return folder


@pytest.fixture
def victim(tmp_path):
    """Somebody who trusts the owner's key for model.sig."""
    return Victim(oms_keys=(str(write_public(tmp_path / "owner.pem", OWNER)),))


def resign(folder) -> None:
    """The manifest anew, by its own signer, over whatever is there."""
    manifest, _ = mf.read(folder, trust())
    (signature := folder / SIG).rename(folder / ".sig")
    write_manifest(folder, manifest.weights, Publication(KEY, SIGN, "demo/model"))
    (folder / ".sig").rename(signature)


def edit(folder, change, key=OWNER) -> None:
    """Change the statement, and sign it: what the owner's tools might have been made to do."""
    bundle = json.loads((folder / SIG).read_text())
    envelope = bundle["dsseEnvelope"]
    doc = json.loads(base64.b64decode(envelope["payload"]))
    data = change(doc)
    payload = data if isinstance(data, bytes) else json.dumps(doc).encode()
    envelope["payload"] = base64.b64encode(payload).decode()
    envelope["signatures"][0]["sig"] = base64.b64encode(key.sign(_signed(payload))).decode()
    (folder / SIG).write_text(json.dumps(bundle))


def edit_bundle(folder, change) -> None:
    """Change what is around the statement, without a key."""
    bundle = json.loads((folder / SIG).read_text())
    change(bundle)
    (folder / SIG).write_text(json.dumps(bundle))


def rooted(doc) -> None:
    """Make the digest of the whole fit the files that are listed."""
    digests = b"".join(bytes.fromhex(r["digest"]) for r in doc["predicate"]["resources"])
    doc["subject"][0]["digest"]["sha256"] = hashlib.sha256(digests).hexdigest()


def expect(victim, folder, kind, *words):
    with refused(kind, *words, victim=victim, place=folder):
        victim.load_folder(folder)
    with refused(kind, *words):
        verify(folder, trust=trust(), oms_keys=victim.session.config.oms_keys)


def test_the_genuine_signature_is_accepted(folder, victim):
    """Or every refusal below would prove nothing."""
    assert len(victim.load_folder(folder)) == 4
    edit(folder, lambda doc: None)
    assert victim.checkpoint(folder).model_signer.name == "owner"
    manifest = folder / mf.MANIFEST
    manifest.write_text(" " + manifest.read_text())  # which is free, to those who read it
    assert Victim().checkpoint(folder).model_signer is None
    with refused(ManifestError, "secure_manifest.json is not the file that model.sig signs"):
        victim.checkpoint(folder)
    sign_folder(folder, OWNER, trust=trust(), force=True)
    assert verify(folder, trust=trust(), full=True, oms_keys=victim.session.config.oms_keys).model_signer == "owner"


def test_the_holder_of_the_manifest_key_changes_nothing(folder, victim):
    (folder / "tokenizer.json").write_text('{"version": "evil"}')
    resign(folder)
    assert Victim().load_folder(folder), "without model.sig it is a genuine folder"
    expect(victim, folder, ManifestError, "is not the file that model.sig signs")


@pytest.mark.parametrize("change", ["altered", "added", "removed", "renamed", "swapped", "shard of another"])
def test_a80_a_folder_that_its_signature_does_not_fit(folder, victim, tmp_path, change):
    config, template = folder / "config.json", folder / "chat_template.jinja"
    if change == "altered":
        config.write_text('{"model_type": "evil"}')
    elif change == "added":
        (folder / "modeling.py").write_text("raise SystemExit")
    elif change == "removed":
        template.unlink()
    elif change == "renamed":
        template.rename(folder / "template.jinja")
    elif change == "swapped":
        first, second = config.read_bytes(), template.read_bytes()
        config.write_bytes(second)
        template.write_bytes(first)
    else:
        other = build_folder(tmp_path / "other", seed=1)
        for path in other.iterdir():
            shutil.copy(path, folder / path.name)
    if change != "shard of another":
        resign(folder)
    assert Victim().checkpoint(folder)
    expect(victim, folder, ManifestError, "model.sig")


def test_a80_without_a_manifest_every_byte_counts(folder, victim, tmp_path):
    """Where folders without a manifest are accepted, nothing else binds the shards."""
    source = build_source(tmp_path / "plain")
    shutil.copy(folder / SIG, source / SIG)
    names = [n for n in mf.list_files(source) if n != SIG]

    def relist(doc):
        doc["predicate"]["resources"] = [
            {"name": n, "algorithm": "sha256", "digest": hashlib.sha256((source / n).read_bytes()).hexdigest()}
            for n in names
        ]
        rooted(doc)

    edit(source, relist)
    lax = Victim(oms_keys=victim.session.config.oms_keys, insecure_allow_plaintext=True)
    assert len(lax.load_folder(source)) == 4
    flip(shard(source), tensor_offset(shard(source), "layer1.a"))
    with refused(ManifestError, f"{shard(source).name} is not the file"):
        lax.load_folder(source)


def test_a80_weights_changed_by_a_key_holder(folder, victim):
    """Loading by tags leaves those to integrity="full" (see 47); verifying in full reads every file."""
    flip(shard(folder), tensor_offset(shard(folder), "layer1.a"))
    keys = victim.session.config.oms_keys
    assert verify(folder, trust=trust(), oms_keys=keys).model_signer == "owner"
    with refused(ManifestError, f"{shard(folder).name} is not the file that model.sig signs"):
        check(folder, victim.session.config)


def test_a80_links(folder, victim, tmp_path):
    """A link counts as what it leads to: a hub cache is made of them. One to a folder is no file that anybody signed."""
    moved = tmp_path / "blobs"
    moved.mkdir()
    for path in list(folder.iterdir()):
        path.rename(moved / path.name)
        path.symlink_to(moved / path.name)
    assert len(victim.load_folder(folder)) == 4
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("tokenizer.json")
    with refused(ManifestError):
        victim.checkpoint(folder)
    with refused(ConfigError, "is a link"):
        sign_folder(folder, OWNER, trust=trust(), force=True)


@pytest.mark.parametrize("target", ["folder", "nothing", "fifo", "a folder itself"])
def test_a80_a_signature_that_is_no_file(folder, victim, tmp_path, target):
    (folder / SIG).unlink()
    if target == "fifo":
        os.mkfifo(folder / SIG)
    elif target == "a folder itself":
        (folder / SIG).mkdir()
        (folder / SIG / "modeling.py").write_text("raise SystemExit")
    else:
        (tmp_path / "folder").mkdir()
        (folder / SIG).symlink_to(tmp_path / target)
    with refused(ManifestError, "not part of the signed folder"):
        victim.checkpoint(folder)
    with refused(ManifestError, "not part of the signed folder"):
        Victim().checkpoint(folder)


def test_a81_by_another_key(folder, victim):
    sign_folder(folder, STRANGER, trust=trust(), force=True)
    expect(victim, folder, UntrustedSignerError, "not signed by a key that is trusted")


def test_a81_by_another_key_under_the_hint_of_the_trusted_one(folder, victim):
    edit(folder, lambda doc: None, STRANGER)
    expect(victim, folder, SignatureError, "not one of the key 'owner'")


def test_a81_by_another_key_without_a_hint(folder, victim):
    edit(folder, lambda doc: None, STRANGER)
    edit_bundle(folder, lambda b: b["verificationMaterial"]["publicKey"].clear())
    expect(victim, folder, UntrustedSignerError)


def test_a81_a_key_that_it_brings_along(folder, victim):
    sign_folder(folder, STRANGER, trust=trust(), force=True)
    raw = base64.b64encode(
        STRANGER.verify_key("").public.public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    ).decode()
    edit_bundle(folder, lambda b: b["verificationMaterial"]["publicKey"].update(rawBytes=raw))
    expect(victim, folder, UntrustedSignerError)
    edit_bundle(
        folder,
        lambda b: b.update(verificationMaterial={"x509CertificateChain": {"certificates": [{"rawBytes": raw}]}}),
    )
    expect(victim, folder, UnsupportedVersionError, "certificate")


def test_a81_every_bit_of_payload_and_signature(folder, victim):
    """Of the signature, too, although (r, -s) is as good as (r, s) in ECDSA, and says the same."""
    bundle = json.loads((folder / SIG).read_text())
    envelope = bundle["dsseEnvelope"]
    for where, name in ((envelope, "payload"), (envelope["signatures"][0], "sig")):
        genuine = where[name]
        data = bytearray(base64.b64decode(genuine))
        for at in range(0, len(data), max(1, len(data) // 40)):
            data[at] ^= 1
            where[name] = base64.b64encode(data).decode()
            (folder / SIG).write_text(json.dumps(bundle))
            with refused(SignatureError, victim=victim):
                victim.checkpoint(folder)
            data[at] ^= 1
        where[name] = genuine


def test_a81_the_signature_of_another_model(folder, victim, tmp_path):
    other = build_folder(tmp_path / "other", seed=1)
    sign_folder(other, OWNER, trust=trust())
    shutil.copy(other / SIG, folder / SIG)
    expect(victim, folder, ManifestError, "is not the file that model.sig signs")


BUNDLES = {
    "another kind": (UnsupportedVersionError, lambda b: b.update(mediaType="application/json")),
    "no kind": (FormatError, lambda b: b.pop("mediaType")),
    "another payload": (UnsupportedVersionError, lambda b: b["dsseEnvelope"].update(payloadType="text/plain")),
    "no signature": (FormatError, lambda b: b["dsseEnvelope"]["signatures"].clear()),
    "two signatures": (FormatError, lambda b: b["dsseEnvelope"].update(signatures=b["dsseEnvelope"]["signatures"] * 2)),
    "signature of nothing": (SignatureError, lambda b: b["dsseEnvelope"]["signatures"][0].update(sig="")),
    "base64 with blanks": (FormatError, lambda b: b["dsseEnvelope"].update(payload=" " + b["dsseEnvelope"]["payload"])),
    "base64url": (FormatError, lambda b: b["dsseEnvelope"]["signatures"][0].update(sig="_-8=")),
    "payload as a list": (FormatError, lambda b: b["dsseEnvelope"].update(payload=[])),
    "no envelope": (FormatError, lambda b: b.pop("dsseEnvelope")),
    "a message instead": (FormatError, lambda b: b.update(messageSignature=b.pop("dsseEnvelope"))),
    "no material": (FormatError, lambda b: b.pop("verificationMaterial")),
    "hint as a number": (FormatError, lambda b: b["verificationMaterial"]["publicKey"].update(hint=5)),
    "another hint": (UntrustedSignerError, lambda b: b["verificationMaterial"]["publicKey"].update(hint="0" * 64)),
}


@pytest.mark.parametrize("name", BUNDLES)
def test_a81_bundles(folder, victim, name):
    kind, change = BUNDLES[name]
    edit_bundle(folder, change)
    expect(victim, folder, kind, "model.sig" if kind is not SignatureError else "owner")


def _resource(**members):
    def change(doc):
        doc["predicate"]["resources"][0].update(members)

    return change


def _serialization(**members):
    def change(doc):
        doc["predicate"]["serialization"].update(members)

    return change


STATEMENTS = {
    "another predicate": (UnsupportedVersionError, lambda d: d.update(predicateType="https://slsa.dev/provenance/v1")),
    "version 0.2": (UnsupportedVersionError, lambda d: d.update(predicateType="https://model_signing/Digests/v0.1")),
    "another statement": (UnsupportedVersionError, lambda d: d.update(_type="https://in-toto.io/Statement/v0.1")),
    "no predicate": (FormatError, lambda d: d.pop("predicate")),
    "no serialization": (FormatError, lambda d: d["predicate"].pop("serialization")),
    "no files": (FormatError, lambda d: d["predicate"].pop("resources")),
    "parts of files": (UnsupportedVersionError, _serialization(method="shards", shard_size=1000.0)),
    "another digest": (UnsupportedVersionError, _serialization(hash_type="blake3")),
    "another digest of one": (UnsupportedVersionError, _resource(algorithm="blake2b")),
    "a digest that is too short": (FormatError, _resource(digest="00")),
    "a digest in capitals": (FormatError, _resource(digest="A" * 64)),
    "another digest of the whole": (FormatError, lambda d: d["subject"][0]["digest"].update(sha256="0" * 64)),
    "two subjects": (FormatError, lambda d: d.update(subject=d["subject"] * 2)),
    "no subject": (FormatError, lambda d: d.update(subject=[])),
    "a file twice": (
        FormatError,
        lambda d: (d["predicate"]["resources"].append(d["predicate"]["resources"][0]), rooted(d))[1],
    ),
    "an absolute path": (FormatError, _resource(name="/etc/passwd")),
    "a path that leaves the folder": (FormatError, _resource(name="../plain/config.json")),
    "a path through itself": (FormatError, _resource(name="./config.json")),
    "a path with NUL": (FormatError, _resource(name="config.json\0")),
    "a number as a path": (FormatError, _resource(name=5)),
    "a list": (UnsupportedVersionError, lambda d: b"[]"),
    "no JSON": (FormatError, lambda d: b"{"),
    "a member twice": (FormatError, lambda d: b'{"_type": 1, "_type": 2}'),
    "nested deeply": (FormatError, lambda d: b"[" * 10_000 + b"]" * 10_000),
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_a81_statements_that_are_signed(folder, victim, name):
    """Even by a trusted key."""
    kind, change = STATEMENTS[name]
    edit(folder, change)
    expect(victim, folder, kind)


def test_a81_nothing_is_read_before_the_signature_holds(folder, victim):
    """A statement that would be refused for what it says is refused for who says it."""
    edit(folder, lambda doc: b"[" * 10_000, STRANGER)
    expect(victim, folder, SignatureError)


@pytest.mark.parametrize(
    "ignored", [["modeling.py"], ["."], [""], ["/"], ["*"], ["../model"], "modeling.py", [{"a": 1}], None]
)
def test_a82_files_that_the_signature_says_to_ignore(folder, victim, ignored):
    (folder / "modeling.py").write_text("raise SystemExit")
    resign(folder)

    def change(doc):
        doc["predicate"]["serialization"].update(ignore_paths=ignored, allow_symlinks=True)
        for resource in doc["predicate"]["resources"]:
            if resource["name"] == mf.MANIFEST:
                resource["digest"] = hashlib.sha256((folder / mf.MANIFEST).read_bytes()).hexdigest()
        rooted(doc)

    edit(folder, change)
    expect(victim, folder, ManifestError, "modeling.py is not signed by model.sig")


def test_a83_a_signature_that_was_removed(folder, victim, tmp_path):
    """Who can change the folder can remove it, so demanding one is a setting."""
    (folder / SIG).unlink()
    assert victim.load_folder(folder)
    keys = victim.session.config.oms_keys
    strict = Victim(oms_keys=keys, require_oms=True)
    expect(strict, folder, ManifestError, "has no model.sig")
    with refused(ConfigError, "no key is trusted"):
        Victim(require_oms=True).checkpoint(folder)
    with refused(ConfigError, "signs folders"):
        verify(shard(folder), trust=trust(), oms_keys=keys)


def test_a83_a_signature_that_is_stale(folder, victim, tmp_path):
    """Rewrapping and encrypting leave it out, so nobody publishes a folder that others refuse."""
    stale = (folder / SIG).read_bytes()
    report = rewrap_model(folder, key=KEY, signing_key=SIGN, keys=KEY, trust=trust(), release=2)
    assert report.left_out == (SIG,)
    assert not (folder / SIG).exists()
    (folder / SIG).write_bytes(stale)
    expect(victim, folder, ManifestError, "is not the file that model.sig signs")
    source = build_source(tmp_path / "source")
    for place in (source, source / "sub"):
        place.mkdir(exist_ok=True)
        (place / SIG).write_bytes(stale)
    report = encrypt_model(source, tmp_path / "new", key=KEY, signing_key=SIGN, model_id="demo/model", chunk_size=CHUNK)
    assert sorted(report.left_out) == [SIG, f"sub/{SIG}"]
    assert not list((tmp_path / "new").rglob(SIG))


def test_a83_an_old_one_does_not_keep_a_new_one_from_being_made(folder, victim):
    (folder / SIG).write_text("{")
    with refused(WriteError, "exists already"):
        sign_folder(folder, OWNER, trust=trust())
    write_public(oms_dir() / "stranger.pem", STRANGER)
    sign_folder(folder, OWNER, trust=trust(), force=True)
    assert victim.load_folder(folder)


def test_a83_only_what_was_verified_is_signed(folder, tmp_path):
    (folder / SIG).unlink()
    flip(shard(folder), tensor_offset(shard(folder), "layer1.a"))
    with refused(AuthenticationError):
        sign_folder(folder, OWNER, trust=trust())
    with refused(UntrustedSignerError):
        sign_folder(folder, OWNER, trust=trust(MALLORY))
    with refused(ConfigError, "is not an encrypted folder"):
        sign_folder(build_source(tmp_path / "plain"), OWNER, trust=trust())
    assert not (folder / SIG).exists()


def test_a84_without_a_trusted_key_it_is_not_looked_at(folder):
    for data in (b"", b"{", b"[" * 100_000, os.urandom(1000)):
        (folder / SIG).write_bytes(data)
        assert Victim().load_folder(folder)


def test_a84_hostile_bytes(folder, victim):
    for data, kind in (
        (b"", FormatError),
        (b"[" * 1_000_000, FormatError),
        (b'{"a":' * 1_000_000, FormatError),
        (b"\xff\xfe", FormatError),
        (b"null", FormatError),
        (b'"x"', FormatError),
        (b'{"mediaType": "a", "mediaType": "b"}', FormatError),
    ):
        (folder / SIG).write_bytes(data)
        expect(victim, folder, kind)
    with (folder / SIG).open("wb") as f:
        f.truncate(1 << 40)
    expect(victim, folder, SourceError, "at most")


def test_a84_keys_that_others_could_have_written(folder):
    path = write_public(oms_dir() / "owner.pem", OWNER)
    assert Victim().checkpoint(folder).model_signer.name == "owner"
    path.chmod(0o666)
    with refused(ConfigError, "could have been written by others"):
        Victim().checkpoint(folder)
    path.chmod(0o644)
    path.parent.chmod(0o777)
    with refused(ConfigError, "could have been written by others"):
        Victim().checkpoint(folder)
    path.parent.chmod(0o755)
    assert Victim().checkpoint(folder).model_signer.name == "owner"
    path.write_text("no key")
    with refused(ConfigError, "holds no public key in PEM"):
        Victim().checkpoint(folder)
    path.unlink()
    with refused(MissingFileError, "file of a trusted key"):
        Victim(oms_keys=(str(path),)).checkpoint(folder)


def test_a84_private_keys_in_wrong_places(folder, tmp_path):
    private = ec.derive_private_key(0x1234567, ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = oms_dir() / "owner.pem"
    path.parent.mkdir(parents=True)
    path.write_bytes(private)
    with refused(ConfigError, "holds a private key"):
        Victim().checkpoint(folder)
    path.unlink()
    key = tmp_path / "release.pem"
    key.write_bytes(private)
    key.chmod(0o644)
    with refused(KeyAccessError, "can be read by others"):
        read_signing_key(key)
    key.chmod(0o600)
    assert read_signing_key(key).verify_key("x").curve == "P-256"
    (tmp_path / "link.pem").symlink_to(key)
    with refused(KeyAccessError, "is a link"):
        read_signing_key(tmp_path / "link.pem")


@pytest.mark.parametrize("name", ["config.json", "model.secure-00001-of-00002.safetensors"])
def test_a83_a_file_that_changes_between_verification_and_signature(folder, monkeypatch, name):
    from secure_loader.core import inspection

    path, verified = folder / name, inspection.verify
    data = path.read_bytes()

    def verify_then_change(*args, **options):
        report = verified(*args, **options)
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        return report

    monkeypatch.setattr(inspection, "verify", verify_then_change)
    with refused(ManifestError, f"{name} changed while it was signed"):
        sign_folder(folder, OWNER, trust=trust(), force=True)
    monkeypatch.undo()
    path.write_bytes(data)
    sign_folder(folder, OWNER, trust=trust(), force=True)


def test_a80_another_manifest_between_reading_and_hashing(folder, victim, tmp_path, monkeypatch):
    """Read was the one that vouches for the attacker's shards; what lies there a moment later is the one that was signed."""
    other = build_folder(tmp_path / "other" / folder.name, seed=7)
    shutil.copy(folder / SIG, other / SIG)
    looked = mf.check_files

    def look_then_exchange(where, manifest, **options):
        looked(where, manifest, **options)
        shutil.copy(folder / mf.MANIFEST, other / mf.MANIFEST)

    monkeypatch.setattr(mf, "check_files", look_then_exchange)
    with refused(ManifestError, "secure_manifest.json changed while the folder was checked", victim=victim):
        victim.load_folder(other)
