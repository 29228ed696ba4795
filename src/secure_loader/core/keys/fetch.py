"""What providers that fetch a raw master key over the network have in common: one request for a file set."""

from __future__ import annotations

import abc
import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import TypeVar

from ...config import LoaderConfig
from ...errors import FormatError, KeyAccessError, KeySourceResponseError
from ..forks import ForkLock
from ..pool import CLEANING_TRIES, insist
from ..recipient import Recipient, WrapContext
from .jwk import Jwk, MasterKey
from .net import DEADLINE, Response, Rules, Url
from .provider import KeyRequest, LocalUnwrapper, Unwrapper
from .tls import Tls

_T = TypeVar("_T")
_Question = tuple[str, WrapContext, tuple[Recipient, ...], int]
_Answer = Future[MasterKey | None]


class FetchingProvider(abc.ABC):
    """A provider that asks a service for each master key once, and remembers it for as long as it lives.

    It lives as long as the :class:`core.keys.provider.KeyRing` that made it: one load, or one open file. What it
    remembers is overwritten with it.

    Attributes:
        rules: What the operator allows.
        seconds: Time for the whole of one fetch.
    """

    def __init__(self) -> None:
        self.rules = Rules()
        self.seconds = DEADLINE
        self._lock = ForkLock()
        self._found: dict[_Question, _Answer] = {}

    def configure(self, config: LoaderConfig) -> None:
        """See :class:`core.keys.provider.Configurable`."""
        self.rules = rules_of(config)
        self.seconds = config.key_timeout_seconds

    @abc.abstractmethod
    def fetch(self, reference: str, request: KeyRequest) -> MasterKey | None:
        """Ask for a key.

        Args:
            reference: Everything behind ``scheme:``.
            request: What is asked for; the same for all files of a set, but for ``file_id`` and ``kcv``.

        Returns:
            The key, or None when the service answered as it should and knows no key of that name.

        Raises:
            KeyAccessError: Anything else.
        """

    def resolve(self, reference: str, request: KeyRequest) -> Unwrapper | None:
        """See :meth:`core.keys.provider.KeyProvider.resolve`."""
        key = self._once(reference, request)
        return None if key is None else LocalUnwrapper(key, request)

    def _once(self, reference: str, request: KeyRequest) -> MasterKey | None:
        # A process that was forked meanwhile asks for itself: nobody there will ever complete what its parent began.
        # And what an entry is bound to counts: one that was copied from another model is asked for anew, and refused.
        at = (reference, request.context(), request.recipients, os.getpid())
        while True:
            mine = answer = _Answer()
            try:
                with self._lock.here:
                    answer = self._found.setdefault(at, mine)
                if answer is mine:
                    key = self.fetch(reference, request)
                    mine.set_result(key)
                    return key
            except BaseException as e:
                insist(functools.partial(self._give_up, at, mine, e), CLEANING_TRIES)
                # Or the error would hold this frame, which holds the future, which holds the error.
                del answer, mine
                raise
            # Threads that open other files of the set share the answer, and the error: a slow service costs one deadline.
            with contextlib.suppress(CancelledError):
                return answer.result()

    def _give_up(self, at: _Question, mine: _Answer, error: BaseException) -> None:
        """Let nobody wait any more. An interruption is for one thread; the others ask for themselves."""
        with self._lock.here:
            if self._found.get(at) is mine:
                del self._found[at]
        if isinstance(error, Exception) and not mine.done():
            mine.set_exception(error)
        mine.cancel()


def rules_of(config: LoaderConfig) -> Rules:
    """What the settings of a load allow."""
    return Rules(
        Tls(config.key_ca_file, config.key_client_certificate, config.key_client_key),
        frozenset(config.key_private_hosts or ()),
        config.insecure_allow_http_loopback,
    )


def reading(response: Response, url: Url, read: Callable[[bytearray], _T]) -> _T:
    """What ``read`` makes of the body, which it may change, and which is wiped. It should copy no secret elsewhere.

    What it raises is raised again where no frame holds the body: crash reporters show local variables.

    Raises:
        KeySourceResponseError: ``read`` raised FormatError or KeyAccessError.
    """
    try:
        return read(response.body)
    except (FormatError, KeyAccessError) as e:
        message, hint = e.message, e.hint
    finally:
        response.wipe()
    raise KeySourceResponseError(f"{url.source}: {message}", hint=hint)


def only_master(keys: Sequence[Jwk], kid: str, url: Url) -> MasterKey | None:
    """The master key of that name among keys of different names, or None.

    Raises:
        KeySourceResponseError: The key of that name is for signing.
    """
    for key in keys:
        if key.kid == kid:
            if not isinstance(key, MasterKey):
                raise KeySourceResponseError(f"{url.source}: the key with kid {kid!r} is not a symmetric key")
            return key
    return None
