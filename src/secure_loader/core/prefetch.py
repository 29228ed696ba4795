"""Tensors decrypted ahead of whoever will ask for them, in that order, within a memory budget.

A framework spends a good part of a load in Python, on one processor. Meanwhile the shared pool decrypts what it is going
to ask for. Nothing depends on it: whoever is faster than the prefetch does the work himself, and what nobody asks for
only takes up its share of the budget until :meth:`Prefetch.close`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from ..errors import ReadError
from .archive import TensorFile
from .pipeline import Options, Piece, Wanted, plan, release, run, will_wait, wipe_all
from .pool import WAITING_THREADS, insist, submit, threads
from .tensors import Framework, empty_many

# Small tensors are decrypted together: hand-overs cost as much as a few hundred kilobytes.
_BATCH_BYTES = 16 << 20

_Key = tuple[int, str]


class _Batch:
    """Tensors whose memory is made, filled, and failed together. Guarded by the prefetch's lock."""

    def __init__(self, tensors: list[tuple[TensorFile, str]]) -> None:
        self.tensors = tensors
        self.nbytes = sum(file.info(name).nbytes for file, name in tensors)
        self.started = False
        # Jobs that nobody has begun, all of them, how many are at work, and how many have not succeeded yet.
        self.jobs: deque[list[Piece]] = deque()
        self.all_jobs: list[list[Piece]] = []
        self.running = 0
        self.left = 0
        self.ready: dict[_Key, Any] = {}
        self.wanted: dict[_Key, Wanted] = {}
        self.error: BaseException | None = None
        # Held until nobody works on it any more. A plain lock: see core.pool on signals.
        self.work = threading.Lock()
        self.work.acquire()
        self.released = False

    @property
    def complete(self) -> bool:
        """Every byte of it was verified."""
        return self.started and self.error is None and self.left == 0

    @property
    def ended(self) -> bool:
        """Nobody works on it any more."""
        return self.complete or (self.error is not None and not self.running)


