"""What an attacker needs: a genuine model to start from, and tools to take it apart and put it together again."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from secure_loader import MasterKey, SigningKey, TrustedSigner, TrustStore, encrypt_model
from secure_loader.config import LoaderConfig
from secure_loader.core.aead import ALGORITHMS
from secure_loader.core.archive import Archive
from secure_loader.core.checkpoint import Checkpoint
from secure_loader.core.keys.provider import KeyRequest, KeyRing, Unwrapper
from secure_loader.core.seal import PlainTensor, Publication, write_file
from secure_loader.core.secrets import Secret
from secure_loader.core.session import Session
from secure_loader.core.types import DTYPES
from secure_loader.errors import SecureLoaderError

CHUNK = 64 * 1024


def master(kid: str = "enc-1", fill: int = 0x11, algorithm: str = "aes256gcm") -> MasterKey:
    found = ALGORITHMS[algorithm]
    return MasterKey(kid, found, Secret(bytes((fill + i) % 256 for i in range(found.key_bytes))))


def signing(kid: str = "sign-1", fill: int = 0x55) -> SigningKey:
    return SigningKey(kid, Secret(bytes((fill + i) % 256 for i in range(32))))


KEY, SIGN = master(), signing()
MALLORY_KEY, MALLORY = master("enc-mallory", 0x80), signing("sign-mallory", 0x99)


def trust(*keys: SigningKey, models: tuple[str, ...] = ("*",)) -> TrustStore:
    return TrustStore([TrustedSigner(k.kid, k.verify_key(), models) for k in keys or (SIGN,)])


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """Three tensors: one of several chunks, one of several chunks to be left in clear, and a small one."""
    rng = np.random.default_rng(seed)
    return {
        "big": rng.standard_normal((50, 1024), dtype=np.float32),
        "clear": rng.standard_normal((50, 1024), dtype=np.float32),
        "small": rng.integers(0, 100, 7, dtype=np.int64),
    }


@dataclass(frozen=True)
class InMemory:
    data: bytes

    def read_into(self, out: memoryview, start: int) -> None:
        out[:] = self.data[start : start + out.nbytes]


CODES = {d.numpy: d.code for d in DTYPES.values() if d.numpy}


def plain(name: str, array: np.ndarray, *, encrypt: bool = True) -> PlainTensor:
    data = np.ascontiguousarray(array).tobytes()
    return PlainTensor(name, CODES[array.dtype.name], array.shape, len(data), InMemory(data), encrypt=encrypt)


def build_file(
    path: Path, tensors: dict[str, np.ndarray] | None = None, *, clear: tuple[str, ...] = ("clear",), **settings: Any
) -> Path:
    """A genuine profile-1 file."""
    options = {"master": KEY, "signing": SIGN, "model_id": "demo/model", "chunk_size": CHUNK} | settings
    parts = [plain(n, a, encrypt=n not in clear) for n, a in (arrays() if tensors is None else tensors).items()]
    write_file(path, parts, {"format": "pt"}, Publication(**options))
    return path


def build_source(folder: Path, *, shards: int = 2, seed: int = 0) -> Path:
    """A plain model folder, as ``save_pretrained`` would write it."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    weight_map = {}
    for i in range(1, shards + 1):
        name = f"model-{i:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        tensors = {f"layer{i}.{k}": rng.standard_normal((20, 1024), dtype=np.float32) for k in ("a", "b")}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    if shards > 1:
        index = {"metadata": {"total_size": 4 * 20 * 1024 * 2 * shards}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "demo"}')
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def build_folder(folder: Path, *, shards: int = 2, seed: int = 0, **settings: Any) -> Path:
    """A genuine encrypted model folder."""
    source = build_source(folder.parent / f"{folder.name}-plain", shards=shards, seed=seed)
    options = {"key": KEY, "signing_key": SIGN, "model_id": "demo/model", "chunk_size": CHUNK} | settings
    encrypt_model(source, folder, **options)
    return folder


