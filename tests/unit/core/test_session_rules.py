"""What a session says of files that it accepts against the rule, and what it does not pretend to check."""

from __future__ import annotations

import logging

import pytest
import safetensors.torch
import torch

from secure_loader import LoaderConfig, Session, TrustStore
from secure_loader.errors import NotEncryptedError
from tests.vectors import iter_vectors
from tests.vectors.test_secure_loader import session_for


def test_a_plain_file_that_is_let_through_is_logged(tmp_path, caplog):
    path = tmp_path / "plain.safetensors"
    safetensors.torch.save_file({"a": torch.ones(2)}, path)
    session = Session(trust=TrustStore([]), config=LoaderConfig(insecure_allow_plaintext=True))
    with caplog.at_level(logging.WARNING), session.open_file(path).source:
        pass
    assert f"{path} is not encrypted" in caplog.text


def test_full_integrity_is_not_pretended_for_files_without_digests(tmp_path):
    vector = next(v for v in iter_vectors() if not v.profile_required and v.expect == "success")
    path = tmp_path / "legacy.safetensors"
    path.write_bytes(vector.data)
    session = session_for(vector, tmp_path)
    with session.open_file(path).source:
        pass
    strict = Session(trust=session.trust, config=session.config.replace({"integrity": "full"}))
    with pytest.raises(NotEncryptedError, match="cannot be had"):
        strict.open_file(path)
