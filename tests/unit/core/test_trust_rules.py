"""What narrows trust: rules for models and revocations, and what a file that holds them may look like."""

from __future__ import annotations

import datetime as dt
import os
from pathlib import Path

import pytest

from secure_loader import Session, TrustedSigner, TrustStore
from secure_loader.config import LoaderConfig
from secure_loader.core.home import home, trust_dir
from secure_loader.core.trust import own_store
from secure_loader.core.trust_files import revoke
from secure_loader.core.trust_rules import Revocation, Rule, Rules, Subject, parse_rules, read_rules
from secure_loader.errors import (
    ConfigError,
    FormatError,
    MissingFileError,
    NotEncryptedError,
    PolicyDeniedError,
    RevokedError,
    RollbackError,
    SourceError,
    UntrustedSignerError,
)
from tests.attacks.kit import MALLORY, SIGN

NOW = dt.datetime.now(dt.UTC)
THUMBPRINT = SIGN.verify_key().thumbprint()
DIGEST = "ab" * 32
EVERYTHING = f"""\
only_listed = true

[[model]]
pattern = ["acme/*", "acme-old/?"]
signers = ["acme-2026", "{THUMBPRINT}"]
min_release = 3
profile = 1
encrypted = true
policies = ["{DIGEST}"]
not_after = 2030-01-01

[[revoked]]
signer = "{THUMBPRINT}"
name = "acme-2025"
since = 2026-11-21T12:00:00+01:00
reason = "key stolen"

[[revoked]]
model = "acme/x"
release = 2
since = "2026-11-21"
reason = "wrong weights"

[[revoked]]
model = "acme/y"
since = 2026-11-21
reason = "withdrawn"

[[revoked]]
file_id = "{"0a" * 16}"
since = 2026-11-21
reason = "wrong file"

[[revoked]]
sha256 = "{DIGEST}"
since = 2026-11-21
reason = "wrong file"
"""


