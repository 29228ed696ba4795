"""Keys are made private, complete, and never at the expense of others."""

from __future__ import annotations

import base64
import concurrent.futures
import fcntl
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from secure_loader.core import atomic
from secure_loader.core.aead import ALGORITHMS
from secure_loader.core.keys import generate, scrypt_file
from secure_loader.core.keys.jwk import MasterKey, SigningKey
from secure_loader.core.keys.local import read_keys
from secure_loader.core.secrets import Secret
from secure_loader.core.trust import read_trust_file
from secure_loader.errors import WriteError


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def snapshot(home: Path) -> dict[str, bytes]:
    return {str(p.relative_to(home)): p.read_bytes() for p in home.rglob("*") if p.is_file()}


def test_makes_a_pair_and_trusts_it(cli, home):
    made = cli("keygen", "alice", "--json").json
    [master] = read_keys(home / "keys" / "alice.enc.jwk")
    [signing] = read_keys(home / "keys" / "alice.sign.jwk")
    trusted = read_trust_file(home / "trust" / "alice.json")
    assert isinstance(master, MasterKey)
    assert isinstance(signing, SigningKey)
    assert (master.kid, signing.kid) == (made["key_id"], made["signing_key_id"])
    assert master.kid != signing.kid
    assert master.algorithm.name == "aes256gcm"
    assert trusted.key == signing.verify_key()
    assert (trusted.name, trusted.models, trusted.not_after) == ("alice", ("*",), None)
    assert made["thumbprint"] == trusted.key.thumbprint()


def test_files_are_private_whatever_the_umask(cli, home):
    old = os.umask(0)
    try:
        cli("keygen", "alice")
    finally:
        os.umask(old)
    assert mode(home) == mode(home / "keys") == mode(home / "trust") == 0o700
    assert mode(home / "keys" / "alice.enc.jwk") == mode(home / "keys" / "alice.sign.jwk") == 0o600
    assert mode(home / "trust" / "alice.json") == 0o644
    assert {p.name for p in (home / "keys").iterdir()} == {"alice.enc.jwk", "alice.sign.jwk"}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithms(cli, home, algorithm):
    cli("keygen", "alice", "--algorithm", algorithm)
    [key] = read_keys(home / "keys" / "alice.enc.jwk")
    assert key.algorithm.name == algorithm
    assert len(key.secret) == ALGORITHMS[algorithm].key_bytes


def test_jwk_members_are_those_of_the_rfcs(cli, home):
    cli("keygen", "alice")
    enc = json.loads((home / "keys" / "alice.enc.jwk").read_text())
    sign = json.loads((home / "keys" / "alice.sign.jwk").read_text())
    public = json.loads((home / "trust" / "alice.json").read_text())["key"]
    assert {k: v for k, v in enc.items() if k not in ("k", "kid")} == {"kty": "oct", "alg": "A256GCM", "use": "enc"}
    assert {k: sign[k] for k in ("kty", "crv", "alg", "use")} == {
        "kty": "OKP",
        "crv": "Ed25519",
        "alg": "EdDSA",
        "use": "sig",
    }
    assert public == {k: v for k, v in sign.items() if k != "d"}


def test_keys_differ_every_time(cli, home):
    cli("keygen", "alice")
    first = snapshot(home)
    cli("keygen", "alice", "--force")
    second = snapshot(home)
    for name in first:
        assert first[name] != second[name]


def test_limits_local_trust_to_patterns(cli, home):
    cli("keygen", "alice", "--model", "alice/*", "--model", "team/tiny")
    assert read_trust_file(home / "trust" / "alice.json").models == ("alice/*", "team/tiny")


def test_tells_what_to_hand_to_whom_and_no_key(cli, home):
    out = cli("keygen", "alice").out
    for told in (
        "alice-enc-",
        "alice-sign-",
        "trust/alice.json",
        "keys/alice.enc.jwk",
        "keys/alice.sign.jwk",
        "nobody",
    ):
        assert told in out
    assert json.loads((home / "keys" / "alice.enc.jwk").read_text())["k"] not in out
    assert cli("keygen", "bob", "-q").out == ""


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "-x", ".x", "a b", "a\n", "é", "a" * 65, "a\x00b", "a*"]
)
def test_refuses_names_that_are_no_file_names(cli, home, name):
    assert "NAME" in cli("keygen", "--", name, code=2).err
    assert not home.exists()


def test_refuses_empty_patterns(cli, home):
    assert "pattern" in cli("keygen", "alice", "--model", "", code=2).err
    assert not home.exists()


