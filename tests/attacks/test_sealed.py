"""Attacks 39 to 51: ciphertext, tags, nonces and wrapped keys altered, moved or cut; rules that nobody evaluates."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from secure_loader.core import aead
from secure_loader.core.aead import ALGORITHMS, chunk_nonce, open_into, seal_into
from secure_loader.core.archive import Archive
from secure_loader.core.seal import PlainTensor, Publication, write_file
from secure_loader.core.secrets import Secret
from secure_loader.errors import (
    AuthenticationError,
    ConfigError,
    FormatError,
    KeyAccessError,
    SignatureError,
)
from tests.attacks.kit import (
    CHUNK,
    KEY,
    SIGN,
    Victim,
    arrays,
    build_file,
    flip,
    inner,
    join,
    refused,
    rewrite,
    split,
    tensor_offset,
)

VERSIONS = ("1", "2")
BIG = 50 * 4096


@pytest.fixture(params=VERSIONS)
def good(request, tmp_path):
    return build_file(tmp_path / "model.secure.safetensors", version=request.param)


def read(archive: Archive, name: str, start: int = 0, stop: int | None = None) -> bytearray:
    """What a read leaves in the caller's buffer, error or not."""
    info = archive.file.info(name)
    out = bytearray(b"\xaa" * ((info.nbytes if stop is None else stop) - start))
    try:
        archive.file.read_into(name, memoryview(out), start)
    except AuthenticationError as e:
        e.__traceback__ = None
        return out
    pytest.fail("not refused")


def refused_and_wiped(path, name="big", words="authentication failed", **config):
    with Victim(**config).open(path) as f:
        with refused(AuthenticationError, words, f"tensor {name!r}", place=path):
            f.get_tensor(name)
        out = read(f, name)
        assert not any(out), "the destination holds plaintext that nobody vouches for"


@pytest.mark.parametrize("offset", [0, 1, CHUNK - 1, CHUNK, 2 * CHUNK + 5, 3 * CHUNK, BIG - 1])
@pytest.mark.parametrize("bit", [0, 7])
def test_a39_a_bit_of_ciphertext(good, offset, bit):
    flip(good, tensor_offset(good, "big") + offset, bit)
    refused_and_wiped(good)


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_a39_a_bit_of_ciphertext_of_every_algorithm(tmp_path, algorithm):
    from tests.attacks.kit import master

    key = master("other", algorithm=algorithm)
    path = build_file(tmp_path / "x.safetensors", master=key)
    with Victim(keys=(key,)).open(path) as f:
        assert (f.get_tensor("big") == arrays()["big"]).all()
        flip(path, tensor_offset(path, "big") + 100)
        assert not any(read(f, "big"))


def test_a39_cryptography_leaves_plaintext_and_we_do_not():
    """Why open_into wipes. If this ever fails upstream has changed; the wiping stays."""
    for algorithm in ALGORITHMS.values():
        cipher = algorithm.cipher(Secret(bytes(algorithm.key_bytes)))
        sealed = memoryview(bytearray(1024 + 16))
        seal_into(cipher, bytes(12), memoryview(b"secret! " * 128), sealed)
        sealed[-1] ^= 1
        out = bytearray(1024)
        with refused(AuthenticationError, "authentication failed"):
            open_into(cipher, bytes(12), sealed, memoryview(out))
        assert not any(out)


@pytest.mark.parametrize("member", ["tags", "base_iv", "wrapped_key", "key_iv", "key_tag"])
def test_a39_a_bit_of_a_record(tmp_path, member):
    """By an outsider: the signature. By a signer: the tag, or the unwrapping."""
    path = build_file(tmp_path / "x.safetensors")

    def change(doc):
        def alter(v):
            raw = bytearray(base64.b64decode(v["big"][member]))
            raw[0] ^= 1
            v["big"][member] = base64.b64encode(raw).decode()

        inner(doc, "__encryption__", alter)

    victim = Victim()
    with refused(SignatureError, victim=victim, place=path):
        victim.open(rewrite(path, change))
    good = build_file(tmp_path / "y.safetensors")
    rewrite(good, change, sign=SIGN)
    if member in ("tags", "base_iv"):
        refused_and_wiped(good)
    else:
        with Victim().open(good) as f, refused(KeyAccessError, "does not unwrap the keys of this file", place=good):
            f.get_tensor("big")