def write(path: Path, text: str = EVERYTHING, mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def check(rules: Rules, subject: Subject, names: tuple[str, ...] = ("me",)) -> None:
    rules.check(names, [THUMBPRINT], subject)


def only(**members) -> Rules:
    return Rules((Rule(("a/*",), **members),))


def test_everything_that_can_be_said(tmp_path):
    rules = read_rules(write(tmp_path / "trust.toml"))
    assert rules.only_listed
    [rule] = rules.rules
    assert rule.patterns == ("acme/*", "acme-old/?")
    assert rule.not_after == dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
    assert rule.document() == {
        "pattern": ["acme/*", "acme-old/?"],
        "signers": ["acme-2026", THUMBPRINT],
        "min_release": 3,
        "profile": 1,
        "encrypted": True,
        "policies": [DIGEST],
        "not_after": "2030-01-01T00:00:00Z",
    }
    assert [sorted(entry.document()) for entry in rules.revoked] == [
        ["name", "reason", "signer", "since"],
        ["model", "reason", "release", "since"],
        ["model", "reason", "since"],
        ["file_id", "reason", "since"],
        ["reason", "sha256", "since"],
    ]
    assert rules.revoked[0].since == dt.datetime(2026, 11, 21, 11, tzinfo=dt.UTC)
    assert {entry.where for entry in rules.revoked} == {str(tmp_path / "trust.toml")}


def test_an_empty_file_narrows_nothing(tmp_path):
    assert read_rules(write(tmp_path / "trust.toml", "")) == Rules()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("only_listed = 1", "only_listed must be true or false"),
        ("only_listd = true", "the top level has the unknown key 'only_listd'"),
        ("[model]\npattern = 'a'", "model must be written as [[model]]"),
        ("model = ['a']", "model must be written as [[model]]"),
        ("revoked = 1", "revoked must be written as [[revoked]]"),
        ("[[model]]", "[[model]] needs a pattern"),
        ("[[model]]\npattern = ''", "pattern must be a list of texts"),
        ("[[model]]\npattern = []", "pattern must be a list of texts"),
        ("[[model]]\npattern = 5", "pattern must be a list of texts"),
        ("[[model]]\npattern = 'a'\nsigner = ['x']", "[[model]] has the unknown key 'signer'"),
        ("[[model]]\npattern = 'a'\nsigners = 'x'", "signers must be a list of texts"),
        ("[[model]]\npattern = 'a'\nsigners = []", "signers must be a list of texts"),
        ("[[model]]\npattern = 'a'\nsigners = [1]", "signers must be a list of texts"),
        ("[[model]]\npattern = 'a'\nmin_release = -1", "min_release must be a whole number"),
        ("[[model]]\npattern = 'a'\nmin_release = true", "min_release must be a whole number"),
        ("[[model]]\npattern = 'a'\nmin_release = '3'", "min_release must be a whole number"),
        ("[[model]]\npattern = 'a'\nprofile = 2", "profile must be 1"),
        ("[[model]]\npattern = 'a'\nprofile = true", "profile must be 1"),
        ("[[model]]\npattern = 'a'\nencrypted = 'yes'", "encrypted must be true or false"),
        ("[[model]]\npattern = 'a'\npolicies = ['AB']", "policies must be SHA-256 digests"),
        ("[[model]]\npattern = 'a'\nnot_after = 2030", "not_after must be a date or a time"),
        ("[[model]]\npattern = 'a'\nnot_after = 'soon'", "is not a date"),
        ("[[model]]\npattern = 'a'\nnot_after = 10:00:00", "not_after must be a date or a time"),
        ("[[model]]\npattern = 'a'\npattern = 'b'", "is not TOML"),
        ("[[revoked]]\nreason = 'x'\nsince = 2026-01-01", "exactly one of signer, model, file_id, sha256"),
        ("[[revoked]]\nmodel = 'a'\nfile_id = 'b'\nreason = 'x'\nsince = 2026-01-01", "exactly one of"),
        ("[[revoked]]\nsigner = 'alice'\nreason = 'x'\nsince = 2026-01-01", "signer 'alice' cannot be"),
        ("[[revoked]]\nfile_id = 'AA'\nreason = 'x'\nsince = 2026-01-01", "file_id 'AA' cannot be"),
        ("[[revoked]]\nsha256 = 5\nreason = 'x'\nsince = 2026-01-01", "sha256 '5' cannot be"),
        ("[[revoked]]\nmodel = ''\nreason = 'x'\nsince = 2026-01-01", "model '' cannot be"),
        ("[[revoked]]\nmodel = 'a'\nsince = 2026-01-01", "needs a reason"),
        ("[[revoked]]\nmodel = 'a'\nreason = ''\nsince = 2026-01-01", "needs a reason"),
        ('[[revoked]]\nmodel = "a"\nreason = "\\u001b[2J"\nsince = 2026-01-01', "needs a reason"),
        ("[[revoked]]\nmodel = 'a'\nreason = 'x'", "needs since"),
        ("[[revoked]]\nmodel = 'a'\nreason = 'x'\nsince = 7", "since must be a date or a time"),
        ("[[revoked]]\nmodel = 'a'\nrelease = -1\nreason = 'x'\nsince = 2026-01-01", "release must be a whole number"),
        (f"[[revoked]]\nsha256 = '{DIGEST}'\nrelease = 1\nreason = 'x'\nsince = 2026-01-01", "goes with model"),
        ("[[revoked]]\nmodel = 'a'\nname = 'x'\nreason = 'x'\nsince = 2026-01-01", "goes with signer"),
        ("[[", "is not TOML"),
        ("a = " + "[" * 5000, "is not TOML"),
    ],
)
def test_what_is_refused(tmp_path, text, message):
    path = write(tmp_path / "trust.toml", text)
    with pytest.raises(ConfigError) as caught:
        read_rules(path)
    assert message in caught.value.message
    assert caught.value.path == str(path)


def test_bytes_that_are_no_text():
    with pytest.raises(FormatError, match="is not TOML"):
        parse_rules(b"\xff", "here")


@pytest.mark.parametrize("mode", [0o666, 0o620, 0o602])
def test_a_file_that_others_may_write(tmp_path, mode):
    path = write(tmp_path / "trust.toml", "", mode)
    for named in ([path], [tmp_path]):
        with pytest.raises(ConfigError, match="trust configuration could have been written by others"):
            TrustStore.from_paths(named)


def test_files_that_are_not_there_or_no_files(tmp_path):
    missing = tmp_path / "trust.toml"
    assert read_rules(missing, missing_ok=True) == Rules()
    with pytest.raises(MissingFileError, match="no such trust configuration"):
        TrustStore.from_paths([missing])
    missing.symlink_to(tmp_path / "nowhere")
    with pytest.raises(MissingFileError, match="no such trust configuration"):
        read_rules(missing, missing_ok=True)
    missing.unlink()
    os.mkfifo(missing)
    with pytest.raises(SourceError, match="is not a regular file"):
        read_rules(missing, missing_ok=True)
    big = write(tmp_path / "big.toml", "#" * (1 << 20) + "\n")
    with pytest.raises(SourceError, match="larger than"):
        read_rules(big)