@pytest.mark.parametrize("there", ["keys/alice.enc.jwk", "keys/alice.sign.jwk", "trust/alice.json"])
def test_never_overwrites(cli, home, there):
    cli("keygen", "alice")
    for path in list(home.rglob("alice*")):
        if path != home / there:
            path.unlink()
    before = snapshot(home)
    result = cli("keygen", "alice", code=7)
    assert "already" in result.err
    assert "--force" in result.err
    assert snapshot(home) == before


def test_force_keeps_the_old_keys_and_says_what_that_means(cli, home):
    old = cli("keygen", "alice", "--json").json
    before = snapshot(home)
    result = cli("keygen", "alice", "--force")
    assert "warning: replaced" in result.err
    assert "no longer load" in result.err
    assert "no longer trusted" in result.err
    after = snapshot(home)
    assert set(before.values()) <= set(after.values())
    new = [key.kid for key in read_keys(home / "keys")]
    assert old["key_id"] not in new
    assert len(new) == 2
    aside = [p for p in (home / "keys").iterdir() if ".replaced-by-" in p.name]
    assert len(aside) == 2
    assert all(mode(p) == 0o600 for p in aside)


def test_models_of_replaced_keys_load_again_when_they_are_put_back(cli, encrypted, home, tmp_path):
    cli("keygen", "alice", "--force")
    cli("verify", encrypted, code=3)
    for path in [p for p in home.rglob("*.replaced-by-*") if ".sign." not in p.name]:
        kind = ".enc.jwk" if ".enc." in path.name else ".json"
        path.rename(path.with_name("alice-old" + kind))
    cli("decrypt", encrypted, tmp_path / "plain")


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("sealed", [False, True])
def test_all_files_or_none(cli, home, monkeypatch, phrase_file, quick, failing, force, sealed):
    if force:
        cli("keygen", "alice")
    before = snapshot(home)
    calls = []

    def write_bytes(path, data, **options):
        calls.append(path)
        if len(calls) == failing + 1:
            raise WriteError("cannot be written: No space left on device", path=path)
        atomic.write_bytes(path, data, **options)

    monkeypatch.setattr(generate, "write_bytes", write_bytes)
    more = [*(["--force"] if force else []), *(["--passphrase-file", phrase_file] if sealed else [])]
    cli("keygen", "alice", *more, code=7)
    assert snapshot(home) == before


def test_refuses_a_keys_folder_that_others_can_enter(cli, home):
    (home / "keys").mkdir(parents=True, mode=0o755)
    (home / "keys").chmod(0o755)
    result = cli("keygen", "alice", code=5)
    assert f"chmod 700 {home}/keys" in result.err
    assert snapshot(home) == {}


def test_reports_a_home_that_cannot_be_made(cli, home):
    home.write_text("a file")
    assert cli("keygen", "alice", code=7).err.startswith("secure-loader: error: ")


def test_one_of_many_at_once_wins(command, home):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: command("keygen", "alice", "--json", code=None), range(4)))
    assert sorted(r.code for r in results) == [0, 7, 7, 7]
    assert [r.json["key_id"] for r in results if r.code == 0] == [read_keys(home / "keys" / "alice.enc.jwk")[0].kid]
    assert len(read_keys(home / "keys")) == 2


def test_a_process_that_was_forked_meanwhile_does_not_keep_the_lock(home):
    """A copy of the descriptor holds the same lock: closing ours alone would leave it to the child."""
    with generate._locked_folder():
        [fd] = [int(p.name) for p in Path("/proc/self/fd").iterdir() if os.path.realpath(p) == str(home / "keys")]
        child = subprocess.Popen(["sleep", "60"], pass_fds=[fd])
    other = os.open(home / "keys", os.O_RDONLY)
    try:
        assert child.poll() is None
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(other)
        child.kill()
        child.wait()


def test_an_interrupted_write_leaves_no_key_behind(cli, home, monkeypatch):
    def interrupted(fd, data, offset):
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic, "pwrite_all", interrupted)
    assert cli("keygen", "alice", code=130).err == "secure-loader: interrupted\n"
    assert snapshot(home) == {}


def test_key_bytes_are_as_random_as_the_system(cli, home, monkeypatch):
    monkeypatch.setattr(generate.os, "urandom", lambda n: b"\x07" * n)
    cli("keygen", "alice")
    k = json.loads((home / "keys" / "alice.enc.jwk").read_text())["k"]
    assert base64.urlsafe_b64decode(k + "=") == b"\x07" * 32


PHRASE = "correct horse battery staple"


