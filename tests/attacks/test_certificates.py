"""Attack 26 with real certificates: a chain in a file counts only where the operator's own roots and names say so."""

from __future__ import annotations

import base64
import datetime as dt
from dataclasses import replace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from secure_loader import SigningKey, TrustedSigner, TrustStore
from secure_loader.core.keys.mldsa import SecondSigningKey
from secure_loader.core.manifest import MANIFEST
from secure_loader.core.secrets import Secret
from secure_loader.core.trust_chain import Authority
from secure_loader.core.trust_rules import Revocation, Rule, Rules
from secure_loader.errors import (
    ConfigError,
    RevokedError,
    RollbackError,
    SecureLoaderError,
    SignatureError,
    UntrustedSignerError,
)
from tests.attacks.kit import MALLORY, SIGN, Victim, build_file, build_folder, inner, refused, rewrite, trust
from tests.certificates import CODE_SIGNING, SERVER, UNKNOWN, Issuer, ders, pem, root, subject

ROOT = root()
MIDDLE = ROOT.below(usage=CODE_SIGNING)
LEAF = MIDDLE.issue(SIGN, san=(x509.RFC822Name("release@acme.org"),))
CHAIN = ders(LEAF, MIDDLE.certificate)
CERTIFIED = replace(SIGN, chain=CHAIN)


@pytest.fixture
def roots(tmp_path):
    return pem(tmp_path / "roots" / "acme.pem", ROOT.certificate)


@pytest.fixture
def operator(roots):
    """A store with one authority and no keys; options replace what the authority says."""

    def make(*, rules: Rules | None = None, **options) -> TrustStore:
        said = {"name": "acme", "roots": (roots,), "models": ("demo/*",), "subject": (("O", "Acme"),)} | options
        return TrustStore([], rules=(rules or Rules()) + Rules(authorities=(Authority(**said),)))

    return make


def file_of(tmp_path, chain: tuple[bytes, ...], key: SigningKey = SIGN, **settings):
    return build_file(tmp_path / "model.secure.safetensors", signing=replace(key, chain=chain), **settings)


def refuses(path, store: TrustStore, *words: str, kind: type[SecureLoaderError] = UntrustedSignerError) -> None:
    victim = Victim(store=store)
    with refused(kind, *words, victim=victim):
        victim.load_folder(path) if path.is_dir() else victim.load(path)


def test_a26_a_chain_that_holds(tmp_path, operator):
    path = file_of(tmp_path, CHAIN)
    file = Victim(store=operator()).session.open_file(path)
    with file.source:
        assert file.verified.signer.name == "acme"
        assert file.verified.signer.key.public == SIGN.verify_key().public
    folder = build_folder(tmp_path / "folder", signing_key=CERTIFIED)
    Victim(store=operator(san=("email:*@acme.org",))).load_folder(folder)


def test_a26_a_chain_that_the_operator_did_not_ask_for(tmp_path):
    folder = build_folder(tmp_path / "folder", signing_key=CERTIFIED)
    for path in (file_of(tmp_path, CHAIN), folder):
        refuses(path, TrustStore([]), "'sign-1'", "does not name")
        refuses(path, trust(MALLORY), "'sign-1'", "does not name")
        Victim(store=trust()).load_folder(path) if path.is_dir() else Victim(store=trust()).load(path)


def test_a26_another_authority_of_the_same_names(tmp_path, operator):
    fake = root()
    middle = fake.below(usage=CODE_SIGNING)
    chain = ders(middle.issue(MALLORY), middle.certificate, fake.certificate)
    refuses(file_of(tmp_path, chain, MALLORY), operator(), "'sign-mallory'", "does not hold")
    # A genuine authority's certificate in between, which did not sign any of it.
    chain = ders(middle.issue(MALLORY), MIDDLE.certificate)
    refuses(file_of(tmp_path, chain, MALLORY), operator(), "does not hold")


def test_a26_the_certificate_of_somebody_else(tmp_path, operator):
    """Mallory signs, and shows the publisher's chain."""
    path = file_of(tmp_path, CHAIN, replace(MALLORY, kid=SIGN.kid))
    refuses(path, operator(), "does not match", kind=SignatureError)
    folder = build_folder(tmp_path / "folder", signing_key=replace(MALLORY, chain=CHAIN))
    refuses(folder, operator(), "does not match", kind=SignatureError)


def test_a26_a_chain_does_not_stand_in_for_a_trusted_kid(tmp_path, roots, operator):
    """Who has a certificate cannot take the kid of a key that the operator trusts."""
    fake = ROOT.below(usage=CODE_SIGNING)
    key = replace(MALLORY, kid=SIGN.kid)
    path = file_of(tmp_path, ders(fake.issue(key), fake.certificate), key)
    Victim(store=operator()).load(path)
    both = TrustStore(trust().signers, rules=operator().rules)
    refuses(path, both, "does not match", kind=SignatureError)


