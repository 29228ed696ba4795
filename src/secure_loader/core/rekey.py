"""Which master key a rewrapped model gets, and for whom it is wrapped."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError, KeyAccessError
from .archive import TensorFile
from .envelope import Envelope
from .keys.jwk import MasterKey
from .keys.recipients import Target, known, listed, one_time_key, targets, wrap_for
from .recipient import Recipient
from .session import Session
from .unwrapping import master_key
from .writer import resolve_master


@dataclass(frozen=True, slots=True)
class Change:
    """What is to become of a model's master key.

    Attributes:
        key: The new one, or None.
        new_key: Make one that nobody keeps but the recipients.
        add: Who shall be able to open the model, as :func:`core.keys.recipients.targets` takes them.
        remove: Names (``kid``) of recipients who shall not.
    """

    key: str | MasterKey | None
    new_key: bool
    add: tuple[str, ...]
    remove: tuple[str, ...]

    def apply(self, file: TensorFile, session: Session) -> tuple[MasterKey, tuple[Recipient, ...]]:
        """The master key and the recipients of the new model.

        Args:
            file: A verified file of the old one; all of them share the master key.
            session: Keys of the old one.

        Raises:
            ConfigError: Nobody of that name to remove, a recipient whose public key is not known here, or nobody would be left.
            KeyAccessError: The old master key cannot be had.
        """
        envelope, path = file.envelope, file.source.path
        if envelope is None or envelope.profile is None:
            raise ConfigError("has no profile 1; encrypt it with secure-loader first", path=path)
        kept = self._kept(envelope.profile.recipients, path)
        found = targets(self.add)
        again = {target.name for target in found}
        kept = [r for r in kept if r.name not in again]
        model_id = envelope.profile.model_id
        stays = self.key is None and not self.new_key
        if stays and (envelope.profile.recipients or self.add):
            master = master_key(envelope, session.keys, path)
            if not kept and not found:
                self._refuse_to_lose(envelope, session, path)
            return master, listed([*kept, *wrap_for(found, master, model_id)])
        everybody = [*found, *self._look_up(kept, path)]
        if self.new_key and not everybody:
            raise ConfigError("a new master key without recipients could be opened by nobody", hint="name them with -r")
        master = one_time_key(envelope.algorithm.name) if self.new_key else resolve_master(self.key)
        return master, wrap_for(everybody, master, model_id)

    def _kept(self, recipients: tuple[Recipient, ...], path: str) -> list[Recipient]:
        kids = {r.kid for r in recipients}
        for name in self.remove:
            if name not in kids:
                raise ConfigError(
                    f"{name!r} is not a recipient (there are: {', '.join(sorted(kids)) or 'none'})", path=path
                )
        return [r for r in recipients if r.kid not in self.remove]

    def _look_up(self, kept: list[Recipient], path: str) -> list[Target]:
        people = known() if kept else {}
        strangers = [r.shown for r in kept if r.name not in people]
        if strangers:
            raise ConfigError(
                f"the new master key cannot be wrapped for {', '.join(strangers)}: not known here",
                path=path,
                hint="name them with -r (a public identity, or the service's reference), or leave them out with --remove",
            )
        return [people[r.name] for r in kept]

    def _refuse_to_lose(self, envelope: Envelope, session: Session, path: str) -> None:
        """Raises ConfigError where the master key is nowhere but in what is about to be removed."""
        try:
            master_key(envelope, session.keys, path, without_recipients=True)
        except KeyAccessError:
            raise ConfigError(
                "without its recipients nobody could open the model any more",
                path=path,
                hint="add somebody with -r, or put it under a key of your own with -k",
            ) from None
