"""What an installation consists of: for ``secure-loader env``, bug reports and support.

Imports no framework: versions come from the metadata of installed packages.
"""

from __future__ import annotations

import importlib.metadata
import operator
import os
import platform
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import __version__, config
from ..errors import DeviceError, SecureLoaderError
from .device.choice import survey
from .device.direct import obstacle
from .home import default_key_sources, home, keys_dir, state_dir, trust_dir
from .keys.jwk import MasterKey, SigningKey
from .keys.local import key_files, read_keys
from .keys.provider import split_reference
from .pool import threads
from .trust_files import list_rules, list_trusted

_OURS = "secure-loader"
PACKAGES = ("cryptography", "safetensors", "numpy", "torch", "cuda-bindings", "transformers", "vllm")
# What the AEADs run on: x86 names, then Arm's.
_CPU_FLAGS = ("aes", "pclmulqdq", "vaes", "vpclmulqdq", "avx2", "avx512f", "sha_ni", "pmull", "sha2")
_COMPARE = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
# Entry point group, what it is for.
_HOOKS = (
    ("torch.backends", "import torch prepares Transformers"),
    ("vllm.general_plugins", "vllm serve --load-format secure"),
)


@dataclass(frozen=True, slots=True)
class Package:
    """An installed package.

    Attributes:
        name: Its name in the registry.
        version: Installed version, or None.
        supported: Range that this release declares, or None.
        fits: Whether the version lies in the range; None when either is unknown.
    """

    name: str
    version: str | None
    supported: str | None
    fits: bool | None


@dataclass(frozen=True, slots=True)
class Hook:
    """An entry point by which another package finds us.

    Attributes:
        group: Entry point group.
        purpose: What it makes work.
        active: Whether it is installed and not switched off.
        why_not: What is missing, or None.
    """

    group: str
    purpose: str
    active: bool
    why_not: str | None


@dataclass(frozen=True, slots=True)
class Device:
    """What decrypts on a GPU, or why nothing does.

    Attributes:
        name: Of the device, with its number and architecture.
        kernels: What passed its test there.
        reasons: Why each way that comes before it was not taken.
    """

    name: str
    kernels: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Environment:
    """What an installation consists of.

    Attributes:
        version: Of secure_loader.
        location: Where it is installed.
        python: Version and implementation.
        system: Operating system and processor architecture.
        openssl: The library behind ``cryptography``.
        packages: Packages that matter.
        hooks: Entry points.
        cpu_flags: Those that speed up the AEADs; empty when unknown.
        threads: Threads of the shared pool.
        devices: GPUs that CUDA knows; where there is none, one line that says why.
        gpu_direct: Whether GPUs can read from the disk themselves, or why not.
        home: Home folder.
        master_keys: Number of master keys in files that are looked at.
        signing_keys: Number of signing keys there.
        trusted_signers: Number of usable files in the home folder's trust store.
        key_sources: Where master keys are looked for.
        problems: What would make loads fail, or should not be so.
    """

    version: str
    location: str
    python: str
    system: str
    openssl: str
    packages: tuple[Package, ...]
    hooks: tuple[Hook, ...]
    cpu_flags: tuple[str, ...]
    threads: int
    devices: tuple[Device, ...]
    gpu_direct: str
    home: str
    master_keys: int
    signing_keys: int
    trusted_signers: int
    key_sources: tuple[str, ...]
    problems: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def describe() -> Environment:
    """Look at this installation. Raises nothing: what is wrong is among the problems."""
    problems = list(_permission_problems())
    sources: tuple[str, ...] = ()
    pool, kernels = threads(), "auto"
    try:
        sources = tuple(default_key_sources())
        settings = config.load()
        pool, kernels = settings.threads or pool, settings.device_kernels
    except SecureLoaderError as e:
        problems.append(str(e))
    masters, signing, key_problems = _count_keys(sources)
    trusted = list(list_trusted())
    devices = tuple(_devices(kernels))
    packages, hooks = tuple(_packages()), tuple(map(_hook, *zip(*_HOOKS, strict=True)))
    problems += key_problems
    problems += [f"{t.path}: {t.problem.message}" for t in trusted if t.problem is not None]
    problems += [f"{r.path}: {r.problem.message}" for r in list_rules() if r.problem is not None]
    problems += [f"{p.name} {p.version} is outside {p.supported}" for p in packages if p.fits is False]
    return Environment(
        version=__version__,
        location=str(Path(__file__).parents[1]),
        python=f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})",
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        openssl=_openssl(),
        packages=packages,
        hooks=hooks,
        cpu_flags=_cpu_flags(),
        threads=pool,
        devices=devices,
        gpu_direct=_gpu_direct(devices),
        home=str(home()),
        master_keys=masters,
        signing_keys=signing,
        trusted_signers=sum(t.signer is not None for t in trusted),
        key_sources=sources,
        problems=tuple(problems),
    )


def _openssl() -> str:
    from cryptography.hazmat.backends.openssl.backend import backend

    return str(backend.openssl_version_text())


