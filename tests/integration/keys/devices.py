"""Programs of the system that stand in for hardware: SoftHSM for an HSM, swtpm for a TPM. requirements/system installs them."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
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

    def __init__(self, folder: Path, pin: str = PIN) -> None:
        needs("softhsm2-util", "pkcs11-tool")
        (folder / "tokens").mkdir()
        self.settings = folder / "softhsm2.conf"
        self.settings.write_text(f"directories.tokendir = {folder}/tokens\nobjectstore.backend = file\n")
        self.pin = folder / "pin"
        self.pin.touch(0o600)
        self.pin.write_text(pin + "\n")
        self._pin = pin

    def run(self, *words: str) -> str:
        environment = os.environ | {"SOFTHSM2_CONF": str(self.settings)}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def token(self, label: str) -> None:
        self.run(
            *f"softhsm2-util --init-token --free --label {label} --pin {self._pin} --so-pin so-{self._pin}".split()
        )

    def key(self, label: str, *options: str, token: str = "models", kind: str = "AES:32") -> None:
        self.run(
            "pkcs11-tool", "--module", str(SOFTHSM), "--token-label", token, "--login", "--pin", self._pin,
            "--keygen", "--key-type", kind, "--label", label, *options,
        )  # fmt: skip


class SoftTpm:
    """swtpm with a state of its own, without a resource manager: whoever leaves objects behind soon finds no room.

    Attributes:
        tcti: Where it is, as tpm2-tools and we take it.
        process: The program.
    """

    def __init__(self, folder: Path) -> None:
        needs("swtpm", "tpm2_pcrextend")
        self.socket = folder / "tpm"
        self.tcti = f"swtpm:path={self.socket}"
        words = [
            "swtpm", "socket", "--tpm2", "--tpmstate", f"dir={folder}", "--server", f"type=unixio,path={self.socket}",
            "--ctrl", f"type=unixio,path={self.socket}.ctrl", "--flags", "not-need-init,startup-clear",
        ]  # fmt: skip
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(500):
            if self.socket.exists() or self.process.poll() is not None:
                break
            time.sleep(0.01)
        assert self.socket.exists(), "swtpm does not start"

    def run(self, *words: str | Path, tcti: str | None = None) -> bytes:
        """A program of tpm2-tools."""
        environment = os.environ | {"TPM2TOOLS_TCTI": tcti or self.tcti, "TSS2_LOG": "all+none"}
        done = subprocess.run(words, env=environment, capture_output=True, timeout=30, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def left(self) -> bytes:
        """Handles of objects and sessions that nobody flushed."""
        kinds = ("handles-transient", "handles-loaded-session", "handles-saved-session")
        return b"".join(self.run("tpm2_getcap", kind) for kind in kinds)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(10)


def faulty_module(folder: Path) -> Path:
    """SoftHSM with faults that the variable FAULT chooses."""
    needs("g++")
    path = folder / "libfaults.so"
    words = ["g++", "-shared", "-fPIC", "-Wall", "-Werror", "-o", path, Path(__file__).with_name("pkcs11_faults.cpp")]
    subprocess.run([*words, "-ldl"], check=True, timeout=60)
    return path
