"""Policies as attacks: broken and endless ones, a clock turned back, an input made up. 51 to 56 of the list."""

from __future__ import annotations

import datetime as dt
import json
import os
import tempfile
import time
from pathlib import Path

import pytest

from secure_loader.core import policy
from secure_loader.core.envelope import Policy
from secure_loader.core.policy import ALLOW_ALL
from secure_loader.core.policy_input import gpus
from secure_loader.core.seal import Publication
from secure_loader.core.source import FileSource
from secure_loader.errors import PolicyDeniedError
from secure_loader.hf.context import Writer
from tests.attacks.kit import KEY, SIGN, Victim, build_file, build_folder, refused

HEAD = "package model\nimport rego.v1\ndefault allow := false\n"
LICENCE = Path(__file__).parents[2] / "configs" / "policies" / "licence-window.rego"


@pytest.fixture(autouse=True)
def nothing_was_decided():
    policy._allowed.clear()


def made(tmp_path: Path, text: str, **settings) -> Path:
    return build_file(tmp_path / "x.safetensors", policy=Policy(text, ALLOW_ALL), **settings)


def denied(tmp_path: Path, text: str, *words: str) -> None:
    """Loading is refused, in time, with a message that names rule, model and release; no key is asked for."""
    path, victim, start = made(tmp_path, text), Victim(), time.monotonic()
    with refused(PolicyDeniedError, "data.model.allow", "'demo/model', release 1", *words, victim=victim, place=path):
        victim.load(path)
    assert time.monotonic() - start < 10


def allowed(tmp_path: Path, text: str) -> None:
    assert Victim().load(made(tmp_path, text)).keys() == {"big", "clear", "small"}


@pytest.mark.parametrize(
    "text",
    [
        ALLOW_ALL,
        "package model\n\ndefault allow = true\n",
        " package model\n allow := true ",
        "package model\nallow = true # with a comment",
        "package model\nimport rego.v1\nallow := true",
        HEAD + "allow if input.file.release == 1",
    ],
)
def test_a51_policies_that_allow(tmp_path, text):
    allowed(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "expecting `package`"),
        (" ", "expecting `package`"),
        ("allow = true", "expecting `package`"),
        ("package model", "cannot be evaluated"),
        ("package other\nallow = true", "is in package other"),
        ("package model.allow\nx := true", "is in package model.allow"),
        ("package model\nallow = false", "is false"),
        ("package model\nallow = input.x", "is undefined"),
        ("package model\nallow if input.file.release == 2", "is undefined"),
        ("package model\nallow { true }", "line 2: `if` keyword is required"),
        ('package model\nallow = "true"', "is not a boolean"),
        ("package model\nallow = 1", "is not a boolean"),
        ("package model\nallow = [true]", "is not a boolean"),
        ("package model\nallow = {true}", "is not a boolean"),
        ("package model\nallow contains true", "is not a boolean"),
        ('package model\nallow = "<undefined>"', "is undefined"),
        ("package model\nallow(x) := true", "is undefined"),
        ("package model\nallow = null", "is not a boolean"),
        ("package model\nallow = true\nallow = false", "cannot be evaluated: line 3"),
        ("package model\nallow = true { false }", "cannot be evaluated: line 2"),
        ("package model\nallow = true\n}", "cannot be evaluated"),
        ("package model\nallow = = true", "cannot be evaluated: line 2"),
        ("package model\nallow = trues", "cannot be evaluated: line 2"),
        ("packagemodel\nallow = true", "expecting `package`"),
        ("package model\nallow = true;deny", "cannot be evaluated"),
        ("package model\nallow = true\0", "NUL character"),
        (
            HEAD + "allow if { a; b }\na if input.file.release > 1\nb if true\nf(x) := x\nc := 1",
            "is false; not met: a (",
        ),
        (HEAD + "allow if 18446744073709551616 == 18446744073709551617", "numbers of 2^63 and more"),
        (HEAD + "# " + "x" * 65536, "larger than 65536 bytes"),
    ],
)
def test_a51_policies_that_do_not(tmp_path, text, why):
    denied(tmp_path, text, why)


