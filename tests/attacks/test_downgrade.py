"""Attacks 18 to 38: metadata stripped, weakened, re-signed; keys and signers that are not what they seem."""

from __future__ import annotations

import base64
import datetime as dt
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from secure_loader import TrustedSigner, TrustStore
from secure_loader.core.keys.jwk import parse_key
from secure_loader.core.keys.local import path_of, read_keys
from secure_loader.core.policy import ALLOW_ALL
from secure_loader.core.seal import NOTICE
from secure_loader.errors import (
    FormatError,
    KeyAccessError,
    NotEncryptedError,
    PolicyDeniedError,
    SignatureError,
    UnsupportedVersionError,
    UntrustedSignerError,
)
from tests.attacks.kit import (
    KEY,
    MALLORY,
    SIGN,
    Victim,
    arrays,
    assert_no_secret,
    build_file,
    flip,
    inner,
    join,
    master,
    refused,
    rewrite,
    signing,
    split,
    tensor_offset,
    trust,
)

CRYPTO = ("__crypto_keys__", "__encryption__", "__policy__", "__signature__")


@pytest.fixture
def good(tmp_path):
    return build_file(tmp_path / "model.secure.safetensors")


@pytest.fixture
def victim():
    return Victim()


def expect(victim, path, kind, *words):
    with refused(kind, *words, victim=victim, place=path):
        victim.open(path)


def test_a18_everything_stripped_and_plaintext_put_in(good, victim):
    save_file({n: np.zeros_like(a) for n, a in arrays().items()}, good, metadata={"format": "pt"})
    expect(victim, good, NotEncryptedError, "is a plain safetensors file")


def test_a18_leave_for_plaintext_is_asked_for_by_name(good):
    save_file(arrays(), good)
    assert (Victim(insecure_allow_plaintext=True).load(good)["big"] == arrays()["big"]).all()


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", CRYPTO)
def test_a19_one_part_removed(good, victim, name, strict):
    path = rewrite(good, lambda doc: doc["__metadata__"].pop(name))
    with refused(FormatError, f"{name} is missing: stripped?", victim=victim, place=path):
        victim.open(path, strict=strict)


@pytest.mark.parametrize("name", CRYPTO)
def test_a19_all_but_one_part_removed(good, victim, name):
    def change(doc):
        doc["__metadata__"] = {name: doc["__metadata__"][name]}

    with refused(FormatError, "is missing: stripped?", victim=victim, place=good):
        victim.open(rewrite(good, change), strict=False)


def test_a20_one_record_dropped(good, victim):
    path = rewrite(good, lambda doc: inner(doc, "__encryption__", lambda v: v.pop("big")))
    expect(victim, path, SignatureError)


def test_a20_a_record_for_a_clear_tensor(good, victim):
    path = rewrite(good, lambda doc: inner(doc, "__encryption__", lambda v: v.update(clear=v["big"])))
    expect(victim, path, FormatError, "key_iv is used by another tensor")


def test_a20_a_record_for_no_tensor(good, victim):
    path = rewrite(good, lambda doc: inner(doc, "__encryption__", lambda v: v.update(ghost=v["big"])), sign=SIGN)
    expect(victim, path, FormatError, "tensor 'ghost'", "holds no such tensor")


@pytest.mark.parametrize("place", [0, 70_000, 50 * 4096 - 1])
@pytest.mark.parametrize("how", ["map", "copy"])
def test_a20_a_clear_tensor_altered(good, place, how):
    from secure_loader.errors import AuthenticationError

    flip(good, tensor_offset(good, "clear") + place)
    with Victim(clear_tensors=how).open(good) as f, refused(AuthenticationError, "tensor 'clear'", place=good):
        f.get_tensor("clear")


def test_a20_digests_for_some_tensors_only(good, victim):
    def change(doc):
        inner(doc, "__secure_loader__", lambda v: v["digest"]["tensors"].pop("clear"))

    expect(victim, rewrite(good, change, sign=SIGN), FormatError, "must name exactly the tensors of the file")


