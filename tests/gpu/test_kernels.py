"""The kernels on a GPU: known answers by every way there is, tampering, odd chunks, and what is left in device memory."""

from __future__ import annotations

import ctypes
import os
import random

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from secure_loader.core.device import choice, nvrtc
from secure_loader.core.device.batch import Batch, Chunk
from secure_loader.core.device.choice import WAYS, choose
from secure_loader.core.device.driver import Driver
from secure_loader.core.secrets import Secret
from secure_loader.errors import AuthenticationError, DeviceError

pytestmark = pytest.mark.gpu

STREAM = 0
GUARD = 0xA5


@pytest.fixture(scope="module")
def driver():
    try:
        driver = Driver()
        if not driver.gpus():
            pytest.skip("the CUDA driver knows no device")
    except DeviceError as e:
        pytest.skip(str(e))
    with driver.current(driver.retain(0)):
        yield driver
    driver.release(0)


class Memory:
    """Device memory, and pinned memory of the same size to fill and read it.

    Args:
        driver: In its current context.
        nbytes: Its size.
    """

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self.driver, self.nbytes = driver, nbytes
        self.address, self.host = driver.allocate(nbytes), driver.allocate_host(nbytes)

    def put(self, data: bytes) -> None:
        ctypes.memmove(self.host, data, self.nbytes)
        self.driver.upload(self.address, self.host, self.nbytes, STREAM)
        self.driver.synchronise(STREAM)

    def get(self) -> bytes:
        self.driver.download(self.host, self.address, self.nbytes, STREAM)
        self.driver.synchronise(STREAM)
        return ctypes.string_at(self.host, self.nbytes)

    def free(self) -> None:
        self.driver.free(self.address)
        self.driver.free_host(self.host)


def sealed(address: int, sizes: list[int], keys: list[bytes], seed: int) -> tuple[bytes, bytes, list[Chunk]]:
    """Ciphertext with guards around it, what it becomes, and where the chunks are."""
    rng = random.Random(seed)
    before, after, chunks = bytearray(), bytearray(), []
    for i, size in enumerate(sizes):
        guard = bytes([GUARD]) * rng.randrange(1, 64)
        nonce, plain, key = rng.randbytes(12), rng.randbytes(size), i % len(keys)
        text = AESGCM(keys[key]).encrypt(nonce, plain, None)
        chunks.append(Chunk(address + len(before) + len(guard), size, key, nonce, text[size:]))
        before += guard + text[:size]
        after += guard + plain
    return bytes(before), bytes(after), chunks


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_known_answers(driver, way):
    if way == "nvrtc":
        try:
            nvrtc.Nvrtc()
        except DeviceError as e:
            pytest.skip(str(e))
    if way == "triton":
        pytest.importorskip("triton")
    assert choose(0, way).reasons == ()


def test_the_shipped_cubin_is_what_runs(driver):
    assert choose(0).name.startswith("cubin sm_")


@pytest.mark.parametrize("seed", range(20))
def test_random_chunks(driver, seed):
    rng = random.Random(seed)
    sizes = [rng.choice((0, 1, 15, 16, 17, rng.randrange(5000), rng.randrange(300_000), 65536)) for _ in range(40)]
    keys = [rng.randbytes(rng.choice((16, 32))) for _ in range(7)]
    memory = Memory(driver, sum(sizes) + 64 * len(sizes))
    before, after, chunks = sealed(memory.address, sizes, keys, seed)
    memory.put(before.ljust(memory.nbytes, b"\0"))
    kernels = choose(0).kernels
    kernels.open(Batch([Secret(k) for k in keys], chunks), STREAM).wait()
    assert memory.get() == after.ljust(memory.nbytes, b"\0")
    # The same again, with one bit changed anywhere.
    wrong = rng.choice([c for c in chunks if c.nbytes])
    damaged = bytearray(before)
    damaged[wrong.address - memory.address + rng.randrange(wrong.nbytes)] ^= 1 << rng.randrange(8)
    memory.put(bytes(damaged).ljust(memory.nbytes, b"\0"))
    with pytest.raises(AuthenticationError):
        kernels.open(Batch([Secret(k) for k in keys], chunks), STREAM).wait()
    blank = bytearray(before)
    for chunk in chunks:
        start = chunk.address - memory.address
        blank[start : start + chunk.nbytes] = bytes(chunk.nbytes)
    assert memory.get() == bytes(blank).ljust(memory.nbytes, b"\0")
    memory.free()


def test_more_keys_than_one_launch_takes(driver):
    keys = [os.urandom(32) for _ in range(2500)]
    memory = Memory(driver, 100 * len(keys))
    before, after, chunks = sealed(memory.address, [33] * len(keys), keys, 1)
    memory.put(before.ljust(memory.nbytes, b"\0"))
    choose(0).kernels.open(Batch([Secret(k) for k in keys], chunks), STREAM).wait()
    assert memory.get() == after.ljust(memory.nbytes, b"\0")
    memory.free()


def test_no_key_is_left_in_device_memory(driver, monkeypatch):
    taken: list[tuple[int, int]] = []
    monkeypatch.setattr(choice, "_made", {})
    allocate = Driver.allocate
    monkeypatch.setattr(Driver, "allocate", lambda self, n: taken.append((address := allocate(self, n), n)) or address)
    kernels = choose(0).kernels
    del taken[:]
    keys = [os.urandom(32) for _ in range(300)]
    memory = Memory(driver, 100 * len(keys))
    before, _, chunks = sealed(memory.address, [33] * len(keys), keys, 1)
    memory.put(before.ljust(memory.nbytes, b"\0"))
    kernels.open(Batch([Secret(k) for k in keys], chunks), STREAM).wait()
    workspaces = [t for t in taken if t[0] != memory.address]
    assert workspaces, "the batch needed a larger workspace than the known answers"
    for address, nbytes in workspaces:
        host = driver.allocate_host(nbytes)
        driver.download(host, address, nbytes, STREAM)
        driver.synchronise(STREAM)
        left = ctypes.string_at(host, nbytes)
        assert not any(key[:16] in left for key in keys)
        driver.free_host(host)
    kernels.close()
    memory.free()
