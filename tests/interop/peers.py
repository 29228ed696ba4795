"""The same keys as both packages spell them, and tensors that both can hold."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cryptotensors
import cryptotensors.torch
import torch

from secure_loader import MasterKey, SigningKey, TrustedSigner, TrustStore
from secure_loader.core import single
from secure_loader.core.aead import ALGORITHMS
from secure_loader.core.seal import Publication, write_file
from secure_loader.core.secrets import Secret

CHUNK = 64 * 1024
SIGNING = SigningKey("sign-1", Secret(bytes(range(100, 132))))
TRUST = TrustStore([TrustedSigner("me", SIGNING.verify_key())])
ALGORITHM_NAMES = tuple(ALGORITHMS)


def base64_text(data: bytes | bytearray | memoryview) -> str:
    """Standard base64 with padding, which is what CryptoTensors takes."""
    return base64.b64encode(data).decode()


def master(algorithm: str = "aes256gcm") -> MasterKey:
    found = ALGORITHMS[algorithm]
    return MasterKey(f"enc-{algorithm}", found, Secret(bytes(range(7, 7 + found.key_bytes))))


def enc_jwk(algorithm: str = "aes256gcm") -> dict[str, str]:
    key = master(algorithm)
    return {"kty": "oct", "alg": algorithm, "kid": key.kid, "k": base64_text(key.secret.reveal())}


def sign_jwk(*, private: bool = False) -> dict[str, str]:
    jwk = {"kty": "okp", "alg": "ed25519", "kid": SIGNING.kid, "x": base64_text(SIGNING.verify_key().public)}
    return jwk | ({"d": base64_text(SIGNING.secret.reveal())} if private else {})


def write_theirs(
    path: Path, content: Mapping[str, torch.Tensor], algorithm: str = "aes256gcm", version: str = "2", **settings: Any
) -> None:
    """By CryptoTensors; ``settings`` are its own, ``tensors`` (the names to encrypt) and ``chunk_size``."""
    config = {"enc_key": enc_jwk(algorithm), "sign_key": sign_jwk(private=True), "version": version, **settings}
    cryptotensors.torch.save_file(dict(content), str(path), metadata={"format": "pt"}, config=config)


def write_ours(
    path: Path,
    tensors: Mapping[str, Any],
    algorithm: str = "aes256gcm",
    version: str = "2",
    clear: tuple[str, ...] = (),
) -> None:
    by = Publication(master(algorithm), SIGNING, "demo", version=version, chunk_size=CHUNK)
    write_file(path, single.plain_tensors(tensors, (), clear), {"format": "pt"}, by)


def open_theirs(path: Path, algorithm: str = "aes256gcm", framework: str = "pt") -> Any:
    config = {"enc_key": enc_jwk(algorithm), "sign_key": sign_jwk()}
    return cryptotensors.safe_open(str(path), framework, config=config)


def read_theirs(path: Path, algorithm: str = "aes256gcm") -> dict[str, torch.Tensor]:
    """Everything in the file, by CryptoTensors."""
    with open_theirs(path, algorithm) as f:
        return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 - not a mapping


def same(loaded: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> bool:
    """Equal names, dtypes, shapes and bits: NaNs of narrow floats compare unequal to themselves."""
    return loaded.keys() == tensors.keys() and all(
        loaded[n].dtype == t.dtype
        and loaded[n].shape == t.shape
        and torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (loaded[n], t)))
        for n, t in tensors.items()
    )


# Every dtype that both packages know: those of CryptoTensors' torch module.
DTYPES = dict(cryptotensors.torch._TYPES)
ODD_NAMES = (
    "model.layers.0.weight",
    "ünï/cödé 模型 🔑",
    'quote" and \\ backslash',
    "new\nline, tab\t, null\0, bell\x07, del\x7f",
    "line separator\u2028, bom\ufeff, surrogate pair \U0001f600, last \U0010ffff",
    " spaces ",
    "",
    "x" * 5000,
    "__proto__",
    "a/../b",
    "<script>&amp;</script>",
)


def every_dtype() -> dict[str, torch.Tensor]:
    made = torch.arange(33 * 5).reshape(33, 5)
    return {code: (made % 2 == 0 if dtype is torch.bool else made.to(dtype)) for code, dtype in DTYPES.items()}


def odd_names() -> dict[str, torch.Tensor]:
    return {name: torch.full((3,), i, dtype=torch.int16) for i, name in enumerate(ODD_NAMES)}


def many_chunks() -> dict[str, torch.Tensor]:
    """Just below, at and above whole chunks, and a scalar."""
    sizes = (1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 777)
    made = {f"n{n}": (torch.arange(n) * 7 % 251).to(torch.uint8) for n in sizes}
    return made | {"scalar": torch.tensor(2.5), "matrix": torch.arange(60_000, dtype=torch.float32).reshape(300, 200)}
