"""The exception tree.

::

    SecureLoaderError                     exit code 1
    ├── ConfigError (ValueError)          2   a wrong argument, setting or name
    ├── SourceError                       7   a path that cannot be read or written
    │   ├── MissingFileError (FileNotFoundError)
    │   ├── OfflineError                      a hub file that is not in the cache
    │   ├── ReadError                         short read, file changed under us, I/O error
    │   └── WriteError                        disk full, destination exists
    ├── FormatError                       6   bytes that are not what the format allows
    │   └── UnsupportedVersionError           a version, algorithm or profile we do not know
    ├── VerificationError                 3
    │   ├── NotEncryptedError                 plaintext where ciphertext was demanded
    │   ├── EncryptedFileError                ciphertext where nobody asked for the secure loader
    │   ├── SignatureError
    │   ├── UntrustedSignerError
    │   │   └── RevokedError                  the operator takes this signer, release or file no more
    │   ├── ManifestError                     the folder is not what its publisher signed
    │   │   └── RollbackError                 an older release than one seen before
    │   └── AuthenticationError               a tag or digest of tensor bytes
    ├── PolicyDeniedError                 4
    ├── KeyAccessError                    5
    │   ├── KeySourceUnreachableError         a key service that is down, or too slow
    │   ├── KeySourceDeniedError              a key service that said no
    │   └── KeySourceResponseError            a key service whose answer makes no sense
    ├── TensorNameError (KeyError)        2   a tensor name that the file or model does not hold
    ├── DeviceError                       1   a device or framework that is not there
    └── OutOfMemoryError (MemoryError)    1   the tensors do not fit

Only errors that are about the caller's own arguments, a missing file or missing memory derive from a builtin. Verification,
policy, key and format errors must not: Transformers' ``pipeline()`` and others catch OSError, ValueError, TypeError
and RuntimeError, retry in another way and bury the cause.
"""

from __future__ import annotations

import os


class SecureLoaderError(Exception):
    """Base of every error raised on purpose.

    Args:
        message: What went wrong, where, without any key material.
        hint: What to try; shown on a line of its own.
        path: The file or folder it is about.
        tensor: The tensor it is about.
    """

    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        path: str | os.PathLike[str] | None = None,
        tensor: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.path = None if path is None else os.fspath(path)
        self.tensor = tensor

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path is not None else ""
        which = f"tensor {self.tensor!r}: " if self.tensor is not None else ""
        hint = f" (hint: {self.hint})" if self.hint else ""
        return f"{where}{which}{self.message}{hint}"

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross process boundaries (vLLM workers); keyword-only arguments need help to survive pickling.
        return _rebuild, (type(self), self.message, self.hint, self.path, self.tensor)


def _rebuild(
    kind: type[SecureLoaderError], message: str, hint: str | None, path: str | None, tensor: str | None
) -> SecureLoaderError:
    return kind(message, hint=hint, path=path, tensor=tensor)


class ConfigError(SecureLoaderError, ValueError):
    """A wrong argument, setting, pattern or name."""

    exit_code = 2


class TensorNameError(SecureLoaderError, KeyError):
    """A tensor name that the file or the model does not hold."""

    exit_code = 2


class SourceError(SecureLoaderError):
    """A path that is not a readable regular file, or a destination that cannot be written."""

    exit_code = 7


class MissingFileError(SourceError, FileNotFoundError):
    """No such file or folder."""


class OfflineError(SourceError):
    """A hub file that is neither in the cache nor may be fetched."""


class ReadError(SourceError):
    """The bytes could not be read: short read, I/O error, or the file changed while it was open."""


class WriteError(SourceError):
    """The destination could not be written; whatever was there before is untouched."""


class FormatError(SecureLoaderError):
    """Bytes that the file format does not allow."""

    exit_code = 6


class UnsupportedVersionError(FormatError):
    """A version, algorithm or profile that this release does not know."""


class VerificationError(SecureLoaderError):
    """Something is not what a trusted publisher signed."""

    exit_code = 3


class NotEncryptedError(VerificationError):
    """Plaintext, or a weaker format, where the caller demanded an encrypted and signed file."""


class EncryptedFileError(VerificationError):
    """An encrypted file reached a reader that did not ask for ``loader="secure"``."""


class SignatureError(VerificationError):
    """The signature does not cover these bytes."""


class UntrustedSignerError(VerificationError):
    """Signed by a key that the local trust store does not name for this model."""


class RevokedError(UntrustedSignerError):
    """The signer, the release or the file is on the operator's revocation list."""


class ManifestError(VerificationError):
    """The folder is not the one its publisher signed: a file is missing, extra, or altered."""


class RollbackError(ManifestError):
    """An older release of the model than one that was loaded here before, or than the operator allows."""


class AuthenticationError(VerificationError):
    """The tag or digest of tensor bytes does not match; the buffer was wiped."""


class PolicyDeniedError(SecureLoaderError):
    """The policy embedded in the file does not allow this load."""

    exit_code = 4


class KeyAccessError(SecureLoaderError):
    """The master key is missing, ambiguous, wrong, or kept carelessly."""

    exit_code = 5


class KeySourceUnreachableError(KeyAccessError):
    """A key service does not answer in time, is not who it should be, or is out of order. Trying later may help."""


class KeySourceDeniedError(KeyAccessError):
    """A key service answered that this caller may not have the key. Trying again does not help."""


class KeySourceResponseError(KeyAccessError):
    """A key service answered something that its protocol does not allow, or that is no key."""


class DeviceError(SecureLoaderError):
    """A device or framework that is not there."""


class OutOfMemoryError(SecureLoaderError, MemoryError):
    """Memory for the tensors is not to be had."""
