"""Who may sign what, and what a trust file may look like."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path

import pytest

from secure_loader import TrustedSigner, TrustStore
from secure_loader.core import trust_toml
from secure_loader.core.home import refuse_foreign
from secure_loader.core.trust import VerifiedHeader, read_trust_file
from secure_loader.core.trust_rules import Subject
from secure_loader.core.trust_toml import parse_time
from secure_loader.errors import ConfigError, FormatError, MissingFileError, SignatureError, UntrustedSignerError
from tests.attacks.kit import KEY, SIGN, signing

PUBLIC = SIGN.verify_key()


def store(*models: str, not_after: dt.datetime | None = None) -> TrustStore:
    return TrustStore([TrustedSigner("me", PUBLIC, models or ("*",), not_after)])


def verify(trust: TrustStore, model_id: str | None = "a/b", kid: str = SIGN.kid) -> TrustedSigner:
    return trust.verify(b"message", SIGN.sign(b"message"), kid, Subject(model_id))


def write(path: Path, doc: object, mode: int = 0o644) -> Path:
    path.write_text(json.dumps(doc))
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("pattern", "model_id", "allowed"),
    [
        ("*", "a/b", True),
        ("*", None, True),
        ("a/*", "a/b", True),
        ("a/*", "a/b/c", True),
        ("a/*", "A/b", False),
        ("a/*", "xa/b", False),
        ("a/b", "a/bc", False),
        ("a/*", None, False),
        ("a?b", "a/b", True),
        ("[ab]/*", "b/x", True),
    ],
)
def test_patterns(pattern, model_id, allowed):
    if allowed:
        assert verify(store(pattern), model_id).name == "me"
    else:
        with pytest.raises(UntrustedSignerError, match="'me' is trusted, but not for"):
            verify(store(pattern), model_id)


def test_one_of_several_patterns_is_enough():
    assert verify(store("x/*", "a/*"))
    two = TrustStore([TrustedSigner("one", PUBLIC, ("x/*",)), TrustedSigner("two", PUBLIC, ("a/*",))])
    assert verify(two).name == "two"


def test_expiry():
    now = dt.datetime.now(dt.UTC)
    assert verify(store(not_after=now + dt.timedelta(minutes=1)))
    with pytest.raises(UntrustedSignerError, match=f"only until {now - dt.timedelta(days=1):%Y-%m-%d}"):
        verify(store(not_after=now - dt.timedelta(days=1)))


def test_an_unknown_signer_is_named():
    with pytest.raises(UntrustedSignerError, match="signed by 'sign-1', whom the trust store given does not name"):
        verify(TrustStore([]))


def test_two_keys_of_one_name_are_ambiguous():
    both = TrustStore([TrustedSigner("a", PUBLIC), TrustedSigner("b", signing(SIGN.kid, 1).verify_key())])
    with pytest.raises(UntrustedSignerError, match="two different trusted keys go by the kid 'sign-1'"):
        verify(both)


def test_a_wrong_signature_and_a_key_that_is_no_point():
    with pytest.raises(SignatureError, match="the signature of 'sign-1' does not match"):
        store().verify(b"other message", SIGN.sign(b"message"), SIGN.kid, Subject("a/b"))
    for public in (bytes(32), b"\1" + bytes(31), b"\xff" * 32):
        odd = TrustStore([TrustedSigner("odd", type(PUBLIC)("odd", public))])
        with pytest.raises(SignatureError):
            odd.verify(b"message", bytes(64), "odd", Subject("a/b"))


def test_a_verified_header_is_not_made_by_hand():
    with pytest.raises(TypeError, match="made by verify_header"):
        VerifiedHeader(None, None, None, False)


def test_files_of_both_kinds(tmp_path):
    until = dt.datetime(2100, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
    signer = TrustedSigner("me", PUBLIC, ("a/*",), until)
    assert read_trust_file(write(tmp_path / "x.json", signer.document())) == signer
    assert read_trust_file(write(tmp_path / "bare.json", PUBLIC.document())) == TrustedSigner("bare", PUBLIC)
    write(tmp_path / "y.json", TrustedSigner("you", signing("y", 3).verify_key()).document())
    (tmp_path / "README").write_text("not a trust file")
    # By the names that the operator gave the files: what they call themselves is the publishers' word.
    assert [s.name for s in TrustStore.from_paths([tmp_path]).signers] == ["bare", "x", "y"]
    assert TrustStore.from_paths([tmp_path / "x.json"]).signers[0].name == "me"


def test_a_file_put_into_the_folder_takes_nobodys_name(tmp_path):
    write(tmp_path / "acme.json", PUBLIC.document())
    write(tmp_path / "evil.json", TrustedSigner("acme", signing("y", 3).verify_key()).document())
    assert {s.name: s.key.kid for s in TrustStore.from_paths([tmp_path]).signers} == {"acme": PUBLIC.kid, "evil": "y"}


@pytest.mark.parametrize("mode", [0o666, 0o622, 0o664, 0o646])
def test_a_file_that_others_may_write(tmp_path, mode):
    path = write(tmp_path / "x.json", PUBLIC.document(), mode)
    with pytest.raises(ConfigError, match="trust file could have been written by others"):
        TrustStore.from_paths([path])


def test_a_file_that_is_exchanged_while_it_is_looked_at(tmp_path, monkeypatch):
    """What is believed is what was looked at."""
    path, looked = write(tmp_path / "x.json", PUBLIC.document()), []

    def look(info, path, what):
        refuse_foreign(info, path, what)
        looked.append(what)
        write(tmp_path / "theirs.json", signing("mallory", 9).verify_key().document(), 0o666).replace(path)

    monkeypatch.setattr(trust_toml, "refuse_foreign", look)
    assert read_trust_file(path).key == PUBLIC
    assert looked == ["trust file"]
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="trust file could have been written by others"):
        read_trust_file(path)


def test_a_folder_that_others_may_write(tmp_path):
    folder = tmp_path / "trust"
    folder.mkdir()
    write(folder / "x.json", PUBLIC.document())
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="trust folder could have been written by others"):
        TrustStore.from_paths([folder])


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(MissingFileError, match="no such trust file"):
        TrustStore.from_paths([tmp_path / "nowhere.json"])
    (tmp_path / "dangling.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(MissingFileError, match="no such trust file"):
        TrustStore.from_paths([tmp_path])


@pytest.mark.parametrize(
    ("doc", "message"),
    [
        ([], "is not a JSON object"),
        ({}, "is not a JWK"),
        (SIGN.document(), "holds private key material"),
        (KEY.document(), "holds private key material"),
        ({"key": PUBLIC.document(), "model": ["x"]}, "has unknown members"),
        ({"key": PUBLIC.document(), "models": "*"}, "models must be a list of patterns"),
        ({"key": PUBLIC.document(), "models": []}, "models must be a list of patterns"),
        ({"key": PUBLIC.document(), "models": [""]}, "models must be a list of patterns"),
        ({"key": PUBLIC.document(), "models": [1]}, "models must be a list of patterns"),
        ({"key": PUBLIC.document(), "not_after": "tomorrow"}, "is not a date"),
        ({"key": PUBLIC.document(), "not_after": []}, "is not a date"),
        ({"key": PUBLIC.document(), "not_after": "0001-01-01T00:00:00+23:00"}, "is not a date"),
    ],
)
def test_malformed_files(tmp_path, doc, message):
    path = write(tmp_path / "x.json", doc)
    with pytest.raises(ConfigError) as caught:
        read_trust_file(path)
    assert message in caught.value.message
    assert caught.value.path == str(path)


def test_times():
    assert parse_time(None) is None
    assert parse_time("2030-01-01") == dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
    assert parse_time("2030-01-01T02:00:00+02:00") == dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
    with pytest.raises(FormatError):
        parse_time("2030-13-01")
