"""Defects of the CryptoTensors metadata and of profile 1, signed by the publisher: only parsing can refuse them."""

from __future__ import annotations

import json
from collections.abc import Iterator

from .casebook import CHUNKED, MASTER, SIGNER, Case, Edit, chunked, signed_defect, text64, tiny
from .naive_json import b64, compact
from .naive_writer import Draft, draft_file, make_signer


def envelope() -> Iterator[Case]:
    yield from crypto_keys()
    yield from hints()
    yield from records()
    yield from tag_lengths()
    yield from policy()
    yield from profile()
    yield from digests()
    yield from inner_json()


def bad(name: str, comment: str, edit: Edit, attacks: str, expect: str = "FormatError", **options) -> Case:
    return signed_defect(f"envelope-{name}", expect, comment, edit, attacks=attacks, **options)


def keys_case(name: str, comment: str, attacks: str, expect: str = "FormatError", **members) -> Case:
    def edit(draft: Draft) -> None:
        for member, value in members.items():
            if value is None:
                draft.crypto_keys.pop(member, None)
            else:
                draft.crypto_keys[member] = value

    return bad(name, comment, edit, attacks, expect)


def crypto_keys() -> Iterator[Case]:
    unsupported = "UnsupportedVersionError"
    for label, value in (
        ("0", "0"),
        ("3", "3"),
        ("3x", "3x"),
        ("empty", ""),
        ("int", 2),
        ("2-0", "2.0"),
        ("space", "2 "),
    ):
        yield keys_case(f"version-{label}", f"version {value!r}", "a21", unsupported, version=value)
    yield keys_case("version-missing", "no version", "a21", unsupported, version=None)
    yield keys_case("v1-with-chunk-size", "version 1 with a chunk_size", "a21", version="1")
    yield keys_case("v2-without-chunk-size", "version 2 without a chunk_size", "a21", chunk_size=None)
    for label, value in (
        ("0", 0),
        ("1", 1),
        ("4095", 4095),
        ("string", "4096"),
        ("true", True),
        ("over-2-40", 2**40 + 1),
        ("list", [4096]),
    ):
        yield keys_case(f"chunk-size-{label}", f"chunk_size {value!r}", "a17", chunk_size=value)
    yield keys_case("keys-unknown-member", "an unknown member of __crypto_keys__", "a13", crit=["x"])
    yield keys_case("keys-no-enc", "no enc", "a28", enc=None)
    yield keys_case("keys-no-sign", "no sign", "a28", sign=None)
    yield keys_case("keys-enc-string", "enc is a string", "a28", enc="m-aes256")


def hint_case(name: str, comment: str, attacks: str, which: str, expect: str = "FormatError", **members) -> Case:
    def edit(draft: Draft) -> None:
        for member, value in members.items():
            if value is None:
                draft.crypto_keys[which].pop(member)
            else:
                draft.crypto_keys[which][member] = value

    return bad(f"{which}-{name}", comment, edit, attacks, expect)


