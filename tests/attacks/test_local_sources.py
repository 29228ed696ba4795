"""28, 31, 67: what is refused of key files is refused whatever they are wrapped in, and is shown nowhere."""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path

import pyrage
import pytest

from secure_loader.core.keys.held import held
from secure_loader.core.keys.provider import KeyRing
from secure_loader.core.keys.scrypt_file import MIN_WORK, seal
from secure_loader.core.secrets import Secret
from secure_loader.errors import KeyAccessError
from tests.attacks.kit import KEY, Victim, assert_no_secret, build_file, master, refused, signing

PHRASE = b"correct horse battery staple"
SOURCES = ("env", "fd", "passphrase", "age")


@pytest.fixture
def put(tmp_path, secure_loader_home, monkeypatch):
    """Put a text into a source of some kind; returns the reference."""
    identity = pyrage.x25519.Identity.generate()

    def private(path: Path, data: bytes) -> Path:
        path.write_bytes(data)
        path.chmod(0o600)
        return path

    private(secure_loader_home / "age-identity.txt", str(identity).encode())
    monkeypatch.setenv("SECURE_LOADER_PASSPHRASE_FILE", str(private(tmp_path / "phrase", PHRASE)))

    def into(kind: str, *keys, text: bytes | None = None) -> str:
        text = json.dumps({"keys": [k.document() for k in keys]}).encode() if text is None else text
        if kind == "env":
            monkeypatch.setenv("ATTACKED_KEY", text.decode())
            return "env:ATTACKED_KEY"
        if kind == "fd":
            fd = os.memfd_create("key", 0)
            os.write(fd, text)
            os.lseek(fd, 0, os.SEEK_SET)
            return f"fd:{fd}"
        if kind == "age":
            return f"age:{private(tmp_path / 'a.age', pyrage.encrypt(text, [identity.to_public()]))}"
        return f"passphrase:{private(tmp_path / 'p.age', seal(bytearray(text), Secret(PHRASE), work=MIN_WORK))}"

    yield into
    with held() as table:
        table.clear()


@pytest.mark.parametrize("kind", SOURCES)
def test_a28_another_key_of_the_same_kid(tmp_path, put, kind):
    path = build_file(tmp_path / "x.safetensors")
    for keys in ([master(KEY.kid, 0x77)], [KEY, master(KEY.kid, 0x77)], [signing(KEY.kid)], [master("enc-other")]):
        with held() as table:
            table.clear()  # descriptors of this test get the same number again
        victim = Victim()
        victim.session.keys = KeyRing([put(kind, *keys)])
        with victim.open(path) as f, refused(KeyAccessError, place=path):
            f.get_tensor("big")


@pytest.mark.parametrize("scheme", ["passphrase", "age"])
def test_a31_paths_and_files(tmp_path, put, scheme):
    reference = put(scheme, KEY)
    real = Path(reference.partition(":")[2])
    for bad in (f"//host{real}", f"{real.parent}/../{real.parent.name}/{real.name}", f"{real}%20", f"{real}\0"):
        with refused(KeyAccessError, "key reference"):
            KeyRing([f"{scheme}:{bad}"]).resolve(request())
    link = tmp_path / "link.age"
    link.symlink_to(real)
    with refused(KeyAccessError, "is a link or not a regular file", place=link):
        KeyRing([f"{scheme}:{link}"]).resolve(request())
    real.chmod(0o644)
    with refused(KeyAccessError, "can be read by others", place=real):
        KeyRing([reference]).resolve(request())
    real.chmod(0o600)
    os.truncate(real, 1 << 40)
    with refused(KeyAccessError, "larger than 65536 bytes", place=real):
        KeyRing([reference]).resolve(request())


def request():
    from secure_loader.core.aead import ALGORITHMS
    from secure_loader.core.keys.provider import KeyRequest

    return KeyRequest(KEY.kid, ALGORITHMS["aes256gcm"])


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize(
    ("old", "new"), [(b'"oct"', b'"RSA"'), (b'"use"', b'"kid"'), (b'"A256GCM"', b'"A128GCM"'), (b"}]}", b"}")]
)
def test_a67_a_malformed_key_shows_nowhere(put, kind, old, new):
    """Crash reporters print local variables."""
    ring = KeyRing([put(kind, text=json.dumps({"keys": [KEY.document()]}).encode().replace(old, new))])
    with pytest.raises(KeyAccessError) as caught:
        ring.resolve(request())
    frames = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    assert_no_secret("".join(frames.format()))
    caught.value.__traceback__ = None
