"""What a publisher checks before a policy is signed: its form, and what it says in cases of the publisher's own.

Cases are a JSON list beside the policy: ``licence.rego`` has ``licence.cases.json``. Each is an object with ``name``,
``expect`` (``allow`` or ``deny``) and, optionally, ``input``: what differs from the plain input of :func:`sample_input`.
"""

from __future__ import annotations

import copy
import datetime as dt
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import ConfigError, FormatError, PolicyDeniedError
from . import strict_json
from .envelope import Policy
from .policy import default_policy, is_trivial
from .policy_engine import MAX_POLICY, RULE, decide, examine
from .policy_input import declared, hides_environment, time_of
from .source import read_small_file
from .trust_toml import parse_time

MAX_CASES = 1 << 20


@dataclass(frozen=True, slots=True)
class PolicyCase:
    """One case that a publisher thought of.

    Attributes:
        name: What it is about.
        given: The whole input.
        allow: What the policy is expected to say.
    """

    name: str
    given: Mapping[str, Any]
    allow: bool


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What a policy said in a case.

    Attributes:
        name: The case.
        expect: ``allow`` or ``deny``.
        found: ``allow`` or ``deny``.
        why: Why it was denied, or None.
    """

    name: str
    expect: str
    found: str
    why: str | None

    @property
    def passed(self) -> bool:
        """Whether it said what was expected."""
        return self.expect == self.found


def read_policy(path: str | os.PathLike[str]) -> str:
    """The text of a policy file.

    Raises:
        ConfigError: Not UTF-8.
        SourceError: Not readable, or larger than 64 KiB.
    """
    try:
        return read_small_file(os.fspath(path), MAX_POLICY).decode()
    except UnicodeDecodeError:
        raise ConfigError("the policy is not UTF-8", path=path) from None


def lint(text: str) -> None:
    """Check a policy's form: it parses, denies by default, and uses nothing that a local policy may not.

    Raises:
        ConfigError: It does not, or there is no engine to tell.
    """
    if is_trivial(text):
        return
    facts = examine(text)
    if facts.package != "model":
        raise ConfigError(f"the policy is in package {facts.package}; the package must be model")
    if facts.forbidden:
        raise ConfigError(f"the policy uses {', '.join(facts.forbidden)}, which no local policy may")
    if facts.default is not False:
        raise ConfigError(
            "the policy does not deny by default", hint="write: default allow := false, and then allow if { … }"
        )
    if hides_environment(text):
        raise ConfigError("the policy reaches input.env by another name", hint="write input.env.NAME, each time")
    if facts.clock:
        raise ConfigError(
            "the policy uses time.now_ns, which test cases cannot set", hint="use input.time.now_ns, which has a floor"
        )


def cases_beside(path: str | os.PathLike[str]) -> Path:
    """Where the cases of a policy file are: ``licence.cases.json`` for ``licence.rego``."""
    return Path(path).with_suffix(".cases.json")


def read_cases(path: str | os.PathLike[str], text: str) -> list[PolicyCase]:
    """The cases for a policy.

    Args:
        path: The file of the cases.
        text: The policy, which says what environment variables there are.

    Raises:
        ConfigError: Malformed, or a field that no policy is told.
        SourceError: Not readable.
    """
    try:
        doc = strict_json.loads(read_small_file(os.fspath(path), MAX_CASES), what="file of cases", scan=True)
    except FormatError as e:
        raise ConfigError(f"the cases: {e.message}", path=path) from None
    if not isinstance(doc, list) or not doc:
        raise ConfigError("the cases are no list of objects", path=path)
    try:
        return [_case(item, text) for item in doc]
    except ConfigError as e:
        raise ConfigError(e.message, hint=e.hint, path=path) from None


def run_cases(text: str, cases: Sequence[PolicyCase]) -> list[CaseResult]:
    """What a policy says in each case.

    Raises:
        ConfigError: It cannot be parsed, or there is no engine: a denial would prove nothing.
    """
    if not is_trivial(text):
        examine(text)
    return [_run(text, case) for case in cases]


def publishable(path: str | os.PathLike[str]) -> str:
    """The text of a policy file that is fit to be signed: :func:`lint` passes, and so do the cases beside it, if any.

    Raises:
        ConfigError: It is not.
        SourceError: Not readable.
    """
    text = read_policy(path)
    try:
        lint(text)
    except ConfigError as e:
        raise ConfigError(e.message, hint=e.hint, path=path) from None
    beside = cases_beside(path)
    if beside.exists():
        failed = [r for r in run_cases(text, read_cases(beside, text)) if not r.passed]
        if failed:
            names = ", ".join(repr(r.name) for r in failed[:5])
            raise ConfigError(
                f"the policy fails {len(failed)} of its cases: {names}",
                path=path,
                hint=f"see: secure-loader policy test {os.fspath(path)}",
            )
    return text


def carried(path: str | os.PathLike[str]) -> str:
    """The text of a policy file that is fit to be carried for a key broker, who evaluates it: it parses, and denies by default.

    Its package is ``policy``, as Trustee has it, or ``model``. What it may use, and what it is told, is the broker's business.

    Raises:
        ConfigError: It is not.
        SourceError: Not readable.
    """
    text = read_policy(path)
    if is_trivial(text):
        return text
    try:
        facts = examine(text)
        if facts.package not in ("policy", "model"):
            raise ConfigError(f"the policy is in package {facts.package}; brokers take policy")
        if facts.default is not False:
            raise ConfigError("the policy does not deny by default", hint="write: default allow := false")
    except ConfigError as e:
        raise ConfigError(e.message, hint=e.hint, path=path) from None
    return text


def chosen(
    local: str | os.PathLike[str] | None, remote: str | os.PathLike[str] | None, otherwise: Policy | None = None
) -> Policy:
    """The policies to embed.

    Args:
        local: A file for :func:`publishable`, or None.
        remote: A file for :func:`carried`, or None.
        otherwise: What to take for None; None allows.

    Raises:
        ConfigError: One is not fit.
        SourceError: Not readable.
    """
    otherwise = otherwise or default_policy()
    return Policy(
        otherwise.local if local is None else publishable(local),
        otherwise.remote if remote is None else carried(remote),
    )


def sample_input(text: str) -> dict[str, Any]:
    """The input of a case that says nothing else: a plain machine of which nothing is known, on 1 January 2026."""
    return {
        "time": time_of(dt.datetime(2026, 1, 1, tzinfo=dt.UTC)),
        "file": {
            "file_id": "00" * 16,
            "model_id": "example/model",
            "release": 1,
            "shard": {"number": 1, "of": 1},
            "header_sha256": "00" * 32,
            "signer": {"name": "example", "key_id": "example-sign-00000000", "thumbprint": "example"},
        },
        "loader": {"name": "secure_loader", "version": __version__, "framework": None, "purpose": None, "ranks": 1},
        "host": {"os": "Linux", "kernel": "6.1.0", "container_image": None, "container_image_id": None},
        "gpus": None,
        "tee": {"kind": None, "verified": False, "claims": None},
        "env": dict.fromkeys(declared(text)),
        "claims": None,
    }


def _case(item: object, text: str) -> PolicyCase:
    if not isinstance(item, dict) or not {"name", "expect"} <= item.keys() <= {"name", "expect", "input"}:
        raise ConfigError("a case has name, expect and, optionally, input, and nothing else")
    name, expect = item["name"], item["expect"]
    if not isinstance(name, str) or expect not in ("allow", "deny"):
        raise ConfigError(f"case {name!r}: name is a text, expect is allow or deny")
    given, changes = sample_input(text), item.get("input", {})
    _change(given, changes, (), name)
    said = changes.get("time", {})
    if "rfc3339" in said and "now_ns" not in said:
        try:
            when = parse_time(said["rfc3339"])
        except FormatError as e:
            raise ConfigError(f"case {name!r}: {e.message}") from None
        if when is not None:
            given["time"]["now_ns"] = time_of(when)["now_ns"]
    return PolicyCase(name, given, expect == "allow")


def _change(target: dict[str, Any], changes: object, where: tuple[str, ...], case: str) -> None:
    if not isinstance(changes, dict):
        raise ConfigError(f"case {case!r}: {'.'.join(('input', *where))} takes an object")
    for key, value in changes.items():
        if key not in target:
            # A field that is misspelt here would be a rule that is not tested.
            raise ConfigError(f"case {case!r}: no policy that asks like this is told input.{'.'.join((*where, key))}")
        if isinstance(target[key], dict):
            _change(target[key], value, (*where, key), case)
        else:
            target[key] = copy.deepcopy(value)


def _run(text: str, case: PolicyCase) -> CaseResult:
    expect = "allow" if case.allow else "deny"
    if is_trivial(text):
        return CaseResult(case.name, expect, "allow", None)
    try:
        decide(text, json.dumps(case.given))
    except PolicyDeniedError as e:
        return CaseResult(case.name, expect, "deny", e.message.rpartition(f"{RULE} ")[2])
    return CaseResult(case.name, expect, "allow", None)
