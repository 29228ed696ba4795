"""90, 95 to 97: what is wrapped for recipients moved, the list changed, keys of recipients replaced, recipients who were removed."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest

from secure_loader import MasterKey, encrypt_model, rewrap_model, safe_open
from secure_loader.core.keys import recipients
from secure_loader.core.keys.hybrid import Identity
from secure_loader.core.keys.jwk import b64url
from secure_loader.core.recipient import Recipient, WrapContext
from secure_loader.core.secrets import Secret
from secure_loader.errors import ConfigError, FormatError, KeyAccessError, SecureLoaderError, SignatureError
from tests.attacks.kit import (
    KEY,
    MALLORY,
    SIGN,
    Victim,
    arrays,
    build_file,
    build_folder,
    inner,
    master,
    refused,
    rewrite,
    shard,
    split,
    trust,
)

BOB, EVE = Identity("bob-1", Secret(b"\x0b" * 32)), Identity("eve-1", Secret(b"\x0e" * 32))


def wrapped(identity: Identity = BOB, key: MasterKey = KEY, model_id: str = "demo/model") -> Recipient:
    return identity.public().wrap(key.secret, WrapContext(key.kid, key.algorithm.name, model_id))


def private(folder: Path, *identities: Identity) -> str:
    path = folder / f"{'-'.join(i.kid for i in identities)}.jwk"
    path.write_text(json.dumps({"keys": [i.document(b64url) for i in identities]}))
    path.chmod(0o600)
    return str(path)


def public(path: Path, identity: Identity) -> Path:
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    path.write_text(json.dumps(identity.public().document(b64url)))
    path.chmod(0o644)
    return path


def load(path: Path, *keys, store=None) -> dict[str, np.ndarray]:
    with safe_open(path, "numpy", keys=list(keys), trust=store or trust(), strict=True) as f:
        return f.get_tensors()


def opens(path: Path, *keys, store=None) -> bool:
    found = load(path, *keys, store=store)
    return all(np.array_equal(found[name], array) for name, array in arrays().items())


# --- 90 -------------------------------------------------------------------------------------------------------------


def test_a90_what_is_wrapped_opens_where_it_belongs(tmp_path):
    """Or the tests below would show nothing."""
    assert opens(build_file(tmp_path / "x", recipients=(wrapped(),)), private(tmp_path, BOB))


@pytest.mark.parametrize(
    "settings",
    [
        {"model_id": "demo/other"},
        {"model_id": "demo/model\u200b"},
        {"master": dataclasses.replace(KEY, kid="enc-2")},
        {"master": MasterKey(KEY.kid, master(algorithm="chacha20poly1305").algorithm, KEY.secret)},
    ],
)
def test_a90_in_another_model_or_under_another_key(tmp_path, settings):
    """By somebody who signs models that the victim loads, and who would have Bob unwrap for him."""
    path = build_file(tmp_path / "x", recipients=(wrapped(),), signing=MALLORY, **settings)
    with refused(KeyAccessError, "what is wrapped for 'bob-1' does not open", place=path):
        load(path, private(tmp_path, BOB), store=trust(MALLORY))


def test_a90_for_one_recipient_under_the_name_of_another(tmp_path):
    path = build_file(tmp_path / "x", recipients=(Recipient("mlkem768-x25519", "eve-1", wrapped(BOB).wrapped),))
    with refused(KeyAccessError, "what is wrapped for 'eve-1' does not open"):
        load(path, private(tmp_path, EVE))


@pytest.mark.parametrize("at", [0, 500, 1088, 1119, 1120, 1151, 1152, 1167])
def test_a90_altered_by_whoever_signs(tmp_path, at):
    data = bytearray(wrapped().wrapped)
    data[at] ^= 0x40
    path = build_file(tmp_path / "x", recipients=(Recipient("mlkem768-x25519", "bob-1", bytes(data)),))
    with refused(KeyAccessError, "what is wrapped for 'bob-1' does not open"):
        load(path, private(tmp_path, BOB))


@pytest.mark.parametrize("length", [1, 16, 31, 33, 64])
def test_a90_something_else_that_is_wrapped(tmp_path, length):
    """Anybody can wrap for Bob: what he unwraps must be the key that the header was made with."""
    context = WrapContext(KEY.kid, KEY.algorithm.name, "demo/model")
    path = build_file(tmp_path / "x", recipients=(BOB.public().wrap(Secret(bytes(length)), context),))
    with refused(KeyAccessError, f"has {length} bytes instead of 32"):
        load(path, private(tmp_path, BOB))
    path = build_file(tmp_path / "y", recipients=(wrapped(key=master(fill=0x20)),))
    with refused(KeyAccessError, "key check value differs"):
        load(path, private(tmp_path, BOB))


# --- 95 -------------------------------------------------------------------------------------------------------------


def eve_s_entry() -> dict[str, str]:
    entry = wrapped(EVE)
    return {"alg": entry.alg, "kid": entry.kid, "wrapped": base64.b64encode(entry.wrapped).decode()}


CHANGES = {
    "added": lambda found: [*found, eve_s_entry()],
    "removed": lambda found: found[:1],
    "replaced": lambda found: [found[0], eve_s_entry()],
    "renamed": lambda found: [found[0], found[1] | {"kid": "eve-1"}],
    "exchanged": lambda found: [found[0] | {"wrapped": found[1]["wrapped"]}, found[1]],
}


def two(path: Path) -> Path:
    entries = recipients.listed([wrapped(BOB), wrapped(Identity("ann-1", Secret(b"\x0a" * 32)))])
    return build_file(path, recipients=entries)


@pytest.mark.parametrize("change", CHANGES)
def test_a95_the_list_changed_without_the_publisher(tmp_path, change):
    path = two(tmp_path / "x")
    victim = Victim()

    def edit(doc):
        inner(doc, "__secure_loader__", lambda p: p.update(recipients=CHANGES[change](p["recipients"])))

    with refused(SignatureError, victim=victim):
        victim.load(rewrite(path, edit))
    with refused(SignatureError):
        load(path, private(tmp_path, BOB, EVE))


def test_a95_the_whole_list_taken_away_or_put_there(tmp_path):
    bare, victim = build_file(tmp_path / "bare"), Victim()
    with refused(SignatureError, victim=victim):
        victim.load(
            rewrite(two(tmp_path / "x"), lambda doc: inner(doc, "__secure_loader__", lambda p: p.pop("recipients")))
        )

    def put(profile):
        profile["recipients"] = [eve_s_entry()]
        profile.update({name: profile.pop(name) for name in sorted(profile)})

    with refused(SignatureError, victim=victim):
        victim.load(rewrite(bare, lambda doc: inner(doc, "__secure_loader__", put)))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "somebody in it"),
        ([{}] * 65, "exactly alg, kid and wrapped"),
        ([eve_s_entry()] * 2, "each of them once"),
        ([eve_s_entry() | {"alg": "A"}], "alg of a recipient"),
        ([eve_s_entry() | {"kid": "\x1b[2J"}], "kid of a recipient"),
        ([eve_s_entry() | {"wrapped": ""}], "is not 1 to 8,192 bytes"),
        ([eve_s_entry() | {"wrapped": base64.b64encode(bytes(8193)).decode()}], "is not 1 to 8,192 bytes"),
        ([eve_s_entry() | {"jku": "https://keys.invalid"}], "exactly alg, kid and wrapped"),
    ],
)
def test_a95_lists_that_are_none_are_refused_before_the_signature(tmp_path, value, words):
    path, victim = build_file(tmp_path / "x"), Victim()

    def put(profile):
        profile["recipients"] = value
        profile.update({name: profile.pop(name) for name in sorted(profile)})

    with refused(FormatError, words, victim=victim):
        victim.load(rewrite(path, lambda doc: inner(doc, "__secure_loader__", put), sign=SIGN))


def test_a95_in_one_shard_only(tmp_path):
    """The manifest signs the digest of each header, too."""
    folder = build_folder(tmp_path / "model")
    other = build_folder(tmp_path / "other", recipients=[str(public(tmp_path / "eve.jwk", EVE))])
    shard(folder, 2).write_bytes(shard(other, 2).read_bytes())
    victim = Victim()
    with pytest.raises(SecureLoaderError) as caught:
        victim.load_folder(folder)
    assert type(caught.value).__name__ == "ManifestError"
    assert victim.ring.asked == []
    caught.value.__traceback__ = None


# --- 96 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o646])
def test_a96_a_recipient_s_key_that_others_could_have_written(tmp_path, secure_loader_home, mode):
    path = public(secure_loader_home / "recipients" / "bob.jwk", EVE)
    path.chmod(mode)
    for who in ("bob", str(path)):
        with refused(ConfigError, "could have been written by others", place=path):
            build_folder(tmp_path / "model", recipients=[who])
        assert not (tmp_path / "model").exists()
        for left in tmp_path.glob("model-plain*/*"):
            left.unlink()
        (tmp_path / "model-plain").rmdir()


def test_a96_a_recipient_s_key_of_somebody_else(tmp_path, secure_loader_home):
    if os.geteuid():
        pytest.skip("only root can give files away")
    path = public(secure_loader_home / "recipients" / "bob.jwk", EVE)
    os.chown(path, 12345, -1)
    with refused(ConfigError, "could have been written by others", place=path):
        build_folder(tmp_path / "model", recipients=["bob"])
    path.unlink()
    path.symlink_to(public(tmp_path / "elsewhere.jwk", EVE))
    os.chown(tmp_path / "elsewhere.jwk", 12345, -1)
    with refused(ConfigError, "could have been written by others", place=path):
        recipients.targets(["bob"])


def test_a96_names_exchanged_in_a_folder_that_others_may_write(secure_loader_home):
    public(secure_loader_home / "recipients" / "bob.jwk", EVE).parent.chmod(0o777)
    with refused(ConfigError, "folder of recipients could have been written by others"):
        recipients.targets(["bob"])


def test_a96_a_file_in_the_working_folder_does_not_take_a_name(tmp_path, secure_loader_home, monkeypatch):
    public(secure_loader_home / "recipients" / "bob.jwk", BOB)
    public(tmp_path / "bob", EVE)
    monkeypatch.chdir(tmp_path)
    assert recipients.targets(["bob"])[0].who == BOB.public()


def test_a96_a_key_handed_in_under_somebody_else_s_kid(tmp_path, secure_loader_home):
    """Eve sends Alice an identity with Bob's kid: at the next rotation, what is for Bob would be hers."""
    recipients.add(BOB.public(), "bob")
    posing = Identity("bob-1", EVE.secret)
    for force in (False, True):
        with refused(ConfigError, "two different identities go by the kid 'bob-1'"):
            recipients.add(posing.public(), "zed", force=force)
    folder = build_folder(tmp_path / "model", recipients=["bob"])
    public(secure_loader_home / "recipients" / "zed.jwk", posing)
    with refused(ConfigError, "two different identities go by the kid 'bob-1'"):
        rewrap_model(folder, new_key=True, signing_key=SIGN, keys=[KEY], trust=trust())
    assert Victim().load_folder(folder)


