"""Programs of the system that stand in for hardware: SoftHSM for an HSM, swtpm for a TPM. requirements/system installs them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOFTHSM = Path("/usr/lib/softhsm/libsofthsm2.so")
PIN = "a-pin-of-a-test"


def needs(*programs: str) -> None:
    """Without them tests are skipped, and fail where the CI variable says that they must be there."""
    missing = [name for name in programs if shutil.which(name) is None]
    if not missing:
        return
    message = f"not installed: {', '.join(missing)}; requirements/system does it"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


class SoftHsm:
    """SoftHSM with tokens in a folder of its own.

    Attributes:
        pin: File that holds the PIN of all tokens.
    """

    def __init__(self, folder: Path) -> None:
        needs("softhsm2-util", "pkcs11-tool")
        (folder / "tokens").mkdir()
        self.settings = folder / "softhsm2.conf"
        self.settings.write_text(f"directories.tokendir = {folder}/tokens\nobjectstore.backend = file\n")
        self.pin = folder / "pin"
        self.pin.touch(0o600)
        self.pin.write_text(PIN + "\n")

    def run(self, *words: str) -> str:
        environment = os.environ | {"SOFTHSM2_CONF": str(self.settings)}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def token(self, label: str) -> None:
        self.run(*f"softhsm2-util --init-token --free --label {label} --pin {PIN} --so-pin so-{PIN}".split())

    def key(self, label: str, *options: str, token: str = "models", kind: str = "AES:32") -> None:
        self.run(
            "pkcs11-tool", "--module", str(SOFTHSM), "--token-label", token, "--login", "--pin", PIN,
            "--keygen", "--key-type", kind, "--label", label, *options,
        )  # fmt: skip


def faulty_module(folder: Path) -> Path:
    """SoftHSM with faults that the variable FAULT chooses."""
    needs("g++")
    path = folder / "libfaults.so"
    words = ["g++", "-shared", "-fPIC", "-Wall", "-Werror", "-o", path, Path(__file__).with_name("pkcs11_faults.cpp")]
    subprocess.run([*words, "-ldl"], check=True, timeout=60)
    return path
