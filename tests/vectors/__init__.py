"""Test vectors of the file format: `iter_vectors()` reads them; see README.md."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Vector:
    """One case.

    Attributes:
        name: File name under data/, without the ending.
        expect: "success" or the class name of the error.
        keys: Private JWKs a reader is given. key_files: the files they came from.
        trust: Public JWKs of the signers it trusts. trust_files: the files they came from.
        data: The bytes: one safetensors file, or for kind "folder" a tar archive (see `files`).
        sha256s: For successes, tensor name -> SHA-256 (hex) of the plaintext. dtypes, shapes: likewise.
        kind: "file" or "folder".
        profile_required: Whether the reader insists on profile 1, its default.
        unverified_clear: Whether clear tensors that no signature covers are accepted (legacy files only).
        full_integrity: Whether the defect shows only when digests of encrypted tensors are checked as well.
        floor: Folders only: the highest release of the model seen before.
        cryptotensors: "opens", "refuses" or "ciphertext": what cryptotensors 0.2.3 does with a success.
        attacks: Ids of attacks.md that it stands for.
        comment, provenance: For people.
    """

    name: str
    expect: str
    keys: tuple[dict, ...]
    trust: tuple[dict, ...]
    data: bytes
    sha256s: dict[str, str]
    dtypes: dict[str, str]
    shapes: dict[str, list[int]]
    kind: str = "file"
    profile_required: bool = True
    unverified_clear: bool = False
    full_integrity: bool = False
    floor: int = 0
    cryptotensors: str = "opens"
    attacks: tuple[str, ...] = ()
    comment: str = ""
    provenance: str = ""
    key_files: tuple[Path, ...] = field(default=(), repr=False)
    trust_files: tuple[Path, ...] = field(default=(), repr=False)

    def files(self) -> dict[str, bytes]:
        """The files of a folder vector by relative path."""
        with tarfile.open(fileobj=io.BytesIO(self.data)) as tar:
            return {m.name: tar.extractfile(m).read() for m in tar.getmembers()}


def read_jwks(path: Path) -> list[dict]:
    """The JWKs of a JWK set file."""
    return json.loads(path.read_bytes())["keys"]


def parse_vector(name: str, raw: bytes) -> Vector:
    """A case from the bytes of its file."""
    head, data = raw.split(b"\n\n", 1)
    lines = [line.split(": ", 1) for line in head.decode().split("\n")]
    one = {key: value for key, value in lines if key != "tensor"}
    # Written from the last run to the first: put back from the first to the last, every place is where it was.
    for at, count, byte in reversed([value.split() for key, value in lines if key == "fill"]):
        data = data[: int(at)] + bytes.fromhex(byte) * int(count) + data[int(at) :]
    tensors = [value.split(" ", 3) for key, value in lines if key == "tensor"]
    names = [json.loads(t[3]) for t in tensors]
    allow = one.get("allow", "").split()
    key_files = tuple(DATA / part for part in one["keys"].split())
    trust_files = tuple(DATA / part for part in one["trust"].split())
    return Vector(
        name=name,
        expect=one["expect"],
        keys=tuple(jwk for path in key_files for jwk in read_jwks(path)),
        trust=tuple(jwk for path in trust_files for jwk in read_jwks(path)),
        data=data,
        sha256s={n: t[0] for n, t in zip(names, tensors, strict=True)},
        dtypes={n: t[1] for n, t in zip(names, tensors, strict=True)},
        shapes={n: json.loads(t[2]) for n, t in zip(names, tensors, strict=True)},
        kind=one["kind"],
        profile_required="legacy" not in allow,
        unverified_clear="unverified-clear" in allow,
        full_integrity=one.get("integrity") == "full",
        floor=int(one.get("floor", "0")),
        cryptotensors=one.get("cryptotensors", "opens"),
        attacks=tuple(one.get("attacks", "").split()),
        comment=one["comment"],
        provenance=one["provenance"],
        key_files=key_files,
        trust_files=trust_files,
    )


def iter_vectors() -> Iterator[Vector]:
    """All cases, by name."""
    for path in sorted(DATA.glob("*.vector")):
        yield parse_vector(path.stem, path.read_bytes())
