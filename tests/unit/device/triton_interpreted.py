"""Run the Triton kernels in Triton's interpreter; ``TRITON_INTERPRET=1`` must be set before Triton is imported.

``test_triton.py`` starts this in a process of its own, which prints what became of each check, as JSON.
"""

from __future__ import annotations

import json
import random
import time
import traceback

import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from triton.runtime import interpreter

from secure_loader.core.device.batch import Batch, Chunk
from secure_loader.core.device.triton_kernels import TritonKernels
from secure_loader.core.device.triton_place import Interpreter
from secure_loader.core.secrets import Secret
from secure_loader.errors import AuthenticationError, DeviceError

GUARD = 40
POISON = 0xA5
random.seed(4)
KEYS = [random.randbytes(32), random.randbytes(16), random.randbytes(32)]


def call_plainly() -> None:
    """Spare our own functions what the interpreter does at every call: patch all of ``tl`` again. Three times as fast."""
    whole = interpreter.InterpretedFunction.__call__

    def call(self, *args, **kwargs):
        ours = self.fn.__module__.startswith("secure_loader.")
        return self.rewrite()(*args, **kwargs) if ours else whole(self, *args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


class Sealed:
    """Chunks in one buffer, poison between them; ``plain`` is what the buffer should hold once they were opened.

    Args:
        shapes: Key, size, and address modulo 16 of each.
    """

    def __init__(self, *shapes: tuple[int, int, int]) -> None:
        self.memory = torch.full((sum(n + GUARD + 16 for _, n, _ in shapes) + GUARD,), POISON, dtype=torch.uint8)
        self.plain = bytearray(self.memory.tolist())
        self.wiped = bytearray(self.plain)
        self.chunks: list[Chunk] = []
        at = 0
        for key, n, shift in shapes:
            at += GUARD
            at += (shift - self.memory.data_ptr() - at) % 16
            nonce, plain = random.randbytes(12), random.randbytes(n)
            text = AESGCM(KEYS[key]).encrypt(nonce, plain, None)
            self.put(at, text[:n])
            self.plain[at : at + n] = plain
            self.wiped[at : at + n] = bytes(n)
            self.chunks.append(Chunk(self.memory.data_ptr() + at, n, key, nonce, text[n:]))
            at += n

    def put(self, at: int, data: bytes) -> None:
        if data:
            self.memory[at : at + len(data)] = torch.tensor(list(data), dtype=torch.uint8)

    def batch(self, keys: int) -> Batch:
        """The chunks, and so many keys: each takes the interpreter two seconds."""
        return Batch([Secret(key) for key in KEYS[:keys]], self.chunks)

    def holds(self) -> bytes:
        return bytes(self.memory.tolist())


class Recording(Interpreter):
    """Remembers the host memory that it gave, and fails where it is told to.

    Args:
        fault: ``"host"``, ``"mark"`` or ``"synchronize"``; it happens once.
    """

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.given: list[torch.Tensor] = []
        self.fault = fault

    def fails(self, where: str) -> None:
        if self.fault == where:
            self.fault = ""
            raise RuntimeError(f"planted in {where}")

    def host(self, nbytes):
        self.fails("host")
        self.given.append(super().host(nbytes))
        return self.given[-1]

    def mark(self):
        self.fails("mark")
        return self

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.fails("synchronize")


def raises(kind, call) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def check_good() -> None:
    """Every kind of edge: blocks, tiles and segments that are not full, every access, several keys of both sizes."""
    sealed = Sealed(
        (0, 0, 0),  # only a tag
        (1, 1, 1),
        (2, 16, 0),
        (1, 31, 7),
        (0, 4096 + 4, 8),  # one block, of words, ahead of one tile
        (2, 4095, 12),  # one tile, of bytes at aligned addresses
        (1, 8192 + 16 + 5, 3),  # one block ahead of one segment, bytes
        (0, 2 * 8192 + 200, 4),  # three segments
    )
    place = Recording()
    pending = TritonKernels(0, place).open(sealed.batch(3), 0)
    memory = pending._memory
    assert not memory.raw.any(), "raw keys are left on the device"
    assert not memory._scratch.any(), "what was made of keys is left on the device"
    assert any(KEYS[0] in bytes(t.tolist()) for t in place.given), "this test looks for the keys in the wrong place"
    assert pending.done()
    pending.wait()
    pending.wait()
    assert all(KEYS[0] not in bytes(t.tolist()) and KEYS[1] not in bytes(t.tolist()) for t in place.given)
    assert sealed.holds() == sealed.plain


def check_tampered() -> None:
    """One verdict for each chunk; one that is bad takes all of the batch with it."""
    sealed = Sealed((0, 20, 0), *[(0, 33, i) for i in range(9)], (0, 0, 0), (0, 1, 5))
    chunks = sealed.chunks

    def flip(data: bytes, bit: int) -> bytes:
        return (int.from_bytes(data, "little") ^ (1 << bit)).to_bytes(len(data), "little")

    chunks[1] = chunks[1]._replace(tag=flip(chunks[1].tag, 0))
    chunks[2] = chunks[2]._replace(tag=flip(chunks[2].tag, 127))
    chunks[3] = chunks[3]._replace(nonce=flip(chunks[3].nonce, 95))
    chunks[4] = chunks[4]._replace(key=1)
    chunks[5] = chunks[5]._replace(nbytes=32)
    for i, where in ((6, 0), (7, 15), (8, 32)):  # in the first, last and short block
        sealed.memory[chunks[i].address - sealed.memory.data_ptr() + where] ^= 1
    chunks[9] = chunks[9]._replace(tag=flip(chunks[9].tag, 40))
    chunks[10] = chunks[10]._replace(tag=flip(chunks[10].tag, 64))
    last = chunks[5].address - sealed.memory.data_ptr() + 32
    sealed.wiped[last] = sealed.memory[last].item()  # behind the chunk that was cut short
    kernels = TritonKernels(0, Interpreter())
    pending = kernels.open(sealed.batch(2), 0)
    assert pending._memory.verdicts.tolist() == [1] + [2] * 10 + [1]
    kernels.close()
    assert sealed.holds() == sealed.wiped, "plaintext that was not verified is left, or bytes beside it changed"
    for _ in range(2):
        assert "authentication failed" in raises(AuthenticationError, pending.wait)


def check_fails_before() -> None:
    """Nothing was decrypted yet: the chunks stay as they are."""
    sealed = Sealed((0, 40, 0))
    before = sealed.holds()
    kernels = TritonKernels(0, Recording("host"))
    assert "planted in host" in raises(DeviceError, lambda: kernels.open(sealed.batch(1), 0))
    assert sealed.holds() == before


def check_fails_while_queuing() -> None:
    sealed, place = Sealed((0, 40, 1)), Recording()
    kernels = TritonKernels(0, place)
    place.fault = "mark"
    assert "planted in mark" in raises(DeviceError, lambda: kernels.open(sealed.batch(1), 0))
    assert sealed.holds() == sealed.wiped
    assert not any(t.any() for t in place.given[:1]), "raw keys are left on the host"
    kernels.close()


def check_fails_on_the_device() -> None:
    sealed, place = Sealed((0, 40, 1), (0, 0, 0)), Recording()
    pending = TritonKernels(0, place).open(sealed.batch(1), 0)
    place.fault = "synchronize"
    for _ in range(2):
        assert "planted in synchronize" in raises(DeviceError, pending.wait)
    assert sealed.holds() == sealed.wiped
    assert not place.given[0].any(), "raw keys are left on the host"


def check_nothing() -> None:
    """A batch without chunks, and one whose only chunk is empty."""
    kernels = TritonKernels(0, Interpreter())
    kernels.open(Batch([], []), 0).wait()
    kernels.open(Sealed((0, 0, 0)).batch(1), 0).wait()


def main() -> None:
    call_plainly()
    outcome = {}
    for name, check in [(n, c) for n, c in globals().items() if n.startswith("check_")]:
        start = time.perf_counter()
        try:
            check()
        except Exception:  # noqa: BLE001 - whatever it is, it is reported
            outcome[name] = traceback.format_exc()
        else:
            outcome[name] = f"passed in {time.perf_counter() - start:.1f} s"
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
