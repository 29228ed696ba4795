"""Small signed files in memory, what reads them, and the hypothesis profile of these tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, settings

from secure_loader import Archive, MasterKey, Session, SigningKey, TrustedSigner, TrustStore
from secure_loader.core import single
from secure_loader.core.aead import ALGORITHMS
from secure_loader.core.keys.jwk import VerifyKey
from secure_loader.core.seal import Publication, seal_bytes
from secure_loader.core.secrets import Secret
from secure_loader.core.source import FileSource
from secure_loader.errors import SecureLoaderError

CHUNK = 64 * 1024
MASTER = MasterKey("m", ALGORITHMS["aes256gcm"], Secret(bytes(range(32))))
SIGNING = SigningKey("s", Secret(bytes(range(100, 132))))
VERIFY: VerifyKey = SIGNING.verify_key()

# The same examples on every run, and no time limit per example: other work may hold the processor.
# The home folder of a test is shared by its examples, which all write the same release there.
PROFILE = settings(
    derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def seal(
    tensors: Mapping[str, np.ndarray | torch.Tensor], *, version: str = "2", clear: Sequence[str] = (), **settings: Any
) -> bytes:
    """The bytes of a profile-1 file with 64 KiB chunks."""
    by = Publication(MASTER, SIGNING, "demo", version=version, chunk_size=CHUNK, **settings)
    return seal_bytes(single.plain_tensors(tensors, (), clear), {"format": "pt"}, by)


def session(**settings: Any) -> Session:
    return Session(keys=MASTER, trust=TrustStore([TrustedSigner("me", VERIFY)]), **settings)


def read_all(data: bytes, by: Session) -> dict[str, np.ndarray]:
    """Every tensor of the file, read as strictly as there is."""
    file = by.accept(FileSource.from_bytes(data), strict=True)
    with Archive(file, "numpy") as archive:
        return archive.get_tensors()


def refusal(
    data: bytes, by: Session, read: Callable[[bytes, Session], Any] = read_all
) -> type[SecureLoaderError] | None:
    """The kind of error that reading ends in, or None when it is all handed out."""
    try:
        read(data, by)
    except SecureLoaderError as e:
        return type(e)
    return None


def header_bytes(data: bytes) -> int:
    """Length of all that stands before the body."""
    return 8 + int.from_bytes(data[:8], "little")
