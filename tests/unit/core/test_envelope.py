"""The metadata of a header: what is read, what is written, and everything between that is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from secure_loader.core import envelope as env
from secure_loader.core.base64_text import base64_text, unbase64, unbase64_all
from secure_loader.core.header import Header, canonical_json, file_prefix, parse
from secure_loader.core.strict_json import Scanner
from secure_loader.core.types import TensorInfo
from secure_loader.errors import FormatError, NotEncryptedError, UnsupportedVersionError

TENSORS = (TensorInfo("a", "F32", (4, 4), 0, 64), TensorInfo("b", "U8", (10_000,), 64, 10_064))


def base64(n: int, fill: int = 1) -> str:
    return base64_text(bytes([fill]) * n)


def documents(version: str = "2") -> dict:
    """Parsed metadata of a file with "b" encrypted, under profile 1."""
    keys = {
        "enc": {"alg": "aes256gcm", "kid": "e", "kty": "oct"},
        "sign": {"alg": "ed25519", "kid": "s", "kty": "okp"},
        "version": version,
    }
    record = {"wrapped_key": base64(32), "key_iv": base64(12), "key_tag": base64(16)}
    if version == "2":
        keys["chunk_size"] = 4096
        record |= {"base_iv": base64(8)[:8] + base64(12)[8:], "tags": base64(48)}
    else:
        record |= {"iv": base64(12), "tag": base64(16)}
    size = 4096 if version == "2" else 2 << 20
    profile = {
        "profile": 1,
        "file_id": "ab" * 16,
        "model_id": "m",
        "release": 3,
        "shard": [1, 2],
        "created": "2026-01-02T03:04:05Z",
        "kcv": base64(16),
        "digest": {
            "alg": "sha256",
            "chunk_size": size,
            "tensors": {"a": base64(32), "b": base64(96 if version == "2" else 32)},
        },
    }
    return {
        env.CRYPTO_KEYS: keys,
        env.ENCRYPTION: {"b": record},
        env.POLICY: {"local": "l", "remote": "r"},
        env.PROFILE: profile,
    }


def header(docs: dict, **more: str) -> Header:
    metadata = {k: json.dumps(v) for k, v in docs.items()} | {env.SIGNATURE: base64(64)} | more
    raw = file_prefix(canonical_json(metadata, TENSORS))[8:]
    scanner = Scanner()
    scanner.feed(raw)
    scanner.finish()
    return parse(raw, 10_064)


def without_profile(docs: dict) -> dict:
    return {k: v for k, v in docs.items() if k != env.PROFILE}


@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("profile", [True, False])
def test_what_is_written_is_read(version, profile):
    docs = documents(version)
    found = env.parse(header(docs if profile else without_profile(docs)))
    assert (found.version, found.algorithm.name, found.enc.kid, found.sign.kid) == (version, "aes256gcm", "e", "s")
    assert found.chunk_size == (4096 if version == "2" else None)
    assert found.records.keys() == {"b"}
    assert len(found.records["b"].tags) == (48 if version == "2" else 16)
    assert found.policy == env.Policy("l", "r")
    assert found.signature == b"\1" * 64
    if profile:
        assert found.profile.file_id == b"\xab" * 16
        assert (found.profile.model_id, found.profile.release, found.profile.shard) == ("m", 3, (1, 2))
        assert len(found.profile.digests["b"]) == (96 if version == "2" else 32)
    else:
        assert found.profile is None
    again = header({k: json.loads(v) for k, v in env.metadata(found).items()})
    assert env.parse(again) == found


def change(docs: dict, path: str, value: object) -> None:
    at = docs
    *parents, last = path.split("/")
    for part in parents:
        at = at[part]
    if value is None:
        del at[last]
    else:
        at[last] = value


K, E, P, S = env.CRYPTO_KEYS, env.ENCRYPTION, env.POLICY, env.PROFILE
CASES = [
    (f"{K}/version", None, UnsupportedVersionError, "no version string"),
    (f"{K}/version", 2, UnsupportedVersionError, "no version string"),
    (f"{K}/version", "3", UnsupportedVersionError, "version '3'"),
    (f"{K}/chunk_size", 4095, FormatError, "chunk_size 4095"),
    (f"{K}/chunk_size", 2**40 + 1, FormatError, "chunk_size"),
    (f"{K}/chunk_size", "4096", FormatError, "chunk_size 4096 is not a whole number"),
    (f"{K}/chunk_size", 8192, FormatError, "tags of tensor 'b' has 48 bytes instead of 32"),
    (f"{K}/enc", None, FormatError, "no object 'enc'"),
    (f"{K}/enc", "x", FormatError, "no object 'enc'"),
    (f"{K}/enc/kid", None, FormatError, "enc has no usable kid"),
    (f"{K}/enc/kid", "a/b", FormatError, "enc has no usable kid"),
    (f"{K}/enc/kty", "okp", FormatError, "enc must have kty 'oct'"),
    (f"{K}/enc/alg", None, FormatError, "enc must have kty 'oct' and an alg"),
    (f"{K}/enc/alg", "des", UnsupportedVersionError, "algorithm 'des' is unknown"),
    (f"{K}/enc/jku", 5, FormatError, "enc has a jku that is not a string"),
    (f"{K}/enc/k", "AAAA", FormatError, "embeds private key material"),
    (f"{K}/sign", None, FormatError, "no object 'sign'"),
    (f"{K}/sign/alg", "rsa", UnsupportedVersionError, "signature algorithm 'rsa'"),
    (f"{K}/sign/kty", "oct", FormatError, "sign must have kty 'okp'"),
    (f"{K}/sign/d", "AAAA", FormatError, "embeds private key material"),
    (f"{E}/c", {}, FormatError, "no such tensor"),
    (f"{E}/b", [], FormatError, "its encryption record needs"),
    (f"{E}/b/tags", None, FormatError, "its encryption record needs"),
    (f"{E}/b/wrapped_key", base64(16), FormatError, "wrapped_key of tensor 'b' has 16 bytes instead of 32"),
    (f"{E}/b/key_iv", base64(16), FormatError, "key_iv of tensor 'b' has 16 bytes instead of 12"),
    (f"{E}/b/key_tag", base64(12), FormatError, "key_tag of tensor 'b' has 12 bytes instead of 16"),
    (f"{E}/b/base_iv", base64(8), FormatError, "base_iv of tensor 'b' has 8 bytes instead of 12"),
    (f"{E}/b/base_iv", base64(12, 255), FormatError, "chunk counter would overflow"),
    (f"{E}/b/tags", base64(32), FormatError, "tags of tensor 'b' has 32 bytes instead of 48"),
    (f"{E}/b/tags", base64(48)[:-1], FormatError, "is not base64"),
    (f"{P}/local", None, FormatError, "needs the texts local and remote"),
    (f"{P}/remote", 5, FormatError, "needs the texts local and remote"),
]
STRICT_CASES = [
    (f"{K}/chunk_size", None, FormatError, "chunk_size belongs to version 2"),
    (f"{K}/x", 1, FormatError, "unknown member 'x'"),
    (f"{K}/enc/x", 1, FormatError, "unknown member 'x'"),
    (f"{K}/enc/alg", "AES-256-GCM", UnsupportedVersionError, "is unknown"),
    (f"{K}/sign/alg", "EdDSA", UnsupportedVersionError, "is unknown"),
    (f"{K}/sign/kty", "OKP", FormatError, "sign must have kty"),
    (f"{E}/b/x", 1, FormatError, "unknown member 'x'"),
    (f"{P}/x", "y", FormatError, "unknown member 'x'"),
    (f"{S}/profile", 2, UnsupportedVersionError, "profile 2 is unknown"),
    (f"{S}/profile", True, UnsupportedVersionError, "profile True is unknown"),
    (f"{S}/x", 1, FormatError, "unknown member 'x'"),
    (f"{S}/kcv", None, FormatError, "lacks kcv"),
    (f"{S}/kcv", base64(15), FormatError, "kcv has 15 bytes instead of 16"),
    (f"{S}/file_id", "AB" * 16, FormatError, "file_id is not 32 lower-case hex digits"),
    (f"{S}/file_id", "ab" * 15, FormatError, "file_id is not 32"),
    (f"{S}/file_id", "ab" * 16 + "\n", FormatError, "file_id is not 32"),
    (f"{S}/model_id", 5, FormatError, "model_id is not a string"),
    (f"{S}/model_id", "", FormatError, "model_id must be 1 to 256"),
    (f"{S}/model_id", "a\nb", FormatError, "model_id must be 1 to 256"),
    (f"{S}/release", 2**53, FormatError, "release is not a whole number below"),
    (f"{S}/release", "1", FormatError, "release is not a whole number"),
    (f"{S}/release", True, FormatError, "release is not a whole number"),
    (f"{S}/created", "2026-01-02 03:04:05", FormatError, "created is not an RFC 3339 time"),
    (f"{S}/created", "2026-01-02T03:04:05+00:00", FormatError, "created is not an RFC 3339 time"),
    (f"{S}/created", "\u0662\u066026-01-02T03:04:05Z", FormatError, "created is not an RFC 3339 time"),
    (f"{S}/shard", [0, 1], FormatError, "shard 0 of 1 cannot be"),
    (f"{S}/shard", [3, 2], FormatError, "shard 3 of 2 cannot be"),
    (f"{S}/shard", [1], FormatError, "shard is not"),
    (f"{S}/shard", "1/2", FormatError, "shard is not"),
    (f"{S}/digest", [], FormatError, "digest needs exactly"),
    (f"{S}/digest/x", 1, FormatError, "digest needs exactly"),
    (f"{S}/digest/alg", "md5", UnsupportedVersionError, "digest algorithm 'md5'"),
    (f"{S}/digest/chunk_size", 8192, FormatError, "digest.chunk_size differs"),
    (f"{S}/digest/tensors", [], FormatError, "must name exactly the tensors"),
    (f"{S}/digest/tensors/a", None, FormatError, "must name exactly the tensors"),
    (f"{S}/digest/tensors/c", "", FormatError, "must name exactly the tensors"),
    (f"{S}/digest/tensors/a", base64(31), FormatError, "digest of tensor 'a' has 31 bytes instead of 32"),
    (f"{S}/digest/tensors/b", base64(32), FormatError, "digest of tensor 'b' has 32 bytes instead of 96"),
]


@pytest.mark.parametrize(("path", "value", "kind", "words"), CASES + STRICT_CASES)
def test_refused(path, value, kind, words):
    docs = documents()
    change(docs, path, value)
    with pytest.raises(kind) as caught:
        env.parse(header(docs))
    assert type(caught.value) is kind
    assert words in caught.value.message + str(caught.value)


@pytest.mark.parametrize(("path", "value", "kind", "words"), CASES)
def test_refused_in_legacy_files_too(path, value, kind, words):
    docs = without_profile(documents())
    change(docs, path, value)
    with pytest.raises(kind) as caught:
        env.parse(header(docs))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (f"{K}/enc/alg", "AES-256-GCM"),
        (f"{K}/sign/alg", "EdDSA"),
        (f"{K}/sign/kty", "OKP"),
        (f"{K}/x", 1),
        (f"{K}/enc/x", "1"),
        (f"{E}/b/x", 1),
        (f"{P}/x", "y"),
        (f"{K}/enc/jku", "file:///nowhere"),
    ],
)
def test_what_legacy_files_may_do(path, value):
    docs = without_profile(documents())
    change(docs, path, value)
    assert env.parse(header(docs)).algorithm.name == "aes256gcm"


def test_version_2_without_a_chunk_size_has_chunks_of_two_mebibytes():
    docs = without_profile(documents())
    del docs[K]["chunk_size"]
    docs[E]["b"]["tags"] = base64(16)
    assert env.parse(header(docs)).chunk_size == 2 << 20


def test_what_decides_about_chunks_is_the_size_not_the_version():
    docs = without_profile(documents())
    docs[K]["version"] = "1"
    assert env.parse(header(docs)).chunk_size == 4096


@pytest.mark.parametrize("missing", [K, E, P, env.SIGNATURE])
def test_one_part_missing(missing):
    whole = header(documents())
    part = replace(whole, metadata={k: v for k, v in whole.metadata.items() if k != missing})
    with pytest.raises(FormatError, match=f"{missing} is missing: stripped"):
        env.parse(part)
    assert env.is_encrypted(part)


def test_a_plain_header():
    plain = replace(header(documents()), metadata={"format": "pt", env.NOTICE: "x"})
    assert not env.is_encrypted(plain)
    with pytest.raises(NotEncryptedError):
        env.parse(plain)


@pytest.mark.parametrize("name", [K, E, P, S])
@pytest.mark.parametrize(
    "text", ["", "[]", "null", '"x"', "{", '{"a":1,"a":1}', "\ud800".encode("utf-8", "replace").decode()]
)
def test_metadata_that_are_no_objects(name, text):
    whole = header(documents())
    with pytest.raises(FormatError, match=name):
        env.parse(replace(whole, metadata=whole.metadata | {name: text}))


def test_more_members_than_tensors_can_have():
    whole = header(documents())
    flood = "{" + ",".join(f'"{i}":""' for i in range(2000)) + "}"
    for name in (K, E, P, S):
        with pytest.raises(FormatError, match=f"the {name} holds too many items"):
            env.parse(replace(whole, metadata=whole.metadata | {name: flood}))


@pytest.mark.parametrize(
    "text", ["A", "AA", "AAA", "AAA ", "AA=", "AB==", "A===", "AA==\n", "-_8=", "ä", 5, None, b"AAAA"]
)
def test_base64_is_canonical_or_refused(text):
    with pytest.raises(FormatError, match="the thing"):
        unbase64(text, None, "the thing")


def test_the_cases_start_from_something_right():
    docs = documents()
    before = copy.deepcopy(docs)
    assert env.parse(header(docs)).profile is not None
    assert docs == before


BASE64 = [b"", b"a", b"ab", b"abc", b"\xff" * 12, bytes(16), bytes(32), b"\xfe" * 48]
FAULTS = [
    "",
    "A",
    "=",
    "AA==",
    "AAA=",
    "AAAA",
    "AB==",
    "AAB=",
    "A===",
    "====",
    "=AAA",
    "A=AA",
    "AA=A",
    "AAAA====",
    "YWI=YQ==",
    "-_-_",
    "\u00e9AAA",
    "AAA\n",
]


@pytest.mark.parametrize("n", [0, 1, 2, 3, 12, 16, 32])
@pytest.mark.parametrize("even", [True, False])
def test_many_texts_are_decoded_as_one_is(n, even):
    """Together or one by one: the same bytes, the same refusals."""
    lengths = [n, n, n] if even else [n, n + 1, n]
    good = [base64_text(bytes([i]) * size) for i, size in enumerate(lengths)]
    names = ["a", "b", "c"]
    found = unbase64_all(dict(zip(names, good, strict=True)), lengths, "x")
    assert found == [unbase64(text, size, "x") for text, size in zip(good, lengths, strict=True)]
    spelled = [good[0][:-3] + last for last in ("B==", "AB=", "A==", "AA=", "AAA")]
    for at in range(3):
        for wrong in [
            *FAULTS,
            *map(base64_text, BASE64),
            *spelled,
            good[0] + "AAAA",
            good[0][4:],
            None,
            5,
            [],
            b"AAAA",
        ]:
            texts = dict(zip(names, [*good[:at], wrong, *good[at + 1 :]], strict=True))
            assert verdict(lambda t=texts: unbase64_all(t, lengths, "x")) == verdict(
                lambda t=texts: [
                    unbase64(text, size, f"x of tensor {name!r}")
                    for (name, text), size in zip(t.items(), lengths, strict=True)
                ]
            )


def verdict(decode: Callable[[], list[bytes]]) -> list[bytes] | str:
    try:
        return decode()
    except FormatError as e:
        return e.message


def test_texts_that_make_up_for_each_other_are_refused():
    """Joined they are as long as they should be; one by one they are not."""
    for texts in (["AAAAAA==", "AA=="], ["AAAA", "AAAAAAA="], ["YWJj", ""]):
        with pytest.raises(FormatError):
            unbase64_all(dict(zip("ab", texts, strict=True)), [2, 2], "x")
