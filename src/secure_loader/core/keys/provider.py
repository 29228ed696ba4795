"""The provider protocol: how a wrapped key meets whoever can unwrap it.

A provider never hands out a master key; it resolves a request to an :class:`Unwrapper`, so that a key that stays in a
KMS or an HSM fits as well as one in a file. ``file:`` and ``env:`` are built in; other providers are found by the
entry-point group ``secure_loader.key_providers``, where the entry point's name is the scheme of the references it
serves. One is imported only when a reference that the operator configured names its scheme.
"""

from __future__ import annotations

import hmac
import importlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol, runtime_checkable

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ...config import LoaderConfig
from ...errors import AuthenticationError, ConfigError, KeyAccessError, SecureLoaderError
from ..aead import Algorithm, unwrap_key
from ..audit import note_source
from ..forks import ForkLock
from ..recipient import Recipient, WrapContext
from ..secrets import Secret, looks_like_key
from .jwk import MasterKey

ENTRY_POINTS = "secure_loader.key_providers"
# Scheme, then module and class in this package.
BUILT_IN = {
    "file": "local:FileProvider",
    "env": "local:EnvProvider",
    "fd": "descriptor:DescriptorProvider",
    "passphrase": "passphrase:PassphraseProvider",
    "age": "age:AgeProvider",
    "https": "https:HttpsProvider",
    "vault": "vault:VaultProvider",
    "transit": "transit:TransitProvider",
    "awskms": "awskms:AwsKmsProvider",
    "gcpkms": "gcpkms:GcpKmsProvider",
    "azurekv": "azurekv:AzureKeyVaultProvider",
    "kbs": "kbs:KbsProvider",
    "pkcs11": "pkcs11:Pkcs11Provider",
    "tpm2": "tpm2:Tpm2Provider",
}

# Schemes of sources on this machine, whose references hold nothing but names and paths.
LOCAL = ("file", "env", "fd", "passphrase", "age")
_HOST = re.compile(r"((?:https?:)?//)(?:[^/?#]*@)?([^/?#@]*)")


@dataclass(frozen=True, slots=True)
class WrappedKey:
    """One DEK as the file carries it: ciphertext, nonce and tag of its wrapping."""

    wrapped: bytes
    iv: bytes
    tag: bytes


@dataclass(frozen=True, slots=True)
class KeyRequest:
    """What a verified file asks for.

    Attributes:
        kid: Name of the master key.
        algorithm: The AEAD that wrapped the DEKs.
        model_id: What the signer calls the model, or None in files without profile.
        file_id: Salt of the key check value, or None.
        kcv: Key check value, or None.
        recipients: For whom else the master key is wrapped.
    """

    kid: str
    algorithm: Algorithm
    model_id: str | None = None
    file_id: bytes | None = None
    kcv: bytes | None = None
    recipients: tuple[Recipient, ...] = ()

    def context(self) -> WrapContext:
        """What entries of the list of recipients are bound to."""
        return WrapContext(self.kid, self.algorithm.name, self.model_id or "")


class Unwrapper(Protocol):
    """Unwraps DEKs under one master key, many at a time."""

    def unwrap_many(self, keys: Sequence[WrappedKey]) -> list[Secret]:
        """The DEKs, in order.

        Raises:
            KeyAccessError: This is not the key that wrapped them.
        """
        ...

    def close(self) -> None:
        """Forget whatever was held."""
        ...


class KeyProvider(Protocol):
    """Finds a master key behind references of one scheme."""

    def resolve(self, reference: str, request: KeyRequest) -> Unwrapper | None:
        """An unwrapper for the request, or None when this reference does not know the ``kid``.

        Args:
            reference: Everything behind ``scheme:``.
            request: What is asked for.

        Raises:
            KeyAccessError: The reference cannot be used at all, or holds an unsuitable key of that name.
        """
        ...


@runtime_checkable
class Configurable(Protocol):
    """A provider that wants to know the settings of the load it is made for."""

    def configure(self, config: LoaderConfig) -> None:
        """Called once, before anything is resolved.

        Args:
            config: The settings.
        """
        ...


class LocalUnwrapper:
    """Unwraps with a master key in this process's memory.

    Args:
        key: The master key.
        request: Checked against the key: algorithm, and key check value where the file has one.

    Raises:
        KeyAccessError: The key is for another algorithm, or is not the one the file was encrypted with.
    """

    def __init__(self, key: MasterKey, request: KeyRequest) -> None:
        if key.algorithm != request.algorithm:
            raise KeyAccessError(
                f"master key {key.kid!r} is for {key.algorithm.name}, the file is encrypted with "
                f"{request.algorithm.name}"
            )
        if request.kcv is not None and request.file_id is not None:
            self._check_value(key, request.file_id, request.kcv)
        self._key = key

    @staticmethod
    def _check_value(key: MasterKey, file_id: bytes, kcv: bytes) -> None:
        if not hmac.compare_digest(key_check_value(key.secret, file_id), kcv):
            raise KeyAccessError(
                f"the key named {key.kid!r} is not the one that encrypted the file (key check value differs)",
                hint="another key goes by the same name; use the publisher's",
            )

    @property
    def secret(self) -> Secret:
        """The master key; for telling two keys of one name apart."""
        return self._key.secret

    def unwrap_many(self, keys: Sequence[WrappedKey]) -> list[Secret]:
        """See :meth:`Unwrapper.unwrap_many`."""
        cipher = self._key.algorithm.cipher(self._key.secret)
        try:
            return [unwrap_key(cipher, k.iv, k.wrapped, k.tag) for k in keys]
        except AuthenticationError:
            raise KeyAccessError(f"master key {self._key.kid!r} does not unwrap the keys of this file") from None

    def close(self) -> None:
        """The key belongs to whoever made it; nothing is held here."""


