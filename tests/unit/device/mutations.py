"""Faults planted into the kernels, one at a time: the proof has to catch every one.

    python -m tests.unit.device.mutations [NUMBER ...]

Every fault is built, and run against the cases of ``proof`` in a process of its own, until a case fails. A fault that none catches is a hole
in the proof, and the script ends with status 1.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.unit.device.shim import CSRC, ROOT, build, sources


class Fault(NamedTuple):
    """A passage of a file, which is there once, and what takes its place."""

    what: str
    file: str
    old: str
    new: str


BARRIER = "__syncthreads();"
FAULTS = [
    Fault("no barrier before the next segment's keys", "segment.cuh", f"{BARRIER}  // the last segment's", "// the last segment's"),
    Fault("no barrier behind the next segment's keys", "segment.cuh", f"    {BARRIER}\n\n", "\n"),
    Fault("no barrier within the sum of a CTA", "cta.cuh", f"  {BARRIER}\n  if (threadIdx.x == 0)", "  if (threadIdx.x == 0)"),
    Fault("no barrier before the wipe", "cta.cuh", f"  {BARRIER}\n  volatile", "  volatile"),
    Fault("no barrier behind the finish's keys", "finish.cuh", f"  {BARRIER}\n", ""),
    Fault("no barrier between powers of H", "keys.cuh", f"    {BARRIER}\n    if (tid < known)", "    if (tid < known)"),
    Fault("no barrier behind the key's words", "keys.cuh", f"shared.words);\n  {BARRIER}", "shared.words);"),
    Fault("no barrier before H", "keys.cuh", f"  {BARRIER}\n  if (tid == 0) {{  // H", "  if (tid == 0) {  // H"),
    Fault("keys and key stream left in shared memory", "segment.cuh", "  sl_wipe(shared);\n", ""),
    Fault("a key left in shared memory by the expansion", "gcm.cu", "schedules[blockIdx.x], shared);\n  sl_wipe(shared);", "schedules[blockIdx.x], shared);"),
    Fault("the end of shared memory is not wiped", "cta.cuh", "i < sizeof(Shared) / 4", "i < sizeof(Shared) / 4 - 4"),
    Fault("wrong power of H for a thread's last block", "segment.cuh", "behind = nblocks - 1 - block", "behind = nblocks - block"),
    Fault("wrong step of Horner's scheme", "segment.cuh", "behind : SL_THREADS - 1]", "behind : SL_THREADS - 2]"),
    Fault("wrong power of H for a segment", "keys.cuh", "SL_SEGMENT_BLOCKS / SL_THREADS)", "SL_SEGMENT_BLOCKS / SL_THREADS - 1)"),
    Fault("a block too early the last of its thread", "segment.cuh", "behind < SL_THREADS ?", "behind < 2 * SL_THREADS ?"),
    Fault("tail written as a whole block", "block.cuh", "i < nbytes; ++i) sl_write1", "i < 16; ++i) sl_write1"),
    Fault("tail read as a whole block", "block.cuh", "i < nbytes ? (u8)sl_read1(p + i) : 0", "(u8)sl_read1(p + i)"),
    Fault("key stream behind a sealed tail is hashed", "segment.cuh", "length >= 16 ? after : sl_cut(after, length)", "after"),
    Fault("the mask of a tail is a byte short", "block.cuh", "nbytes >= first + 4", "nbytes >= first + 3"),
    Fault("counters begin at 1", "segment.cuh", "counter = 2 + segment", "counter = 1 + segment"),
    Fault("the second tile repeats the counters of the first", "segment.cuh", "counter + tile, SL_THREADS", "counter, SL_THREADS"),
    Fault("every segment begins with the same counter", "segment.cuh", "2 + segment * SL_SEGMENT_BLOCKS + tid", "2 + tid"),
    Fault("counter in the wrong byte order", "bitslice.cuh", "((3 - row) << 12) | 0x444", "(row << 12) | 0x444"),
    Fault("a block's number taken for its neighbour's", "segment.cuh", "const u32 block = tile + k * SL_THREADS + tid", "const u32 block = tile + k * SL_THREADS + (tid ^ 1)"),
    Fault("the plaintext is hashed", "segment.cuh", "sl_gf_of_block(before)", "sl_gf_of_block(after)"),
    Fault("the verdict looks at 12 bytes of the tag", "gcm.cu", " | (tag.w ^ chunk.tag[3])", ""),
    Fault("the verdict looks at 31 of 32 bits", "gcm.cu", "differ == 0", "(differ & 0x7fffffffu) == 0"),
    Fault("accepted before it was compared", "gcm.cu", "differ == 0 ? SL_VERIFIED : SL_REJECTED", "SL_VERIFIED"),
    Fault("wrong length of the last segment", "finish.cuh", "nblocks - whole * SL_SEGMENT_BLOCKS", "nblocks - nsegments * SL_SEGMENT_BLOCKS + SL_SEGMENT_BLOCKS - 1"),
    Fault("wrong power behind a run of segments", "finish.cuh", "whole - end)", "whole - first)"),
    Fault("the last run goes on behind the last whole segment", "finish.cuh", "first + run < whole ? first + run : whole", "first + run"),
    Fault("the last AAD block is not padded with zeros", "finish.cuh", "sl_read1(aad + start + i) : 0", "sl_read1(aad + start + i) : 0x80"),
    Fault("the AAD's length is forgotten", "finish.cuh", "(u64)chunk.aad_nbytes * 8", "(u64)0"),
    Fault("the AAD is counted as part of the last segment", "finish.cuh", "sl_gf_power(stride, whole)", "sl_gf_power(stride, nsegments)"),
    Fault("lengths are swapped", "finish.cuh", "lengths.w[1] = (u32)(bits >> 32); lengths.w[0] = (u32)bits;", "lengths.w[0] = (u32)(bits >> 32); lengths.w[1] = (u32)bits;"),
    Fault("the tag is masked with the first block's key stream", "finish.cuh", "schedule.rounds, 1, 0, words", "schedule.rounds, 2, 0, words"),
    Fault("AES-128 with the rounds of AES-256", "keys.cuh", "rounds = size + 6", "rounds = 14"),
    Fault("AES-256 without its second substitution", "keys.cuh", "(size == 8 && at == 4)", "(size == 8 && at == 5)"),
    Fault("RotWord the other way", "keys.cuh", "(t >> 8) | (t << 24)", "(t << 8) | (t >> 24)"),
    Fault("round constants do not wrap", "keys.cuh", "0x11bu", "0x11au"),
    Fault("one gate of the S-box", "sbox.cuh", "const u32 t2 = sl_lop3<0x96>", "const u32 t2 = sl_lop3<0x97>"),
    Fault("MixColumns forgets x^4", "aes.cuh", "bit == 1 || bit == 3 || bit == 4", "bit == 1 || bit == 3"),
    Fault("one round too few", "aes.cuh", "u32 r = 1; r < rounds", "u32 r = 2; r < rounds"),
    Fault("the nonce without its last word", "aes.cuh", "sl_slice(nonce, 3, i)", "sl_slice(nonce, 2, i)"),
    Fault("the reduction folds to the wrong place", "gf128.cuh", "(word >> 7)", "(word >> 6)"),
    Fault("a carry spoils a product", "gf128.cuh", "x & 0x11111111u", "x & 0x55555555u"),
    Fault("H is not prepared where x^0 is set", "gf128.cuh", "(one & 0xc2000000u)", "(one & 0xc0000000u)"),
    Fault("words are taken for 16 aligned bytes", "block.cuh", "(bits & 15) == 0", "(bits & 3) == 0"),
    Fault("bytes are taken for aligned words", "block.cuh", "(bits & 3) == 0 ? 4 : 1", "(bits & 1) == 0 ? 4 : 1"),
    Fault("only the target's alignment is looked at", "block.cuh", "(u64)in | (u64)out", "(u64)out"),
    Fault("offsets in a chunk are cut to 32 bits", "segment.cuh", "(u64)segment * SL_SEGMENT_BYTES", "(u64)(segment * SL_SEGMENT_BYTES)"),
    Fault("the last block is left out if it is short", "segment.cuh", "(nbytes + 15) / 16", "nbytes / 16"),
    Fault("sums of all chunks in one place", "segment.cuh", "partial[chunk.first_segment + segment]", "partial[segment]"),
    Fault("every chunk under the first key", "segment.cuh", "schedules[chunk.key]", "schedules[0]"),
    Fault("a CTA leaves out every other segment", "segment.cuh", "item += gridDim.x", "item += 2 * gridDim.x"),
]  # fmt: skip


class Outcome(NamedTuple):
    caught: bool
    by: str


def plant(fault: Fault, into: Path) -> None:
    """A copy of the kernels with this fault.

    Raises:
        LookupError: The passage is not there, or more than once.
    """
    for path in sources():
        target = into / path.relative_to(CSRC)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text())
    text = (into / fault.file).read_text()
    if text.count(fault.old) != 1:
        raise LookupError(f"{fault.what}: {fault.file} has {fault.old!r} {text.count(fault.old)} times, not once")
    (into / fault.file).write_text(text.replace(fault.old, fault.new))


def run(fault: Fault, *, seconds: int = 120) -> Outcome:
    """Build the fault and let the proof look for it."""
    with tempfile.TemporaryDirectory() as folder:
        csrc = Path(folder) / "csrc"
        plant(fault, csrc)
        # Warnings would catch some of them, but it is the proof that is tested here.
        library = build(csrc, ["-O1", "-w"], into=Path(folder))
        try:
            proof = subprocess.run(
                [sys.executable, "-m", "tests.unit.device.proof", os.fspath(library)],
                env=os.environ | {"PYTHONPATH": os.pathsep.join([os.fspath(ROOT / "src"), os.fspath(ROOT)])},
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Outcome(caught=True, by="it never ends")
    if proof.returncode == 0:
        return Outcome(caught=False, by="")
    lines = proof.stderr.strip().splitlines() or [f"status {proof.returncode}"]
    return Outcome(caught=True, by=lines[-1])


def main(numbers: list[str]) -> int:
    """Run all faults, or those with these numbers, and print a table."""
    chosen = [int(n) for n in numbers] or range(1, len(FAULTS) + 1)
    missed = 0
    for number in chosen:
        fault = FAULTS[number - 1]
        outcome = run(fault)
        missed += not outcome.caught
        print(
            f"{number:3}  {'caught' if outcome.caught else 'MISSED'}  {fault.what:62}  {outcome.by[:100]}", flush=True
        )
    print(f"{len(chosen) - missed} of {len(chosen)} faults caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
