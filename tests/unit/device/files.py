"""Small encrypted files with everything in them that a load to a device can stumble over, and an engine to load them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from secure_loader import MasterKey, SigningKey, TrustedSigner, TrustStore
from secure_loader.core import archive, single
from secure_loader.core.aead import ALGORITHMS
from secure_loader.core.device.engine import Engine
from secure_loader.core.seal import Publication, write_file
from secure_loader.core.secrets import Secret
from secure_loader.core.session import Session

from .fake import CLEARED, NOTHING, FakeDevice, FakeKernels
from .fake_direct import FakeDirect

CHUNK = 64 * 1024
SIGNING = SigningKey("sign-1", Secret(bytes(range(100, 132))))
TRUST = TrustStore([TrustedSigner("me", SIGNING.verify_key())])
DEVICE = "cuda:0"


def master(algorithm: str = "aes256gcm") -> MasterKey:
    found = ALGORITHMS[algorithm]
    return MasterKey(f"enc-{algorithm}", found, Secret(bytes(range(7, 7 + found.key_bytes))))


def content(seed: int = 0) -> dict[str, torch.Tensor]:
    """Around chunk borders, of odd sizes, empty, of one byte, many small ones, and a matrix to slice."""
    rng = np.random.default_rng(seed)

    def octets(n: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(0, 256, n, np.uint8))

    sizes = (0, 1, 3, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 7, 20 * CHUNK)
    made = {f"n{n}": octets(n) for n in sizes} | {f"small.{i}": octets(1 + 37 * i % 101) for i in range(60)}
    matrix = torch.from_numpy(rng.standard_normal((700, 300)).astype(np.float32))
    return made | {"matrix": matrix, "half": matrix[:99, :77].to(torch.bfloat16), "empty": torch.empty(0, 5)}


def write(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    algorithm: str = "aes256gcm",
    version: str = "2",
    clear: tuple[str, ...] = (),
    chunk_size: int = CHUNK,
) -> Path:
    by = Publication(master(algorithm), SIGNING, "demo", version=version, chunk_size=chunk_size)
    write_file(path, single.plain_tensors(tensors, (), clear), {"format": "pt"}, by)
    return path


def session(algorithm: str = "aes256gcm", **settings: Any) -> Session:
    from secure_loader import config

    return Session(keys=master(algorithm), trust=TRUST, config=config.load(settings))


class Bench:
    """A fake device with an engine, in the place of the first GPU."""

    def __init__(
        self,
        monkeypatch: Any,
        *,
        kernels: bool = True,
        require: bool = False,
        seed: int = 0,
        slot: int = 256 * 1024,
        direct: Mapping[str, Any] | None = None,
        **fault: Any,
    ) -> None:
        late = fault.pop("late_error", None)
        self.device = FakeDevice(seed, **fault)
        self.kernels = FakeKernels(self.device, late) if kernels else None
        self.direct = None if direct is None else FakeDirect(self.device, **direct)
        self.engine = Engine(
            self.device, self.kernels, require=require, slot_bytes=slot, region_bytes=1 << 20, direct=self.direct
        )
        monkeypatch.setattr(archive, "engine_for", lambda device, kernels, *, require: self.engine)

    def check_calm(self) -> None:
        """Nothing forbidden has happened, and nothing is under way."""
        assert self.device.problems == []
        assert self.device.idle
        assert helpers() == []
        if self.direct is not None:
            assert self.direct.under_way() == []

    def check_wiped(self) -> None:
        """Nothing that was to be filled holds anything any more, on the device or in pinned memory."""
        self.check_calm()
        for block in self.device.blocks:
            touched = block.state != NOTHING
            assert (block.state[touched] == CLEARED).all()
            assert not block.array[touched].any()
        assert self.device.hosts_are_empty()


def helpers() -> list[str]:
    """Threads that still do something for a transfer."""
    mine = threading.get_ident()
    found = []
    for ident, top in sys._current_frames().items():
        frame = top
        while frame is not None and ident != mine:
            if frame.f_code.co_name == "_help":
                found.append(f"thread {ident}")
            frame = frame.f_back
    return found


def interrupted_at(line: int, bench: Bench, files: tuple[str, ...], action: Callable[[], object]) -> int:
    """Do something, and press ^C before the given line of some files, from 1 on; returns how many lines ran."""
    seen = [0]

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line":
            seen[0] += 1
            if seen[0] == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        sys.settrace(before)
        bench.check_wiped()
    else:
        # How many lines run depends on who was first, the readers or this thread.
        assert not line or seen[0] < line
        bench.check_calm()
    finally:
        sys.settrace(before)
    return seen[0]


def same(loaded: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> bool:
    """Equal names, dtypes, shapes and bits."""
    return loaded.keys() == tensors.keys() and all(
        loaded[n].dtype == t.dtype
        and loaded[n].shape == t.shape
        and torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (loaded[n], t)))
        for n, t in tensors.items()
    )
