"""``gcpkms:projects/…/cryptoKeys/NAME``: a symmetric key of Google Cloud KMS, by its REST interface.

The key never leaves KMS: it wraps a model's master key for whoever publishes, and unwraps it for whoever loads, bound to
the model by additional authenticated data. ``gcpkms:https://HOST/projects/…`` asks another endpoint, such as a regional one.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from ...errors import KeyAccessError, KeySourceDeniedError, KeySourceResponseError
from .. import strict_json
from ..recipient import WrapContext
from ..secrets import Secret, wipe
from .bearer import Cloud
from .carried import bytes_in, secret_in, with_secret
from .fetch import reading
from .net import Deadline, Response, Url, check_status, parse_url, request
from .wrapping import WrappingProvider

_T = TypeVar("_T")

_API = "https://cloudkms.googleapis.com"
_ID = r"[A-Za-z0-9_-]{1,63}"
_KEY = rf"projects/[a-z0-9][a-z0-9.:-]{{0,62}}/locations/[a-z0-9-]{{1,63}}/keyRings/{_ID}/cryptoKeys/{_ID}"
_REFERENCE = re.compile(rf"(?:(?P<base>https?://[^/]+)/)?(?P<key>{_KEY})")
_VERSION = re.compile(r"/cryptoKeyVersions/[1-9][0-9]{0,9}")
_STATUS = re.compile(rb'"status"[ \t\r\n]*:[ \t\r\n]*"([A-Z_]{1,40})"')
_CLOUD = Cloud(
    name="Google Cloud",
    variable="GOOGLE_OAUTH_ACCESS_TOKEN",
    file="CLOUDSDK_AUTH_ACCESS_TOKEN_FILE",
    metadata="GCE_METADATA_HOST",
    path="/computeMetadata/v1/instance/service-accounts/default/token",
    query="",
    header=("Metadata-Flavor", "Google"),
    signs=True,
    aliases=("metadata.google.internal", "metadata"),
)


class GcpKmsProvider(WrappingProvider):
    """Symmetric keys of Google Cloud KMS."""

    alg: ClassVar[str] = "gcp-kms"

    def kid(self, reference: str) -> str:
        """See :meth:`WrappingProvider.kid`: ``projects/…/cryptoKeys/NAME``."""
        return _parse(reference)[1]

    def wrap_key(self, reference: str, master: Secret, context: WrapContext) -> bytes:
        """See :meth:`WrappingProvider.wrap_key`."""
        after = f'","plaintextCrc32c":"{crc32c(master.reveal())}",{_bound(context)}}}'
        body = with_secret(b'{"plaintext":"', master, after.encode())
        return self._ask(reference, "encrypt", body, lambda answer: _ciphertext_of(answer, self.kid(reference)))

    def unwrap_key(self, reference: str, wrapped: bytes, context: WrapContext) -> Secret:
        """See :meth:`WrappingProvider.unwrap_key`."""
        text = base64.b64encode(wrapped).decode()
        body = f'{{"ciphertext":"{text}","ciphertextCrc32c":"{crc32c(wrapped)}",{_bound(context)}}}'
        return self._ask(reference, "decrypt", bytearray(body.encode()), _plaintext_of)

    def _ask(self, reference: str, what: str, body: bytearray, read: Callable[[bytearray], _T]) -> _T:
        try:
            deadline = Deadline(self.seconds)
            base, key = _parse(reference)
            url = parse_url(f"{base}/v1/{key}:{what}", self.rules)
            headers: dict[str, str | Secret] = {"Authorization": _CLOUD.authorization(url, self.rules, deadline)}
            response = request(url, self.rules, deadline, method="POST", headers=headers, body=body, want_errors=True)
        finally:
            wipe(body)
        _check(response, url, what)
        return reading(response, url, read)


def _parse(reference: str) -> tuple[str, str]:
    """Endpoint and key."""
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise KeyAccessError(
            "a gcpkms: reference names no key of Google Cloud KMS",
            hint="gcpkms:projects/PROJECT/locations/LOCATION/keyRings/RING/cryptoKeys/NAME, without a version",
        )
    return match["base"] or _API, match["key"]


def _bound(context: WrapContext) -> str:
    data = context.encode()
    text = base64.b64encode(data).decode()
    return f'"additionalAuthenticatedData":"{text}","additionalAuthenticatedDataCrc32c":"{crc32c(data)}"'


def _ciphertext_of(body: bytearray, key: str) -> bytes:
    answer = strict_json.loads(bytes(body), what="answer", scan=True, any_number=True)
    name = answer.get("name") if isinstance(answer, dict) else None
    if not isinstance(name, str) or not name.startswith(key) or not _VERSION.fullmatch(name[len(key) :]):
        raise KeyAccessError("the answer names another key than was asked for, or none")
    if not (
        answer.get("verifiedPlaintextCrc32c") is True
        and answer.get("verifiedAdditionalAuthenticatedDataCrc32c") is True
    ):
        raise KeyAccessError("the answer does not say that what was sent arrived as it was")
    wrapped = bytes_in(answer, "ciphertext")
    _check_sum(wrapped, answer.get("ciphertextCrc32c"), "ciphertext")
    return wrapped


def _plaintext_of(body: bytearray) -> Secret:
    answer, secret = secret_in(body, "plaintext")
    try:
        _check_sum(secret.reveal(), answer.get("plaintextCrc32c"), "plaintext")
    except KeyAccessError:
        secret.wipe()
        raise
    return secret


def _check_sum(data: bytes | memoryview, said: Any, what: str) -> None:
    # Whole numbers of 64 bits are strings in Google's JSON.
    if str(said) != str(crc32c(data)):
        raise KeyAccessError(f"{what} of the answer is not what its checksum is of")


def _check(response: Response, url: Url, what: str) -> None:
    """Raise what an error means."""
    if response.status == 400:
        match = _STATUS.search(response.body)
        status = match[1] if match else b""
        if status == b"FAILED_PRECONDITION":
            raise KeySourceDeniedError(
                f"{url.source} denies the key: it, or the version that is needed, is disabled or destroyed, or not for encryption"
            )
        if status == b"INVALID_ARGUMENT" and what == "decrypt":
            raise KeySourceDeniedError(
                f"{url.source} does not unwrap: it was wrapped by another key or for another model, or was altered"
            )
        raise KeySourceResponseError(f"{url.source} answers HTTP 400 to what KMS should understand")
    if response.status in (401, 403):
        raise KeySourceDeniedError(
            f"{url.source} denies the key (HTTP {response.status})",
            hint="the access token has expired"
            if response.status == 401
            else "the role is missing (Cloud KMS CryptoKey Encrypter, Decrypter), or the key",
        )
    check_status(response, url)


def _entry(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value


_TABLE = [_entry(value) for value in range(256)]


def crc32c(data: bytes | memoryview) -> int:
    """CRC-32C (Castagnoli) of a few bytes."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF
