"""Models encrypted for recipients: opened by identity alone, in every way in, and put under other keys afterwards."""

from __future__ import annotations

import base64
import json
import os
import threading
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

import secure_loader
from secure_loader import encrypt_model, rewrap_model, safe_open
from secure_loader.core import envelope
from secure_loader.core.checkpoint import Checkpoint
from secure_loader.core.keys import provider
from secure_loader.core.keys.hybrid import ALG, Identity
from secure_loader.core.keys.jwk import b64url
from secure_loader.core.keys.wrapping import WrappingProvider
from secure_loader.core.recipient import MAX_RECIPIENTS, Recipient, WrapContext
from secure_loader.core.secrets import Secret
from secure_loader.core.session import Session
from secure_loader.core.source import FileSource, read_header
from secure_loader.errors import ConfigError, KeyAccessError, SecureLoaderError, UntrustedSignerError, WriteError
from tests.attacks.kit import KEY, MALLORY, SIGN, arrays, build_file, build_source, master, shard, trust

BOB, CAROL = Identity("bob-1", Secret(b"\x0b" * 32)), Identity("carol-1", Secret(b"\x0c" * 32))
ALGORITHMS = ("aes256gcm", "aes128gcm", "chacha20poly1305")


def public(folder: Path, identity: Identity, name: str | None = None) -> str:
    path = folder / f"{name or identity.kid}.public.jwk"
    path.write_text(json.dumps(identity.public().document(b64url)))
    return str(path)


def private(folder: Path, *identities: Identity) -> str:
    """A key file with identities, and the reference to it."""
    path = folder / f"{'-'.join(i.kid for i in identities)}.id.jwk"
    path.write_text(json.dumps({"keys": [i.document(b64url) for i in identities]}))
    path.chmod(0o600)
    return str(path)


def know(home: Path, *identities: Identity) -> None:
    (home / "recipients").mkdir(mode=0o700, exist_ok=True)
    for identity in identities:
        (home / "recipients" / f"{identity.kid}.jwk").write_text(json.dumps(identity.public().document(b64url)))


def keep(home: Path, *keys) -> None:
    """Keys of this machine's own."""
    (home / "keys").mkdir(mode=0o700, exist_ok=True)
    for key in keys:
        path = home / "keys" / f"{key.kid}.jwk"
        path.write_text(json.dumps(key.document(b64url) if isinstance(key, Identity) else key.document()))
        path.chmod(0o600)


def encrypted(folder: Path, *who: str, shards: int = 2, **settings) -> Path:
    source = folder / "plain"
    if not source.exists():
        build_source(source, shards=shards)
    options = {"signing_key": SIGN, "model_id": "demo/model", "chunk_size": 65536, "recipients": who} | settings
    encrypt_model(source, folder / "model", **options)
    return folder / "model"


def entries(path: Path) -> tuple[Recipient, ...]:
    with FileSource(path) as source:
        profile = envelope.parse(read_header(source)).profile
    assert profile is not None
    return profile.recipients


def weights(folder: Path, *keys) -> dict[str, np.ndarray]:
    session = Session(keys=list(keys), trust=trust())
    checkpoint, found = Checkpoint(folder, session), {}
    for name in checkpoint.shards():
        with secure_loader.Archive(checkpoint.open(name), "numpy") as f:
            found |= f.get_tensors()
    return found