@pytest.mark.parametrize("member", ["wrapped_key", "key_iv", "key_tag", "base_iv", "tags"])
@pytest.mark.parametrize("length", [0, 4, 8, 12, 15, 16, 17, 31, 33, 63, 65, 4 * 16 + 16])
def test_a40_wrong_lengths(tmp_path, member, length):
    path = build_file(tmp_path / "x.safetensors")
    right = {"wrapped_key": 32, "key_iv": 12, "key_tag": 16, "base_iv": 12, "tags": 16 * 4}[member]
    if length == right:
        length = right + 1
    text = base64.b64encode(bytes(length)).decode()
    rewrite(path, lambda doc: inner(doc, "__encryption__", lambda v: v["big"].update({member: text})), sign=SIGN)
    victim = Victim()
    with refused(
        FormatError, f"{member} of tensor 'big' has {length} bytes instead of {right}", victim=victim, place=path
    ):
        victim.open(path)


@pytest.mark.parametrize("text", ["AAAA\n", " AAAA", "AAA", "AA==A", "****", 5, None, [], "AB==", "\u0660"])
def test_a40_what_is_not_base64(tmp_path, text):
    path = build_file(tmp_path / "x.safetensors")
    rewrite(path, lambda doc: inner(doc, "__encryption__", lambda v: v["big"].update(tags=text)), sign=SIGN)
    victim = Victim()
    with refused(FormatError, "tags of tensor 'big'", victim=victim, place=path):
        victim.open(path)


def test_a41_one_nonce_for_two_wrapped_keys(tmp_path):
    path = build_file(tmp_path / "x.safetensors")

    def change(doc):
        inner(doc, "__encryption__", lambda v: v["small"].update(key_iv=v["big"]["key_iv"]))

    victim = Victim()
    with refused(FormatError, "key_iv is used by another tensor as well", victim=victim, place=path):
        victim.open(rewrite(path, change, sign=SIGN))


def test_a41_nonces_of_chunks_never_repeat_or_wrap():
    base = bytes(range(8)) + b"\xff\xff\xff\xfe"
    assert chunk_nonce(base, 1) == bytes(range(8)) + b"\xff\xff\xff\xff"
    with pytest.raises(OverflowError):
        chunk_nonce(base, 2)
    assert len({chunk_nonce(bytes(12), i) for i in range(1000)}) == 1000


def test_a41_the_writer_uses_every_key_and_nonce_once(tmp_path):
    seen: set[tuple[bytes, bytes]] = set()
    total = 0

    class Watching:
        def __init__(self, key):
            self.key = bytes(key.reveal())
            self.real = real(algorithm, key)

        def encrypt_into(self, nonce, data, associated_data, buf):
            nonlocal total
            total += 1
            seen.add((self.key, bytes(nonce)))
            return self.real.encrypt_into(nonce, data, associated_data, buf)

    algorithm = ALGORITHMS["aes256gcm"]
    real = aead.Algorithm.cipher
    with pytest.MonkeyPatch.context() as m:
        m.setattr(aead.Algorithm, "cipher", lambda self, key: Watching(key))
        for i in range(20):
            build_file(tmp_path / f"{i}.safetensors")
    assert total == len(seen) == 20 * (2 + 4 + 1)


def test_a41_the_writer_draws_again_when_chance_repeats_a_nonce(tmp_path, monkeypatch):
    draws = iter([b"a" * 12, b"a" * 12, b"b" * 12])
    real = aead.NONCE_BYTES
    from secure_loader.core import seal

    token_bytes = seal.secrets.token_bytes
    monkeypatch.setattr(seal.secrets, "token_bytes", lambda n: next(draws) if n == real else token_bytes(n))
    path = build_file(tmp_path / "x.safetensors")
    records = json.loads(split(path)[0]["__metadata__"]["__encryption__"])
    assert {base64.b64decode(r["key_iv"]) for r in records.values()} == {b"a" * 12, b"b" * 12}


def swap(members):
    def change(doc):
        def exchange(v):
            for m in members:
                v["big"][m], v["twin"][m] = v["twin"][m], v["big"][m]

        inner(doc, "__encryption__", exchange)

    return change


@pytest.fixture
def twins(tmp_path):
    """Two tensors of one shape, both sealed."""
    rng = np.random.default_rng(1)
    tensors = {n: rng.standard_normal((50, 1024), dtype=np.float32) for n in ("big", "twin")}
    return build_file(tmp_path / "twins.safetensors", tensors, clear=())


KEYS = ("wrapped_key", "key_iv", "key_tag")


def test_a43_wrapped_keys_swapped(twins):
    rewrite(twins, swap(KEYS), sign=SIGN)
    refused_and_wiped(twins)
    refused_and_wiped(twins, "twin")


def test_a43_swapped_by_an_outsider(twins):
    for members in (KEYS, ("tags",), ("base_iv",), (*KEYS, "tags", "base_iv")):
        victim = Victim()
        with refused(SignatureError, victim=victim, place=twins):
            victim.open(rewrite(twins, swap(members)))
        rewrite(twins, swap(members))


