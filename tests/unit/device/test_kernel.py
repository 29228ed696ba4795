"""The kernels on the CPU: every case of ``proof``, here and under the sanitizers; and what the shim itself would notice."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.unit.device import proof
from tests.unit.device.conftest import skip_or_fail
from tests.unit.device.shim import CSRC, ROOT, SANITIZED, Shim, ShimError, asan_runtime, build


@pytest.mark.parametrize("case", proof.CASES.values(), ids=proof.CASES)
def test_kernel(shim, case):
    case(shim)


def test_kernel_under_the_sanitizers():
    runtime = asan_runtime()
    if runtime is None:
        skip_or_fail("no g++, or one without AddressSanitizer")
    environment = os.environ | {
        "LD_PRELOAD": os.fspath(runtime),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python frees next to nothing at its end
        "PYTHONMALLOC": "malloc",  # one allocation each, with poison around it
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    # The others take the same steps, more often.
    cases = [name for name in proof.CASES if name not in ("long_chunk", "tampering", "random_batches")]
    run = subprocess.run(
        [sys.executable, "-m", "tests.unit.device.proof", os.fspath(build(flags=SANITIZED)), *cases],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == cases


def changed(tmp_path, name, old, new) -> Shim:
    """The kernels with one passage replaced."""
    copy = tmp_path / "csrc"
    (copy / "shim").mkdir(parents=True)
    for path in [*CSRC.glob("*.cu*"), *CSRC.glob("shim/*")]:
        (copy / path.relative_to(CSRC)).write_text(path.read_text())
    text = (copy / name).read_text()
    assert text.count(old) == 1
    (copy / name).write_text(text.replace(old, new))
    return Shim(build(copy, ["-O1", "-w"], into=tmp_path))


def test_the_shim_notices_what_kernels_must_not_do(shim, tmp_path):
    kernels = changed(
        tmp_path,
        "gcm.cu",
        "  if (blockIdx.x >= nkeys) return;",
        """  if (keys->reserved[0] == 1) return (void)(shared.words[5] = 1);           // leaves something behind
  if (keys->reserved[0] == 2 && threadIdx.x == 40) return;                  // others wait in vain
  if (keys->reserved[0] == 3 && threadIdx.x == 40) __shfl_xor_sync(0u, 0u, 1);
  if (keys->reserved[0] == 4) sl_write1((u8 *)schedules, 0);                // in no chunk""",
    )
    for fault, message in [
        (1, "shared memory was not wiped"),
        (2, "only some threads reach a barrier"),
        (3, "only some lanes of a warp take part"),
        (4, "write outside of all chunks"),
    ]:
        key = proof.Memory(bytes(32) + (32).to_bytes(4, "little") + fault.to_bytes(4, "little") + bytes(8))
        schedule = proof.Memory(6048)
        with pytest.raises(ShimError, match=message):
            kernels.expand(key.address, schedule.address, 1)
    good = proof.Memory(bytes(32) + (32).to_bytes(4, "little") + bytes(12))
    kernels.expand(good.address, schedule.address, 1)  # and goes on after a fault
    shim.expand(good.address, schedule.address, 1)