@pytest.mark.parametrize(
    "rules",
    [
        "allow if f(1)\nf(x) := f(x)",
        "allow if f(1)\nf(x) := y if { y := f(x + 1) }",
        "allow if a\na if b\nb if a",
        "allow if count([1 | some i in numbers.range(1, 100000000)]) > 0",
        "r := numbers.range(1, 20000)\nallow if { some a in r; some b in r; a * b == -1 }",
        'allow if count(concat("", [x | some i in numbers.range(1, 3000); x := sprintf("%01000000d", [i])])) == 0',
        'allow if regex.match("^(([a-z])+.)+[A-Z]([a-z])+$", concat("", ["a" | some i in numbers.range(1, 1000)]))',
        "allow := " + "[" * 40,
        "allow := " + "[" * 30000,
        "allow := " + "(" * 30000,
        "allow if " + "not " * 15000 + "true",
        "allow := " + "1 + " * 15000 + "1",
    ],
    ids=lambda rules: rules[:40],
)
def test_a52_policies_that_never_end(tmp_path, rules):
    denied(tmp_path, HEAD + rules)
    allowed(tmp_path, HEAD + "allow if true")


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        ('allow if http.send({"method": "get", "url": "http://127.0.0.1"}).status_code == 200', "http.send"),
        ('allow if not http.send({"method": "get", "url": "http://127.0.0.1"})', "http.send"),
        ('allow if not http["send"]({})', "http.send"),
        ("allow if http . send({})", "invalid whitespace"),
        ('allow if not opa.runtime().env["PATH"]', "opa.runtime"),
        ('allow if rand.intn("x", 2) >= 0', "rand.intn"),
        ('allow if uuid.rfc4122("x") != ""', "uuid.rfc4122"),
        ('allow if not net.lookup_ip_addr("example.com")', "net.lookup_ip_addr"),
        ('allow if net.cidr_contains("10.0.0.0/8", "10.0.0.1")', "net.cidr_contains"),
        ("allow if true\nunused(x) if http.send(x)", "http.send"),
        ("allow if f({}) with f as http.send\nf(x) if x", "http.send"),
        ("allow if not http[input.file.model_id]({})", ""),
    ],
)
def test_a53_policies_that_look_around(tmp_path, rule, name):
    denied(tmp_path, HEAD + rule, name)


@pytest.mark.parametrize("function", ['file.read("/etc/passwd")', 'io.read("/etc/passwd")', 'os.getenv("PATH")'])
def test_a53_functions_that_are_not_there_end_the_evaluation(tmp_path, function):
    denied(tmp_path, HEAD + f"allow if not {function}", "could not find function")


def at(monkeypatch, year: int) -> None:
    """Set the clock, as far as this process sees it."""

    class Clock(dt.datetime):
        @classmethod
        def now(cls, tz=None):
            return dt.datetime(year, 6, 1, tzinfo=tz)

    monkeypatch.setattr(policy.dt, "datetime", Clock)


def test_a54_a_clock_turned_back(tmp_path, monkeypatch, secure_loader_home):
    text = LICENCE.read_text()
    path = made(tmp_path, text, created="2026-02-01T00:00:00Z")
    victim = Victim()
    at(monkeypatch, 2028)
    with refused(PolicyDeniedError, "licence_not_over", victim=victim, place=path):
        victim.load(path)
    at(monkeypatch, 2026)  # within the licence, after the signature, but after 2028 was seen
    with refused(PolicyDeniedError, "2026-06-01 00:00 UTC", "decided here at 2028-06-01", victim=victim, place=path):
        victim.load(path)
    (secure_loader_home / "state" / "clock").unlink()
    assert Victim().load(path)