def test_a43_ciphertexts_swapped(twins):
    doc, body = split(twins)
    half = len(body) // 2
    join(twins, doc, body[half:] + body[:half])
    refused_and_wiped(twins)
    refused_and_wiped(twins, "twin")


def test_a43_names_swapped(twins):
    def change(doc):
        doc["big"], doc["twin"] = doc["twin"], doc["big"]

    victim = Victim()
    with refused(SignatureError, victim=victim, place=twins):
        victim.open(rewrite(twins, change))


def test_a43_chunks_swapped_in_a_tensor(twins):
    doc, body = split(twins)
    join(twins, doc, body[CHUNK : 2 * CHUNK] + body[:CHUNK] + body[2 * CHUNK :])
    refused_and_wiped(twins)
    with Victim().open(twins) as f:
        assert f.get_slice("big")[-1].shape == (1024,), "chunks that were not touched are right"
        assert f.get_tensor("twin").shape == (50, 1024)


def test_a43_chunks_swapped_between_tensors(twins):
    doc, body = split(twins)
    half = len(body) // 2
    join(twins, doc, body[half : half + CHUNK] + body[CHUNK:half] + body[:CHUNK] + body[half + CHUNK :])
    refused_and_wiped(twins)
    refused_and_wiped(twins, "twin")


def test_a43_ciphertext_of_another_file_of_the_same_publisher(tmp_path):
    a, b = build_file(tmp_path / "a"), build_file(tmp_path / "b")
    doc, _ = split(a)
    join(a, doc, split(b)[1])
    refused_and_wiped(a)


def test_a43_a_record_of_another_file_of_the_same_publisher(tmp_path):
    a, b = build_file(tmp_path / "a"), build_file(tmp_path / "b")
    theirs = json.loads(split(b)[0]["__metadata__"]["__encryption__"])
    victim = Victim()
    with refused(SignatureError, victim=victim, place=a):
        victim.open(rewrite(a, lambda doc: inner(doc, "__encryption__", lambda v: v.update(theirs))))


@pytest.mark.parametrize("count", [0, 1, 3, 5, 8])
def test_a45_too_few_and_too_many_tags(tmp_path, count):
    path = build_file(tmp_path / "x.safetensors")

    def change(doc):
        def alter(v):
            tags = base64.b64decode(v["big"]["tags"])
            v["big"]["tags"] = base64.b64encode((tags * 3)[: 16 * count]).decode()

        inner(doc, "__encryption__", alter)

    victim = Victim()
    with refused(FormatError, "tags of tensor 'big'", f"{16 * count} bytes instead of 64", victim=victim):
        victim.open(rewrite(path, change, sign=SIGN))


def test_a45_the_last_chunk_dropped_or_doubled(tmp_path):
    """With header, tags and digests made to fit, and signed: the tag of what is now the last chunk does not."""
    tensors = {"big": arrays()["big"][:48]}  # three whole chunks
    for keep in (2, 4):
        path = build_file(tmp_path / "x.safetensors", tensors)
        doc, body = split(path)
        body = (body + body[-CHUNK:])[: keep * CHUNK]
        doc["big"] |= {"shape": [16 * keep, 1024], "data_offsets": [0, keep * CHUNK]}

        def fit(value, name, size, keep=keep):
            raw = base64.b64decode(value[name])
            value[name] = base64.b64encode((raw + raw[-size:])[: keep * size]).decode()

        inner(doc, "__encryption__", lambda v: fit(v["big"], "tags", 16))
        inner(doc, "__secure_loader__", lambda v: fit(v["digest"]["tensors"], "big", 32))
        join(path, doc, body)
        victim = Victim()
        with refused(SignatureError, victim=victim):
            victim.open(path)
        rewrite(path, lambda doc: None, sign=SIGN)
        if keep == 4:
            refused_and_wiped(path)
        else:
            # A signer may publish a shorter tensor: nothing is forged here.
            assert (Victim().load(path)["big"] == tensors["big"][:32]).all()


def test_a45_a_shape_cut_short(tmp_path):
    path = build_file(tmp_path / "x.safetensors")
    victim = Victim()
    with refused(SignatureError, victim=victim, place=path):
        victim.open(rewrite(path, lambda doc: doc["big"].update(shape=[1024, 50])))


def test_a46_a_file_is_bound_to_one_master_key(tmp_path):
    """AES-GCM does not commit to its key; the check value does, and is compared before anything is decrypted."""
    from secure_loader.core.keys.provider import key_check_value
    from tests.attacks.kit import master

    path = build_file(tmp_path / "x.safetensors")
    profile = json.loads(split(path)[0]["__metadata__"]["__secure_loader__"])
    assert base64.b64decode(profile["kcv"]) == key_check_value(KEY.secret, bytes.fromhex(profile["file_id"]))
    other = master(KEY.kid, 0x33)
    kcv = base64.b64encode(key_check_value(other.secret, bytes.fromhex(profile["file_id"]))).decode()
    rewrite(path, lambda doc: inner(doc, "__secure_loader__", lambda v: v.update(kcv=kcv)), sign=SIGN)
    with Victim().open(path) as f, refused(KeyAccessError, "not the one that encrypted the file", place=path):
        f.get_tensor("big")
    with Victim(keys=(other,)).open(path) as f, refused(KeyAccessError, "does not unwrap", place=path):
        f.get_tensor("big")


