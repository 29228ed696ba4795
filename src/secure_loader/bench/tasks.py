"""Ways of loading a user's model, as tasks to be measured: ours, the floor, and those of other packages."""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..config import LoaderConfig
from ..core.archive import Archive, TensorFile
from ..core.checkpoint import Checkpoint
from ..core.home import HOME_VARIABLE
from ..core.memory import Region
from ..core.pool import run_jobs, set_threads
from ..core.session import KeySources, Session, TrustSources
from ..core.source import FileSource
from ..core.tensors import bytes_of, framework
from .copies import peer_file
from .measure import Task, digest, touch
from .subject import Shard, Subject

SECURE, FLOOR, OWNED, MAPPED, PEER = "secure", "floor", "safetensors", "safetensors-mapped", "cryptotensors"
# As torch's own allocator understands it: without it, safetensors' copies spend their time on pages of 4 KiB.
_HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
_BLOCK, _COLD_BLOCK = 4 << 20, 1 << 20
_SLOWEST = 20_000_000  # bytes per second: what is slower counts as hanging

Tensors = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What is compared, and how each side is opened.

    Attributes:
        secure: The encrypted model.
        plain: The same in clear, where it is at hand.
        framework: ``pt`` or ``numpy``.
        config: Settings of our loader.
        threads: That ours and the floor use.
        keys: Where master keys are, as for :class:`core.session.Session`.
        trust: Likewise.
        home: Home folder of loads of a temporary copy, so that the user's own learns nothing of it.
        peer: Folder with ``cryptotensors``' copy, or None.
        peer_config: By which it is read.
        safetensors: Whether that package is to be measured.
    """

    secure: Subject
    plain: Subject | None
    framework: str
    config: LoaderConfig
    threads: int
    keys: KeySources | None = field(default=None, repr=False)
    trust: TrustSources | None = None
    home: Path | None = None
    peer: Path | None = None
    peer_config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    safetensors: bool = False


def load_tasks(setting: Setting, *, cold: bool = False) -> list[Task]:
    """Everything into memory, by every way there is.

    Args:
        setting: What is compared.
        cold: The files will not be in the page cache: the floor then has as many reads in flight as ours.

    Returns:
        Tasks with phases ``open``, but for the floor, and ``load``, and ``touch`` for what is only mapped by then.
    """
    secure, plain = setting.secure, setting.plain
    tasks = [
        _task(
            setting,
            SECURE,
            {"open": lambda _: _open_secure(setting), "load": lambda archives: _load_all(archives, setting)},
            secure.files,
            prepare=lambda: _go_home(setting),
        ),
        _floor(setting, plain or secure, cold=cold),
    ]
    if plain is not None and setting.safetensors:
        opens = partial(_open_all, plain.shards, setting)
        loads = partial(_copies if setting.framework == "pt" else _each, plain.shards)
        environment = _HUGE_PAGES if setting.framework == "pt" else {}
        tasks.append(
            _task(
                setting,
                OWNED,
                {"open": opens, "load": loads},
                plain.files,
                prepare=lambda: os.environ.update(environment),
            )
        )
        if setting.framework == "pt":  # numpy arrays of safetensors are always copies
            mapped = partial(_each, plain.shards)
            tasks.append(_task(setting, MAPPED, {"open": opens, "load": mapped, "touch": touch}, plain.files))
    if plain is not None and (folder := setting.peer) is not None:
        files = tuple(peer_file(folder, number) for number in range(len(plain.shards)))
        tasks.append(
            _task(
                setting,
                PEER,
                {
                    "open": partial(_open_peers, files, setting),
                    "load": partial(_each, plain.shards),
                },
                files,
            )
        )
    return tasks


def row_tasks(setting: Setting) -> list[Task]:
    """The middle row of the largest tensor, by ``get_slice``: phases ``open`` and ``row``. None without such a tensor."""
    found = setting.secure.largest()
    if found is None:
        return []
    shard, info = found
    middle = info.shape[0] // 2

    def row(opened: Any) -> Tensors:
        taken = {"row": opened.get_slice(info.name)[middle : middle + 1]}
        if setting.framework == "pt":
            touch(taken)
        return taken

    def task(name: str, opens: Callable[[Any], Any], path: Path, prepare: Callable[[], Any] = lambda: None) -> Task:
        return _task(setting, name, {"open": opens, "row": row}, (path,), prepare=prepare, nbytes=info.nbytes)

    tasks = [task(SECURE, lambda _: _open_one(setting, shard), shard.path, lambda: _go_home(setting))]
    for number, theirs in enumerate(setting.plain.shards if setting.plain else ()):
        if theirs.label != shard.label:
            continue
        if setting.safetensors:
            tasks.append(task(OWNED, partial(_open_plain, theirs.path, setting), theirs.path))
        if setting.peer is not None:
            file = peer_file(setting.peer, number)
            tasks.append(task(PEER, partial(_open_peer, file, setting), file))
    return tasks


def rehearse(setting: Setting) -> None:
    """Load the encrypted model once, for the sake of the typed errors. Starts threads: call it apart.

    Raises:
        SecureLoaderError: The subclass says what was refused, and why.
    """
    _go_home(setting)
    _load_all(_open_secure(setting), setting)


def _task(
    setting: Setting,
    name: str,
    phases: Mapping[str, Callable[[Any], Any]],
    files: Sequence[Path],
    *,
    prepare: Callable[[], Any] = lambda: None,
    check: Callable[[Any], Any] | None = None,
    nbytes: int | None = None,
) -> Task:
    size = setting.secure.nbytes if nbytes is None else nbytes

    def ready() -> None:
        prepare()
        set_threads(setting.threads)
        if setting.framework == "pt":
            torch = importlib.import_module("torch")
            torch.set_num_threads(setting.threads)
            torch.ones(1 << 18).sum()  # its threads run before the clock does

    return Task(
        name=name,
        phases=phases,
        prepare=ready,
        check=check or (digest if setting.framework == "pt" else _digest_arrays),
        files=tuple(files),
        memory=size,
        timeout=max(120.0, size / _SLOWEST),
    )


# --- ours -----------------------------------------------------------------------------------------------------------


def _go_home(setting: Setting) -> None:
    if setting.home is not None:
        os.environ[HOME_VARIABLE] = str(setting.home)


def _session(setting: Setting) -> Session:
    return Session(keys=setting.keys, trust=setting.trust, config=setting.config)


def _open_secure(setting: Setting) -> dict[str, Archive]:
    """All files, verified and unlocked, by label."""
    session, subject = _session(setting), setting.secure
    checkpoint = Checkpoint(subject.path, session) if subject.is_folder else None
    opened = {}
    for shard in subject.shards:
        file = session.open_file(shard.path) if checkpoint is None else checkpoint.open(shard.name)
        opened[shard.label] = _unlocked(file, setting)
    return opened


def _open_one(setting: Setting, shard: Shard) -> Archive:
    session, subject = _session(setting), setting.secure
    file = Checkpoint(subject.path, session).open(shard.name) if subject.is_folder else session.open_file(shard.path)
    return _unlocked(file, setting)


def _unlocked(file: TensorFile, setting: Setting) -> Archive:
    if file.envelope is not None:
        file.unlock()
    return Archive(file, setting.framework)


def _load_all(archives: Mapping[str, Archive], setting: Setting) -> Tensors:
    return {
        f"{shard.label}/{name}": tensor
        for shard in setting.secure.shards
        for name, tensor in archives[shard.label].get_tensors().items()
    }


# --- the floor: what reading as many bytes costs at least -----------------------------------------------------------


def _floor(setting: Setting, subject: Subject, *, cold: bool) -> Task:
    """Plain ``pread`` of all tensors' bytes into huge pages: no format, no checks, no framework."""
    block = _COLD_BLOCK if cold else _BLOCK

    def load(_: object) -> list[Region]:
        regions, jobs = [], []
        for shard in subject.shards:
            source, size = FileSource(shard.path), shard.header.body_bytes
            region = Region(max(1, size))
            regions.append(region)
            for start in range(0, size, block):
                part = region.view(start, min(block, size - start))
                jobs.append((source, part, shard.header.body_start + start))
        run_jobs(lambda job: job[0].read_into([job[1]], job[2]), jobs, waiting=cold)
        return regions

    def check(regions: list[Region]) -> Any:
        fw, tensors = framework(setting.framework), {}
        for shard, region in zip(subject.shards, regions, strict=True):
            for info in shard.header.tensors.values():
                owner = (
                    fw.wrap(region.mapping, region.offset + info.start, info.nbytes) if info.nbytes else fw.small(0)[0]
                )
                tensors[f"{shard.label}/{info.name}"] = fw.view(owner, info.dtype, info.shape)
        return digest(tensors) if setting.framework == "pt" else _digest_arrays(tensors)

    return _task(setting, FLOOR, {"load": load}, subject.files, check=check)


