"""Post-quantum signatures: keys in pairs, what a trusted pair demands, and what is written with one."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import replace

import pytest

from secure_loader import Session, SigningKey, TrustedSigner, TrustStore, encrypt_model, rewrap_model
from secure_loader.core.checkpoint import Checkpoint
from secure_loader.core.home import keys_dir
from secure_loader.core.keys.generate import generate_keys
from secure_loader.core.keys.jwk import MasterKey, VerifyKey, parse_key, parse_keys, parse_second
from secure_loader.core.keys.local import find_signing_key
from secure_loader.core.keys.mldsa import SecondSigningKey
from secure_loader.core.manifest import MANIFEST
from secure_loader.core.secrets import Secret
from secure_loader.core.trust import own_store, parse_trusted
from secure_loader.core.trust_rules import Revocation, Rule, Rules
from secure_loader.errors import FormatError, KeyAccessError, RevokedError, SignatureError, UntrustedSignerError
from tests.attacks.kit import KEY, MALLORY, SIGN, Victim, build_file, build_folder, split

SECOND = SecondSigningKey(SIGN.kid, Secret(bytes(range(32))))
OTHER = SecondSigningKey(SIGN.kid, Secret(bytes(range(1, 33))))
PAIR = replace(SIGN, second=SECOND)


def store(*keys: SigningKey, rules: Rules | None = None) -> TrustStore:
    return TrustStore([TrustedSigner(f"s{i}", k.verify_key()) for i, k in enumerate(keys)], rules=rules)


def opens(path, trusted: TrustStore) -> None:
    Victim(store=trusted).load_folder(path) if path.is_dir() else Victim(store=trusted).load(path)


def jwks(*keys) -> str:
    return json.dumps({"keys": [k.document() for k in keys]})


@pytest.fixture
def both(tmp_path):
    """A file and a folder that are signed with both keys."""
    return build_file(tmp_path / "x.safetensors", signing=PAIR), build_folder(tmp_path / "model", signing_key=PAIR)


@pytest.fixture
def single(tmp_path):
    """The same, signed with one key."""
    return build_file(tmp_path / "y.safetensors"), build_folder(tmp_path / "plain-model")


def test_both_are_demanded_where_both_are_trusted(both, single):
    for path in both:
        opens(path, store(PAIR))
        opens(path, store(SIGN))
    for path in single:
        opens(path, store(SIGN))
        with pytest.raises(UntrustedSignerError, match="its signature is missing: stripped, or never made"):
            opens(path, store(PAIR))


def test_the_strictest_entry_for_a_key_counts(both, single):
    for path in single:
        with pytest.raises(UntrustedSignerError, match="is missing"):
            opens(path, store(SIGN, PAIR))
        with pytest.raises(UntrustedSignerError, match="is missing"):
            opens(path, store(SIGN, replace(PAIR, kid="another name")))
    for path in both:
        with pytest.raises(UntrustedSignerError, match="two different post-quantum keys"):
            opens(path, store(PAIR, replace(SIGN, second=OTHER)))


def test_another_key_than_the_trusted_one(both):
    for path in both:
        with pytest.raises(SignatureError, match="the post-quantum signature of 'sign-1' does not match"):
            opens(path, store(replace(SIGN, second=OTHER)))


def test_who_breaks_ed25519_does_not_pass(tmp_path):
    """As if Mallory had found the private Ed25519 key: without the other one nothing opens."""
    for second in (None, OTHER):
        path = build_file(tmp_path / f"{second is None}.safetensors", signing=replace(SIGN, second=second))
        opens(path, store(SIGN))
        with pytest.raises((UntrustedSignerError, SignatureError)):
            opens(path, store(PAIR))


def test_a_rule_may_demand_it(both):
    rules = Rules((Rule(("demo/*",), post_quantum=True),))
    for path in both:
        opens(path, store(PAIR, rules=rules))
        with pytest.raises(UntrustedSignerError, match="has no post-quantum key"):
            opens(path, store(SIGN, rules=rules))


def test_it_is_revoked_by_either_thumbprint(both):
    for thumbprint in (PAIR.verify_key().thumbprint(), SECOND.verify_key().thumbprint()):
        entry = Revocation("stolen", dt.datetime(2026, 1, 2, tzinfo=dt.UTC), signer=thumbprint)
        for path in both:
            with pytest.raises(RevokedError, match="stolen"):
                opens(path, store(PAIR, rules=Rules(revoked=(entry,))))


def test_rewrap_signs_with_what_it_is_given(tmp_path, both):
    _, folder = both
    rewrap_model(folder, key=KEY, signing_key=SIGN, keys=KEY, trust=store(PAIR), release=2)
    assert "__signature_mldsa65__" not in split(next(folder.glob("*.safetensors")))[0]["__metadata__"]
    assert "signatures" not in json.loads((folder / MANIFEST).read_text())
    new = replace(MALLORY, second=replace(OTHER, kid=MALLORY.kid))
    rewrap_model(folder, key=KEY, signing_key=new, keys=KEY, trust=store(SIGN))
    opens(folder, store(new))


@pytest.mark.parametrize("number", [0, 1])
def test_a_signature_of_a_manifest_has_two_members(both, number):
    """What else stood there would be signed by nobody."""
    path = both[1] / MANIFEST
    doc = json.loads(path.read_text())
    doc["signatures"][number]["payload"] = doc["payload"]
    path.write_text(json.dumps(doc))
    with pytest.raises(FormatError, match="exactly protected and signature"):
        opens(both[1], store(SIGN))


def test_pairs_in_key_sets():
    (private,) = parse_keys(jwks(SIGN, SECOND), "set")
    assert isinstance(private, SigningKey)
    assert bytes(private.second.secret.reveal()) == bytes(range(32))
    (public,) = parse_keys(jwks(SECOND.verify_key(), SIGN.verify_key()), "set")
    assert public == PAIR.verify_key()
    assert isinstance(public, VerifyKey)
    assert [type(k) for k in parse_keys(jwks(KEY, SIGN, SECOND), "set")] == [MasterKey, SigningKey]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([SECOND], "has no Ed25519 key of the same kid beside it"),
        ([SIGN, replace(SECOND, kid="other")], "has no Ed25519 key of the same kid beside it"),
        ([SIGN, SECOND.verify_key()], "two keys share the kid"),
        ([SIGN.verify_key(), SECOND], "two keys share the kid"),
        ([SIGN, SECOND, OTHER], "two keys share the kid"),
        ([replace(KEY, kid=SIGN.kid), SECOND], "two keys share the kid"),
    ],
)
def test_keys_that_are_no_pairs(keys, message):
    with pytest.raises(KeyAccessError, match=message):
        parse_keys(jwks(*keys), "set")


def test_jwks_that_are_not_right():
    good = SECOND.document()
    for change, message in (
        ({"alg": "ML-DSA-87"}, "is for 'ML-DSA-87'"),
        ({"use": "enc"}, "not meant for this use"),
        ({"pub": "AAAA"}, "has 3 bytes instead of 1952"),
        ({"priv": good["priv"][:-4]}, "bytes instead of 32"),
        ({"pub": OTHER.document()["pub"]}, "pub is not the public half of priv"),
    ):
        with pytest.raises(KeyAccessError, match=message) as caught:
            parse_keys(json.dumps({"keys": [SIGN.document(), good | change]}), "set")
        assert good["priv"] not in str(caught.value)
    with pytest.raises(KeyAccessError, match="signs nothing alone"):
        parse_key(good, "one")
    with pytest.raises(KeyAccessError, match="is not a public ML-DSA-65 key"):
        parse_second(good, "one")
    with pytest.raises(KeyAccessError, match="is not a public ML-DSA-65 key"):
        parse_second(SIGN.verify_key().document(), "one")


def test_trust_files():
    signer = TrustedSigner("me", PAIR.verify_key(), ("a/*",))
    assert parse_trusted(signer.document(), "x") == signer
    with pytest.raises(FormatError, match="of the same kid"):
        parse_trusted(signer.document() | {"post_quantum": replace(SECOND, kid="b").verify_key().document()}, "x")
    with pytest.raises(KeyAccessError, match="is not a public"):
        parse_trusted(signer.document() | {"post_quantum": SECOND.document()}, "x")


def test_keygen_makes_and_uses_a_pair(tmp_path, both):
    made = generate_keys("me", post_quantum=True, models=("demo/*",))
    assert made.post_quantum
    signing = find_signing_key([keys_dir()], "me")
    assert signing.second is not None
    assert signing.second.kid == signing.kid == made.signing_key_id
    assert own_store().signers[0].key == signing.verify_key()
    source = tmp_path / "model-plain"
    encrypt_model(source, tmp_path / "out", key="me", model_id="demo/model")
    session = Session()
    checkpoint = Checkpoint(tmp_path / "out", session)
    for shard in checkpoint.shards():
        checkpoint.open(shard).source.close()
    # Not with the first key alone.
    encrypt_model(source, tmp_path / "weak", key="me", signing_key=replace(signing, second=None), model_id="demo/model")
    with pytest.raises(UntrustedSignerError, match="is missing"):
        Checkpoint(tmp_path / "weak", session)


def test_the_private_half_stays_private(both):
    (path, _), seed = both, json.loads(jwks(SECOND))["keys"][0]["priv"]
    assert seed not in path.read_bytes().decode("latin-1")
    assert "priv" not in json.dumps(TrustedSigner("me", PAIR.verify_key()).document())
    assert seed not in repr(PAIR)
    assert bytes(range(32)) not in path.read_bytes()
