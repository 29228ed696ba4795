"""Certificates and post-quantum signatures (B.6, B.7), in files and in manifests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .casebook import OTHER_QUANTUM, QUANTUM, SECOND, SIGNER, STRANGER, TINY, TRUST, Case, Edit, signed_defect, tiny
from .cases_folder import IDENTITY, case
from .naive_folder import MANIFEST, manifest_payload, sign_manifest, sign_twice
from .naive_json import b64, b64url, compact
from .naive_writer import Draft, assemble

DEMANDED = "keys/trusted-quantum.json"
FORMAT, UNTRUSTED, SIGNATURE = "FormatError", "UntrustedSignerError", "SignatureError"
# Whoever trusts a key by its kid does not look at these, so that no real ones are needed.
CHAIN = [b64(b"a certificate, as far as its form goes"), b64(b"another one")]
BAD_CHAINS = {
    "empty": [],
    "text": CHAIN[0],
    "eleven": CHAIN[:1] * 11,
    "url-alphabet": ["-_-_"],
    "unpadded": [b64(b"four").rstrip("=")],
    "spaced": [" " + CHAIN[0]],
    "number": [1],
    "empty-certificate": [CHAIN[0], ""],
    "null": None,
}


def signers() -> Iterator[Case]:
    yield from chains()
    yield from seconds()
    yield from manifests()


def member(value) -> Edit:
    return lambda draft: draft.crypto_keys["sign"].update(x5c=value)


def chains() -> Iterator[Case]:
    draft = tiny("x5c")
    member(CHAIN)(draft)
    comment = "a chain beside a kid that is trusted: not looked at"
    yield Case("signers-x5c", "success", comment, draft.file(), TINY, attacks="a26")
    draft = tiny("x5c largest")
    member([b64(bytes(65536))])(draft)
    yield Case("signers-x5c-largest", "success", "65,536 bytes of certificates", draft.file(), TINY)
    for name, value in BAD_CHAINS.items():
        yield signed_defect(f"signers-x5c-{name}", FORMAT, f"x5c: {name}", member(value), attacks="a26")
    too_long = member([b64(bytes(65536)), b64(b"x")])
    yield signed_defect("signers-x5c-too-long", FORMAT, "65,537 bytes of certificates", too_long, attacks="a26")

    def in_enc(draft: Draft) -> None:
        draft.crypto_keys["enc"]["x5c"] = CHAIN

    yield signed_defect("signers-x5c-in-enc", FORMAT, "certificates of a master key", in_enc, attacks="a26")
    draft = tiny("x5c stranger", signer=STRANGER)
    member(CHAIN)(draft)
    comment = "a chain is no reason to trust: no key of that kid, no roots"
    yield Case("signers-x5c-stranger", UNTRUSTED, comment, draft.file(), attacks="a26")
    draft = tiny("x5c legacy", profile=False)
    member(5)(draft)
    legacy = "legacy unverified-clear"
    yield Case("signers-x5c-legacy", "success", "legacy readers ignore it", draft.file(), TINY, allow=legacy)


def twice(seed: str, second: dict = QUANTUM, **options) -> Draft:
    draft = tiny(seed, **options)
    draft.second = second
    return draft


def resigned(value: bytes, seed: str) -> bytes:
    """A file whose post-quantum signature is `value`, which the other signature covers."""
    draft = tiny(seed)
    return draft.file(draft.metadata() | {"__signature_mldsa65__": b64(value)})


def seconds() -> Iterator[Case]:
    good = twice("second")
    comment = "signed with both keys"
    yield Case("signers-second", "success", f"{comment}, both trusted", good.file(), TINY, trust=DEMANDED)
    yield Case("signers-second-not-demanded", "success", f"{comment}, one trusted", twice("one").file(), TINY)
    comment = "the second key is trusted, its signature was never made"
    yield Case("signers-second-missing", UNTRUSTED, comment, tiny("missing").file(), trust=DEMANDED, attacks="a22")
    comment = "a signer without a second key, in a store where another one has one"
    other = tiny("other signer", signer=SECOND).file()
    yield Case("signers-second-of-another", "success", comment, other, TINY, trust=DEMANDED)
    meta = {k: v for k, v in good.signed().items() if k != "__signature_mldsa65__"}
    stripped = assemble(compact({"__metadata__": meta} | good.entries).encode(), bytes(good.body))
    for trust, name in ((DEMANDED, "stripped"), ("", "stripped-not-demanded")):
        more = {"trust": trust} if trust else {}
        comment = "the second signature removed after signing: the first one covers it"
        yield Case(f"signers-second-{name}", SIGNATURE, comment, stripped, attacks="a22", **more)
    wrong = {
        "other-key": (twice("other key", OTHER_QUANTUM).file(), "by another key"),
        "other-bytes": (resigned(bytes(3309), "zeros"), "zeros"),
    }
    for name, (data, comment) in wrong.items():
        yield Case(f"signers-second-{name}", SIGNATURE, f"second signature: {comment}", data, trust=DEMANDED)
    comment = "a second signature of nobody, which nobody demands"
    yield Case("signers-second-ignored", "success", comment, resigned(bytes(3309), "ignored"), TINY)
    for length in (0, 64, 3308, 3310):
        data = resigned(bytes(length), f"length {length}")
        yield Case(f"signers-second-{length}-bytes", FORMAT, f"second signature of {length} bytes", data, attacks="a40")
    draft = tiny("not base64")
    data = draft.file(draft.metadata() | {"__signature_mldsa65__": " " * 4412})
    yield Case("signers-second-not-base64", FORMAT, "second signature that is no base64", data, attacks="a40")
    legacy = twice("second legacy", profile=False)
    allow = "legacy unverified-clear"
    comment = "a legacy file cannot have a second signature, and the second key is trusted"
    yield Case("signers-second-legacy", UNTRUSTED, comment, legacy.file(), trust=DEMANDED, allow=allow, attacks="a22")


def small(*, second: bool) -> tuple[dict[str, bytes], dict]:
    """A folder of one shard, which is signed with both keys or with one, and its payload."""
    name = "model.secure.safetensors"
    data = twice("second shard").file() if second else tiny("first shard").file()
    files = {"config.json": b"{}\n", name: data}
    return files, manifest_payload(files, dict.fromkeys(TINY, name), {name}, **IDENTITY)


def manifests() -> Iterator[Case]:
    files, payload = small(second=True)
    yield from both(files, payload)
    # The shard is not looked at any more where the manifest is refused.
    yield from one(*small(second=False))


def making(files: dict[str, bytes]) -> Callable[..., Case]:
    def made(name: str, expect: str, comment: str, jws: dict, trust: str = DEMANDED, **more) -> Case:
        data = files | {MANIFEST: compact(jws, sort=True).encode() + b"\n"}
        tensors = {"tensors": TINY} if expect == "success" else {}
        return case(f"signers-{name}", expect, comment, data, trust=trust, **tensors, **more)

    return made


def both(files: dict[str, bytes], payload: dict) -> Iterator[Case]:
    made, good = making(files), sign_twice(payload, SIGNER, QUANTUM)
    yield made("second", "success", "a general JWS with both signatures", good, attacks="")
    yield made("second-not-demanded", "success", "the same, one key trusted", good, TRUST, attacks="")


def one(files: dict[str, bytes], payload: dict) -> Iterator[Case]:
    made, good = making(files), sign_twice(payload, SIGNER, QUANTUM)
    first, second = good["signatures"]
    flat = {"payload": good["payload"]} | first
    plain = TRUST
    yield made("second-stripped", UNTRUSTED, "the second signature taken away", flat, attacks="a22")
    broken = second | {"signature": b64url(bytes(3309))}
    yield made("second-zeros", SIGNATURE, "second signature: zeros", good | {"signatures": [first, broken]})
    other = sign_twice(payload, SIGNER, OTHER_QUANTUM)
    yield made("second-other-key", SIGNATURE, "second signature: by another key", other)
    short = second | {"signature": b64url(bytes(3308))}
    yield made("second-short", FORMAT, "second signature: too short", good | {"signatures": [first, short]}, plain)
    for name, parts in {"one": [first], "three": [first, second, second], "none": []}.items():
        yield made(f"second-{name}", FORMAT, f"signatures: {name}", good | {"signatures": parts}, plain)
    swapped = good | {"signatures": [second, first]}
    yield made("second-swapped", "UnsupportedVersionError", "signatures in the other order", swapped, plain)
    doubled = good | {"signatures": [first, first]}
    yield made("second-doubled", "UnsupportedVersionError", "the first signature twice", doubled, plain)
    yield made("second-extra", FORMAT, "flattened and general at once", good | first, plain)
    header = good | {"signatures": [first, second | {"header": {}}]}
    yield made("second-header", FORMAT, "an unprotected header", header, plain)
    for name, protected in {"kid": {"kid": "s-second"}, "x5c": {"x5c": CHAIN}}.items():
        jws = sign_twice(payload, SIGNER, QUANTUM, **protected)
        yield made(f"second-{name}", FORMAT, f"second signature: protected {name}", jws, plain)
    chain = sign_manifest(payload, SIGNER, x5c=CHAIN)
    yield made("x5c", "success", "a chain in the protected header", chain, plain, attacks="a26")
    for name in ("empty", "text", "url-alphabet", "null"):
        jws = sign_manifest(payload, SIGNER, x5c=BAD_CHAINS[name])
        yield made(f"x5c-{name}", FORMAT, f"x5c: {name}", jws, plain, attacks="a26")
    stranger = sign_manifest(payload, STRANGER, x5c=CHAIN)
    yield made("x5c-stranger", UNTRUSTED, "a chain is no reason to trust", stranger, plain, attacks="a26")
