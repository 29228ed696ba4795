"""Temporary copies of a plain model: encrypted by us, and by ``cryptotensors``, with keys that only this process knows."""

from __future__ import annotations

import base64
import importlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ..core.aead import ALGORITHMS
from ..core.atomic import write_error
from ..core.keys.jwk import MasterKey, SigningKey
from ..core.secrets import Secret
from ..core.survey import survey
from ..core.trust import TrustedSigner, TrustStore
from ..core.writer import encrypt_model
from .subject import Subject, check_disk, look

_NAME = "throw-away"


class ThrowAway:
    """Keys for temporary copies. They are in no file, and gone when this process ends.

    Attributes:
        master: Encrypts our copy.
        signing: Signs it.
        trust: Trusts that signature and no other.
        peer: The settings by which ``cryptotensors`` writes its copy.
        peer_reads: Those by which it reads it.
    """

    def __init__(self) -> None:
        algorithm = ALGORITHMS["aes256gcm"]
        self.master = MasterKey(f"{_NAME}-enc", algorithm, Secret(bytearray(os.urandom(algorithm.key_bytes))))
        self.signing = SigningKey(f"{_NAME}-sign", Secret(bytearray(os.urandom(32))))
        self.trust = TrustStore([TrustedSigner(_NAME, self.signing.verify_key())], "the throw-away keys")
        seed = os.urandom(32)
        public = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
        encryption = {"kty": "oct", "alg": "aes256gcm", "kid": _NAME, "k": _base64(os.urandom(32))}
        signature = {"kty": "okp", "alg": "ed25519", "kid": _NAME, "x": _base64(public)}
        self.peer_reads: dict[str, Any] = {"enc_key": encryption, "sign_key": signature}
        self.peer: dict[str, Any] = {
            "enc_key": encryption,
            "sign_key": signature | {"d": _base64(seed)},
            "version": "2",
        }


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@contextmanager
def temporary_folder(beside: Path, work: Path | None, nbytes: int) -> Iterator[Path]:
    """A folder that is gone afterwards, whatever happens.

    Args:
        beside: The model; the folder is made next to it.
        work: Where to make it instead.
        nbytes: What will be written there.

    Raises:
        MissingFileError: ``work`` does not exist.
        WriteError: Too little room, or the place cannot be written to.
    """
    place = beside.absolute().parent if work is None else work
    check_disk(place, nbytes)
    try:
        made = tempfile.TemporaryDirectory(prefix=f".{beside.absolute().name}.bench-", dir=place)
    except OSError as e:
        error = write_error(e, place)
        raise type(error)(error.message, path=place, hint="name another folder with --work") from None
    with made as folder:
        yield Path(folder)


def sizes(plain: Subject, *, ours: bool, peer: bool) -> int:
    """Bytes that the copies of a model will take.

    Raises:
        ConfigError: The folder cannot be encrypted as it is.
    """
    weights = sum(shard.size for shard in plain.shards)
    if not ours:
        return weights * peer
    if not plain.is_folder:
        return weights * (1 + peer)
    others = survey(plain.path, keep_names=False).others
    return weights * (1 + peer) + sum((plain.path / name).stat().st_size for name in others)


def encrypt_copy(plain: Subject, folder: Path, keys: ThrowAway, *, progress: bool | None) -> None:
    """Write our copy of a plain model to ``folder / "secure"``. Starts threads: call it apart.

    Raises:
        SecureLoaderError: As :func:`core.writer.encrypt_model`.
    """
    source = plain.path
    if not plain.is_folder:
        source = folder / "plain"
        source.mkdir()
        (source / plain.path.name).symlink_to(plain.path.absolute())
    encrypt_model(
        source,
        folder / "secure",
        key=keys.master,
        signing_key=keys.signing,
        model_id=_NAME,
        progress=progress,
    )


def secure_copy(folder: Path) -> Subject:
    """What :func:`encrypt_copy` wrote."""
    return look(folder / "secure")


def encrypt_for_peer(plain: Subject, folder: Path, keys: ThrowAway, framework: str) -> None:
    """Have ``cryptotensors`` write its copy, file by file, where :func:`peer_file` says. Call it apart.

    Raises:
        Exception: Whatever it raises.
    """
    module = "torch" if framework == "pt" else "numpy"
    reader, writer = (importlib.import_module(f"{package}.{module}") for package in ("safetensors", "cryptotensors"))
    (folder / "cryptotensors").mkdir()
    for number, shard in enumerate(plain.shards):
        target = peer_file(folder, number)
        writer.save_file(reader.load_file(shard.path), str(target), metadata={"format": framework}, config=keys.peer)


def peer_file(folder: Path, number: int) -> Path:
    """Where ``cryptotensors``' copy of a shard lies."""
    return folder / "cryptotensors" / f"{number}.safetensors"
