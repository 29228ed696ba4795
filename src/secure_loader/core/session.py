"""Who opens what under which rules: keys, trust and settings, put together once per load.

A :class:`Session` is the one way from a path to a file whose header was accepted. The order is always the same: parse,
signature by a trusted signer, policy, and only then, at the first encrypted byte, the key.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .. import config as cfg
from ..errors import NotEncryptedError, SecureLoaderError
from . import envelope as env
from . import policy
from .archive import Archive, ReadOptions, TensorFile
from .audit import Opening
from .hardening import harden_process
from .header import Header
from .home import default_key_sources
from .keys.jwk import MasterKey, VerifyKey
from .keys.provider import KeyRing
from .pipeline import annotate
from .pool import set_threads, threads
from .rollback import check_release
from .source import FileSource, read_header
from .trust import TrustStore, VerifiedHeader, own_store, revocations, verify_header

_log = logging.getLogger(__name__)

KeySources = str | os.PathLike[str] | MasterKey | Iterable[str | os.PathLike[str] | MasterKey]
TrustSources = str | os.PathLike[str] | TrustStore | Iterable[str | os.PathLike[str]]


class Session:
    """Keys, trust and settings of one load.

    Args:
        keys: References to master keys, or :class:`MasterKey` objects; None takes the settings', then the user's own.
        trust: Trust files and folders, or a :class:`TrustStore`; None takes the settings', then the user's own.
        config: Settings.
        publisher: Whoever has this key's private half: policies that the key itself has signed do not bind him.

    Raises:
        ConfigError: A wrong setting, or a trust file that others could have written.
    """

    def __init__(
        self,
        *,
        keys: KeySources | None = None,
        trust: TrustSources | None = None,
        config: cfg.LoaderConfig | None = None,
        publisher: VerifyKey | None = None,
    ) -> None:
        self.config = config or cfg.load()
        self._publisher = publisher
        if self.config.harden:
            harden_process()
        self.keys = KeyRing(_key_sources(keys, self.config), self.config)
        self.trust = _trust_store(trust, self.config)
        if self.config.threads is not None and self.config.threads != threads():
            set_threads(self.config.threads)

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None) -> Session:
        """A session from the options that a user hands to an adapter.

        Args:
            options: Field names of :class:`secure_loader.config.LoaderConfig`. ``keys`` may also be a
                :class:`MasterKey` or a list with some.

        Raises:
            ConfigError: An unknown name or a wrong value.
        """
        rest = dict(options or {})
        keys = rest.get("keys")
        items = [keys] if isinstance(keys, (str, os.PathLike, MasterKey)) else list(keys or [])
        if any(isinstance(k, MasterKey) for k in items):
            del rest["keys"]
            return cls(keys=items, config=cfg.load(rest))
        return cls(config=cfg.load(rest))

    def __repr__(self) -> str:
        return "<secure_loader session>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        # Transformers deep-copies keyword arguments; keys must not be copied.
        return self

    @property
    def _read_options(self) -> ReadOptions:
        return ReadOptions(
            full_integrity=self.config.integrity == "full",
            copy_clear=self.config.clear_tensors == "copy",
            page_cache=self.config.page_cache,
            device_buffer_bytes=self.config.device_buffer_bytes,
            device_kernels=self.config.device_kernels,
            require_device_kernels=self.config.require_device_kernels,
            gpu_direct=self.config.gpu_direct,
            insecure_allow_unverified_clear=self.config.insecure_allow_unverified_clear,
        )

    def open_file(self, path: str | os.PathLike[str], *, strict: bool = True) -> TensorFile:
        """Open one file.

        Args:
            path: The file.
            strict: Demand profile 1; otherwise plain safetensors files and CryptoTensors files open as well.

        Raises:
            NotEncryptedError: A plain file, or one without profile 1, under ``strict``.
            FormatError, SignatureError, UntrustedSignerError, PolicyDeniedError, RollbackError, SourceError: As they say.
        """
        return self.accept(FileSource(path), strict=strict)

    def accept(self, source: FileSource, *, strict: bool = True) -> TensorFile:
        """As :meth:`open_file` for a source that is open already; it is closed when it is refused."""
        opening = Opening(str(source.path))
        try:
            with opening.part():
                header = read_header(source)
                verified = None
                if env.is_encrypted(header) or (strict and not self.config.insecure_allow_plaintext):
                    verified = self._verify(env.parse(header), header, opening, strict=strict)
                elif strict:
                    _log.warning("%s is not encrypted; insecure_allow_plaintext lets it pass", source.path)
            return TensorFile(source, header, verified, self.keys, self._read_options, opening)
        except SecureLoaderError as e:
            source.close()
            raise annotate(e, source.path) from None
        except BaseException:
            source.close()
            raise

    def _verify(self, envelope: env.Envelope, header: Header, opening: Opening, *, strict: bool) -> VerifiedHeader:
        profile = envelope.profile
        if profile is None and strict and not self.config.insecure_allow_legacy:
            raise NotEncryptedError(
                "is a CryptoTensors file without profile 1, which leaves clear tensors, file set and release unprotected",
                hint="encrypt with secure-loader, or accept it with insecure_allow_legacy",
            )
        if profile is None and self.config.integrity == "full":
            raise NotEncryptedError(
                'signs no digests of its tensors, so integrity="full" cannot be had of it',
                hint='encrypt with secure-loader, or accept integrity="tags"',
            )
        verified = verify_header(header, envelope, self.trust)
        _describe(opening, verified)
        if profile is not None:
            check_release(profile.model_id, verified.signer.identity, profile.release)
        if self._publisher is None or self._publisher.public != verified.signer.key.public:
            policy.enforce(verified)
        return verified

    def open(
        self, path: str | os.PathLike[str], framework: str = "pt", device: str | int = "cpu", *, strict: bool = True
    ) -> Archive:
        """As :meth:`open_file`, with safetensors' reading interface around it."""
        return Archive(self.open_file(path, strict=strict), framework, device)


