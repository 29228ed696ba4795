"""What a publisher checks before signing, and the policies of configs/policies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from secure_loader.core import policy_input, policy_lint
from secure_loader.core.policy import ALLOW_ALL
from secure_loader.core.policy_engine import examine
from secure_loader.core.policy_lint import cases_beside, lint, publishable, read_cases, read_policy, run_cases
from secure_loader.errors import ConfigError, SourceError
from tests.attacks.kit import Victim, build_source

FOLDER = Path(__file__).parents[3] / "configs" / "policies"
POLICIES = sorted(FOLDER.glob("*.rego"))
HEAD = "package model\nimport rego.v1\ndefault allow := false\n"


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)
def test_the_policies_that_come_along(path):
    text = publishable(path)
    results = run_cases(text, read_cases(cases_beside(path), text))
    assert all(r.passed for r in results)
    assert {r.found for r in results} == {"allow", "deny"}
    # Nothing that the default input says passes by being unknown, but where it is known to be one process.
    bare = run_cases(text, [policy_lint._case({"name": "nothing known", "expect": "deny"}, text)])
    assert bare[0].passed or path.stem in ("ranks", "licence-window")
    # Each denial is because of a rule, not of an error: it has a name.
    assert all(r.why and "not met: " in r.why for r in results if r.found == "deny")
    assert examine(text).rules


def test_there_is_one_for_each_of_the_usual_wishes():
    assert [path.stem for path in POLICIES] == [
        "allowed-gpus",
        "attested-only",
        "container-image",
        "licence-window",
        "ranks",
        "region",
    ]


def test_what_lints():
    lint(ALLOW_ALL)
    lint("package model\ndefault allow = true")
    lint(HEAD + "allow if input.time.now_ns > 0")
    lint("package model\ndefault allow = false\nallow if true")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "expecting `package`"),
        ("package model\nallow { true }", "line 2: `if` keyword"),
        ("package other\ndefault allow := false", "package other; the package must be model"),
        ("package model\nallow if true", "does not deny by default"),
        ("package model\ndefault allow := true\nallow := false if input.x", "does not deny by default"),
        ("package model\ndefault allow := 0", "does not deny by default"),
        (HEAD + "allow if not http.send({})", "uses http.send"),
        (HEAD + "allow if not opa.runtime()", "uses opa.runtime"),
        (HEAD + 'allow if rand.intn("a", 2) == 1', "uses rand.intn"),
        (HEAD + 'allow if net.cidr_contains("a", "b")', "uses net.cidr_contains"),
        (HEAD + "allow if input.x < 9223372036854775808", r"numbers of 2\^63 and more"),
        (HEAD + "allow if time.now_ns() > 0", "test cases cannot set"),
        (HEAD + "#" * 65536, "larger than 65536"),
        (HEAD + "allow := " + "[" * 40, "processor time|crashed"),
        (HEAD + "\0", "NUL"),
    ],
)
def test_what_does_not(text, why):
    with pytest.raises(ConfigError, match=why):
        lint(text)


def write(tmp_path, text, cases=None):
    path = tmp_path / "p.rego"
    path.write_text(text)
    if cases is not None:
        cases_beside(path).write_text(cases if isinstance(cases, str) else json.dumps(cases))
    return path


def test_files_that_are_no_policies(tmp_path):
    (path := tmp_path / "p.rego").write_bytes(b"package model\nallow = true # \xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_policy(path)
    path.write_bytes(b"#" * 65537)
    with pytest.raises(SourceError, match="65,536"):
        read_policy(path)
    with pytest.raises(SourceError):
        read_policy(tmp_path / "missing.rego")
    with pytest.raises(SourceError):
        read_policy(tmp_path)


@pytest.mark.parametrize(
    ("cases", "why"),
    [
        ("", "not valid JSON|JSON"),
        ("{}", "no list"),
        ("[]", "no list"),
        ("[1]", "a case has"),
        ([{"name": "x"}], "a case has"),
        ([{"name": "x", "expect": "allow", "inputs": {}}], "a case has"),
        ([{"name": "x", "expect": True}], "expect is allow or deny"),
        ([{"name": 1, "expect": "deny"}], "name is a text"),
        ([{"name": "x", "expect": "deny", "input": []}], "input takes an object"),
        ([{"name": "x", "expect": "deny", "input": {"time": 1}}], "input.time takes an object"),
        ([{"name": "x", "expect": "deny", "input": {"gpu": []}}], "told input.gpu$"),
        ([{"name": "x", "expect": "deny", "input": {"file": {"modelid": "a"}}}], "told input.file.modelid$"),
        ([{"name": "x", "expect": "deny", "input": {"env": {"UNDECLARED": "a"}}}], "told input.env.UNDECLARED$"),
        ([{"name": "x", "expect": "deny", "input": {"time": {"rfc3339": "noon"}}}], "'noon' is not a date"),
        ('[{"name": "x", "expect": "deny", "expect": "allow"}]', "twice|duplicate"),
    ],
)
def test_cases_that_are_none(tmp_path, cases, why):
    path = write(tmp_path, HEAD + "allow if input.env.REGION", cases)
    with pytest.raises(ConfigError, match=why):
        publishable(path)


def test_cases_change_the_sample_and_nothing_else(tmp_path):
    text = HEAD + 'allow if { input.env.REGION; input.env["ZONE"] }'
    given = {
        "time": {"rfc3339": "2026-03-01T12:00:00Z"},
        "file": {"shard": {"of": 3}},
        "env": {"REGION": "eu"},
        "gpus": [{"model": "a"}],
        "claims": {"anything": 1},
        "tee": {"claims": {"anything": 2}},
    }
    path = write(tmp_path, text, [{"name": "x", "expect": "deny", "input": given}])
    (case,) = read_cases(cases_beside(path), text)
    sample = policy_lint.sample_input(text)
    assert case.given["time"] == {"rfc3339": "2026-03-01T12:00:00Z", "now_ns": 1772366400 * 10**9, "source": "system"}
    assert case.given["file"] == sample["file"] | {"shard": {"number": 1, "of": 3}}
    assert case.given["env"] == {"REGION": "eu", "ZONE": None}
    assert case.given["gpus"] == [{"model": "a"}]
    assert (case.given["claims"], case.given["tee"]["claims"]) == ({"anything": 1}, {"anything": 2})
    assert case.given["host"] == sample["host"]


def test_the_sample_has_the_shape_of_the_real_input(tmp_path, monkeypatch):
    text, seen = HEAD + "allow if input.env.REGION == null", []
    monkeypatch.setattr("secure_loader.core.policy.decide", lambda text, given: seen.append(json.loads(given)))
    from secure_loader.core.envelope import Policy
    from tests.attacks.kit import build_file

    Victim().open(build_file(tmp_path / "x", policy=Policy(text, ""))).close()

    def shape(value):
        return {k: shape(v) for k, v in value.items()} if isinstance(value, dict) else None

    assert shape(seen[0]) == shape(policy_lint.sample_input(text))


def test_a_failing_case_is_not_published(tmp_path):
    cases = [{"name": "fine", "expect": "deny"}, {"name": "wrong", "expect": "allow"}]
    path = write(tmp_path, HEAD + "allow if false", cases)
    with pytest.raises(ConfigError, match="fails 1 of its cases: 'wrong'"):
        publishable(path)
    assert [(r.name, r.found, r.passed) for r in run_cases(ALLOW_ALL, read_cases(cases_beside(path), ALLOW_ALL))] == [
        ("fine", "allow", False),
        ("wrong", "allow", True),
    ]


def test_cases_prove_nothing_without_an_engine(tmp_path, monkeypatch):
    monkeypatch.setattr("secure_loader.core.policy_engine.find_spec", lambda name: None)
    path = write(tmp_path, HEAD + "allow if false", [{"name": "x", "expect": "deny"}])
    with pytest.raises(ConfigError, match="no engine") as caught:
        run_cases(path.read_text(), read_cases(cases_beside(path), path.read_text()))
    assert "secure-loader[policy]" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="no engine"):
        publishable(path)
    cases_beside(path).unlink()
    assert publishable(write(tmp_path, ALLOW_ALL)) == ALLOW_ALL


KILLED = """
import os
from pathlib import Path
from secure_loader.core import writer
from tests.attacks.kit import CHUNK, KEY, SIGN
writer._write_others = lambda *a: os._exit(9)
writer.encrypt_model("source", "sealed", key=KEY, signing_key=SIGN, model_id="m", chunk_size=CHUNK, policy="p.rego")
"""


def test_a_publisher_whose_own_machine_is_denied_completes_a_killed_run(tmp_path, monkeypatch):
    from secure_loader.core.writer import encrypt_model
    from tests.attacks.kit import CHUNK, KEY, SIGN

    build_source(tmp_path / "source")
    policy = write(tmp_path, HEAD + "allow if input.env.NOWHERE")
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}"}
    done = subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 9
    monkeypatch.chdir(tmp_path)
    settings = {"key": KEY, "signing_key": SIGN, "model_id": "m", "chunk_size": CHUNK}
    report = encrypt_model("source", "sealed", policy=policy, **settings)
    assert report.reused_shards == 2
    # Another policy is another publication.
    assert encrypt_model("source", "other", **settings).reused_shards == 0


def test_gpus_as_the_driver_tells(tmp_path):
    assert policy_input.gpus(tmp_path) is None
    folder = tmp_path / "proc/driver/nvidia"
    (folder / "gpus").mkdir(parents=True)
    (folder / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version: 12\n"
    )
    policy_input.gpus.cache_clear()
    assert policy_input.gpus(tmp_path) == []
    (folder / "gpus/0000:03:00.0").mkdir()
    (folder / "gpus/0000:03:00.0/information").write_text(
        "Model: \t\t NVIDIA H200\nIRQ:   \t\t 123\nGPU UUID: \t GPU-6a1f\nVideo BIOS: \t 96.00\nBus Location: \t 0000:03:00.0\n"
    )
    policy_input.gpus.cache_clear()
    assert policy_input.gpus(tmp_path) == [
        {"model": "NVIDIA H200", "uuid": "GPU-6a1f", "driver": "570.86.15", "cc_mode": None}
    ]


def test_containers_and_tees(tmp_path):
    assert policy_input.tee(tmp_path) == {"kind": None, "verified": False, "claims": None}
    assert policy_input.host(tmp_path)["container_image"] is None
    (tmp_path / "run").mkdir()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/tdx_guest").touch()
    (tmp_path / "run/.containerenv").write_text(
        'engine="podman-5.0"\nimage="docker.io/library/debian:12"\nimageid="3f1d"\n'
    )
    policy_input.tee.cache_clear()
    policy_input.host.cache_clear()
    assert policy_input.tee(tmp_path) == {"kind": "tdx", "verified": False, "claims": None}
    host = policy_input.host(tmp_path)
    assert (host["container_image"], host["container_image_id"]) == ("docker.io/library/debian:12", "3f1d")
    assert host["os"] == "Linux"


def test_ranks(monkeypatch):
    assert policy_input._ranks() == 1
    for said, ranks in (("8", 8), ("", 1), ("many", 1), ("-1", 1), ("9" * 30, 1)):
        monkeypatch.setenv("WORLD_SIZE", said)
        assert policy_input._ranks() == ranks


def test_ranks_of_a_process_group(monkeypatch, tmp_path):
    import torch.distributed as dist

    monkeypatch.setenv("WORLD_SIZE", "8")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        assert policy_input._ranks() == 1
    finally:
        dist.destroy_process_group()


def test_what_a_policy_declares():
    assert policy_input.declared('input.env.A == input.env["B_1"]; input . env . C; xinput.env.D; input.env[e]') == [
        "A",
        "B_1",
        "C",
    ]


@pytest.mark.parametrize(
    ("imports", "rule"),
    [
        ("import input.env as e", "allow if not e.BLOCKED"),
        ("import input.env", "allow if not env.BLOCKED"),
        ("import input as i", "allow if not i.env.BLOCKED"),
        ("import input", "allow if not input.env.BLOCKED"),
        ("", 'allow if not input["env"].BLOCKED'),
        ("", "allow if not input[ `env` ].BLOCKED"),
    ],
)
def test_the_environment_goes_by_no_other_name(imports, rule):
    """What is not asked for by name is undefined, and would allow here."""
    with pytest.raises(ConfigError, match=r"reaches input\.env by another name"):
        lint(f"package model\nimport rego.v1\n{imports}\ndefault allow := false\n{rule}")
    lint("package model\nimport rego.v1\nimport input.file as f\ndefault allow := false\nallow if f.release == 1")
