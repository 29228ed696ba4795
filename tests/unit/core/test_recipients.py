"""For whom a master key is wrapped: bounds of an entry, who is meant by a name, and the folder of those who are known."""

from __future__ import annotations

import json
import os
import stat

import pytest

from secure_loader.config import LoaderConfig
from secure_loader.core.keys import provider, recipients
from secure_loader.core.keys.hybrid import ALG, Identity, PublicIdentity
from secure_loader.core.keys.jwk import b64url
from secure_loader.core.keys.provider import KeyRequest, KeyRing
from secure_loader.core.keys.wrapping import WrappingProvider
from secure_loader.core.recipient import MAX_RECIPIENTS, MAX_WRAPPED, Recipient, WrapContext, check_recipients
from secure_loader.core.secrets import Secret
from secure_loader.errors import (
    ConfigError,
    FormatError,
    KeyAccessError,
    MissingFileError,
    SourceError,
    WriteError,
)
from tests.attacks.kit import KEY, SIGN
from tests.unit.core.test_hybrid import assert_no_trace, frames

BOB, CAROL = Identity("bob-1", Secret(b"\x0b" * 32)), Identity("carol-1", Secret(b"\x0c" * 32))
IMPOSTOR = Identity("bob-1", Secret(b"\x0d" * 32))


class Reversing(WrappingProvider):
    """A service of a test. References are ``KEY``, and what it wraps is turned round."""

    alg = "test-reverse"
    configured: list[LoaderConfig]

    def configure(self, config: LoaderConfig) -> None:
        super().configure(config)
        type(self).configured = [config]

    def kid(self, reference: str) -> str:
        if not reference:
            raise KeyAccessError("the reference names no key")
        return reference

    def wrap_key(self, reference: str, master: Secret, context: WrapContext) -> bytes:
        return b"" if reference == "empty" else bytes(master.reveal())[::-1] * (300 if reference == "long" else 1)

    def unwrap_key(self, reference: str, wrapped: bytes, context: WrapContext) -> Secret:
        return Secret(wrapped[::-1])


@pytest.fixture
def service(monkeypatch):
    """``reverse:KEY`` is served."""
    monkeypatch.setattr(recipients, "provider", served := lambda s: Reversing() if s == "reverse" else found(s))
    monkeypatch.setattr(provider, "provider", served)


found = provider.provider


def publish(path, identity, mode=0o644):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(identity.public().document(b64url)))
    path.chmod(mode)
    return path


def keep(path, identity):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    path.write_text(json.dumps(identity.document(b64url)))
    path.chmod(0o600)
    return path


# --- an entry -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alg", ["a", "0", "a" * 32, "mlkem768-x25519", "aws-kms", "x.509", "a..-"])
def test_an_alg(alg):
    assert Recipient(alg, "k", b"w").alg == alg


@pytest.mark.parametrize("alg", ["", "A", "a" * 33, "-a", ".a", "a_b", "a b", "ü", "a\n", "MLKEM768"])
def test_what_is_no_alg(alg):
    with pytest.raises(FormatError, match="alg of a recipient is not 1 to 32"):
        Recipient(alg, "k", b"w")


@pytest.mark.parametrize("kid", ["k", "k" * 512, "a/b", " ", "ü", "\U0001f511" * 512, "\x80", "\u2028"])
def test_a_kid(kid):
    assert Recipient("a", kid, b"w").kid == kid


@pytest.mark.parametrize("kid", ["", "k" * 513, "\0", "a\n", "a\x1f", "\x7f"])
def test_what_is_no_kid(kid):
    with pytest.raises(FormatError, match="kid of a recipient is not 1 to 512"):
        Recipient("a", kid, b"w")


def test_sizes_of_what_is_wrapped():
    for n in (1, MAX_WRAPPED):
        assert len(Recipient("a", "k", bytes(n)).wrapped) == n
    for n in (0, MAX_WRAPPED + 1):
        with pytest.raises(FormatError, match="the wrapped key of recipient 'k' is not 1 to 8,192 bytes"):
            Recipient("a", "k", bytes(n))
    with pytest.raises(FormatError) as caught:
        Recipient("a", "k" * 512, b"")
    assert len(str(caught.value)) < 160


