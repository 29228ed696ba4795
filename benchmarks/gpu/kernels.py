"""GB/s of every kernel. What is timed has first sealed data that ``cryptography`` opened, and opened them itself."""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from benchmarks.gpu.copies import size_text
from benchmarks.gpu.raw import Job, Raw, opened
from benchmarks.gpu.rounds import Work, amend, measure
from benchmarks.gpu.stage import Context
from secure_loader.bench.measure import MeasurementError
from secure_loader.core.device.batch import Batch, Chunk, Pending
from secure_loader.core.secrets import Secret

_KEYS = 16  # of a job: as in a file, where each tensor has its own
_MANY_KEYS = 512
_CHECKED = 3  # chunks that cryptography opens
# GB/s that were predicted from counts of instructions, before anything had run on a GPU (AES-256, an H200).
_PREDICTED = {"open": (150, 210), "ctr": (230, 300), "triton": (130, 180)}


def run(context: Context) -> None:
    """Both key lengths, large and small launches, limited grids, and how much the time depends on keys and data."""
    with opened(context.bench) as raw:
        context.tell(f"{raw.name}: {raw.resident} blocks on each of {raw.multiprocessors} multiprocessors")
        size = context.sizes.kernel + 4096
        memory = torch.empty(size, dtype=torch.uint8, device=context.bench.torch_device)
        for bits in (256, 128):
            job = _job(context, raw, memory, bits)
            _whole(context, job, memory, bits)
            _pieces(context, raw, memory, bits)
            if bits == 256:
                _grids(context, job)
        _constant_time(context, raw, memory)