def test_a96_a_key_that_gives_everything_away(tmp_path):
    """Half of it would be known to all: refused when it is read, not when it is used."""
    doc = EVE.public().document(b64url) | {"pub": b64url(EVE.public().public[:1184] + bytes(32))}
    with refused(KeyAccessError, "is not a public key of MLKEM768-X25519"):
        recipients.parse_public(json.dumps(doc).encode(), "eve.jwk")


# --- 97 -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def rotated(tmp_path, secure_loader_home):
    """A model that Bob could load until he was removed, what he kept of it, and the master key that he had."""
    for identity in (BOB, EVE):
        recipients.add(identity.public(), identity.kid)
    folder = build_folder(tmp_path / "model", recipients=["bob-1", "eve-1"])
    old = [split(path)[0]["__metadata__"] for path in sorted(folder.glob("*.safetensors"))]
    report = rewrap_model(
        folder, remove=["bob-1"], new_key=True, release=2, signing_key=SIGN, keys=[KEY], trust=trust()
    )
    assert report.recipients == ("eve-1",)
    return folder, old


def test_a97_a_removed_recipient_with_the_new_folder(tmp_path, rotated):
    """Neither his identity nor the master key that he could have kept opens what was wrapped for the others."""
    folder, _ = rotated
    bob = private(tmp_path, BOB)
    for keys in ([bob], [KEY], [bob, KEY]):
        with refused(KeyAccessError, "no master key with kid", "eve-1"):
            load(shard(folder), *keys)
    assert load(shard(folder), private(tmp_path, EVE))


