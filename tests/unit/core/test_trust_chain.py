"""Authorities in trust.toml, and the certificates that a publisher puts into what it signs."""

from __future__ import annotations

import datetime as dt
import random
from pathlib import Path

import pytest
from cryptography import x509

from secure_loader import TrustStore
from secure_loader.core.trust_chain import Chain, certified
from secure_loader.core.trust_rules import parse_rules, read_rules
from secure_loader.errors import ConfigError, FormatError, MissingFileError, UntrustedSignerError
from tests.attacks.kit import MALLORY, SIGN, Victim, build_file
from tests.certificates import SERVER, ders, pem, root

ROOT = root()
MIDDLE = ROOT.below()
LEAF = MIDDLE.issue(SIGN, san=(x509.UniformResourceIdentifier("https://acme.org/release"),))
GOOD = """
[[authority]]
name = "acme"
roots = ["roots/acme.pem"]
models = ["demo/*"]
subject = { CN = "Release *", O = "Acme" }
san = ["uri:https://acme.org/*"]
not_after = 2099-01-01
"""


def test_everything_that_can_be_said(tmp_path):
    pem(tmp_path / "roots" / "acme.pem", root("another").certificate, ROOT.certificate)
    (tmp_path / "trust.toml").write_text(GOOD)
    rules = read_rules(tmp_path / "trust.toml")
    [authority] = rules.authorities
    assert authority.document() == {
        "name": "acme",
        "roots": [str(tmp_path / "roots" / "acme.pem")],
        "models": ["demo/*"],
        "subject": {"CN": "Release *", "O": "Acme"},
        "san": ["uri:https://acme.org/*"],
        "not_after": "2099-01-01T00:00:00Z",
    }
    assert len(authority.read_roots()) == 2
    signing = certified(SIGN, pem(tmp_path / "chain.pem", LEAF, MIDDLE.certificate))
    path = build_file(tmp_path / "x.safetensors", signing=signing)
    Victim(store=TrustStore([], rules=rules)).load(path)
    Victim(store=TrustStore.from_paths([tmp_path / "trust.toml"])).load(path)


def test_roots_elsewhere(tmp_path):
    text = GOOD.replace("roots/acme.pem", "/etc/acme.pem")
    [authority] = parse_rules(text.encode(), str(tmp_path / "trust.toml")).authorities
    assert authority.roots == (Path("/etc/acme.pem"),)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "acme"', "", "needs a name"),
        ('name = "acme"', 'name = "a\\tb"', "needs a name"),
        ('name = "acme"', 'name = "a@b"', "needs a name"),
        ("roots/acme.pem", "~nobody-of-this-name/acme.pem", "roots: "),
        ('roots = ["roots/acme.pem"]', "", "needs roots"),
        ('["roots/acme.pem"]', '"roots/acme.pem"', "roots must be a list"),
        ('models = ["demo/*"]', "", "needs roots, PEM files, and models"),
        ('O = "Acme"', 'ORG = "Acme"', "unknown key 'ORG'"),
        ('O = "Acme"', "O = 5", "a table of patterns"),
        ('{ CN = "Release *", O = "Acme" }', '"CN=x"', "a table of patterns"),
        ('"uri:https://acme.org/*"', '"https://acme.org/*"', "san takes patterns"),
        ('"uri:https://acme.org/*"', '"uri:"', "san takes patterns"),
        ("2099-01-01", "'soon'", "is not a date"),
        ('name = "acme"', 'name = "acme"\nroot = 1', "unknown key 'root'"),
    ],
)
def test_what_is_refused(old, new, message):
    assert old in GOOD
    with pytest.raises(FormatError) as caught:
        parse_rules(GOOD.replace(old, new).encode(), "/x/trust.toml")
    assert message in caught.value.message


def test_an_authority_must_say_whom_it_means():
    text = "".join(line + "\n" for line in GOOD.splitlines() if not line.startswith(("subject", "san")))
    with pytest.raises(FormatError, match="needs subject or san"):
        parse_rules(text.encode(), "/x/trust.toml")


def test_certificates_that_nobody_would_take(tmp_path):
    def attempt(*certificates: x509.Certificate, key=SIGN) -> None:
        certified(key, pem(tmp_path / "chain.pem", *certificates))

    attempt(LEAF)
    attempt(LEAF, MIDDLE.certificate, ROOT.certificate)
    for certificates, message in (
        ((MIDDLE.certificate, LEAF), "not for an Ed25519 key"),
        ((MIDDLE.issue(MALLORY),), "not that of the signing key"),
        ((MIDDLE.issue(SIGN, usage=SERVER),), "not for code signing"),
        ((MIDDLE.issue(SIGN, days=(-9, -1)),), "not valid"),
        ((LEAF, *[MIDDLE.certificate] * 10), "more than 10 certificates"),
    ):
        with pytest.raises(ConfigError, match=message):
            attempt(*certificates)
    (tmp_path / "chain.pem").write_text("nothing")
    with pytest.raises(ConfigError, match="cannot be used"):
        certified(SIGN, tmp_path / "chain.pem")
    with pytest.raises(MissingFileError):
        certified(SIGN, tmp_path / "nowhere.pem")


def test_damaged_certificates_are_refused_in_one_way(tmp_path):
    pem(tmp_path / "roots" / "acme.pem", ROOT.certificate)
    [authority] = parse_rules(GOOD.encode(), str(tmp_path / "trust.toml")).authorities
    chain, rng = ders(LEAF, MIDDLE.certificate), random.Random(5)
    assert len(authority.certify(Chain.parse(chain), "2099-01-01T00:00:00Z")) == 3
    for _ in range(1500):
        damaged = [bytearray(der) for der in chain]
        which = rng.choice(damaged)
        at = rng.randrange(len(which))
        which[at] ^= rng.randrange(1, 256)
        with pytest.raises(UntrustedSignerError):
            authority.certify(Chain.parse([bytes(der) for der in damaged]), "2099-01-01T00:00:00Z")


def test_a_name_of_a_type_that_names_do_not_have():
    """The library reads names when it says what is wrong with a certificate, and raises what it likes."""
    [der] = ders(ROOT.issue(SIGN, usage=SERVER))
    at = der.rindex(b"\x06\x03\x55\x04\x03\x0c")  # the common name of its subject, a UTF8String
    chain = Chain.parse([der[:at] + b"\x06\x03\x0c\x04\x55\x03" + der[at + 6 :]])  # a BIT STRING of another name
    with pytest.raises(UntrustedSignerError, match="the certificate does not hold: oid must be"):
        chain.verify([ROOT.certificate], dt.datetime.now(dt.UTC))


@pytest.mark.filterwarnings("default")
def test_certificates_that_the_library_only_warns_of(tmp_path):
    """Warnings are errors in these tests; elsewhere they are not, and the certificate is looked at all the same."""
    pem(tmp_path / "roots" / "acme.pem", ROOT.certificate)
    [authority] = parse_rules(GOOD.encode(), str(tmp_path / "trust.toml")).authorities
    der = bytearray(ders(LEAF)[0])
    serial = LEAF.serial_number.to_bytes((LEAF.serial_number.bit_length() + 7) // 8, "big")
    der[der.index(serial)] |= 0x80  # a negative number
    with pytest.warns(Warning, match="serial number"), pytest.raises(UntrustedSignerError, match="does not hold"):
        authority.certify(Chain.parse((bytes(der), *ders(MIDDLE.certificate))), "2099-01-01T00:00:00Z")