def original(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return {name: array for path in sorted(folder.glob("*.safetensors")) for name, array in load_file(path).items()}


def same(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> bool:
    return one.keys() == two.keys() and all(np.array_equal(one[n], two[n]) for n in one)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def bodies(folder: Path) -> dict[str, bytes]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with FileSource(path) as source:
            found[path.name] = path.read_bytes()[read_header(source).body_start :]
    return found


# --- loading with an identity alone ---------------------------------------------------------------------------------


def test_opens_with_an_identity_alone(tmp_path):
    folder = encrypted(tmp_path, public(tmp_path, BOB), public(tmp_path, CAROL))
    for identity in (BOB, CAROL):
        assert same(weights(folder, private(tmp_path, identity)), original(tmp_path / "plain"))
    with pytest.raises(KeyAccessError, match="which is wrapped for bob-1, carol-1"):
        weights(folder, private(tmp_path, Identity("dave-1", Secret(b"\x0d" * 32))))
    with pytest.raises(KeyAccessError, match="does not open with this identity"):
        weights(folder, private(tmp_path, Identity("bob-1", Secret(b"\x0d" * 32))))


def test_every_way_in(tmp_path, secure_loader_home):
    import secure_loader.numpy
    import secure_loader.torch

    folder = encrypted(tmp_path, public(tmp_path, BOB), shards=1)
    (path,) = folder.glob("*.safetensors")
    wanted = original(tmp_path / "plain")
    keep(secure_loader_home, BOB)
    with safe_open(path, "numpy", trust=trust()) as f:
        assert same(f.get_tensors(), wanted)
    assert same(secure_loader.numpy.load_file(path, trust=trust()), wanted)
    loaded = secure_loader.torch.load_file(path, trust=trust())
    assert same({name: tensor.numpy() for name, tensor in loaded.items()}, wanted)
    assert same(secure_loader.numpy.load(path.read_bytes(), trust=trust()), wanted)


def test_single_files_and_bytes(tmp_path):
    import secure_loader.numpy

    bob, tensors = private(tmp_path, BOB), arrays()
    settings = {"signing_key": SIGN, "recipients": [public(tmp_path, BOB)]}
    secure_loader.numpy.save_file(tensors, tmp_path / "x.safetensors", **settings)
    assert same(secure_loader.numpy.load_file(tmp_path / "x.safetensors", keys=bob, trust=trust()), tensors)
    data = secure_loader.numpy.save(tensors, **settings)
    assert same(secure_loader.numpy.load(data, keys=bob, trust=trust()), tensors)


def test_transformers(tmp_path, tiny_qwen3, secure_loader_home):
    import torch
    from transformers import AutoModel

    encrypt_model(tiny_qwen3, tmp_path / "model", signing_key=SIGN, recipients=[public(tmp_path, BOB)])
    (secure_loader_home / "trust").mkdir()
    signer = {"name": "publisher", "key": SIGN.verify_key().document(), "models": ["*"]}
    (secure_loader_home / "trust" / "publisher.json").write_text(json.dumps(signer))
    keep(secure_loader_home, BOB)
    wanted = AutoModel.from_pretrained(tiny_qwen3).state_dict()
    found = AutoModel.from_pretrained(tmp_path / "model", loader="secure").state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_all_shards_carry_the_same_list(tmp_path):
    folder = encrypted(tmp_path, public(tmp_path, CAROL), public(tmp_path, BOB), shards=3)
    lists = {entries(path) for path in folder.glob("*.safetensors")}
    assert len(lists) == 1
    assert [e.name for e in lists.pop()] == [(ALG, "bob-1"), (ALG, "carol-1")]


def interrupted(monkeypatch, folder: Path, *who: str, **settings) -> None:
    """An encryption that ends at its second shard."""
    from secure_loader.core import writer

    write, calls = writer.write_file, []

    def once(*args, **more):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return write(*args, **more)

    monkeypatch.setattr(writer, "write_file", once)
    with pytest.raises(KeyboardInterrupt):
        encrypted(folder, *who, **({"key": KEY} | settings))


def test_a_resumed_run_writes_one_list(tmp_path, monkeypatch):
    """What an interrupted run wrapped is taken over: a service is asked once for a file set, not once for each run."""
    who = public(tmp_path, BOB)
    interrupted(monkeypatch, tmp_path, who, shards=3)
    report = encrypt_model(
        tmp_path / "plain",
        tmp_path / "model",
        key=KEY,
        signing_key=SIGN,
        model_id="demo/model",
        chunk_size=65536,
        recipients=[who],
    )
    assert report.reused_shards == 1
    assert len({entries(path) for path in (tmp_path / "model").glob("*.safetensors")}) == 1
    assert same(weights(tmp_path / "model", private(tmp_path, BOB)), original(tmp_path / "plain"))


def test_a_resumed_run_with_another_key_of_that_name_starts_over(tmp_path, monkeypatch):
    interrupted(monkeypatch, tmp_path, public(tmp_path, BOB))
    new = Identity("bob-1", Secret(b"\x0f" * 32))
    folder = encrypted(tmp_path, public(tmp_path, new), key=KEY)
    assert same(weights(folder, private(tmp_path, new)), original(tmp_path / "plain"))


def test_a_killed_run_whose_key_nobody_has_starts_over(tmp_path, monkeypatch):
    """Its master key is gone with it, and what it wrote with it."""
    who = public(tmp_path, BOB)
    interrupted(monkeypatch, tmp_path, who, key=None)
    folder = encrypted(tmp_path, who)
    assert len({master_kid(folder), json.loads(_metadata(shard(folder, 2))["__crypto_keys__"])["enc"]["kid"]}) == 1
    assert same(weights(folder, private(tmp_path, BOB)), original(tmp_path / "plain"))


def test_the_master_key_of_one_model_is_kept_nowhere(tmp_path, monkeypatch, secure_loader_home):
    made = []
    one_time = secure_loader.core.writer.one_time_key

    def remember(*args):
        key = one_time(*args)
        made.append(bytes(key.secret.reveal()))
        return key

    monkeypatch.setattr(secure_loader.core.writer, "one_time_key", remember)
    folder = encrypted(tmp_path, public(tmp_path, BOB))
    (raw,) = made
    files = [p for root in (tmp_path, secure_loader_home) for p in root.rglob("*") if p.is_file()]
    assert len(files) > 8
    for path in files:
        data = path.read_bytes()
        for spelling in (raw, raw.hex().encode(), base64.b64encode(raw)[:40], base64.urlsafe_b64encode(raw)[:40]):
            assert spelling not in data, path
    kid = json.loads(_metadata(shard(folder))["__crypto_keys__"])["enc"]["kid"]
    assert kid.startswith("model-")


def _metadata(path: Path) -> dict[str, str]:
    with FileSource(path) as source:
        return dict(read_header(source).metadata)


def test_the_holder_of_the_master_key_opens_it_too(tmp_path):
    folder = encrypted(tmp_path, public(tmp_path, BOB), key=KEY)
    wanted = original(tmp_path / "plain")
    assert same(weights(folder, KEY), wanted)
    assert same(weights(folder, private(tmp_path, BOB)), wanted)
    assert same(weights(folder, KEY, private(tmp_path, BOB)), wanted)


def test_a_wrong_master_key_is_not_hidden_by_an_identity(tmp_path):
    folder = encrypted(tmp_path, public(tmp_path, BOB), key=KEY)
    for keys in ((master(KEY.kid, 0x70), private(tmp_path, BOB)), (private(tmp_path, BOB), master(KEY.kid, 0x70))):
        with pytest.raises(KeyAccessError, match="key check value differs"):
            weights(folder, *keys)


@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithms_and_versions(tmp_path, secure_loader_home, algorithm, version):
    key = master("enc-x", algorithm=algorithm)
    folder = encrypted(tmp_path, public(tmp_path, BOB), key=key, version=version)
    wanted, bob = original(tmp_path / "plain"), private(tmp_path, BOB)
    (entry,) = entries(shard(folder))
    assert len(entry.wrapped) == 1120 + len(key.secret) + 16
    assert same(weights(folder, bob), wanted)
    know(secure_loader_home, BOB)
    report = rewrap_model(folder, new_key=True, signing_key=SIGN, keys=bob, trust=trust())
    assert report.algorithm == algorithm
    assert same(weights(folder, bob), wanted)
    with pytest.raises(KeyAccessError, match="no master key"):
        weights(folder, key)


def test_cryptotensors_opens_it_with_the_master_key(tmp_path):
    import cryptotensors

    assert cryptotensors.__version__ == "0.2.3"
    context = WrapContext(KEY.kid, KEY.algorithm.name, "demo/model")
    path = build_file(tmp_path / "x.safetensors", recipients=(BOB.public().wrap(KEY.secret, context),))
    assert len(entries(path)) == 1
    key = {
        "kty": "oct",
        "alg": "aes256gcm",
        "kid": KEY.kid,
        "k": base64.b64encode(KEY.secret.reveal()).decode(),
    }
    signer = {
        "kty": "okp",
        "alg": "ed25519",
        "kid": SIGN.kid,
        "x": base64.b64encode(SIGN.verify_key().public).decode(),
    }
    with cryptotensors.safe_open(str(path), "np", config={"enc_key": key, "sign_key": signer}) as f:
        assert same({name: f.get_tensor(name) for name in arrays()}, arrays())


def test_the_longest_list(tmp_path):
    """64 recipients are what a file takes; nothing is written for one more."""
    many = [Identity(f"r-{i:02}", Secret(bytes([i]) * 32)) for i in range(1, MAX_RECIPIENTS + 2)]
    who = [public(tmp_path, identity) for identity in many]
    folder = encrypted(tmp_path, *who[:64])
    assert len(entries(shard(folder))) == 64
    assert same(weights(folder, private(tmp_path, many[63])), original(tmp_path / "plain"))
    with pytest.raises(ConfigError, match="at most 64 recipients, not 65"):
        encrypt_model(tmp_path / "plain", tmp_path / "more", signing_key=SIGN, recipients=who)
    assert sorted(p.name for p in tmp_path.iterdir() if "more" in p.name) == []


# --- other keys, other recipients ------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path, secure_loader_home):
    """A model for Bob, who is known here, as is Carol; Bob's private half is ours."""
    know(secure_loader_home, BOB, CAROL)
    keep(secure_loader_home, BOB)
    return encrypted(tmp_path, public(tmp_path, BOB))


def rewrap(folder: Path, **settings):
    return rewrap_model(folder, **({"signing_key": SIGN, "trust": trust()} | settings))


def kids(folder: Path) -> list[str]:
    (found,) = {tuple(e.kid for e in entries(path)) for path in folder.glob("*.safetensors")}
    return list(found)


def master_kid(folder: Path) -> str:
    return json.loads(_metadata(shard(folder))["__crypto_keys__"])["enc"]["kid"]


def unchanged(folder: Path, before: dict[str, bytes]) -> bool:
    """Byte by byte, and nothing is left beside it."""
    return contents(folder) == before and not [p for p in folder.parent.iterdir() if p.name.startswith(".")]


def test_adds_somebody(model, tmp_path):
    payload, kid, old = bodies(model), master_kid(model), entries(shard(model))
    report = rewrap(model, recipients=["carol-1"])
    assert report.recipients == ("bob-1", "carol-1")
    assert (kids(model), master_kid(model)) == (["bob-1", "carol-1"], kid)
    assert entries(shard(model))[0] == old[0]  # what is wrapped for Bob stays
    assert bodies(model) == payload
    for identity in (BOB, CAROL):
        assert same(weights(model, private(tmp_path, identity)), original(tmp_path / "plain"))


def test_adds_to_a_model_that_had_nobody(tmp_path, secure_loader_home):
    know(secure_loader_home, BOB)
    keep(secure_loader_home, KEY)
    folder = encrypted(tmp_path, key=KEY)
    assert entries(shard(folder)) == ()
    rewrap(folder, recipients=["bob-1"])
    assert master_kid(folder) == KEY.kid
    assert same(weights(folder, private(tmp_path, BOB)), original(tmp_path / "plain"))
    assert same(weights(folder, KEY), original(tmp_path / "plain"))


def test_wraps_anew_for_somebody_who_has_a_new_key_of_that_name(model, tmp_path):
    new = Identity("bob-1", Secret(b"\x0f" * 32))
    rewrap(model, recipients=[public(tmp_path, new, "new")])
    assert kids(model) == ["bob-1"]
    assert same(weights(model, private(tmp_path, new)), original(tmp_path / "plain"))


def test_removes_somebody(model, tmp_path):
    rewrap(model, recipients=["carol-1"])
    payload = bodies(model)
    report = rewrap(model, remove=["carol-1"])
    assert report.recipients == ("bob-1",)
    assert bodies(model) == payload
    with pytest.raises(KeyAccessError, match="which is wrapped for bob-1"):
        weights(model, private(tmp_path, CAROL))
    assert same(weights(model, private(tmp_path, BOB)), original(tmp_path / "plain"))


def test_exchanges_somebody_under_a_new_key(model, tmp_path, secure_loader_home):
    payload, kid = bodies(model), master_kid(model)
    rewrap(model, recipients=["carol-1"], remove=["bob-1"], new_key=True, release=2)
    assert kids(model) == ["carol-1"]
    assert master_kid(model) != kid
    assert bodies(model) == payload
    assert same(weights(model, private(tmp_path, CAROL)), original(tmp_path / "plain"))
    with pytest.raises(KeyAccessError, match="no master key"):
        weights(model, private(tmp_path, BOB))


def test_a_new_key_for_those_who_are(model, tmp_path):
    payload, kid, old = bodies(model), master_kid(model), entries(shard(model))
    rewrap(model, new_key=True)
    assert kids(model) == ["bob-1"]
    assert master_kid(model) != kid
    assert entries(shard(model)) != old
    assert bodies(model) == payload
    assert same(weights(model, private(tmp_path, BOB)), original(tmp_path / "plain"))


def test_a_key_of_one_s_own_for_those_who_are(model, tmp_path):
    rewrap(model, key=KEY)
    assert (kids(model), master_kid(model)) == (["bob-1"], KEY.kid)
    for keys in (KEY, private(tmp_path, BOB)):
        assert same(weights(model, keys), original(tmp_path / "plain"))


def test_only_signs_anew(model, tmp_path):
    old, kid = entries(shard(model)), master_kid(model)
    rewrap(model, release=7)
    assert (entries(shard(model)), master_kid(model)) == (old, kid)
    assert same(weights(model, private(tmp_path, BOB)), original(tmp_path / "plain"))


def test_the_last_one_is_not_removed(model):
    before = contents(model)
    with pytest.raises(ConfigError, match="without its recipients nobody could open the model any more"):
        rewrap(model, remove=["bob-1"])
    with pytest.raises(ConfigError, match="a new master key without recipients could be opened by nobody"):
        rewrap(model, remove=["bob-1"], new_key=True)
    assert unchanged(model, before)


def test_the_last_one_is_removed_where_the_master_key_is_one_s_own(tmp_path, secure_loader_home):
    know(secure_loader_home, BOB)
    keep(secure_loader_home, KEY, BOB)
    folder = encrypted(tmp_path, "bob-1", key=KEY)
    rewrap(folder, remove=["bob-1"])
    assert entries(shard(folder)) == ()
    assert same(weights(folder, KEY), original(tmp_path / "plain"))
    with pytest.raises(KeyAccessError):
        weights(folder, private(tmp_path, BOB))


def test_the_last_one_is_removed_for_a_key_of_one_s_own(model, tmp_path):
    rewrap(model, remove=["bob-1"], key=KEY)
    assert entries(shard(model)) == ()
    assert same(weights(model, KEY), original(tmp_path / "plain"))


@pytest.mark.parametrize("way", [{"new_key": True}, {"key": KEY}])
def test_a_stranger_among_those_who_are(model, secure_loader_home, way):
    """A new master key cannot be wrapped for somebody whose key is not here; nobody is left out silently."""
    rewrap(model, recipients=["carol-1"])
    (secure_loader_home / "recipients" / "carol-1.jwk").unlink()
    before = contents(model)
    with pytest.raises(ConfigError, match=r"cannot be wrapped for carol-1: not known here") as caught:
        rewrap(model, **way)
    assert "--remove" in caught.value.hint
    assert unchanged(model, before)
    rewrap(model, **way, remove=["carol-1"])
    assert kids(model) == ["bob-1"]


def test_an_impostor_among_those_who_are_known(model, secure_loader_home):
    """Somebody's key under Bob's kid does not become Bob at the next rotation."""
    impostor = Identity("bob-1", Secret(b"\x0f" * 32))
    path = secure_loader_home / "recipients" / "z.jwk"
    path.write_text(json.dumps(impostor.public().document(b64url)))
    before = contents(model)
    with pytest.raises(ConfigError, match="two different identities go by the kid 'bob-1'"):
        rewrap(model, new_key=True)
    assert unchanged(model, before)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ({"remove": ["dave-1"]}, r"'dave-1' is not a recipient \(there are: bob-1\)"),
        ({"remove": ["bob"]}, "'bob' is not a recipient"),
        ({"recipients": ["dave"]}, "there is no recipient 'dave'"),
        ({"recipients": ["carol-1", "carol-1"]}, "the recipient 'carol-1' is named twice"),
        ({"new_key": True, "key": KEY}, "exclude each other"),
        ({"key": master("enc-x", algorithm="aes128gcm")}, "is for aes128gcm, the file uses aes256gcm"),
    ],
)
def test_what_cannot_be_changed(model, way, message):
    before = contents(model)
    with pytest.raises(ConfigError, match=message):
        rewrap(model, **way)
    assert unchanged(model, before)


