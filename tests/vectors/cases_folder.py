"""Signed model folders: an archive of the folder is the vector's payload."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field

from .casebook import MASTER, SECOND, SIGNER, STRANGER, TRUST, Case, Tensors, flip
from .naive_folder import MANIFEST, manifest_payload, sign_manifest
from .naive_json import b64url, compact, strict_json, unb64url
from .naive_writer import draft_file, public

ONE: Tensors = {"a": ("F32", [2], bytes(range(8))), "n": ("U8", [2], b"no")}
TWO: Tensors = {"b": ("F32", [2], bytes(range(8, 16)))}
BOTH = ONE | TWO
FIRST, LAST = "model-00001-of-00002.secure.safetensors", "model-00002-of-00002.secure.safetensors"
INDEX = "model.safetensors.index.secure.json"
SINGLE = "model.secure.safetensors"
IDENTITY = {"model_id": "acme/tiny", "release": 3}
MANIFEST_ERROR = "ManifestError"


def tar(files: dict[str, bytes]) -> bytes:
    """A ustar archive, the same bytes for the same files, without the usual padding to 10 KiB."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644
            archive.addfile(info, io.BytesIO(data))
        end = archive.offset
    return out.getvalue()[: end + 1024]


def shard(tensors: Tensors, place: tuple[int, int], seed: str, **options) -> bytes:
    options.setdefault("encrypt", [name for name in tensors if name != "n"])
    return draft_file(tensors, MASTER, SIGNER, seed=seed, shard=place, **options).file()


def index(weights: dict[str, str]) -> bytes:
    return json.dumps({"metadata": {"total_size": 18}, "weight_map": weights}, indent=2).encode() + b"\n"


@dataclass
class Folder:
    """A correct folder of two shards, before its manifest is signed; tests change it."""

    files: dict[str, bytes]
    weights: dict[str, str]
    shards: set[str]
    identity: dict = field(default_factory=lambda: dict(IDENTITY))

    def payload(self) -> dict:
        return manifest_payload(self.files, self.weights, self.shards, **self.identity)

    def sealed(self, payload: dict | bytes | None = None, signer: dict = SIGNER, **protected) -> dict[str, bytes]:
        """The files with their manifest."""
        jws = sign_manifest(self.payload() if payload is None else payload, signer, **protected)
        return self.files | {MANIFEST: compact(jws, sort=True).encode() + b"\n"}


def two(seed: str = "two") -> Folder:
    weights = dict.fromkeys(ONE, FIRST) | dict.fromkeys(TWO, LAST)
    files = {
        "config.json": b'{"architectures":["TinyForCausalLM"]}\n',
        "chat_template.jinja": b"{{ messages }}\n",
        "code/model.py": b"X = 1\n",
        FIRST: shard(ONE, (1, 2), seed + " 1"),
        LAST: shard(TWO, (2, 2), seed + " 2"),
        INDEX: index(weights),
    }
    return Folder(files, weights, {FIRST, LAST})


def single() -> Folder:
    files = {
        "config.json": b"{}\n",
        "chat_template.jinja": b"{{ messages }}\n",
        "code/model.py": b"X = 1\n",
        SINGLE: shard(ONE, (1, 1), "single"),
    }
    return Folder(files, dict.fromkeys(ONE, SINGLE), {SINGLE})


def case(name: str, expect: str, comment: str, files: dict[str, bytes], attacks: str = "a43", **more) -> Case:
    return Case(f"folder-{name}", expect, comment, tar(files), kind="folder", attacks=attacks, **more)


def folder() -> Iterator[Case]:
    yield from good()
    yield from files()
    yield from shards()
    yield from jws()
    yield from payloads()