@pytest.mark.parametrize("when", [10**12, -(10**12)])
def test_a54_a_decision_in_a_year_that_no_calendar_has(monkeypatch, when):
    """33,658 after Christ or 29,719 before: a file system in memory keeps such times, and whoever can write the home sets them."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as home:
        folder = Path(home)
        monkeypatch.setenv("SECURE_LOADER_HOME", home)
        clock = folder / "state" / "clock"
        clock.parent.mkdir(mode=0o700)
        clock.touch(0o600)
        os.utime(clock, (when, when))
        assert clock.stat().st_mtime == when
        path, victim = made(folder, HEAD + "allow if true"), Victim()
        if when < 0:
            assert victim.load(path)
            return
        with refused(PolicyDeniedError, "a policy was decided here at 9999-12-31", victim=victim, place=path):
            victim.load(path)


@pytest.mark.parametrize("year", [1970, 2025])
def test_a54_no_clock_before_the_signature(tmp_path, monkeypatch, year):
    path, victim = made(tmp_path, HEAD + "allow if true", created="2026-02-01T00:00:00Z"), Victim()
    at(monkeypatch, year)
    with refused(PolicyDeniedError, f"{year}-06-01", "signed at 2026-02-01", victim=victim, place=path):
        victim.load(path)


def test_a54_a_clock_far_ahead(tmp_path, monkeypatch):
    path, victim = made(tmp_path, LICENCE.read_text(), created="2026-02-01T00:00:00Z"), Victim()
    at(monkeypatch, 9998)
    with refused(PolicyDeniedError, "licence_not_over", victim=victim, place=path):
        victim.load(path)


def test_a54_a_few_minutes_do_not_matter(tmp_path, monkeypatch):
    at(monkeypatch, 2026)
    assert Victim().load(made(tmp_path, HEAD + "allow if true", created="2026-06-01T00:04:59Z"))


def test_a54_a_signature_at_the_beginning_of_time(tmp_path):
    """No arithmetic with it may fail in a way that nobody expects."""
    assert Victim().load(made(tmp_path, HEAD + "allow if true", created="0001-01-01T00:00:00Z"))


def test_a54_the_log_says_which_clock(tmp_path, caplog):
    caplog.set_level("INFO", "secure_loader")
    allowed(tmp_path, HEAD + "allow if true")
    assert "allows 'demo/model', release 1 at 20" in caplog.text
    assert "by the system clock" in caplog.text


@pytest.mark.parametrize("name", ["GPU_MODEL", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"])
def test_a55_the_environment_makes_no_gpu(tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, "NVIDIA H200")
    rule = 'allow if { some gpu in input.gpus; gpu.model == "NVIDIA H200" }'
    if any(gpu["model"] == "NVIDIA H200" for gpu in gpus() or ()):
        pytest.skip("this machine has one")
    denied(tmp_path, HEAD + rule)


def test_a55_a_policy_is_told_only_what_it_asks_for(tmp_path, monkeypatch):
    monkeypatch.setenv("REGION", "eu")
    monkeypatch.setenv("ANOTHER", "secret")
    allowed(tmp_path, HEAD + 'allow if { input.env.REGION == "eu"; object.keys(input.env) == {"REGION"} }')


@pytest.mark.parametrize(
    "rules",
    [
        "import input.env as e\nallow if not e.BLOCKED",
        "import input as i\nallow if not i.env.BLOCKED",
        'allow if not input["env"].BLOCKED',
        'allow if not input["\\u0065nv"].BLOCKED',
    ],
)
def test_a55_a_name_that_is_not_seen_is_no_reason_to_allow(tmp_path, monkeypatch, rules):
    monkeypatch.setenv("BLOCKED", "yes")
    denied(tmp_path, HEAD + rules, "for names that nobody sees")


@pytest.mark.parametrize("name", ["SECURE_LOADER_KEYS", "TOKEN"])
def test_a55_a_policy_is_told_no_secrets(tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, "0123456789abcdef" * 4)  # looks like a key
    allowed(tmp_path, HEAD + f"allow if input.env.{name} == null")


def test_a55_what_is_self_reported_is_marked(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "policy.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    who = {row[0].removeprefix("| ").strip("`"): row[2].rstrip(" |") for row in rows if len(row) == 3}
    assert {name for name, says in who.items() if says == "the signature"} == {"file"}
    assert {name for name, says in who.items() if "machine" in says} == {"time", "loader", "host", "gpus", "tee", "env"}


def test_a56_a_denial_comes_before_keys_and_plaintext(tmp_path, monkeypatch):
    monkeypatch.setenv("REGION", "eu")
    path = made(tmp_path, HEAD + 'allow if input.env.REGION == "eu"')
    first = Victim()
    assert first.load(path)
    assert len(first.ring.asked) == 1
    monkeypatch.setenv("REGION", "us")
    second = Victim()
    with refused(PolicyDeniedError, "is false", victim=second, place=path):
        second.load(path)


def test_a56_another_policy_is_another_decision(tmp_path):
    allowed(tmp_path, HEAD + "allow if input.file.release == 1")
    denied(tmp_path, HEAD + "allow if input.file.release == 2")
    allowed(tmp_path, HEAD + "allow if input.file.release == 1")


@pytest.mark.parametrize(
    ("rules", "decisions"),
    [
        ("allow if input.file.release == 1", 1),
        ("allow if { input.time.now_ns > 0; input.loader.ranks == 1; input.file.signer.name }", 1),
        ("allow if input.file.shard.number < 9", 3),
        ('allow if input["file"].release == 1', 3),
        ("allow if { walk(input, [path, value]); value == 1 }", 3),
        ("import input.file as f\nallow if f.release == 1", 3),
        ("allow if true  # the input", 3),
    ],
)
def test_a56_one_decision_for_files_that_the_policy_cannot_tell_apart(tmp_path, monkeypatch, rules, decisions):
    text = (
        HEAD + rules
        if not rules.startswith("import")
        else HEAD.replace("default", rules.partition("\n")[0] + "\ndefault") + rules.partition("\n")[2]
    )
    source = tmp_path / "licence.rego"
    source.write_text(text)
    asked = []
    monkeypatch.setattr(
        policy, "decide", lambda text, given, real=policy.decide: asked.append(json.loads(given)) or real(text, given)
    )
    folder = build_folder(tmp_path / "model", shards=3, policy=source)
    victim = Victim()
    assert len(victim.load_folder(folder)) == 6
    assert len(asked) == decisions
    shards = {given["file"]["shard"]["number"] for given in asked}
    assert len(shards) == decisions


def test_a56_a_decision_is_remembered_for_a_minute(tmp_path, monkeypatch):
    path, asked = made(tmp_path, HEAD + "allow if input.file.release == 1"), []
    monkeypatch.setattr(policy, "decide", lambda text, given, real=policy.decide: asked.append(1) or real(text, given))
    now = time.monotonic()
    for later in (0, 59, 61):
        monkeypatch.setattr(policy.time, "monotonic", lambda now=now + later: now)
        Victim().open(path).close()
    assert len(asked) == 2
    assert os.environ.get("REGION") is None


def test_a56_a_writer_asks_the_policies_of_its_own_files(tmp_path):
    """What a session may read without a manifest because it has the keys that it was written with."""
    writer = Writer(Publication(KEY, SIGN, "demo/model"))
    with writer.open(FileSource(made(tmp_path, HEAD + "allow if input.file.release == 1"))).source as source:
        assert source.size
    path = made(tmp_path, HEAD + "allow if false")
    with refused(PolicyDeniedError, "data.model.allow", place=path):
        writer.open(FileSource(path))
