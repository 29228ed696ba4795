"""What the operator and the policy engine write: policies, the engine's answers, key files, settings, trust."""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from cryptography import x509

from secure_loader import config
from secure_loader.core import policy, policy_engine, policy_input
from secure_loader.core.keys import scrypt_file
from secure_loader.core.secrets import Secret
from secure_loader.core.trust_chain import Chain
from secure_loader.core.trust_rules import Subject, parse_rules
from secure_loader.errors import (
    ConfigError,
    FormatError,
    KeyAccessError,
    PolicyDeniedError,
    SecureLoaderError,
    UntrustedSignerError,
)
from tests.attacks.kit import SIGN
from tests.certificates import root
from tests.fuzz.claims import SEPARATOR, check, check_no_secret

ROOT = Path(__file__).parents[2]
SECRET = "Vm0wd2QyUXlVWGxWV0d4V1YwZDRWMVl3WkRSV01WbDN"  # 32 bytes in base64, as keys are
TEXT, PHRASE = b'{"kty": "oct"}', Secret(b"correct horse battery staple")
_ALLOWS = {f"packagemodel{default}allow{sign}true" for default in ("", "default") for sign in ("=", ":=")}
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def one_policy(data: bytes) -> None:
    """The input is the text of a policy: what it is told of the environment, and whether it allows by its spelling."""
    try:
        text = data.decode()
        policy_engine.check_text(text)
    except (UnicodeDecodeError, PolicyDeniedError):
        return
    check(not policy.is_trivial(text) or "".join(text.split()) in _ALLOWS, "a policy with rules counts as trivial")
    policy_input.hides_environment(text)
    names = policy_input.declared(text)
    secrets_of = dict.fromkeys([n for n in names if not n.startswith("SECURE_LOADER_")][:4], SECRET)
    with mock.patch.dict(os.environ, secrets_of | {"SECURE_LOADER_KEYS": "/keys"}, clear=True):
        told = policy_input._environment(text)
    check(list(told) == names, "other variables than those that are asked for")
    check(all(_NAME.fullmatch(n) and n in text for n in names), "a name that is not in the policy")
    check(not any(told.values()), "a policy is told a secret, or a setting")


def one_answer(data: bytes) -> None:
    """The input is what the child process says: nothing but ``true`` allows, whatever the engine was made to do."""
    text = data.decode("utf-8", "replace")
    with mock.patch.object(policy_engine, "_ask", return_value=text):
        try:
            policy_engine.decide("", "{}")
            check(text == "true", "something else than true allows")
        except PolicyDeniedError as e:
            check(text != "true", "true does not allow")
            check(e.message.isprintable() and len(e.message) < 1000, "a message that a terminal may obey")
        try:
            facts = policy_engine.examine("")
        except ConfigError as e:
            check(e.message.isprintable() and len(e.message) < 1000, "a message that a terminal may obey")
            return
    check(isinstance(facts.package, str) and type(facts.clock) is bool, "facts of other types")
    check(all(isinstance(n, str) for n in facts.rules + facts.forbidden), "facts of other types")


def _quickly(passphrase: Secret, salt: bytes, work: int) -> Secret:
    return Secret(hashlib.sha256(passphrase.reveal().tobytes() + salt + bytes([work])).digest())


def one_age(data: bytes) -> None:
    """The input is a key file under a passphrase. What opens says what was sealed."""
    with mock.patch.object(scrypt_file, "_stretch", _quickly):
        try:
            plain = scrypt_file.unseal(data, PHRASE)
        except KeyAccessError as e:
            check(len(e.message) < 300, "a message that repeats the file")
            return
    check(bytes(plain) == TEXT, "an altered file opens")


_FOLDER = tempfile.TemporaryDirectory(prefix="secure-loader-fuzz-", dir="/dev/shm")


def one_config(data: bytes) -> None:
    """The input is a ``config.toml``. Nothing that loosens is set unless it says so."""
    path = Path(_FOLDER.name) / f"{os.getpid()}.toml"
    path.write_bytes(data)
    path.chmod(0o600)
    with mock.patch.dict(os.environ, {config.CONFIG_VARIABLE: str(path)}, clear=True):
        try:
            found = config.load()
        except ConfigError as e:
            check_no_secret(data, str(e))
            return
    for name in [f.name for f in dataclasses.fields(found) if f.name.startswith("insecure_")]:
        check(not getattr(found, name) or name.encode() in data, f"{name} out of nowhere")
    check(found == found.replace({}), "settings change when they are read again")