@pytest.fixture
def phrase_file(tmp_path):
    path = tmp_path / "phrase"
    path.write_text(PHRASE + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def quick(monkeypatch):
    """As little work as is allowed."""
    monkeypatch.setattr(
        generate, "seal", lambda text, phrase: scrypt_file.seal(text, phrase, work=scrypt_file.MIN_WORK)
    )


def test_a_master_key_under_a_passphrase(cli, home, model, phrase_file, quick, monkeypatch):
    result = cli("keygen", "alice", "--passphrase-file", phrase_file)
    sealed = home / "keys" / "alice.enc.jwk.age"
    assert f"SECURE_LOADER_KEYS=passphrase:{sealed}" in result.out
    assert {p.name for p in (home / "keys").iterdir()} == {"alice.enc.jwk.age", "alice.sign.jwk"}
    assert mode(sealed) == 0o600
    assert sealed.read_text().startswith("-----BEGIN AGE ENCRYPTED FILE-----\n")
    refused = cli("encrypt", model, "enc", "-k", "alice", code=5)
    assert f"name it as passphrase:{sealed}" in refused.err
    assert "nobody to ask" in cli("encrypt", model, "enc", "-k", f"passphrase:{sealed}", code=5).err
    monkeypatch.setenv("SECURE_LOADER_PASSPHRASE_FILE", str(phrase_file))
    cli("encrypt", model, "enc", "-k", f"passphrase:{sealed}", "--signing-key", "alice")
    assert "no master key with kid" in cli("decrypt", "enc", "plain", code=5).err
    cli("decrypt", "enc", "plain", "--keys", f"passphrase:{sealed}")
    phrase_file.write_text("another passphrase")
    assert (
        "the passphrase is wrong, or the file was altered"
        in cli("decrypt", "enc", "again", "--keys", f"passphrase:{sealed}", code=5).err
    )


def test_a_passphrase_from_a_descriptor(command, home):
    done = command("keygen", "alice", "--passphrase-file", "fd:0", stdin=PHRASE.encode())
    assert PHRASE not in done.out + done.err
    assert (home / "keys" / "alice.enc.jwk.age").exists()


@pytest.mark.parametrize("first", [True, False])
def test_one_name_is_one_key_however_it_is_kept(cli, home, phrase_file, quick, first):
    sealed = ["--passphrase-file", phrase_file]
    cli("keygen", "alice", *(sealed if first else []))
    before = snapshot(home)
    cli("keygen", "alice", *([] if first else sealed), code=7)
    assert snapshot(home) == before
    assert "replaced" in cli("keygen", "alice", *([] if first else sealed), "--force").err
    names = {p.name for p in (home / "keys").iterdir() if "replaced" not in p.name}
    assert names == {"alice.enc.jwk" if first else "alice.enc.jwk.age", "alice.sign.jwk"}
    assert set(before.values()) <= set(snapshot(home).values())


@pytest.mark.parametrize(("text", "code"), [("short", 2), ("", 5)])
def test_refuses_a_passphrase_that_is_none(cli, home, phrase_file, text, code):
    phrase_file.write_text(text)
    cli("keygen", "alice", "--passphrase-file", phrase_file, code=code)
    phrase_file.chmod(0o644)
    assert "passphrase file can be read by others" in cli("keygen", "a", "--passphrase-file", phrase_file, code=5).err
    assert not home.exists()


def test_there_has_to_be_somebody_to_ask(home, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "secure_loader", "keygen", "alice", "--passphrase"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        start_new_session=True,
        check=False,
    )
    assert done.returncode == 2
    assert b"there is no terminal" in done.stderr


ON_A_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "secure_loader", *sys.argv[1:]])
"""


def on_a_terminal(words, answers):
    """Run a command on a terminal of its own; each answer is typed when it is asked for. Returns code and output."""
    ours, theirs = os.openpty()
    child = subprocess.Popen([sys.executable, "-c", ON_A_TERMINAL, *words], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = b""
    answers = list(answers)
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # nobody has the other end any more
            break
        said += piece
        if answers and said.count(b": ") > said.count(b"\n") and said.rstrip().endswith(answers[0][0]):
            os.write(ours, answers.pop(0)[1] + b"\n")
    os.close(ours)
    return child.wait(timeout=60), said


def test_a_passphrase_typed_on_a_terminal(home, tmp_path):
    typed = [(b"New passphrase:", PHRASE.encode()), (b"Once more:", PHRASE.encode())]
    code, said = on_a_terminal(["keygen", "alice", "--passphrase"], typed)
    assert code == 0, said
    assert PHRASE.encode() not in said
    data = (home / "keys" / "alice.enc.jwk.age").read_bytes()
    assert b'"kty": "oct"' in scrypt_file.unseal(data, Secret(PHRASE.encode()))
