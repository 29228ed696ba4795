"""``awskms:KEY``: a symmetric key of AWS KMS, by its ARN, its id or an alias (extra ``aws``, package ``botocore``).

The key never leaves KMS: it wraps a model's master key for whoever publishes, and unwraps it for whoever loads, bound to
the model by the encryption context. ``botocore`` finds credentials as every tool of AWS does, and signs; what is signed is sent
by the client that all key services are asked by, with its one deadline, its checks of addresses, and buffers that are
overwritten.
"""

from __future__ import annotations

import base64
import os
import queue
import re
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from ...errors import (
    ConfigError,
    FormatError,
    KeyAccessError,
    KeySourceDeniedError,
    KeySourceResponseError,
    KeySourceUnreachableError,
)
from .. import strict_json
from ..recipient import Recipient, WrapContext
from ..secrets import Secret, wipe
from ..threads import start
from .carried import bytes_in, secret_in, with_secret
from .fetch import reading
from .net import Deadline, Response, Url, check_status, parse_url, request
from .wrapping import WrappingProvider

_T = TypeVar("_T")

_ID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|mrk-[0-9a-f]{32}"
_ALIAS = r"alias/[A-Za-z0-9/_-]{1,250}"
_REGION = r"[a-z]{2}(?:-[a-z]+){1,3}-[0-9]{1,2}"
_ARN = re.compile(
    rf"arn:(?P<partition>aws(?:-[a-z]+)*):kms:(?P<region>{_REGION}):(?P<account>[0-9]{{12}}):"
    rf"(?:key/(?P<id>{_ID})|(?P<alias>{_ALIAS}))"
)
_REFERENCE = re.compile(rf"(?P<key>arn:[^?]*|{_ID}|{_ALIAS})(?:\?region=(?P<region>{_REGION}))?")
_CODE = re.compile(rb'"__type"[ \t\r\n]*:[ \t\r\n]*"(?:[\w.]+#)?(\w{1,64})"')
_ALGORITHM = '"EncryptionAlgorithm":"SYMMETRIC_DEFAULT"'

_DENIED = {
    "AccessDeniedException": "no policy of the key or of the caller allows it, or there is no such key",
    "DisabledException": "the key is disabled",
    "ExpiredTokenException": "the credentials have expired",
    "IncorrectKeyException": "it was wrapped by another key",
    "InvalidCiphertextException": "it was wrapped by another key or for another model, or was altered",
    "InvalidSignatureException": "the credentials are wrong, or a clock is",
    "KMSInvalidStateException": "the key is disabled, or about to be deleted",
    "UnrecognizedClientException": "the credentials are wrong",
}
_LATER = {"ThrottlingException", "KMSInternalException", "DependencyTimeoutException", "KeyUnavailableException"}