# --- other packages -------------------------------------------------------------------------------------------------


def _open_plain(path: Path, setting: Setting, _: object) -> Any:
    return importlib.import_module("safetensors").safe_open(path, setting.framework)


def _open_all(shards: Sequence[Shard], setting: Setting, _: object) -> list[Any]:
    return [_open_plain(shard.path, setting, None) for shard in shards]


def _open_peer(file: Path, setting: Setting, _: object) -> Any:
    package = importlib.import_module("cryptotensors")
    return package.safe_open(str(file), setting.framework, config=dict(setting.peer_config))


def _open_peers(files: Sequence[Path], setting: Setting, _: object) -> list[Any]:
    return [_open_peer(file, setting, None) for file in files]


def _each(shards: Sequence[Shard], opened: Sequence[Any]) -> Tensors:
    return {
        f"{shard.label}/{name}": file.get_tensor(name)
        for shard, file in zip(shards, opened, strict=True)
        for name in file.keys()  # noqa: SIM118 - not a mapping
    }


def _copies(shards: Sequence[Shard], opened: Sequence[Any]) -> Tensors:
    """Tensors of torch that own their memory; numpy arrays do so anyway."""
    return {
        f"{shard.label}/{name}": file.get_tensor(name).clone()
        for shard, file in zip(shards, opened, strict=True)
        for name in file.keys()  # noqa: SIM118 - not a mapping
    }


def _digest_arrays(arrays: Mapping[str, Any]) -> str:
    """As :func:`.measure.digest`, for numpy arrays."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        code, shape, data = bytes_of(arrays[name])
        found.update(f"{name}\0{code}\0{shape}\0".encode())
        found.update(data)
    return found.hexdigest()[:16]