def _devices(setting: str) -> Iterator[Device]:
    try:
        for gpu, name, reasons in survey(setting):
            yield Device(f"cuda:{gpu.ordinal} {gpu.name} (sm_{gpu.arch})", name, reasons)
    except DeviceError as e:
        if os.path.exists("/dev/kfd"):
            yield Device("AMD", "Triton, which is not tried here", ())
        else:
            yield Device("none", "the CPU decrypts what goes to a GPU, then it is copied", (e.message,))


def _gpu_direct(devices: Sequence[Device]) -> str:
    if not any(device.name.startswith("cuda:") for device in devices):
        return "no: there is no GPU of NVIDIA's"  # before cuFile is asked: its bindings import numpy
    why = obstacle()
    return "where the file system can" if why is None else f"no: {why}"


def _packages() -> Iterator[Package]:
    supported = _supported()
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        wanted = supported.get(name)
        fits = None if version is None or wanted is None else within(version, wanted)
        yield Package(name, version, wanted, fits)


def _supported() -> dict[str, str]:
    """Ranges by package, from our own metadata: those of the extra that is about it come first."""
    try:
        requires = importlib.metadata.requires(_OURS) or []
    except importlib.metadata.PackageNotFoundError:
        return {}  # run from a source tree that was not installed
    ranges: dict[str, str] = {}
    for line in requires:
        found = re.match(r"([A-Za-z0-9._-]+)\s*([<>=!~][^;]*)?", line)
        if found is not None and found[2] and "test" not in line.partition(";")[2]:
            ranges.setdefault(found[1].lower(), ",".join(sorted(found[2].replace(" ", "").split(","), reverse=True)))
    return ranges


def within(version: str, wanted: str) -> bool:
    """Whether a version lies in a range of ``>=``, ``>``, ``<=``, ``<``, ``==`` and ``!=``; suffixes do not count."""
    have = _numbers(version)
    for part in wanted.split(","):
        name = next((op for op in _COMPARE if part.startswith(op)), None)
        if name is None:
            continue
        limit = _numbers(part[len(name) :])
        width = max(len(have), len(limit))
        if not _COMPARE[name](_padded(have, width), _padded(limit, width)):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _padded(numbers: tuple[int, ...], width: int) -> tuple[int, ...]:
    return numbers + (0,) * (width - len(numbers))


def _hook(group: str, purpose: str) -> Hook:
    why_not = None
    if not importlib.metadata.entry_points(group=group, name="secure_loader"):
        why_not = "the package is not installed, only importable"
    elif group == "torch.backends":
        for variable in ("TORCH_DEVICE_BACKEND_AUTOLOAD", "SECURE_LOADER_AUTOLOAD"):
            if os.environ.get(variable) == "0":
                why_not = f"{variable}=0"
    elif group == "vllm.general_plugins":
        allowed = os.environ.get("VLLM_PLUGINS")
        if allowed is not None and "secure_loader" not in allowed.split(","):
            why_not = "VLLM_PLUGINS does not name secure_loader"
    return Hook(group, purpose, why_not is None, why_not)


def _cpu_flags() -> tuple[str, ...]:
    try:
        text = Path("/proc/cpuinfo").read_text("ascii", errors="replace")
    except OSError:
        return ()
    line = re.search(r"^(flags|Features)\s*:(.*)$", text, re.MULTILINE)
    present = set(line[2].split()) if line else set()
    return tuple(flag for flag in _CPU_FLAGS if flag in present)


def _permission_problems() -> Iterator[str]:
    for folder in (home(), keys_dir(), trust_dir(), state_dir()):
        try:
            info = folder.stat()
        except FileNotFoundError:
            continue
        except OSError as e:
            yield f"{folder}: {e.strerror}"
            continue
        mode = stat.S_IMODE(info.st_mode)
        if info.st_uid not in (0, os.geteuid()):
            yield f"{folder} belongs to another user"
        elif mode & 0o022:
            yield f"{folder} can be written by others (mode {mode:04o}): chmod 700 {folder}"
        elif folder == keys_dir() and mode & 0o077:
            yield f"{folder} can be entered by others (mode {mode:04o}): chmod 700 {folder}"


def _count_keys(sources: tuple[str, ...]) -> tuple[int, int, list[str]]:
    """Numbers of master and signing keys in files, and what is wrong with these."""
    masters: set[str] = set()
    signing: set[str] = set()
    problems = []
    for path in _key_files(sources):
        try:
            for key in read_keys(path):
                if isinstance(key, MasterKey):
                    masters.add(key.kid)
                elif isinstance(key, SigningKey):
                    signing.add(key.kid)
        except SecureLoaderError as e:
            problems.append(str(e))
    return len(masters), len(signing), problems


def _key_files(sources: tuple[str, ...]) -> Iterator[Path]:
    """One by one, so that a bad file does not hide the others. A variable would be used up by reading it."""
    for scheme, rest in map(split_reference, sources):
        path = Path(rest).expanduser()
        if scheme == "file":
            yield from sorted(key_files(path)) if path.is_dir() else [path]