class AwsKmsProvider(WrappingProvider):
    """Symmetric keys of AWS KMS."""

    alg: ClassVar[str] = "aws-kms"

    def kid(self, reference: str) -> str:
        """See :meth:`WrappingProvider.kid`: the key as the reference names it. Files name it by its ARN."""
        return self._parse(reference)[0]

    def opens(self, reference: str, entry: Recipient) -> bool:
        """See :meth:`WrappingProvider.opens`.

        An alias may stand for any key, of its account and region where it says so; KMS refuses what is not wrapped by the
        key that it stands for.
        """
        return _may_be(self.kid(reference), entry.kid)

    def wrap(self, reference: str, master: Secret, context: WrapContext) -> Recipient:
        """See :meth:`WrappingProvider.wrap`: for the ARN of the key that wrapped it."""
        arn, wrapped = self._encrypt(reference, master, context)
        try:
            return Recipient(self.alg, arn, wrapped)
        except FormatError as e:
            raise KeyAccessError(e.message) from None

    def wrap_key(self, reference: str, master: Secret, context: WrapContext) -> bytes:
        """See :meth:`WrappingProvider.wrap_key`."""
        return self._encrypt(reference, master, context)[1]

    def unwrap_key(self, reference: str, wrapped: bytes, context: WrapContext) -> Secret:
        """See :meth:`WrappingProvider.unwrap_key`."""
        key, _ = self._parse(reference)
        blob = base64.b64encode(wrapped).decode()
        body = bytearray(f'{{{_asked(key, context)},"CiphertextBlob":"{blob}"}}'.encode())
        return self._ask(reference, "Decrypt", body, lambda answer: _plaintext_of(answer, key))

    def _encrypt(self, reference: str, master: Secret, context: WrapContext) -> tuple[str, bytes]:
        key, _ = self._parse(reference)
        body = with_secret(f'{{{_asked(key, context)},"Plaintext":"'.encode(), master, b'"}')
        return self._ask(reference, "Encrypt", body, lambda answer: _ciphertext_of(answer, key))

    @staticmethod
    def _parse(reference: str) -> tuple[str, str | None]:
        """The key, and the region that the reference names."""
        match = _REFERENCE.fullmatch(reference)
        arn = _ARN.fullmatch(match["key"]) if match else None
        if match is None or (match["key"].startswith("arn:") and arn is None) or (arn and match["region"]):
            raise KeyAccessError(
                "an awskms: reference names no key of AWS KMS",
                hint="awskms:arn:aws:kms:REGION:ACCOUNT:key/ID, awskms:ID or awskms:alias/NAME; ?region=REGION behind the last two",
            )
        return match["key"], arn["region"] if arn else match["region"]

    def _ask(self, reference: str, what: str, body: bytearray, read: Callable[[bytearray], _T]) -> _T:
        try:
            deadline = Deadline(self.seconds)
            session = _session()
            region = _region(self._parse(reference)[1], session)
            # Whom it may have to ask for credentials is in a region, too, and it does not know AWS_REGION.
            session.set_config_variable("region", region)
            url = parse_url(_endpoint(region, session), self.rules)
            headers = _signed(url, region, what, body, session, deadline)
            # Not kept for longer than it takes: it holds credentials.
            del session
            response = request(url, self.rules, deadline, method="POST", headers=headers, body=body, want_errors=True)
        finally:
            wipe(body)
        _check(response, url)
        return reading(response, url, read)


def _may_be(key: str, arn: str) -> bool:
    """Whether what a reference calls a key may be the key of an ARN."""
    named, wanted = _ARN.fullmatch(key), _ARN.fullmatch(arn)
    if wanted is None or wanted["id"] is None:
        return False
    if named is None:
        return key.startswith("alias/") or key == wanted["id"]
    same = named["partition"] == wanted["partition"] and named["account"] == wanted["account"]
    if named["alias"] is None:
        # Replicas of a key for several regions differ by the region alone.
        everywhere = wanted["id"].startswith("mrk-")
        return same and named["id"] == wanted["id"] and (everywhere or named["region"] == wanted["region"])
    return same


def _asked(key: str, context: WrapContext) -> str:
    return f'"KeyId":"{key}",{_ALGORITHM},"EncryptionContext":{strict_json.dumps(context.fields())}'


def _ciphertext_of(body: bytearray, key: str) -> tuple[str, bytes]:
    answer = strict_json.loads(bytes(body), what="answer", scan=True, any_number=True)
    return _arn_of(answer, key), bytes_in(answer, "CiphertextBlob")


def _plaintext_of(body: bytearray, key: str) -> Secret:
    answer, secret = secret_in(body, "Plaintext")
    try:
        _arn_of(answer, key)
    except KeyAccessError:
        secret.wipe()
        raise
    return secret


def _arn_of(answer: Any, key: str) -> str:
    arn = answer.get("KeyId") if isinstance(answer, dict) else None
    if not isinstance(arn, str) or not _may_be(key, arn):
        raise KeyAccessError("the answer names another key than was asked for, or none")
    return arn


def _check(response: Response, url: Url) -> None:
    """Raise what an error means. KMS tells them apart by name; the status is 400 for nearly all."""
    if response.status == 200:
        return
    match = _CODE.search(response.body)
    code = match[1].decode("ascii", errors="replace") if match else ""
    if code in _DENIED:
        raise KeySourceDeniedError(f"{url.source} denies the key ({code}): {_DENIED[code]}")
    if code in _LATER:
        raise KeySourceUnreachableError(f"{url.source} is out of order ({code})")
    if code and response.status < 500:
        hint = "a symmetric key is needed, in the region that is asked" if code != "ValidationException" else None
        raise KeySourceResponseError(f"{url.source} cannot do this ({code})", hint=hint)
    check_status(response, url)


# --- what botocore does ----------------------------------------------------------------------------------------------


