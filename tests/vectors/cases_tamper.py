"""Files changed after signing, and files signed by, or opened with, the wrong key."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from .casebook import MASTER, MASTERS, SECOND, SIGNER, STRANGER, TINY, TRUST, Case, chunked, flip, text64, tiny
from .naive import cipher
from .naive_json import b64, compact
from .naive_writer import Draft, assemble, draft_file, seal, sign
from .naive_writer import Stream as Bytes

SIGNATURE = "SignatureError"


def tamper() -> Iterator[Case]:
    yield from canonical()
    yield from stripped()
    yield from rewritten()
    yield from signers()
    yield from masters()
    yield from payload()
    yield from insiders()


def case(name: str, expect: str, comment: str, data: bytes, attacks: str, **more) -> Case:
    return Case(f"tamper-{name}", expect, comment, data, attacks=attacks, **more)


def canonical() -> Iterator[Case]:
    """The same meaning in other bytes."""
    draft = tiny("canonical")
    text, body = draft.text(), bytes(draft.body)
    doc = json.loads(text)
    spaced = json.dumps(doc, ensure_ascii=False).encode()
    yield case("header-spaced", SIGNATURE, "white space inside the header", assemble(spaced, body), "a12")
    turned = compact(dict(reversed(doc.items()))).encode()
    yield case("header-reversed", SIGNATURE, "tensors in another order", assemble(turned, body), "a12")
    last = compact({k: doc[k] for k in doc if k != "__metadata__"} | {"__metadata__": doc["__metadata__"]}).encode()
    yield case("metadata-last", SIGNATURE, "__metadata__ at the end", assemble(last, body), "a12")
    meta = compact(doc | {"__metadata__": dict(reversed(doc["__metadata__"].items()))}).encode()
    yield case("metadata-unsorted", SIGNATURE, "metadata keys not sorted", assemble(meta, body), "a12")
    entry = doc | {"c": dict(reversed(doc["c"].items()))}
    yield case(
        "entry-unsorted",
        SIGNATURE,
        "members of an entry in another order",
        assemble(compact(entry).encode(), body),
        "a12",
    )
    escaped = text.replace(b'"c":{', b'"\\u0063":{')
    yield case("name-escaped", SIGNATURE, "a tensor name with an escape too many", assemble(escaped, body), "a12")
    slash = text.replace(b'"pt"', b'"\\u0070t"')
    yield case("value-escaped", SIGNATURE, "a metadata value with an escape too many", assemble(slash, body), "a12")
    resigned = tiny("canonical", metadata={"format": "ü"})
    text_u = resigned.text().replace("ü".encode(), b"\\u00fc")
    comment = "non-ASCII escaped: what json.dumps does when nobody tells it otherwise"
    yield case("non-ascii-escaped", SIGNATURE, comment, assemble(text_u, bytes(resigned.body)), "a12")
    for align, label in ((None, "none"), (8, "8")):
        comment = f"padding: {label}"
        yield case(f"padding-{label}", SIGNATURE, comment, assemble(text, body, align), "a11")
    more = assemble(text, b"")[8:] + b" " * 4096
    yield case("padding-page-more", SIGNATURE, "a page of padding too many", assemble(more, body, None), "a11")
    one = assemble(text, b"")[8:] + b" "
    yield case("padding-one-more", SIGNATURE, "one space too many", assemble(one, body, None), "a11")
    few = {"e1": ("F32", [0], b""), "e2": ("F32", [0], b""), "w": ("F32", [1], b"abcd")}
    tied = draft_file(few, MASTER, SIGNER, seed="tied", order=["e2", "e1", "w"])
    comment = "empty tensors at one offset not in the order of their names, signed so"
    yield case("ties-unsorted", SIGNATURE, comment, tied.file(), "a12")


def stripped() -> Iterator[Case]:
    """Metadata removed after signing."""
    draft = tiny("stripped")
    signed, body = draft.signed(), bytes(draft.body)
    for key in ("__crypto_keys__", "__encryption__", "__policy__", "__signature__"):
        rest = {k: v for k, v in signed.items() if k != key}
        data = assemble(compact({"__metadata__": rest} | draft.entries).encode(), body)
        yield case(f"without-{key.strip('_').replace('_', '-')}", "FormatError", f"{key} removed", data, "a19")
        name = f"only-{key.strip('_').replace('_', '-')}"
        data = assemble(compact({"__metadata__": {key: signed[key]}} | draft.entries).encode(), body)
        yield case(name, "FormatError", f"everything but {key} removed", data, "a19")
    rest = {k: v for k, v in signed.items() if k != "__secure_loader__"}
    data = assemble(compact({"__metadata__": rest} | draft.entries).encode(), body)
    yield case("without-profile", "NotEncryptedError", "profile 1 removed, profile 1 required", data, "a22")
    allow = "legacy unverified-clear"
    yield case("without-profile-legacy", SIGNATURE, "profile 1 removed, legacy allowed", data, "a22", allow=allow)
    only = {"__secure_loader__": signed["__secure_loader__"]}
    data = assemble(compact({"__metadata__": only} | draft.entries).encode(), body)
    yield case("only-profile", "FormatError", "everything but profile 1 removed", data, "a19")
    plain = b"".join(TINY[name][2] for name in draft.entries)
    for allowed, label in (("", "stripped-all"), (allow, "stripped-all-legacy")):
        data = assemble(compact({"__metadata__": {"format": "pt"}} | draft.entries).encode(), plain)
        comment = "all cryptographic metadata removed, the attacker's plaintext put in"
        yield case(label, "NotEncryptedError", comment, data, "a18", allow=allowed)
    for key in ("format", "__notice__"):
        rest = {k: v for k, v in signed.items() if k != key}
        data = assemble(compact({"__metadata__": rest} | draft.entries).encode(), body)
        yield case(f"without-{key.strip('_')}", SIGNATURE, f"{key} removed", data, "a20")
    data = assemble(
        compact({"__metadata__": dict(sorted((signed | {"added": "x"}).items()))} | draft.entries).encode(), body
    )
    yield case("metadata-added", SIGNATURE, "a metadata string added", data, "a20")


def after(name: str, comment: str, edit: Callable[[Draft], object], attacks: str) -> Case:
    """Change a draft, but keep the signature that it had before."""
    draft = tiny("after")
    signature = draft.signed()["__signature__"]
    edit(draft)
    meta = dict(sorted((draft.metadata() | {"__signature__": signature}).items()))
    data = assemble(compact({"__metadata__": meta} | draft.entries).encode(), bytes(draft.body))
    return case(name, SIGNATURE, comment, data, attacks)


def swap(left: dict, right: dict, *names: str) -> None:
    for name in names:
        left[name], right[name] = right[name], left[name]


def drop_record(draft: Draft) -> None:
    del draft.encryption["v"]


def rename(draft: Draft) -> None:
    """Exchange the names of the encrypted tensors: record, digest and bytes stay where they are."""
    e = draft.entries
    draft.entries = {{"v": "w", "w": "v"}.get(name, name): entry for name, entry in e.items()}
    draft.encryption = {{"v": "w", "w": "v"}[name]: record for name, record in draft.encryption.items()}
    draft.digests()


def rewritten() -> Iterator[Case]:
    """Values changed after signing; canonical form kept."""
    wrapped = ("wrapped_key", "key_iv", "key_tag")
    yield after("record-dropped", "a tensor left out of __encryption__", drop_record, "a20")
    comment = "the wrapped keys of two tensors exchanged"
    yield after("wrapped-keys-swapped", comment, lambda d: swap(d.encryption["v"], d.encryption["w"], *wrapped), "a43")
    yield after("names-swapped", "the names of two tensors exchanged", rename, "a43")
    yield after("shape-changed", "a shape transposed", lambda d: d.entries["v"].update(shape=[3, 2]), "a20")
    yield after("dtype-changed", "F32 becomes I32", lambda d: d.entries["v"].update(dtype="I32"), "a20")
    yield after("clear-dtype-changed", "U8 becomes I8", lambda d: d.entries["c"].update(dtype="I8"), "a20")
    yield after("version-1", "version changed to 1", _as_v1, "a22")
    yield after("kid-changed", "another enc.kid", lambda d: d.crypto_keys["enc"].update(kid="m-aes128"), "a28")
    yield after("jku-added", "a jku added", lambda d: d.crypto_keys["sign"].update(jku="https://keys.invalid/x"), "a26")
    yield after("chunk-size-changed", "another chunk_size, digests likewise", _chunk_size, "a22")
    yield after(
        "alg-changed",
        "chacha20poly1305 instead of aes256gcm",
        lambda d: d.crypto_keys["enc"].update(alg="chacha20poly1305"),
        "a27",
    )
    yield after(
        "policy-changed",
        "another policy that allows",
        lambda d: d.policy.update(local="package model\nallow := true"),
        "a23",
    )
    yield after("policy-remote-emptied", "the remote policy emptied", lambda d: d.policy.update(remote=""), "a23")
    yield after("release-raised", "another release", lambda d: d.profile.update(release=4), "a22")
    yield after("model-changed", "another model_id", lambda d: d.profile.update(model_id="acme/large"), "a22")
    yield after("shard-changed", "another shard", lambda d: d.profile.update(shard=[1, 2]), "a22")
    yield after("file-id-changed", "another file_id", lambda d: d.profile.update(file_id="0" * 32), "a22")
    yield after("kcv-changed", "another kcv", lambda d: d.profile.update(kcv=b64(bytes(16))), "a35")
    yield after("created-changed", "another time", lambda d: d.profile.update(created="2027-01-01T00:00:00Z"), "a22")
    yield after("clear-and-digest", "a clear tensor altered, and its digest with it", _clear_and_digest, "a20")
    for member in ("wrapped_key", "key_iv", "key_tag", "base_iv", "tags"):
        comment = f"a bit of {member} flipped"
        yield after(f"bit-{member}", comment, lambda d, m=member: _flip_member(d, m), "a39")
    draft = tiny("after")
    meta = draft.signed()
    for label, value in (("zero", b64(bytes(64))), ("flipped", b64(flip(text64(meta, "__signature__"), 0)))):
        data = assemble(
            compact({"__metadata__": meta | {"__signature__": value}} | draft.entries).encode(), bytes(draft.body)
        )
        yield case(f"signature-{label}", SIGNATURE, f"signature {label}", data, "a23")
    for length in (0, 63, 65):
        value = b64((text64(meta, "__signature__") + b"\0")[:length])
        data = assemble(
            compact({"__metadata__": meta | {"__signature__": value}} | draft.entries).encode(), bytes(draft.body)
        )
        yield case(f"signature-{length}", "FormatError", f"a signature of {length} bytes", data, "a40")
    other = tiny("another file")
    borrowed = meta | {"__signature__": other.signed()["__signature__"]}
    data = assemble(compact({"__metadata__": borrowed} | draft.entries).encode(), bytes(draft.body))
    yield case("signature-of-another", SIGNATURE, "the signature of another file of the publisher", data, "a43")
    # S + L: the same signature to a verifier that does not reduce; RFC 8032 demands S < L.
    raw = text64(meta, "__signature__")
    high = int.from_bytes(raw[32:], "little") + 2**252 + 27742317777372353535851937790883648493
    value = b64(raw[:32] + high.to_bytes(32, "little"))
    data = assemble(
        compact({"__metadata__": meta | {"__signature__": value}} | draft.entries).encode(), bytes(draft.body)
    )
    yield case("signature-malleable", SIGNATURE, "S is not reduced (RFC 8032, 5.1.7)", data, "a23")
    message = compact({"__metadata__": draft.metadata()} | draft.entries).encode()
    value = b64(sign(SIGNER, assemble(message, b"")))
    data = assemble(
        compact({"__metadata__": meta | {"__signature__": value}} | draft.entries).encode(), bytes(draft.body)
    )
    yield case("signature-over-padding", SIGNATURE, "length and padding are not part of what is signed", data, "a11")


def _as_v1(draft: Draft) -> None:
    draft.crypto_keys["version"] = "1"
    del draft.crypto_keys["chunk_size"]
    for record in draft.encryption.values():
        record["iv"], record["tag"] = record.pop("base_iv"), record.pop("tags")
    draft.profile["digest"]["chunk_size"] = 2097152


def _chunk_size(draft: Draft) -> None:
    draft.crypto_keys["chunk_size"] = draft.profile["digest"]["chunk_size"] = 8192


def _clear_and_digest(draft: Draft) -> None:
    begin, _ = draft.entries["c"]["data_offsets"]
    draft.body[begin] ^= 1
    draft.digests()


def _flip_member(draft: Draft, member: str) -> None:
    record = draft.encryption["v"]
    record[member] = b64(flip(text64(record, member), 0))


def signers() -> Iterator[Case]:
    untrusted = "UntrustedSignerError"
    yield case("stranger", untrusted, "signed by a key that is not trusted", tiny("s", signer=STRANGER).file(), "a26")
    posing = STRANGER | {"kid": SIGNER["kid"]}
    yield case(
        "imposter",
        SIGNATURE,
        "signed by a stranger under the publisher's kid",
        tiny("s", signer=posing).file(),
        "a26 a28",
    )
    data = tiny("s", signer=SECOND).file()
    yield case(
        "second-signer", "success", "another trusted signer", data, "a26", tensors=TINY, cryptotensors="other-keys"
    )
    draft = tiny("s")
    comment = "two different trusted keys of one kid: neither counts"
    both = f"{TRUST} keys/trusted-imposter.json"
    yield case("two-signers", untrusted, comment, draft.file(), "a28", trust=both)
    draft = tiny("s", signer=STRANGER)
    draft.crypto_keys["sign"]["jku"] = "file:///proc/self/cwd/keys/signers-private.json"
    yield case("jku-of-stranger", untrusted, "a stranger's jku names the stranger's key", draft.file(), "a26")


def masters() -> Iterator[Case]:
    data = tiny("m").file()
    key = "KeyAccessError"
    yield case("key-missing", key, "no master key of that kid", data, "a35", keys="keys/masters-other.json")
    yield case(
        "key-wrong", key, "the key of that kid is another: kcv differs", data, "a35", keys="keys/masters-wrong.json"
    )
    yield case(
        "key-short", key, "the key of that kid is for another algorithm", data, "a27", keys="keys/masters-128.json"
    )
    both = "keys/masters.json keys/masters-wrong.json"
    yield case("key-ambiguous", key, "two different keys of one kid", data, "a28", keys=both)
    old = tiny("m", profile=False, encrypt=list(TINY)).file()
    comment = "no kcv in plain CryptoTensors: the wrapped keys do not open"
    yield case("key-wrong-legacy", key, comment, old, "a35", keys="keys/masters-wrong.json", allow="legacy")
    draft = tiny("m")
    draft.profile["kcv"] = b64(flip(text64(draft.profile, "kcv"), 15))
    yield case("kcv-signed-wrong", key, "a wrong kcv, signed", draft.file(), "a35")
    draft = tiny("m")
    draft.crypto_keys["enc"]["kid"] = MASTERS["chacha20poly1305"]["kid"]
    yield case("kid-of-other-alg", key, "enc.kid names a key for another algorithm", draft.file(), "a27")
    draft = tiny("m")
    record = draft.encryption["v"]
    record["key_tag"] = b64(flip(text64(record, "key_tag"), 0))
    yield case("wrapped-key-signed-wrong", key, "a wrapped key that does not open, signed", draft.file(), "a39")


def body_case(
    name: str, comment: str, attacks: str, change: Callable[[Draft, bytearray], object], draft: Draft
) -> Case:
    """Bytes of the body changed after signing."""
    head = draft.file()[: -len(draft.body)]
    body = bytearray(draft.body)
    change(draft, body)
    return case(name, "AuthenticationError", comment, head + bytes(body), attacks)


def flip_at(tensor: str, at: int) -> Callable[[Draft, bytearray], None]:
    def change(draft: Draft, body: bytearray) -> None:
        begin, end = draft.entries[tensor]["data_offsets"]
        body[begin + at if at >= 0 else end + at] ^= 0x80

    return change


def payload() -> Iterator[Case]:
    yield body_case("body-first-bit", "the first byte of an encrypted tensor", "a39", flip_at("v", 0), tiny("p"))
    yield body_case("body-last-bit", "the last byte of an encrypted tensor", "a39", flip_at("w", -1), tiny("p"))
    yield body_case("body-clear", "a clear tensor", "a20", flip_at("c", 2), tiny("p"))
    for alg in ("aes128gcm", "chacha20poly1305"):
        draft = tiny("p", master=MASTERS[alg])
        yield body_case(f"body-{alg}", f"an encrypted tensor, {alg}", "a39", flip_at("v", 3), draft)
    yield body_case("body-v1", "an encrypted tensor, version 1", "a39", flip_at("v", 3), tiny("p", version="1"))
    yield body_case("chunk-first", "the first chunk", "a39", flip_at("w", 0), chunked("p"))
    yield body_case("chunk-last", "the short last chunk", "a39", flip_at("w", -1), chunked("p"))
    clear = chunked("p", encrypt=["x"])
    yield body_case("clear-chunk-last", "the last piece of a clear tensor", "a20", flip_at("w", -1), clear)

    def exchange(draft: Draft, body: bytearray) -> None:
        (a, b), (c, d) = (draft.entries[name]["data_offsets"] for name in ("v", "w"))
        body[a:b], body[c:d] = body[c:d], body[a:b]

    def zero(draft: Draft, body: bytearray) -> None:
        body[:] = bytes(len(body))

    yield body_case("ciphertexts-swapped", "the ciphertexts of two tensors exchanged", "a43", exchange, tiny("p"))
    yield body_case("body-zero", "a body of zeros", "a39", zero, tiny("p"))

    def rotate(draft: Draft, body: bytearray) -> None:
        # Chunks of 4096 and 4 bytes cannot change places; the tail moved to the front is the same attack.
        begin, end = draft.entries["w"]["data_offsets"]
        body[begin:end] = body[begin + 4096 : end] + body[begin : begin + 4096]

    yield body_case("chunks-rotated", "the last chunk moved to the front", "a43", rotate, chunked("p"))
    other = tiny("another release")

    def borrow(draft: Draft, body: bytearray) -> None:
        body[:] = other.body

    yield body_case("body-of-another", "the body of another file of the same model", "a43", borrow, tiny("p"))
    legacy = tiny("p", profile=False, encrypt=list(TINY))
    found = body_case("body-legacy", "an encrypted tensor of plain CryptoTensors", "a39", flip_at("c", 0), legacy)
    found.allow = "legacy"
    yield found


def insiders() -> Iterator[Case]:
    """What a holder of keys can do: change bytes and keep the tags, or keep the digests and change the tags."""
    draft = tiny("i")
    record = draft.encryption["v"]
    record["tags"] = b64(flip(text64(record, "tags"), 0))
    comment = "a wrong tag, signed: the digest of the stored bytes is right all the same"
    yield case("tag-signed-wrong", "AuthenticationError", comment, draft.file(), "a39")
    draft = tiny("i")
    draft.profile["digest"]["tensors"]["c"] = b64(bytes(32))
    yield case(
        "digest-clear-wrong", "AuthenticationError", "a wrong digest of a clear tensor, signed", draft.file(), "a20"
    )
    draft = tiny("i")
    draft.profile["digest"]["tensors"]["v"] = b64(bytes(32))
    comment = "a wrong digest of an encrypted tensor, signed"
    yield case("digest-encrypted-wrong", "AuthenticationError", comment, draft.file(), "a47", integrity="full")
    draft = tiny("i")
    head = draft.file()[: -len(draft.body)]
    forge(draft, "v")
    comment = "a key holder changed ciphertext so that the tag stays: only the digest shows it"
    yield case("same-tag", "AuthenticationError", comment, head + bytes(draft.body), "a47", integrity="full")
    draft = tiny("i")
    seal(draft, "v", bytes(24), Bytes("resealed"), 4096)
    meta = draft.metadata() | {"__signature__": tiny("i").signed()["__signature__"]}
    text = compact({"__metadata__": dict(sorted(meta.items()))} | draft.entries).encode()
    comment = "a key holder sealed a tensor anew, with a record that fits"
    yield case("resealed", SIGNATURE, comment, assemble(text, bytes(draft.body)), "a43")


def gf_multiply(x: int, y: int) -> int:
    """Product in the field of GHASH (SP 800-38D, 6.3)."""
    z = 0
    for i in range(127, -1, -1):
        if x >> i & 1:
            z ^= y
        y = y >> 1 ^ (0xE1 << 120 if y & 1 else 0)
    return z


def forge(draft: Draft, name: str) -> None:
    """Change the ciphertext of a tensor of two blocks so that its GCM tag stays: GHASH is linear.

    Block 1 enters the hash times H^3, the second (padded) times H^2. A change d of the first is made good by d*H in
    the second, where the padding has to stay zero: so d = e/H for an e of the 8 bytes that the second block has.
    """
    h = int.from_bytes(cipher_block(draft.deks[name]), "big")
    e = int.from_bytes(bytes(7) + b"\x01" + bytes(8), "big")
    inverse = 1 << 127
    power = h
    for _ in range(127):  # h^(2^128 - 2)
        power = gf_multiply(power, power)
        inverse = gf_multiply(inverse, power)
    d = gf_multiply(e, inverse)
    begin, end = draft.entries[name]["data_offsets"]
    change = d.to_bytes(16, "big") + e.to_bytes(16, "big")[:8]
    draft.body[begin:end] = bytes(a ^ b for a, b in zip(draft.body[begin:end], change, strict=True))
    tag = text64(draft.encryption[name], "tags")
    nonce = text64(draft.encryption[name], "base_iv")
    cipher("aes256gcm", draft.deks[name]).decrypt(nonce, bytes(draft.body[begin:end]) + tag, None)


def cipher_block(key: bytes) -> bytes:
    """H: the zero block under AES."""
    return Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(bytes(16))