def _job(
    context: Context, raw: Raw, memory: torch.Tensor, bits: int, *, shift: int = 0, chunk: int | None = None
) -> Job:
    """A job over all of the memory, proven right."""
    sizes = context.sizes
    job = Job(raw, _chunks(memory, sizes.kernel, chunk or sizes.chunk, shift), _keys(bits, _KEYS))
    _fill(memory)
    places = job.chunks[:: max(1, len(job.chunks) // _CHECKED)][:_CHECKED]
    plain = [_bytes(memory, chunk) for chunk in places]
    job.seal()
    by_address = {c.address: c for c in job.chunks}
    for place, text in zip(places, plain, strict=True):
        sealed = by_address[place.address]
        if sealed.nbytes >= 1 << 31:
            continue  # more than cryptography takes at once; the verdict has to do
        try:
            found = AESGCM(job.keys[sealed.key]).decrypt(sealed.nonce, _bytes(memory, sealed) + sealed.tag, None)
        except InvalidTag:
            found = b""
        if found != text:
            raise MeasurementError("what the kernels sealed is not what cryptography opens")
    job.open()
    if any(_bytes(memory, place) != text for place, text in zip(places, plain, strict=True)):
        raise MeasurementError("what the kernels opened is not what was sealed")
    return job


def _chunks(memory: torch.Tensor, total: int, size: int, shift: int) -> list[Chunk]:
    start = memory.data_ptr() + shift
    return [
        Chunk(start + at, min(size, total - at), n % _KEYS, os.urandom(12), bytes(16))
        for n, at in enumerate(range(0, total, size))
    ]


def _keys(bits: int, count: int) -> list[bytes]:
    return [os.urandom(bits // 8) for _ in range(count)]


def _fill(memory: torch.Tensor) -> None:
    """Random bytes: what is all zeros costs less power, and may run faster than real data."""
    words = memory[: memory.numel() // 8 * 8].view(torch.int64)
    words.random_(-(2**63), None)


def _bytes(memory: torch.Tensor, chunk: Chunk) -> bytes:
    at = chunk.address - memory.data_ptr()
    return memory[at : at + chunk.nbytes].cpu().numpy().tobytes()


def _kernel(job: Job, kernel: str, blocks: int | None = None) -> Callable[[], float]:
    return lambda: job.do(lambda: job.segments_by(kernel, blocks))


def _whole(context: Context, job: Job, memory: torch.Tensor, bits: int) -> None:
    raw, sizes = job.raw, context.sizes
    many = Job(raw, [], _keys(bits, _MANY_KEYS))

    def predicted(name: str) -> dict[str, object]:
        return {"predicted": _PREDICTED[name]} if bits == 256 and name in _PREDICTED else {}

    def work(name: str, label: str, run: Callable[[], float], **parameters: object) -> Work:
        return Work(name=name, label=label, run=run, parameters={"bytes": job.nbytes, **predicted(name), **parameters})

    works = [
        work("open", "open: decrypt and hash", _kernel(job, "sl_gcm_open")),
        work("ctr", "ctr: decrypt only", _kernel(job, "sl_ctr")),
        work("seal", "seal: encrypt and hash", _kernel(job, "sl_gcm_seal")),
        work("finish", f"finish: {len(job.chunks)} tags", lambda: job.do(job.finish), bytes=0, count=len(job.chunks)),
        work("expand", f"expand: {_MANY_KEYS} keys", lambda: many.do(many.expand), bytes=0, count=_MANY_KEYS),
        work("open-odd", "open, at odd addresses", _lazily(lambda: _job(context, raw, memory, bits, shift=1))),
        work("open-one", "open, one chunk", _lazily(lambda: _job(context, raw, memory, bits, chunk=sizes.kernel))),
        work("batch", "as the package: keys, open, verdict", _batch(context, job, memory, "auto")),
    ]
    if importlib.util.find_spec("triton") is not None:
        works.append(work("triton", "Triton: keys, open, verdict", _batch(context, job, memory, "triton")))
    measure(context, f"aes{bits}", f"AES-{bits}, {size_text(job.nbytes)}, chunks of {size_text(sizes.chunk)}", works)


def _lazily(make: Callable[[], Job]) -> Callable[[], float]:
    """Opening a job that is made, and proven right, when its turn comes."""
    made: list[Job] = []

    def run() -> float:
        if not made:
            made.append(make())
        return _kernel(made[0], "sl_gcm_open")()

    return run


def _batch(context: Context, job: Job, memory: torch.Tensor, way: str) -> Callable[[], float]:
    """As the package opens a batch: keys up, schedules, opening, verdict, keys overwritten. Good ones, each time."""
    made: list[tuple[torch.Tensor, Batch]] = []

    def run() -> float:
        kernels, stream = context.bench.kernels(way), context.bench.stream
        if not made:
            _fill(memory)
            job.seal()
            made.append((memory.clone(), Batch([Secret(key) for key in job.keys], tuple(job.chunks))))
        sealed, batch = made[0]
        memory.copy_(sealed)
        pending: list[Pending] = []
        seconds = context.bench.seconds(lambda: pending.append(kernels.open(batch, stream)))
        pending[0].wait()
        return seconds

    return run


def _pieces(context: Context, raw: Raw, memory: torch.Tensor, bits: int) -> None:
    """Launch by launch, as a pipeline works; each on memory that the one before did not touch."""
    sizes = context.sizes
    keys = _keys(bits, _KEYS)
    chunks = _chunks(memory, sizes.kernel, sizes.chunk, 0)
    each = max(1, sizes.piece // sizes.chunk)
    jobs = [Job(raw, chunks[n : n + each], keys) for n in range(0, len(chunks), each)]
    _fill(memory)
    for job in jobs:
        job.seal()
        job.open()

    def work(name: str, label: str, *steps: Callable[[Job], None]) -> Work:
        def queue() -> None:
            for job in jobs:
                for step in steps:
                    step(job)

        parameters = {"bytes": sizes.kernel, "launches": len(jobs)}
        return Work(name=name, label=label, run=lambda: raw.bench.seconds(queue), parameters=parameters)

    works = [
        work("open", "open", lambda job: job.segments_by("sl_gcm_open")),
        work("ctr", "ctr", lambda job: job.segments_by("sl_ctr")),
        work("all", "keys, open, verdict", Job.expand, lambda job: job.segments_by("sl_gcm_open"), Job.finish),
    ]
    name = f"aes{bits}-pieces"
    measure(context, name, f"AES-{bits}, {len(jobs)} launches of {size_text(sizes.piece)}", works)


def _grids(context: Context, job: Job) -> None:
    """How many multiprocessors it takes: the others are free for the model that runs meanwhile."""
    limits = [limit for limit in context.sizes.grids if limit < job.raw.grid]
    works = [
        Work(
            name=f"grid-{blocks}",
            label=f"{blocks} blocks",
            run=_kernel(job, "sl_gcm_open", blocks),
            parameters={"bytes": job.nbytes, "blocks": blocks},
        )
        for blocks in [*limits, job.raw.grid]
    ]
    measure(context, "grids", f"AES-256, {size_text(job.nbytes)}, by number of blocks", works)


def _constant_time(context: Context, raw: Raw, memory: torch.Tensor) -> None:
    """The same work over other keys and other data. The spread holds the clock's and the power limit's part as well."""
    total = context.sizes.kernel // 4
    fills: dict[str, Callable[[], object]] = {
        "zeros": lambda: memory.fill_(0),
        "ones": lambda: memory.fill_(255),
        "random": lambda: _fill(memory),
    }
    keys = {"zeros": [bytes(32)], "ones": [b"\xff" * 32], "random": [os.urandom(32)]}
    whole = Chunk(memory.data_ptr(), total, 0, bytes(12), bytes(16))

    def work(kind: str, fill: str) -> Work:
        job = Job(raw, [whole], keys[kind])
        job.do(job.expand)

        def run() -> float:
            fills[fill]()
            return _kernel(job, "sl_gcm_open")()

        return Work(name=f"{kind}-{fill}", label=f"key {kind}, data {fill}", run=run, parameters={"bytes": total})

    works = [work(kind, fill) for kind, fill in itertools.product(keys, fills)]
    found = measure(context, "constant-time", f"AES-256, {size_text(total)}, other keys and other data", works)
    medians = [e["median_seconds"]["run"] for e in found["entries"].values() if e["failure"] is None]
    if len(medians) == len(works):
        spread = max(medians) / min(medians)
        context.tell(f"   slowest / fastest: {spread:.4f}")
        amend(context, "constant-time", found, "random-random", spread=spread)
