"""Tensors that are brought together are handed out one by one, each once, and none after an error or the end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from secure_loader.core.device.ahead import DeviceAhead
from secure_loader.core.tensors import framework
from secure_loader.errors import AuthenticationError, ReadError

from .fake import NOTHING
from .files import content, session, write
from .host_engine import HostEngine


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("ahead") / "file", content())


@pytest.fixture
def file(path):
    return session().open_file(path)


def ahead_of(file, engine, budget=1 << 30):
    return DeviceAhead([(file, name, engine) for name in sorted(file.header.tensors)], framework("pt"), budget)


@pytest.mark.parametrize("budget", [1, 100_000, 1 << 30])
def test_every_tensor_once(file, budget):
    engine = HostEngine()
    with ahead_of(file, engine, budget) as ahead:
        found = {name: ahead.take(file, name) for name in file.header.tensors}
        assert all(torch.equal(found[name], tensor) for name, tensor in content().items())
        assert all(ahead.take(file, name) is None for name in file.header.tensors)
    assert sum(engine.asked) == sum(t.nbytes for t in content().values())
    # What was handed out outlives it.
    assert all(torch.equal(found[name], tensor) for name, tensor in content().items())
    if budget == 1 << 30:
        assert len(engine.asked) == 1


def test_many_threads_bring_nothing_twice(file):
    engine = HostEngine()
    names = list(file.header.tensors)
    with ahead_of(file, engine, 50_000) as ahead, ThreadPoolExecutor(8) as pool:
        found = dict(zip(names, pool.map(lambda name: ahead.take(file, name), names), strict=True))
    assert all(torch.equal(found[name], tensor) for name, tensor in content().items())
    assert sum(engine.asked) == sum(t.nbytes for t in content().values())


def test_others_are_not_its_business(file, path):
    with ahead_of(file, HostEngine()) as ahead, session().open_file(path).source:
        assert ahead.take(session().open_file(path), "n1") is None
        assert ahead.take(file, "no such tensor") is None


def test_the_end_overwrites_what_nobody_took(file):
    engine = HostEngine()
    ahead = ahead_of(file, engine)
    taken = ahead.take(file, "n65536")
    (batch,) = ahead._batches
    left = list(batch.owners.values())
    assert any(owner.any() for owner in left)
    ahead.close()
    assert torch.equal(taken, content()["n65536"])
    assert not any(owner.any() for owner in left)
    assert ahead.take(file, "n1") is None
    ahead.close()


def test_an_error_is_everybody_s_and_leaves_nothing(tmp_path):
    path = write(tmp_path / "file", content())
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    file, engine = session().open_file(path), HostEngine()
    with ahead_of(file, engine) as ahead:
        for name in ("n1", "n65536"):
            with pytest.raises(AuthenticationError):
                ahead.take(file, name)
    assert len(engine.asked) == 1
    for block in engine.device.blocks:
        touched = block.state != NOTHING
        assert touched.any()
        assert not block.array[touched].any()


def test_an_interruption_is_told_to_those_who_waited(file, monkeypatch):
    engine = HostEngine()
    ahead = ahead_of(file, engine)
    entered, go = threading.Event(), threading.Event()

    def interrupted(*args):
        entered.set()
        assert go.wait(10)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "load", interrupted)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ahead.take, file, "n1")
        assert entered.wait(10)
        second = pool.submit(ahead.take, file, "n3")
        go.set()
        assert isinstance(first.exception(10), KeyboardInterrupt)
        assert isinstance(second.exception(10), ReadError)