@pytest.mark.parametrize("version", ["0", "3", "3x", "", 2, 2.0, None, True, "02", " 2"])
def test_a21_versions(good, victim, version):
    path = rewrite(good, lambda doc: inner(doc, "__crypto_keys__", lambda v: v.update(version=version)), sign=SIGN)
    with refused(FormatError if type(version) is float else UnsupportedVersionError, victim=victim, place=path):
        victim.open(path)


@pytest.mark.parametrize("profile", [0, 2, "1", None, True])
def test_a21_profiles(good, victim, profile):
    path = rewrite(good, lambda doc: inner(doc, "__secure_loader__", lambda v: v.update(profile=profile)), sign=SIGN)
    expect(victim, path, UnsupportedVersionError, "profile")


@pytest.mark.parametrize("alg", ["aes512gcm", "none", "", "AES256GCM", "aes-256-gcm", "aes256gcm "])
def test_a21_algorithms(good, victim, alg):
    path = rewrite(good, lambda doc: inner(doc, "__crypto_keys__", lambda v: v["enc"].update(alg=alg)), sign=SIGN)
    expect(victim, path, UnsupportedVersionError, "is unknown")


@pytest.mark.parametrize("name", ["__crit__", "__future__", "__secure_loader2__"])
def test_a21_critical_fields_that_nobody_knows(good, victim, name):
    path = rewrite(good, lambda doc: doc["__metadata__"].update({name: '["x"]'}), sign=SIGN)
    expect(victim, path, FormatError, "__metadata__", "unknown member")


def test_a22_profile_1_weakened_by_an_outsider(good, victim):
    path = rewrite(good, lambda doc: doc["__metadata__"].pop("__secure_loader__"))
    expect(victim, path, NotEncryptedError, "without profile 1")
    with refused(SignatureError, victim=victim, place=path):
        victim.open(path, strict=False)


def test_a22_profile_1_weakened_by_a_signer(good):
    """Somebody whom the victim trusts for other models, say."""
    path = rewrite(good, lambda doc: doc["__metadata__"].pop("__secure_loader__"), sign=SIGN)
    expect(Victim(), path, NotEncryptedError, "without profile 1")
    victim = Victim(store=trust(models=("demo/*",)))
    with refused(UntrustedSignerError, "not for files that name no model", victim=victim, place=path):
        victim.open(path, strict=False)
    with (
        refused(NotEncryptedError, "tensor 'clear'", "signs no digest", place=path),
        Victim().open(path, strict=False) as f,
    ):
        f.get_tensor("clear")


@pytest.mark.parametrize("text", ["", ALLOW_ALL, "package model\ndefault allow = true"])
def test_a23_policies_removed_or_replaced(tmp_path, text):
    from secure_loader.core.envelope import Policy

    path = build_file(tmp_path / "x.safetensors", policy=Policy("package model\nallow { input.gpu }", ALLOW_ALL))
    expect(Victim(), path, PolicyDeniedError, "data.model.allow")

    def change(doc):
        doc["__metadata__"]["__policy__"] = json.dumps({"local": text, "remote": ALLOW_ALL}, separators=(",", ":"))

    expect(Victim(), rewrite(path, change), SignatureError)
    expect(Victim(), rewrite(path, change, sign=MALLORY), SignatureError)

    def as_mallory(doc):
        change(doc)
        inner(doc, "__crypto_keys__", lambda v: v["sign"].update(kid=MALLORY.kid))

    expect(Victim(), rewrite(path, as_mallory, sign=MALLORY), UntrustedSignerError, "'sign-mallory'")


