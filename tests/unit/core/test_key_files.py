"""Where keys are read from, what is too careless to be read, and which of several is meant."""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path

import pytest

from secure_loader.core.aead import ALGORITHMS
from secure_loader.core.keys import local
from secure_loader.core.keys.local import find_master_key, find_signing_key, path_of, read_keys
from secure_loader.core.keys.provider import KeyRequest, KeyRing, key_check_value, provider, shown, split_reference
from secure_loader.errors import ConfigError, KeyAccessError
from tests.attacks.kit import KEY, SIGN, assert_no_secret, master, signing


def write(path: Path, *keys, mode: int = 0o600) -> Path:
    path.write_text(json.dumps({"keys": [k.document() for k in keys]}))
    path.chmod(mode)
    return path


def request(kid: str = KEY.kid, **more) -> KeyRequest:
    return KeyRequest(kid, ALGORITHMS["aes256gcm"], **more)


def test_a_file_a_folder_and_a_uri(tmp_path):
    path = write(tmp_path / "a.jwk", KEY, SIGN)
    write(tmp_path / "b.json", master("other", 3))
    (tmp_path / "notes.txt").write_text("not a key")
    (tmp_path / ".hidden.jwk").write_text("not a key")
    assert [k.kid for k in read_keys(path)] == ["enc-1", "sign-1"]
    assert [k.kid for k in read_keys(tmp_path)] == ["enc-1", "sign-1", "other"]
    for reference in (str(path), f"file:{path}", f"file://{path}", str(tmp_path)):
        unwrapper = KeyRing([reference]).resolve(request())
        assert bytes(unwrapper.secret.reveal()) == bytes(KEY.secret.reveal())


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o601, 0o660])
def test_a_file_that_others_may_touch(tmp_path, mode):
    path = write(tmp_path / "a.jwk", KEY, mode=mode)
    with pytest.raises(KeyAccessError, match=f"can be read by others .mode {mode:04o}") as caught:
        read_keys(path)
    assert caught.value.hint == f"chmod 600 {path}"


def test_what_is_not_a_regular_file(tmp_path):
    real = write(tmp_path / "real.jwk", KEY)
    link = tmp_path / "link.jwk"
    link.symlink_to(real)
    fifo = tmp_path / "fifo.jwk"
    os.mkfifo(fifo, 0o600)
    for path in (link, fifo, Path("/dev/zero")):
        with pytest.raises(KeyAccessError, match="is a link or not a regular file"):
            read_keys(path)
    with pytest.raises(KeyAccessError, match="cannot be read: No such file"):
        read_keys(tmp_path / "nowhere.jwk")


def test_a_link_put_in_place_after_the_check(tmp_path, monkeypatch):
    real, path = write(tmp_path / "real", KEY), write(tmp_path / "a.jwk", KEY)
    check = local.check_private

    def swap(*what):
        check(*what)
        path.unlink()
        path.symlink_to(real)

    monkeypatch.setattr(local, "check_private", swap)
    with pytest.raises(KeyAccessError, match="key file cannot be opened"):
        read_keys(path)


def test_a_careless_file_put_in_place_after_the_check(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jwk", KEY)
    check = local.check_private

    def swap(*what):
        check(*what)
        path.chmod(0o644)

    monkeypatch.setattr(local, "check_private", swap)
    with pytest.raises(KeyAccessError, match="can be read by others"):
        read_keys(path)


def test_a_large_file(tmp_path):
    path = write(tmp_path / "a.jwk", KEY)
    with path.open("a") as f:
        f.write(" " * 65536)
    with pytest.raises(KeyAccessError, match="larger than 65536 bytes"):
        read_keys(path)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("//host/key.jwk", "a host is not allowed"),
        ("//host", "a host is not allowed"),
        ("/a/../b", "'..' is not allowed"),
        ("~nobody-of-that-name/key", "no such user"),
        ("/a%2fb", "escapes are not allowed"),
        ("/a\0b", "escapes are not allowed"),
    ],
)
def test_paths_that_are_not_meant(reference, message):
    with pytest.raises(KeyAccessError, match=message):
        path_of(reference)