def _session() -> Any:
    """A session of ``botocore``; it reads the profile, and asks nobody.

    Raises:
        ConfigError: It is not installed.
        KeyAccessError: The files of the profile cannot be read.
    """
    try:
        import botocore.session
    except ImportError:
        raise ConfigError(
            "awskms: references need the package botocore", hint="pip install 'secure-loader[aws]'"
        ) from None
    return botocore.session.Session()


def _region(named: str | None, session: Any) -> str:
    region = named or os.environ.get("AWS_REGION") or _setting(session, "region")
    if not isinstance(region, str) or not re.fullmatch(_REGION, region):
        raise KeyAccessError(
            "which region of AWS to ask for the key is not known",
            hint="name the key by its ARN, put ?region=REGION behind it, or set AWS_REGION",
        )
    return region


def _setting(session: Any, name: str) -> Any:
    from botocore.exceptions import BotoCoreError

    try:
        return session.get_config_variable(name)
    except BotoCoreError as e:
        raise KeyAccessError(f"the profile of AWS cannot be used ({type(e).__name__})") from None


def _endpoint(region: str, session: Any) -> str:
    """Where KMS is: as the variables say, else as AWS has it."""
    if not _setting(session, "ignore_configured_endpoint_urls"):
        for variable in ("AWS_ENDPOINT_URL_KMS", "AWS_ENDPOINT_URL"):
            if named := os.environ.get(variable):
                return named.rstrip("/")
    fips = "-fips" if _setting(session, "use_fips_endpoint") else ""
    return f"https://kms{fips}.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"


def _signed(
    url: Url, region: str, what: str, body: bytearray, session: Any, deadline: Deadline
) -> dict[str, str | Secret]:
    """Header fields of a request, signed.

    Credentials may be with a file, a program, or a service that has to be asked; how long that takes cannot be told to all of them.
    A thread that they hold back ends when they give up.

    Raises:
        KeyAccessError: There are no credentials.
        KeySourceDeniedError: AWS does not give them.
        KeySourceUnreachableError: Not in time.
    """
    answer: queue.SimpleQueue[dict[str, str | Secret] | KeyAccessError] = queue.SimpleQueue()

    def work() -> None:
        try:
            answer.put(_sign(url, region, what, body, session))
        except KeyAccessError as e:
            answer.put(e.with_traceback(None))
        except Exception as e:  # noqa: BLE001 - programs, files and services of all sorts; what they say may hold credentials
            answer.put(_refused(e, url))

    start(work, "secure-loader-aws")
    try:
        found = answer.get(timeout=deadline.left())
    except (queue.Empty, TimeoutError):
        raise KeySourceUnreachableError(f"{url.source}: no AWS credentials within {deadline.seconds:g} s") from None
    if isinstance(found, KeyAccessError):
        raise found
    return found


def _sign(url: Url, region: str, what: str, body: bytearray, session: Any) -> dict[str, str | Secret]:
    from botocore.auth import SigV4Auth
    from botocore.awsrequest import AWSRequest

    credentials = session.get_credentials()
    if credentials is None:
        raise KeyAccessError(
            f"{url.source}: there are no AWS credentials",
            hint="set AWS_PROFILE, or give the machine a role; what `aws sts get-caller-identity` finds is found",
        )
    fields = {"Content-Type": "application/x-amz-json-1.1", "X-Amz-Target": f"TrentService.{what}"}
    signed = AWSRequest("POST", f"{url.origin}{url.path}", headers=fields, data=body)
    SigV4Auth(credentials.get_frozen_credentials(), "kms", region).add_auth(signed)
    return {name: Secret(value.encode()) for name, value in signed.headers.items()}


def _refused(error: Exception, url: Url) -> KeyAccessError:
    from botocore.exceptions import ClientError, HTTPClientError

    kind = type(error).__name__
    if isinstance(error, ClientError):
        code = str(error.response.get("Error", {}).get("Code", ""))
        shown = code if re.fullmatch(r"\w{1,64}", code) else kind
        return KeySourceDeniedError(f"{url.source}: AWS gives no credentials ({shown})")
    if isinstance(error, HTTPClientError):
        return KeySourceUnreachableError(f"{url.source}: AWS credentials cannot be had ({kind})")
    return KeyAccessError(f"{url.source}: AWS credentials cannot be had ({kind})")