def hints() -> Iterator[Case]:
    unsupported = "UnsupportedVersionError"
    for label, alg in (
        ("a256cbc", "A256CBC-HS512"),
        ("none", "none"),
        ("aes192", "aes192gcm"),
        ("rfc-name", "A256GCM"),
        ("hyphens", "AES-256-GCM"),
        ("empty", ""),
    ):
        yield hint_case(f"alg-{label}", f"enc.alg {alg!r}", "a27", "enc", unsupported, alg=alg)
    for label, alg in (
        ("hs256", "HS256"),
        ("none", "none"),
        ("case", "Ed25519"),
        ("eddsa", "EdDSA"),
        ("ed448", "ed448"),
    ):
        yield hint_case(f"alg-{label}", f"sign.alg {alg!r}", "a27", "sign", unsupported, alg=alg)
    for which, other in (("enc", "okp"), ("sign", "oct")):
        yield hint_case("alg-missing", f"{which} without alg", "a27", which, alg=None)
        yield hint_case("alg-number", f"{which}.alg is a number", "a27", which, alg=1)
        yield hint_case("kty-crossed", f"{which}.kty is {other}", "a27", which, kty=other)
        yield hint_case("kty-missing", f"{which} without kty", "a27", which, kty=None)
        yield hint_case("kid-missing", f"{which} without kid", "a28", which, kid=None)
        for label, kid in (
            ("empty", ""),
            ("slash", "../m-aes256"),
            ("control", "m\naes256"),
            ("long", "k" * 257),
            ("number", 5),
        ):
            shown = "257 characters" if label == "long" else repr(kid)
            yield hint_case(f"kid-{label}", f"{which}.kid: {shown}", "a28", which, kid=kid)
        yield hint_case("jku-list", f"{which}.jku is a list", "a26", which, jku=[])
    yield hint_case("kty-upper", "sign.kty in capitals", "a27", "sign", kty="OKP")
    yield hint_case("k-embedded", "the master key in the header", "a25", "enc", k=MASTER["k"])
    yield hint_case("d-embedded", "the signing key in the header", "a25", "sign", d=SIGNER["d"])
    yield hint_case("x-embedded", "a public key in the header", "a26", "sign", x=SIGNER["x"])
    yield hint_case("jwk-embedded", "a key offered as jwk", "a26", "sign", jwk={"x": make_signer("s-evil")["x"]})


def record_case(name: str, comment: str, attacks: str, edit: Edit, **options) -> Case:
    return bad(f"record-{name}", comment, lambda draft: edit(draft.encryption["v"]), attacks, **options)


def records() -> Iterator[Case]:
    for member in ("wrapped_key", "key_iv", "key_tag", "base_iv", "tags"):
        comment = f"a record without {member}"
        yield record_case(f"no-{member}", comment, "a40", lambda r, m=member: r.pop(m))
        comment = f"{member} is not base64"
        yield record_case(f"{member}-not-base64", comment, "a40", lambda r, m=member: r.update({m: "*" + r[m][1:]}))
    for length in (0, 8, 11, 13, 16):
        for member in ("key_iv", "base_iv"):
            edit = _resize(member, length)
            yield record_case(f"{member}-{length}", f"{member} of {length} bytes", "a41", edit)
    for length in (0, 4, 8, 12, 15, 17, 32):
        yield record_case(f"key_tag-{length}", f"key_tag of {length} bytes", "a40", _resize("key_tag", length))
    for length in (0, 16, 31, 33, 48):
        yield record_case(
            f"wrapped_key-{length}", f"wrapped_key of {length} bytes", "a40", _resize("wrapped_key", length)
        )
    yield record_case("unknown-member", "an unknown member of a record", "a13", lambda r: r.update(note="x"))
    yield record_case("v1-members", "a v1 record in a v2 file", "a21", _to_v1)
    yield record_case("v2-members", "a v2 record in a v1 file", "a21", _to_v2, version="1")
    yield record_case("url-base64", "the URL alphabet", "a40", lambda r: r.update(key_iv="-_-_-_-_-_-_-_-_"))
    yield record_case(
        "base64-no-padding", "base64 without padding", "a40", lambda r: r.update(tags=r["tags"].rstrip("="))
    )
    yield record_case(
        "base64-bits", "padding bits that are not zero", "a40", lambda r: r.update(tags=r["tags"][:21] + "B==")
    )
    yield record_case("base64-newline", "a line feed in base64", "a40", lambda r: r.update(tags=r["tags"] + "\n"))
    yield record_case("tags-number", "tags is a number", "a40", lambda r: r.update(tags=1))
    yield record_case("tags-list", "tags is a list", "a40", lambda r: r.update(tags=[r["tags"]]))
    yield bad("record-string", "a record is a string", lambda d: d.encryption.update(v="x"), "a13")
    yield bad(
        "record-stray",
        "a record for a tensor that is not there",
        lambda d: d.encryption.update(zz=d.encryption.pop("v")),
        "a20",
    )
    yield bad(
        "record-iv-twice",
        "one key_iv for two tensors",
        lambda d: d.encryption["v"].update(key_iv=d.encryption["w"]["key_iv"]),
        "a41",
    )
    yield bad(
        "record-twice", "one record for two tensors", lambda d: d.encryption.update(v=d.encryption["w"]), "a41 a43"
    )
    for length in (0, 8, 16):
        edit = _resize("iv", length)
        yield record_case(f"v1-iv-{length}", f"v1 iv of {length} bytes", "a41", edit, version="1")
    for length in (0, 12, 15, 17, 32):
        edit = _resize("tag", length)
        yield record_case(f"v1-tag-{length}", f"v1 tag of {length} bytes", "a40", edit, version="1")


