"""Tensors decrypted ahead: the right bytes whoever is faster, within the budget, and nothing left after an end or an error."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from secure_loader.core import prefetch
from secure_loader.core.archive import Archive
from secure_loader.core.pool import set_threads
from secure_loader.core.prefetch import Prefetch
from secure_loader.core.tensors import framework
from secure_loader.errors import AuthenticationError, OutOfMemoryError, ReadError
from secure_loader.torch import save_file
from tests.attacks.kit import KEY, SIGN, Victim, flip, tensor_offset

SIZES = [10, 100_000, 3_000_000, 5, 700_000, 20_000_000, 1, 300_000] * 2


@pytest.fixture(params=[1, 3])
def threads(request):
    set_threads(request.param)
    yield
    set_threads(None)


@pytest.fixture(scope="module")
def tensors():
    torch.manual_seed(0)
    return {f"t{i:02}": torch.randint(0, 256, (n,), dtype=torch.uint8) for i, n in enumerate(SIZES)}


@pytest.fixture
def file(tmp_path, tensors):
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, key=KEY, signing_key=SIGN, model_id="demo/model", chunk_size=64 * 1024)
    return Victim().open(path).file


def start(file, budget, names=None):
    return Prefetch([(file, n) for n in names or file.header.tensors], framework("pt"), budget, file.read_options)


def settled(ahead, seconds=20):
    """Waits until nobody works any more."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with ahead._lock:
            if not ahead._workers and not ahead._hired and not any(b.running for b in ahead._active):
                return
        time.sleep(0.005)
    pytest.fail("still at work")


@pytest.mark.parametrize("budget", [1, 1 << 20, 1 << 40])
@pytest.mark.parametrize("order", ["same", "reverse"])
def test_every_tensor_once_in_any_order(file, tensors, threads, budget, order):
    names = list(tensors) if order == "same" else list(reversed(tensors))
    with start(file, budget) as ahead:
        for name in names:
            assert torch.equal(ahead.take(file, name), tensors[name])
        assert ahead.take(file, names[0]) is None, "handed out once"
        settled(ahead)
        assert (ahead._ahead, len(ahead._active)) == (0, 0)


def test_many_takers_at_once(file, tensors, threads):
    wrong = []

    def taker(names):
        wrong.extend(n for n in names if not torch.equal(ahead.take(file, n), tensors[n]))

    with start(file, 1 << 20) as ahead:
        takers = [threading.Thread(target=taker, args=(list(tensors)[i::4],)) for i in range(4)]
        for t in takers:
            t.start()
        for t in takers:
            t.join(60)
    assert not wrong


def test_the_budget_holds(file, tensors, monkeypatch):
    monkeypatch.setattr(prefetch, "_BATCH_BYTES", 1 << 20)
    budget = 4 << 20
    with start(file, budget) as ahead:
        settled(ahead)
        assert 0 < ahead._ahead <= budget
        begun = ahead._ahead
        # Nobody takes the first ones: the rest is had all the same, at once and on demand.
        assert torch.equal(ahead.take(file, "t13"), tensors["t13"])
        settled(ahead)
        assert ahead._ahead == begun


def test_what_is_no_part_of_it(file, tensors):
    other = Archive(file).file
    with start(file, 1 << 30, ["t00", "t01"]) as ahead:
        assert ahead.take(file, "t02") is None
        archive = Archive(other, ahead=ahead)
        for name in ("t00", "t02", "t00"):
            assert torch.equal(archive.get_tensor(name), tensors[name])
        assert torch.equal(archive.get_slice("t01")[...], tensors["t01"])
        assert torch.equal(archive.get_slice("t02")[5:10], tensors["t02"][5:10])


def test_an_error_reaches_whoever_asks_and_stops_the_rest(file, threads, monkeypatch):
    monkeypatch.setattr(prefetch, "_BATCH_BYTES", 1 << 20)
    flip(Path(file.source.path), tensor_offset(Path(file.source.path), "t04"))
    made = []
    real = prefetch.empty_many
    monkeypatch.setattr(prefetch, "empty_many", lambda *a: made.append(real(*a)) or made[-1])
    with start(file, 1 << 40) as ahead:
        for _ in range(2):  # whoever asks, and whenever
            with pytest.raises(AuthenticationError) as caught:
                ahead.take(file, "t04")
            ahead._of[prefetch._key(file, "t04")] = next(b for b in ahead._active if b.error is not None)
        assert caught.value.tensor == "t04"
        assert caught.value.path == file.source.path
        settled(ahead)
        batch = next(b for b in ahead._active if b.error is not None)
        assert (batch.ready, batch.wanted) == ({}, {})
        assert not any(bytes(out).strip(b"\0") for group in made for _, out in group if len(out) == SIZES[4])