def test_the_order_in_a_file():
    """By alg, then kid, by code point: capitals before small letters, what is beyond U+FFFF last."""
    names = [("a", "b"), ("a", "B"), ("a-b", "a"), ("a", "\U0001f511"), ("a", "\uffee"), ("a.b", "a"), ("0", "z")]
    entries = recipients.listed(Recipient(alg, kid, b"w") for alg, kid in names)
    assert [e.name for e in entries] == [
        ("0", "z"),
        ("a", "B"),
        ("a", "b"),
        ("a", "\uffee"),
        ("a", "\U0001f511"),
        ("a-b", "a"),
        ("a.b", "a"),
    ]
    assert check_recipients(entries) == entries
    assert check_recipients(()) == ()


def test_lists_that_are_none():
    one, two = Recipient("a", "k", b"1"), Recipient("b", "k", b"1")
    for wrong in ((two, one), (one, one), (one, Recipient("a", "k", b"2"))):
        with pytest.raises(FormatError, match="sorted by alg and kid, each of them once"):
            check_recipients(wrong)
    many = tuple(Recipient("a", f"{i:03}", b"w") for i in range(MAX_RECIPIENTS + 1))
    assert len(check_recipients(many[:64])) == 64
    with pytest.raises(FormatError, match="at most 64 recipients, not 65"):
        check_recipients(many)
    with pytest.raises(ConfigError, match="at most 64 recipients, not 65"):
        recipients.listed(many)


# --- who is meant ---------------------------------------------------------------------------------------------------


def test_a_name_and_a_path(secure_loader_home, tmp_path, monkeypatch):
    publish(secure_loader_home / "recipients" / "bob.jwk", BOB)
    path = publish(tmp_path / "carol.json", CAROL)
    one, two = recipients.targets(["bob", str(path)])
    assert (one.name, one.who) == ((ALG, "bob-1"), BOB.public())
    assert (two.name, two.who) == ((ALG, "carol-1"), CAROL.public())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for way in ("carol.json", "./carol.json", "~/carol.json"):
        assert recipients.targets([way])[0].who == CAROL.public()


def test_a_name_before_a_file_of_that_name(secure_loader_home, tmp_path, monkeypatch):
    """Whoever can put files into the working folder does not become bob."""
    monkeypatch.chdir(tmp_path)
    publish(tmp_path / "bob", IMPOSTOR)
    publish(secure_loader_home / "recipients" / "bob.jwk", BOB)
    assert recipients.targets(["bob"])[0].who == BOB.public()


def test_a_set_of_one(tmp_path):
    path = tmp_path / "set.jwks"
    path.write_text(json.dumps({"keys": [BOB.public().document(b64url)]}))
    assert recipients.targets([str(path)])[0].who == BOB.public()


def test_entries_of_all_who_are_named(tmp_path, service):
    who = [str(publish(tmp_path / "bob.jwk", BOB)), "reverse:prod", str(publish(tmp_path / "carol.jwk", CAROL))]
    entries = recipients.wrap_for(recipients.targets(who), KEY, "demo/model")
    assert [e.name for e in entries] == [(ALG, "bob-1"), (ALG, "carol-1"), ("test-reverse", "prod")]
    context = WrapContext(KEY.kid, "aes256gcm", "demo/model")
    for identity, entry in ((BOB, entries[0]), (CAROL, entries[1])):
        with identity.unwrap(entry, context) as secret:
            assert bytes(secret.reveal()) == bytes(KEY.secret.reveal())
    assert entries[2].wrapped[::-1] == bytes(KEY.secret.reveal())
    with pytest.raises(KeyAccessError):
        CAROL.unwrap(entries[0], context)


def test_nobody():
    assert recipients.targets([]) == []
    assert recipients.wrap_for([], KEY, "demo/model") == ()


@pytest.mark.parametrize(
    "name",
    ["nobody", "no/body", "../bob", "~nosuchuser-at-all/bob", "b" * 300, "b" * 300 + "/x", "nul\0", " ", "bob.jwk"],
)
def test_a_name_that_nobody_has(secure_loader_home, name):
    publish(secure_loader_home / "recipients" / "bob.jwk", BOB)
    with pytest.raises(ConfigError, match="there is no recipient"):
        recipients.targets([name])