def _resize(member: str, length: int) -> Edit:
    def edit(record) -> None:
        data = text64(record, member)
        record[member] = b64((data + bytes(64))[:length])

    return edit


def _to_v1(record: dict) -> None:
    record["iv"], record["tag"] = record.pop("base_iv"), record.pop("tags")


def _to_v2(record: dict) -> None:
    record["base_iv"], record["tags"] = record.pop("iv"), record.pop("tag")


def tag_lengths() -> Iterator[Case]:
    for label, change, attacks in (
        ("one-missing", lambda tags: tags[:16], "a45"),
        ("one-too-many", lambda tags: tags + bytes(16), "a40"),
        ("last-short", lambda tags: tags[:-1], "a40"),
        ("last-twice", lambda tags: tags + tags[16:], "a45"),
        ("none", lambda tags: b"", "a45"),
    ):
        draft = chunked(f"tags {label}")
        draft.encryption["w"]["tags"] = b64(change(text64(draft.encryption["w"], "tags")))
        comment = f"two chunks, tags: {label.replace('-', ' ')}"
        yield Case(f"envelope-tags-{label}", "FormatError", comment, draft.file(), attacks=attacks)
    draft = chunked("overflow")
    draft.encryption["w"]["base_iv"] = b64(bytes(8) + b"\xff" * 4)
    comment = "the counter of the second chunk would overflow"
    yield Case("envelope-counter-overflow", "FormatError", comment, draft.file(), attacks="a41")
    for version, members in (("1", {"iv": b64(bytes(12)), "tag": b64(bytes(16))}), ("2", {"tags": ""})):
        empty = {"e": ("U8", [0], b""), "x": CHUNKED["x"]}
        draft = draft_file(empty, MASTER, SIGNER, seed=f"empty {version}", version=version, encrypt=["e", "x"])
        draft.encryption["e"] |= members
        comment = f"an empty tensor has {'no tag' if version == '1' else 'one tag'} in version {version}"
        yield Case(f"envelope-empty-tags-v{version}", "FormatError", comment, draft.file(), attacks="a40")


def policy() -> Iterator[Case]:
    for member in ("local", "remote"):
        yield bad(f"policy-no-{member}", f"no {member} policy", lambda d, m=member: d.policy.pop(m), "a23")
        yield bad(f"policy-{member}-null", f"{member} is null", lambda d, m=member: d.policy.update({m: None}), "a23")
    yield bad("policy-unknown-member", "an unknown member of __policy__", lambda d: d.policy.update(extra="x"), "a13")
    for label, rego in (
        ("deny", "package model\ndefault allow = false"),
        ("empty", ""),
        ("other-package", "package other\nallow = true"),
        ("string-true", 'package model\nallow = "true"'),
        ("undefined", "package model\nallowed = true"),
        ("syntax", "package model\nallow = = true"),
        ("conflict", "package model\nallow = true\nallow = false"),
        ("send", 'package model\nallow { http.send({"method":"get","url":"https://keys.invalid"}) }'),
    ):
        comment = f"local policy: {label.replace('-', ' ')}"
        yield bad(
            f"policy-rego-{label}", comment, lambda d, r=rego: d.policy.update(local=r), "a51", "PolicyDeniedError"
        )