def one_rules(data: bytes) -> None:
    """The input is a ``trust.toml``, or a revocation list. What is refused by it is refused with a reason."""
    try:
        rules = parse_rules(data, "/etc/trust.toml")
    except (FormatError, ConfigError):
        return
    check(parse_rules(data, "/etc/trust.toml") == rules, "rules change when they are read again")
    for rule in rules.rules:
        check(str(rule) and rule.document(), "a rule that cannot be shown")
    for entry in rules.revoked:
        check(entry.document(), "a revocation that cannot be shown")
    subject = Subject(
        "acme/chat", 3, "00" * 16, 1, "2026-01-01T00:00:00Z", lambda: "ab" * 32, lambda: 1, lambda: "cd" * 32
    )
    refused = None
    try:
        rules.check(["acme"], ["t" * 43], subject)
    except SecureLoaderError as e:
        refused = e
    check(refused is not None or not (rules.only_listed and not rules.rules), "an unlisted model passes")
    try:
        (rules + rules).check(["acme"], ["t" * 43], subject)
        check(refused is None, "what is refused once passes when it is said twice")
    except SecureLoaderError as e:
        check(type(e) is type(refused), "what passes once is refused when it is said twice")


AUTHORITY = root()
LEAF = AUTHORITY.issue(SIGN)


def one_chain(data: bytes) -> None:
    """The input is certificates in DER, between separators. Nobody but the authority makes one that holds."""
    try:
        chain = Chain.parse(data.split(SEPARATOR * 4))
        chain.verify([AUTHORITY.certificate], dt.datetime.now(dt.UTC))
    except UntrustedSignerError as e:
        check(len(e.message) < 400, "a message that repeats a certificate")
        return
    check(chain.public == SIGN.verify_key().public, "a certificate of nobody's holds")


TARGETS: dict[str, Callable[[bytes], None]] = {
    "fuzz_policy": one_policy,
    "fuzz_answer": one_answer,
    "fuzz_age": one_age,
    "fuzz_config": one_config,
    "fuzz_rules": one_rules,
    "fuzz_chain": one_chain,
}


def seeds() -> dict[str, list[bytes]]:
    """Where fuzzing starts."""
    with mock.patch.object(scrypt_file, "_stretch", _quickly):
        armoured = [scrypt_file.seal(bytearray(TEXT), PHRASE, work=w) for w in (17, 18, 20)]
    bare = [scrypt_file._bare(a) for a in armoured]
    facts = {"package": "model", "default": False, "rules": ["ok"], "forbidden": [], "clock": False}
    policies = [p.read_bytes() for p in sorted((ROOT / "configs" / "policies").glob("*.rego"))]
    settings = (ROOT / "configs" / "config.toml").read_bytes()
    uncommented = re.sub(rb"^# (\w+ = )", rb"\1", settings, flags=re.MULTILINE)
    rules = (ROOT / "configs" / "trust.toml").read_bytes()
    leaf, middle = _der(LEAF), AUTHORITY.below()
    return {
        "fuzz_policy": [
            *policies,
            policy.ALLOW_ALL.encode(),
            b'package model\nallow if input.env.REGION == "eu"',
            b'package model\nallow if input["env"]["REGION"]',
        ],
        "fuzz_answer": [
            b"true",
            b"false",
            b"",
            b"true\n",
            b"took more than 2 seconds",
            json.dumps(facts).encode(),
            json.dumps(facts | {"default": "other", "clock": True}).encode(),
        ],
        "fuzz_age": armoured + bare,
        "fuzz_config": [
            settings,
            uncommented,
            *(b"[loader]\n" + line for line in uncommented.splitlines() if re.match(rb"\w+ = ", line)),
        ],
        "fuzz_rules": [
            rules,
            re.sub(rb"^# ?", b"", rules, flags=re.MULTILINE),
            b"only_listed = true\n",
            b'[[model]]\npattern = "acme/*"\nsigners = ["acme"]\nmin_release = 3\nnot_after = 2099-01-01\nencrypted = true\n',
            b'[[revoked]]\nsigner = "' + b"t" * 43 + b'"\nsince = 2026-01-01\nreason = "lost"\n',
            b'[[revoked]]\nmodel = "acme/chat"\nrelease = 3\nsince = 2026-01-01T00:00:00Z\nreason = "bad"\n',
            b'[[authority]]\nname = "acme"\nroots = ["a.pem"]\nmodels = ["acme/*"]\nsan = ["uri:https://acme.org/*"]\n',
        ],
        "fuzz_chain": [
            leaf,
            leaf[:-1],
            _der(AUTHORITY.certificate),
            _der(middle.issue(SIGN)) + SEPARATOR * 4 + _der(middle.certificate),
            _der(root("other").issue(SIGN)),
            leaf + SEPARATOR * 4 + leaf,
        ],
    }


def _der(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.DER)