def forge(path, name: str) -> None:
    """What a licensee can do: with the master key, make other ciphertext that has the tag of the first chunk.

    GHASH is linear in the ciphertext: for any difference in one block there is one in another that keeps the tag.
    """
    doc, body = split(path)
    record = json.loads(doc["__metadata__"]["__encryption__"])[name]
    raw = {k: base64.b64decode(v) for k, v in record.items()}
    master = KEY.algorithm.cipher(KEY.secret)
    dek = aead.unwrap_key(master, raw["key_iv"], raw["wrapped_key"], raw["key_tag"])
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    h = int.from_bytes(Cipher(algorithms.AES(bytes(dek.reveal())), modes.ECB()).encryptor().update(bytes(16)), "big")

    def times(x: int, y: int) -> int:
        z = 0
        for i in range(127, -1, -1):
            if y >> i & 1:
                z ^= x
            x = x >> 1 ^ (0xE1 << 120 if x & 1 else 0)
        return z

    # Blocks i and i+1 enter the hash as c[i]*H^(k+1) + c[i+1]*H^k: add d to the one and d*H to the other.
    difference = 0x0123456789ABCDEF0123456789ABCDEF
    start = doc[name]["data_offsets"][0]
    changed = bytearray(body)
    for at, d in ((start, difference), (start + 16, times(difference, h))):
        block = int.from_bytes(changed[at : at + 16], "big") ^ d
        changed[at : at + 16] = block.to_bytes(16, "big")
    assert changed != body
    join(path, doc, bytes(changed))


def test_a47_ciphertext_altered_by_a_key_holder_under_the_same_tag(tmp_path):
    path = build_file(tmp_path / "x.safetensors")
    forge(path, "big")
    with Victim().open(path) as f:
        assert (f.get_tensor("big") != arrays()["big"]).any(), "tags protect against outsiders, and docs say so"
    refused_and_wiped(path, words="differ from the signed digest", integrity="full")
    with Victim(integrity="full").open(path) as f:
        with refused(AuthenticationError, "signed digest"):
            _ = f.get_slice("big")[0]
        assert (f.get_slice("big")[-1] == arrays()["big"][-1]).all()


def test_a47_verify_in_full_finds_it_without_a_key(tmp_path):
    from secure_loader import verify
    from tests.attacks.kit import trust

    path = build_file(tmp_path / "x.safetensors")
    assert verify(path, trust=trust(), full=True).full
    forge(path, "big")
    verify(path, trust=trust())
    with refused(AuthenticationError, "tensor 'big'", "signed digest", place=path):
        verify(path, trust=trust(), full=True)


def test_a50_a_tensor_beyond_the_limit_of_gcm(tmp_path):
    class Untouched:
        def read_into(self, out, start):
            pytest.fail("read")

    tensor = PlainTensor("huge", "U8", (2**36 - 31,), 2**36 - 31, Untouched())
    publication = Publication(KEY, SIGN, "m", version="1")
    with refused(ConfigError, "tensor 'huge'", "too large for version 1"):
        write_file(tmp_path / "x", [tensor], {}, publication)
    assert list(tmp_path.iterdir()) == []


def test_a51_policies_that_are_no_texts(tmp_path):
    for policy in ('{"local":1,"remote":""}', '{"local":""}', "[]", '{"local":"","remote":"","third":""}', "5"):
        path = build_file(tmp_path / "x.safetensors")
        victim = Victim()
        with refused(FormatError, "__policy__", victim=victim, place=path):
            victim.open(rewrite(path, lambda doc, p=policy: doc["__metadata__"].update(__policy__=p), sign=SIGN))


def test_partial_reads_are_wiped_too(tmp_path):
    """A slice that touches one bad chunk: also what good chunks put into the caller's buffer is gone."""
    path = build_file(tmp_path / "x.safetensors")
    flip(path, tensor_offset(path, "big") + 2 * CHUNK + 10)
    with Victim().open(path) as f:
        assert not any(read(f, "big", 5, BIG - 5))
        assert not any(read(f, "big", 2 * CHUNK + 1000, 2 * CHUNK + 2000))
        whole = bytearray(CHUNK)
        f.file.read_into("big", memoryview(whole), 0)
        assert bytes(whole) == arrays()["big"].tobytes()[:CHUNK]
