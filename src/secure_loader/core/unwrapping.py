"""From a verified file to its keys: one request, for all of its DEKs."""

from __future__ import annotations

from dataclasses import replace

from ..errors import KeyAccessError, SecureLoaderError
from .envelope import Envelope
from .keys.jwk import MasterKey
from .keys.provider import KeyRequest, KeyRing, LocalUnwrapper, WrappedKey
from .pipeline import annotate
from .secrets import Secret


def key_request(envelope: Envelope) -> KeyRequest:
    """What a file asks for."""
    profile = envelope.profile
    if profile is None:
        return KeyRequest(envelope.enc.kid, envelope.algorithm)
    return KeyRequest(
        envelope.enc.kid,
        envelope.algorithm,
        profile.model_id,
        profile.file_id,
        profile.kcv,
        profile.recipients,
    )


def unwrap_deks(envelope: Envelope, keys: KeyRing, path: str) -> dict[str, Secret]:
    """The DEKs of a verified file, by tensor name.

    Raises:
        KeyAccessError: No master key, or the wrong one.
    """
    wrapped = [WrappedKey(r.wrapped_key, r.key_iv, r.key_tag) for r in envelope.records.values()]
    try:
        unwrapper = keys.resolve(key_request(envelope))
        try:
            deks = unwrapper.unwrap_many(wrapped)
        finally:
            unwrapper.close()
    except SecureLoaderError as e:
        raise annotate(e, path) from None
    return dict(zip(envelope.records, deks, strict=True))


def master_key(envelope: Envelope, keys: KeyRing, path: str, *, without_recipients: bool = False) -> MasterKey:
    """The master key of a verified file itself, to be wrapped for others.

    Args:
        envelope: What the file says.
        keys: Where it may be.
        path: Of the file, for messages.
        without_recipients: As if the file had none.

    Raises:
        KeyAccessError: It is not here, or whoever has it does not hand it out.
    """
    request = key_request(envelope)
    try:
        unwrapper = keys.resolve(replace(request, recipients=()) if without_recipients else request)
        if not isinstance(unwrapper, LocalUnwrapper):
            unwrapper.close()
            raise KeyAccessError(
                f"the service that has the master key {request.kid!r} does not hand it out",
                hint="give the model a new one: rewrap --new-key",
            )
    except SecureLoaderError as e:
        raise annotate(e, path) from None
    return MasterKey(request.kid, request.algorithm, unwrapper.secret)
