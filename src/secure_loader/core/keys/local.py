"""Master and signing keys in files, folders and environment variables of this machine."""

from __future__ import annotations

import abc
import ctypes
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ...errors import ConfigError, KeyAccessError, SourceError
from ..secrets import wipe, wipe_bytes
from ..source import FileSource
from .held import held
from .hybrid import ALG, Identity
from .jwk import Jwk, MasterKey, SigningKey, parse_keys
from .provider import LOCAL, KeyRequest, LocalUnwrapper, Unwrapper, provider, split_reference

MAX_KEY_FILE = 64 * 1024
_SUFFIXES = (".json", ".jwk", ".jwks")

_K = TypeVar("_K", MasterKey, SigningKey)


class LocalProvider(abc.ABC):
    """A provider that brings the keys themselves into this process, whence they can also be used to write."""

    @abc.abstractmethod
    def keys(self, reference: str) -> list[Jwk]:
        """All keys behind a reference.

        Args:
            reference: Everything behind ``scheme:``.

        Raises:
            KeyAccessError: Missing, kept carelessly, or malformed.
        """

    def resolve(self, reference: str, request: KeyRequest) -> Unwrapper | None:
        """See :meth:`core.keys.provider.KeyProvider.resolve`."""
        return _pick(self.keys(reference), request)


class FileProvider(LocalProvider):
    """Private JWK files, and folders of them. A folder is searched once for all files of a load; its keys are not kept."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, KeyRequest], Path] = {}

    def resolve(self, reference: str, request: KeyRequest) -> Unwrapper | None:
        """See :meth:`core.keys.provider.KeyProvider.resolve`."""
        path = path_of(reference)
        at = (reference, replace(request, file_id=None, kcv=None))  # what the files of a set have in common
        found = _pick(_read_file(self._places[at]), request) if at in self._places else None
        if found is not None or not path.is_dir():
            return found or _pick(_read_file(path), request)
        by_file = {file: _read_file(file) for file in sorted(key_files(path))}
        found = _pick([key for keys in by_file.values() for key in keys], request)
        if found is not None:
            wanted = {request.kid, *(entry.kid for entry in request.recipients)}
            self._places[at] = next(file for file, keys in by_file.items() if wanted & {key.kid for key in keys})
        return found

    def keys(self, reference: str) -> list[Jwk]:
        """See :meth:`LocalProvider.keys`; ``reference`` is a path or the rest of a file URI."""
        return read_keys(path_of(reference))


class EnvProvider(LocalProvider):
    """A JWK or JWK set in an environment variable.

    The variable is removed once it was read, so that child processes and crash reports do not inherit it; this
    process remembers the key. Give long-lived children a file instead.
    """

    def keys(self, reference: str) -> list[Jwk]:
        """See :meth:`LocalProvider.keys`; ``reference`` is the variable's name."""
        name = f"env:{reference}"
        with held() as table:
            if reference in os.environ:
                table[name] = parse(take_variable(reference), f"environment variable {reference}")
            keys = table.get(name)
        if not isinstance(keys, list):
            raise KeyAccessError(
                f"environment variable {reference} is not set",
                hint="it is removed once it was read; a child process needs the key in a file",
            )
        return keys


def take_variable(name: str) -> bytearray:
    """The value of an environment variable that is set, which is removed.

    What the process was started with is overwritten as well, so that ``/proc/PID/environ`` does not show it any more.
    """
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    place = libc.getenv(os.fsencode(name))
    if place is not None:
        ctypes.memset(place, 0, libc.strlen(ctypes.c_void_p(place)))
    value = os.environb.pop(os.fsencode(name))
    data = bytearray(value)
    wipe_bytes(value)
    return data


def _pick(keys: list[Jwk], request: KeyRequest) -> Unwrapper | None:
    hits = [k for k in keys if k.kid == request.kid]
    if not hits:
        return _open_for(keys, request)
    if len({type(k) for k in hits}) > 1 or not isinstance(hits[0], MasterKey):
        raise KeyAccessError(f"the key with kid {request.kid!r} is not a symmetric key")
    unwrappers = [LocalUnwrapper(k, request) for k in hits if isinstance(k, MasterKey)]
    if any(u.secret.reveal() != unwrappers[0].secret.reveal() for u in unwrappers):
        raise KeyAccessError(f"two different keys go by the kid {request.kid!r}", hint="rename or remove one of them")
    return unwrappers[0]


def _open_for(keys: list[Jwk], request: KeyRequest) -> Unwrapper | None:
    """The master key as it is wrapped for one of our identities, if it is."""
    for entry in request.recipients:
        mine = [k for k in keys if isinstance(k, Identity) and (ALG, k.kid) == entry.name]
        if any(k.secret.reveal() != mine[0].secret.reveal() for k in mine):
            raise KeyAccessError(f"two different keys go by the kid {entry.kid!r}", hint="rename or remove one of them")
        if mine:
            secret = mine[0].unwrap(entry, request.context())
            return LocalUnwrapper(MasterKey(request.kid, request.algorithm, secret), request)
    return None


def path_of(reference: str) -> Path:
    """The local path of a plain path or of what follows ``file:``.

    Raises:
        KeyAccessError: A file URI with a host or escapes, or ``..`` in the path.
    """
    text = reference
    if text.startswith("//"):
        host, slash, rest = text[2:].partition("/")
        if host or not slash:
            raise KeyAccessError(f"key reference {reference!r}: a host is not allowed")
        text = "/" + rest
    if "\0" in text or "%" in text:
        raise KeyAccessError(f"key reference {reference!r}: escapes are not allowed")
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise KeyAccessError(f"key reference {reference!r}: there is no such user") from None
    if ".." in path.parts:
        raise KeyAccessError(f"key reference {reference!r}: '..' is not allowed")
    return path


