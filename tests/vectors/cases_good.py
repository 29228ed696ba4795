"""Files that must open, and legacy files that open only when legacy was asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator

from .casebook import CHUNKED, MASTER, MASTERS, SIGNER, TINY, Case, Tensors, tiny
from .naive import canonical_prefix, cipher
from .naive_json import b64, unb64
from .naive_writer import RANK, assemble, draft_file

LEGACY = "legacy unverified-clear"
SHAPES = {"F4": [2, 2], "F6_E2M3": [4], "F6_E3M2": [2, 2]}
SIZES = {"F4": 2, "F6_E2M3": 3, "F6_E3M2": 3} | dict.fromkeys(RANK[4:11], 2)


def of_dtype(dtype: str) -> tuple[str, list[int], bytes]:
    """Two elements (four of the packed kinds) that differ."""
    wide = {"16": 4, "32": 8, "64": 16}
    size = SIZES.get(dtype) or wide.get(dtype[-2:], 2)
    data = b"\x01\x00" if dtype == "BOOL" else bytes(range(0x3A, 0x3A + size))
    return dtype, SHAPES.get(dtype, [2]), data


ODD_NAMES = [
    "",
    " ",
    "a/b",
    "a\\b",
    'say "hi"',
    "tab\tnewline\nnul\x00bell\x07unit\x1f",
    "del\x7f",
    "ü",
    "u\u0308",  # the same to the eye as the one before
    "\u2028",
    "重み",
    "\U0001f511",
    "..",
    "__metadata",
    "__crypto_keys__",
    "dtype",
    "\ufeff",
    "é" * 100,
]


def good() -> Iterator[Case]:
    yield from matrix()
    for dtype in RANK:
        tensors = {"t": of_dtype(dtype), "u": of_dtype(dtype)}
        opens = "refuses" if "FNUZ" in dtype or dtype.startswith("F6_") else ""
        data = draft_file(tensors, MASTER, SIGNER, seed=dtype, encrypt=["t"]).file()
        yield Case(
            f"ok-dtype-{dtype.lower()}", "success", f"{dtype}, encrypted and clear", data, tensors, cryptotensors=opens
        )
    yield from shapes()
    yield from names()
    yield from keys()
    yield from legacy()


def matrix() -> Iterator[Case]:
    for alg, master in MASTERS.items():
        for version in "12":
            for part, chosen in (("full", None), ("partial", ["v"])):
                name = f"{alg}-v{version}-{part}"
                draft = tiny(name, master=master, version=version, encrypt=chosen or list(TINY))
                yield Case(f"ok-{name}", "success", f"profile 1, {alg}, version {version}, {part}", draft.file(), TINY)
                old = tiny(name, master=master, version=version, encrypt=chosen or list(TINY), profile=False)
                comment = f"plain CryptoTensors, {alg}, version {version}, {part}"
                allow = LEGACY if chosen else "legacy"
                yield Case(f"legacy-ok-{name}", "success", comment, old.file(), TINY, allow=allow)
    chunked = draft_file(CHUNKED, MASTER, SIGNER, seed="chunked")
    yield Case("ok-chunks", "success", "a tensor of two chunks, the last one of 4 bytes", chunked.file(), CHUNKED)
    exact: Tensors = {"w": ("U8", [8192], bytes(8192))}
    data = draft_file(exact, MASTER, SIGNER, seed="exact").file()
    yield Case("ok-chunks-exact", "success", "a tensor of exactly two chunks has two tags, not three", data, exact)
    data = draft_file(CHUNKED, MASTER, SIGNER, seed="odd chunk", chunk=4099).file()
    yield Case("ok-chunk-size-odd", "success", "readers take any chunk_size from 4096 up", data, CHUNKED)
    data = draft_file(CHUNKED, MASTER, SIGNER, seed="clear chunks", encrypt=["x"]).file()
    yield Case("ok-chunks-clear", "success", "a clear tensor of two digests", data, CHUNKED)


def shapes() -> Iterator[Case]:
    scalars: Tensors = {
        "f": ("F32", [], b"\x00\x00\x80\x3f"),
        "i": ("I64", [], bytes(range(8))),
        "o": ("U8", [1] * 65, b"o"),
    }
    yield Case("ok-scalars", "success", "scalars, and 65 dimensions of one", _file(scalars, "scalars"), scalars)
    empties: Tensors = {
        "e1": ("F32", [0], b""),
        "e2": ("I64", [3, 0, 2], b""),
        "e3": ("U8", [0, 2**40, 2**40], b""),
        "w": ("F32", [1], b"abcd"),
        "x": ("F32", [1], b"efgh"),
    }
    yield Case(
        "ok-empties-spread", "success", "empty tensors, clear, at distinct offsets", _file(empties, "empties"), empties
    )
    few = {name: empties[name] for name in ("e1", "e2", "w")}
    tied = draft_file(few, MASTER, SIGNER, seed="tied", order=["e1", "e2", "w"]).file()
    comment = "two empty tensors at one offset keep the order of their names; 0.2.3 opens it every other time"
    yield Case("ok-empties-tied", "success", comment, tied, few, cryptotensors="sometimes")
    for version in "12":
        data = draft_file(few, MASTER, SIGNER, seed=f"sealed{version}", version=version, encrypt=["e1", "w"]).file()
        comment = "an encrypted empty tensor; 0.2.3 opens the file but cannot hand that tensor to torch"
        yield Case(f"ok-empty-encrypted-v{version}", "success", comment, data, few, cryptotensors="refuses")
    yield Case("ok-no-tensors", "success", "a signed file without tensors", draft_file({}, MASTER, SIGNER).file())
    yield Case(
        "ok-nothing-encrypted",
        "success",
        "__encryption__ is {}: every tensor is clear and covered by a digest; no key is needed",
        tiny("nothing", encrypt=[]).file(),
        TINY,
        keys="keys/masters-other.json",
    )
    wrapped = tiny("late counter")
    yield Case("ok-iv-counter-not-zero", "success", "base_iv with a counter that is not zero", _late(wrapped), TINY)


def _file(tensors: Tensors, seed: str) -> bytes:
    return draft_file(tensors, MASTER, SIGNER, seed=seed).file()


def _late(draft) -> bytes:
    """Seal `v` again with a counter that ends at the largest value there is."""

    record = draft.encryption["v"]
    nonce = unb64(record["base_iv"], "base_iv")[:8] + b"\xff\xff\xff\xff"
    sealed = cipher("aes256gcm", draft.deks["v"]).encrypt(nonce, TINY["v"][2], None)
    begin, end = draft.entries["v"]["data_offsets"]
    draft.body[begin:end] = sealed[:-16]
    record |= {"base_iv": b64(nonce), "tags": b64(sealed[-16:])}
    draft.digests()
    return draft.file()


def names() -> Iterator[Case]:
    odd: Tensors = {name: ("U8", [1], bytes([65 + i])) for i, name in enumerate(ODD_NAMES)}
    yield Case(
        "ok-odd-names",
        "success",
        "quotes, controls, look-alikes and reserved words as tensor names",
        _file(odd, "odd"),
        odd,
    )
    meta = {"a": "", "ü\n": '{"k":"\u2028"}', "z\x7f": "\x00\x1f\\"}
    data = tiny("meta", metadata=meta).file()
    yield Case("ok-odd-metadata", "success", "quotes, controls and non-ASCII in metadata", data, TINY)
    draft = tiny("jku")
    draft.crypto_keys["enc"]["jku"] = "file:///nonexistent/keys.json"
    draft.crypto_keys["sign"]["jku"] = "https://keys.invalid/set.json"
    yield Case("ok-jku-ignored", "success", "jku is allowed and never followed", draft.file(), TINY, attacks="a26")
    draft = tiny("model")
    draft.profile |= {"model_id": "模" * 256, "release": 2**53 - 1, "shard": [7, 9]}
    yield Case("ok-identity-limits", "success", "longest model_id, largest release, shard 7 of 9", draft.file(), TINY)
    draft = tiny("kid", master=MASTER | {"kid": "m-aes256"})
    draft.policy["remote"] = "package model\ndefault allow := false"
    yield Case(
        "ok-remote-policy", "success", "the remote policy is for the key broker, not for the reader", draft.file(), TINY
    )
    draft = tiny("policy")
    draft.policy["local"] = "package model\n\ndefault allow := true\n"
    yield Case("ok-policy-trivial", "success", "another spelling of the trivial local policy", draft.file(), TINY)


def keys() -> Iterator[Case]:
    data = tiny("rfc").file()
    yield Case(
        "ok-keys-rfc8037",
        "success",
        "the same keys as RFC 7517 and RFC 8037 spell them",
        data,
        TINY,
        keys="keys/masters-rfc.json",
        trust="keys/trusted-rfc.json",
        cryptotensors="other-keys",
    )


def legacy() -> Iterator[Case]:
    partial = tiny("legacy", profile=False)
    comment = "plain CryptoTensors where profile 1 is required"
    yield Case("legacy-not-allowed", "NotEncryptedError", comment, partial.file(), attacks="a22")
    comment = "a clear tensor that nothing vouches for, and nobody said to accept it"
    yield Case("legacy-clear-not-allowed", "NotEncryptedError", comment, partial.file(), allow="legacy", attacks="a20")
    # Same meaning, other bytes: the signature of CryptoTensors covers a re-serialisation.
    entries = list(partial.entries.items())
    spelt = json.dumps(dict(reversed(entries)) | {"__metadata__": dict(reversed(partial.signed().items()))})
    data = assemble(spelt.encode(), bytes(partial.body), 8)
    comment = "header re-ordered and re-spaced after signing: accepted, as the signature covers its meaning only"
    yield Case("legacy-ok-respelt", "success", comment, data, TINY, allow=LEGACY, attacks="a12")
    draft = tiny("legacy extra", profile=False)
    draft.crypto_keys["note"] = "x"
    draft.encryption["v"]["note"] = "x"
    draft.policy["note"] = "x"
    yield Case(
        "legacy-ok-unknown-members",
        "success",
        "unknown members in CryptoTensors' objects",
        draft.file(),
        TINY,
        allow=LEGACY,
    )
    draft = tiny("legacy alg", profile=False)
    draft.crypto_keys["enc"]["alg"] = "AES-256-GCM"
    draft.crypto_keys["sign"]["alg"] = "Ed25519"
    yield Case(
        "legacy-ok-alg-spelling",
        "success",
        "algorithms are compared without case and hyphens",
        draft.file(),
        TINY,
        allow=LEGACY,
    )
    draft = tiny("legacy default", profile=False)
    del draft.crypto_keys["chunk_size"]
    yield Case(
        "legacy-ok-default-chunk",
        "success",
        "version 2 without chunk_size means 2 MiB",
        draft.file(),
        TINY,
        allow=LEGACY,
    )
    draft = tiny("legacy v1 chunked", profile=False)
    draft.crypto_keys["version"] = "1"
    yield Case("legacy-ok-v1-chunked", "success", "chunk_size decides, not version", draft.file(), TINY, allow=LEGACY)
    data = canonical_prefix(partial.text()) + bytes(partial.body)
    data = (len(data) - len(partial.body)).to_bytes(8, "little") + data
    yield Case("legacy-ok-padding", "success", "padding to a page", data, TINY, allow=LEGACY)
    data = partial.file()
    data = data[:-1] + bytes([data[-1] ^ 1])
    changed = TINY | {"c": ("U8", [5], b"cleas")}
    comment = "a clear tensor altered: nobody can tell, which is why unverified-clear has to be asked for"
    yield Case("legacy-clear-altered", "success", comment, data, changed, allow=LEGACY, attacks="a20")