def test_a24_stock_safetensors_sees_noise_and_a_notice(good):
    """It cannot be stopped; names and docs say so."""
    # In a process of its own: in this one the hook for Transformers may be installed already, and refuse.
    code = """
import json, sys, safetensors
with safetensors.safe_open(sys.argv[1], "numpy") as f:
    print(json.dumps([f.metadata(), f.get_tensor("small").tolist(), f.get_tensor("clear").tolist()]))
"""
    done = subprocess.run([sys.executable, "-c", code, good], capture_output=True, text=True, check=True)
    metadata, small, clear = json.loads(done.stdout)
    assert (metadata["__notice__"], metadata["format"]) == (NOTICE, "pt")
    assert small != arrays()["small"].tolist()
    assert clear == arrays()["clear"].tolist()


@pytest.mark.parametrize("which", ["enc", "sign"])
@pytest.mark.parametrize("member", ["k", "d", "p", "q", "dp", "dq", "qi", "priv"])
@pytest.mark.parametrize("legacy", [False, True])
def test_a25_private_members_in_a_header(good, victim, which, member, legacy):
    secret = base64.b64encode(bytes(KEY.secret.reveal())).decode()

    def change(doc):
        inner(doc, "__crypto_keys__", lambda v: v[which].update({member: secret}))
        if legacy:
            doc["__metadata__"].pop("__secure_loader__")

    path = rewrite(good, change, sign=SIGN)
    with refused(FormatError, "embeds private key material", victim=victim, place=path):
        victim.open(path, strict=not legacy)


def test_a25_the_writer_embeds_none(good):
    assert_no_secret(good.read_bytes().decode("latin-1"))
    keys = json.loads(split(good)[0]["__metadata__"]["__crypto_keys__"])
    assert set(keys["enc"]) | set(keys["sign"]) == {"alg", "kid", "kty"}


@pytest.mark.parametrize("member", ["x", "jwk", "x5u"])
def test_a26_a_verify_key_in_the_header(good, victim, member):
    x = base64.b64encode(MALLORY.verify_key().public).decode()
    path = rewrite(
        good, lambda doc: inner(doc, "__crypto_keys__", lambda v: v["sign"].update({member: x})), sign=MALLORY
    )
    expect(victim, path, FormatError, f"unknown member '{member}'")

    def legacy(doc):
        doc["__metadata__"].pop("__secure_loader__")

    with refused(SignatureError, victim=victim, place=path):
        victim.open(rewrite(path, legacy, sign=MALLORY), strict=False)


@pytest.mark.parametrize("scheme", ["file://{}", "http://127.0.0.1:9/x", "https://169.254.169.254/latest"])
@pytest.mark.parametrize("kid", [SIGN.kid, MALLORY.kid])
def test_a26_a_jku_in_the_header_is_not_followed(good, victim, tmp_path, scheme, kid):
    fifo = tmp_path / "keys.jwk"
    os.mkfifo(fifo, 0o600)  # whoever opens it hangs

    def change(doc):
        def point(v):
            for which in ("enc", "sign"):
                v[which]["jku"] = scheme.format(fifo)
                v[which] = dict(sorted(v[which].items()))
            v["sign"]["kid"] = kid

        inner(doc, "__crypto_keys__", point)

    path = rewrite(good, change, sign=MALLORY)
    expect(victim, path, SignatureError if kid == SIGN.kid else UntrustedSignerError)


SECRET32 = base64.urlsafe_b64encode(bytes(range(32))).decode().rstrip("=")