def profile_case(name: str, comment: str, attacks: str, expect: str = "FormatError", **members) -> Case:
    def edit(draft: Draft) -> None:
        for member, value in members.items():
            if value is None:
                del draft.profile[member]
            else:
                draft.profile[member] = value

    return bad(f"profile-{name}", comment, edit, attacks, expect)


def profile() -> Iterator[Case]:
    unsupported = "UnsupportedVersionError"
    for label, value in (("0", 0), ("2", 2), ("string", "1"), ("true", True), ("list", [1])):
        yield profile_case(f"number-{label}", f"profile {value!r}", "a21", unsupported, profile=value)
    yield profile_case("number-missing", "no profile number", "a21", unsupported, profile=None)
    for member in ("file_id", "model_id", "release", "shard", "created", "kcv", "digest"):
        yield profile_case(f"no-{member}", f"no {member}", "a22", **{member: None})
    yield profile_case("unknown-member", "an unknown member", "a13", crit=["x"])
    for member, values in {
        "file_id": {"upper": "A" * 32, "short": "0" * 31, "long": "0" * 33, "not-hex": "g" * 32, "number": 5},
        "model_id": {"empty": "", "long": "m" * 257, "control": "acme\x00tiny", "del": "acme\x7f", "number": 5},
        "release": {"negative": -1, "string": "3", "2-53": 2**53, "float": 3.0, "true": True},
        "shard": {"zero": [0, 1], "over": [2, 1], "one": [1], "three": [1, 1, 1], "string": "1/1", "true": [True, 1]},
        "created": {
            "no-zone": "2026-01-02T03:04:05",
            "offset": "2026-01-02T03:04:05+00:00",
            "fraction": "2026-01-02T03:04:05.5Z",
            "date": "2026-01-02",
            "lower": "2026-01-02t03:04:05z",
            "other-digits": "٢٠٢٦-01-02T03:04:05Z",
            "newline": "2026-01-02T03:04:05Z\n",
            "number": 1767323045,
        },
        "kcv": {"short": b64(bytes(15)), "long": b64(bytes(32)), "empty": "", "hex": "0" * 32, "number": 0},
    }.items():
        for label, value in values.items():
            shown = f"{len(value)} characters" if isinstance(value, str) and len(value) > 40 else compact(value)
            yield profile_case(f"{member}-{label}", f"{member}: {shown}", "a22", **{member: value})


def digest_case(name: str, comment: str, edit: Edit, expect: str = "FormatError") -> Case:
    return bad(f"digest-{name}", comment, lambda draft: edit(draft.profile["digest"]), "a20", expect)


def digests() -> Iterator[Case]:
    for member in ("chunk_size", "tensors"):
        yield digest_case(f"no-{member}", f"digest without {member}", lambda d, m=member: d.pop(m))
    yield digest_case("alg", "digest.alg sha1", lambda d: d.update(alg="sha1"), "UnsupportedVersionError")
    yield digest_case("alg-case", "digest.alg SHA256", lambda d: d.update(alg="SHA256"), "UnsupportedVersionError")
    yield digest_case("unknown-member", "an unknown member of digest", lambda d: d.update(note="x"))
    yield digest_case("chunk-size", "digest.chunk_size is not the file's", lambda d: d.update(chunk_size=8192))
    yield digest_case("chunk-size-string", "digest.chunk_size is a string", lambda d: d.update(chunk_size="4096"))
    yield digest_case("clear-left-out", "no digest for the clear tensor", lambda d: d["tensors"].pop("c"))
    yield digest_case("encrypted-left-out", "no digest for an encrypted tensor", lambda d: d["tensors"].pop("v"))
    yield digest_case("stray", "a digest for a tensor that is not there", lambda d: d["tensors"].update(zz=""))
    yield digest_case("empty", "an empty digest for a tensor that is not", lambda d: d["tensors"].update(c=""))
    yield digest_case("short", "31 bytes of digest", lambda d: d["tensors"].update(c=b64(bytes(31))))
    yield digest_case("two", "two digests for one chunk", lambda d: d["tensors"].update(c=b64(bytes(64))))
    yield digest_case("hex", "hexadecimal digest", lambda d: d["tensors"].update(c="0" * 64))
    yield digest_case("list", "tensors is a list", lambda d: d.update(tensors=[]))


