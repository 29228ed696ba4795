"""Jobs on the shared pool: the first error wins, nobody is left behind, nothing half-done is left in memory."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from secure_loader.core import pool
from secure_loader.core.pool import run_jobs, set_threads, threads


@pytest.fixture(autouse=True)
def four_threads():
    set_threads(4)
    yield
    set_threads(None)


def test_every_item_once():
    done = []
    run_jobs(done.append, range(1000))
    assert sorted(done) == list(range(1000))
    run_jobs(done.append, [])
    assert len(done) == 1000


def test_jobs_run_on_several_threads_at_once():
    barrier = threading.Barrier(4, timeout=20)
    run_jobs(lambda item: barrier.wait(), range(4))


def test_the_first_error_wins_and_no_further_job_starts():
    started = []

    def job(item):
        started.append(item)
        if item == 2:
            raise ZeroDivisionError(item)
        time.sleep(0.01)

    with pytest.raises(ZeroDivisionError, match="2"):
        run_jobs(job, range(1000))
    assert len(started) < 20


def test_helpers_are_awaited_before_the_wiping():
    events = []
    slow = threading.Event()

    def job(item):
        if item == 0:
            slow.wait(20)
            raise ZeroDivisionError
        slow.set()
        time.sleep(0.2)
        events.append("written")

    with pytest.raises(ZeroDivisionError):
        run_jobs(job, range(4), on_error=lambda: events.append("wiped"))
    assert events[-1] == "wiped"
    assert "written" in events


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("presses", [1, 3])
def test_an_impatient_user_does_not_get_ahead_of_the_helpers(presses):
    """^C while the calling thread waits for the others: they must be out before the destination is wiped."""
    main, events, entered = threading.main_thread(), [], threading.Barrier(2, timeout=20)

    def job(item):
        if threading.current_thread() is main:
            entered.wait()
            return  # this thread is out of work now, and waits
        entered.wait()
        for _ in range(presses):
            time.sleep(0.1)
            signal.pthread_kill(main.ident, signal.SIGINT)
        time.sleep(0.2)
        events.append("written")

    with pytest.raises(KeyboardInterrupt):
        run_jobs(job, range(2), on_error=lambda: events.append("wiped"))
    assert events == ["written", "wiped"]


def test_an_interrupt_in_the_job_of_the_calling_thread():
    main, events = threading.main_thread(), []

    def job(item):
        if threading.current_thread() is main:
            raise KeyboardInterrupt
        time.sleep(0.05)
        events.append("written")

    with pytest.raises(KeyboardInterrupt):
        run_jobs(job, range(200), on_error=lambda: events.append("wiped"))
    assert events[-1] == "wiped"
    assert len(events) < 10


def test_jobs_that_run_jobs():
    done = []

    def outer(i):
        run_jobs(lambda j: done.append((i, j)), range(20))

    run_jobs(outer, range(20))
    assert len(set(done)) == 400


def test_many_callers_at_once():
    done, errors = [], []

    def caller(n):
        try:
            run_jobs(lambda j: done.append((n, j)), range(50))
        except Exception as e:  # noqa: BLE001 - looked at below
            errors.append(e)

    callers = [threading.Thread(target=caller, args=(n,)) for n in range(8)]
    for c in callers:
        c.start()
    for c in callers:
        c.join(30)
    assert len(set(done)) == 400
    assert not errors


def test_one_callers_error_is_not_anothers():
    done = []
    run_jobs(done.append, range(10))
    with pytest.raises(ZeroDivisionError):
        run_jobs(lambda j: 1 // 0, range(10))
    run_jobs(done.append, range(10))
    assert len(done) == 20


def test_changing_the_number_of_threads_meanwhile():
    stop, errors = threading.Event(), []

    def change():
        while not stop.is_set():
            set_threads(2)
            set_threads(3)

    changer = threading.Thread(target=change)
    changer.start()
    try:
        for _ in range(200):
            done = []
            run_jobs(done.append, range(8))
            if sorted(done) != list(range(8)):
                errors.append(done)
    finally:
        stop.set()
        changer.join()
    assert not errors


def test_no_more_threads_to_be_had(monkeypatch):
    class Broken:
        def __init__(self, waiting):
            pass

        def submit(self, work):
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pool, "_pool", Broken)
    done = []
    run_jobs(done.append, range(8))
    assert sorted(done) == list(range(8))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork_the_pool_is_a_new_one():
    run_jobs(lambda item: None, range(8))
    child = os.fork()
    if child == 0:
        done = []
        try:
            run_jobs(done.append, range(100))
        finally:
            os._exit(0 if sorted(done) == list(range(100)) else 1)
    deadline = time.monotonic() + 20
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(status) == 0


def test_the_number_of_threads():
    assert threads() == 4
    set_threads(None)
    assert 1 <= threads() <= 16