def test_signers_by_name_and_by_thumbprint():
    subject = Subject("a/x", 1)
    check(only(signers=("me",)), subject)
    check(only(signers=("other", THUMBPRINT)), subject)
    check(only(signers=("second",)), subject, ("first", "second"))
    check(only(signers=("other",)), Subject("b/x", 1))
    with pytest.raises(
        UntrustedSignerError, match=r"release 1 of 'a/x' is signed by 'me'; the rule for 'a/\*' in .* allows other"
    ):
        check(only(signers=("other",)), subject)


def test_the_strictest_of_all_rules_that_match():
    rules = Rules((Rule(("*",), min_release=1), Rule(("a/*",), min_release=5), Rule(("a/x",), min_release=3)))
    check(rules, Subject("a/x", 5))
    check(rules, Subject("b", 1))
    for subject in (Subject("a/x", 4), Subject("b", 0)):
        with pytest.raises(RollbackError, match="is older than release"):
            check(rules, subject)
    # In whatever order they stand.
    with pytest.raises(RollbackError):
        check(Rules(rules.rules[::-1]), Subject("a/x", 4))


def test_profile_encryption_policy_and_time():
    check(
        only(profile=1, encrypted=True, policies=(DIGEST,)), Subject("a/x", 1, clear=lambda: 0, policy=lambda: DIGEST)
    )
    check(only(profile=1, encrypted=True, policies=(DIGEST,)), Subject("a/x", 1))  # a manifest
    with pytest.raises(NotEncryptedError, match="has no profile 1"):
        check(only(profile=1), Subject("a/x", 1, profile=None))
    with pytest.raises(NotEncryptedError, match="holds 2 tensors in clear"):
        check(only(encrypted=True), Subject("a/x", 1, clear=lambda: 2))
    with pytest.raises(PolicyDeniedError, match=r"embeds a policy that the rule .* does not allow"):
        check(only(policies=(DIGEST,)), Subject("a/x", 1, policy=lambda: "cd" * 32))
    check(only(not_after=NOW + dt.timedelta(hours=1)), Subject("a/x", 1))
    with pytest.raises(UntrustedSignerError, match="load only until"):
        check(only(not_after=NOW - dt.timedelta(hours=1)), Subject("a/x", 1))


def test_a_file_that_names_no_model_must_meet_every_rule():
    legacy = Subject(None, profile=None, clear=lambda: 0, policy=lambda: DIGEST)
    check(only(signers=("me",)), legacy)
    for rules, error in (
        (only(signers=("other",)), UntrustedSignerError),
        (only(min_release=1), RollbackError),
        (only(profile=1), NotEncryptedError),
        (only(policies=("cd" * 32,)), PolicyDeniedError),
        (Rules((Rule(("*",)),), only_listed=True), UntrustedSignerError),
    ):
        with pytest.raises(error, match="a file that names no model"):
            check(rules, legacy)


def test_only_listed():
    rules = Rules((Rule(("a/*",)),), only_listed=True)
    check(rules, Subject("a/x", 1))
    with pytest.raises(UntrustedSignerError, match="no rule is about release 1 of 'b'"):
        check(rules, Subject("b", 1))


@pytest.mark.parametrize(
    "what",
    [
        {"signer": THUMBPRINT},
        {"model": "a/x"},
        {"model": "a/x", "release": 3},
        {"file_id": "0a" * 16},
        {"sha256": DIGEST},
    ],
)
def test_what_was_revoked_says_who_since_when_why_and_what_to_do(what):
    entry = Revocation("stolen", dt.datetime(2026, 1, 2, tzinfo=dt.UTC), **what, where="/x/revoked.toml")
    subject = Subject("a/x", 3, "0a" * 16, digest=lambda: DIGEST)
    with pytest.raises(RevokedError, match="was revoked on 2026-01-02: stolen") as caught:
        check(Rules(revoked=(entry,)), subject)
    assert "a/x" in caught.value.message or THUMBPRINT in caught.value.message
    assert "publisher" in caught.value.hint
    assert "/x/revoked.toml" in caught.value.hint


