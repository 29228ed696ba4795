"""What is fuzzed, and what must hold: only our own errors come out, and what is accepted reads the same when written anew.

No atheris here: `test_fuzz_smoke.py` runs these over known bytes in every test run, `fuzz_*.py` under the fuzzer.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import re
from collections.abc import Callable

import safetensors

from secure_loader.core import envelope, header, manifest, strict_json, trust
from secure_loader.core.keys import jwk
from secure_loader.core.keys.hybrid import Identity, PublicIdentity
from secure_loader.core.secrets import Secret
from secure_loader.core.trust import TrustedSigner, TrustStore
from secure_loader.core.trust_rules import Subject
from secure_loader.core.types import DTYPES, TensorInfo
from secure_loader.errors import FormatError, SecureLoaderError, SignatureError, VerificationError
from tests.fuzz.claims import SEPARATOR, check, check_no_secret

_END = re.compile(rb'"data_offsets"\s*:\s*\[\s*\d+\s*,\s*(\d{1,19})\s*\]')
_COMPARED_BODY = 1 << 16  # safetensors needs the body in memory
_SIGNER = jwk.SigningKey("fuzz", Secret(bytes(range(32))))
_STRANGER = _SIGNER.verify_key().public
_BY_THE_BYTE = 100

# The tensors of most test vectors, so that those are seeds; sections of the input are the strings beside them.
TENSORS = (
    TensorInfo("v", "F32", (2, 3), 0, 24),
    TensorInfo("w", "F32", (2, 3), 24, 48),
    TensorInfo("c", "U8", (5,), 48, 53),
)
SECTIONS = (
    envelope.CRYPTO_KEYS,
    envelope.ENCRYPTION,
    envelope.POLICY,
    envelope.SIGNATURE,
    envelope.PROFILE,
    envelope.NOTICE,
    "format",
    "__other__",
    envelope.SECOND,
)


def scan_header(text: bytes) -> None:
    """The verdict of the scanner must not depend on where the pieces of a file end."""
    verdicts = []
    # Single bytes only where there are few of them: a piece costs as much as many bytes.
    for step in (len(text), len(text) // 3, 1 if len(text) <= _BY_THE_BYTE else len(text) // 40):
        scanner = strict_json.Scanner()
        try:
            for at in range(0, len(text), max(step, 1)):
                scanner.feed(text[at : at + max(step, 1)])
            scanner.finish()
            verdicts.append(None)
        except FormatError as e:
            verdicts.append(e)
    check(len({v is None for v in verdicts}) == 1, "the scanner's verdict depends on the pieces")
    if verdicts[0] is not None:
        raise verdicts[0]


def parse_header(raw: bytes, body: int) -> None:
    scan_header(raw)
    found = header.parse(raw, body)
    text = found.canonical_json()
    again = header.parse(header.file_prefix(text)[header.LENGTH.size :], body)
    check(again.metadata == found.metadata, "metadata changed in canonical form")
    check(list(again.tensors.items()) == list(found.tensors.items()), "tensors changed in canonical form")
    check(again.canonical_json() == text, "canonical form is not canonical")
    check(sum(t.nbytes for t in found.tensors.values()) == body, "the tensors do not cover the body")
    for t in found.tensors.values():
        elements = 1
        for n in t.shape:
            elements *= n
        check(elements * DTYPES[t.dtype].bits == 8 * t.nbytes, "a tensor has another size than its shape")
    if body <= _COMPARED_BODY:
        # What safetensors refuses must be refused here; this raises if it does.
        theirs = safetensors.deserialize(header.LENGTH.pack(len(raw)) + raw + bytes(body))
        check({name for name, _ in theirs} == found.tensors.keys(), "safetensors sees other tensors")


def one_header(data: bytes) -> None:
    """The input is a file; and once more, the JSON of a header before a body of the size that its offsets ask for."""
    for raw, body in ((None, 0), (data, max([int(n) for n in _END.findall(data)], default=0))):
        try:
            if raw is None:
                n = header.parse_length(data[: header.LENGTH.size], len(data))
                start = header.LENGTH.size
                parse_header(data[start : start + n], len(data) - start - n)
            else:
                parse_header(raw, body)
        except SecureLoaderError:
            pass


def one_metadata(data: bytes) -> None:
    """The input is the metadata strings of a well-formed header, in the order of `SECTIONS`."""
    texts = data.split(SEPARATOR)
    try:
        # What stands in a parsed header is text without surrogates; anything else never gets there.
        meta = {name: text.decode() for name, text in zip(SECTIONS, texts, strict=False) if text}
    except UnicodeDecodeError:
        return
    raw = header.file_prefix(header.canonical_json(meta, TENSORS))[header.LENGTH.size :]
    head = header.parse(raw, TENSORS[-1].stop)
    check(head.metadata == meta, "metadata changed in the header")
    try:
        found = envelope.parse(head)
    except SecureLoaderError:
        return
    kept = {name: meta[name] for name in (envelope.SIGNATURE, envelope.SECOND) if name in meta}
    written = envelope.metadata(found) | kept
    again = header.parse(header.file_prefix(header.canonical_json(written, TENSORS))[header.LENGTH.size :], 53)
    check(envelope.parse(again) == found, "the envelope changed when written anew")
    check(envelope.metadata(envelope.parse(again)) == envelope.metadata(found), "the envelope has two forms")
    store = TrustStore([TrustedSigner("stranger", jwk.VerifyKey(found.sign.kid, _STRANGER))])
    try:
        trust.verify_header(head, found, store)
    except SignatureError:
        return
    check(False, "a signature of nobody was accepted")


def one_jwk(data: bytes) -> None:
    """The input is a key file, and once more a trust file."""
    try:
        for key in jwk.parse_keys(data, "fuzz"):
            if isinstance(key, (Identity, PublicIdentity)):
                one_identity(data, key)
                continue
            second = getattr(key, "second", None)
            documents = [key.document(), *([] if second is None else [second.document()])]
            (again,) = jwk.parse_keys(json.dumps({"keys": documents}), "again")
            check(again == key, "a key changed when written anew")
            if isinstance(key, jwk.VerifyKey):
                check(len(key.thumbprint()) == 43, "a thumbprint has another length")
            else:
                check(not isinstance(again, jwk.VerifyKey), "a private key became public")
                same = bytes(again.secret.reveal()) == bytes(key.secret.reveal())
                check(same, "a secret changed when written anew")
                check_no_secret(data, repr(key))
    except SecureLoaderError as e:
        check_no_secret(data, f"{e}{e.__cause__ or ''}")
    try:
        signer = trust.parse_trusted(strict_json.loads(data, what="trust file", scan=True), "fuzz")
        again_signer = trust.parse_trusted(signer.document(), "again")
        check(again_signer == _to_the_second(signer), "a trusted signer changed when written anew")
    except SecureLoaderError as e:
        check_no_secret(data, str(e))


def one_identity(data: bytes, key: Identity | PublicIdentity) -> None:
    again = jwk.parse_key(key.document(jwk.b64url), "again")
    check(again == key and type(again) is type(key), "an identity changed when written anew")
    if isinstance(key, Identity):
        check(again.secret.reveal() == key.secret.reveal(), "a secret changed when written anew")
        check_no_secret(data, repr(key))


def _to_the_second(signer: TrustedSigner) -> TrustedSigner:
    until: dt.datetime | None = signer.not_after and signer.not_after.replace(microsecond=0)
    return TrustedSigner(signer.name, signer.key, signer.models, until)


def one_manifest(data: bytes) -> None:
    """The input is a manifest; and once more, the payload of one."""
    for file in (data, _jws(data)):
        try:
            found = manifest.peek(file)
        except SecureLoaderError:
            continue
        jws = json.loads(file)
        payload = base64.urlsafe_b64decode(jws["payload"] + "==")
        check(found.payload() == payload, "an accepted payload is not canonical")
        for name in found.files:
            check(not name.startswith("/") and ".." not in name.split("/"), "a path leaves the folder")
        signed = found.sign(_SIGNER)
        check(manifest.peek(signed) == found, "a manifest changed when signed anew")
        part = jws if "protected" in jws else jws["signatures"][0]
        message = f"{part['protected']}.{jws['payload']}".encode()
        kid = json.loads(base64.urlsafe_b64decode(part["protected"] + "=="))["kid"]
        store = TrustStore([TrustedSigner("stranger", jwk.VerifyKey(kid, _STRANGER))])
        try:
            store.verify(message, base64.urlsafe_b64decode(part["signature"] + "=="), kid, Subject(found.model_id))
        except VerificationError:
            continue
        check(False, "a signature of nobody was accepted")


def _jws(payload: bytes) -> bytes:
    protected = strict_json.dumps({"alg": "EdDSA", "kid": "fuzz", "typ": "secure-loader-manifest+jws"}).encode()
    parts = {"payload": payload, "protected": protected, "signature": bytes(64)}
    return json.dumps({k: base64.urlsafe_b64encode(v).rstrip(b"=").decode() for k, v in parts.items()}).encode()


TARGETS: dict[str, Callable[[bytes], None]] = {
    "fuzz_header": one_header,
    "fuzz_metadata": one_metadata,
    "fuzz_jwk": one_jwk,
    "fuzz_manifest": one_manifest,
}
