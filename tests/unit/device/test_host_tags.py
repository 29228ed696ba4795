"""Tags compared on the host without decrypting, and a device that then decrypts alone."""

from __future__ import annotations

import copy
import ctypes
import os
import pickle

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from secure_loader.core.device.batch import Chunk
from secure_loader.core.device.cuda import CudaKernels
from secure_loader.core.device.host_tags import AuthenticatedChunk, authenticate
from secure_loader.core.secrets import Secret
from secure_loader.errors import AuthenticationError, DeviceError
from tests.unit.device.recording_driver import RecordingDriver
from tests.unit.device.test_cuda import IMAGE, STREAM, Memory


@pytest.mark.parametrize("bits", [128, 256])
@pytest.mark.parametrize("aad", [0, 1, 16, 37])
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 1000, 70_001])
def test_the_tag_of_gcm(size, aad, bits):
    key, nonce, data, text = os.urandom(bits // 8), os.urandom(12), os.urandom(aad), os.urandom(size)
    sealed = AESGCM(key).encrypt(nonce, text, data or None)
    chunk = Chunk(4096, size, 0, nonce, sealed[size:], data)
    assert authenticate(Secret(key), memoryview(sealed)[:size], chunk).chunk == chunk
    spoilt = [chunk._replace(tag=bytes([chunk.tag[0] ^ 1]) + chunk.tag[1:]), chunk._replace(nonce=bytes(12))]
    spoilt += [chunk._replace(aad=data + b"\0"), chunk._replace(tag=bytes(16))]
    for other in spoilt:
        with pytest.raises(AuthenticationError):
            authenticate(Secret(key), memoryview(sealed)[:size], other)
    with pytest.raises(AuthenticationError):
        authenticate(Secret(os.urandom(bits // 8)), memoryview(sealed)[:size], chunk)
    if size:
        changed = bytearray(sealed[:size])
        changed[-1] ^= 128
        with pytest.raises(AuthenticationError):
            authenticate(Secret(key), memoryview(changed), chunk)


def test_sizes_have_to_agree():
    with pytest.raises(ValueError, match="5 bytes"):
        authenticate(Secret(bytes(16)), memoryview(bytes(4)), Chunk(0, 5, 0, bytes(12), bytes(16)))


def test_nobody_makes_up_the_evidence():
    chunk = Chunk(0, 0, 0, bytes(12), bytes(16))
    with pytest.raises(TypeError, match="authenticate"):
        AuthenticatedChunk(chunk)
    sealed = AESGCM(bytes(16)).encrypt(bytes(12), b"", None)
    genuine = authenticate(Secret(bytes(16)), memoryview(b""), chunk._replace(tag=sealed))
    for way in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            way(genuine)


def evidence(memory: Memory) -> list[AuthenticatedChunk]:
    keys = memory.batch.keys
    return [
        authenticate(keys[c.key], memoryview(ctypes.string_at(c.address, c.nbytes)), c) for c in memory.batch.chunks
    ]


def test_counter_mode_alone():
    driver = RecordingDriver()
    kernels = CudaKernels(driver, 0, IMAGE, "x")
    memory = Memory(driver)
    pending = kernels.decrypt(memory.batch.keys, evidence(memory), STREAM)
    *queued, event = driver.queued(STREAM)
    assert queued == ["upload", "sl_expand_keys", "sl_ctr", "clear", "download"]
    assert event.startswith("event")
    pending.wait()
    assert memory.found() == memory.plain
    memory.assert_no_key(driver)
    kernels.close()


def test_any_call_may_fail_once():
    driver = RecordingDriver()
    kernels = CudaKernels(driver, 0, IMAGE, "x")
    number = failed = 0
    while True:
        memory = Memory(driver, sizes=(0, 33, 257))
        chunks, start = evidence(memory), len(driver.calls)
        driver.fails = lambda i, _name, at=start + number: i == at
        try:
            kernels.decrypt(memory.batch.keys, chunks, STREAM).wait()
        except DeviceError:
            failed += 1
            driver.run()
            assert not any(plain in bytes(memory.buffer) for plain in memory.plain if plain)
        else:
            assert memory.found() == memory.plain
        memory.assert_no_key(driver)
        number += 1
        if start + number > len(driver.calls):
            break
    assert failed > 6
