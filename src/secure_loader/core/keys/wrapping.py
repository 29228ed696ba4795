"""What providers have in common whose key never leaves them: they unwrap master keys that were wrapped for them.

A key management service, an HSM or a TPM holds a key of its own. Who publishes a model has it wrap the model's master
key (``encrypt -r SCHEME:…``); the result travels in the signed list of recipients, and who loads the model, by a
reference of the same scheme, has it unwrapped: one request for all files of a model.
"""

from __future__ import annotations

import abc
from typing import ClassVar

from ...errors import FormatError, KeyAccessError
from ..recipient import Recipient, WrapContext
from ..secrets import Secret
from .fetch import FetchingProvider
from .jwk import MasterKey
from .provider import KeyRequest


class WrappingProvider(FetchingProvider):
    """A provider that unwraps what is in the list of recipients, and wraps for it.

    Attributes:
        alg: Of its entries, as :attr:`core.recipient.Recipient.alg`.
    """

    alg: ClassVar[str]

    @abc.abstractmethod
    def kid(self, reference: str) -> str:
        """Public name of the service's key, as files name it: without host, credentials and whatever may change.

        Raises:
            KeyAccessError: The reference names no key.
        """

    @abc.abstractmethod
    def wrap_key(self, reference: str, master: Secret, context: WrapContext) -> bytes:
        """The master key under the service's key, bound to the context: 1 to 8,192 bytes.

        Raises:
            KeyAccessError: The service refuses, is dead or slow, or says nonsense.
        """

    @abc.abstractmethod
    def unwrap_key(self, reference: str, wrapped: bytes, context: WrapContext) -> Secret:
        """What :meth:`wrap_key` wrapped. Raises likewise."""

    def opens(self, reference: str, entry: Recipient) -> bool:
        """Whether an entry with our ``alg`` is for the key that a reference names."""
        return entry.kid == self.kid(reference)

    def wrap(self, reference: str, master: Secret, context: WrapContext) -> Recipient:
        """An entry for the list of recipients. Raises KeyAccessError as :meth:`wrap_key`."""
        try:
            return Recipient(self.alg, self.kid(reference), self.wrap_key(reference, master, context))
        except FormatError as e:
            raise KeyAccessError(e.message) from None

    def fetch(self, reference: str, request: KeyRequest) -> MasterKey | None:
        """See :meth:`FetchingProvider.fetch`: None when no entry is for the key that the reference names."""
        entries = [r for r in request.recipients if r.alg == self.alg and self.opens(reference, r)]
        if not entries:
            return None
        if len(entries) > 1:
            raise KeyAccessError(
                f"{len(entries)} recipients of the model could be meant ({', '.join(e.shown for e in entries)})",
                hint="name the key exactly",
            )
        secret = self.unwrap_key(reference, entries[0].wrapped, request.context())
        try:
            return MasterKey(request.kid, request.algorithm, secret)
        except KeyAccessError:
            secret.wipe()
            raise
