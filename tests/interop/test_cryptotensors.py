"""Files of CryptoTensors 0.2.3 read here, and files written here read by it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cryptotensors
import numpy as np
import pytest
import safetensors.torch
import torch

from secure_loader import TrustedSigner, TrustStore, encrypt_model, safe_open
from secure_loader.core import single
from secure_loader.core.keys.mldsa import SecondSigningKey
from secure_loader.core.seal import Publication, write_file
from secure_loader.core.secrets import Secret
from secure_loader.errors import (
    KeyAccessError,
    NotEncryptedError,
    SecureLoaderError,
    UntrustedSignerError,
)

from .peers import (
    ALGORITHM_NAMES,
    CHUNK,
    SIGNING,
    TRUST,
    enc_jwk,
    every_dtype,
    many_chunks,
    master,
    odd_names,
    open_theirs,
    read_theirs,
    same,
    sign_jwk,
    write_ours,
    write_theirs,
)

CONTENTS: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "dtypes": every_dtype,
    "names": odd_names,
    "chunks": many_chunks,
}
EACH = [
    pytest.mark.parametrize("version", ["1", "2"]),
    pytest.mark.parametrize("algorithm", ALGORITHM_NAMES),
    pytest.mark.parametrize("content", CONTENTS),
]


def each(test: Callable[..., None]) -> Callable[..., None]:
    for mark in EACH:
        test = mark(test)
    return test


def test_the_release_of_record_is_the_one_tested() -> None:
    """docs/format.md describes this release; another may differ where these tests do not look."""
    assert cryptotensors.__version__ == "0.2.3"


@each
def test_theirs_is_read_here(tmp_path: Path, version: str, algorithm: str, content: str) -> None:
    tensors = CONTENTS[content]()
    chunks = {"chunk_size": CHUNK} if version == "2" else {}
    write_theirs(tmp_path / "x", tensors, algorithm, version, **chunks)
    with safe_open(tmp_path / "x", keys=master(algorithm), trust=TRUST) as f:
        assert same(f.get_tensors(), tensors)
        assert f.metadata() == {"format": "pt"}
        for name, tensor in tensors.items():
            assert f.get_slice(name).get_shape() == list(tensor.shape)
            if tensor.dim():
                assert same({"": f.get_slice(name)[1:]}, {"": tensor[1:]})
        assert all(f.file.is_sealed(name) for name in tensors)


@each
@pytest.mark.parametrize("partial", [False, True], ids=["full", "partial"])
def test_ours_is_read_there(tmp_path: Path, version: str, algorithm: str, content: str, partial: bool) -> None:
    tensors = CONTENTS[content]()
    # Names are given as shell patterns: odd ones that hold no wildcard are themselves.
    clear = tuple(list(tensors)[::2]) if partial else ()
    write_ours(tmp_path / "x", tensors, algorithm, version, clear)
    assert same(read_theirs(tmp_path / "x", algorithm), tensors)
    with open_theirs(tmp_path / "x", algorithm) as f:
        name = next(n for n, t in tensors.items() if t.dim())
        assert same({"": f.get_slice(name)[:1]}, {"": tensors[name][:1]})


@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("algorithm", ALGORITHM_NAMES)
def test_their_clear_tensors_need_to_be_asked_for(tmp_path: Path, version: str, algorithm: str) -> None:
    """Nothing signs their bytes."""
    tensors = every_dtype()
    sealed = sorted(tensors)[::2]
    write_theirs(tmp_path / "x", tensors, algorithm, version, tensors=sealed)
    with safe_open(tmp_path / "x", keys=master(algorithm), trust=TRUST) as f:
        for name, tensor in tensors.items():
            assert f.file.is_sealed(name) == (name in sealed)
            if name in sealed:
                assert same({"": f.get_tensor(name)}, {"": tensor})
                continue
            with pytest.raises(NotEncryptedError, match="stored in clear"):
                f.get_tensor(name)
            with pytest.raises(NotEncryptedError, match="stored in clear"):
                f.get_slice(name)[0]
    allowed = {"insecure_allow_unverified_clear": True}
    with safe_open(tmp_path / "x", keys=master(algorithm), trust=TRUST, config=allowed) as f:
        assert same(f.get_tensors(), tensors)


@pytest.mark.parametrize("framework", ["pt", "numpy"])
@pytest.mark.parametrize("version", ["1", "2"])
def test_numpy_arrays_cross_in_both_directions(tmp_path: Path, version: str, framework: str) -> None:
    import cryptotensors.numpy

    names = "bool uint8 int8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 complex64".split()
    arrays = {n: (np.arange(21).reshape(7, 3) % 5).astype(n) for n in names}
    config = {"enc_key": enc_jwk(), "sign_key": sign_jwk(private=True), "version": version}
    cryptotensors.numpy.save_file(arrays, str(tmp_path / "theirs"), config=config)
    write_ours(tmp_path / "ours", arrays, version=version)
    for file in ("ours", "theirs"):
        with safe_open(tmp_path / file, framework, keys=master(), trust=TRUST) as f:
            for name, array in arrays.items():
                got = np.asarray(f.get_tensor(name))
                assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes())
    with open_theirs(tmp_path / "ours", framework="numpy") as f:
        assert all(np.array_equal(f.get_tensor(name), array) for name, array in arrays.items())


@pytest.mark.parametrize("version", ["1", "2"])
def test_empty_tensors_and_scalars_of_ours_are_read_there(tmp_path: Path, version: str) -> None:
    """Empty ones are stored in clear, because CryptoTensors cannot hand encrypted ones to torch."""
    tensors = {
        "scalar": torch.tensor(3.25, dtype=torch.float64),
        "flag": torch.tensor(data=True),
        "empty": torch.empty(0),
        "hollow": torch.empty(4, 0, 2, dtype=torch.int64),
        "row": torch.ones(1, 5),
    }
    for _ in range(5):  # it sorts an unordered map: what goes wrong there goes wrong only now and then
        write_ours(tmp_path / "x", tensors, version=version)
        assert same(read_theirs(tmp_path / "x"), tensors)


@pytest.mark.parametrize("version", ["1", "2"])
def test_their_empty_tensors_are_read_here(tmp_path: Path, version: str) -> None:
    tensors = {"scalar": torch.tensor(3.25), "empty": torch.empty(0, 3), "row": torch.ones(1, 5)}
    write_theirs(tmp_path / "x", tensors, version=version)
    with safe_open(tmp_path / "x", keys=master(), trust=TRUST) as f:
        assert f.file.is_sealed("empty")
        assert same(f.get_tensors(), tensors)


def test_their_default_chunks_are_read_here(tmp_path: Path) -> None:
    """Without a chunk_size theirs are 2 MiB, whether or not the header says so."""
    tensors = {"a": torch.arange(1_300_000, dtype=torch.int32)}
    write_theirs(tmp_path / "x", tensors)
    with safe_open(tmp_path / "x", keys=master(), trust=TRUST) as f:
        assert f.file.granule("a") == 2 << 20
        assert same(f.get_tensors(), tensors)
        assert torch.equal(f.get_slice("a")[524_280:524_300], tensors["a"][524_280:524_300])


@pytest.mark.parametrize("version", ["1", "2"])
def test_a_sharded_folder_of_ours_is_read_there_shard_by_shard(tmp_path: Path, version: str) -> None:
    (tmp_path / "plain").mkdir()
    weights = {f"layers.{i}.w": torch.arange(40_000, dtype=torch.float32).reshape(200, 200) + i for i in range(5)}
    groups = [list(weights)[:2], list(weights)[2:4], list(weights)[4:]]
    weight_map = {}
    for i, group in enumerate(groups, 1):
        file = f"model-{i:05}-of-00003.safetensors"
        safetensors.torch.save_file({n: weights[n] for n in group}, tmp_path / "plain" / file, {"format": "pt"})
        weight_map |= dict.fromkeys(group, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in weights.values())}, "weight_map": weight_map}
    (tmp_path / "plain" / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "plain" / "config.json").write_text("{}")
    encrypt_model(
        tmp_path / "plain",
        tmp_path / "sealed",
        key=master(),
        signing_key=SIGNING,
        version=version,
        chunk_size=CHUNK,
        exclude=["layers.3.*"],
        progress=False,
    )
    shards = sorted((tmp_path / "sealed").glob("*.safetensors"))
    read = [read_theirs(shard) for shard in shards]
    assert [sorted(part) for part in read] == groups
    assert same({n: t for part in read for n, t in part.items()}, weights)


def test_strictness_refuses_theirs(tmp_path: Path) -> None:
    """Without profile 1 nothing protects clear tensors, file set and release."""
    write_theirs(tmp_path / "x", {"a": torch.ones(3)})
    with pytest.raises(NotEncryptedError, match="profile 1"):
        safe_open(tmp_path / "x", keys=master(), trust=TRUST, strict=True)
    allowed = {"insecure_allow_legacy": True}
    with safe_open(tmp_path / "x", keys=master(), trust=TRUST, strict=True, config=allowed) as f:
        assert torch.equal(f.get_tensor("a"), torch.ones(3))


def test_theirs_of_a_stranger_or_for_another_key_is_refused(tmp_path: Path) -> None:
    write_theirs(tmp_path / "x", {"a": torch.ones(3)})
    with pytest.raises(UntrustedSignerError):
        safe_open(tmp_path / "x", keys=master(), trust=TrustStore([]))
    with safe_open(tmp_path / "x", keys=master("aes128gcm"), trust=TRUST) as f, pytest.raises(KeyAccessError):
        f.get_tensor("a")


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("writer", [write_ours, write_theirs], ids=["ours", "theirs"])
@pytest.mark.parametrize("version", ["1", "2"])
def test_a_tampered_file_is_refused_by_both(tmp_path: Path, version: str, writer: Callable[..., None]) -> None:
    tensors = {"a": torch.arange(40_000, dtype=torch.int64), "b": torch.arange(7, dtype=torch.float32)}
    writer(tmp_path / "good", tensors, version=version)
    data = (tmp_path / "good").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    text = data[8:start]
    longer = data.replace(b'"shape":[40000]', b'"shape":[1,40000]')
    changed = {
        "first body byte": flip(data, start),
        "last body byte": flip(data, len(data) - 1),
        "second chunk": flip(data, start + CHUNK + 5),
        "signature": flip(data, 8 + text.index(b"__signature__") + 30),
        "metadata": data.replace(b'"format":"pt"', b'"format":"np"'),
        "dtype": data.replace(b'"dtype":"F32"', b'"dtype":"I32"'),
        "name": data.replace(b'"b":{"dtype"', b'"c":{"dtype"'),
        "shape": (len(text) + 2).to_bytes(8, "little") + longer[8:],
        "truncated": data[:-1],
        "appended": data + b"\0",
    }
    assert all(bad != data for bad in changed.values())
    accepted = []
    for what, bad in changed.items():
        path = tmp_path / "bad"
        path.write_bytes(bad)
        with pytest.raises(SecureLoaderError):
            safe_open(path, keys=master(), trust=TRUST).get_tensors()
        try:
            read_theirs(path)
        except cryptotensors.SafetensorError:
            continue
        accepted.append(what)
    assert accepted == []


@pytest.mark.parametrize("shape", ["each", "set"])
@pytest.mark.parametrize("algorithm", ALGORITHM_NAMES)
def test_their_key_files_are_ours_too(tmp_path: Path, algorithm: str, shape: str) -> None:
    """Their spelling, standard base64 with padding and all, as a file each and as one JWK set."""
    tensors = {"a": torch.arange(5)}
    write_theirs(tmp_path / "x", tensors, algorithm)
    keys = tmp_path / "keys"
    keys.mkdir(mode=0o700)
    other = "aes128gcm" if algorithm != "aes128gcm" else "aes256gcm"
    docs = [enc_jwk(algorithm), enc_jwk(other), sign_jwk(private=True)]
    files = [{"keys": docs}] if shape == "set" else docs
    for i, doc in enumerate(files):
        (keys / f"{i}.jwk").write_text(json.dumps(doc))
        (keys / f"{i}.jwk").chmod(0o600)
    where = keys if shape == "each" else keys / "0.jwk"
    with safe_open(tmp_path / "x", keys=where, trust=TRUST) as f:
        assert same(f.get_tensors(), tensors)


def test_dtypes_they_do_not_know_are_written_for_us_alone(tmp_path: Path) -> None:
    """FNUZ kinds came with safetensors 0.8; CryptoTensors refuses the file, it does not misread it."""
    made = torch.arange(12).to(torch.float8_e4m3fnuz)
    write_ours(tmp_path / "x", {"a": made})
    with safe_open(tmp_path / "x", keys=master(), trust=TRUST, strict=True) as f:
        assert same(f.get_tensors(), {"a": made})
    with pytest.raises(cryptotensors.SafetensorError):
        read_theirs(tmp_path / "x")


def test_their_reader_finds_the_noise_of_an_encrypted_file_only_with_keys(tmp_path: Path) -> None:
    """What plain safetensors makes of a file of ours: it opens, and holds ciphertext under the same names."""
    tensors = {"a": torch.arange(100)}
    write_ours(tmp_path / "x", tensors)
    # In a process of its own: in this one the hook for Transformers may be installed already, and refuse.
    code = "import sys, safetensors.numpy as s; print(s.load_file(sys.argv[1])['a'].tolist())"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "x"], capture_output=True, text=True, check=True)
    noise = json.loads(done.stdout)
    assert len(noise) == 100
    assert noise != tensors["a"].tolist()


def test_certificates_and_second_signatures_do_not_disturb_them(tmp_path: Path) -> None:
    """They know neither ``x5c`` nor ``__signature_mldsa65__``; their signature check covers both."""
    tensors = many_chunks()
    second = SecondSigningKey(SIGNING.kid, Secret(bytes(range(32))))
    signing = replace(SIGNING, second=second, chain=(b"certificate one", b"certificate two"))
    publication = Publication(master(), signing, "demo", chunk_size=CHUNK)
    path = tmp_path / "x.safetensors"
    write_file(path, single.plain_tensors(tensors, (), ()), {"format": "pt"}, publication)
    assert b"x5c" in path.read_bytes()
    assert b"__signature_mldsa65__" in path.read_bytes()
    assert same(read_theirs(path), tensors)
    with safe_open(path, keys=master(), trust=TrustStore([TrustedSigner("me", signing.verify_key())])) as f:
        assert same(f.get_tensors(), tensors)
    path.write_bytes(path.read_bytes().replace(b"__signature_mldsa65__", b"__signature_mldsa66__"))
    with pytest.raises(cryptotensors.SafetensorError):
        read_theirs(path)
