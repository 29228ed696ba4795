"""Master keys in files that are encrypted under a passphrase."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from ...errors import ConfigError, KeyAccessError
from ..forks import ForkLock
from ..secrets import Secret, wipe
from .asking import ask, can_ask
from .descriptor import descriptor_number, read_descriptor
from .held import held
from .jwk import Jwk
from .local import LocalProvider, parse, path_of, read_private, take_variable
from .scrypt_file import unseal

VARIABLE = "SECURE_LOADER_PASSPHRASE"
FILE_VARIABLE = "SECURE_LOADER_PASSPHRASE_FILE"
# NIST SP 800-63B asks for 8 where tries are counted; here nobody counts them.
MIN_LENGTH, MAX_LENGTH = 12, 1024


class PassphraseProvider(LocalProvider):
    """A JWK or JWK set in an age file under a passphrase (scrypt), as ``keygen --passphrase`` and ``age -p`` write it.

    Each content of a file is opened once for a load, which takes about a second.
    """

    def __init__(self) -> None:
        self._lock = ForkLock()
        self._opened: dict[bytes, list[Jwk]] = {}

    def keys(self, reference: str) -> list[Jwk]:
        """See :meth:`LocalProvider.keys`; ``reference`` is a path or the rest of a file URI."""
        path = path_of(reference)
        data = read_private(path)
        with self._lock.here:
            content = hashlib.sha256(data).digest()
            if content not in self._opened:
                with find_passphrase(path) as passphrase:
                    try:
                        text = unseal(data, passphrase)
                    except KeyAccessError as e:
                        raise KeyAccessError(f"key file {e.message}", path=path, hint=e.hint) from None
                self._opened[content] = parse(text, str(path))
            return self._opened[content]


def find_passphrase(path: Path) -> Secret:
    """The passphrase for a file: from the file that an environment variable names, from a variable, or from a person.

    Raises:
        KeyAccessError: It is nowhere, or kept carelessly.
    """
    named = os.environ.get(FILE_VARIABLE)
    if named:
        return _remembered(named) if named.startswith("fd:") else read_passphrase(named)
    with held() as table:
        if VARIABLE in os.environ:
            table[VARIABLE] = Secret(_checked(take_variable(VARIABLE), VARIABLE))
        remembered = table.get(VARIABLE)
        if isinstance(remembered, Secret):
            return Secret(remembered.reveal())
    if can_ask():
        return Secret(_checked(ask(f"Passphrase of {path}: "), "the passphrase"))
    raise KeyAccessError(
        "key file is encrypted under a passphrase, and there is nobody to ask for it",
        path=path,
        hint=f"name a file that holds it in {FILE_VARIABLE}",
    )


def _remembered(reference: str) -> Secret:
    """The passphrase behind a descriptor, which can be read only once; a process may load more than once."""
    name = f"{FILE_VARIABLE}={reference}"
    with held() as table:
        if name not in table:
            table[name] = read_passphrase(reference)
        remembered = table[name]
        if isinstance(remembered, Secret):
            return Secret(remembered.reveal())
    raise KeyAccessError(f"the passphrase in {reference} was read before, and forgotten")


def read_passphrase(reference: str) -> Secret:
    """The passphrase in a private file, or behind ``fd:N``; one line end at its end does not count.

    Raises:
        KeyAccessError: Missing, kept carelessly, empty, or more than 1,024 bytes.
    """
    if reference.startswith("fd:"):
        return Secret(_checked(read_descriptor(descriptor_number(reference[3:])), reference))
    return Secret(_checked(read_private(path_of(reference), "passphrase file"), f"passphrase file {reference}"))


def ask_for_new() -> Secret:
    """A passphrase for a new file, typed twice.

    Raises:
        ConfigError: No terminal, too short, or typed differently.
    """
    if not can_ask():
        raise ConfigError(
            "there is no terminal to ask for a passphrase", hint="take it from a file: --passphrase-file FILE"
        )
    with Secret(ask("New passphrase: ")) as first, Secret(ask("Once more: ")) as second:
        if first.reveal() != second.reveal():
            raise ConfigError("these were two different passphrases")
        return check_new(Secret(first.reveal()))


def check_new(passphrase: Secret) -> Secret:
    """Returns a passphrase that is long enough to be chosen.

    Raises:
        ConfigError: It is shorter than twelve bytes.
    """
    if len(passphrase) < MIN_LENGTH:
        raise ConfigError(
            f"a passphrase has at least {MIN_LENGTH} characters",
            hint="whoever has the file can try as many as their computers can: take six random words",
        )
    return passphrase


def _checked(data: bytearray, what: str) -> bytearray:
    """What was read, without its line end. Raises KeyAccessError for what cannot be a passphrase; wipes ``data``."""
    end = len(data)
    if end and data[end - 1] == ord("\n"):
        end -= 1 + (end > 1 and data[end - 2] == ord("\r"))
    try:
        if not 0 < end <= MAX_LENGTH:
            raise KeyAccessError(f"{what} is empty, or longer than {MAX_LENGTH} bytes")
        return data[:end]
    finally:
        wipe(data)
