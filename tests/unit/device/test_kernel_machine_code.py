"""What NVRTC makes of the kernels: registers, no stack, and no secret that decides a branch or an address. Needs no GPU."""

from __future__ import annotations

import importlib
import shutil

import pytest

from secure_loader.core.device.nvrtc import Nvrtc
from secure_loader.errors import DeviceError
from tests.unit.device.shim import CSRC

KERNELS = ["sl_ctr", "sl_expand_keys", "sl_gcm_finish", "sl_gcm_open", "sl_gcm_seal", "sl_gcm_tag"]


@pytest.fixture
def audit(monkeypatch):
    """``csrc/audit.py``, which is a script."""
    try:
        Nvrtc()
    except DeviceError as e:
        pytest.skip(f"{e}")
    monkeypatch.syspath_prepend(CSRC)
    return importlib.import_module("audit")


@pytest.fixture
def disassembler(audit):
    found = audit.find_disassembler()
    if found is None:
        pytest.skip("no nvdisasm: pip install nvidia-cuda-nvdisasm")
    return found


@pytest.mark.parametrize("arch", [80, 90])
def test_no_stack_and_few_registers(audit, arch):
    kernels = audit.audit(arch, None)
    assert sorted(kernels) == KERNELS
    assert [kernel.faults for kernel in kernels.values()] == [[]] * len(KERNELS)
    assert all(16 < kernel.registers <= 80 for kernel in kernels.values())  # 80: three CTAs at a time


@pytest.mark.parametrize("arch", [80, 90])
def test_secrets_decide_nothing(audit, disassembler, arch):
    kernels = audit.audit(arch, disassembler)
    assert {name: kernel.faults for name, kernel in kernels.items()} == {name: [] for name in KERNELS}


PLANTED = {
    "a tag compared word by word": (
        "gcm.cu",
        "  if (threadIdx.x == 0) {  // all 16",
        "  if (threadIdx.x == 0 && tag.x == chunk.tag[0]) {  // all 16",
        "sl_gcm_finish",
        "a secret decides",
    ),
    "a table of the S-box": (
        "aes.cuh",
        "  sl_unslice(a, words);",
        "  a[0][0] ^= round_keys[1][a[1][1] & 31];\n  sl_unslice(a, words);",
        "sl_gcm_open",
        "a secret decides what it touches",
    ),
    "a loop as long as a key says": (
        "keys.cuh",
        "  u32 constant = 1;",
        "  u32 constant = 1;\n#pragma unroll 1\n  for (u32 i = 0; i < (words[0] & 7); ++i) words[1] = sl_sub_word(words[1]);",
        "sl_expand_keys",
        "a secret decides where it goes",
    ),
    "registers by index": (
        "segment.cuh",
        "SL_THREADS, words);\n",
        "SL_THREADS, words);\n        words[0][chunk.reserved[0] & 7] ^= words[1][chunk.reserved[1] & 7];\n",
        "sl_gcm_open",
        "local memory",
    ),
    "a multiplication that looks for zero": (
        "segment.cuh",
        "          hash = sl_gf_mul(",
        "          if (hash.w[0] | hash.w[1] | hash.w[2] | hash.w[3]) hash = sl_gf_mul(",
        "sl_gcm_seal",
        "a secret decides where it goes",
    ),
}


@pytest.mark.parametrize("fault", PLANTED.values(), ids=PLANTED)
def test_the_audit_finds(audit, disassembler, tmp_path, fault):
    name, old, new, kernel, message = fault
    for path in CSRC.glob("*.cu*"):
        shutil.copy(path, tmp_path)
    text = (tmp_path / name).read_text()
    assert text.count(old) == 1
    (tmp_path / name).write_text(text.replace(old, new))
    assert message in " ".join(audit.audit(90, disassembler, tmp_path)[kernel].faults)