@pytest.mark.parametrize(
    ("doc", "words"),
    [
        ({"kty": "oct", "alg": "ed25519", "k": SECRET32}, "is for 'ed25519'"),
        ({"kty": "oct", "alg": "HS256", "k": SECRET32}, "is for 'HS256'"),
        ({"kty": "oct", "alg": "none", "k": SECRET32}, "is for 'none'"),
        ({"kty": "oct", "k": SECRET32}, "names no alg"),
        ({"kty": "oct", "alg": "EdDSA", "x": SECRET32}, "is for 'EdDSA'"),
        ({"kty": "OKP", "crv": "X25519", "alg": "EdDSA", "x": SECRET32}, "not an Ed25519 key"),
        ({"kty": "OKP", "crv": "Ed25519", "alg": "ECDH-ES", "x": SECRET32}, "not an Ed25519 key"),
        ({"kty": "OKP", "crv": "Ed25519", "alg": "none", "x": SECRET32}, "not an Ed25519 key"),
        ({"kty": "OKP", "crv": "Ed25519", "x": SECRET32}, "names no alg"),
        ({"kty": "OKP", "crv": "Ed25519", "alg": "HS256", "x": SECRET32}, "not an Ed25519 key"),
        ({"kty": "EC", "crv": "P-256", "alg": "ES256", "x": SECRET32}, "none of oct, OKP and AKP"),
        ({"kty": "Oct", "alg": "A256GCM", "k": SECRET32}, "none of oct, OKP and AKP"),
        ({"kty": "OKP", "crv": "Ed25519", "alg": "EdDSA", "x": SECRET32, "use": "enc"}, "not meant for this use"),
    ],
)
def test_a27_keys_that_are_not_what_they_seem(doc, words):
    with refused(KeyAccessError, words):
        parse_key(doc | {"kid": "a"}, "key file")


@pytest.mark.parametrize("alg", ["none", "HS256", "ED25519", "EdDSA", "ed25519 ", ""])
def test_a27_signature_algorithms_in_a_header(good, victim, alg):
    path = rewrite(good, lambda doc: inner(doc, "__crypto_keys__", lambda v: v["sign"].update(alg=alg)), sign=SIGN)
    expect(victim, path, UnsupportedVersionError, "signature algorithm")


@pytest.mark.parametrize(
    ("which", "kty"), [("enc", "okp"), ("sign", "oct"), ("enc", "OCT"), ("sign", "OKP"), ("enc", None)]
)
def test_a27_key_types_in_a_header(good, victim, which, kty):
    path = rewrite(good, lambda doc: inner(doc, "__crypto_keys__", lambda v: v[which].update(kty=kty)), sign=SIGN)
    expect(victim, path, FormatError, f"{which} must have kty")


def test_a27_a_signing_key_in_place_of_a_master_key(good, tmp_path):
    path = tmp_path / "a.jwk"
    path.write_text(json.dumps(signing(KEY.kid).document()))
    path.chmod(0o600)
    from secure_loader.core.keys.provider import KeyRing

    victim = Victim()
    victim.session.keys = KeyRing([str(path)])
    with victim.open(good) as f, refused(KeyAccessError, "is not a symmetric key", place=good):
        f.get_tensor("big")


def test_a28_two_keys_of_one_kid(good):
    for keys in ((KEY, master(KEY.kid, 9)), (master(KEY.kid, 9), KEY)):
        with Victim(keys=keys).open(good) as f, refused(KeyAccessError, place=good):
            f.get_tensor("big")


def test_a28_two_signers_of_one_kid(good):
    store = TrustStore([TrustedSigner("a", SIGN.verify_key()), TrustedSigner("b", signing(SIGN.kid, 1).verify_key())])
    expect(Victim(store=store), good, UntrustedSignerError, "two different trusted keys go by the kid 'sign-1'")


@pytest.mark.parametrize(
    "kid", [None, "", 5, "a/b", "../x", "x" * 1_000_000, "a\x00b", "a\nb", []], ids=lambda k: str(k)[:9]
)
@pytest.mark.parametrize("which", ["enc", "sign"])
def test_a28_kids_in_a_header(good, victim, which, kid):
    path = rewrite(good, lambda doc: inner(doc, "__crypto_keys__", lambda v: v[which].update(kid=kid)), sign=SIGN)
    expect(victim, path, FormatError, f"{which} has no usable kid")


@pytest.mark.parametrize(
    "reference", ["//evil.example/k", "/keys/../../etc/shadow", "/a%2e%2e/b", "/a\0b", "~no-such-user-here/k"]
)
def test_a31_key_references(reference):
    with refused(KeyAccessError, "key reference"):
        path_of(reference)