def test_somebody_twice(secure_loader_home, tmp_path, service):
    publish(secure_loader_home / "recipients" / "bob.jwk", BOB)
    again = str(publish(tmp_path / "b.jwk", IMPOSTOR))
    for who in (["bob", "bob"], ["bob", again], ["reverse:x", "reverse:x"]):
        with pytest.raises(ConfigError, match=r"the recipient '(bob-1|x)' is named twice"):
            recipients.targets(who)


@pytest.mark.parametrize("scheme", ["env:KEY", "passphrase:/k", "age:/k", "fd:3", "vault:https://v/secret/data/x"])
def test_schemes_that_cannot_wrap(scheme):
    with pytest.raises(ConfigError, match=f"^{scheme.partition(':')[0]}: references bring keys, and wrap none"):
        recipients.targets([scheme])


def test_schemes_that_nobody_serves():
    with pytest.raises(ConfigError, match="no key provider serves 'nosuch': references"):
        recipients.targets(["nosuch:x"])


def test_a_service_is_told_the_settings(service):
    settings = LoaderConfig(key_timeout_seconds=3)
    recipients.targets(["reverse:x"], settings)
    assert Reversing.configured == [settings]


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("", "names no key"),
        ("empty", "is not 1 to 8,192"),
        ("long", "is not 1 to 8,192"),
        ("a\x1fb", "kid of a recipient"),
    ],
)
def test_a_service_that_wraps_nonsense(service, reference, message):
    with pytest.raises(KeyAccessError, match=message):
        recipients.wrap_for(recipients.targets([f"reverse:{reference}"]), KEY, "demo/model")


def test_key_material_is_refused_unseen():
    raw = bytes(KEY.secret.reveal())
    for text in (
        b64url(raw),
        f"file:{b64url(raw)}",
        raw.hex(),
        json.dumps(BOB.document(b64url)),
        json.dumps(KEY.document()),
    ):
        with pytest.raises(ConfigError, match="never key material") as caught:
            recipients.targets([text])
        assert_no_trace(str(caught.value), raw, bytes(BOB.secret.reveal()))


def test_a_private_identity_is_refused(tmp_path):
    path = keep(tmp_path / "bob.id.jwk", CAROL)
    with pytest.raises(KeyAccessError, match="holds a private identity") as caught:
        recipients.targets([str(path)])
    assert "recipients export" in caught.value.hint
    assert_no_trace(str(caught.value) + frames(caught.value), bytes(CAROL.secret.reveal()))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        json.dumps({"keys": []}),
        json.dumps(SIGN.verify_key().document()),
        json.dumps({"keys": [BOB.public().document(b64url), CAROL.public().document(b64url)]}),
        json.dumps({"keys": [BOB.public().document(b64url), BOB.public().document(b64url)]}),
    ],
)
def test_what_is_not_one_public_identity(tmp_path, text):
    path = tmp_path / "x.jwk"
    path.write_text(text)
    with pytest.raises(KeyAccessError, match=str(path)):
        recipients.targets([str(path)])


def test_files_that_are_none(tmp_path):
    with pytest.raises(SourceError, match="is not a regular file"):
        recipients.targets([str(tmp_path)])
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(SourceError, match="is not a regular file"):
        recipients.targets([str(tmp_path / "fifo")])
    large = tmp_path / "large.jwk"
    large.write_bytes(b" " * (recipients.MAX_PUBLIC_FILE + 1))
    with pytest.raises(SourceError, match="65,537 bytes long; at most 65,536"):
        recipients.read_public(large)
    with pytest.raises(MissingFileError):
        recipients.read_public(tmp_path / "nowhere")


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666, 0o622])
def test_a_file_that_others_could_have_written(secure_loader_home, mode):
    path = publish(secure_loader_home / "recipients" / "bob.jwk", BOB, mode)
    for use in (lambda: recipients.targets(["bob"]), lambda: list(recipients.identities()), recipients.known):
        with pytest.raises(ConfigError, match="recipient's key could have been written by others") as caught:
            use()
        assert caught.value.hint == f"chmod go-w {path}"


def test_a_folder_in_which_others_could_exchange_files(secure_loader_home):
    folder = publish(secure_loader_home / "recipients" / "bob.jwk", BOB).parent
    folder.chmod(0o775)
    for use in (lambda: recipients.targets(["bob"]), lambda: list(recipients.identities()), recipients.known):
        with pytest.raises(ConfigError, match="folder of recipients could have been written by others"):
            use()