class KeyRing:
    """All the places where this process may look for master keys.

    Providers live as long as the ring does: one that asks a service remembers the answer for the files of one load, and
    forgets it with the load.

    Args:
        sources: References (``file:/path``, ``env:NAME``, ``scheme:…``, or a plain path) and :class:`MasterKey` objects.
        config: Settings, for providers that want them.

    Raises:
        ConfigError: Key material in place of a reference.
    """

    def __init__(self, sources: Iterable[str | MasterKey], config: LoaderConfig | None = None) -> None:
        self._sources = tuple(sources)
        self._config = config or LoaderConfig()
        self._providers: dict[str, KeyProvider] = {}
        self._lock = ForkLock()
        if any(isinstance(s, str) and looks_like_key(s) for s in self._sources):
            # Not shown: it would be taken for a path, and named in the message that says it does not exist.
            raise ConfigError(
                "keys takes references (paths, file:…, env:NAME) and MasterKey objects, never key material"
            )

    def __repr__(self) -> str:
        return f"<KeyRing of {len(self._sources)} sources>"

    def resolve(self, request: KeyRequest) -> Unwrapper:
        """The unwrapper for a request.

        Raises:
            KeyAccessError: No source knows the kid, or two different keys go by it.
        """
        found: list[Unwrapper] = []
        for source in self._sources:
            if isinstance(source, MasterKey):
                hit: Unwrapper | None = LocalUnwrapper(source, request) if source.kid == request.kid else None
            else:
                hit = self._ask(source, request)
            if hit is not None:
                if not found:
                    note_source(shown(source))
                found.append(hit)
        if not found:
            # Somebody may put the key there now, and try again.
            self._providers.clear()
            searched = ", ".join(map(shown, self._sources)) or "nowhere"
            for_whom = ", ".join(r.shown for r in request.recipients)
            wrapped = f", which is wrapped for {for_whom}" if for_whom else ""
            raise KeyAccessError(
                f"no master key with kid {request.kid!r}{wrapped} (searched: {searched})",
                hint="put the key's JWK file into SECURE_LOADER_HOME/keys, or name it in SECURE_LOADER_KEYS",
            )
        _refuse_ambiguous(found, request.kid)
        return found[0]

    def _ask(self, source: str, request: KeyRequest) -> Unwrapper | None:
        scheme, rest = split_reference(source)
        failed = ""
        try:
            return self._provider(scheme).resolve(rest, request)
        except (SecureLoaderError, MemoryError):
            raise
        except Exception as e:
            if scheme in BUILT_IN:
                raise
            # Somebody else's. What it says may hold anything, and so may the frames that it was raised in.
            failed = f"{type(e).__name__} in {_place(e)}"
        raise KeyAccessError(f"the key provider of {shown(source)} failed: {failed}")

    def _provider(self, scheme: str) -> KeyProvider:
        with self._lock.here:
            if scheme not in self._providers:
                made = provider(scheme)
                if isinstance(made, Configurable):
                    made.configure(self._config)
                self._providers[scheme] = made
            return self._providers[scheme]


def _place(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "nowhere" if trace is None else f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}"


def _refuse_ambiguous(found: Sequence[Unwrapper], kid: str) -> None:
    local = [u.secret.reveal() for u in found if isinstance(u, LocalUnwrapper)]
    if len(found) > 1 and (len(local) < len(found) or any(not hmac.compare_digest(local[0], s) for s in local[1:])):
        raise KeyAccessError(f"two different keys go by the kid {kid!r}", hint="rename or remove one of them")


def shown(source: str | MasterKey) -> str:
    """How messages name a source: of one that is not on this machine, no path and no query, which may hold secrets."""
    if isinstance(source, MasterKey):
        return f"key {source.kid!r}"
    scheme, rest = split_reference(source)
    if scheme in LOCAL:
        return source
    host = _HOST.match(rest)
    return f"{scheme}:{host[1]}{host[2]}" if host else f"{scheme}:…"


def split_reference(reference: str) -> tuple[str, str]:
    """Scheme and rest of a key reference; a plain path is a ``file:`` reference."""
    scheme, colon, rest = reference.partition(":")
    if not colon or "/" in scheme or not scheme.isidentifier():
        return "file", reference
    return scheme.lower(), rest


def provider(scheme: str) -> KeyProvider:
    """The provider that serves a scheme.

    Raises:
        ConfigError: Nobody serves it.
    """
    if scheme in BUILT_IN:
        # Not by entry point: no other package can take these over, and a vendored copy has no entry points.
        module, _, name = BUILT_IN[scheme].partition(":")
        built_in: KeyProvider = getattr(importlib.import_module(f".{module}", __package__), name)()
        return built_in
    hits = list(entry_points(group=ENTRY_POINTS, name=scheme))
    if not hits:
        known = sorted({*BUILT_IN, *(e.name for e in entry_points(group=ENTRY_POINTS))})
        raise ConfigError(f"no key provider serves {scheme!r}: references; there are {', '.join(known)}")
    if len(hits) > 1:
        raise ConfigError(f"{len(hits)} key providers claim the scheme {scheme!r}")
    made: KeyProvider = hits[0].load()()
    return made


def key_check_value(master: Secret, file_id: bytes) -> bytes:
    """16 bytes that tell a wrong master key before any tensor is touched, and say nothing else about it."""
    kdf = HKDF(algorithm=hashes.SHA256(), length=16, salt=file_id, info=b"secure_loader kcv v1")
    return kdf.derive(master.reveal())
