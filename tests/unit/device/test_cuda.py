"""The CUDA kernels' host side over a driver that runs late and fails where it is told: verdicts, splitting, and no key left anywhere."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import Counter

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from secure_loader.core.device import abi
from secure_loader.core.device.batch import Batch, Chunk
from secure_loader.core.device.cuda import KEYS_PER_LAUNCH, CudaKernels
from secure_loader.core.secrets import Secret
from secure_loader.errors import AuthenticationError, DeviceError
from tests.unit.device.recording_driver import POISON, RecordingDriver, write

IMAGE = b"\x7fELF of nothing"
STREAM = 7
SIZES = (0, 5, 4096, 70_001)


class Memory:
    """Tensor memory with sealed chunks in it, poisoned around them.

    Args:
        driver: Whose memory it is.
        sizes: Of the chunks.
        keys: DEKs; chunk ``i`` has key ``i % len(keys)``.
    """

    def __init__(
        self, driver: RecordingDriver, sizes: tuple[int, ...] = SIZES, keys: int = 2, aad: bytes = b""
    ) -> None:
        # Not from the driver's allocator: kernels must not mistake it for their own.
        self.buffer = (ctypes.c_ubyte * (sum(sizes) + 48 * len(sizes) + 64))()
        ctypes.memset(self.buffer, POISON, len(self.buffer))
        driver.live[ctypes.addressof(self.buffer)] = self.buffer
        self.raw_keys = [os.urandom(32 if i % 2 == 0 else 16) for i in range(keys)]
        self.plain, chunks, at = [], [], ctypes.addressof(self.buffer) + 32
        for i, size in enumerate(sizes):
            nonce, plain, key = os.urandom(12), os.urandom(size), self.raw_keys[i % keys]
            text = AESGCM(key).encrypt(nonce, plain, aad or None)
            at += 32 + i % 16
            write(at, text[:size])
            chunks.append(Chunk(at, size, i % keys, nonce, text[size:], aad))
            self.plain.append(plain)
            at += size
        self.chunks = chunks
        self.around = self._around()

    @property
    def batch(self) -> Batch:
        return Batch([Secret(key) for key in self.raw_keys], self.chunks)

    def tamper(self, i: int = -1) -> None:
        chunk = self.chunks[i]
        self.chunks[i] = chunk._replace(tag=bytes([chunk.tag[0] ^ 128]) + chunk.tag[1:])

    def found(self) -> list[bytes]:
        assert self._around() == self.around, "bytes around the chunks were changed"
        return [ctypes.string_at(c.address, c.nbytes) for c in self.chunks]

    def assert_overwritten(self) -> None:
        assert self.found() == [bytes(c.nbytes) for c in self.chunks]

    def _around(self) -> bytes:
        data, start = bytearray(self.buffer), ctypes.addressof(self.buffer)
        for chunk in self.chunks:
            data[chunk.address - start : chunk.address - start + chunk.nbytes] = bytes(chunk.nbytes)
        return bytes(data)

    def assert_no_key(self, driver: RecordingDriver) -> None:
        """Neither on the device nor in pinned memory, freed memory included."""
        driver.run()
        left = driver.memory()
        assert not any(key[:16] in left for key in self.raw_keys), "a key was left behind"


@pytest.fixture
def driver() -> RecordingDriver:
    return RecordingDriver()


@pytest.fixture
def kernels(driver):
    with_driver = CudaKernels(driver, 0, IMAGE, "cubin sm_90")
    yield with_driver
    with_driver.close()


@pytest.mark.parametrize("aad", [b"", b"twenty bytes of data"])
def test_opens_and_leaves_no_key(driver, kernels, aad):
    memory = Memory(driver, aad=aad)
    pending = kernels.open(memory.batch, STREAM)
    assert not pending.done(), "nothing ran yet"
    pending.wait()
    assert pending.done()
    assert memory.found() == memory.plain
    memory.assert_no_key(driver)
    pending.wait()


def test_order_on_the_stream(driver, kernels):
    memory = Memory(driver)
    kernels.open(memory.batch, STREAM)
    *queued, event = driver.queued(STREAM)
    assert queued == ["upload", "sl_expand_keys", "sl_gcm_open", "sl_gcm_finish", "clear", "download"]
    assert event.startswith("event")
    # Wiped by the stream alone: nobody waited, nobody cleaned up.
    memory.assert_no_key(driver)


def test_no_segment_no_launch(driver, kernels):
    memory = Memory(driver, sizes=(0, 0))
    pending = kernels.open(memory.batch, STREAM)
    assert "sl_gcm_open" not in driver.queued(STREAM)
    pending.wait()
    memory.tamper()
    with pytest.raises(AuthenticationError, match="1 of 2 chunks"):
        kernels.open(memory.batch, STREAM).wait()


def test_nothing_to_do(driver, kernels):
    before = len(driver.calls)
    kernels.open(Batch([Secret(bytes(32))], []), STREAM).wait()
    kernels.open(Batch([], []), STREAM).wait()
    assert not {"launch", "allocate", "upload"} & set(driver.calls[before:])


@pytest.mark.parametrize("which", range(len(SIZES)))
def test_one_wrong_tag_overwrites_everything(driver, kernels, which):
    memory = Memory(driver)
    memory.tamper(which)
    pending = kernels.open(memory.batch, STREAM)
    with pytest.raises(AuthenticationError, match="1 of 4 chunks failed authentication"):
        pending.wait()
    memory.assert_overwritten()
    memory.assert_no_key(driver)
    with pytest.raises(AuthenticationError):
        pending.wait()
    good = Memory(driver)
    kernels.open(good.batch, STREAM).wait()
    assert good.found() == good.plain


@pytest.mark.parametrize("verdict", [0, 2, 3, 0xFFFFFFFF, 0x101])
def test_only_one_verdict_is_good(driver, verdict):
    class Strange(type(driver._kernels)):
        def sl_gcm_finish(self, blocks, chunks, nchunks, schedules, partial, verdicts):
            super().sl_gcm_finish(blocks, chunks, nchunks, schedules, partial, verdicts)
            write(verdicts, verdict.to_bytes(4, "little"))

    driver._kernels = Strange()
    memory = Memory(driver)
    with pytest.raises(AuthenticationError):
        CudaKernels(driver, 0, IMAGE, "x").open(memory.batch, STREAM).wait()
    memory.assert_overwritten()


def test_a_kernel_that_does_nothing_verifies_nothing(driver):
    driver._kernels = lambda *_: None
    memory = Memory(driver)
    first = CudaKernels(driver, 0, IMAGE, "x")
    with pytest.raises(AuthenticationError, match="4 of 4"):
        first.open(memory.batch, STREAM).wait()
    memory.assert_overwritten()


def test_verdicts_of_the_last_batch_do_not_count_for_the_next(driver, kernels):
    good = Memory(driver)
    kernels.open(good.batch, STREAM).wait()
    driver._kernels = lambda *_: None
    memory = Memory(driver)
    with pytest.raises(AuthenticationError, match="4 of 4"):
        kernels.open(memory.batch, STREAM).wait()


@pytest.mark.parametrize("keys", [KEYS_PER_LAUNCH, KEYS_PER_LAUNCH + 1])
def test_many_keys_are_split(driver, kernels, keys):
    memory = Memory(driver, sizes=(3,) * keys + (9, 4096), keys=keys)
    pending = kernels.open(memory.batch, STREAM)
    launches = -(-keys // KEYS_PER_LAUNCH)
    assert Counter(driver.queued(STREAM))["sl_expand_keys"] == launches
    pending.wait()
    assert memory.found() == memory.plain
    memory.assert_no_key(driver)


def test_a_wrong_tag_in_one_launch_overwrites_what_the_others_did(driver, kernels):
    memory = Memory(driver, sizes=(33,) * (2 * KEYS_PER_LAUNCH), keys=2 * KEYS_PER_LAUNCH)
    memory.tamper()
    with pytest.raises(AuthenticationError, match="1 of 2048"):
        kernels.open(memory.batch, STREAM).wait()
    memory.assert_overwritten()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda m: m.raw_keys.__setitem__(1, b"x" * 24),
        lambda m: m.chunks.__setitem__(1, m.chunks[1]._replace(nonce=b"short")),
        lambda m: m.chunks.__setitem__(1, m.chunks[1]._replace(tag=b"short")),
        lambda m: m.chunks.__setitem__(1, m.chunks[1]._replace(key=2)),
        lambda m: m.chunks.__setitem__(1, m.chunks[1]._replace(key=-1)),
        lambda m: m.chunks.__setitem__(1, m.chunks[1]._replace(nbytes=2**36)),
        lambda m: m.chunks.__setitem__(1, m.chunks[1]._replace(nbytes=-1)),
    ],
)
def test_what_is_no_aes_gcm_is_refused(driver, kernels, spoil):
    memory = Memory(driver)
    keys = list(memory.raw_keys)
    driver.allocate = lambda nbytes: driver._new(min(nbytes, 1 << 20))
    spoil(memory)
    with pytest.raises(ValueError, match=r"key|nonce"):
        kernels.open(memory.batch, STREAM)
    memory.raw_keys = keys
    memory.assert_no_key(driver)


def calls_of_a_good_run() -> list[str]:
    driver = RecordingDriver()
    kernels = CudaKernels(driver, 0, IMAGE, "x")
    for tampered in (False, True):
        memory = Memory(driver)
        if tampered:
            memory.tamper()
            with pytest.raises(AuthenticationError):
                kernels.open(memory.batch, STREAM).wait()
        else:
            kernels.open(memory.batch, STREAM).wait()
    kernels.close()
    return driver.calls


GOOD_RUN = calls_of_a_good_run()


def under_fault(driver: RecordingDriver, *, dies: bool = False) -> tuple[list[Memory], list[BaseException]]:
    """A good batch and one that was tampered with; what there was and what was raised."""
    raised: list[BaseException] = []
    memories: list[Memory] = []
    try:
        kernels = CudaKernels(driver, 0, IMAGE, "x")
    except DeviceError as e:
        return memories, [e]
    for tampered in (False, True):
        memory = Memory(driver)
        memories.append(memory)
        if tampered:
            memory.tamper()
        try:
            kernels.open(memory.batch, STREAM).wait()
        except (DeviceError, AuthenticationError) as e:
            raised.append(e)
            driver.run()
            assert dies or not any(plain in bytes(memory.buffer) for plain in memory.plain if plain)
        else:
            assert not tampered, "accepted what was tampered with"
            assert memory.found() == memory.plain
    kernels.close()
    return memories, raised


@pytest.mark.parametrize("number", range(len(GOOD_RUN)), ids=[f"{i}-{name}" for i, name in enumerate(GOOD_RUN)])
def test_any_call_may_fail_once(driver, number, caplog):
    driver.fails = lambda i, _name: i == number
    memories, _raised = under_fault(driver)
    driver.fails = lambda *_: False
    for memory in memories:
        memory.assert_no_key(driver)
    assert driver.retained[0] == 0
    # What is not given back is said.
    left = len(driver.live) - len(memories)
    assert left == 0 or caplog.records


@pytest.mark.parametrize("name", sorted(set(GOOD_RUN) - {"retain", "load", "function", "residency"}))
def test_any_kind_of_call_may_fail_from_now_on(driver, name):
    kernels = CudaKernels(driver, 0, IMAGE, "x")
    kernels.open(Memory(driver).batch, STREAM).wait()
    driver.fails = lambda _i, called: called == name
    memories = []
    for tampered in (False, True):
        memories.append(memory := Memory(driver))
        if tampered:
            memory.tamper()
        try:
            kernels.open(memory.batch, STREAM).wait()
        except (DeviceError, AuthenticationError):
            driver.run()
            assert not any(plain in bytes(memory.buffer) for plain in memory.plain if plain)
        else:
            assert not tampered
    kernels.close()
    for memory in memories:
        memory.assert_no_key(driver)


@pytest.mark.parametrize("number", range(len(GOOD_RUN)))
def test_a_device_that_dies_leaves_no_key_on_the_host_and_no_verdict(driver, number):
    driver.fails = lambda i, _name: i >= number
    pinned = []
    allocate_host = driver.allocate_host
    driver.allocate_host = lambda n: pinned.append(a := allocate_host(n)) or a
    memories, raised = under_fault(driver, dies=True)
    assert raised or number >= len(GOOD_RUN) - 12
    buffers = [bytes(b) for b in driver.everything if ctypes.addressof(b) in pinned]
    for memory in memories:
        assert not any(key[:16] in buffer for key in memory.raw_keys for buffer in buffers)


def test_a_fault_on_the_device_is_found_by_waiting(driver, kernels):
    memory = Memory(driver)
    pending = kernels.open(memory.batch, STREAM)
    driver.fails = lambda _i, name: name == "wait"
    with pytest.raises(DeviceError, match="told to fail"):
        pending.wait()
    driver.fails = lambda *_: False
    with pytest.raises(DeviceError, match="told to fail"):
        pending.wait()
    memory.assert_overwritten()
    memory.assert_no_key(driver)


def test_asking_neither_blocks_nor_fails(driver, kernels):
    memory = Memory(driver)
    pending = kernels.open(memory.batch, STREAM)
    with pending._lock:
        assert not pending.done(), "somebody else waits"
    driver.fails = lambda _i, name: name == "push"
    assert pending.done(), "waiting would raise at once"
    driver.fails = lambda *_: False
    pending.wait()
    assert memory.found() == memory.plain


class Interrupt:
    """Raises KeyboardInterrupt at one call, as ^C would between two lines there."""

    def __init__(self, driver: RecordingDriver, number: int) -> None:
        self.driver, self.number = driver, number

    def __call__(self, i: int, _name: str) -> bool:
        if i == self.number:
            raise KeyboardInterrupt
        return False


@pytest.mark.parametrize("number", range(len(GOOD_RUN)))
def test_an_interrupted_wait_is_judged_all_the_same(number):
    driver = RecordingDriver()
    kernels = CudaKernels(driver, 0, IMAGE, "x")
    memory = Memory(driver)
    memory.tamper()
    driver.fails = Interrupt(driver, number)
    try:
        pending = kernels.open(memory.batch, STREAM)
    except KeyboardInterrupt:
        memory.assert_no_key(driver)
        return
    for _ in range(2):
        try:
            pending.wait()
        except KeyboardInterrupt:
            continue
        except AuthenticationError:
            break
        pytest.fail("accepted what was tampered with")
    memory.assert_overwritten()
    memory.assert_no_key(driver)


def test_keys_are_wiped_where_they_were_packed(driver, kernels, monkeypatch):
    packed = []
    pack_keys = abi.pack_keys
    monkeypatch.setattr(abi, "pack_keys", lambda keys: packed.append(p := pack_keys(keys)) or p)
    kernels.open(Memory(driver).batch, STREAM).wait()
    assert [bytes(p) for p in packed] == [bytes(2 * abi.KEY_BYTES)]


def test_a_workspace_must_be_large_enough_on_both_sides(driver, kernels):
    for keys, size in ((1, 1), (60, 1), (1, 20_000_000)):
        memory = Memory(driver, sizes=(size,) * keys, keys=keys)
        kernels.open(memory.batch, STREAM).wait()
        assert memory.found() == memory.plain
    assert driver.calls.count("allocate") == driver.calls.count("allocate_host") == 2


def test_workspaces_are_used_again_and_bounded(driver, kernels):
    for _ in range(5):
        kernels.open(Memory(driver).batch, STREAM).wait()
    assert Counter(driver.calls)["allocate"] == 1
    for _ in range(2):
        memories = [Memory(driver) for _ in range(32)]
        for pending in [kernels.open(memory.batch, STREAM) for memory in memories]:
            pending.wait()
        # What several threads have under way is not allocated anew by each load, which would wait for all of the device.
        assert Counter(driver.calls)["allocate"] == 32
        assert Counter(driver.calls)["free"] == 0
        for memory in memories:
            assert memory.found() == memory.plain
    for pending in [kernels.open(memory.batch, STREAM) for memory in [Memory(driver) for _ in range(40)]]:
        pending.wait()
    assert Counter(driver.calls)["free"] == 8


def test_idle_workspaces_are_bounded_in_bytes(driver, kernels):
    keys = 700  # whose schedules take 8 MiB, rounded
    memories = [Memory(driver, sizes=(1,) * keys, keys=keys) for _ in range(11)]
    for pending in [kernels.open(memory.batch, STREAM) for memory in memories]:
        pending.wait()
    assert Counter(driver.calls)["free"] == 3


def test_a_large_workspace_is_not_kept(driver, kernels):
    keys = KEYS_PER_LAUNCH
    memory = Memory(driver, sizes=(1,) * (keys + 3), keys=keys)
    memory.chunks = memory.chunks * 20  # many of them; nobody waits for the verdicts' meaning here
    with pytest.raises(AuthenticationError):
        kernels.open(memory.batch, STREAM).wait()
    assert Counter(driver.calls)["free"] == 1


def test_closing_waits_and_gives_everything_back(driver):
    kernels = CudaKernels(driver, 0, IMAGE, "x")
    memory = Memory(driver)
    pending = kernels.open(memory.batch, STREAM)
    kernels.close()
    assert memory.found() == memory.plain
    assert list(driver.live) == [ctypes.addressof(memory.buffer)]
    assert driver.modules == 0
    assert driver.retained[0] == 0
    memory.assert_no_key(driver)
    with pytest.raises(DeviceError, match="closed"):
        pending.wait()
    with pytest.raises(DeviceError, match="closed"):
        kernels.open(memory.batch, STREAM)
    kernels.close()


def test_a_cubin_that_does_not_load(driver):
    with pytest.raises(DeviceError, match="INVALID_IMAGE"):
        CudaKernels(driver, 0, b"no ELF", "x")
    assert driver.retained[0] == 0
    assert not driver.live


def test_each_device_has_its_context(driver):
    driver = RecordingDriver(gpus=2)
    both = [CudaKernels(driver, ordinal, IMAGE, "x") for ordinal in (0, 1)]
    for ordinal, kernels in enumerate(both):
        memory = Memory(driver)
        del driver.contexts[:]
        kernels.open(memory.batch, STREAM).wait()
        assert memory.found() == memory.plain
        assert set(driver.contexts) == {1000 + ordinal}
        assert driver._stack() == [], "whatever was current before is so again"


def test_many_threads(driver, kernels):
    failed: list[object] = []

    def work(stream: int) -> None:
        for turn in range(8):
            memory = Memory(driver)
            if turn % 4 == 3:
                memory.tamper()
            try:
                kernels.open(memory.batch, stream).wait()
                assert turn % 4 != 3
                assert memory.found() == memory.plain
            except AuthenticationError:
                assert turn % 4 == 3
                memory.assert_overwritten()
            except BaseException as e:
                failed.append(e)
                raise

    threads = [threading.Thread(target=work, args=(stream,)) for stream in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(driver.live) < 6 * 8 + 2 * 8 + 1
