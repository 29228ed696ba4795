"""The vectors hold what they say: read by the naive reader, made again, and opened by cryptotensors itself."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random

import pytest

from tests.vectors import DATA, Vector, iter_vectors, make, naive, naive_folder, naive_json

VECTORS = list(iter_vectors())
SUCCESSES = [v for v in VECTORS if v.expect == "success" and v.kind == "file"]
needs_cryptotensors = pytest.mark.skipif(importlib.util.find_spec("cryptotensors") is None, reason="no cryptotensors")


def read(vector: Vector) -> dict:
    if vector.kind == "folder":
        return naive_folder.read_folder(vector.files(), vector.keys, vector.trust, floor=vector.floor)
    return naive.read_file(
        vector.data,
        vector.keys,
        vector.trust,
        require_profile=vector.profile_required,
        unverified_clear=vector.unverified_clear,
    )


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v.name)
def test_naive_reader(vector: Vector):
    if vector.expect != "success":
        with pytest.raises(naive_json.RefusalError) as caught:
            read(vector)
        assert type(caught.value).__name__ == vector.expect, str(caught.value)
        return
    tensors = read(vector)
    assert {name: hashlib.sha256(t[2]).hexdigest() for name, t in tensors.items()} == vector.sha256s
    assert {name: t[0] for name, t in tensors.items()} == vector.dtypes
    assert {name: t[1] for name, t in tensors.items()} == vector.shapes


def test_made_again():
    made = make.files()
    kept = {p.relative_to(DATA).as_posix(): p.read_bytes() for p in DATA.rglob("*") if p.is_file()}
    genuine = {path for path in kept if path.startswith(make.GENUINE)}
    assert made.keys() == kept.keys() - genuine
    assert [path for path, data in made.items() if kept[path] != data] == []


def test_small_enough_to_keep():
    assert sum(p.stat().st_size for p in DATA.rglob("*") if p.is_file()) < 2_000_000


def test_one_defect_a_file():
    """Two vectors of the same bytes and the same circumstances are one case too many."""
    seen: dict[tuple, str] = {}
    for v in VECTORS:
        same = (v.data, v.key_files, v.trust_files, v.profile_required, v.unverified_clear, v.floor)
        assert same not in seen, f"{v.name} is {seen[same]}"
        seen[same] = v.name


def cryptotensors_keys(vector: Vector) -> dict:
    """Its `config`, which ignores kids: the one key that is right."""
    meta = naive.File(vector.data).meta
    keys = json.loads(meta["__crypto_keys__"])
    masters = [k for k in vector.keys if k["kid"] == keys["enc"]["kid"]]
    return {
        "enc_key": masters[0] if masters else vector.keys[0],
        "sign_key": next(k for k in vector.trust if k["kid"] == keys["sign"]["kid"]),
    }


@needs_cryptotensors
@pytest.mark.parametrize("vector", SUCCESSES, ids=lambda v: v.name)
def test_cryptotensors_opens(vector: Vector, tmp_path):
    """What is expected to open opens in cryptotensors 0.2.3 too, exceptions noted in the vector (README.md)."""
    cryptotensors = pytest.importorskip("cryptotensors")
    torch = pytest.importorskip("torch")
    if vector.cryptotensors in ("sometimes", "other-keys"):
        pytest.skip(f"cryptotensors: {vector.cryptotensors}")
    path = tmp_path / "x.safetensors"
    path.write_bytes(vector.data)

    def attempt() -> dict[str, str]:
        out = {}
        with cryptotensors.safe_open(path, framework="pt", config=cryptotensors_keys(vector)) as f:
            for name in f.keys():  # noqa: SIM118 - the handle is no dict
                flat = f.get_tensor(name).reshape(-1).contiguous().view(torch.uint8)
                out[name] = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
        return out

    if vector.cryptotensors == "refuses":
        with pytest.raises(Exception, match=r"unknown variant|Dtype not understood|must not be 0"):
            attempt()
    else:
        assert attempt() == vector.sha256s


@needs_cryptotensors
def test_exceptions_are_few():
    refused = {v.name for v in SUCCESSES if v.cryptotensors != "opens"}
    assert len(refused) < len(SUCCESSES) / 5


def test_strict_json_against_the_standard_one():
    """Whatever the naive parser takes, the standard one reads alike; what only that one takes is a known leniency."""
    rng = random.Random(7)
    alphabet = [
        '"',
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "a",
        "\\",
        "u0041",
        "1",
        "0",
        "9",
        " ",
        "true",
        "null",
        "\\ud83d\\ude00",
    ]
    taken = 0
    for _ in range(20_000):
        text = "".join(rng.choices(alphabet, k=rng.randint(1, 9)))
        try:
            value = naive_json.strict_json(text)
        except naive_json.FormatError:
            assert why_lenient(text), text
            continue
        taken += 1
        assert value == json.loads(text)
    assert taken > 500


def why_lenient(text: str) -> bool:
    """Whether the standard parser refuses `text` too, or takes it for one of the reasons that it is not used for."""
    twice: list[bool] = []
    try:
        value = json.loads(text, object_pairs_hook=lambda p: twice.append(len(dict(p)) != len(p)) or dict(p))
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True  # a lone surrogate
    except ValueError:
        return True
    return any(twice)
