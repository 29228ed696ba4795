"""Key files under a passphrase: the age format, with bounds, and where the passphrase comes from."""

from __future__ import annotations

import base64
import json
import os
import re
import time

import pyrage
import pytest

from secure_loader.core.aead import ALGORITHMS
from secure_loader.core.keys import asking, passphrase, scrypt_file
from secure_loader.core.keys.held import forget_keys, held
from secure_loader.core.keys.local import keys_at
from secure_loader.core.keys.passphrase import PassphraseProvider, read_passphrase
from secure_loader.core.keys.provider import KeyRequest, KeyRing
from secure_loader.core.keys.scrypt_file import MAX_WORK, MIN_WORK, WRONG, seal, unseal
from secure_loader.core.secrets import Secret
from secure_loader.errors import ConfigError, KeyAccessError
from tests.attacks.kit import KEY, assert_no_secret

PHRASE = "correct horse battery staple"
TEXT = json.dumps(KEY.document()).encode()
REQUEST = KeyRequest(KEY.kid, ALGORITHMS["aes256gcm"])
# Made by pyrage 1.4.0 (the Rust implementation of age).
OF_RAGE = b"""-----BEGIN AGE ENCRYPTED FILE-----
YWdlLWVuY3J5cHRpb24ub3JnL3YxCi0+IHNjcnlwdCBSSXo1bGEreC9LNGV1NzFT
cmhPVmV3IDE4Cm4xSmw0Q0F1ZmJCMHBUcjIrc1pybjkzMXdNd3puUkFFRUo1U1Bq
Vno0MDgKLS0tIEFsVmtpZVcvZjUzMVRwRzRWNHd3OWhHempnaFQ0emhYNWZwVTB1
OURLMEEKRiD4P7V0qqooez1TQTMt/6uqa2H+iTBKau4Naa9z514/EclouAnKgXiM
FrjJph0iQwJ4ighWdJY72Hpf7WR7ffhYY830O2iXBEZMz03zyE8oqDCqB6ny5yR3
/ab9KRJ2EAYot8Mm+hq5saC2Gspi+7MhRX33FFtSiFJeYQtZJw5FPWRzOM0owCcM
+NJ3YcdlWj0=
-----END AGE ENCRYPTED FILE-----
"""


def bare(text: bytes) -> bytes:
    return base64.b64decode(b"".join(text.split(b"\n")[1:-2]))


def phrase(text: str = PHRASE) -> Secret:
    return Secret(text.encode())


@pytest.fixture(scope="module")
def sealed() -> bytes:
    """As cheap as it may be."""
    return seal(bytearray(TEXT), phrase(), work=MIN_WORK)


@pytest.fixture(autouse=True)
def nothing_is_remembered():
    yield
    with held() as table:
        table.clear()


@pytest.fixture
def key_file(tmp_path, sealed):
    path = tmp_path / "alice.enc.jwk.age"
    path.write_bytes(sealed)
    path.chmod(0o600)
    return path


@pytest.fixture
def phrase_file(tmp_path, monkeypatch):
    path = tmp_path / "passphrase"
    path.write_text(PHRASE + "\n")
    path.chmod(0o600)
    monkeypatch.setenv("SECURE_LOADER_PASSPHRASE_FILE", str(path))
    return path


@pytest.fixture
def work(monkeypatch):
    """How often scrypt was run."""
    runs = []
    real = scrypt_file._stretch
    monkeypatch.setattr(scrypt_file, "_stretch", lambda *a: runs.append(a[2]) or real(*a))
    return runs


def test_what_other_programs_write():
    assert unseal(OF_RAGE, phrase()) == TEXT
    assert unseal(bare(OF_RAGE), phrase()) == TEXT, "without armour"
    assert unseal(OF_RAGE.replace(b"\n", b"\r\n"), phrase()) == TEXT


def test_other_programs_read_what_we_write(sealed):
    assert pyrage.passphrase.decrypt(sealed, PHRASE) == TEXT
    assert all(len(line) <= 64 for line in sealed.split(b"\n"))
    with pytest.raises(pyrage.DecryptError):
        pyrage.passphrase.decrypt(sealed, PHRASE + "r")


def test_every_file_is_another(sealed):
    other = seal(bytearray(TEXT), phrase(), work=MIN_WORK)
    assert bare(other)[:60] != bare(sealed)[:60]
    assert unseal(other, phrase()) == TEXT


def test_the_default_is_that_of_age():
    assert b" 18\n" in bare(seal(bytearray(b"x"), phrase()))


@pytest.mark.parametrize("wrong", ["", "x", PHRASE[:-1], PHRASE + "\n", PHRASE.upper()])
def test_a_wrong_passphrase(sealed, wrong):
    with pytest.raises(KeyAccessError) as caught:
        unseal(sealed, phrase(wrong))
    assert (caught.value.message, caught.value.hint) == (WRONG, None)