WRONG = {
    "for another purpose": ({"usage": SERVER}, "not for code signing"),
    "for no purpose": ({"usage": None}, "missing required extension"),
    "of an authority": ({"ca": True}, "of an authority"),
    "whose key is not for signatures": ({"signs": False}, "not for signatures"),
    "run out": ({"days": (-30, -1)}, "not valid at"),
    "not valid yet": ({"days": (1, 30)}, "valid from"),
    "with an unknown critical extension": ({"extra": ((UNKNOWN, True),)}, "critical"),
}


@pytest.mark.parametrize("how", WRONG)
def test_a26_a_certificate_that_is(tmp_path, operator, how):
    options, words = WRONG[how]
    leaf = MIDDLE.issue(SIGN, **options)
    refuses(file_of(tmp_path, ders(leaf, MIDDLE.certificate)), operator(), "acme:", words)


def test_a26_a_signature_older_than_its_certificate(tmp_path, operator):
    early = (dt.datetime.now(dt.UTC) - dt.timedelta(days=3)).strftime("%Y-%m-%dT%H:%M:%SZ")
    refuses(file_of(tmp_path, CHAIN, created=early), operator(), "after it was used")


MIDDLES = {
    "that is no authority": ({"ca": False, "usage": CODE_SIGNING}, "cA must be asserted"),
    "for web servers": ({"usage": SERVER}, "not for code signing"),
    "that may not sign certificates": ({"signs": False}, "not for certificates"),
    "run out": ({"days": (-30, -1)}, "not valid at"),
    "with an unknown critical extension": ({"extra": ((UNKNOWN, True),)}, "critical"),
    "for another domain": (
        {"extra": ((x509.NameConstraints([x509.RFC822Name("other.org")], None), True),)},
        "name constraints",
    ),
}


@pytest.mark.parametrize("how", MIDDLES)
def test_a26_an_authority_in_between(tmp_path, operator, how):
    options, words = MIDDLES[how]
    middle = ROOT.below(**options)
    leaf = middle.issue(SIGN, san=(x509.RFC822Name("release@acme.org"),))
    refuses(file_of(tmp_path, ders(leaf, middle.certificate)), operator(), "acme:", words)


def test_a26_a_longer_path_than_an_authority_allows(tmp_path, operator):
    short = ROOT.below(path_length=0)
    long = short.below("one too many")
    chain = ders(long.issue(SIGN), long.certificate, short.certificate)
    refuses(file_of(tmp_path, chain), operator(), "path length")


def test_a26_authorities_for_any_purpose(tmp_path, operator):
    middle = ROOT.below(usage=(ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE,))
    Victim(store=operator()).load(file_of(tmp_path, ders(middle.issue(SIGN), middle.certificate)))


def test_a26_a_key_that_did_not_sign(tmp_path, operator):
    for key in (ec.generate_private_key(ec.SECP256R1()), rsa.generate_private_key(65537, 2048)):
        path = file_of(tmp_path, ders(MIDDLE.issue(key), MIDDLE.certificate))
        refuses(path, operator(), "not for an Ed25519 key")


@pytest.mark.parametrize("junk", [b"x", b"\x30\x00", CHAIN[0][:-1], CHAIN[0] + b"\0"])
def test_a26_what_is_no_certificate(tmp_path, operator, junk):
    for chain in ((junk,), (CHAIN[0], junk)):
        refuses(file_of(tmp_path, chain), operator(), "cannot be read")


NAMES = {
    "another organisation": ({"o": "Acme Evil"}, {"subject": (("O", "Acme"),)}, "O of its subject is 'Acme Evil'"),
    "a comma in the name": (
        {"cn": "x,O=Acme", "o": "Evil"},
        {"subject": (("O", "Acme"),)},
        "O of its subject is 'Evil'",
    ),
    "two organisations": (
        {"ORGANIZATIONAL_UNIT_NAME": "a"},
        {"subject": (("OU", "a"), ("O", "Acme"), ("L", "*"))},
        "L of its subject is nothing",
    ),
    "another case": ({}, {"subject": (("O", "acme"),)}, "O of its subject is 'Acme'"),
    "no alternative name": ({}, {"san": ("email:*@acme.org",)}, "none of its alternative names"),
}


@pytest.mark.parametrize("how", NAMES)
def test_a26_names_that_are_not_those_asked_for(tmp_path, operator, how):
    name, options, words = NAMES[how]
    leaf = MIDDLE.issue(SIGN, subject(**name))
    refuses(file_of(tmp_path, ders(leaf, MIDDLE.certificate)), operator(**options), words)