def test_a31_key_files(tmp_path):
    real = tmp_path / "real.jwk"
    real.write_text(json.dumps(KEY.document()))
    real.chmod(0o600)
    assert read_keys(real)[0].kid == KEY.kid
    (tmp_path / "link.jwk").symlink_to("/etc/shadow")
    os.mkfifo(tmp_path / "fifo.jwk", 0o600)
    (tmp_path / "zero.jwk").symlink_to("/dev/zero")
    for name in ("link.jwk", "fifo.jwk", "zero.jwk"):
        with refused(KeyAccessError, "link or not a regular file", place=tmp_path / name):
            read_keys(tmp_path / name)
    real.chmod(0o644)
    with refused(KeyAccessError, "can be read by others", "chmod 600", place=real):
        read_keys(real)
    large = tmp_path / "large.jwk"
    large.touch(0o600)
    os.truncate(large, 1 << 40)
    with refused(KeyAccessError, "larger than 65536 bytes", place=large):
        read_keys(large)


def test_a35_the_right_kid_and_the_wrong_bytes(good):
    victim = Victim(keys=(master(KEY.kid, 0x12),))
    with victim.open(good) as f, refused(KeyAccessError, "not the one that encrypted the file", place=good):
        f.get_tensor("big")
    assert len(victim.ring.asked) == 1
    victim = Victim(keys=(master(KEY.kid, algorithm="aes128gcm"),))
    with victim.open(good) as f, refused(KeyAccessError, "is for aes128gcm", place=good):
        f.get_tensor("big")


def test_a35_no_tensor_is_read_with_the_wrong_key(good, monkeypatch):
    from secure_loader.core.source import FileSource

    with Victim(keys=(master(KEY.kid, 0x12),)).open(good) as f:
        monkeypatch.setattr(FileSource, "read_into", lambda *_: pytest.fail("read"))
        with refused(KeyAccessError, place=good):
            f.get_tensor("big")


def test_a36_no_key_is_asked_for_before_signature_and_policy(good, tmp_path):
    from secure_loader.core.envelope import Policy

    victim = Victim()
    with refused(SignatureError, victim=victim):
        victim.load(rewrite(build_file(tmp_path / "a"), lambda doc: doc["__metadata__"].update(format="np")))
    with refused(PolicyDeniedError, victim=victim):
        victim.load(build_file(tmp_path / "b", policy=Policy("package model\nallow = false", ALLOW_ALL)))
    with victim.open(good) as f:
        f.get_tensor("clear")
        assert f.get_slice("big").get_shape() == [50, 1024]
        assert victim.ring.asked == [], "nobody needs a key to look at names and clear tensors"
        f.get_tensor("big")
        f.get_tensor("small")
    assert len(victim.ring.asked) == 1, "one request for a whole file"
    (request,) = victim.ring.asked
    assert (request.kid, request.model_id) == (KEY.kid, "demo/model")


def test_a38_a_signer_who_is_trusted_no_more(good):
    past, future = (dt.datetime.now(dt.UTC) + dt.timedelta(seconds=s) for s in (-1, 3600))
    expired = TrustStore([TrustedSigner("me", SIGN.verify_key(), ("*",), past)])
    expect(Victim(store=expired), good, UntrustedSignerError, "trusted only until")
    expect(Victim(store=TrustStore([])), good, UntrustedSignerError, "'sign-1'")
    expect(Victim(store=trust(models=("other/*",))), good, UntrustedSignerError, "not for model 'demo/model'")
    Victim(store=TrustStore([TrustedSigner("me", SIGN.verify_key(), ("*",), future)])).open(good)


def test_a38_an_untrusted_signer_who_takes_a_trusted_name(good):
    path = rewrite(good, lambda doc: None, sign=MALLORY)
    expect(Victim(), path, SignatureError, "'sign-1' does not match")
    doc, body = split(path)
    doc["__metadata__"]["__signature__"] = base64.b64encode(bytes(64)).decode()
    expect(Victim(), join(path, doc, body), SignatureError)