def places(sealed: bytes) -> list[tuple[int, bytes]]:
    """One byte of each part: salt, wrapped key, MAC, nonce, ciphertext, tag."""
    data = bare(sealed)
    found = re.match(rb"[^\n]+\n-> scrypt (\S+) \d+\n(\S+)\n--- (\S+)\n", data)
    starts = [found.start(1) + 3, found.start(2) + 3, found.start(3) + 3]
    changed = [(i, b"A" if data[i : i + 1] != b"A" else b"B") for i in starts]
    return changed + [(i, bytes([data[i] ^ 1])) for i in (found.end(), found.end() + 16, len(data) - 1)]


@pytest.mark.parametrize("part", range(6))
def test_a_changed_file_says_no_more_than_a_wrong_passphrase(sealed, part):
    at, byte = places(sealed)[part]
    data = bytearray(bare(sealed))
    data[at : at + 1] = byte
    with pytest.raises(KeyAccessError) as caught:
        unseal(data, phrase())
    assert (caught.value.message, caught.value.hint) == (WRONG, None)


@pytest.mark.parametrize("cut", [1, 16, 40])
def test_a_file_that_is_cut_or_longer(sealed, cut):
    for data in (bare(sealed)[:-cut], bare(sealed) + bytes(cut), bare(sealed)[: -len(TEXT) - cut]):
        with pytest.raises(KeyAccessError, match=rf"{WRONG}|is not encrypted under a passphrase"):
            unseal(data, phrase())


@pytest.mark.parametrize("factor", [1, 10, MIN_WORK - 1, MAX_WORK + 1, 30, 63, 99])
def test_work_factors_out_of_bounds_cost_nothing(sealed, work, factor):
    data = bare(sealed).replace(b" %d\n" % MIN_WORK, b" %d\n" % factor, 1)
    start = time.process_time()
    with pytest.raises(KeyAccessError, match=rf"work factor of 2\^{factor}; from 2\^17 to 2\^20 are accepted"):
        unseal(data, phrase())
    assert work == []
    assert time.process_time() - start < 0.2
    with pytest.raises(ValueError, match="out of bounds"):
        seal(bytearray(TEXT), phrase(), work=factor)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b" 17\n", b" 017\n"),
        (b" 17\n", b" -17\n"),
        (b" 17\n", b" 0\n"),
        (b" 17\n", b" 170\n"),
        (b" 17\n", b" 17 \n"),
        (b" 17\n", b"\n"),
        (b"org/v1", b"org/v2"),
        (b"-> scrypt", b"-> scrypt x\n\n-> scrypt"),
        (b"-> scrypt", b"-> X25519 x\n\n-> scrypt"),
        (b"\n--- ", b"\n-> scrypt x\n\n--- "),
        (b"\n--- ", b"\n---  "),
        (b"\n", b"\r\n"),
    ],
)
def test_what_is_not_such_a_file(sealed, work, old, new):
    with pytest.raises(KeyAccessError, match=r"is not (an age file|encrypted under a passphrase)"):
        unseal(bare(sealed).replace(old, new, 1), phrase())
    assert work == []


def test_what_is_no_age_file_at_all(work):
    for data in (
        b"",
        b"x",
        TEXT,
        b"-----BEGIN AGE ENCRYPTED FILE-----\n",
        OF_RAGE[:-20],
        OF_RAGE.replace(b"YWdl", b"YW*l"),
    ):
        with pytest.raises(KeyAccessError):
            unseal(data, phrase())
    identity = pyrage.x25519.Identity.generate()
    with pytest.raises(KeyAccessError, match="not encrypted under a passphrase") as caught:
        unseal(pyrage.encrypt(TEXT, [identity.to_public()]), phrase())
    assert "take age: instead" in caught.value.hint
    assert work == []


def test_base64_with_spare_bits(sealed, work):
    """Two spellings of one salt would be two files of one content."""
    data = bare(sealed)
    end = data.index(b" 17\n")
    digits = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    other = digits[digits.index(data[end - 1 : end]) + 1 :][:1]
    with pytest.raises(KeyAccessError, match=WRONG):
        unseal(data[: end - 1] + other + data[end:], phrase())
    assert work == []


def test_too_little_memory(sealed, monkeypatch):
    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(scrypt_file, "_stretch", fail)
    with pytest.raises(KeyAccessError, match="needs 128 MiB of memory"):
        unseal(sealed, phrase())


@pytest.mark.parametrize("size", [0, scrypt_file.MAX_SECRET + 1])
def test_what_cannot_be_sealed(size):
    with pytest.raises(ValueError, match="nothing to seal"):
        seal(bytearray(size), phrase())


def test_opened_once_for_a_load(key_file, phrase_file, work):
    ring = KeyRing([f"passphrase:{key_file}"])
    for _ in range(3):
        assert bytes(ring.resolve(REQUEST).secret.reveal()) == bytes(KEY.secret.reveal())
    assert len(work) == 1
    assert [k.kid for k in keys_at(f"passphrase:{key_file}")] == [KEY.kid]