def test_a26_a_name_given_twice(tmp_path, operator):
    twice = x509.Name([*subject(), x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, "Evil")])
    path = file_of(tmp_path, ders(MIDDLE.issue(SIGN, twice), MIDDLE.certificate))
    refuses(path, operator(), "O of its subject is 'Acme', 'Evil'")


@pytest.mark.parametrize(
    "san", [x509.RFC822Name("release@acme.org.evil.org"), x509.DNSName("release.acme.org"), x509.RFC822Name("acme.org")]
)
def test_a26_alternative_names_that_only_look_right(tmp_path, operator, san):
    leaf = MIDDLE.issue(SIGN, san=(san,))
    path = file_of(tmp_path, ders(leaf, MIDDLE.certificate))
    refuses(path, operator(san=("email:*@acme.org",)), "none of its alternative names")


def test_a26_models_that_the_authority_does_not_sign(tmp_path, operator):
    refuses(file_of(tmp_path, CHAIN, model_id="other/model"), operator(), "not for release 1 of 'other/model'")


def test_a38_an_authority_whose_time_is_over(tmp_path, operator):
    past = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=1)
    refuses(file_of(tmp_path, CHAIN), operator(not_after=past), "it made signers only until")


def test_a38_a_revoked_key_or_certificate(tmp_path, operator):
    import hashlib

    path = file_of(tmp_path, CHAIN)
    ways = [{"signer": SIGN.verify_key().thumbprint()}]
    ways += [{"sha256": hashlib.sha256(der).hexdigest()} for der in (*CHAIN, *ders(ROOT.certificate))]
    for what in ways:
        revoked = Rules(revoked=(Revocation("authority broken into", dt.datetime(2026, 1, 2, tzinfo=dt.UTC), **what),))
        refuses(path, operator(rules=revoked), "'acme'", "authority broken into", kind=RevokedError)


def test_a38_an_older_release_under_another_certificate(tmp_path, operator):
    """Keys of authorities are short-lived: the floor is that of the authority's name."""
    other = Issuer(MIDDLE.name, MIDDLE.key, MIDDLE.certificate).issue(MALLORY)
    Victim(store=operator()).load(file_of(tmp_path, CHAIN, release=5))
    old = file_of(tmp_path, ders(other, MIDDLE.certificate), MALLORY, release=4)
    refuses(old, operator(), "release 4", "release 5", kind=RollbackError)


def test_a26_rules_name_authorities_too(tmp_path, operator):
    path = file_of(tmp_path, CHAIN)
    Victim(store=operator(rules=Rules((Rule(("demo/*",), signers=("acme",)),)))).load(path)
    refuses(path, operator(rules=Rules((Rule(("demo/*",), signers=("other",)),))), "signed by 'acme'")
    signers = [replace(trust().signers[0], name="acme")]
    with pytest.raises(ConfigError, match="two different keys"):
        TrustStore(signers, rules=operator(rules=Rules((Rule(("*",), signers=("acme",)),))).rules)


def test_a26_roots_that_others_may_write(tmp_path, roots, operator):
    path = file_of(tmp_path, CHAIN)
    roots.chmod(0o666)
    refuses(path, operator(), "could have been written by others", kind=ConfigError)
    roots.chmod(0o644)
    roots.write_text("no certificates")
    refuses(path, operator(), "cannot be used", kind=ConfigError)


def test_a26_a_chain_put_in_afterwards(tmp_path, operator):
    """The chain is signed like everything else."""
    path = file_of(tmp_path, ())
    refuses(path, operator(), "'sign-1'", "does not name")
    texts = [base64.b64encode(der).decode() for der in CHAIN]
    rewrite(path, lambda doc: inner(doc, "__crypto_keys__", lambda v: v["sign"].update(x5c=texts)))
    refuses(path, operator(), "does not match", kind=SignatureError)
    assert not (tmp_path / MANIFEST).exists()


def test_a22_a_certificate_is_no_way_around_the_second_key(tmp_path, operator):
    """Who broke the Ed25519 key shows its genuine certificate, under a kid that the store does not have."""
    second = SecondSigningKey(SIGN.kid, Secret(bytes(32)))
    pair = TrustedSigner("me", replace(SIGN, second=second).verify_key())
    store = TrustStore([pair], rules=operator().rules)
    renamed = replace(SIGN, kid="another kid")
    refuses(file_of(tmp_path, CHAIN, renamed), store, "its signature is missing")
    folder = build_folder(tmp_path / "folder", signing_key=replace(renamed, chain=CHAIN))
    refuses(folder, store, "its signature is missing")
    Victim(store=store).load(file_of(tmp_path, CHAIN, replace(renamed, second=replace(second, kid=renamed.kid))))