def shard(folder: Path, number: int = 1) -> Path:
    return sorted(folder.glob("*.safetensors"))[number - 1]


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header as JSON, and the body."""
    raw = path.read_bytes()
    n = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + n]), raw[8 + n :]


def join(path: Path, doc: dict[str, Any] | bytes, body: bytes, *, align: int = 4096, pad: bytes = b" ") -> Path:
    text = doc if isinstance(doc, bytes) else json.dumps(doc, ensure_ascii=False, separators=(",", ":")).encode()
    text += pad * (-(8 + len(text)) % align)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any], *, sign: SigningKey | None = None) -> Path:
    """Change a header; sign it again where the attacker has a key to sign with."""
    doc, body = split(path)
    change(doc)
    if sign is not None:
        resign(doc, sign)
    return join(path, doc, body)


def resign(doc: dict[str, Any], key: SigningKey) -> None:
    import base64

    meta = doc["__metadata__"]
    meta.pop("__signature__", None)
    doc["__metadata__"] = dict(sorted(meta.items()))
    text = json.dumps(doc, ensure_ascii=False, separators=(",", ":")).encode()
    doc["__metadata__"]["__signature__"] = base64.b64encode(key.sign(text)).decode()
    doc["__metadata__"] = dict(sorted(doc["__metadata__"].items()))


def inner(doc: dict[str, Any], name: str, change: Callable[[Any], Any]) -> None:
    """Change the JSON in a metadata string. The order of its members stays."""
    value = json.loads(doc["__metadata__"][name])
    change(value)
    doc["__metadata__"][name] = json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as f:
        f.seek(offset)
        byte = f.read(1)[0]
        f.seek(offset)
        f.write(bytes([byte ^ 1 << bit]))


def tensor_offset(path: Path, name: str) -> int:
    """File offset of a tensor's first byte."""
    raw = path.read_bytes()
    doc, body = split(path)
    return len(raw) - len(body) + doc[name]["data_offsets"][0]


class Recorder(KeyRing):
    """A key ring that remembers what it was asked for."""

    def __init__(self, *keys: MasterKey) -> None:
        super().__init__(keys)
        self.asked: list[KeyRequest] = []

    def resolve(self, request: KeyRequest) -> Unwrapper:
        self.asked.append(request)
        return super().resolve(request)


class Victim:
    """Somebody who loads models, with a key ring that records."""

    def __init__(
        self, *, keys: tuple[MasterKey, ...] = (KEY,), store: TrustStore | None = None, **settings: Any
    ) -> None:
        self.session = Session(keys=[], trust=store or trust(), config=LoaderConfig(**settings))
        self.ring = self.session.keys = Recorder(*keys)

    def open(self, path: Path, framework: str = "numpy", *, strict: bool = True) -> Archive:
        return self.session.open(path, framework, strict=strict)

    def load(self, path: Path, *, strict: bool = True) -> dict[str, Any]:
        with self.open(path, strict=strict) as f:
            return f.get_tensors()

    def checkpoint(self, folder: Path) -> Checkpoint:
        return Checkpoint(folder, self.session)

    def load_folder(self, folder: Path) -> dict[str, Any]:
        checkpoint = self.checkpoint(folder)
        found: dict[str, Any] = {}
        for name in checkpoint.shards():
            with Archive(checkpoint.open(name), "numpy") as f:
                found |= f.get_tensors()
        return found


@contextlib.contextmanager
def refused(
    kind: type[SecureLoaderError], *words: str, victim: Victim | None = None, place: Path | str | None = None
) -> Iterator[None]:
    """The block must raise exactly this error, saying these words; no key may have been asked for.

    Args:
        kind: The error; a subclass is not good enough.
        words: What the message must say.
        victim: Whose key ring must not have been asked. None where the key comes first by design.
        place: Path that the error must name.
    """
    with pytest.raises(SecureLoaderError) as caught:
        yield
    error = caught.value
    assert type(error) is kind, repr(error)
    text = str(error)
    for word in words:
        assert word in text, text
    if place is not None:
        assert os.fspath(place) in text, text
    if victim is not None:
        assert victim.ring.asked == [], "a key was asked for"
    assert_no_secret(text)
    # The traceback keeps whatever the frames hold alive; the leak check of the test must not see it.
    caught.value.__traceback__ = None
    caught.value.__context__ = None


def assert_no_secret(text: str) -> None:
    import base64

    for key in (KEY, SIGN, MALLORY_KEY, MALLORY):
        raw = bytes(key.secret.reveal())
        for shown in (
            raw.hex(),
            base64.b64encode(raw).decode().rstrip("="),
            base64.urlsafe_b64encode(raw).decode().rstrip("="),
            repr(raw)[2:-1],
            raw.decode("latin-1"),
        ):
            assert shown not in text
            assert shown[:20] not in text