def read_keys(path: Path) -> list[Jwk]:
    """All keys of a JWK file, or of the JWK files of a folder.

    Raises:
        KeyAccessError: Missing, kept carelessly, or malformed.
    """
    if path.is_dir():
        return [key for file in sorted(key_files(path)) for key in _read_file(file)]
    return _read_file(path)


def keys_at(reference: str) -> list[Jwk]:
    """All keys behind a reference to a local source: those that can be used to write.

    Raises:
        ConfigError: A reference of another kind.
        KeyAccessError: Missing, kept carelessly, or malformed.
    """
    scheme, rest = split_reference(reference)
    found = provider(scheme) if scheme in LOCAL else None
    if not isinstance(found, LocalProvider):
        raise ConfigError(f"a {scheme}: reference cannot be used to write; {', '.join(LOCAL)} references can")
    return found.keys(rest)


def find_signing_key(paths: list[Path], name: str | None = None) -> SigningKey:
    """The one signing key of some key files and folders.

    Args:
        paths: Files and folders; missing ones count as empty.
        name: kid, or the NAME that ``keygen NAME`` was given; None takes the only one there is.

    Raises:
        KeyAccessError: None or several.
    """
    hits = [k for k in _all(paths, name) if isinstance(k, SigningKey)]
    return _only(hits, "signing key", name)


def find_master_key(paths: list[Path], name: str | None = None) -> MasterKey:
    """The one master key of some key files and folders; as :func:`find_signing_key`."""
    hits = [k for k in _all(paths, name) if isinstance(k, MasterKey)]
    if not hits:
        for sealed in (s for path in paths for s in sorted(path.glob(f"{name or '*'}.enc.jwk.age"))):
            raise KeyAccessError(
                "the master key is encrypted under a passphrase", hint=f"name it as passphrase:{sealed}"
            )
    return _only(hits, "master key", name)


def _all(paths: list[Path], name: str | None) -> Iterator[Jwk]:
    for path in paths:
        if not path.exists():
            continue
        files = sorted(key_files(path)) if path.is_dir() else [path]
        for file in files:
            # `keygen NAME` writes NAME.enc.jwk and NAME.sign.jwk.
            named = name is not None and file.name in (f"{name}.enc.jwk", f"{name}.sign.jwk")
            for key in _read_file(file):
                if name is None or named or key.kid == name:
                    yield key


def _only(hits: list[_K], what: str, name: str | None) -> _K:
    kids = sorted({k.kid for k in hits})
    if len(kids) == 1:
        return hits[0]
    wanted = f" named {name!r}" if name else ""
    if not kids:
        raise KeyAccessError(f"there is no {what}{wanted}", hint="make one with: secure-loader keygen NAME")
    raise KeyAccessError(f"there are several {what}s: {', '.join(kids)}", hint="say which one with --key NAME")


def key_files(folder: Path) -> Iterator[Path]:
    """The files of a folder that count as key files."""
    try:
        entries = list(folder.iterdir())
    except OSError as e:
        raise KeyAccessError(f"key folder cannot be read: {e.strerror}", path=folder) from None
    for entry in entries:
        if entry.suffix in _SUFFIXES and not entry.name.startswith("."):
            yield entry


def _read_file(path: Path) -> list[Jwk]:
    return parse(read_private(path), str(path))


def read_private(path: Path, what: str = "key file") -> bytearray:
    """The bytes of a file that holds a secret; the caller wipes them.

    Args:
        path: The file.
        what: What it is called in messages.

    Raises:
        KeyAccessError: Missing, larger than 64 KiB, or as :func:`check_private` says.
    """
    check_private(path, what)
    try:
        with FileSource(path, follow=False) as source:
            # What was looked at by name may have been replaced since; what counts is what is open.
            check_private_info(os.fstat(source.fileno()), path, what)
            if source.size > MAX_KEY_FILE:
                raise KeyAccessError(f"{what} is larger than {MAX_KEY_FILE} bytes", path=path)
            data = bytearray(source.size)
            source.read_into([memoryview(data)], 0)
    except SourceError as e:
        raise KeyAccessError(f"{what} {e.message}", path=path) from None
    return data


def parse(text: bytearray, what: str) -> list[Jwk]:
    """As :func:`core.keys.jwk.parse_keys`, but wipes the text, and what it raises has no frame that holds any of it:
    crash reporters show local variables.
    """
    try:
        keys = parse_keys(text, what)
    except KeyAccessError as e:
        message, hint = e.message, e.hint
    else:
        return keys
    finally:
        wipe(text)
        del text
    raise KeyAccessError(message, hint=hint)


def check_private(path: Path, what: str = "key file") -> None:
    """Refuse a key file that others could have read or replaced.

    Raises:
        KeyAccessError: Missing, a link, not a regular file, of another owner, or readable by others.
    """
    try:
        info = os.lstat(path)
    except OSError as e:
        raise KeyAccessError(f"{what} cannot be read: {e.strerror}", path=path) from None
    check_private_info(info, path, what)


def check_private_info(info: os.stat_result, path: Path, what: str) -> None:
    """As :func:`check_private`, for a file that is open. Raises KeyAccessError."""
    if not stat.S_ISREG(info.st_mode):
        raise KeyAccessError(f"{what} is a link or not a regular file", path=path)
    if info.st_uid not in (0, os.geteuid()):
        raise KeyAccessError(f"{what} belongs to another user", path=path)
    if info.st_mode & 0o077:
        raise KeyAccessError(
            f"{what} can be read by others (mode {stat.S_IMODE(info.st_mode):04o})",
            path=path,
            hint=f"chmod 600 {path}",
        )
