"""policy lint, policy test, and encrypt --policy."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from secure_loader.core.policy import ALLOW_ALL

FOLDER = Path(__file__).parents[3] / "configs" / "policies"
HEAD = "package model\nimport rego.v1\ndefault allow := false\n"


@pytest.fixture
def region(tmp_path):
    """A policy with cases, one of which fails."""
    path = tmp_path / "region.rego"
    path.write_text(HEAD + 'allow if here\nhere if input.env.REGION == "eu"')
    cases = [
        {"name": "here", "input": {"env": {"REGION": "eu"}}, "expect": "allow"},
        {"name": "there", "input": {"env": {"REGION": "us"}}, "expect": "allow"},
    ]
    (tmp_path / "region.cases.json").write_text(json.dumps(cases))
    return path


def test_lint(cli, tmp_path):
    assert cli("policy", "lint", FOLDER / "region.rego").out == f"Fine {FOLDER / 'region.rego'}\n"
    assert cli("policy", "lint", FOLDER / "region.rego", "-q").out == ""
    assert cli("policy", "lint", FOLDER / "region.rego", "--json").json == {
        "file": str(FOLDER / "region.rego"),
        "ok": True,
    }
    bad = tmp_path / "bad.rego"
    bad.write_text("package model\nallow if true")
    error = cli("policy", "lint", bad, "--json", code=2).error
    assert error["type"] == "ConfigError"
    assert error["path"] == str(bad)
    assert "default allow := false" in error["hint"]
    assert cli("policy", "lint", tmp_path / "missing", code=7).err


def test_cases(cli):
    out = cli("policy", "test", FOLDER / "region.rego").out
    assert "  ok  Frankfurt    allow     allow\n" in out
    assert "  ok  elsewhere    deny      deny   is false; not met: region_is_allowed\n" in out
    found = cli("policy", "test", FOLDER / "ranks.rego", FOLDER / "ranks.cases.json", "--json").json
    assert found["ok"]
    assert found["cases"][2] == {
        "name": "five ranks",
        "expect": "deny",
        "found": "deny",
        "why": "is false; not met: few_enough_ranks",
    }


def test_failing_cases(cli, region):
    ran = cli("policy", "test", region, code=2)
    assert "  FAILED  there  allow     deny   is false; not met: here\n" in ran.out
    assert "1 case of 2 failed" in ran.err
    assert "FAILED" in cli("policy", "test", region, "-q", code=2).out
    ran = cli("policy", "test", region, "--json", code=2)
    assert not ran.json["ok"]
    assert ran.error["exit_code"] == 2
    assert cli("policy", "test", FOLDER / "region.rego", region, code=2).err  # no cases


@pytest.fixture
def model(cli, tmp_path):
    import numpy as np
    from safetensors.numpy import save_file

    cli("keygen", "alice")
    (tmp_path / "model").mkdir()
    save_file({"a": np.arange(100000, dtype=np.float32)}, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def test_encrypting_with_a_policy(cli, model, region, monkeypatch):
    assert "fails 1 of its cases: 'there'" in cli("encrypt", model, "sealed", "--policy", region, code=2).err
    assert not (model.parent / "sealed").exists()
    (model.parent / "region.cases.json").unlink()
    cli("encrypt", model, "sealed", "--policy", region)
    assert "characters of Rego, evaluated when the model is loaded" in cli("inspect", "sealed").out
    error = cli("decrypt", "sealed", "plain", "--json", code=4).error
    assert error["type"] == "PolicyDeniedError"
    for word in ("data.model.allow is false", "not met: here", "'model', release 1"):
        assert word in error["message"]
    monkeypatch.setenv("REGION", "eu")
    cli("decrypt", "sealed", "plain")
    plain = (model.parent / "plain" / "model.safetensors").read_bytes()
    assert plain[-400000:] == (model / "model.safetensors").read_bytes()[-400000:]
    cli("keygen", "bob")
    cli("rewrap", "sealed", "-k", "bob")
    monkeypatch.delenv("REGION")
    assert "not met: here" in cli("verify", "sealed", code=4).err  # the policy has stayed


def test_a_licence_is_extended_by_its_publisher_alone(cli, model, region, tmp_path, monkeypatch):
    (model.parent / "region.cases.json").unlink()
    cli("encrypt", model, "sealed", "--policy", region)
    cli("keygen", "bob")
    assert "not met: here" in cli("rewrap", "sealed", "-k", "bob", code=4).err, "bob has the key, and did not sign"
    other = tmp_path / "other.rego"
    other.write_text(region.read_text().replace('"eu"', '"us"'))
    monkeypatch.setenv("REGION", "us")
    assert "not met: here" in cli("verify", "sealed", code=4).err
    cli("rewrap", "sealed", "-k", "alice", "--policy", other, "--release", "2")
    cli("verify", "sealed")
    cli("decrypt", "sealed", "plain")
    cli("rewrap", "sealed", "-k", "alice", "--policy", "missing.rego", code=7)
    (broken := tmp_path / "broken.rego").write_text("package model\nallow if {")
    cli("rewrap", "sealed", "-k", "alice", "--policy", broken, code=2)
    cli("verify", "sealed")


def test_a_policy_for_the_broker_is_carried_and_not_evaluated(cli, model, tmp_path):
    policy = FOLDER.parent / "trustee.rego"
    cli("encrypt", model, "sealed", "--remote-policy", policy)
    shown = cli("inspect", "sealed")
    assert "characters of Rego, which a key broker enforces" in shown.out
    (file,) = cli("inspect", "sealed", "--json").json["files"]
    assert file["remote_policy"] == policy.read_text()
    cli("decrypt", "sealed", "plain")
    for text, words in (
        ("package policy\nallow = 1 2", "the policy "),
        ("package other\ndefault allow := false", "brokers take policy"),
        ("package policy\ndefault allow := true", "does not deny by default"),
        ("package policy\nallow if input.x", "does not deny by default"),
    ):
        (path := tmp_path / "remote.rego").write_text(text)
        refused = cli("encrypt", model, "again", "--remote-policy", path, code=2).err
        assert words in refused
        assert not (tmp_path / "again").exists()


ATTESTED = {"submods": {"cpu0": {"ear.status": "affirming"}, "gpu0": {"ear.status": "affirming"}}}


@pytest.mark.parametrize(
    ("claims", "plugin", "path", "allowed"),
    [
        (ATTESTED, "resource", "/models/keys/demo", True),
        (ATTESTED, "resource", "models/keys/demo", True),
        (ATTESTED, "resource", ["models", "keys", "demo"], True),
        (ATTESTED, "resource", "others/keys/demo", False),
        (ATTESTED, "resource", ["others", "models", "demo"], False),
        (ATTESTED, "resource", [], False),
        (ATTESTED, "pkcs11", "models/keys/demo", False),
        ({"submods": {"cpu0": {"ear.status": "affirming"}, "gpu0": {"ear.status": "warning"}}}, "resource", "", False),
        ({"submods": {"cpu0": {"ear.status": "warning"}}}, "resource", "models/keys/demo", False),
        ({"submods": {"cpu0": {}}}, "resource", "models/keys/demo", False),
        ({"submods": {"gpu0": {"ear.status": "affirming"}}}, "resource", "models/keys/demo", False),
        ({"submods": {}}, "resource", "models/keys/demo", False),
        ({}, "resource", "models/keys/demo", False),
    ],
)
def test_what_the_brokers_example_allows(claims, plugin, path, allowed):
    """Asked as Trustee asks it: with the same engine, claims as input, the resource as data."""
    regorus = pytest.importorskip("regorus")
    engine = regorus.Engine()
    engine.add_policy("trustee.rego", (FOLDER.parent / "trustee.rego").read_text())
    engine.add_data_json(json.dumps({"plugin": plugin, "resource-path": path}))
    engine.set_input_json(json.dumps(claims))
    assert engine.eval_rule("data.policy.allow") is allowed


def test_the_trivial_policy(cli, model, tmp_path):
    (path := tmp_path / "all.rego").write_text(ALLOW_ALL)
    cli("policy", "lint", path)
    cli("encrypt", model, "sealed", "--policy", path)
    assert "Rego" not in cli("inspect", "sealed").out
    cli("verify", "sealed")


def test_without_an_engine(cli, monkeypatch):
    monkeypatch.setattr("secure_loader.core.policy_engine.find_spec", lambda name: None)
    for command in ("lint", "test"):
        err = cli("policy", command, FOLDER / "region.rego", code=2).err
        assert "hint: pip install 'secure-loader[policy]'" in err


GUIDE = (FOLDER.parents[1] / "docs" / "policy.md").read_text()


def test_the_guide(cli, model, tmp_path):
    """Its policy and cases go together, its table of files is the folder's, and its commands run."""
    (rego,) = re.findall(r"```rego\n(.*?)```", GUIDE, re.DOTALL)
    (cases,) = re.findall(r"```json\n(.*?)```", GUIDE, re.DOTALL)
    (tmp_path / "licence.rego").write_text(rego)
    for name in ("licence.cases.json", "other.json"):
        (tmp_path / name).write_text(cases)
    (tmp_path / "configs").symlink_to(FOLDER.parent)
    commands = re.findall(r"^    secure-loader (.*)$", GUIDE, re.MULTILINE)
    assert len(commands) == 6
    for command in commands:
        cli(*shlex.split(command, comments=True))
    assert (tmp_path / "model-encrypted").is_dir()
    assert sorted(re.findall(r"^\| `([a-z-]+\.rego)` \|", GUIDE, re.MULTILINE)) == sorted(
        p.name for p in FOLDER.glob("*.rego")
    )


def test_the_guide_says_how_many_cases_the_engine_has_to_get_right():
    from secure_loader.core.policy_corpus import CORPUS

    assert f"asks it {len(CORPUS)} questions" in GUIDE
    assert f"a corpus of {len(CORPUS)} cases" in (FOLDER.parents[1] / "docs" / "adr" / "0013-policy.md").read_text()
