"""Key files that are encrypted to an identity, made by pyrage as age makes them."""

from __future__ import annotations

import json
import subprocess
import sys

import pyrage
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from secure_loader.core.aead import ALGORITHMS
from secure_loader.core.keys.local import keys_at
from secure_loader.core.keys.provider import KeyRequest, KeyRing
from secure_loader.errors import ConfigError, KeyAccessError
from tests.attacks.kit import KEY, assert_no_secret

TEXT = json.dumps(KEY.document()).encode()
REQUEST = KeyRequest(KEY.kid, ALGORITHMS["aes256gcm"])
# Made by ssh-keygen for this test, under the passphrase "passphrase".
LOCKED_PUBLIC = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGqxzpVSbmD2h9JBEpDSIcyKpnE8zBjtzJMwspp7jg9a test"
LOCKED = """-----BEGIN OPENSSH PRIVATE KEY-----
b3BlbnNzaC1rZXktdjEAAAAACmFlczI1Ni1jdHIAAAAGYmNyeXB0AAAAGAAAABAK8Jhpx9
8SiaBspa8seQpQAAAAEAAAAAEAAAAzAAAAC3NzaC1lZDI1NTE5AAAAIGqxzpVSbmD2h9JB
EpDSIcyKpnE8zBjtzJMwspp7jg9aAAAAkO5L0TxwH4xGSWbWY3QrGOeKZUoNGYasxUScOs
zl+hLYZEymDS87U+LrmbTm6NqaLss/3y4tbj9w8Ps++KGTREteLUP3onSQZ6PCVG2pRe+N
FXWNf1JcLIwvPuUWGlaQdOL5bmMvv/zFg+oDRNxjSP+qs5u9UHyg7HbjI3LGCIx9BA4OR3
ZKue1D0R9HSW9cow==
-----END OPENSSH PRIVATE KEY-----
"""


def private(path, data: bytes | str):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    path.chmod(0o600)
    return path


@pytest.fixture
def identity(secure_loader_home):
    made = pyrage.x25519.Identity.generate()
    private(secure_loader_home / "age-identity.txt", f"# created: today\n# public key: {made.to_public()}\n{made}\n")
    return made


@pytest.fixture
def key_file(tmp_path, identity):
    return private(tmp_path / "alice.jwk.age", pyrage.encrypt(TEXT, [identity.to_public()]))


def test_an_identity_of_age_keygen(key_file, identity):
    ring = KeyRing([f"age:{key_file}"])
    assert bytes(ring.resolve(REQUEST).secret.reveal()) == bytes(KEY.secret.reveal())
    assert [k.kid for k in keys_at(f"age:{key_file}")] == [KEY.kid]
    assert ring.resolve(KeyRequest(KEY.kid, ALGORITHMS["aes256gcm"])) is not None, "a file can be read again"
    private(
        key_file,
        pyrage.encrypt(TEXT, [pyrage.x25519.Identity.generate().to_public(), identity.to_public()], armored=True),
    )
    assert keys_at(f"age:{key_file}"), "armoured, to several"


def test_several_identities_in_another_file(key_file, identity, secure_loader_home, monkeypatch, tmp_path):
    (secure_loader_home / "age-identity.txt").unlink()
    private(tmp_path / "ids", f"{pyrage.x25519.Identity.generate()}\n\n{identity}\n")
    monkeypatch.setenv("SECURE_LOADER_AGE_IDENTITY", str(tmp_path / "ids"))
    assert keys_at(f"age:{key_file}")


def test_an_openssh_key(tmp_path, monkeypatch):
    ssh = Ed25519PrivateKey.generate()
    public = ssh.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    plain = serialization.NoEncryption()
    text = ssh.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, plain)
    path = private(tmp_path / "id_ed25519", text)
    monkeypatch.setenv("SECURE_LOADER_AGE_IDENTITY", str(path))
    recipient = pyrage.ssh.Recipient.from_str(public.decode())
    key_file = private(tmp_path / "alice.jwk.age", pyrage.encrypt(TEXT, [recipient]))
    assert [k.kid for k in keys_at(f"age:{key_file}")] == [KEY.kid]


def test_an_openssh_key_under_a_passphrase(tmp_path, monkeypatch):
    monkeypatch.setenv("SECURE_LOADER_AGE_IDENTITY", str(private(tmp_path / "id_ed25519", LOCKED)))
    recipient = pyrage.ssh.Recipient.from_str(LOCKED_PUBLIC)
    key_file = private(tmp_path / "alice.jwk.age", pyrage.encrypt(TEXT, [recipient]))
    with pytest.raises(KeyAccessError, match=r"without a passphrase|cannot be opened with the identity"):
        keys_at(f"age:{key_file}")


def test_files_for_others_and_damaged_files_look_the_same(key_file, identity):
    messages = set()
    good = key_file.read_bytes()
    stranger = pyrage.x25519.Identity.generate()
    cases = [pyrage.encrypt(TEXT, [stranger.to_public()]), good[:-1], good + b"x", b"", b"age-encryption.org/v1\n"]
    places = (60, 130, 180, len(good) - 20, len(good) - 1)
    cases += [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in places]
    for data in cases:
        private(key_file, data)
        with pytest.raises(KeyAccessError) as caught:
            keys_at(f"age:{key_file}")
        messages.add(caught.value.message)
        assert_no_secret(str(caught.value))
    assert len(messages) == 1


def test_a_file_under_a_passphrase_is_not_asked_about(key_file, identity):
    from secure_loader.core.keys.scrypt_file import seal
    from secure_loader.core.secrets import Secret

    private(key_file, seal(bytearray(TEXT), Secret(b"correct horse"), work=17))
    with pytest.raises(KeyAccessError, match="cannot be opened with the identity"):
        keys_at(f"age:{key_file}")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# only a comment\n",
        "AGE-SECRET-KEY-1QQQQQQ",
        "age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nx",
        "é",
        "{good}\nnonsense",
        "{good}\n" * 101,
    ],
)
def test_what_is_no_identity(key_file, identity, secure_loader_home, text):
    private(secure_loader_home / "age-identity.txt", text.replace("{good}", str(identity)))
    with pytest.raises(KeyAccessError, match="age identity file holds no identity that can be used") as caught:
        keys_at(f"age:{key_file}")
    assert "AGE-SECRET" not in str(caught.value)


def test_careless_files(key_file, secure_loader_home):
    path = secure_loader_home / "age-identity.txt"
    path.chmod(0o644)
    with pytest.raises(KeyAccessError, match="age identity file can be read by others"):
        keys_at(f"age:{key_file}")
    path.chmod(0o600)
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))
    with pytest.raises(KeyAccessError, match="age identity file is a link"):
        keys_at(f"age:{key_file}")
    path.unlink()
    with pytest.raises(KeyAccessError, match="age identity file cannot be read: No such file"):
        keys_at(f"age:{key_file}")
    key_file.chmod(0o640)
    with pytest.raises(KeyAccessError, match="key file can be read by others"):
        keys_at(f"age:{key_file}")


def test_without_the_package(key_file):
    code = f"""
import sys
sys.modules["pyrage"] = None
from secure_loader.core.keys.local import keys_at
keys_at("age:{key_file}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ConfigError: age: references need the package pyrage" in done.stderr
    assert "secure-loader[age]" in done.stderr
    assert ConfigError.exit_code == 2
