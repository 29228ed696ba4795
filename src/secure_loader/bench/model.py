"""``secure-loader bench``: what loading one model costs on this machine, beside what else there is."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import config as cfg
from ..core import envelope as env
from ..core.pool import WAITING_THREADS
from ..core.pool import threads as usual_threads
from ..errors import ConfigError, DeviceError, SecureLoaderError
from . import machine, report, tasks
from .apart import apart
from .copies import ThrowAway, encrypt_copy, encrypt_for_peer, secure_copy, sizes, temporary_folder
from .measure import Result, compare, import_quietly
from .subject import Subject, available_memory, check_memory, look

Tell = Callable[[str], None]
_PEER_MEMORY = 3  # times the largest file: what cryptotensors takes to write one
_STILL_CACHED = 0.1


@dataclass(frozen=True)
class Report:
    """Everything that was measured.

    Attributes:
        model: As given.
        secure: The encrypted model: given, or a temporary copy that is gone by now.
        copied: Whether it was that.
        plain: The model in clear, where it was at hand.
        framework: Package that the tensors are of.
        facts: Of the machine.
        threads: Of our loader and the floor.
        repeat: Repetitions.
        load: Results of loading everything, by task.
        row: Results of reading one row of the largest tensor.
        cold: As ``load``, with files not in the page cache; None where it was not asked for.
        missing: Why, for each thing that could not be measured.
        hints: What to change.
    """

    model: str
    secure: Subject
    copied: bool
    plain: Subject | None
    framework: str
    facts: dict[str, Any]
    threads: int
    repeat: int
    load: dict[str, Result]
    row: dict[str, Result]
    cold: dict[str, Result] | None
    missing: dict[str, str]
    hints: list[str]

    @property
    def nbytes(self) -> int:
        """Size of all tensors."""
        return self.secure.nbytes

    @property
    def tensors(self) -> int:
        """Number of tensors."""
        return sum(len(shard.header.tensors) for shard in self.secure.shards)

    def labels(self, *, cold: bool = False) -> dict[str, str]:
        """What readers see, by name of the task."""
        return report.names(threads=WAITING_THREADS if cold else self.threads, ciphertext=self.plain is None)

    def document(self) -> dict[str, Any]:
        """As JSON, with all raw samples."""
        largest = self.secure.largest()
        return {
            "model": self.model,
            "tensor_bytes": self.nbytes,
            "tensors": self.tensors,
            "weight_files": len(self.secure.shards),
            "temporary_copy": self.copied,
            "floor_reads": "ciphertext" if self.plain is None else "plain",
            "framework": self.framework,
            "threads": self.threads,
            "repeat": self.repeat,
            "machine": self.facts,
            "load": self._loads(self.load),
            "cold": None if self.cold is None else self._loads(self.cold),
            "row": {
                "tensor": None if largest is None else largest[1].name,
                "tensor_bytes": None if largest is None else largest[1].nbytes,
                "summary": [line.document() for line in report.row_lines(self.row)],
                "raw": {name: result.document() for name, result in self.row.items()},
            },
            "not_measured": self.missing,
            "hints": self.hints,
        }

    def _loads(self, results: dict[str, Result]) -> dict[str, Any]:
        return {
            "summary": [line.document() for line in report.load_lines(results, self.nbytes)],
            "raw": {name: result.document() for name, result in results.items()},
        }


def bench(
    path: str | os.PathLike[str],
    *,
    plain: str | os.PathLike[str] | None = None,
    work: str | os.PathLike[str] | None = None,
    repeat: int = 5,
    cold: bool = False,
    keys: Sequence[str] | None = None,
    trust: Sequence[str] | None = None,
    progress: bool | None = None,
    tell: Tell = lambda _: None,
) -> Report:
    """Measure how a model loads. This process must not have started threads: every repetition is a fork of it.

    Args:
        path: A model folder or safetensors file. A plain one is encrypted first, into a temporary folder.
        plain: The model in clear, when ``path`` is encrypted.
        work: Folder for temporary copies; None takes the one that the model lies in.
        repeat: Repetitions, at least 1.
        cold: Also measure with files dropped from the page cache.
        keys: References to master keys; None takes the user's own. Not used for a temporary copy.
        trust: Trust files and folders; likewise.
        progress: Show a bar while a copy is encrypted; None decides by the terminal.
        tell: Called with a line now and then.

    Returns:
        Everything that was measured; the bytes that were loaded have been compared.

    Raises:
        ConfigError: ``plain`` beside a plain model, or of another one.
        DeviceError: Neither torch nor numpy is installed.
        OutOfMemoryError, WriteError: Too little memory or disk; nothing was begun then.
        SecureLoaderError: Whatever keeps the model from being loaded.
    """
    load_average = round(os.getloadavg()[0], 2)  # before we add to it
    given, other = look(Path(path)), None if plain is None else look(Path(plain))
    source = _plain_side(given, other)
    framework, missing = _import(plain=source is not None)
    config = cfg.load()
    with ExitStack() as stack:
        setting = tasks.Setting(
            secure=given,
            plain=source,
            framework=framework,
            config=config,
            threads=config.threads or usual_threads(),
            keys=keys,
            trust=trust,
            safetensors=source is not None and "safetensors" not in missing,
        )
        ours, peer = not given.encrypted, source is not None and "cryptotensors" not in missing
        if source is not None and (ours or peer):
            folder = stack.enter_context(
                temporary_folder(given.path, None if work is None else Path(work), sizes(source, ours=ours, peer=peer))
            )
            check_memory(given.nbytes)
            setting = _copy(setting, source, folder, missing, peer=peer, progress=progress, tell=tell)
        else:
            check_memory(given.nbytes)
        tell("loading it once, to see that it loads")
        apart(lambda: tasks.rehearse(setting))
        facts = machine.facts(setting.secure.path.absolute().parent) | {"load_average": load_average}
        measured = _measure(setting, facts, repeat, missing, tell, cold=cold)
        return Report(
            model=os.fspath(path),
            copied=ours,
            framework="torch" if framework == "pt" else "numpy",
            repeat=repeat,
            missing=missing,
            **measured,
        )


def _plain_side(given: Subject, other: Subject | None) -> Subject | None:
    """The model in clear, where there is one. Raises ConfigError when what was given as such is not."""
    if not given.encrypted:
        if other is not None:
            raise ConfigError("--plain goes with an encrypted model, and this one is plain itself", path=given.path)
        return given
    if other is not None:
        if other.encrypted:
            raise ConfigError("is encrypted; --plain takes the folder that the model was made of", path=other.path)
        given.must_match(other)
    return other


def _import(*, plain: bool) -> tuple[str, dict[str, str]]:
    """Import what will be measured, before the first fork; the framework, and why others are not measured."""
    framework, module = "pt", "torch"
    if import_quietly(["torch"]):
        framework, module = "numpy", "numpy"
        if import_quietly(["numpy"]):
            raise DeviceError("neither torch nor numpy is installed", hint="pip install torch, or numpy")
    missing = {}
    for package in ("safetensors", "cryptotensors"):
        if not plain:
            missing[package] = "needs the model in clear: name it with --plain"
        elif import_quietly([f"{package}.{module}"]):
            missing[package] = "is not installed" if not _is_installed(package) else f"cannot be used with {module}"
    return framework, missing


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _copy(
    setting: tasks.Setting,
    source: Subject,
    folder: Path,
    missing: dict[str, str],
    *,
    peer: bool,
    progress: bool | None,
    tell: Tell,
) -> tasks.Setting:
    """Write the temporary copies that are needed."""
    keys = ThrowAway()
    if not setting.secure.encrypted:
        tell(f"encrypting a copy with throw-away keys in {folder}; it is removed afterwards")
        apart(lambda: encrypt_copy(source, folder, keys, progress=progress))
        setting = replace(setting, secure=secure_copy(folder), keys=keys.master, trust=keys.trust, home=folder / "home")
    if peer:
        available, needed = available_memory(), _PEER_MEMORY * max(shard.size for shard in source.shards)
        if available is not None and available < needed:
            missing["cryptotensors"] = (
                f"its writer may take {needed:,} bytes of memory, and {available:,} are available"
            )
            return setting
        tell(f"encrypting a copy with cryptotensors in {folder}; it is removed afterwards")
        try:
            apart(lambda: encrypt_for_peer(source, folder, keys, setting.framework))
        except (SecureLoaderError, OSError, RuntimeError) as e:
            missing["cryptotensors"] = f"could not write its copy: {machine.scrub(str(e), folder)}"
            return setting
        setting = replace(setting, peer=folder, peer_config=keys.peer_reads)
    return setting


def _measure(
    setting: tasks.Setting, facts: dict[str, Any], repeat: int, missing: dict[str, str], tell: Tell, *, cold: bool
) -> dict[str, Any]:
    secure = setting.secure
    load = compare(tasks.load_tasks(setting), repetitions=repeat, progress=tell)
    _check(setting, load)
    resident = _resident(secure)
    tell("one row of the largest tensor")
    row = compare(tasks.row_tasks(setting), repetitions=repeat, watch_memory=False)
    _check(setting, row)
    results = _cold(setting, repeat, load, missing, tell) if cold else None
    envelope = next((env.parse(s.header) for s in secure.shards if env.is_encrypted(s.header)), None)
    return {
        "secure": secure,
        "plain": setting.plain,
        "threads": setting.threads,
        "facts": facts,
        "load": load,
        "row": row,
        "cold": results,
        "hints": report.hints(
            facts,
            setting.config,
            threads=setting.threads,
            algorithm=None if envelope is None else envelope.algorithm.name,
            whole_tensors=envelope is not None and envelope.chunk_size is None,
            resident=resident,
            secure=load[tasks.SECURE],
        ),
    }


def _cold(
    setting: tasks.Setting, repeat: int, warm: dict[str, Result], missing: dict[str, str], tell: Tell
) -> dict[str, Result] | None:
    machine.evict(setting.secure.files)
    left = _resident(setting.secure)
    if left is None or left > _STILL_CACHED:
        missing["cold"] = "files cannot be dropped from the page cache here" + (
            "" if left is None else f": {left:.0%} stay in memory"
        )
        return None
    tell("the same, with files not in the page cache")
    wanted = [task for task in tasks.load_tasks(setting, cold=True) if warm[task.name].failure is None]
    results = compare(wanted, repetitions=repeat, cache="cold", watch_memory=False, progress=tell)
    _check(setting, results)
    return results


def _check(setting: tasks.Setting, results: dict[str, Result]) -> None:
    """Compare the bytes that were loaded; a peer that gave others has failed.

    Raises:
        ConfigError: ``--plain`` is another model.
        SecureLoaderError: Our own loads failed, or gave different bytes.
    """
    if not results:
        return
    ours = results[tasks.SECURE]
    if ours.failure is not None:
        raise SecureLoaderError(f"measuring failed: {ours.failure}", path=setting.secure.path)
    truth = ours.samples[0].checksum
    for name, result in results.items():
        found = {sample.checksum for sample in result.samples}
        if result.failure is not None or found == {truth}:
            continue
        if len(found) == 1 and name == tasks.FLOOR and setting.plain is None:
            continue  # ciphertext
        if name == tasks.FLOOR and setting.plain is not None and setting.home is None and len(found) == 1:
            raise ConfigError(
                f"holds other bytes than {setting.secure.path}", path=setting.plain.path, hint="was it changed since?"
            )
        if name in (tasks.SECURE, tasks.FLOOR):
            raise SecureLoaderError(
                "repetitions gave different bytes: was it changed meanwhile?", path=setting.secure.path
            )
        result.failure = "gave other bytes than the rest"


def _resident(subject: Subject) -> float | None:
    """The share of a model's files that is in the page cache, or None where the system does not say."""
    try:
        cached = sum(machine.resident(shard.path) * shard.size for shard in subject.shards)
    except (OSError, AttributeError):
        return None
    return cached / sum(shard.size for shard in subject.shards)
