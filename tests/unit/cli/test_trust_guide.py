"""The commands of docs/trust.md run, one after the other, and the files that it shows are read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from secure_loader.core.trust_rules import parse_rules, read_rules

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "trust.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_the_commands_run(cli, home, model, tmp_path):
    cli("keygen", "acme-2026", "--model", "acme/*")
    (model / "model.safetensors.index.json").unlink()
    (model / "model-00002-of-00002.safetensors").unlink()
    (model / "model-00001-of-00002.safetensors").rename(model / "model.safetensors")
    cli("encrypt", model, tmp_path / "model-enc", "--model-id", "acme/tiny")
    script = "\n".join(blocks("sh")).replace("secure-loader ", f"{sys.executable} -m secure_loader ")
    assert script.count("trust revoke") == 5
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        ["bash", "-eu", "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    refused = cli("verify", "model-enc", code=3).err
    assert "the signer 'acme-2027'" in refused
    assert "laptop stolen" in refused
    assert len(read_rules(home / "trust" / "revoked.toml").revoked) == 5


def test_an_authority_of_openssl(cli, home, model, tmp_path):
    cli("keygen", "acme")
    request = cli("trust", "request", "acme", "--subject", "CN=Release Signing,O=Acme GmbH").out
    (tmp_path / "acme.csr").write_text(request)
    (script,) = blocks("sh-authority")
    subprocess.run(["bash", "-eu", "-c", script], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    cli("encrypt", model, tmp_path / "model-enc", "--model-id", "acme/tiny", "--certificate", tmp_path / "chain.pem")
    (home / "trust" / "roots").mkdir()
    (home / "trust" / "roots" / "acme.pem").write_bytes((tmp_path / "root.pem").read_bytes())
    (home / "trust.toml").write_text(blocks("toml")[1])
    cli("trust", "remove", "acme")
    cli("verify", tmp_path / "model-enc")
    seen = cli("inspect", tmp_path / "model-enc").out
    assert "CN=Release Signing,O=Acme GmbH, email:models@release.acme.example; until " in seen


def test_the_files_are_read():
    rules, authorities, revoked = blocks("toml")
    assert [a.name for a in parse_rules(authorities.encode(), "guide").authorities] == ["acme"]
    assert parse_rules(rules.encode(), "guide").only_listed
    assert [type(r.min_release) for r in parse_rules(rules.encode(), "guide").rules] == [int, int]
    assert len(parse_rules(revoked.encode(), "guide").revoked) == 4


def test_the_example_file_says_each_thing(tmp_path):
    copy = tmp_path / "trust.toml"
    copy.write_bytes((ROOT / "configs" / "trust.toml").read_bytes())
    copy.chmod(0o644)
    found = read_rules(copy)
    assert found.only_listed
    assert {key for rule in found.rules for key in rule.document()} == {
        "pattern",
        "signers",
        "min_release",
        "profile",
        "encrypted",
        "policies",
        "not_after",
        "post_quantum",
    }
    assert [a.name for a in found.authorities] == ["example-org-ca"]
    assert len(found.revoked) == 1