def test_a_file_that_was_replaced_is_opened_anew(key_file, phrase_file, work):
    provider = PassphraseProvider()
    assert provider.keys(str(key_file))[0].kid == KEY.kid
    key_file.write_bytes(seal(bytearray(TEXT.replace(b"enc-1", b"enc-2")), phrase(), work=MIN_WORK))
    assert provider.keys(str(key_file))[0].kid == "enc-2"


def test_a_passphrase_in_a_variable_is_taken_out_of_it(key_file, monkeypatch):
    monkeypatch.setenv("SECURE_LOADER_PASSPHRASE", PHRASE)
    for _ in range(2):
        assert PassphraseProvider().keys(str(key_file))
        assert "SECURE_LOADER_PASSPHRASE" not in os.environ
    forget_keys()
    with pytest.raises(KeyAccessError, match="nobody to ask") as caught:
        PassphraseProvider().keys(str(key_file))
    assert "SECURE_LOADER_PASSPHRASE_FILE" in caught.value.hint


def test_the_file_wins_over_the_variable(key_file, phrase_file, monkeypatch):
    monkeypatch.setenv("SECURE_LOADER_PASSPHRASE", "something else")
    assert PassphraseProvider().keys(str(key_file))


def test_a_passphrase_in_a_descriptor_serves_every_load(tmp_path, key_file, sealed, monkeypatch, work):
    """The descriptor can be read only once; what it said is remembered, and forgotten, as other such sources are."""
    ends = os.pipe()
    os.set_inheritable(ends[0], True)
    os.write(ends[1], PHRASE.encode() + b"\n")
    os.close(ends[1])
    monkeypatch.setenv("SECURE_LOADER_PASSPHRASE_FILE", f"fd:{ends[0]}")
    other = tmp_path / "other.jwk.age"
    other.touch(0o600)
    other.write_bytes(sealed)
    for path in (key_file, other, key_file):
        assert KeyRing([f"passphrase:{path}"]).resolve(REQUEST) is not None
    forget_keys()
    with pytest.raises(KeyAccessError, match=r"passphrase in fd:\d+ was read before, and forgotten"):
        KeyRing([f"passphrase:{key_file}"]).resolve(REQUEST)


def test_careless_files(key_file, phrase_file):
    phrase_file.chmod(0o644)
    with pytest.raises(KeyAccessError, match="passphrase file can be read by others"):
        PassphraseProvider().keys(str(key_file))
    phrase_file.chmod(0o600)
    key_file.chmod(0o640)
    with pytest.raises(KeyAccessError, match="key file can be read by others"):
        PassphraseProvider().keys(str(key_file))


@pytest.mark.parametrize("text", ["", "\n", "\r\n", "x" * 1025])
def test_what_is_no_passphrase(phrase_file, text):
    phrase_file.write_text(text, newline="")
    with pytest.raises(KeyAccessError, match="empty, or longer"):
        read_passphrase(str(phrase_file))


@pytest.mark.parametrize(
    ("text", "read"), [("a b\n", b"a b"), ("a\r\n", b"a"), ("a\n\n", b"a\n"), (" a ", b" a "), ("é", b"\xc3\xa9")]
)
def test_one_line_end_does_not_count(phrase_file, text, read):
    phrase_file.write_text(text, newline="")
    assert bytes(read_passphrase(str(phrase_file)).reveal()) == read


def test_nobody_is_asked_outside_a_command(key_file, monkeypatch):
    """A server must not wait for a person."""
    monkeypatch.setattr(asking, "ask", lambda prompt: pytest.fail("asked"))
    with pytest.raises(KeyAccessError, match="nobody to ask"):
        PassphraseProvider().keys(str(key_file))


def test_a_command_asks_where_a_terminal_is(key_file, monkeypatch):
    asked = []
    monkeypatch.setattr(passphrase, "ask", lambda prompt: asked.append(prompt) or bytearray(PHRASE.encode()))
    monkeypatch.setattr(passphrase, "can_ask", lambda: True)
    assert PassphraseProvider().keys(str(key_file))
    assert asked == [f"Passphrase of {key_file}: "]


def test_a_new_passphrase_is_typed_twice(monkeypatch):
    typed = iter(["one two three four", "one two three for", "short", "short", PHRASE, PHRASE])
    monkeypatch.setattr(passphrase, "ask", lambda prompt: bytearray(next(typed).encode()))
    monkeypatch.setattr(passphrase, "can_ask", lambda: True)
    with pytest.raises(ConfigError, match="two different passphrases"):
        passphrase.ask_for_new()
    with pytest.raises(ConfigError, match="at least 12"):
        passphrase.ask_for_new()
    assert bytes(passphrase.ask_for_new().reveal()) == PHRASE.encode()


def test_nothing_secret_in_errors(key_file, phrase_file):
    import traceback

    phrase_file.write_text("a wrong passphrase")
    with pytest.raises(KeyAccessError) as caught:
        KeyRing([f"passphrase:{key_file}"]).resolve(REQUEST)
    shown = "".join(traceback.TracebackException.from_exception(caught.value, capture_locals=True).format())
    assert "a wrong passphrase" not in shown
    assert_no_secret(shown)
    assert caught.value.path == str(key_file)
