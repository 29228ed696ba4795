"""What the kernels have to do, case by case; each raises if they do not.

Pytest runs the cases in ``test_kernel.py``. The sanitizers and the planted faults need a process of their own, which they may bring down:

    python -m tests.unit.device.proof LIBRARY [CASE ...]
"""

from __future__ import annotations

import ctypes
import random
import sys
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from secure_loader.core.device import abi
from secure_loader.core.device.batch import Chunk
from secure_loader.core.secrets import Secret
from tests.unit.device.shim import FORWARD, REVERSE, SHUFFLED, Shim

POISON = 0xC3
ORDERS = (FORWARD, REVERSE, SHUFFLED)


class Memory:
    """Host memory of a known address, aligned to 64 bytes, of the very size that was asked for."""

    def __init__(self, content: bytes | int) -> None:
        data = bytes(content)
        self.size = len(data)
        self._raw = ctypes.create_string_buffer(len(data) + 63)
        self.address = -(-ctypes.addressof(self._raw) // 64) * 64
        ctypes.memmove(self.address, data, len(data))

    def read(self, start: int = 0, size: int | None = None) -> bytes:
        return ctypes.string_at(self.address + start, self.size - start if size is None else size)


@dataclass
class Message:
    """A plaintext, where its bytes lie in memory, and what it is to be sealed with."""

    plain: bytes
    offset: int  # from an address that is a multiple of 64
    key: int = 0
    nonce: bytes = bytes(12)
    aad: bytes = b""
    sealed: bytes = field(init=False, default=b"")
    tag: bytes = field(init=False, default=b"")


class Device:
    """A batch in "device" memory: messages between poisoned bytes, keys expanded."""

    def __init__(self, shim: Shim, keys: list[bytes], messages: list[Message], *, order: int = FORWARD) -> None:
        self.shim, self.messages, self.order = shim, messages, order
        for message in messages:
            if message.tag:
                continue  # it came sealed
            both = AESGCM(keys[message.key]).encrypt(message.nonce, message.plain, message.aad)
            message.sealed, message.tag = both[:-16], both[-16:]
        self.schedules = Memory(bytes([POISON]) * abi.SCHEDULE_BYTES * len(keys))
        raw = Memory(abi.pack_keys([Secret(key) for key in keys]))
        shim.expand(raw.address, self.schedules.address, len(keys), order=order)
        self.nwork = sum(abi.segments(len(m.plain)) for m in messages)
        self.partial = Memory(bytes([POISON]) * abi.PARTIAL_BYTES * self.nwork)
        self.size = max(m.offset + len(m.plain) for m in messages) + 64
        self.base = 0

    def place(self, contents: list[bytes]) -> Memory:
        """Memory that holds contents at the messages' offsets and poison elsewhere."""
        data = bytearray([POISON]) * self.size
        for message, content in zip(self.messages, contents, strict=True):
            data[message.offset : message.offset + len(content)] = content
        return Memory(bytes(data))

    def chunks(self, memory: Memory, source: Memory | None = None, shift: int = 0) -> tuple[Memory, Memory, Memory]:
        """Packed chunks, work items and associated data. A source holds the messages ``shift`` bytes further on."""
        chunks = [Chunk(memory.address + m.offset, len(m.plain), m.key, m.nonce, m.tag, m.aad) for m in self.messages]
        aad = Memory(abi.pack_aad(chunks))
        sources = None if source is None else [source.address + m.offset + shift for m in self.messages]
        packed = abi.pack_chunks(chunks, aad=aad.address, sources=sources)
        work = abi.pack_work(chunks)
        assert len(work) == abi.WORK_BYTES * self.nwork
        return Memory(packed), Memory(work), aad

    def open(self, sealed: Memory, *, grid: int = 2, out: Memory | None = None, shift: int = 0) -> list[int]:
        """Decrypt, in place unless ``out`` is given; the verdicts."""
        chunks, work, aad = self.chunks(out or sealed, sealed if out else None, shift)
        n, s = len(self.messages), self.schedules.address
        self.shim.open(chunks.address, work.address, self.nwork, s, self.partial.address, grid=grid, order=self.order)
        verdicts = Memory(4 * n)
        self.shim.finish(chunks.address, n, s, self.partial.address, verdicts.address, order=self.order)
        del aad  # alive until here: kernels read it
        found = verdicts.read()
        return [int.from_bytes(found[4 * i : 4 * i + 4], "little") for i in range(n)]

    def seal(self, plain: Memory, *, grid: int = 2) -> list[bytes]:
        """Encrypt in place; the tags."""
        chunks, work, aad = self.chunks(plain)
        n, s = len(self.messages), self.schedules.address
        self.shim.seal(chunks.address, work.address, self.nwork, s, self.partial.address, grid=grid, order=self.order)
        tags = Memory(16 * n)
        self.shim.tag(chunks.address, n, s, self.partial.address, tags.address, order=self.order)
        del aad
        return [tags.read(16 * i, 16) for i in range(n)]

    def ctr(self, memory: Memory, *, grid: int = 2) -> None:
        chunks, work, _ = self.chunks(memory)
        self.shim.ctr(chunks.address, work.address, self.nwork, self.schedules.address, grid=grid, order=self.order)

    def expect(self, memory: Memory, contents: list[bytes], what: str) -> None:
        """Memory holds these contents, and poison around them."""
        wanted = self.place(contents).read()
        found = memory.read()
        if found != wanted:
            at = next(i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)
            raise AssertionError(
                f"{what}: byte {at} of {len(wanted)} differs; messages at {[(m.offset, len(m.plain)) for m in self.messages]}"
            )


def all_ways(shim: Shim, keys: list[bytes], messages: list[Message], *, grid: int, order: int) -> None:
    """Open in place and elsewhere, seal, and CTR alone; every byte compared."""
    device = Device(shim, keys, messages, order=order)
    plain, sealed = [m.plain for m in messages], [m.sealed for m in messages]
    good = [abi.VERIFIED] * len(messages)

    memory = device.place(sealed)
    assert device.open(memory, grid=grid) == good, "a good tag was rejected"
    device.expect(memory, plain, "open in place")

    memory = device.place(plain)
    tags = device.seal(memory, grid=grid)
    device.expect(memory, sealed, "seal")
    assert tags == [m.tag for m in messages], "a tag is wrong"

    device.ctr(memory, grid=grid)
    device.expect(memory, plain, "CTR")


def lay_out(
    rng: random.Random, lengths: list[int], keys: int, aads: tuple[int, ...] = (0,), step: int = 1
) -> list[Message]:
    """Messages one behind the other with gaps of poison, at multiples of ``step``; a gap may be empty."""
    messages, at = [], rng.randrange(64)
    for length in lengths:
        at = -(-(at + rng.choice([0, 0, 1, 3, 17])) // step) * step
        aad = rng.randbytes(rng.choice(aads))
        messages.append(Message(rng.randbytes(length), at, rng.randrange(keys), rng.randbytes(12), aad))
        at += length
    return messages


def make_keys(rng: random.Random, count: int) -> list[bytes]:
    """AES-256 and AES-128 by turns."""
    return [rng.randbytes(16 if i % 2 else 32) for i in range(count)]


S = abi.SEGMENT_BYTES


def field_products(shim: Shim) -> None:
    """The field's product against the definition of SP 800-38D, bit by bit."""
    rng = random.Random(1)
    one, x, top = 1 << 127, 1 << 126, 1
    special = [0, one, x, top, (1 << 128) - 1, 0x11111111 << 96, 0x88888888, int("01" * 64, 2)]
    for a, b in [(a, b) for a in special for b in special] + [
        (rng.getrandbits(128), rng.getrandbits(128)) for _ in range(2000)
    ]:
        assert shim.gf_mul(a, b) == reference_product(a, b), f"{a:032x} times {b:032x}"


def reference_product(a: int, b: int) -> int:
    """SP 800-38D, algorithm 1."""
    z, v = 0, b
    for i in range(127, -1, -1):
        if a >> i & 1:
            z ^= v
        v = v >> 1 ^ (0xE1 << 120 if v & 1 else 0)
    return z


def key_schedules(shim: Shim) -> None:
    """Round keys as they come out of ``cryptography`` by way of E(0), and every power of H."""
    rng = random.Random(2)
    keys = [bytes(32), bytes(16), b"\xff" * 32, *make_keys(rng, 4)]
    raw = Memory(abi.pack_keys([Secret(key) for key in keys]))
    for order in ORDERS:
        schedules = Memory(bytes([POISON]) * (abi.SCHEDULE_BYTES * len(keys)))
        shim.expand(raw.address, schedules.address, len(keys), order=order)
        for index, key in enumerate(keys):
            schedule = schedules.read(index * abi.SCHEDULE_BYTES, abi.SCHEDULE_BYTES)
            assert int.from_bytes(schedule[1920:1924], "little") == (10 if len(key) == 16 else 14)
            h = int.from_bytes(Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(bytes(16)), "big")
            power = h
            for i in range(256):
                assert stored_power(schedule, 1936 + 16 * i) == power, f"H^{i + 1}"
                power = reference_product(power, h)
            for _ in range(4096 - 257):
                power = shim.gf_mul(power, h)
            assert stored_power(schedule, 1936 + 4096) == power, "H of a segment"


def stored_power(schedule: bytes, at: int) -> int:
    """A prepared power as the plain element: times x."""
    words = [int.from_bytes(schedule[at + 4 * i : at + 4 * i + 4], "little") for i in range(4)]
    return reference_product(sum(w << 32 * i for i, w in enumerate(words)), 1 << 126)


def short_lengths(shim: Shim) -> None:
    """0 to 70 bytes, and around every count of blocks where a thread, warp or tile begins; AADs of 0 to 40 bytes."""
    rng = random.Random(3)
    around = [16 * n + d for n in (32, 255, 256, 257, 512, 2048) for d in (-17, -16, -1, 0, 1, 16)]
    lengths = [*range(71), *around, 0, 1]
    rng.shuffle(lengths)
    messages = lay_out(rng, lengths, 5, (0, 0, 1, 12, 15, 16, 17, 31, 32, 33, 40))
    all_ways(shim, make_keys(rng, 5), messages, grid=3, order=FORWARD)


def around_segments(shim: Shim) -> None:
    """Chunks that end at, before or behind the end of a tile or segment, on grids of 1 to 5 CTAs."""
    rng = random.Random(4)
    lengths = [S // 2, S // 2 + 1, S - 1, S, S + 1, S + 4096, 2 * S - 16, 2 * S, 2 * S + 15, 3 * S + S // 2 + 17]
    for grid in range(1, 6):
        some = rng.sample(lengths, 2)
        messages = lay_out(rng, [0, *some, 5], 3, (0, 20))
        all_ways(shim, make_keys(rng, 3), messages, grid=grid, order=ORDERS[grid % 3])


def alignments(shim: Shim) -> None:
    """Every address modulo 16, in place; and from another address, aligned alike or not."""
    rng = random.Random(5)
    keys = make_keys(rng, 2)
    for offset in range(16):
        length = 4096 + rng.randrange(64)
        all_ways(
            shim,
            keys,
            [Message(rng.randbytes(length), 64 + offset, offset % 2, rng.randbytes(12))],
            grid=1,
            order=ORDERS[offset % 3],
        )
    for step, shift in ((16, 0), (16, 16), (16, 4), (4, 8), (1, 1), (16, 3)):
        messages = lay_out(rng, [5000, 4096, 31, 16, 0], 2, step=step)
        device = Device(shim, keys, messages)
        shifted = device.place([m.sealed for m in messages]).read()
        source = Memory(bytes(shift) + shifted)
        out = device.place([bytes([POISON]) * len(m.plain) for m in messages])
        assert device.open(source, out=out, shift=shift) == [abi.VERIFIED] * len(messages), f"shift {shift}"
        device.expect(out, [m.plain for m in messages], f"open elsewhere, shift {shift}")
        assert source.read() == bytes(shift) + shifted, "the source was changed"


def several_keys(shim: Shim) -> None:
    """Neighbouring segments under other keys, of both sizes, on one CTA: its keys are changed between them."""
    rng = random.Random(6)
    keys = make_keys(rng, 6)
    messages = lay_out(rng, [700, 5000, 90, 40000, 16, 3000, 12345, 8], 6)
    for i, message in enumerate(messages):
        message.key = i % 6
    for order in ORDERS:
        all_ways(shim, keys, messages, grid=1, order=order)


def long_chunk(shim: Shim) -> None:
    """A chunk of many segments, as version 1 of the format has one for a whole tensor."""
    rng = random.Random(7)
    messages = lay_out(rng, [37 * S + 4321], 1, (24,))
    all_ways(shim, make_keys(rng, 1), messages, grid=4, order=FORWARD)


def very_long_chunk(shim: Shim) -> None:
    """More whole segments than a CTA has threads, so that threads of the finish take runs of them: sums alone, by the field's own law.

    The segments' sums are made up; the tag that belongs to them is computed here. So no 20 MB have to be decrypted.
    """
    rng = random.Random(8)
    key, nonce = rng.randbytes(32), rng.randbytes(12)
    ecb = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    h = int.from_bytes(ecb.update(bytes(16)), "big")
    stride = h
    for _ in range(12):
        stride = reference_product(stride, stride)
    # The last is as long as AES-GCM allows but for its number of segments: 2^20 sums would be 16 MB for nothing more.
    for whole, rest in ((255, 1), (256, 4096), (257, 300), (1000, 256), (513, 4095)):
        nbytes = 16 * (4096 * whole + rest) - 5
        sums = [rng.getrandbits(128) for _ in range(whole + 1)]
        total = 0
        for value in sums[:-1]:
            total = reference_product(total, stride) ^ value
        for _ in range(rest):
            total = shim.gf_mul(total, h)
        total = reference_product(total ^ sums[-1] ^ 8 * nbytes, h)
        total ^= int.from_bytes(ecb.update(nonce + b"\0\0\0\1"), "big")
        schedule = Memory(bytes(abi.SCHEDULE_BYTES))
        raw = Memory(abi.pack_keys([Secret(key)]))
        shim.expand(raw.address, schedule.address, 1)
        words = b"".join((value >> 32 * i & 0xFFFFFFFF).to_bytes(4, "little") for value in sums for i in range(4))
        partial, tags = Memory(words), Memory(16)
        chunks = Memory(abi.pack_chunks([Chunk(0, nbytes, 0, nonce, bytes(16))]))
        shim.tag(chunks.address, 1, schedule.address, partial.address, tags.address, order=rng.choice(ORDERS))
        assert tags.read() == total.to_bytes(16, "big"), f"{whole} whole segments and {rest} blocks"


def last_blocks_of_the_longest(shim: Shim) -> None:
    """The last segment of the longest chunk there may be: offsets beyond 4 GiB, counters up to 2^32 - 1, which do not wrap.

    A 96-bit nonce begins at counter 1, and 2^36 - 32 bytes are 2^32 - 2 blocks, so the last counter is 2^32 - 1. The chunk's address is
    chosen so that its last segment falls into memory that is there; the segments before it are never touched.
    """
    rng = random.Random(9)
    key, nonce = rng.randbytes(32), rng.randbytes(12)
    last = abi.segments(abi.MAX_CHUNK_BYTES) - 1
    start = last * S
    sealed = rng.randbytes(abi.MAX_CHUNK_BYTES - start)
    first_counter = 2 + start // 16
    stream = Cipher(algorithms.AES(key), modes.CTR(nonce + first_counter.to_bytes(4, "big"))).encryptor()
    memory = Memory(sealed)
    schedule, raw = Memory(bytes(abi.SCHEDULE_BYTES)), Memory(abi.pack_keys([Secret(key)]))
    shim.expand(raw.address, schedule.address, 1)
    address = (memory.address - start) % 2**64
    chunks = Memory(abi.pack_chunks([Chunk(address, abi.MAX_CHUNK_BYTES, 0, nonce, bytes(16))]))
    work = Memory(b"\0\0\0\0" + last.to_bytes(4, "little"))
    shim.ctr(chunks.address, work.address, 1, schedule.address, grid=1)
    assert memory.read() == stream.update(sealed), "the last segment of the longest chunk"


def tampering(shim: Shim) -> None:
    """One bit changed in tag, ciphertext, nonce, AAD, key or length: that chunk alone is rejected."""
    rng = random.Random(10)
    keys = make_keys(rng, 3)
    messages = lay_out(rng, [0, 1, 16, 333, 4096, 70000, 20], 2, (0, 7, 16))
    for message in messages:
        if not message.plain:
            message.aad = b"only this"

    def flip(data: bytes, bit: int) -> bytes:
        return (int.from_bytes(data, "little") ^ 1 << bit).to_bytes(len(data), "little")

    def bad_tag(bit: int):
        return lambda m, s: setattr(m, "tag", flip(m.tag, bit))

    def bad_ciphertext(m: Message, s: bytearray) -> None:
        s[:] = flip(bytes(s), rng.randrange(8 * len(s)))

    changes = [
        *[(target, bad_tag(bit)) for target, bit in ((0, 0), (1, 31), (2, 32), (3, 63), (4, 95), (5, 96), (6, 127))],
        *[(target, bad_ciphertext) for target in (1, 2, 3, 4, 5, 6)],
        (5, lambda m, s: s.__setitem__(69999, s[69999] ^ 0x80)),
        (5, lambda m, s: s.__setitem__(0, s[0] ^ 1)),
        (3, lambda m, s: setattr(m, "nonce", flip(m.nonce, 95))),
        (0, lambda m, s: setattr(m, "aad", b"only thiS")),
        (0, lambda m, s: setattr(m, "aad", b"only this\0")),  # the padding of the last AAD block, but for its length
        (4, lambda m, s: setattr(m, "key", 2)),
        (3, lambda m, s: setattr(m, "plain", m.plain[:-1])),  # cut short by a byte
    ]
    for target, change in changes:
        device = Device(shim, keys, [copy(m) for m in messages])
        sealed = [bytearray(m.sealed) for m in device.messages]
        change(device.messages[target], sealed[target])
        found = device.open(device.place([bytes(data) for data in sealed]))
        wanted = [abi.REJECTED if i == target else abi.VERIFIED for i in range(len(messages))]
        assert found == wanted, f"message {target} was changed, verdicts {found}"


def random_batches(shim: Shim) -> None:
    """Whatever else there may be."""
    rng = random.Random(11)
    for trial in range(4):
        lengths = [
            rng.choice([rng.randrange(64), rng.randrange(5000), rng.randrange(2 * S)])
            for _ in range(rng.randrange(1, 5))
        ]
        messages = lay_out(rng, lengths, 3, (0, 5, 16, 40), step=rng.choice([1, 2, 4, 8, 16]))
        all_ways(shim, make_keys(rng, 3), messages, grid=rng.randrange(1, 6), order=ORDERS[trial % 3])


CASES = {
    case.__name__: case
    for case in (
        field_products,
        key_schedules,
        short_lengths,
        several_keys,
        alignments,
        tampering,
        around_segments,
        very_long_chunk,
        last_blocks_of_the_longest,
        random_batches,
        long_chunk,
    )
}


def main(arguments: list[str]) -> int:
    """Run cases, all by default; the first one that fails ends the process with a traceback."""
    shim = Shim(Path(arguments[0]))
    for name in arguments[1:] or CASES:
        CASES[name](shim)
        print(name, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
