"""Files to a device that runs things in odd orders: the same bytes as on the CPU, and none before its verdict."""

from __future__ import annotations

import itertools
import logging

import numpy as np
import pytest
import torch

from secure_loader.core import archive
from secure_loader.core.device.device import Memory
from secure_loader.core.device.engine import engine_for
from secure_loader.errors import DeviceError

from .fake import CLEARED, COPIED, VERIFIED
from .files import CHUNK, DEVICE, Bench, content, same, session, write

KIB, MIB = 1 << 10, 1 << 20
CLEAR = ("small.1*", "n65537", "matrix")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One file of each kind."""
    folder = tmp_path_factory.mktemp("files")
    tensors = content()
    for algorithm, version in itertools.product(("aes256gcm", "aes128gcm", "chacha20poly1305"), ("1", "2")):
        write(folder / f"{algorithm}-{version}", tensors, algorithm, version)
    write(folder / "mixed", tensors, clear=CLEAR)
    write(folder / "wide", tensors, chunk_size=4 * CHUNK)
    return folder


@pytest.fixture(scope="module")
def tensors():
    return content()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("slot", [16 * KIB, 256 * KIB, 32 * MIB])
@pytest.mark.parametrize("name", ["aes256gcm-1", "aes256gcm-2", "mixed", "wide"])
def test_the_same_bytes_in_any_order(folder, tensors, monkeypatch, name, slot, seed):
    bench = Bench(monkeypatch, seed=seed, slot=slot)
    with session(device_buffer_bytes=4 * slot).open(folder / name, device=DEVICE) as f:
        assert same(f.get_tensors(), tensors)
    bench.check_calm()
    assert bench.device.followed >= 1
    # A chunk's plaintext was there only after its verdict; what is in clear was checked before it was copied.
    states = {state for block in bench.device.blocks for state in np.unique(block.state)}
    assert VERIFIED in states
    assert states <= ({0, COPIED, VERIFIED} if name == "mixed" else {0, VERIFIED})


@pytest.mark.parametrize("page_cache", ["keep", "drop", "bypass"])
@pytest.mark.parametrize("integrity", ["tags", "full"])
@pytest.mark.parametrize("slot", [16 * KIB, 256 * KIB])
@pytest.mark.parametrize("name", ["aes256gcm-1", "aes256gcm-2", "mixed"])
def test_the_same_bytes_however_the_file_is_read(folder, tensors, monkeypatch, name, slot, integrity, page_cache):
    bench = Bench(monkeypatch, slot=slot)
    with session(integrity=integrity, page_cache=page_cache).open(folder / name, device=DEVICE) as f:
        assert same(f.get_tensors(), tensors)
        assert same({"x": f.get_tensor("matrix")}, {"x": tensors["matrix"]})
    bench.check_calm()


@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("algorithm", ["aes256gcm", "aes128gcm", "chacha20poly1305"])
@pytest.mark.parametrize("kernels", [False, True])
def test_every_cipher_with_and_without_kernels(folder, tensors, monkeypatch, algorithm, version, kernels):
    bench = Bench(monkeypatch, kernels=kernels)
    with session(algorithm).open(folder / f"{algorithm}-{version}", device=DEVICE) as f:
        assert same(f.get_tensors(), tensors)
    bench.check_calm()
    assert bool(bench.kernels and bench.kernels.batches) == (kernels and algorithm != "chacha20poly1305")
    if not (kernels and algorithm != "chacha20poly1305"):
        # The host has decrypted in there.
        assert bench.device.hosts_are_empty()


def test_a_plain_file(tmp_path, tensors, monkeypatch):
    import safetensors.torch

    safetensors.torch.save_file(tensors, tmp_path / "x")
    bench = Bench(monkeypatch)
    with session().open(tmp_path / "x", device=DEVICE, strict=False) as f:
        assert same(f.get_tensors(), tensors)
        assert torch.equal(f.get_slice("matrix")[17:40, 3], tensors["matrix"][17:40, 3])
    bench.check_calm()


@pytest.mark.parametrize("version", ["1", "2"])
def test_one_tensor_at_a_time(folder, tensors, monkeypatch, version):
    bench = Bench(monkeypatch)
    with session().open(folder / f"aes256gcm-{version}", device=DEVICE) as f:
        assert same({name: f.get_tensor(name) for name in f.keys()}, tensors)  # noqa: SIM118
        names = ["n1", "matrix", "empty"]
        assert same(f.get_tensors(names), {n: tensors[n] for n in tensors if n in names})
    bench.check_calm()


INDEXES = [
    3,
    -1,
    slice(10, 20),
    slice(0, 0),
    (slice(None), 5),
    (slice(200, 500), slice(3, 9)),
    (slice(None, None, 100), slice(None)),
    (Ellipsis, 1),
    Ellipsis,
    slice(None),
    (350, 299),
    torch.arange(700) % 3 == 0,
    None,
]


@pytest.mark.parametrize("name", ["aes256gcm-1", "aes256gcm-2", "mixed", "chacha20poly1305-2"])
@pytest.mark.parametrize("integrity", ["tags", "full"])
def test_slices(folder, tensors, monkeypatch, name, integrity):
    bench = Bench(monkeypatch)
    algorithm = name.partition("-")[0] if name != "mixed" else "aes256gcm"
    with session(algorithm, integrity=integrity).open(folder / name, device=DEVICE) as f:
        for index in INDEXES:
            got = f.get_slice("matrix")[index]
            assert torch.equal(got, tensors["matrix"][index]), index
            assert got.shape == tensors["matrix"][index].shape
        assert torch.equal(f.get_slice("n327687")[CHUNK - 1 : CHUNK + 1], tensors["n327687"][CHUNK - 1 : CHUNK + 1])
        assert f.get_slice("empty")[:0].shape == (0, 5)
    bench.check_calm()
    opened_beside = [b for b in bench.device.blocks if (b.state == CLEARED).any()]
    assert bool(opened_beside) == (algorithm == "aes256gcm")
    for block in opened_beside:
        assert not block.array.any()


def test_a_slice_copies_its_chunks_and_no_more(folder, tensors, monkeypatch):
    bench = Bench(monkeypatch)
    copied = []
    real = bench.device.copy_in
    monkeypatch.setattr(bench.device, "copy_in", lambda *a: copied.append(a[4]) or real(*a))
    with session().open(folder / "aes256gcm-2", device=DEVICE) as f:
        rows = f.get_slice("matrix")
        assert torch.equal(rows[100:200], tensors["matrix"][100:200])
    assert sum(copied) == (200 * 1200 // CHUNK - 100 * 1200 // CHUNK + 1) * CHUNK


def test_a_small_piece_of_a_large_read_is_all_that_stays(folder, monkeypatch):
    Bench(monkeypatch)
    with session().open(folder / "aes256gcm-1", device=DEVICE) as f:
        assert f.get_slice("matrix")[:, 5].untyped_storage().nbytes() < 700 * 300 * 2


@pytest.mark.parametrize(
    "span", [(0, 840_000), (5, 17), (CHUNK, 3 * CHUNK), (CHUNK - 1, 3 * CHUNK + 1), (70_000, 70_000)]
)
@pytest.mark.parametrize("name", ["aes256gcm-1", "aes256gcm-2", "mixed"])
def test_a_part_into_memory_that_is_there(folder, tensors, monkeypatch, name, span):
    """What a parameter of a model does that cuts out its own rows."""
    bench = Bench(monkeypatch)
    start, stop = span
    parameter = torch.full((stop - start + 33,), 0x77, dtype=torch.uint8)
    memory = Memory(parameter, parameter.data_ptr(), parameter.nbytes)
    bench.device.adopt(parameter, memory)
    with session().open(folder / name, device=DEVICE) as f:
        bench.engine.fill([(f.file.part("matrix", start, stop), memory, 16)], f.file.read_options, 1 << 20)
    whole = tensors["matrix"].reshape(-1).view(torch.uint8)
    assert torch.equal(parameter[16 : 16 + stop - start], whole[start:stop])
    assert (parameter[:16] == 0x77).all()
    assert (parameter[16 + stop - start :] == 0x77).all()
    bench.check_calm()


@pytest.mark.parametrize(
    ("name", "limit"),
    [("aes256gcm-1", 64 * KIB), ("aes256gcm-2", 64 * KIB), ("aes256gcm-1", MIB), ("mixed", MIB)],
)
def test_host_memory_stays_within_its_limit(folder, tensors, monkeypatch, name, limit):
    bench = Bench(monkeypatch, slot=32 * MIB)
    with session(device_buffer_bytes=limit).open(folder / name, device=DEVICE) as f:
        assert same(f.get_tensors(), tensors)
    assert sum(host.view.nbytes for host in bench.device.hosts) <= limit


def test_device_memory_is_little_more_than_the_tensors(folder, tensors, monkeypatch):
    bench = Bench(monkeypatch)
    with session().open(folder / "aes256gcm-2", device=DEVICE) as f:
        f.get_tensors()
    assert sum(b.memory.nbytes for b in bench.device.blocks) < sum(t.nbytes for t in tensors.values()) + 16 * len(
        tensors
    )


def test_runs_are_copied_whole_and_small_tensors_share_a_batch(tmp_path, monkeypatch):
    tensors = {f"t{i:03}": torch.full((64,), i, dtype=torch.float32) for i in range(300)}
    bench = Bench(monkeypatch, slot=32 * MIB)
    with session().open(write(tmp_path / "x", tensors), device=DEVICE) as f:
        assert same(f.get_tensors(), tensors)
    assert bench.device.log.count("copy_in") == 1
    assert [(len(b.keys), len(b.chunks)) for b in bench.kernels.batches] == [(300, 300)]


def test_chunks_that_fit_are_not_split_and_others_are_opened_once(folder, monkeypatch):
    for slot, parts in ((256 * KIB, 1), (16 * KIB, 16)):
        bench = Bench(monkeypatch, slot=slot)
        with session().open(folder / "aes256gcm-2", device=DEVICE) as f:
            f.get_tensor("n65536")
        assert sum(len(b.chunks) for b in bench.kernels.batches) == 1
        assert bench.device.log.count("copy_in") <= parts


def test_many_verdicts_are_not_left_open(folder, monkeypatch):
    """Batches hold memory of the device until they were judged."""
    bench = Bench(monkeypatch, slot=64 * KIB)
    open_now, most = [0], [0]
    real = bench.kernels.open

    def opened(batch, stream):
        pending = real(batch, stream)
        open_now[0] += 1
        most[0] = max(most[0], open_now[0])
        wait = pending.wait

        def waited():
            wait()
            open_now[0] -= 1

        pending.wait = waited
        pending.done = lambda: False
        return pending

    monkeypatch.setattr(bench.kernels, "open", opened)
    with session().open(folder / "aes256gcm-2", device=DEVICE) as f:
        f.get_tensors()
    assert open_now == [0]
    assert most[0] <= 17 < len(bench.kernels.batches)


def test_who_decrypts_is_logged_once(folder, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, "secure_loader")
    monkeypatch.setattr(logging.getLogger("secure_loader.audit"), "disabled", True)  # it tells of every open
    Bench(monkeypatch)
    with session().open(folder / "aes256gcm-2", device=DEVICE) as f:
        f.get_tensor("n1")
        f.get_tensor("n3")
    assert [(r.levelname, "fake" in r.message) for r in caplog.records] == [("DEBUG", True)]
    caplog.clear()
    with session("chacha20poly1305").open(folder / "chacha20poly1305-2", device=DEVICE) as f:
        f.get_tensor("n1")
        f.get_tensor("n3")
    assert [r.levelname for r in caplog.records] == ["INFO"]
    caplog.clear()
    Bench(monkeypatch, kernels=False)
    with session().open(folder / "aes256gcm-2", device=DEVICE) as f:
        f.get_tensors()
    assert [(r.levelname, "no kernels" in r.message) for r in caplog.records] == [("INFO", True)]


@pytest.mark.parametrize(("algorithm", "kernels"), [("aes256gcm", False), ("chacha20poly1305", True)])
def test_where_the_device_has_to_decrypt_nothing_else_does(folder, monkeypatch, algorithm, kernels):
    bench = Bench(monkeypatch, kernels=kernels, require=True)
    with session(algorithm).open(folder / f"{algorithm}-2", device=DEVICE) as f:
        for _ in range(2):
            with pytest.raises(DeviceError, match="as the settings demand") as caught:
                f.get_tensors()
            assert caught.value.path == str(folder / f"{algorithm}-2")
        assert f.get_tensor("n0").numel() == 0  # nothing to decrypt
    assert "copy_in" not in bench.device.log


def test_the_settings_choose_the_kernels(folder, monkeypatch):
    asked = []
    Bench(monkeypatch)
    monkeypatch.setattr(archive, "engine_for", lambda *a, **k: asked.append((a, k)))
    with session(device_kernels="nvrtc", require_device_kernels=True).open(folder / "aes256gcm-2", device="meta") as f:
        f.get_tensor("n1")
    assert asked == [(("meta", "nvrtc"), {"require": True})]


@pytest.mark.parametrize("page_cache", ["keep", "bypass"])
@pytest.mark.parametrize("integrity", ["tags", "full"])
@pytest.mark.parametrize("step", [2, 3])
def test_some_tensors_of_a_file(folder, tensors, monkeypatch, step, integrity, page_cache):
    """Runs with gaps between them."""
    bench = Bench(monkeypatch, slot=64 * KIB)
    with session(integrity=integrity, page_cache=page_cache).open(folder / "mixed", device=DEVICE) as f:
        names = f.offset_keys()[::step]
        assert same(f.get_tensors(names), {n: tensors[n] for n in names})
    bench.check_calm()


@pytest.mark.parametrize("device", ["meta", "cpu", "mps", "xpu", "nonsense", "cuda:9999"])
def test_other_devices_are_left_to_the_framework(device):
    assert engine_for(device) is None


def test_the_framework_still_copies_where_there_is_no_engine(folder, tensors):
    with session().open(folder / "aes256gcm-2", device="meta") as f:
        assert f.get_tensor("matrix").is_meta
        assert f.get_tensors(["matrix"])["matrix"].shape == tensors["matrix"].shape
        assert f.get_slice("matrix")[3:5].is_meta
