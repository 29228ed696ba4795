"""Another process writes the file while it is decrypted: what is accepted is what was signed.

AES-GCM reads the ciphertext twice, once to check and once to decrypt. Over a mapping that another process can write, a
wrong plaintext was accepted once in a few thousand calls (docs/adr/0002); over a private copy it cannot be.
"""

from __future__ import annotations

import numpy as np
import pytest

from secure_loader import safe_open
from secure_loader.errors import AuthenticationError
from tests.attacks.kit import CHUNK, build_file, master, tensor_offset, trust
from tests.integration.stress.saboteur import Saboteur

ACCEPTED, TRIES = 2000, 100_000


@pytest.fixture
def saboteur():
    other = Saboteur()
    yield other
    other.close()


@pytest.mark.parametrize("algorithm", ["aes256gcm", "chacha20poly1305"])
@pytest.mark.parametrize("part", ["whole", "slice"])
def test_what_is_accepted_while_another_process_writes(tmp_path, saboteur, algorithm, part):
    key = master(algorithm=algorithm)
    expected = np.random.default_rng(3).integers(0, 256, CHUNK, dtype=np.uint8)
    path = build_file(tmp_path / "x.safetensors", {"x": expected}, clear=(), master=key, chunk_size=CHUNK)
    wanted = expected[1000 : CHUNK - 1000] if part == "slice" else expected
    accepted = rejected = 0
    with safe_open(path, "numpy", keys=key, trust=trust()) as f:
        f.file.unlock()
        # Near the end: long after the first byte was read, and before the last.
        saboteur.start("flip", path=str(path), offset=tensor_offset(path, "x") + CHUNK - 2000, burst=1000)
        out = np.empty(len(wanted), np.uint8)
        for _ in range(TRIES):
            out[:] = 0xAA
            try:
                f.file.read_into("x", memoryview(out), 1000 if part == "slice" else 0)
            except AuthenticationError:
                rejected += 1
                assert not out.any()
            else:
                accepted += rejected > 0  # before that, the other process may not have begun
                assert (out == wanted).all()
            if accepted >= ACCEPTED and rejected >= 50:
                break
        done = saboteur.finish()
    assert done["times"] > 0
    assert accepted >= ACCEPTED
    assert rejected >= 50, "nobody was writing"