class Prefetch:
    """Decrypts tensors in the background, and hands each out once. A context manager.

    Args:
        tensors: Files and names, in the order in which they will be asked for; clear ones are left out, they are mapped.
        fw: Whose tensors to make.
        budget: Bytes of plaintext that may lie around without having been asked for; one batch is always allowed.
        options: How to read.
        at_once: Use up the budget before returning, where files are in the page cache: for a caller that goes on in
            Python, beside whom other threads get half as much done.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[TensorFile, str]],
        fw: Framework,
        budget: int,
        options: Options = Options(),  # noqa: B008 - frozen
        *,
        at_once: bool = False,
    ) -> None:
        self._fw, self._budget, self._options = fw, budget, options
        self._lock = threading.Lock()
        self._pending = deque(_batches(tensors))
        self._of = {_key(file, name): batch for batch in self._pending for file, name in batch.tensors}
        self._active: deque[_Batch] = deque()
        self._ahead = 0
        # Threads at work, and those that were asked to come.
        self._workers = 0
        self._hired = 0
        self._stopped = False
        places = [(f.source, f.header.body_start + f.info(n).start) for b in self._pending for f, n in b.tensors]
        self._waiting = will_wait(places, options)
        at_once = at_once and not self._waiting
        with self._lock:
            self._hire(besides=int(at_once))
        try:
            while at_once and self._work_on(self._next):
                pass
            with self._lock:
                failed = next((batch.error for batch in self._active if batch.error is not None), None)
            if at_once and failed is not None:
                raise failed
        except BaseException:
            self.close()
            raise

    def take(self, file: TensorFile, name: str) -> Any:
        """A tensor, waited for or decrypted right now where need be.

        Args:
            file: As it was given.
            name: Likewise.

        Returns:
            The tensor, or None where it is not, or no longer, one of these.

        Raises:
            SecureLoaderError: It could not be read or verified; everything that was made together with it was wiped.
        """
        key = _key(file, name)
        with self._lock:
            batch = self._of.pop(key, None)
            if batch is None:
                return None
            if not batch.started:
                self._pending.remove(batch)
                self._start(batch)
                self._hire()
        # Wait rather than help, as long as there is somebody to wait for: more threads than processors only get into
        # each other's way.
        while not self._workers and self._work_on(lambda: batch):
            pass
        with batch.work:
            pass
        with self._lock:
            if not batch.complete or key not in batch.ready:
                raise batch.error or ReadError("the load has ended")
            del batch.wanted[key]
            tensor = batch.ready.pop(key)
            if not batch.ready:
                self._active.remove(batch)
            self._ahead -= tensor.nbytes
            self._hire()
        return tensor

    def close(self) -> None:
        """Stop, wait until nobody works on it any more, and wipe what nobody has asked for."""

        def stop() -> None:
            with self._lock:
                self._stopped = True
                self._pending.clear()
                self._of.clear()
                batches = list(self._active)
                for batch in batches:
                    # Before anything is wiped: whoever still waits for one of them gets an error, not zeros.
                    batch.ready.clear()
                    if not batch.complete:
                        self._fail(batch, ReadError("the load has ended"))
            for batch in batches:
                with batch.work:
                    wipe_all(list(batch.wanted.values()))
                batch.wanted.clear()
            with self._lock:
                self._active.clear()

        insist(stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # The rest is called with the lock held, but for _work and _work_on.

    def _hire(self, besides: int = 0) -> None:
        """Have as many threads at work as there is work for, ``besides`` those that do not count as hired."""
        n = (WAITING_THREADS if self._waiting else threads()) - self._workers - self._hired - besides
        if n > 0 and self._peek():
            # A signal right here makes it count threads that never come; whoever takes a tensor does the work then.
            self._hired += n
            self._hired -= n - submit(self._work, n, waiting=self._waiting)

    def _peek(self) -> bool:
        return any(batch.jobs for batch in self._active) or self._may_start()

    def _may_start(self) -> bool:
        if self._stopped or not self._pending:
            return False
        return not self._ahead or self._ahead + self._pending[0].nbytes <= self._budget

    def _start(self, batch: _Batch) -> None:
        self._ahead += batch.nbytes
        self._active.append(batch)
        batch.started = True
        try:
            # In file order, so that neighbours share a read.
            tensors = sorted(batch.tensors, key=lambda t: (id(t[0]), t[0].info(t[1]).start))
            memory = empty_many(self._fw, [file.info(name).nbytes for file, name in tensors])
            for (file, name), (owner, out) in zip(tensors, memory, strict=True):
                info, key = file.info(name), _key(file, name)
                batch.wanted[key] = file.wanted(name, out)
                batch.ready[key] = self._fw.view(owner, info.dtype, info.shape)
            batch.all_jobs = plan(list(batch.wanted.values()))
            batch.left = len(batch.all_jobs)
            batch.jobs.extend(batch.all_jobs)
        except BaseException as e:  # noqa: BLE001 - raised in take()
            self._fail(batch, e)

    def _fail(self, batch: _Batch, error: BaseException) -> None:
        # The first error wins, and nothing more is begun: whoever asks for it is about to give up.
        batch.error = batch.error or error
        batch.jobs.clear()
        self._stopped = True
        if batch.ended:
            self._finish(batch)

    def _next(self) -> _Batch | None:
        while True:
            batch = next((b for b in self._active if b.jobs), None)
            if batch is not None or not self._may_start():
                return batch
            self._start(self._pending.popleft())

    def _next_or_leave(self) -> _Batch | None:
        batch = self._next()
        if batch is None:
            # In the same breath: whoever sees a thread at work relies on it.
            self._workers -= 1
        return batch

    def _work(self) -> None:
        with self._lock:
            self._hired -= 1
            self._workers += 1
        while self._work_on(self._next_or_leave):
            pass

    def _work_on(self, choose: Callable[[], _Batch | None]) -> bool:
        """Do one job of the batch that is chosen; False when it has none."""
        taken: list[_Batch] = []
        error: BaseException | None = None
        try:
            with self._lock:
                batch = choose()
                if batch is None or not batch.jobs:
                    return False
                job = batch.jobs.popleft()
                batch.running += 1
                taken.append(batch)
            run(job, self._options, make_pages=False)
        except BaseException as e:
            if not taken:
                raise
            error = e  # raised in take(), also for others that wait for the same batch
        chosen = taken[0]

        def settle() -> None:
            with self._lock:
                if taken:
                    # No call between these, so no interruption either.
                    chosen.running -= 1
                    chosen.left -= error is None
                    taken.clear()
                if error is not None:
                    self._fail(chosen, error)
                elif chosen.ended:
                    self._finish(chosen)

        insist(settle)
        return True

    def _finish(self, batch: _Batch) -> None:
        if batch.error is not None:
            wipe_all(list(batch.wanted.values()))
            batch.wanted.clear()
            batch.ready.clear()
        release(batch.all_jobs, self._options)
        batch.all_jobs = []
        if not batch.released:
            batch.released = True
            batch.work.release()


def _key(file: TensorFile, name: str) -> _Key:
    return id(file), name


def _batches(tensors: Iterable[tuple[TensorFile, str]]) -> Sequence[_Batch]:
    groups: list[list[tuple[TensorFile, str]]] = []
    room = 0
    for file, name in tensors:
        nbytes = file.info(name).nbytes
        if not file.is_sealed(name) or not nbytes:
            continue
        if nbytes > room:
            groups.append([])
            room = max(_BATCH_BYTES, nbytes)
        groups[-1].append((file, name))
        room -= nbytes
    return [_Batch(group) for group in groups]