def test_a97_his_old_entry_put_back(tmp_path, rotated):
    folder, old = rotated
    entry = json.loads(old[0]["__secure_loader__"])["recipients"][0]
    assert entry["kid"] == "bob-1"

    def put(doc):
        inner(doc, "__secure_loader__", lambda p: p["recipients"].insert(0, entry))

    path = shard(folder)
    with refused(SignatureError):
        load(rewrite(path, put), private(tmp_path, BOB))
    # Even had the publisher signed it by mistake, it is bound to the old key's name.
    with refused(KeyAccessError, "what is wrapped for 'bob-1' does not open"):
        load(rewrite(path, lambda doc: None, sign=SIGN), private(tmp_path, BOB))


def test_a97_the_old_wrapped_keys_put_back(tmp_path, rotated):
    """What the old master key opens is not what the new header signs."""
    folder, old = rotated
    path = shard(folder)

    def put(doc):
        doc["__metadata__"]["__encryption__"] = old[0]["__encryption__"]
        doc["__metadata__"]["__crypto_keys__"] = old[0]["__crypto_keys__"]

    with refused(SignatureError):
        load(rewrite(path, put), KEY)


def test_a97_a_new_publication_has_nothing_of_the_old(tmp_path, rotated):
    """The tensors' keys are other ones, too: that is what keeps it from him, whatever he kept."""
    folder, old = rotated
    encrypt_model(
        tmp_path / "model-plain",
        tmp_path / "next",
        signing_key=SIGN,
        model_id="demo/model",
        release=3,
        recipients=["eve-1"],
    )
    for path, before in zip(sorted((tmp_path / "next").glob("*.safetensors")), old, strict=True):
        records = json.loads(split(path)[0]["__metadata__"]["__encryption__"])
        for name, record in json.loads(before["__encryption__"]).items():
            assert not set(record.values()) & set(records[name].values())
        assert split(path)[1] != split(shard(folder))[1]
    with refused(KeyAccessError, "no master key"):
        load(shard(tmp_path / "next"), private(tmp_path, BOB), KEY)
