"""The kernels of ``csrc`` on the CPU: built by g++ from the very source that a GPU gets, loaded with ctypes.

    from tests.unit.device.shim import Shim, build
    kernels = Shim(build())
    kernels.expand(keys, schedules, 1)

Every argument that is an address is one of host memory; layouts are those of ``secure_loader.core.device.abi``.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
CSRC = ROOT / "csrc"

FLAGS = [
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-fno-strict-aliasing",
]
PLAIN = ["-O2"]
SANITIZED = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]

FORWARD, REVERSE, SHUFFLED = 0, 1, 2
"""Orders in which threads run between two barriers."""


def sources(csrc: Path = CSRC) -> list[Path]:
    """All files that the shim is made of, in a fixed order."""
    return sorted([*csrc.glob("*.cu*"), *csrc.glob("shim/*")])


def compiler() -> str | None:
    """g++, or the compiler that CXX names; None where there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def build(csrc: Path = CSRC, flags: list[str] | None = None, *, into: Path = ROOT / "build/shim") -> Path:
    """The shim as a library; kept under the hash of what it was made of, so that a second call costs nothing.

    Raises:
        RuntimeError: There is no compiler, or it refused.
    """
    cxx = compiler()
    if cxx is None:
        raise RuntimeError("no g++")
    arguments = [*FLAGS, *(PLAIN if flags is None else flags)]
    digest = hashlib.sha256("\0".join([cxx, *arguments]).encode())
    for path in sources(csrc):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    library = into / f"{digest.hexdigest()[:24]}.so"
    if not library.exists():
        into.mkdir(parents=True, exist_ok=True)
        fresh = into / f"{library.stem}.{os.getpid()}.tmp"
        command = [cxx, *arguments, "-o", os.fspath(fresh), os.fspath(csrc / "shim/shim.cpp")]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{run.stderr}")
        fresh.replace(library)
    return library


def asan_runtime() -> Path | None:
    """What has to be preloaded for a sanitized library in a plain Python; None where the compiler has no sanitizers."""
    cxx = compiler()
    if cxx is None:
        return None
    found = [
        subprocess.check_output([cxx, f"-print-file-name=lib{name}.so"], text=True).strip()
        for name in ("asan", "ubsan")
    ]
    return Path(found[0]).resolve() if all(Path(path).is_absolute() for path in found) else None


class ShimError(RuntimeError):
    """A kernel did what it must not do: touched bytes of others, left secrets in shared memory, missed a barrier."""


class Shim:
    """Kernels with the arguments of ``csrc/abi.cuh``, each run to its end before the call returns.

    Args:
        library: What :func:`build` made.

    Every method raises ShimError if the kernel misbehaved. A wrong tag is no misbehaviour, but a verdict.
    """

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(os.fspath(library))
        address, count = ctypes.c_void_p, ctypes.c_uint32
        for name, arguments in {
            "shim_expand_keys": [address, address, count],
            "shim_open": [address, address, count, address, address],
            "shim_seal": [address, address, count, address, address],
            "shim_ctr": [address, address, count, address],
            "shim_finish": [address, count, address, address, address],
            "shim_tag": [address, count, address, address, address],
        }.items():
            function = getattr(self.library, name)
            function.argtypes = [*arguments, count, ctypes.c_int]
            function.restype = ctypes.c_char_p

    def _call(self, name: str, *arguments: int) -> None:
        error = getattr(self.library, name)(*arguments)
        if error is not None:
            raise ShimError(f"{name}: {error.decode()}")

    def expand(self, keys: int, schedules: int, nkeys: int, *, order: int = FORWARD) -> None:
        """Make a schedule of every key."""
        self._call("shim_expand_keys", keys, schedules, nkeys, nkeys, order)

    def open(
        self, chunks: int, work: int, nwork: int, schedules: int, partial: int, *, grid: int = 2, order: int = FORWARD
    ) -> None:
        """Decrypt, and put the hash of every segment into ``partial``."""
        self._call("shim_open", chunks, work, nwork, schedules, partial, grid, order)

    def seal(
        self, chunks: int, work: int, nwork: int, schedules: int, partial: int, *, grid: int = 2, order: int = FORWARD
    ) -> None:
        """Encrypt, and put the hash of every segment into ``partial``."""
        self._call("shim_seal", chunks, work, nwork, schedules, partial, grid, order)

    def ctr(self, chunks: int, work: int, nwork: int, schedules: int, *, grid: int = 2, order: int = FORWARD) -> None:
        """Decrypt or encrypt alone."""
        self._call("shim_ctr", chunks, work, nwork, schedules, grid, order)

    def finish(
        self, chunks: int, nchunks: int, schedules: int, partial: int, verdicts: int, *, order: int = FORWARD
    ) -> None:
        """Compare the tags; a verdict for every chunk."""
        self._call("shim_finish", chunks, nchunks, schedules, partial, verdicts, nchunks, order)

    def tag(self, chunks: int, nchunks: int, schedules: int, partial: int, tags: int, *, order: int = FORWARD) -> None:
        """Make the tags."""
        self._call("shim_tag", chunks, nchunks, schedules, partial, tags, nchunks, order)

    def layout(self) -> list[int]:
        """Sizes and offsets as the compiler sees them, in the order of ``shim_layout``."""
        values = (ctypes.c_uint32 * 22)()
        self.library.shim_layout(values)
        return list(values)

    def gf_mul(self, a: int, b: int) -> int:
        """A product in the field of GHASH; blocks as big-endian integers."""
        word = ctypes.c_uint32 * 4
        factors = [word(*(x >> 32 * i & 0xFFFFFFFF for i in range(4))) for x in (a, b)]
        out = word()
        self.library.shim_gf_mul(*factors, out)
        return sum(w << 32 * i for i, w in enumerate(out))