def inner_json() -> Iterator[Case]:
    """Defects of the JSON inside metadata strings."""
    for key in ("__crypto_keys__", "__encryption__", "__policy__", "__secure_loader__"):
        short = key.strip("_").replace("_", "-")
        for label, comment, change in (
            ("list", "a list", lambda text: "[]"),
            ("empty", "an empty string", lambda text: ""),
            ("cut", "cut short", lambda text: text[:-1]),
            ("trailing", "followed by a brace", lambda text: text + "}"),
            ("deep", "nested 17 deep", lambda text: text[:-1] + ',"z":' + "[" * 16 + "]" * 16 + "}"),
            ("float", "holding a number with a fraction", lambda text: text[:-1] + ',"z":1.5}'),
            ("surrogate", "holding a lone surrogate", lambda text: text[:-1] + ',"z":"\\ud800"}'),
            ("duplicate", "its first member twice", _double),
        ):
            yield _text_case(f"envelope-{short}-{label}", "FormatError", f"{key}: {comment}", key, change, "a04")
        yield _text_case(
            f"envelope-{short}-spaced", "SignatureError", f"{key}: a space", key, lambda t: "{ " + t[1:], "a12"
        )
        yield _text_case(
            f"envelope-{short}-escaped", "SignatureError", f"{key}: an escape too many", key, _escape, "a12"
        )
        if key != "__encryption__":
            yield _text_case(
                f"envelope-{short}-unsorted", "SignatureError", f"{key}: members not sorted", key, _turn, "a12"
            )
    draft = tiny("records unsorted")
    turned = compact(dict(sorted(draft.encryption.items(), reverse=True)))
    data = draft.file(draft.metadata() | {"__encryption__": turned})
    yield Case("envelope-encryption-unsorted", "SignatureError", "records not sorted by name", data, attacks="a12")
    records = {n: dict(sorted(r.items())) for n, r in sorted(draft.encryption.items())}
    data = draft.file(draft.metadata() | {"__encryption__": compact(records)})
    yield Case("envelope-record-order", "SignatureError", "members of a record in another order", data, attacks="a12")
    record = compact(draft.encryption["v"])
    twice = compact(dict(sorted(draft.encryption.items()))).replace(record, record[:-1] + "," + record[1:])
    data = draft.file(draft.metadata() | {"__encryption__": twice})
    yield Case("envelope-record-duplicate", "FormatError", "the members of a record twice", data, attacks="a04")
    bom = draft.metadata()
    data = draft.file(bom | {"__policy__": "\ufeff" + bom["__policy__"]})
    yield Case("envelope-policy-bom", "FormatError", "a byte order mark in a metadata string", data, attacks="a11")
    draft = tiny("reserved", metadata={"__other__": "x"})
    yield Case(
        "envelope-reserved-unknown", "FormatError", "an unknown reserved metadata name", draft.file(), attacks="a21"
    )


def _text_case(name: str, expect: str, comment: str, key: str, change, attacks: str) -> Case:
    draft = tiny(name)
    meta = draft.metadata()
    return Case(name, expect, comment, draft.file(meta | {key: change(meta[key])}), attacks=attacks)


def _double(text: str) -> str:
    name, value = next(iter(json.loads(text).items()))
    return text[:-1] + "," + compact({name: value})[1:]


def _turn(text: str) -> str:
    return compact(dict(reversed(json.loads(text).items())))


def _escape(text: str) -> str:
    """The first letter of the first member's name as an escape: the same value, spelt otherwise."""
    return f'{{"\\u{ord(text[2]):04x}{text[3:]}'
