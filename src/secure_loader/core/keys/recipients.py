"""For whom a master key is wrapped: names and references of recipients, and the entries that they get."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...config import LoaderConfig, load
from ...errors import ConfigError, FormatError, KeyAccessError, SecureLoaderError, SourceError, WriteError
from ..aead import ALGORITHMS
from ..atomic import write_bytes
from ..home import default_key_sources, home, keys_dir, private_folder, recipients_dir, refuse_foreign
from ..recipient import Recipient, WrapContext, check_recipients
from ..secrets import Secret, looks_like_key
from ..source import FileSource
from ..trust_files import check_name
from .hybrid import ALG, Identity, PublicIdentity
from .jwk import MasterKey, b64url
from .local import key_files, parse, read_keys
from .provider import provider, split_reference
from .wrapping import WrappingProvider

MAX_PUBLIC_FILE = 64 * 1024
SUFFIX = ".jwk"


@dataclass(frozen=True, slots=True)
class Target:
    """Somebody to wrap a master key for.

    Attributes:
        name: As :attr:`core.recipient.Recipient.name`.
        who: An identity, or who asks a service, and what for.
    """

    name: tuple[str, str]
    who: PublicIdentity | tuple[WrappingProvider, str]

    def thumbprint(self) -> str:
        """Which key it is, of an identity. Empty for a service, whose keys are its own affair."""
        return self.who.thumbprint() if isinstance(self.who, PublicIdentity) else ""

    def wrap(self, master: Secret, context: WrapContext) -> Recipient:
        """Their entry. Raises KeyAccessError where a service does not do it."""
        if isinstance(self.who, PublicIdentity):
            return self.who.wrap(master, context)
        service, reference = self.who
        return service.wrap(reference, master, context)


def one_time_key(algorithm: str = "aes256gcm") -> MasterKey:
    """A fresh master key of one model, that nobody keeps but its recipients."""
    cipher = ALGORITHMS[algorithm]
    return MasterKey(f"model-{secrets.token_hex(8)}", cipher, Secret(bytearray(os.urandom(cipher.key_bytes))))


def targets(who: Sequence[str], config: LoaderConfig | None = None) -> list[Target]:
    """Find those who are named.

    Args:
        who: For each a NAME in the ``recipients`` folder, the path of a public identity, or the reference of a service's key
            (``transit:…``, ``awskms:…``, ``pkcs11:…``).
        config: Settings, for services; None takes the user's.

    Raises:
        ConfigError: A name that nobody has, somebody twice, or a reference of a scheme that cannot wrap.
        KeyAccessError: A file that holds no public identity.
    """
    if not who:
        return []
    settings = config or load()
    found = [_target(one, settings) for one in who]
    names = [t.name for t in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"the recipient {name[1]!r} is named twice")
    return found


def wrap_for(found: Iterable[Target], master: MasterKey, model_id: str) -> tuple[Recipient, ...]:
    """The entries of recipients, as they stand in a file.

    Raises:
        ConfigError: Too many.
        KeyAccessError: A service does not do it.
    """
    context = WrapContext(master.kid, master.algorithm.name, model_id)
    return listed(target.wrap(master.secret, context) for target in found)


def listed(entries: Iterable[Recipient]) -> tuple[Recipient, ...]:
    """Entries in the order in which a file has them. Raises ConfigError."""
    try:
        return check_recipients(tuple(sorted(entries)))
    except FormatError as e:
        raise ConfigError(e.message) from None


def known(config: LoaderConfig | None = None) -> dict[tuple[str, str], Target]:
    """Everybody who can be wrapped for without being named: known identities, our own, and services among our key sources.

    Args:
        config: Settings; None takes the user's.

    Raises:
        ConfigError: Two different identities of one name: whom a file means cannot be told.
        KeyAccessError, SourceError: A key file that cannot be used.
    """
    found: dict[tuple[str, str], Target] = {}
    for public in [*(public for _, public in identities()), *_own()]:
        if found.setdefault((ALG, public.kid), Target((ALG, public.kid), public)).who != public:
            raise _two(public.kid)
    settings = config or load()
    for reference in default_key_sources() if settings.keys is None else settings.keys:
        service = _service(reference, settings)
        if service is not None:
            found[service.name] = service
    return found


def identities() -> Iterator[tuple[Path, PublicIdentity]]:
    """Public identities in the ``recipients`` folder.

    Raises:
        ConfigError: Others could have put one there.
        KeyAccessError, SourceError: A file that holds no public identity.
    """
    for path, found in list_files():
        if isinstance(found, SecureLoaderError):
            raise found
        yield path, found


def list_files() -> Iterator[tuple[Path, PublicIdentity | SecureLoaderError]]:
    """As :func:`identities`, with what is wrong with a file in place of its identity."""
    for path in _files():
        try:
            yield path, read_public(path)
        except SecureLoaderError as e:
            yield path, e


def _files() -> list[Path]:
    """Files in the ``recipients`` folder. Raises ConfigError where others could exchange them."""
    folder = recipients_dir()
    if not folder.is_dir():
        return []
    refuse_foreign(folder.stat(), folder, "folder of recipients")
    return sorted(folder.glob(f"*{SUFFIX}"))


def read_public(path: Path) -> PublicIdentity:
    """The public identity in a JWK file; a private one is not looked at.

    Raises:
        ConfigError: Others could have written it: they would read what is wrapped for it.
        KeyAccessError: It holds something else.
        MissingFileError, SourceError: It cannot be read.
    """
    with FileSource(path) as source:
        refuse_foreign(os.fstat(source.fileno()), path, "recipient's key")
        if source.size > MAX_PUBLIC_FILE:
            raise SourceError(f"is {source.size:,} bytes long; at most {MAX_PUBLIC_FILE:,} are allowed", path=path)
        return parse_public(source.read(0, source.size), str(path))


def parse_public(data: bytes, where: str) -> PublicIdentity:
    """The public identity in a JWK. Raises KeyAccessError."""
    text = bytearray(data)
    del data  # a private one may stand there by mistake; crash reporters show local variables
    keys = parse(text, where)
    if len(keys) != 1 or not isinstance(keys[0], PublicIdentity):
        private = any(isinstance(k, Identity) for k in keys)
        raise KeyAccessError(
            f"{where}: {'holds a private identity' if private else 'is not one public identity (kty AKP)'}",
            hint="who shall read the model prints the public half with: secure-loader recipients export NAME"
            if private
            else None,
        )
    return keys[0]


def add(public: PublicIdentity, name: str, *, force: bool = False) -> Path:
    """Remember somebody's public identity under a name.

    Raises:
        ConfigError: A bad name, or somebody else's key has the same kid, by which files name it.
        WriteError: There is one of that name, or it cannot be written.
        KeyAccessError, SourceError: Another file of the folder cannot be used.
    """
    path = recipient_file(name)
    for other in _files():
        if other != path and (there := read_public(other)).kid == public.kid and there != public:
            raise _two(public.kid)
    if path.exists() and not force:
        raise WriteError(f"there is a recipient named {name!r}", path=path, hint="take another --name, or say --force")
    private_folder(home())
    private_folder(recipients_dir())
    write_bytes(path, document_bytes(public), mode=0o644, overwrite=force)
    return path


def remove(name: str) -> Path:
    """Forget somebody's public identity. Raises ConfigError where nobody has that name."""
    path = recipient_file(name)
    try:
        path.unlink()
    except FileNotFoundError:
        raise unknown(name) from None
    return path