def test_who_cannot_open_it_cannot_change_it(model, tmp_path, secure_loader_home):
    before = contents(model)
    (secure_loader_home / "keys" / "bob-1.jwk").unlink()
    for way in ({"recipients": ["carol-1"]}, {"new_key": True}, {"key": KEY}, {"keys": private(tmp_path, CAROL)}):
        with pytest.raises(KeyAccessError, match="which is wrapped for bob-1"):
            rewrap(model, **way)
    with pytest.raises(UntrustedSignerError):
        rewrap(model, recipients=["carol-1"], trust=trust(MALLORY))
    assert unchanged(model, before)


def test_a_disk_that_is_full_leaves_the_model_as_it_was(model, monkeypatch):
    from secure_loader.core import rewrap as module

    before, copy, calls = contents(model), module.copy_range, []

    def full(*args):
        calls.append(args)
        if len(calls) == 2:
            raise WriteError("no space left on device")
        return copy(*args)

    monkeypatch.setattr(module, "copy_range", full)
    with pytest.raises(WriteError, match="no space left"):
        rewrap(model, new_key=True)
    assert len(calls) == 2
    assert unchanged(model, before)


# --- services that wrap and unwrap ----------------------------------------------------------------------------------


class Service(WrappingProvider):
    """A service of another package: an AES key of its own, which binds what it wraps to the context."""

    alg = "test-service"
    key = AESGCM(bytes(range(32)))
    asked: ClassVar[list[str]] = []
    answers: ClassVar[object] = None

    def kid(self, reference: str) -> str:
        return f"keys/{reference}"

    def wrap_key(self, reference: str, master: Secret, context: WrapContext) -> bytes:
        self.asked.append(f"wrap {reference}")
        nonce = os.urandom(12)
        return nonce + self.key.encrypt(nonce, bytes(master.reveal()), context.encode())

    def unwrap_key(self, reference: str, wrapped: bytes, context: WrapContext) -> Secret:
        self.asked.append(f"unwrap {reference}")
        if isinstance(self.answers, Exception):
            raise self.answers
        if isinstance(self.answers, bytes):
            return Secret(self.answers)
        try:
            return Secret(self.key.decrypt(wrapped[:12], wrapped[12:], context.encode()))
        except InvalidTag:
            raise KeyAccessError("the service does not unwrap this") from None


