"""TLS for key sources: always verified, never below 1.2, with roots and a client certificate from the operator alone."""

from __future__ import annotations

import contextlib
import os
import re
import ssl
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import KeyAccessError, SourceError
from ..secrets import Secret, wipe
from ..source import FileSource
from .local import MAX_KEY_FILE, read_private

_MAX_PEM = 16 * MAX_KEY_FILE
# A folder with a certificate or two of somebody's own is not where the system keeps its roots.
_HASHED, _MIN_HASHED = re.compile(r"[0-9a-f]{8}\.[0-9]+"), 16
# SSL_OP_CLEANSE_PLAINTEXT of OpenSSL 3: overwrite what was received, once it was read. Python has no name for it.
_CLEANSE_PLAINTEXT = 1 << 1


@dataclass(frozen=True, slots=True)
class Tls:
    """Whom to believe, and who we are.

    Attributes:
        ca_file: PEM file with the only certificates that may vouch for a key service; None takes the system's.
        client_certificate: PEM file with our certificate and those between it and its root; None shows none.
        client_key: PEM file with its private key, without a passphrase, kept as a key file is.
    """

    ca_file: str | None = None
    client_certificate: str | None = None
    client_key: str | None = None

    def context(self) -> ssl.SSLContext:
        """An OpenSSL context.

        Raises:
            KeyAccessError: A file cannot be used, or is kept carelessly.
        """
        # Not ssl.create_default_context: it writes session secrets to whatever file SSLKEYLOGFILE names.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # What a host is called is said by the names that a certificate is for; its subject may be anything (RFC 9525, 6.3).
        context.hostname_checks_common_name = False
        context.set_alpn_protocols(["http/1.1"])
        context.options |= _CLEANSE_PLAINTEXT
        if self.ca_file is None:
            _load_system_roots(context)
        else:
            # What is pinned may be the certificate of an intermediate authority, or of the server itself.
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            _load(context, _read_roots(self.ca_file), self.ca_file)
        if self.client_certificate is not None:
            self._identify(context, self.client_certificate)
        return context

    def _identify(self, context: ssl.SSLContext, certificate: str) -> None:
        key = self.client_key or certificate
        text = read_private(Path(key), "client key")
        try:
            if key != certificate:
                chain, _ = _read(certificate, "the file of the client certificate")
                with Secret(text) as private:
                    text = bytearray().join([chain, b"\n", private.reveal()])
            # OpenSSL reads files, by name: give it one that nobody can replace, with what was checked. A key with a
            # passphrase would make it ask for that on the terminal.
            with _unnamed(text) as name:
                context.load_cert_chain(name, password="")
        except OSError as e:
            why = e.reason if isinstance(e, ssl.SSLError) else e.strerror
            raise KeyAccessError(f"the client certificate or its key cannot be used: {why}", path=certificate) from None
        finally:
            wipe(text)


@contextlib.contextmanager
def _unnamed(text: bytearray) -> Iterator[str]:
    """The name, in this process alone, of a file in memory that holds a text, and is overwritten."""
    fd = os.memfd_create("client certificate", os.MFD_CLOEXEC)
    try:
        os.pwrite(fd, text, 0)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.pwrite(fd, bytes(len(text)), 0)
        os.close(fd)


def _load_system_roots(context: ssl.SSLContext) -> None:
    """What the system trusts, as OpenSSL finds it; a folder of roots by hash is looked into when one is needed.

    Reading all of them, of which one is used, takes 20 ms.
    """
    paths = ssl.get_default_verify_paths()
    folders = os.environ.get(paths.openssl_capath_env) or paths.openssl_capath
    if os.environ.get(paths.openssl_cafile_env) or not any(map(_is_hashed, folders.split(os.pathsep))):
        context.load_default_certs()
    else:
        context.load_verify_locations(capath=folders)


def _is_hashed(folder: str) -> bool:
    try:
        return sum(_HASHED.fullmatch(name) is not None for name in os.listdir(folder)) >= _MIN_HASHED
    except OSError:
        return False


def _load(context: ssl.SSLContext, roots: str, path: str) -> None:
    try:
        context.load_verify_locations(cadata=roots)
    except ssl.SSLError as e:
        raise KeyAccessError(f"holds no certificates: {e.reason}", path=path) from None


def _read_roots(path: str) -> str:
    """The text of a file of root certificates: who can write it decides who may hand out keys."""
    data, info = _read(path, "the file of root certificates")
    if info.st_uid not in (0, os.geteuid()) or stat.S_IMODE(info.st_mode) & 0o022:
        raise KeyAccessError(
            "the file of root certificates could have been written by others", path=path, hint=f"chmod go-w {path}"
        )
    try:
        return data.decode("ascii")
    except UnicodeError:
        raise KeyAccessError("the file of root certificates is not PEM", path=path) from None


def _read(path: str, what: str) -> tuple[bytearray, os.stat_result]:
    """A regular file of at most a mebibyte."""
    try:
        with FileSource(path) as source:
            if source.size > _MAX_PEM:
                raise KeyAccessError(f"{what} is larger than {_MAX_PEM} bytes", path=path)
            data = bytearray(source.size)
            source.read_into([memoryview(data)], 0)
            return data, os.fstat(source.fileno())
    except SourceError as e:
        raise KeyAccessError(f"{what} {e.message}", path=path) from None