def recipient_file(name: str) -> Path:
    """Where the public identity of that name is kept."""
    return recipients_dir() / f"{check_name(name)}{SUFFIX}"


def unknown(name: str) -> ConfigError:
    """Nobody has that name."""
    return ConfigError(f"there is no recipient {name!r}", hint="see secure-loader recipients list")


def _two(kid: str) -> ConfigError:
    return ConfigError(
        f"two different identities go by the kid {kid!r}",
        hint="ask both for their thumbprints, and remove the wrong one: secure-loader recipients list",
    )


def document_bytes(public: PublicIdentity) -> bytes:
    """The public JWK: what is given to those who shall encrypt for it."""
    return json.dumps(public.document(b64url), indent=2).encode() + b"\n"


def _own() -> Iterator[PublicIdentity]:
    folder = keys_dir()
    for path in sorted(key_files(folder)) if folder.is_dir() else []:
        if path.name.endswith(".id.jwk"):
            yield from (key.public() for key in read_keys(path) if isinstance(key, Identity))


def _target(who: str, config: LoaderConfig) -> Target:
    if looks_like_key(who):
        raise ConfigError("a recipient is a name, a path or a reference, never key material")
    service = _service(who, config)
    if service is not None:
        return service
    if split_reference(who)[0] != "file":
        raise ConfigError(f"{split_reference(who)[0]}: references bring keys, and wrap none", hint="docs/keys.md")
    path = recipients_dir() / f"{who}{SUFFIX}"
    # os.path: it takes whatever cannot be a path for one that does not exist.
    if "/" in who or path not in _files():
        path = Path(os.path.expanduser(who))
        if not os.path.exists(path):
            raise ConfigError(
                f"there is no recipient {who!r}",
                hint="see secure-loader recipients list; or give the path of a public identity, or SCHEME:WHERE (docs/keys.md)",
            )
    public = read_public(path)
    return Target((ALG, public.kid), public)


def _service(reference: str, config: LoaderConfig) -> Target | None:
    """The service behind a reference, or None where it is not one that wraps."""
    scheme, rest = split_reference(reference)
    if scheme == "file":
        return None
    found = provider(scheme)
    if not isinstance(found, WrappingProvider):
        return None
    found.configure(config)
    return Target((found.alg, found.kid(rest)), (found, rest))
