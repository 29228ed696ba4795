"""Where fuzzing starts: the test vectors, cut to what each target takes."""

from __future__ import annotations

import base64
import contextlib
import json
import struct

from tests.fuzz.claims import SEPARATOR
from tests.fuzz.targets import SECTIONS, TENSORS
from tests.vectors import DATA, Vector, iter_vectors

MAX_SEED = 16384  # longer ones slow the fuzzer down and show nothing new


def by_target() -> dict[str, list[bytes]]:
    """Seeds of the targets of the format."""
    vectors = list(iter_vectors())
    return {
        "fuzz_header": [seed for v in vectors if v.kind == "file" for seed in _header(v.data)],
        "fuzz_metadata": [seed for v in vectors if v.kind == "file" for seed in _metadata(v.data)],
        "fuzz_jwk": [path.read_bytes() for path in sorted((DATA / "keys").glob("*"))] + _keys(vectors),
        "fuzz_manifest": [seed for v in vectors if v.kind == "folder" for seed in _manifest(v)],
    }


def _header(data: bytes) -> list[bytes]:
    if len(data) < 8:
        return [data]
    n = struct.unpack("<Q", data[:8])[0]
    text = data[8 : 8 + n].rstrip(b" ")
    # Without the padding to whole pages, which is most of a small file; and the JSON alone, for which the target finds
    # a body that fits. A length that lies stays as it is.
    return [struct.pack("<Q", len(text)) + text + data[8 + n :] if 8 + n <= len(data) else data, text]


def _metadata(data: bytes) -> list[bytes]:
    with contextlib.suppress(ValueError, KeyError, RecursionError, AttributeError, TypeError, struct.error):
        doc = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
        meta = doc.pop("__metadata__")
        if doc.keys() == {t.name for t in TENSORS}:
            return [SEPARATOR.join(meta.get(name, "").encode() for name in SECTIONS)]
    return []


def _keys(vectors: list[Vector]) -> list[bytes]:
    seeds = []
    for jwk in (jwk for v in vectors for jwk in (*v.keys, *v.trust)):
        seeds.append(json.dumps(jwk).encode())
        public = {k: v for k, v in jwk.items() if k not in ("d", "priv")}
        seeds += [json.dumps(public).encode()] if "priv" in jwk else []
        seeds.append(json.dumps({"name": "n", "key": public, "models": ["a/*"], "not_after": "2030-01-01"}).encode())
    return seeds


def _manifest(vector: Vector) -> list[bytes]:
    data = vector.files().get("secure_manifest.json")
    if data is None:
        return []
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return [data, base64.urlsafe_b64decode(json.loads(data)["payload"] + "==")]
    return [data]
