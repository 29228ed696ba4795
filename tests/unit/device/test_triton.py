"""The Triton kernels without a GPU: run in Triton's interpreter, and compiled ahead of time for GPUs of both makers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("torch", reason="PyTorch is not installed")

SCRIPT = Path(__file__).with_name("triton_interpreted.py")
CHECKS = re.findall(r"^def (check_\w+)", SCRIPT.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    """What became of each check. In another process: Triton decides when it is imported whether it interprets."""
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    ran = subprocess.run(
        [sys.executable, "-W", "error", SCRIPT], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(interpreted, name):
    assert interpreted[name].startswith("passed"), interpreted[name]


def test_sbox_on_every_byte():
    from secure_loader.core.device.triton_sbox import sub_bytes

    def times(a: int, b: int) -> int:
        product = 0
        for i in range(8):
            product ^= a * (b >> i & 1)
            a = a << 1 ^ (0x11B if a & 0x80 else 0)
        return product

    def sbox(a: int) -> int:
        inverse = next((b for b in range(256) if times(a, b) == 1), 0)
        turns = [(inverse << n | inverse >> (8 - n)) & 0xFF for n in range(5)]
        return 0x63 ^ turns[0] ^ turns[1] ^ turns[2] ^ turns[3] ^ turns[4]

    # Bit a of word i is bit i of the byte a: all bytes in one go.
    words = tuple(sum((a >> i & 1) << a for a in range(256)) for i in range(8))
    out = sub_bytes.fn(words)
    assert [sum((out[i] >> a & 1) << i for i in range(8)) ^ 0x63 for a in range(256)] == [sbox(a) for a in range(256)]


def test_host_memory_is_the_hosts_whatever_the_default_device():
    import torch

    from secure_loader.core.device.triton_place import Gpu, Interpreter

    gpu = Gpu.__new__(Gpu)  # of which nothing else is needed
    with torch.device("meta"):
        assert Interpreter().host(8).device.type == "cpu"
        if torch.cuda.is_available():
            assert gpu.host(8).is_pinned()
        else:
            with pytest.raises(RuntimeError, match=r"driver|accelerator"):
                gpu.host(8)


def test_host_and_kernels_agree():
    from secure_loader.core.device import triton_aes, triton_gcm, triton_ghash, triton_kernels, triton_tables

    assert triton_gcm.TILES.value == triton_tables.TILES
    assert triton_aes.ENCRYPTED_WORDS.value == triton_tables.ENCRYPTED_WORDS
    assert triton_ghash.POWERS.value == triton_tables.POWERS
    assert triton_tables._PLACE.size == 8 * triton_gcm.PLACE.value
    assert triton_kernels._VERIFIED == triton_gcm.VERIFIED.value != triton_gcm.REJECTED.value


def test_no_gpu_is_an_error_of_ours():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    from secure_loader.core.device.triton_kernels import TritonKernels
    from secure_loader.errors import DeviceError

    with pytest.raises(DeviceError, match="there is no GPU 0"):
        TritonKernels(0)


# Registers of a lane that open_segments may use: with 128, sixteen of the one-warp programs fit on a multiprocessor.
TARGETS = {"sm_80": ("cuda", 80, 32, 128), "sm_90": ("cuda", 90, 32, 128), "gfx942": ("hip", "gfx942", 64, 128)}


@pytest.mark.parametrize("target", TARGETS)
def test_compiles_ahead_of_time(target, tmp_path, monkeypatch):
    """No shared memory, where secrets would stay behind, and no stack: nothing is spilled."""
    from triton.backends.compiler import GPUTarget

    backend, arch, warp, budget = TARGETS[target]
    if {"cuda": "nvidia", "hip": "amd"}[backend] not in triton.backends.backends:
        pytest.skip(f"this Triton does not compile for {backend}")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    used = {}
    for name, kernel in compiled(GPUTarget(backend, arch, warp)):
        assert kernel.metadata.shared == 0, name
        used[name], stack = resources(kernel, tmp_path)
        assert stack == 0, name
    assert len(used) == 7
    assert max(used.values()) == used["open_segments"] <= budget


def compiled(target):
    """Every kernel, with the arguments that it gets in a launch."""
    from triton.compiler import ASTSource

    from secure_loader.core.device import triton_aes, triton_gcm, triton_ghash
    from secure_loader.core.device.triton_kernels import _WARP, _WIPE
    from secure_loader.core.device.triton_tables import POWERS, TILES

    constants = {
        "STRIDE": POWERS + 4 * target.warp_size,
        "BLOCK": target.warp_size,
        "SHIFT": (TILES * 8 * target.warp_size).bit_length() - 1,
    }
    types = {"places": "*i64", "count": "i32", "bits": "i32"}
    for function in (
        triton_aes.expand_keys,
        triton_aes.encrypt_blocks,
        triton_ghash.raise_key,
        triton_gcm.open_segments,
        triton_gcm.sum_segments,
        triton_gcm.judge,
        triton_gcm.wipe_chunks,
    ):
        name = function.fn.__name__
        given = _WIPE if name == "wipe_chunks" else constants
        signature = {a: "constexpr" if a in given else types.get(a, "*i32") for a in function.arg_names}
        pointers = [i for i, a in enumerate(function.arg_names) if signature[a].startswith("*")]
        source = ASTSource(
            fn=function,
            signature=signature,
            constexprs={(i,): given[a] for i, a in enumerate(function.arg_names) if a in given},
            attrs={(i,): [["tt.divisibility", 16]] for i in pointers},
        )
        yield name, triton.compile(source, target=target, options=_WARP)


def resources(kernel, folder: Path) -> tuple[int, int]:
    """Registers of a lane, and bytes of its stack, from the machine code."""
    if "amdgcn" in kernel.asm:
        number = {k: int(v) for k, v in re.findall(r"\.(\w+):\s+(\d+)", kernel.asm["amdgcn"])}
        spilled = number["vgpr_spill_count"] + number["sgpr_spill_count"]
        return number["vgpr_count"], number["private_segment_fixed_size"] + spilled
    dump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not dump.exists():
        pytest.skip("this Triton comes without cuobjdump")
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    text = subprocess.run([dump, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    registers, stack, local = re.search(r"REG:(\d+) STACK:(\d+) SHARED:0 LOCAL:(\d+)", text).groups()
    return int(registers), int(stack) + int(local)