def good() -> Iterator[Case]:
    yield case("ok-sharded", "success", "two shards with an index, code in a subfolder", two().sealed(), tensors=BOTH)
    yield case("ok-single", "success", "one model file", single().sealed(), tensors=ONE)
    more = two().sealed() | {".gitattributes": b"*\n", ".cache/x.json": b"{}"}
    yield case("ok-hidden", "success", "hidden files are not part of the folder", more, tensors=BOTH)
    f = two()
    f.files[INDEX] = f.files[INDEX].replace(b": 18", b": 18.0")
    yield case("ok-index-fraction", "success", "an index with a fraction in its statistics", f.sealed(), tensors=BOTH)
    f = single()
    f.files["draft/model.secure.safetensors"] = shard(TWO, (1, 1), "draft")
    f.shards.add("draft/model.secure.safetensors")
    yield case("ok-subfolder", "success", "another checkpoint in a subfolder", f.sealed(), tensors=ONE)
    f = single()
    f.files["extra.safetensors"] = len(b"{}      ").to_bytes(8, "little") + b"{}      "
    yield case("ok-plain-file", "success", "a plain safetensors file, vouched for as a whole", f.sealed(), tensors=ONE)
    signed_twice = single().sealed() | {"model.sig": b"{}"}
    yield case("ok-model-sig", "success", "a signature for other tools beside the manifest", signed_twice, tensors=ONE)
    f = single()
    f.files["model.sig"] = b"{}"
    yield case("ok-model-sig-listed", "success", "one that the manifest lists, as any file", f.sealed(), tensors=ONE)
    indented = single().files | {MANIFEST: json.dumps(json.loads(single().sealed()[MANIFEST]), indent=1).encode()}
    yield case("ok-jws-indented", "success", "white space between the members of the JWS", indented, tensors=ONE)
    yield case(
        "ok-second-signer",
        "success",
        "the manifest by another trusted signer",
        single().sealed(signer=SECOND),
        tensors=ONE,
    )
    yield case("ok-floor", "success", "the release that was seen before", single().sealed(), tensors=ONE, floor=3)


def files() -> Iterator[Case]:
    yield case("rollback", "RollbackError", "an older release than seen before", single().sealed(), "a22", floor=4)
    for name in ("config.json", "chat_template.jinja", INDEX, LAST, "code/model.py"):
        sealed = (two() if name in (INDEX, LAST) else single()).sealed()
        label = name.split("/")[-1].split(".")[0].replace("_", "-").lower() + ("-index" if name == INDEX else "")
        rest = {n: data for n, data in sealed.items() if n != name}
        yield case(f"missing-{label}", MANIFEST_ERROR, f"{name} is missing", rest)
        changed = sealed | {name: flip(sealed[name], min(9, len(sealed[name]) - 1))}
        yield case(f"changed-{label}", MANIFEST_ERROR, f"{name} is altered", changed)
        yield case(f"longer-{label}", MANIFEST_ERROR, f"{name} is longer", sealed | {name: sealed[name] + b" "})
    sealed = single().sealed()
    rest = {n: data for n, data in sealed.items() if n != MANIFEST}
    yield case("no-manifest", MANIFEST_ERROR, "no manifest", rest, "a19")
    for name in (
        "evil.py",
        "model.safetensors",
        "adapter_model.safetensors",
        "code/__init__.py",
        "sub/secure_manifest.json",
        "sub/model.sig",
    ):
        label = name.replace("/", "-").replace("_", "-").split(".")[0]
        yield case(f"extra-{label}", MANIFEST_ERROR, f"{name} added", sealed | {name: b"import os\n"})
    f = single()
    f.files["model.sig"] = b"{}"
    changed = f.sealed() | {"model.sig": b"{ }"}
    yield case("changed-model-sig", MANIFEST_ERROR, "a listed model.sig is altered", changed)
    auto_map = sealed | {"config.json": b'{"auto_map":{"AutoModel":"evil.Model"}}\n'}
    yield case("auto-map", MANIFEST_ERROR, "auto_map added to config.json", auto_map)