@pytest.fixture
def service(monkeypatch):
    """The scheme ``lab:`` is served by an entry point."""
    point = EntryPoint("lab", f"{__name__}:Service", provider.ENTRY_POINTS)
    real = provider.entry_points
    monkeypatch.setattr(
        provider,
        "entry_points",
        lambda **which: [point] if which.get("name") == "lab" else [*real(**which)],
    )
    found = point.load()
    monkeypatch.setattr(found, "asked", [])
    return found


def test_a_service_opens_it(tmp_path, service):
    folder = encrypted(tmp_path, "lab:prod", public(tmp_path, BOB))
    assert [e.name for e in entries(shard(folder))] == [(ALG, "bob-1"), ("test-service", "keys/prod")]
    assert same(weights(folder, "lab:prod"), original(tmp_path / "plain"))
    assert same(weights(folder, private(tmp_path, BOB)), original(tmp_path / "plain"))
    with pytest.raises(KeyAccessError, match=r"wrapped for bob-1, keys/prod \(searched: lab:…\)"):
        weights(folder, "lab:staging")
    assert service.asked == ["wrap prod", "unwrap prod"]


def test_a_service_is_asked_once_for_a_file_set(tmp_path, service):
    folder = encrypted(tmp_path, "lab:prod", shards=3)
    checkpoint = Checkpoint(folder, Session(keys=["lab:prod"], trust=trust()))
    names, barrier, failures = checkpoint.shards(), threading.Barrier(6), []

    def read(name: str) -> None:
        try:
            barrier.wait(10)
            with secure_loader.Archive(checkpoint.open(name), "numpy") as f:
                f.get_tensors()
        except BaseException as e:  # noqa: BLE001 - told to the test
            failures.append(e)

    assert len(names) == 3
    threads = [threading.Thread(target=read, args=(name,)) for name in (*names, *names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert service.asked == ["wrap prod", "unwrap prod"]


def test_rewrap_asks_a_service_once(tmp_path, service):
    folder = encrypted(tmp_path, "lab:prod", shards=3)
    service.asked.clear()
    rewrap(folder, recipients=[public(tmp_path, BOB)], keys="lab:prod")
    assert service.asked == ["unwrap prod"]
    assert kids(folder) == ["bob-1", "keys/prod"]
    assert same(weights(folder, "lab:prod"), original(tmp_path / "plain"))


def test_a_new_key_for_a_service_among_the_key_sources(tmp_path, service, monkeypatch):
    folder = encrypted(tmp_path, "lab:prod")
    with pytest.raises(ConfigError, match="cannot be wrapped for keys/prod: not known here"):
        rewrap(folder, new_key=True, keys="lab:prod")
    monkeypatch.setenv("SECURE_LOADER_KEYS", "lab:prod")
    rewrap(folder, new_key=True)
    assert same(weights(folder, "lab:prod"), original(tmp_path / "plain"))


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (KeyAccessError("the service is away"), "the service is away"),
        (bytes(32), "key check value differs"),
        (bytes(31), "has 31 bytes instead of 32"),
        (b"", "has 0 bytes instead of 32"),
        (bytes(9000), "has 9000 bytes instead of 32"),
    ],
)
def test_a_service_that_fails_or_lies(tmp_path, service, monkeypatch, answers, message):
    folder = encrypted(tmp_path, "lab:prod", public(tmp_path, BOB))
    monkeypatch.setattr(service, "answers", answers)
    bob = private(tmp_path, BOB)
    for keys in (["lab:prod"], ["lab:prod", bob]):
        with pytest.raises(KeyAccessError, match=message):
            weights(folder, *keys)
    before = contents(folder)
    with pytest.raises(SecureLoaderError, match=message):
        rewrap(folder, recipients=[public(tmp_path, CAROL)], keys=["lab:prod"])
    assert contents(folder) == before


def test_a_service_that_does_not_wrap_leaves_nothing_behind(tmp_path, service, monkeypatch):
    def refuses(*_):
        raise KeyAccessError("the service does not wrap")

    monkeypatch.setattr(service, "wrap_key", refuses)
    with pytest.raises(KeyAccessError, match="the service does not wrap"):
        encrypted(tmp_path, "lab:prod")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plain"]


def test_a_service_is_not_asked_before_the_signature_holds(tmp_path, service):
    folder = encrypted(tmp_path, "lab:prod")
    service.asked.clear()
    with pytest.raises(UntrustedSignerError):
        safe_open(shard(folder), "numpy", keys="lab:prod", trust=trust(MALLORY))
    assert service.asked == []