def test_the_home_folder_is_meant(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert path_of("~/key.jwk") == tmp_path / "key.jwk"
    assert path_of("///key.jwk") == Path("/key.jwk")


def test_a_key_in_a_variable_is_taken_out_of_it(monkeypatch):
    monkeypatch.setenv("MY_KEY", json.dumps(KEY.document()))
    ring = KeyRing(["env:MY_KEY"])
    assert ring.resolve(request()) is not None
    assert "MY_KEY" not in os.environ
    assert ring.resolve(request()) is not None, "remembered"
    with pytest.raises(KeyAccessError, match="environment variable NO_SUCH_KEY is not set"):
        KeyRing(["env:NO_SUCH_KEY"]).resolve(request())


def test_a_malformed_key_shows_nowhere_in_the_traceback(monkeypatch, tmp_path):
    """Crash reporters print local variables."""
    path = write(tmp_path / "a.jwk", KEY)
    path.write_text(path.read_text().replace('"oct"', '"RSA"'))
    monkeypatch.setenv("BAD_KEY", path.read_text())
    for reference in (str(path), "env:BAD_KEY"):
        with pytest.raises(KeyAccessError, match="none of oct, OKP and AKP") as caught:
            KeyRing([reference]).resolve(request())
        frames = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
        assert_no_secret("".join(frames.format()))


def test_key_material_instead_of_a_reference_is_not_echoed():
    text = json.dumps(KEY.document())
    for source in (text, KEY.document()["k"], bytes(KEY.secret.reveal()).hex()):
        with pytest.raises(ConfigError, match="never key material") as caught:
            KeyRing([source])
        assert_no_secret(str(caught.value))


def test_ambiguous_kids(tmp_path):
    impostor = master(KEY.kid, 0x77)
    same = write(tmp_path / "same.jwk", KEY)
    other = write(tmp_path / "zother.jwk", impostor)
    assert KeyRing([str(same), KEY]).resolve(request()) is not None, "the same key twice is one key"
    for sources in ([KEY, impostor], [str(same), str(other)], [str(tmp_path)], [KEY, str(other)]):
        with pytest.raises(KeyAccessError, match="two different keys go by the kid 'enc-1'"):
            KeyRing(sources).resolve(request())


def test_a_kid_of_another_kind(tmp_path):
    write(tmp_path / "a.jwk", signing(KEY.kid))
    with pytest.raises(KeyAccessError, match="'enc-1' is not a symmetric key"):
        KeyRing([str(tmp_path)]).resolve(request())
    write(tmp_path / "b.jwk", KEY)
    with pytest.raises(KeyAccessError, match="'enc-1' is not a symmetric key"):
        KeyRing([str(tmp_path)]).resolve(request())


def test_no_key_of_that_name_says_where_it_looked(tmp_path):
    with pytest.raises(KeyAccessError, match=f"no master key with kid 'x' .searched: {tmp_path}, key 'enc-1'"):
        KeyRing([str(tmp_path), KEY]).resolve(request("x"))
    for reference, said in (
        ("https://keys.example:8443/very/secret/path", "https://keys.example:8443"),
        ("vault:https://vault.example/secret/data/a?version=2", "vault:https://vault.example"),
        ("kbs:///repo/type/tag", "kbs://"),
        ("broker:token=hunter2;a/b", "broker:…"),
        ("https://user:hunter2@keys.example/", "https://keys.example"),
        ("passphrase:/some/where", "passphrase:/some/where"),
    ):
        assert shown(reference) == said
    with pytest.raises(KeyAccessError, match="searched: nowhere"):
        KeyRing([]).resolve(request("x"))


def test_the_wrong_key_is_told_by_its_check_value():
    file_id = bytes(16)
    right = request(file_id=file_id, kcv=key_check_value(KEY.secret, file_id))
    assert KeyRing([KEY]).resolve(right) is not None
    with pytest.raises(KeyAccessError, match="not the one that encrypted the file"):
        KeyRing([master(KEY.kid, 0x12)]).resolve(right)
    with pytest.raises(KeyAccessError, match="is for chacha20poly1305, the file is encrypted with aes256gcm"):
        KeyRing([master(KEY.kid, algorithm="chacha20poly1305")]).resolve(right)


def test_a_folder_is_searched_once_for_a_load(tmp_path):
    write(tmp_path / "b.jwk", KEY)
    other = write(tmp_path / "a.jwk", master("other", 3))
    ring = KeyRing([str(tmp_path)])
    for file_id in (bytes(16), bytes(range(16))):  # two files of one set
        unwrapper = ring.resolve(request(file_id=file_id, kcv=key_check_value(KEY.secret, file_id)))
        assert bytes(unwrapper.secret.reveal()) == bytes(KEY.secret.reveal())
        other.write_text("not a key")  # whoever looks at it says so
    for another in (ring, KeyRing([str(tmp_path)])):
        with pytest.raises(KeyAccessError, match=r"a\.jwk"):
            another.resolve(request(model_id="another/model"))
    (tmp_path / "b.jwk").unlink()
    with pytest.raises(KeyAccessError, match="No such file"):
        ring.resolve(request())


def test_key_check_value_is_hkdf():
    """Computed with RFC 5869 by hand: extract, then one block of expand."""
    import hashlib
    import hmac

    salt = bytes(range(16))
    prk = hmac.digest(salt, bytes(KEY.secret.reveal()), hashlib.sha256)
    assert key_check_value(KEY.secret, salt) == hmac.digest(prk, b"secure_loader kcv v1\x01", hashlib.sha256)[:16]


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("/a:b/c", ("file", "/a:b/c")),
        ("file:/a", ("file", "/a")),
        ("ENV:X", ("env", "X")),
        ("a.jwk", ("file", "a.jwk")),
        ("./a:b", ("file", "./a:b")),
        ("vault:secret/x", ("vault", "secret/x")),
    ],
)
def test_references(reference, expected):
    assert split_reference(reference) == expected


def test_an_unknown_scheme():
    with pytest.raises(ConfigError, match="no key provider serves 'gopher': references; there are age, awskms, "):
        provider("gopher")


def test_finding_a_key_to_write_with(tmp_path):
    write(tmp_path / "alice.enc.jwk", master("alice-enc-1"))
    write(tmp_path / "alice.sign.jwk", signing("alice-sign-1"))
    assert find_master_key([tmp_path]).kid == "alice-enc-1"
    assert find_signing_key([tmp_path], "alice").kid == "alice-sign-1"
    assert find_signing_key([tmp_path], "alice-sign-1").kid == "alice-sign-1"
    with pytest.raises(KeyAccessError, match="no master key named 'bob'"):
        find_master_key([tmp_path], "bob")
    write(tmp_path / "bob.enc.jwk", master("bob-enc-1"))
    with pytest.raises(KeyAccessError, match="several master keys: alice-enc-1, bob-enc-1"):
        find_master_key([tmp_path])
    assert find_master_key([tmp_path], "bob").kid == "bob-enc-1"
    with pytest.raises(KeyAccessError, match="there is no signing key"):
        find_signing_key([tmp_path / "nowhere"])


def test_a_ring_does_not_show_its_keys():
    assert repr(KeyRing([KEY, "/some/path"])) == "<KeyRing of 2 sources>"
    assert_no_secret(repr(KEY))
