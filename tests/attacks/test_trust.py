"""Attacks 22, 23, 26 and 38 against what an operator wrote down: revocations and rules for models."""

from __future__ import annotations

import datetime as dt
import hashlib
import json

import pytest

from secure_loader import Session, TrustedSigner, TrustStore
from secure_loader.config import LoaderConfig
from secure_loader.core.home import home, trust_dir
from secure_loader.core.inspection import identify
from secure_loader.core.manifest import MANIFEST
from secure_loader.core.trust_files import add, document_bytes, revoke, thumbprint_of
from secure_loader.core.trust_rules import Revocation, Rule, Rules
from secure_loader.errors import (
    ConfigError,
    NotEncryptedError,
    PolicyDeniedError,
    RevokedError,
    RollbackError,
    SecureLoaderError,
    UntrustedSignerError,
)
from tests.attacks.kit import (
    MALLORY,
    SIGN,
    Victim,
    build_file,
    build_folder,
    join,
    refused,
    resign,
    shard,
    split,
    trust,
)

SINCE = dt.datetime(2026, 5, 1, tzinfo=dt.UTC)
THUMBPRINT = SIGN.verify_key().thumbprint()


def store(*revoked: Revocation, rules: tuple[Rule, ...] = (), key=SIGN) -> TrustStore:
    return trust(key).narrowed(Rules(rules, revoked))


def gone(**what) -> Revocation:
    return Revocation("key stolen", SINCE, **what)


def refuses(path, trusted: TrustStore, kind: type[SecureLoaderError], *words: str, **settings) -> None:
    victim = Victim(store=trusted, **settings)
    with refused(kind, *words, victim=victim):
        victim.load_folder(path) if path.is_dir() else victim.load(path)


@pytest.fixture
def good(tmp_path):
    return build_file(tmp_path / "model.secure.safetensors", release=2)


@pytest.fixture
def folder(tmp_path):
    return build_folder(tmp_path / "model", release=2)


def test_a38_a_revoked_signer_of_a_file_and_of_a_folder(good, folder):
    Victim(store=store(gone(signer=MALLORY.verify_key().thumbprint()))).load(good)
    for path in (good, folder):
        refuses(path, store(gone(signer=THUMBPRINT)), RevokedError, "'sign-1'", THUMBPRINT, "2026-05-01", "key stolen")


def test_a38_a_revoked_key_under_other_names(tmp_path):
    key = type(SIGN)("a-new-name", SIGN.secret)
    path = build_file(tmp_path / "x.safetensors", signing=key)
    signers = [TrustedSigner("somebody else", key.verify_key()), TrustedSigner("me", SIGN.verify_key())]
    Victim(store=TrustStore(signers)).load(path)
    refuses(path, TrustStore(signers, rules=Rules(revoked=(gone(signer=THUMBPRINT),))), RevokedError, "key stolen")


def test_a28_a_signer_who_is_called_like_the_key_of_another(tmp_path):
    # A trust file says what its signer is called, and its publisher wrote it.
    impostor = TrustedSigner(THUMBPRINT, MALLORY.verify_key())
    path = build_file(tmp_path / "x.safetensors", signing=MALLORY)
    rule = Rule(("*",), (THUMBPRINT,))
    refuses(path, TrustStore([*trust().signers, impostor], rules=Rules((rule,))), UntrustedSignerError, "allows")
    with refused(ConfigError, "thumbprint"):
        add(impostor)
    # Where such a file got into the folder in another way, to revoke the thumbprint still revokes the key that has it.
    add(TrustedSigner("mallory", MALLORY.verify_key()))
    (trust_dir() / f"{THUMBPRINT}.json").write_bytes(document_bytes(impostor))
    assert thumbprint_of(THUMBPRINT) == (THUMBPRINT, None)


def test_a38_a_revoked_signer_whom_another_trust_store_names(good, tmp_path):
    """Whoever can say what to trust, by argument or setting, cannot bring back what the user revoked."""
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text(json.dumps(TrustedSigner("fresh", SIGN.verify_key()).document()))
    ways = (
        lambda: Session(keys=[], trust=elsewhere),
        lambda: Session(keys=[], trust=trust()),
        lambda: Session(keys=[], config=LoaderConfig(trust=(str(elsewhere),))),
        lambda: Session(keys=[]),
    )
    add(TrustedSigner("me", SIGN.verify_key()))
    for way in ways:
        way().open_file(good).source.close()
    revoke(gone(signer=THUMBPRINT))
    for way in ways:
        for strict in (True, False):
            with refused(RevokedError, "key stolen", place=good):
                way().open_file(good, strict=strict)


def test_a38_a_revoked_release(good, folder):
    for path in (good, folder):
        refuses(
            path, store(gone(model="demo/model", release=2)), RevokedError, "release 2 of 'demo/model'", "key stolen"
        )
        refuses(path, store(gone(model="demo/model")), RevokedError, "'demo/model'")
    Victim(store=store(gone(model="demo/model", release=1), gone(model="demo"))).load(good)