def _describe(opening: Opening, verified: VerifiedHeader) -> None:
    envelope, profile = verified.envelope, verified.envelope.profile
    opening.describe(
        model=None if profile is None else profile.model_id,
        release=None if profile is None else profile.release,
        file_id=None if profile is None else profile.file_id.hex(),
        signer=verified.signer.name,
        signer_key=verified.signer.key.thumbprint(),
        key=envelope.enc.kid,
        policy=hashlib.sha256(envelope.policy.local.encode("utf-8", "surrogatepass")).hexdigest(),
    )


def _key_sources(keys: KeySources | None, config: cfg.LoaderConfig) -> list[str | MasterKey]:
    if keys is None:
        return list(config.keys) if config.keys is not None else list(default_key_sources())
    many = [keys] if isinstance(keys, (str, os.PathLike, MasterKey)) else list(keys)
    return [k if isinstance(k, MasterKey) else os.fspath(k) for k in many]


def _trust_store(trust: TrustSources | None, config: cfg.LoaderConfig) -> TrustStore:
    """The store that was named, or the user's own. What the user revoked is revoked in any."""
    if isinstance(trust, TrustStore):
        return trust.narrowed(revocations())
    named = config.trust if trust is None else trust
    if named is None:
        return own_store()
    return TrustStore.from_paths([named] if isinstance(named, (str, os.PathLike)) else named).narrowed(revocations())


def safe_open(
    path: str | os.PathLike[str],
    framework: str = "pt",
    device: str | int = "cpu",
    *,
    keys: KeySources | None = None,
    trust: TrustSources | None = None,
    config: cfg.LoaderConfig | Mapping[str, Any] | None = None,
    strict: bool = False,
    backend: str | None = None,
) -> Archive:
    """Open a safetensors file, encrypted or plain, for lazy reading.

    Args:
        path: The file.
        framework: ``pt`` or ``numpy``.
        device: Where tensors go, ``"cpu"`` or a torch device.
        keys: Where master keys are: paths, ``file:…``, ``env:NAME``, or :class:`MasterKey` objects. None: the user's own.
        trust: Whom to trust: trust files or folders. None: the user's own trust store.
        config: Settings, as :class:`secure_loader.config.LoaderConfig` or a mapping.
        strict: Refuse plain files and CryptoTensors files without profile 1.
        backend: Accepted for the sake of safetensors 0.8, whose argument it is; reading is by pread here in any case.

    Returns:
        An :class:`core.archive.Archive`: a context manager with ``keys``, ``get_tensor``, ``get_slice``, ``metadata``.

    Raises:
        SecureLoaderError: The subclass says what was refused, and why.
    """
    del backend
    settings = config if isinstance(config, cfg.LoaderConfig) else cfg.load(config)
    return Session(keys=keys, trust=trust, config=settings).open(Path(path), framework, device, strict=strict)
