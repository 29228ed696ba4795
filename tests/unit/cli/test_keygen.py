"""Keys are made private, complete, and never at the expense of others."""

from __future__ import annotations

import base64
import concurrent.futures
import fcntl
import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from secure_loader.core import atomic
from secure_loader.core.aead import ALGORITHMS
from secure_loader.core.keys import generate
from secure_loader.core.keys.jwk import MasterKey, SigningKey
from secure_loader.core.keys.local import read_keys
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
def test_all_files_or_none(cli, home, monkeypatch, failing, force):
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
    cli("keygen", "alice", *(["--force"] if force else []), code=7)
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