# --- who is known ---------------------------------------------------------------------------------------------------


def test_everybody_who_is_known(secure_loader_home, service, monkeypatch):
    publish(secure_loader_home / "recipients" / "bob.jwk", BOB)
    keep(secure_loader_home / "keys" / "carol.id.jwk", CAROL)
    people = recipients.known(LoaderConfig(keys=("reverse:prod", "env:NOT_SET", "/nowhere.jwk")))
    assert sorted(people) == [(ALG, "bob-1"), (ALG, "carol-1"), ("test-reverse", "prod")]
    assert people[ALG, "carol-1"].who == CAROL.public()
    assert sorted(recipients.known()) == [(ALG, "bob-1"), (ALG, "carol-1")]
    monkeypatch.setenv("SECURE_LOADER_KEYS", "reverse:staging,env:NOT_SET")
    assert ("test-reverse", "staging") in recipients.known()
    assert ("test-reverse", "staging") not in recipients.known(LoaderConfig(keys=()))


def test_nobody_is_known():
    assert recipients.known() == {}
    assert list(recipients.identities()) == []


def test_both_halves_of_one_identity(secure_loader_home):
    publish(secure_loader_home / "recipients" / "bob.jwk", BOB)
    keep(secure_loader_home / "keys" / "bob.id.jwk", BOB)
    assert recipients.known()[ALG, "bob-1"].who == BOB.public()


@pytest.mark.parametrize("own", [True, False])
def test_two_identities_of_one_name(secure_loader_home, own):
    """Files name recipients by kid: another key under bob's would be wrapped for in his place."""
    publish(secure_loader_home / "recipients" / "bob.jwk", BOB)
    if own:
        keep(secure_loader_home / "keys" / "x.id.jwk", IMPOSTOR)
    else:
        publish(secure_loader_home / "recipients" / "x.jwk", IMPOSTOR)
    with pytest.raises(ConfigError, match="two different identities go by the kid 'bob-1'"):
        recipients.known()


# --- the folder -----------------------------------------------------------------------------------------------------


def test_adds_lists_and_removes(secure_loader_home):
    path = recipients.add(BOB.public(), "bob")
    assert path == secure_loader_home / "recipients" / "bob.jwk"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert recipients.parse_public(path.read_bytes(), "test") == BOB.public()
    assert list(recipients.identities()) == [(path, BOB.public())]
    assert recipients.remove("bob") == path
    assert list(recipients.identities()) == []


def test_replaces_only_by_force(secure_loader_home):
    path = recipients.add(BOB.public(), "bob")
    before = path.read_bytes()
    with pytest.raises(WriteError, match="there is a recipient named 'bob'"):
        recipients.add(CAROL.public(), "bob")
    assert path.read_bytes() == before
    recipients.add(CAROL.public(), "bob", force=True)
    assert list(recipients.identities()) == [(path, CAROL.public())]
    recipients.add(Identity("carol-1", Secret(b"\x0e" * 32)).public(), "bob", force=True)


def test_another_key_of_a_known_kid_is_not_added(secure_loader_home):
    path = recipients.add(BOB.public(), "bob")
    with pytest.raises(ConfigError, match="two different identities go by the kid 'bob-1'"):
        recipients.add(IMPOSTOR.public(), "robert")
    assert list(recipients.identities()) == [(path, BOB.public())]
    recipients.add(BOB.public(), "robert")


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a" * 65, "a b", "a\n"])
def test_names_that_are_none(name):
    for use in (lambda: recipients.add(BOB.public(), name), lambda: recipients.remove(name)):
        with pytest.raises(ConfigError, match="a NAME has 1 to 64"):
            use()


def test_forgets_only_who_is_there():
    with pytest.raises(ConfigError, match="there is no recipient 'bob'"):
        recipients.remove("bob")


def test_a_key_of_one_model():
    one, two = recipients.one_time_key(), recipients.one_time_key("aes128gcm")
    assert one.kid != two.kid
    assert one.kid.startswith("model-")
    assert (len(one.secret), len(two.secret)) == (32, 16)


