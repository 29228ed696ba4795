"""Under which keys and rules safetensors files are opened and written right now.

A :class:`Context` is in force for one call of ``from_pretrained`` or one ``with session():`` block, in one thread (a
context variable, never a swapped global). Every file that is opened under it must belong to a folder whose signed
manifest was checked, or have been written under it.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core import envelope as env
from ..core import manifest as mf
from ..core import policy
from ..core.aead import ALGORITHMS
from ..core.archive import ReadOptions, TensorFile
from ..core.checkpoint import Checkpoint
from ..core.device.ahead import DeviceAhead
from ..core.header import LENGTH
from ..core.keys.jwk import MasterKey, SigningKey
from ..core.keys.provider import KeyRing
from ..core.pipeline import Options, annotate
from ..core.prefetch import Prefetch
from ..core.seal import Publication
from ..core.secrets import Secret
from ..core.session import Session
from ..core.source import FileSource, read_header
from ..core.tensors import framework
from ..core.trust import TrustedSigner, TrustStore, revocations, verify_header
from ..core.writer import resolve_master, resolve_signing
from ..errors import ConfigError, ManifestError, NotEncryptedError, SecureLoaderError
from .sniff import bytes_look_encrypted, looks_encrypted

LOADERS = (None, "auto", "safetensors", "secure")
# How far above a file its folder's manifest may be: model/SUBFOLDER/SUBFOLDER/x.safetensors.
_MAX_DEPTH = 3


@dataclass(frozen=True, slots=True)
class Writer:
    """How files are written under a context, and the only files that may be read without a manifest.

    Attributes:
        publication: Keys and names.
        ephemeral: The keys are lost with the process: only for files that this very process reads again.
    """

    publication: Publication
    ephemeral: bool = False

    @classmethod
    def ephemeral_one(cls) -> Writer:
        """A writer with keys made up here, which nobody else ever gets."""
        kid = f"ephemeral-{secrets.token_hex(8)}"
        master = MasterKey(kid, ALGORITHMS["aes256gcm"], Secret(bytearray(secrets.token_bytes(32))))
        signing = SigningKey(kid, Secret(bytearray(secrets.token_bytes(32))))
        return cls(Publication(master, signing, kid), ephemeral=True)

    def open(self, source: FileSource) -> TensorFile:
        """Open a file that was written with this writer's own keys, under its own model id.

        There is no rollback floor for these: an earlier checkpoint of a training run is a legitimate thing to read.

        Raises:
            SecureLoaderError: It was not.
        """
        by = self.publication
        signer = TrustedSigner("this session", by.signing.verify_key(), (glob.escape(by.model_id),))
        try:
            header = read_header(source)
            where = "this session (a folder without manifest: only its own files are read)"
            trust = TrustStore([signer], where).narrowed(revocations())
            verified = verify_header(header, env.parse(header), trust)
            policy.enforce(verified)
            return TensorFile(source, header, verified, KeyRing([by.master]), ReadOptions())
        except SecureLoaderError as e:
            source.close()
            raise annotate(e, source.path) from None


class Context:
    """Keys, trust, and the folders that were checked so far.

    Args:
        session: Keys, trust and settings for reading.
        writer: How to write; None refuses to.
        passive: Decrypt what is encrypted and leave everything else alone: the pytest plugin's way.
        loading: Made by one ``from_pretrained`` call, rather than by a person's ``with session():``.
    """

    def __init__(
        self, session: Session, *, writer: Writer | None = None, passive: bool = False, loading: bool = False
    ) -> None:
        self.session = session
        self.writer = writer
        self.passive = passive
        self.loading = loading
        self.files: dict[str, TensorFile] = {}
        self.ahead: Prefetch | DeviceAhead | None = None
        # Where upstream said that weights go: None leaves them on the CPU.
        self.device_map: Any = None
        self._written: set[str] = set()
        self._read_ahead: set[str] = set()
        self._checkpoints: dict[str, Checkpoint] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Context:
        return self

    def __repr__(self) -> str:
        return "<secure_loader context>"

    def checkpoint(self, folder: str | os.PathLike[str]) -> Checkpoint:
        """The checked folder; the check is made once per context.

        Raises:
            SecureLoaderError: As :class:`core.checkpoint.Checkpoint`.
        """
        path = os.path.abspath(folder)
        found = self._checkpoints.get(path)
        if found is None:
            found = Checkpoint(path, self.session, partial=in_hub_cache(path))
            self._checkpoints[path] = found
        return found

    def opened(self, checkpoint: Checkpoint) -> set[str]:
        """The shards of a folder that were opened under this context."""
        folder = str(checkpoint.folder)
        return {os.path.relpath(path, folder) for path in self.files if path.startswith(folder + os.sep)}

    def open(self, filename: str | os.PathLike[str]) -> TensorFile | None:
        """Open a file under the rules in force.

        Returns:
            The file, or None when it is a plain one that may be read as it is.

        Raises:
            NotEncryptedError: A plain file.
            ManifestError: It does not belong to a folder that was checked.
            SecureLoaderError: As :meth:`core.checkpoint.Checkpoint.open`.
        """
        path = os.path.abspath(os.fspath(filename))
        if path in self._read_ahead:
            return self.files[path]
        file = self._open_passively(path) if self.passive else self._open(path)
        if file is not None:
            self.files[path] = file
        return file

    def read_ahead(self, filenames: Iterable[str | os.PathLike[str]]) -> None:
        """Begin with torch tensors of files that are about to be opened, in upstream's order.

        What goes to GPUs is brought there. While upstream has yet to share a model out between devices, nothing is begun.

        Raises:
            SecureLoaderError: As :meth:`open`.
        """
        self.stop_reading_ahead()
        if self.passive or not self.session.config.prefetch_bytes:
            return
        opened = {os.path.abspath(os.fspath(name)): self.open(name) for name in filenames}
        files = {path: file for path, file in opened.items() if file is not None}
        self._read_ahead = set(files)
        self._begin(list(files.values()))

    def share_out(self, device_map: Any) -> None:
        """Go on where :meth:`read_ahead` had to wait for upstream's decision.

        Raises:
            SecureLoaderError: As :meth:`open`.
        """
        self.device_map = device_map
        if self.ahead is None:
            self._begin([self.files[path] for path in sorted(self._read_ahead)])

    def _begin(self, files: Sequence[TensorFile]) -> None:
        if not files:
            return
        tensors = [(file, name) for file in files for name in file.header.tensors]
        tensors.sort(key=lambda t: natural_key(t[1]))
        budget, places = self.session.config.prefetch_bytes, self.device_map
        if places is not None and not isinstance(places, dict) and files[0].engine("cuda") is not None:
            return  # "auto" and the like
        # One engine serves all files of a session. It gets a context on its device, so only those in use are asked for.
        named = {_spelled(p) for p in places.values()} if isinstance(places, dict) else set()
        engines = {place: files[0].engine(place) for place in sorted(named - {"cpu", "disk"})}
        if any(engines.values()):
            placed = [(f, n, engine) for f, n in tensors if (engine := engines.get(_place_of(n, places))) is not None]
            self.ahead = DeviceAhead(placed, framework("pt"), budget)
        else:
            options = Options(page_cache=self.session.config.page_cache)
            self.ahead = Prefetch(tensors, framework("pt"), budget, options, at_once=True)

    def stop_reading_ahead(self) -> None:
        """Wipe what was decrypted and not asked for."""
        self._read_ahead = set()
        if self.ahead is not None:
            self.ahead.close()
            self.ahead = None

    def _open(self, path: str) -> TensorFile | None:
        if path in self._written and self.writer is not None:
            return self.writer.open(FileSource(path))
        checkpoint = self._checkpoint_around(path)
        if checkpoint is None and self.writer is not None and not self.writer.ephemeral:
            source = FileSource(path)
            if self.session.config.insecure_allow_plaintext and not is_encrypted(source):
                source.close()
                return None
            return self.writer.open(source)
        if checkpoint is None:
            with FileSource(path) as source:
                plain = not is_encrypted(source)
            if plain and not self.session.config.insecure_allow_plaintext:
                raise NotEncryptedError("is not encrypted, but the secure loader was asked for", path=path)
            checkpoint = self.checkpoint(os.path.dirname(path))
        return checkpoint.open(Path(os.path.relpath(path, checkpoint.folder)).as_posix())

    def _checkpoint_around(self, path: str) -> Checkpoint | None:
        folder = manifest_folder(os.path.dirname(path))
        if folder is None:
            return next((c for f, c in self._checkpoints.items() if path.startswith(f + os.sep)), None)
        return self.checkpoint(folder)

    def _open_passively(self, path: str) -> TensorFile | None:
        # What is no safetensors file at all is refused by the original, in its own words.
        if not looks_encrypted(path):
            return None
        return self.writer.open(FileSource(path)) if self.writer is not None else self.session.open_file(path)

    def open_bytes(self, data: bytes | bytearray) -> TensorFile | None:
        """As :meth:`open` for the bytes of a whole file, which must be a shard of a folder that was checked."""
        config = self.session.config
        if not bytes_look_encrypted(data):
            if self.passive or config.insecure_allow_plaintext:
                return None
            raise NotEncryptedError("these bytes are not encrypted, but the secure loader was asked for")
        if self.writer is not None and (self.passive or not self.writer.ephemeral):
            with contextlib.suppress(SecureLoaderError):
                return self.writer.open(FileSource.from_bytes(data))
        source = FileSource.from_bytes(data)
        if not self.passive and not config.insecure_allow_legacy:
            source.path = self._find_shard(source)
        return self.session.accept(source)

    def _find_shard(self, source: FileSource) -> str:
        """The path of the shard that these bytes are a copy of."""
        raw = read_header(source).raw
        digest = hashlib.sha256(LENGTH.pack(len(raw)) + raw).hexdigest()
        for checkpoint in self._checkpoints.values():
            files = checkpoint.manifest.files if checkpoint.manifest is not None else {}
            for name, entry in files.items():
                if entry.header_sha256 == digest and entry.nbytes == source.size:
                    path = str(checkpoint.folder / name)
                    self.files[path] = checkpoint.open(name)
                    return path
        source.close()
        raise ManifestError("these bytes are no shard of a folder that was checked")

    def files_on_disk(self) -> dict[str, TensorFile]:
        """Every file that was opened or written under this context, by absolute path, open."""
        files = dict(self.files)
        for path in self._written - files.keys():
            if self.writer is not None and os.path.exists(path):
                files[path] = self.writer.open(FileSource(path))
        return files

    def writing_as(self, filename: str | os.PathLike[str]) -> Publication:
        """Whose keys a file is written with; from here on it may be read again under this context.

        Raises:
            ConfigError: This context only reads.
        """
        if self.writer is None:
            raise ConfigError(
                "a secure session that was opened for reading writes nothing: it would be in clear",
                path=filename,
                hint='open it for writing with session(encrypt_as="MODEL_ID"), or save outside of it',
            )
        self._written.add(os.path.abspath(os.fspath(filename)))
        return self.writer.publication


def _place_of(name: str, device_map: Mapping[str, Any]) -> str:
    """Where a tensor goes, as far as its name in the file tells: upstream may rename it. A wrong guess costs a copy."""
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return _spelled(device_map.get(name, "cpu"))


def _spelled(device: Any) -> str:
    return f"cuda:{device}" if isinstance(device, int) else str(device)


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sorts ``layers.2`` before ``layers.10``, as upstream does before it asks for tensors."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]


def is_encrypted(source: FileSource) -> bool:
    """Whether an open file claims to be encrypted. Raises FormatError for something that is no safetensors file."""
    return env.is_encrypted(read_header(source))


def manifest_folder(folder: str | os.PathLike[str]) -> str | None:
    """The folder itself or the nearest one above it that has a manifest."""
    path = os.path.abspath(folder)
    for _ in range(_MAX_DEPTH):
        if os.path.isfile(os.path.join(path, mf.MANIFEST)):
            return path
        path = os.path.dirname(path)
    return None


def in_hub_cache(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is a snapshot in the Hub's cache: ``models--ORG--NAME/snapshots/COMMIT``."""
    path = Path(os.path.abspath(folder))
    return path.parent.name == "snapshots" and "--" in path.parent.parent.name