@pytest.mark.parametrize(
    "what",
    [
        {"signer": MALLORY.verify_key().thumbprint()},
        {"model": "a/X"},
        {"model": "a/x", "release": 4},
        {"file_id": "0b" * 16},
        {"sha256": "cd" * 32},
    ],
)
def test_what_was_not_revoked(what):
    rules = Rules(revoked=(Revocation("stolen", NOW, **what),))
    check(rules, Subject("a/x", 3, "0a" * 16, digest=lambda: DIGEST))
    check(rules, Subject(None))


def test_rules_add_up_and_never_take_away():
    strict, loose = Rules((Rule(("*",), min_release=5),), only_listed=True), Rules((Rule(("*",)),))
    for both in (strict + loose, loose + strict):
        assert both.only_listed
        with pytest.raises(RollbackError):
            check(both, Subject("x", 4))


def test_a_name_that_two_keys_have_names_nobody():
    signers = [TrustedSigner("acme", SIGN.verify_key()), TrustedSigner("acme", MALLORY.verify_key())]
    TrustStore(signers)
    with pytest.raises(ConfigError, match="names 'acme', as two different keys are called: use a thumbprint"):
        TrustStore(signers, rules=only(signers=("acme",)))
    TrustStore(signers, rules=only(signers=(THUMBPRINT,)))


def test_where_rules_are_looked_for(tmp_path):
    rule = "[[model]]\npattern = '{}'\n"
    write(home() / "trust.toml", rule.format("home"))
    write(trust_dir() / "trust.toml", rule.format("trust"))
    revoke(Revocation("stolen", NOW.replace(microsecond=0), signer=THUMBPRINT))
    write(tmp_path / "other" / "trust.toml", rule.format("other"))
    write(tmp_path / "named.toml", rule.format("named"))

    def patterns(store: TrustStore) -> list[str]:
        assert [e.reason for e in store.rules.revoked] == ["stolen"]  # at home, and so everywhere
        return sorted(p for r in store.rules.rules for p in r.patterns)

    assert patterns(own_store()) == ["home", "trust"]
    assert patterns(Session(keys=[]).trust) == ["home", "trust"]
    named = LoaderConfig(trust=(str(tmp_path / "other"), str(tmp_path / "named.toml")))
    assert patterns(Session(keys=[], config=named).trust) == ["named", "other"]
    assert patterns(Session(keys=[], trust=tmp_path / "named.toml").trust) == ["named"]
    assert patterns(Session(keys=[], trust=TrustStore([])).trust) == []


def test_a_home_that_cannot_be_believed_stops_every_session(tmp_path):
    write(trust_dir() / "revoked.toml", "[[revoked]]\n")
    for trust in (None, TrustStore([]), [tmp_path]):
        with pytest.raises(ConfigError, match="exactly one of"):
            Session(keys=[], trust=trust)
    write(trust_dir() / "revoked.toml", "")
    trust_dir().chmod(0o777)
    for trust in (None, TrustStore([]), [tmp_path]):
        with pytest.raises(ConfigError, match="trust folder could have been written by others"):
            Session(keys=[], trust=trust)


def test_revoking_keeps_what_a_person_wrote():
    path = write(trust_dir() / "revoked.toml", "# mine\n[[model]]\npattern = 'x'")
    entry = Revocation(
        'a "quoted" \\ reason, ü', dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC), model='m"x', release=2
    )
    assert revoke(entry) == path
    assert path.read_text().startswith("# mine\n[[model]]\npattern = 'x'\n\n[[revoked]]\nmodel = ")
    [found] = read_rules(path).revoked
    assert found.document() == entry.document()
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_list_that_is_a_link_is_not_replaced(tmp_path):
    central = write(tmp_path / "central.toml", "")
    trust_dir().mkdir(parents=True)
    (trust_dir() / "revoked.toml").symlink_to(central)
    with pytest.raises(ConfigError, match=f"is a link: add the entry to {central}"):
        revoke(Revocation("x", NOW, model="x"))
    assert central.read_text() == ""


@pytest.mark.parametrize("reason", ["", "a\nb", "x" * 501, "\udc80"])
def test_reasons_that_no_entry_can_hold(reason):
    with pytest.raises(ConfigError):
        revoke(Revocation(reason, NOW, model="x"))
    assert not (trust_dir() / "revoked.toml").exists()