def test_a38_a_revoked_file(good, folder, tmp_path):
    other = build_file(tmp_path / "other.safetensors", release=2)
    header = hashlib.sha256(good.read_bytes()[: -len(split(good)[1])]).hexdigest()
    for what in (identify(good), {"sha256": header}):
        refuses(good, store(gone(**what)), RevokedError, "this very file", "key stolen")
        Victim(store=store(gone(**what))).load(other)
    # One shard takes the folder along, and opens no more by itself either.
    refuses(folder, store(gone(**identify(shard(folder)))), RevokedError, "this very file")
    refuses(shard(folder), store(gone(**identify(shard(folder)))), RevokedError, "this very file")


def test_a38_a_revoked_manifest_spelt_anew(folder):
    """The white space of a manifest is free: its file changes, what is signed does not."""
    revoked = store(gone(**identify(folder / MANIFEST)))
    before = (folder / MANIFEST).read_bytes()
    refuses(folder, revoked, RevokedError, "this very file")
    (folder / MANIFEST).write_text(json.dumps(json.loads(before), indent=4))
    assert (folder / MANIFEST).read_bytes() != before
    refuses(folder, revoked, RevokedError, "this very file")


def test_a38_a_rule_whose_time_is_over(good, folder):
    past, future = (dt.datetime.now(dt.UTC) + dt.timedelta(seconds=s) for s in (-1, 3600))
    for path in (good, folder):
        refuses(path, store(rules=(Rule(("demo/*",), not_after=past),)), UntrustedSignerError, "load only until")
    Victim(store=store(rules=(Rule(("demo/*",), not_after=future), Rule(("other/*",), not_after=past)))).load(good)


def test_a38_a_release_below_the_least_that_a_rule_allows(good, folder):
    """A fresh machine, whose own floor is empty."""
    for path in (good, folder):
        refuses(path, store(rules=(Rule(("demo/*",), min_release=3),)), RollbackError, "release 2", "least", "demo/*")
    Victim(store=store(rules=(Rule(("demo/*",), min_release=2),))).load_folder(folder)


def test_a26_a_signer_whom_a_rule_does_not_name(good, folder):
    rule = Rule(("demo/*",), signers=(MALLORY.verify_key().thumbprint(), "somebody"))
    both = trust(SIGN, MALLORY).narrowed(Rules((rule,)))
    for path in (good, folder):
        refuses(path, both, UntrustedSignerError, "signed by 'sign-1'", "somebody")


def test_a22_a_rule_demands_profile_1_where_the_settings_do_not(tmp_path, good):
    doc, body = split(good)
    del doc["__metadata__"]["__secure_loader__"]
    resign(doc, SIGN)
    legacy = join(tmp_path / "legacy.safetensors", doc, body)
    loose = {"insecure_allow_legacy": True, "insecure_allow_unverified_clear": True}
    Victim(**loose).load(legacy)
    # It names no model, so it cannot slip past a rule for one either.
    refuses(legacy, store(rules=(Rule(("acme/*",), profile=1),)), NotEncryptedError, "has no profile 1", **loose)
    refuses(legacy, store(rules=(Rule(("acme/*",), min_release=1),)), RollbackError, **loose)


def test_a20_a_rule_demands_that_everything_is_encrypted(good, tmp_path):
    rule = Rule(("demo/*",), encrypted=True)
    refuses(good, store(rules=(rule,)), NotEncryptedError, "1 tensors in clear")
    Victim(store=store(rules=(rule,))).load(build_file(tmp_path / "all.safetensors", clear=()))


def test_a23_a_rule_names_the_policy_that_must_be_there(good):
    text = "package model\nallow = true"
    right, wrong = (hashlib.sha256(t.encode()).hexdigest() for t in (text, text + "\n"))
    Victim(store=store(rules=(Rule(("demo/*",), policies=(wrong, right)),))).load(good)
    refuses(good, store(rules=(Rule(("demo/*",), policies=(wrong,)),)), PolicyDeniedError, right)


def test_a38_rules_of_the_home_folder_hold_for_a_load(good):
    add(TrustedSigner("me", SIGN.verify_key()))
    session = Session(keys=[])
    session.open_file(good).source.close()
    (home() / "trust.toml").write_text("[[model]]\npattern = 'demo/*'\nmin_release = 7\n")
    with refused(RollbackError, "release 2", str(home() / "trust.toml"), place=good):
        Session(keys=[]).open_file(good)
    (home() / "trust.toml").write_text("[[model]]\npattern = 'demo/*'\nmin_relaese = 1\n")
    with pytest.raises(SecureLoaderError, match="unknown key 'min_relaese'"):
        Session(keys=[])
    assert not (trust_dir() / "revoked.toml").exists()