def shards() -> Iterator[Case]:
    sealed = two().sealed()
    other = two("another release").sealed()
    yield case("shard-of-another", MANIFEST_ERROR, "a shard of another release in place", sealed | {LAST: other[LAST]})
    yield case(
        "shards-exchanged", MANIFEST_ERROR, "two shards exchanged", sealed | {FIRST: sealed[LAST], LAST: sealed[FIRST]}
    )
    body = bytes([sealed[FIRST][4096] ^ 1])
    broken = sealed | {FIRST: sealed[FIRST][:4096] + body + sealed[FIRST][4097:]}
    yield case("body-altered", "AuthenticationError", "a byte of a shard's body: found when it is read", broken, "a39")
    for label, options in (("model", {"model_id": "acme/other"}), ("release", {"release": 2})):
        f = two()
        f.files[LAST] = shard(TWO, (2, 2), "foreign", **options)
        yield case(f"signed-other-{label}", MANIFEST_ERROR, f"a shard of another {label}, listed", f.sealed())
    f = two()
    f.files[LAST] = shard(TWO, (1, 2), "place")
    yield case("shard-place-twice", MANIFEST_ERROR, "two shards say that they are the first of two", f.sealed())
    f = two()
    f.files[LAST] = shard(TWO, (2, 3), "number")
    yield case("shard-number", MANIFEST_ERROR, "a shard says that there are three", f.sealed())
    f = two()
    f.files[LAST] = shard(TWO, (2, 2), "stranger")
    stranger = draft_file(TWO, MASTER, STRANGER, seed="stranger", shard=(2, 2))
    f.files[LAST] = stranger.file()
    yield case("shard-of-stranger", "UntrustedSignerError", "a listed shard by a signer who is not trusted", f.sealed())
    f = two()
    f.files[LAST] = draft_file(TWO, MASTER, SIGNER, seed="old", profile=False).file()
    yield case("shard-legacy", "NotEncryptedError", "a listed shard of plain CryptoTensors", f.sealed(), "a22")
    f = two()
    plain = compact({"b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    f.files[LAST] = len(plain).to_bytes(8, "little") + plain + bytes(8)
    comment = "a plain file listed as a shard, by its header only"
    yield case("shard-plain", "NotEncryptedError", comment, f.sealed(), "a18")
    f = two()
    del f.weights["n"]
    f.files[INDEX] = index(f.weights)
    yield case("weights-too-few", MANIFEST_ERROR, "a tensor of a shard is not in weights", f.sealed())
    f = two()
    f.weights["zz"] = LAST
    f.files[INDEX] = index(f.weights)
    yield case("weights-too-many", MANIFEST_ERROR, "weights name a tensor that no shard holds", f.sealed())
    f = two()
    f.weights |= {"a": LAST, "b": FIRST}
    f.files[INDEX] = index(f.weights)
    yield case("weights-crossed", MANIFEST_ERROR, "weights name the wrong shards", f.sealed())
    f = two()
    f.files[INDEX] = index(dict.fromkeys(ONE, FIRST))
    yield case("index-drops-shard", MANIFEST_ERROR, "the index leaves a shard out, signed so", f.sealed())
    f = two()
    f.files[INDEX] = f.files[INDEX].replace(b'"weight_map"', b'"weight_maps"')
    yield case("index-no-map", MANIFEST_ERROR, "an index without weight_map, signed so", f.sealed())


def edited(f: Folder, edit) -> dict[str, bytes]:
    """The folder with the members of its JWS edited as text."""
    sealed = f.sealed()
    jws = json.loads(sealed[MANIFEST])
    edit(jws)
    return sealed | {MANIFEST: compact(jws).encode()}


def jws() -> Iterator[Case]:
    f, form, unsupported = single(), "FormatError", "UnsupportedVersionError"
    raw = f.sealed()[MANIFEST]
    for label, data in (
        ("empty", b""),
        ("not-json", b"{"),
        ("list", b"[]"),
        ("duplicate", raw.strip()[:-1] + b',"payload":"e30"}'),
        ("compact", b".".join(json.loads(raw)[m].encode() for m in ("protected", "payload", "signature"))),
    ):
        yield case(f"jws-{label}", form, f"manifest: {label}", f.files | {MANIFEST: data}, "a04")
    for member in ("payload", "protected", "signature"):
        yield case(f"jws-no-{member}", form, f"no {member}", edited(f, lambda j, m=member: j.pop(m)), "a13")
        padded = edited(f, lambda j, m=member: j.update({m: j[m] + "=" * (-len(j[m]) % 4 or 4)}))
        yield case(f"jws-{member}-padded", form, f"{member} with padding", padded, "a11")
    yield case("jws-header", form, "an unprotected header", edited(f, lambda j: j.update(header={"kid": "x"})), "a13")
    general = edited(
        f, lambda j: j.update(signatures=[{"protected": j.pop("protected"), "signature": j.pop("signature")}])
    )
    yield case("jws-general", form, "the general serialisation", general, "a13")
    for label, protected in (
        ("none", {"alg": "none"}),
        ("hs256", {"alg": "HS256"}),
        ("ed25519", {"alg": "Ed25519"}),
        ("typ", {"typ": "JWT"}),
        ("kid-number", {"kid": 5}),
    ):
        yield case(f"jws-{label}", unsupported, f"protected {compact(protected)}", f.sealed(**protected), "a27")
    for label, protected in (
        ("crit", {"crit": ["b64"]}),
        ("jwk", {"jwk": public(STRANGER)}),
        ("jku", {"jku": "https://keys.invalid/x"}),
        ("b64", {"b64": False}),
    ):
        yield case(f"jws-{label}", form, f"{label} in the protected header", f.sealed(**protected), "a26")
    yield case("stranger", "UntrustedSignerError", "signed by a stranger", f.sealed(signer=STRANGER), "a26")
    posing = STRANGER | {"kid": SIGNER["kid"]}
    yield case(
        "imposter", "SignatureError", "signed by a stranger under the publisher's kid", f.sealed(signer=posing), "a28"
    )
    both = f"{TRUST} keys/trusted-imposter.json"
    comment = "two different trusted keys of one kid"
    yield case("two-signers", "UntrustedSignerError", comment, f.sealed(), "a28", trust=both)
    signature = edited(f, lambda j: j.update(signature=b64url(flip(unb64url(j["signature"], "s"), 0))))
    yield case("signature-flipped", "SignatureError", "a bit of the signature", signature, "a39")
    short = edited(f, lambda j: j.update(signature=j["signature"][:84]))
    yield case("signature-short", "SignatureError", "63 bytes of signature", short, "a40")
    later = compact(f.payload() | {"release": 4}, sort=True).encode()
    raised = edited(f, lambda j: j.update(payload=b64url(later)))
    yield case("release-raised", "SignatureError", "another release after signing", raised, "a22")
    crossed = edited(f, lambda j: j.update(signature=strict_json(two().sealed()[MANIFEST])["signature"]))
    yield case("signature-of-another", "SignatureError", "the signature of another manifest", crossed)


def payload_case(name: str, comment: str, expect: str = "FormatError", attacks: str = "a13", **members) -> Case:
    """A manifest with members of its payload replaced (None: removed), signed so."""
    f = single()
    doc = f.payload() | members
    for member in [m for m, value in members.items() if value is None]:
        del doc[member]
    return case(name, expect, comment, f.sealed(doc), attacks)


def payloads() -> Iterator[Case]:
    f = single()
    good = f.payload()
    unsupported = "UnsupportedVersionError"
    for label, value in (("2", 2), ("string", "1"), ("true", True), ("missing", None)):
        yield payload_case(f"profile-{label}", f"profile: {label}", unsupported, "a21", profile=value)
    for member in ("model_id", "release", "created", "files", "weights"):
        yield payload_case(f"no-{member.replace('_', '-')}", f"no {member}", **{member: None})
    for label, member, value in (
        ("unknown-member", "crit", ["x"]),
        ("release-negative", "release", -1),
        ("release-2-53", "release", 2**53),
        ("release-true", "release", True),
        ("model-id-empty", "model_id", ""),
        ("model-id-control", "model_id", "acme\n"),
        ("created-date", "created", "2026-01-02"),
        ("files-list", "files", []),
        ("weights-list", "weights", []),
        ("weights-number", "weights", {"a": 1}),
        ("weights-unlisted", "weights", {"a": "other.safetensors"}),
        ("weights-no-shard", "weights", {"a": "config.json"}),
    ):
        yield payload_case(label, f"{member}: {compact(value)[:60]}", **{member: value})
    entry = good["files"]["config.json"]
    for label, value in (
        ("both", entry | {"header_sha256": entry["sha256"]}),
        ("neither", {"bytes": 3}),
        ("no-bytes", {"sha256": entry["sha256"]}),
        ("bytes-string", entry | {"bytes": "3"}),
        ("upper", entry | {"sha256": entry["sha256"].upper()}),
        ("short", entry | {"sha256": entry["sha256"][:-1]}),
        ("unknown", entry | {"mode": "x"}),
        ("string", entry["sha256"]),
    ):
        files_ = good["files"] | {"config.json": value}
        yield payload_case(f"entry-{label}", f"a file entry: {label}", files=files_)
    for label, path in (
        ("parent", "../config.json"),
        ("parent-inside", "code/../config.json"),
        ("absolute", "/config.json"),
        ("dot", "./config.json"),
        ("double-slash", "code//model.py"),
        ("trailing-slash", "code/"),
        ("empty", ""),
        ("hidden", ".config.json"),
        ("hidden-folder", ".git/config"),
        ("nul", "config.json\0.txt"),
        ("itself", MANIFEST),
    ):
        files_ = good["files"] | {path: entry}
        yield payload_case(f"path-{label}", f"a path {path!r}", attacks="a16", files=files_)
    spaced = json.dumps(good, sort_keys=True).encode()
    yield case("payload-spaced", "FormatError", "white space in the payload", f.sealed(spaced), "a12")
    unsorted = compact(dict(sorted(good.items(), reverse=True))).encode()
    yield case("payload-unsorted", "FormatError", "payload members not sorted", f.sealed(unsorted), "a12")
    twice = compact(good, sort=True).encode()[:-1] + b',"release":3}'
    yield case("payload-duplicate", "FormatError", "a payload member twice", f.sealed(twice), "a04")