_current: ContextVar[Context | None] = ContextVar("secure_loader_context", default=None)
_default: Context | None = None
# from_pretrained is not thread-safe upstream: two at a time leave weights untied or uninitialised.
_lock = threading.RLock()


def _new_lock() -> None:
    global _lock  # noqa: PLW0603 - a child process must not wait for a thread that it does not have
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)


def current() -> Context | None:
    """The context in force, if any."""
    return _current.get() or _default


def set_default(context: Context | None) -> None:
    """Put a context in force wherever no other one is: for the whole process, every thread."""
    global _default  # noqa: PLW0603 - process-wide is the point
    _default = context


@contextlib.contextmanager
def use(context: Context) -> Iterator[Context]:
    """Put a context in force for a block."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


@contextlib.contextmanager
def loading(loader: str | None, loader_config: Mapping[str, Any] | None) -> Iterator[Context | None]:
    """The context of one load.

    Args:
        loader: What the caller said.
        loader_config: Settings for ``loader="secure"``.

    Yields:
        The context, or None when nobody asked for the secure loader: then everything is to happen as ever.

    Raises:
        ConfigError: Another loader, or settings without one.
    """
    if loader not in LOADERS:
        raise ConfigError(f"unknown loader {loader!r}; there are {', '.join(repr(x) for x in LOADERS)}")
    outer = current()
    if outer is not None and outer.passive:
        outer = None
    if loader != "secure":
        if loader_config is not None:
            raise ConfigError('loader_config needs loader="secure"')
        if outer is None:
            yield None
            return
    if loader_config is not None and not isinstance(loader_config, Mapping):
        raise ConfigError(f"loader_config is a mapping of settings, not {type(loader_config).__name__}")
    with _lock:
        if outer is not None and outer.loading and loader_config is None:
            yield outer
            return
        if outer is None or loader_config is not None:
            session, writer = Session.from_options(loader_config), None
        else:
            session, writer = outer.session, outer.writer
        # What a load itself writes (weights converted for disk offload) is read by this process alone.
        with use(Context(session, writer=writer or Writer.ephemeral_one(), loading=True)) as context:
            try:
                yield context
            finally:
                context.stop_reading_ahead()


@contextlib.contextmanager
def session(
    loader_config: Mapping[str, Any] | None = None,
    *,
    encrypt_as: str | None = None,
    key: str | MasterKey | None = None,
    signing_key: str | SigningKey | None = None,
    release: int = 1,
) -> Iterator[None]:
    """A block in which every safetensors file is read securely, and, if asked, written encrypted.

    For whatever opens safetensors files without ``from_pretrained(loader="secure")``: peft, accelerate,
    sentence-transformers' extra modules, ``Trainer``. It holds for this thread.

    Files must belong to a folder with a signed manifest. With ``encrypt_as``, files in folders without one are read
    too, if this session's own signing key signed them under that name: checkpoints of a training run.

    Args:
        loader_config: As for ``from_pretrained(loader="secure")``.
        encrypt_as: Encrypt and sign every safetensors file that is written, under this model id.
        key: Master key for writing: a NAME given to ``keygen``, a kid, or the key; None takes the only one.
        signing_key: Likewise; None takes the one that goes with ``key``, or the only one.
        release: Release that is written into the files.

    Raises:
        ConfigError: A wrong setting.
        KeyAccessError: No key, or several to choose from.
    """
    from .hook import install

    install()
    writer = None
    if encrypt_as is not None:
        writer = Writer(Publication(resolve_master(key), resolve_signing(signing_key, key), encrypt_as, release))
    elif key is not None or signing_key is not None:
        raise ConfigError("key and signing_key are for writing: say encrypt_as as well")
    with use(Context(Session.from_options(loader_config), writer=writer)):
        yield
