"""67: what of a key, of a PIN and of a sealed key is left in a process that had a device unwrap them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator

import pytest

from secure_loader import MasterKey
from secure_loader.core.aead import ALGORITHMS
from secure_loader.core.keys import tpm2
from secure_loader.core.keys.pkcs11 import MODULE_VARIABLE, PIN_VARIABLE, Pkcs11Provider
from secure_loader.core.keys.tpm2 import Tpm2Provider
from secure_loader.core.recipient import WrapContext
from secure_loader.core.secrets import Secret
from tests.attacks.kit import SIGN, build_file
from tests.attacks.test_memory import CHILD, seen, spellings
from tests.integration.keys.devices import SOFTHSM, SoftHsm, SoftTpm

CONTEXT = WrapContext("enc-1", "aes256gcm", "demo/model")


@pytest.fixture(scope="module")
def hsm(tmp_path_factory) -> SoftHsm:
    made = SoftHsm(tmp_path_factory.mktemp("softhsm"), pin=secrets.token_urlsafe(24))
    made.token("models")
    made.key("llm-kek", "--sensitive")
    return made


@pytest.fixture(scope="module")
def tpm(tmp_path_factory) -> Iterator[SoftTpm]:
    made = SoftTpm(tmp_path_factory.mktemp("tpm"))
    try:
        yield made
    finally:
        made.stop()


@contextlib.contextmanager
def process(model, reference: str, environment: dict[str, str], *steps: str) -> Iterator[subprocess.Popen]:
    """A process that has loaded the model and closed it, and waits."""
    trust = model.with_name("trust.json")
    trust.write_text(json.dumps(SIGN.verify_key().document()))
    words = [sys.executable, "-c", CHILD, model, reference, trust, *steps]
    child = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | environment | {"LD_BIND_NOW": "1"}
    )
    try:
        assert child.stdout.readline() == b"ready\n"
        yield child
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("place", ["file", "variable"])
def test_a67_neither_key_nor_pin_in_memory_after_closing(hsm, tmp_path, monkeypatch, place):
    monkeypatch.setenv("SOFTHSM2_CONF", str(hsm.settings))
    monkeypatch.setenv(MODULE_VARIABLE, str(SOFTHSM))
    raw = secrets.token_bytes(32)
    key = MasterKey("enc-1", ALGORITHMS["aes256gcm"], Secret(raw))
    in_file = f"token=models;object=llm-kek?pin-source={hsm.pin}"
    entry = Pkcs11Provider().wrap(in_file, key.secret, CONTEXT)
    model = build_file(tmp_path / "x.safetensors", master=key, recipients=(entry,))
    pin = hsm.pin.read_text().strip()
    wanted = spellings(raw, "master key") | {"PIN": pin.encode(), "end of PIN": pin[12:].encode()}
    reference = f"pkcs11:{in_file if place == 'file' else in_file.partition('?')[0]}"
    environment = {PIN_VARIABLE: pin} if place == "variable" else {}
    with process(model, reference, environment, "forget") as child:
        assert seen(child, wanted) == set()
    if place == "variable":
        with process(model, reference, environment) as child:
            assert "PIN" in seen(child, wanted), "remembered, until it is to be forgotten"


def test_a67_no_sealed_key_in_memory_after_closing(tpm, tmp_path, monkeypatch):
    monkeypatch.setenv(tpm2.TCTI_VARIABLE, tpm.tcti)
    raw, sealed = secrets.token_bytes(32), []
    key = MasterKey("enc-1", ALGORITHMS["aes256gcm"], Secret(raw))
    genuine = tpm2._seal

    def seal(tpm, srk, options, kek):
        sealed.append(bytes(kek.reveal()))
        return genuine(tpm, srk, options, kek)

    monkeypatch.setattr(tpm2, "_seal", seal)
    entry = Tpm2Provider().wrap("pcrs=sha256:7", key.secret, CONTEXT)
    model = build_file(tmp_path / "x.safetensors", master=key, recipients=(entry,))
    wanted = spellings(raw, "master key") | spellings(sealed[0], "sealed key")
    with process(model, "tpm2:", {}, "forget") as child:
        assert seen(child, wanted) == set()
