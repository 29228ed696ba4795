"""What has to be there before anything can be measured: a GPU, and a Python whose torch sees it. Standard library only.

A machine without network brings what is missing as wheels: ``make gpu WHEELS=folder``.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements" / "test.txt"
SITE = ROOT / "build" / "gpu"
# What the stages import, and the least version that is good. torch is the machine's own: it has to fit the driver.
NEEDED = {
    "cryptography": (50,),
    "cffi": (1,),
    "pycparser": (2,),
    "tqdm": (4, 66),
    "numpy": (1, 26),
    "safetensors": (0, 8),
    "packaging": (1,),
    "pytest": (8,),
    "iniconfig": (1,),
    "pluggy": (1,),
    "pygments": (2,),
    "cuda-bindings": (12, 8),
    "cuda-pathfinder": (1,),
}
OTHERS = ("fastsafetensors", "instanttensor", "runai-model-streamer", "cryptotensors")
"""Other loaders: compared where they can be imported, never asked for."""
_TORCH = (2, 10)


class NotReadyError(Exception):
    """This machine, or this Python, cannot run it; the text says why, and what to do."""


def gpus() -> int:
    """How many GPUs the driver knows: a look that takes no time.

    Raises:
        NotReadyError: There is no driver, or no GPU.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise NotReadyError(
            "there is no NVIDIA driver on this machine (libcuda.so.1), and so no GPU to measure.\n"
            "`make test` proves everything that can be proven without one."
        ) from None
    if code := driver.cuInit(0):
        raise NotReadyError(f"the NVIDIA driver finds no GPU that it can use (cuInit: error {code}).")
    count = ctypes.c_int(0)
    if driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        raise NotReadyError("the NVIDIA driver knows no GPU.")
    return count.value


def torch_sees_gpu() -> None:
    """Whether this Python's torch does.

    Raises:
        NotReadyError: It does not, or there is none.
    """
    found = _version("torch")
    if found is None or found < _TORCH:
        raise NotReadyError(
            f"{sys.executable} has no torch {'.'.join(map(str, _TORCH))} or newer.\n"
            "Name the Python that has it:  make gpu PYTHON=/path/to/python\n"
            "or let `make .venv-bench/.ready` make one (some GB), and then:  make gpu PYTHON=.venv-bench/bin/python"
        )
    # In a process of its own: nothing of this one may touch the device.
    look = "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 3)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", look], capture_output=True, text=True, check=False)
    if done.returncode == 3:
        raise NotReadyError(
            f"torch {_text(found)} of {sys.executable} sees no GPU, though the driver knows one: it was built without CUDA,\n"
            "or for a newer driver."
        )
    if done.returncode:
        raise NotReadyError(f"torch cannot be imported: {done.stderr.strip()[-600:]}")


def missing() -> list[str]:
    """Which of the needed packages this Python has not, or too old."""
    found = {name: _version(name) for name in NEEDED}
    return [name for name, least in NEEDED.items() if (version := found[name]) is None or version < least]


def complete(wheels: Path | None, tell: Callable[[str], object] = print) -> list[str]:
    """Put what is missing into a folder of this clone, from wheels or from the registry; nothing else is changed.

    Args:
        wheels: A folder of wheels; all that fit this Python are taken. None asks the registry for what the lock names.
        tell: Called with a line before it takes time.

    Returns:
        Names of the wheels that were taken, for the record.

    Raises:
        NotReadyError: Something is missing still.
    """
    site = SITE / f"site-{sysconfig.get_python_version()}"
    _put_first(site)
    taken: list[str] = []
    if wheels is not None:
        taken = _install_wheels(wheels, site)
    elif absent := missing():
        tell(f"installing {', '.join(absent)} into {site.relative_to(ROOT)} ...")
        _install_locked(absent, site)
    if absent := missing():
        raise NotReadyError(
            f"{sys.executable} lacks {', '.join(absent)}.\n"
            "Without network: on a machine that has it, `pip download --no-deps --only-binary=:all: -d wheels "
            f"{' '.join(absent)}` for this Python ({sysconfig.get_python_version()}, {sysconfig.get_platform()}),\n"
            "bring the folder here, and:  make gpu WHEELS=wheels"
        )
    return taken


def _put_first(site: Path) -> None:
    """For this process and all that it starts."""
    site.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    if str(site) not in sys.path:
        sys.path.insert(0, str(site))


def _install_wheels(folder: Path, site: Path) -> list[str]:
    files = sorted(folder.glob("*.whl"))
    if not files:
        raise NotReadyError(f"there are no wheels in {folder}.")
    _pip(["--no-index", *map(str, files)], site)
    return [file.name for file in files]


def _install_locked(names: Sequence[str], site: Path) -> None:
    chosen = SITE / "requirements.txt"
    chosen.write_text("".join(locked(LOCK.read_text(), names)))
    _pip(["--require-hashes", "--only-binary", ":all:", "-r", str(chosen)], site)


def locked(lock: str, names: Iterable[str]) -> list[str]:
    """The parts of a lock that are about some packages: version, condition and hashes."""
    wanted = set(names)
    parts = re.split(r"(?m)^(?=[A-Za-z0-9])", lock)
    return [part for part in parts if re.match(r"[A-Za-z0-9._-]*", part)[0].lower() in wanted]


def _pip(what: Sequence[str], site: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--upgrade", "--target", str(site), *what]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotReadyError(
            f"pip could not install what is missing: {done.stderr.strip()[-600:]}\n"
            f"Without network: bring wheels of {', '.join(missing())}, and:  make gpu WHEELS=folder"
        )
    importlib.invalidate_caches()


def _version(name: str) -> tuple[int, ...] | None:
    try:
        text = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
