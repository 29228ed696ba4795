"""A publisher of encrypted models: keys, a home folder that trusts them, and the folders it publishes."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secure_loader import MasterKey, SigningKey, encrypt_model
from secure_loader.core.aead import ALGORITHMS
from secure_loader.core.secrets import Secret


@dataclass(frozen=True)
class Publisher:
    """Keys, and where they are written.

    Attributes:
        home: A ``SECURE_LOADER_HOME`` with the master key and the trusted public key.
        master: Encrypts.
        signing: Signs.
    """

    home: Path
    master: MasterKey
    signing: SigningKey

    @classmethod
    def create(cls, home: Path) -> Publisher:
        """Make keys, write them to ``home``."""
        master = MasterKey("master", ALGORITHMS["aes256gcm"], Secret(os.urandom(32)))
        signing = SigningKey("publisher", Secret(os.urandom(32)))
        (home / "keys").mkdir(parents=True, mode=0o700)
        (home / "trust").mkdir()
        write_key(home / "keys" / "master.jwk", master.document())
        trusted = {"name": "publisher", "key": signing.verify_key().document()}
        (home / "trust" / "publisher.json").write_text(json.dumps(trusted))
        return cls(home, master, signing)

    def publish(self, source: Path, target: Path, **options: Any) -> Path:
        """Encrypt and sign a folder."""
        encrypt_model(source, target, key=self.master, signing_key=self.signing, progress=False, **options)
        return target


def write_key(path: Path, document: dict[str, str]) -> None:
    """A private key file as it must be: for its owner only."""
    path.touch(mode=0o600)
    path.write_text(json.dumps(document))