def test_what_nobody_asked_for_is_wiped(file, monkeypatch):
    made = []
    real = prefetch.empty_many
    monkeypatch.setattr(prefetch, "empty_many", lambda *a: made.extend(real(*a)) or made[-len(a[1]) :])
    ahead = start(file, 1 << 40)
    settled(ahead)
    kept = ahead.take(file, "t02")
    ahead.close()
    ahead.close()
    assert kept.any(), "what was handed out stays"
    left = [out for _, out in made if len(out) != len(kept)]
    assert left
    assert not any(bytes(out).strip(b"\0") for out in left)
    assert ahead.take(file, "t03") is None


def test_closing_while_it_works_ends_at_once(file, threads):
    for _ in range(20):
        ahead = start(file, 1 << 40)
        ahead.close()
        settled(ahead)
        assert not ahead._active


def test_no_memory_for_it(file, monkeypatch):
    def none(fw, sizes):
        raise OutOfMemoryError("none")

    with monkeypatch.context() as m:
        m.setattr(prefetch, "empty_many", none)
        with start(file, 1 << 40) as ahead, pytest.raises(OutOfMemoryError):
            ahead.take(file, "t00")


def test_no_threads_to_be_had(file, tensors, monkeypatch):
    monkeypatch.setattr(prefetch, "submit", lambda work, n, waiting: 0)
    with start(file, 1 << 20) as ahead:
        for name, tensor in tensors.items():
            assert torch.equal(ahead.take(file, name), tensor)


def test_files_that_are_not_cached(file, tensors):
    file.source.drop_cache(0, 0)
    with start(file, 1 << 40) as ahead:
        for name, tensor in tensors.items():
            assert torch.equal(ahead.take(file, name), tensor)


@pytest.mark.parametrize("cached", [True, False])
def test_at_once(file, tensors, threads, monkeypatch, cached):
    monkeypatch.setattr(type(file.source), "is_cached", lambda self, offset: cached)
    with Prefetch([(file, n) for n in tensors], framework("pt"), 1 << 40, file.read_options, at_once=True) as ahead:
        assert not cached or not ahead._pending
        for name, tensor in tensors.items():
            assert torch.equal(ahead.take(file, name), tensor)


def test_an_interruption_while_it_fills_up_leaves_nothing(file, monkeypatch):
    real, seen = prefetch.run, []

    def interrupted(job, options, **more):
        real(job, options, **more)
        if threading.current_thread() is threading.main_thread():
            seen.append(1)
            raise KeyboardInterrupt

    monkeypatch.setattr(prefetch, "run", interrupted)
    closed = []
    monkeypatch.setattr(Prefetch, "close", lambda self, close=Prefetch.close: close(self) or closed.append(self))
    with pytest.raises(KeyboardInterrupt):
        Prefetch([(file, n) for n in file.header.tensors], framework("pt"), 1 << 40, file.read_options, at_once=True)
    assert seen
    assert not closed[0]._active


def test_whoever_waits_while_it_closes_gets_an_error_and_no_zeros(file, monkeypatch):
    real, go = prefetch.run, threading.Event()

    def waits(job, options, **more):
        go.wait(20)
        real(job, options, **more)

    monkeypatch.setattr(prefetch, "run", waits)
    ahead, met = start(file, 1 << 40), []

    def taker():
        try:
            met.append(ahead.take(file, "t00"))
        except ReadError as e:
            met.append(e)

    waiting, closing = threading.Thread(target=taker), threading.Thread(target=ahead.close)
    waiting.start()
    while prefetch._key(file, "t00") in ahead._of:
        time.sleep(0.001)
    closing.start()
    while not ahead._stopped:
        time.sleep(0.001)
    go.set()
    for thread in (waiting, closing):
        thread.join(20)
    assert [type(m) for m in met] == [ReadError]
    assert not ahead._active
