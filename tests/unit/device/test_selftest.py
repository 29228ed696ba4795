"""The known-answer test: it passes right kernels, and finds wrong ones."""

from __future__ import annotations

import ctypes

import pytest

from secure_loader.core.device import abi, selftest
from secure_loader.core.device.batch import Batch
from secure_loader.core.device.cuda import CudaKernels
from secure_loader.core.device.selftest import CASES, KEYS, NBYTES, check, driver_scratch
from secure_loader.errors import DeviceError
from tests.unit.device.recording_driver import Model, RecordingDriver, write


def run(kernels: Model | None = None) -> None:
    driver = RecordingDriver(kernels or Model())
    with driver_scratch(driver, 0) as scratch:
        check(CudaKernels(driver, 0, b"\x7fELF", "x"), scratch)


def test_right_kernels_pass():
    run()


def test_scratch_memory_goes_back():
    driver = RecordingDriver()
    with driver_scratch(driver, 0) as scratch:
        scratch.put(b"\7" * NBYTES)
        assert scratch.get() == b"\7" * NBYTES
    assert not driver.live
    assert driver.retained[0] == 0


def test_cases_cover_what_kernels_may_get_wrong():
    assert {len(KEYS[case.key]) for case in CASES} == {16, 32}
    assert {case.nbytes % 16 for case in CASES} >= {0, 1, 15}
    assert {abi.segments(case.nbytes) for case in CASES} == {0, 1, 2, 3}
    assert {case.shift % 16 for case in CASES} >= {0, 1, 4}


class NothingAtAll(Model):
    def __call__(self, *_):
        pass


class AcceptsEverything(Model):
    def sl_gcm_finish(self, blocks, chunks, nchunks, schedules, partial, verdicts):
        self._genuine.clear()
        write(verdicts, abi.VERIFIED.to_bytes(4, "little") * nchunks)


class AcceptsEmptyChunks(Model):
    def sl_gcm_finish(self, blocks, chunks, nchunks, schedules, partial, verdicts):
        super().sl_gcm_finish(blocks, chunks, nchunks, schedules, partial, verdicts)
        for i in range(nchunks):
            if self._read(chunks + i * abi.CHUNK_BYTES)[2] == 0:
                write(verdicts + 4 * i, abi.VERIFIED.to_bytes(4, "little"))


class VerifiesButDoesNotDecrypt(Model):
    def _segment(self, chunk, segment, schedules, partial):
        address, _, nbytes, *_ = self._read(chunk)
        before = ctypes.string_at(address, nbytes)
        super()._segment(chunk, segment, schedules, partial)
        write(address, before)


class WritesWholeBlocks(Model):
    def _segment(self, chunk, segment, schedules, partial):
        super()._segment(chunk, segment, schedules, partial)
        address, _, nbytes, *_ = self._read(chunk)
        write(address + nbytes, bytes(-nbytes % 16))


class WrongBeyondTheFirstSegment(Model):
    def _segment(self, chunk, segment, schedules, partial):
        super()._segment(chunk, segment, schedules, partial)
        if segment == 1:
            address = self._read(chunk)[0] + abi.SEGMENT_BYTES
            write(address, bytes([ctypes.string_at(address, 1)[0] ^ 1]))


class RejectsEverything(Model):
    def _is_genuine(self, chunk, schedules):
        return False


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        (NothingAtAll, "genuine chunk was rejected"),
        (RejectsEverything, "genuine chunk was rejected"),
        (AcceptsEverything, "tampered with was accepted"),
        (AcceptsEmptyChunks, "tampered with was accepted"),
        (VerifiesButDoesNotDecrypt, "wrong plaintext"),
        (WritesWholeBlocks, "bytes changed around it"),
        (WrongBeyondTheFirstSegment, "wrong plaintext"),
    ],
)
def test_wrong_kernels_do_not(kernels, message):
    with pytest.raises(DeviceError, match=f"known-answer test: .*{message}"):
        run(kernels())


def test_rejected_chunks_must_be_overwritten():
    class Careless(CudaKernels):
        def open(self, batch: Batch, stream: int):
            pending = super().open(batch, stream)
            pending._launcher.abandon = lambda parts, _stream: parts.clear()
            return pending

    driver = RecordingDriver()
    with driver_scratch(driver, 0) as scratch, pytest.raises(DeviceError, match="rejected chunks were not overwritten"):
        check(Careless(driver, 0, b"\x7fELF", "x"), scratch)


def test_a_cpu_that_computes_wrongly_is_not_believed(monkeypatch):
    monkeypatch.setattr(selftest, "CASES", (CASES[0]._replace(tag="00" * 16), *CASES[1:]))
    with pytest.raises(DeviceError, match="the CPU itself gives a wrong tag"):
        run()


def test_tensors_of_a_framework():
    pytest.importorskip("torch")
    scratch = selftest.TorchScratch("cpu", 0)
    driver = RecordingDriver()
    driver.live[scratch.address] = (ctypes.c_ubyte * NBYTES).from_address(scratch.address)
    check(CudaKernels(driver, 0, b"\x7fELF", "x"), scratch)