# --- opening --------------------------------------------------------------------------------------------------------


def request(*entries: Recipient) -> KeyRequest:
    return KeyRequest(KEY.kid, KEY.algorithm, "demo/model", recipients=entries)


def wrapped(identity: Identity, key=KEY, model_id="demo/model") -> Recipient:
    return identity.public().wrap(key.secret, WrapContext(key.kid, key.algorithm.name, model_id))


def test_an_identity_stands_for_the_master_key(tmp_path):
    path = keep(tmp_path / "keys" / "bob.id.jwk", BOB)
    other = Recipient("unknown-alg", "bob-1", b"for somebody else")
    for reference in (str(path), str(path.parent), f"file:{path}"):
        unwrapper = KeyRing([reference]).resolve(request(wrapped(BOB), wrapped(CAROL), other))
        assert bytes(unwrapper.secret.reveal()) == bytes(KEY.secret.reveal())


def test_an_entry_is_taken_by_alg_and_kid(tmp_path):
    path = keep(tmp_path / "bob.id.jwk", BOB)
    for entry in (Recipient("unknown-alg", "bob-1", wrapped(BOB).wrapped), wrapped(CAROL)):
        with pytest.raises(KeyAccessError, match=f"no master key with kid 'enc-1', which is wrapped for {entry.kid}"):
            KeyRing([str(path)]).resolve(request(entry))


@pytest.mark.parametrize("odd", ["\x85", "\x9b", "\u2028", "\u2029", "\u202e", "\u200b"])
def test_names_that_would_write_lines_of_their_own_into_logs(odd):
    entry = Recipient("unknown-alg", f"bob{odd}INFO all is well", b"wrapped")
    with pytest.raises(KeyAccessError) as caught:
        KeyRing([]).resolve(request(entry))
    assert str(caught.value).isprintable()
    assert "bob\\" in str(caught.value)


def test_two_private_identities_of_one_kid(tmp_path):
    """Never a choice, whichever of them would open it."""
    for names in (("a", "b"), ("b", "a")):
        folder = tmp_path / "".join(names)
        for name, identity in zip(names, (BOB, IMPOSTOR), strict=True):
            keep(folder / f"{name}.id.jwk", identity)
        with pytest.raises(KeyAccessError, match="two different keys go by the kid 'bob-1'"):
            KeyRing([str(folder)]).resolve(request(wrapped(BOB)))


def test_the_same_identity_twice(tmp_path):
    for name in "ab":
        keep(tmp_path / "keys" / f"{name}.id.jwk", BOB)
    assert KeyRing([str(tmp_path / "keys")]).resolve(request(wrapped(BOB)))


def test_what_is_unwrapped_must_be_a_key_of_the_algorithm(tmp_path):
    path = keep(tmp_path / "bob.id.jwk", BOB)
    context = WrapContext(KEY.kid, "aes256gcm", "demo/model")
    for n in (16, 31, 33, 64):
        short = BOB.public().wrap(Secret(bytes(n)), context)
        with pytest.raises(KeyAccessError, match=f"key 'enc-1' has {n} bytes instead of 32"):
            KeyRing([str(path)]).resolve(request(short))


def test_what_a_service_unwraps_must_be_a_key_of_the_algorithm(service):
    for n in (1, 16, 33):
        with pytest.raises(KeyAccessError, match=f"key 'enc-1' has {n} bytes instead of 32"):
            KeyRing(["reverse:x"]).resolve(request(Recipient("test-reverse", "x", bytes(n))))


def test_a_service_that_is_no_recipient(service):
    entries = (Recipient("test-reverse", "y", b"w"), Recipient("other", "x", b"w"))
    with pytest.raises(KeyAccessError, match=r"which is wrapped for y, x \(searched: reverse:…\)"):
        KeyRing(["reverse:x"]).resolve(request(*entries))


def test_public_identities_are_no_keys(tmp_path):
    """A public half in a key file opens nothing."""
    path = tmp_path / "bob.jwk"
    path.write_text(json.dumps(PublicIdentity("bob-1", BOB.public().public).document(b64url)))
    path.chmod(0o600)
    with pytest.raises(KeyAccessError, match="no master key with kid"):
        KeyRing([str(path)]).resolve(request(wrapped(BOB)))
