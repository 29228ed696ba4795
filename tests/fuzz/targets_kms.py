"""What the key management services of clouds answer, what they wrapped, and tokens: what must hold is in the claims."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable

from secure_loader.core.keys import awskms, azurekv, gcpkms
from secure_loader.core.keys.net import Response
from secure_loader.core.keys.tokens import token_in
from secure_loader.core.recipient import WrapContext
from secure_loader.core.secrets import Secret
from secure_loader.errors import KeyAccessError, SecureLoaderError
from tests.fuzz.claims import URL, check, check_no_secret, read

NAME = "models"
ARN = "arn:aws:kms:eu-central-1:123456789012:key/11111111-2222-3333-4444-555555555555"
GOOGLE = "projects/p/locations/global/keyRings/r/cryptoKeys/models"
VERSION = "0" * 32
CONTEXT = WrapContext("enc-1", "aes256gcm", "demo/model")
RAW = bytes(range(32))


def one_kms(data: bytes) -> None:
    """The input is the body of an answer of each service, also of one that refuses, and what was wrapped before."""
    read(data, lambda body: awskms._ciphertext_of(body, ARN))
    read(data, lambda body: gcpkms._ciphertext_of(body, GOOGLE))
    secrets_of = (
        read(data, lambda body: awskms._plaintext_of(body, ARN)),
        read(data, gcpkms._plaintext_of),
        read(data, lambda body: azurekv._secret_of(body, NAME, VERSION)),
    )
    for secret, member in zip(secrets_of, ("Plaintext", "plaintext", "value"), strict=True):
        if secret is not None:
            text = json.loads(data)[member].rstrip("=").replace("-", "+").replace("_", "/")
            check(base64.b64decode(text + "=" * (-len(text) % 4)) == secret.reveal(), "another secret")
    token = read(data, lambda body: token_in(body, "auth", "client_token"))
    if token is not None:
        said = json.loads(data)["auth"]["client_token"]
        check(token.reveal() == said.rstrip().encode(), "another token")
        check(not set(token.reveal()) & set(b'\r\n "\\'), "a token that ends elsewhere")
    for alg, more in (("RSA-OAEP-256", ("iv",)), ("A256GCM", ("iv", "tag"))):
        read(data, lambda body, alg=alg, more=more: azurekv._entry_of(body, alg, NAME, more))
    for status in (400, 403, 404, 429, 500):
        response = Response(status, {}, bytearray(data))
        for refuse in (
            lambda r: awskms._check(r, URL),
            lambda r: gcpkms._check(r, URL, "decrypt"),
            lambda r: azurekv._check(r, URL, "unwrapkey"),
        ):
            try:
                refuse(response)
                check(False, "a refusal that is none")
            except KeyAccessError as e:
                check_no_secret(data, str(e))
                check(e.message.isprintable() and len(e.message) < 400, "a message that repeats the answer")
    try:
        entry = azurekv._parse(data, NAME)
        azurekv._open(Secret(RAW), entry | {"sealed": entry.get("sealed", "")}, CONTEXT, URL)
        check(False, "what nobody sealed opens")
    except SecureLoaderError:
        pass


TARGETS: dict[str, Callable[[bytes], None]] = {"fuzz_kms": one_kms}


def seeds() -> dict[str, list[bytes]]:
    """Where fuzzing starts."""
    plain, url = base64.b64encode(RAW).decode(), base64.urlsafe_b64encode(RAW).decode().rstrip("=")
    kid = f"https://vault.example/keys/{NAME}/{VERSION}"
    whole = {"verifiedPlaintextCrc32c": True, "verifiedAdditionalAuthenticatedDataCrc32c": True}
    documents = [
        {"KeyId": ARN, "CiphertextBlob": plain, "EncryptionAlgorithm": "SYMMETRIC_DEFAULT"},
        {"KeyId": ARN, "CiphertextBlob": "\u00e9" * 8},
        {"KeyId": ARN, "Plaintext": plain},
        {"__type": "AccessDeniedException", "message": "no"},
        {"name": f"{GOOGLE}/cryptoKeyVersions/1", "ciphertext": plain, "ciphertextCrc32c": _sum()} | whole,
        {"name": f"{GOOGLE}/cryptoKeyVersions/1", "ciphertext": "\u00e9" * 8, "ciphertextCrc32c": "0"} | whole,
        {"plaintext": plain, "plaintextCrc32c": _sum()},
        {"error": {"code": 400, "status": "FAILED_PRECONDITION", "message": "no"}},
        {"kid": kid, "value": url, "iv": url[:16], "tag": url[:22]},
        {"kid": kid, "value": url},
        {"alg": "A256GCM", "version": VERSION, "value": url, "iv": url[:16], "tag": url[:22]},
        {"alg": "RSA-OAEP-256", "version": VERSION, "value": url, "iv": url[:16], "sealed": url + url},
        {"auth": {"client_token": "hvs." + "A" * 40}},
        {"auth": {"client_token": "\ud800" * 20}},
        {"auth": {"client_token": "short\n"}},
    ]
    return {"fuzz_kms": [json.dumps(d).encode() for d in documents]}


def _sum() -> str:
    return str(gcpkms.crc32c(RAW))
