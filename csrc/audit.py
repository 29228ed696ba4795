"""Read the machine code: what the kernels use, and whether a secret decides where they go or what they touch.

    python csrc/audit.py [--disassembler nvdisasm] [80 90 ...]

For every architecture the kernels are compiled by NVRTC, which takes no GPU. Registers and stack are read from the cubin itself. With
nvdisasm (PyPI: nvidia-cuda-nvdisasm) every instruction of the kernels is followed, by the rules of `taint.py`.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).resolve().parent)]

import taint  # noqa: E402

from secure_loader.core.device.nvrtc import Nvrtc  # noqa: E402
from secure_loader.core.device.sources import Sources  # noqa: E402

REGISTER_BUDGET = {"sl_gcm_open": 72, "sl_gcm_seal": 72, "sl_ctr": 64}
"""On sm_90. Three CTAs of 256 threads fit a multiprocessor up to 80, four up to 64."""

_REGISTERS, _FRAME, _STACK, _PARAMETERS = 0x2F, 0x11, 0x12, 0x0A  # EIATTR_*, as nvdisasm names them


@dataclass
class Kernel:
    """What the cubin says of one function."""

    registers: int = 0
    frame: int = 0
    stack: int = 0
    parameters: int = 0  # offset in constant bank 0
    faults: list[str] = field(default_factory=list)


@functools.cache
def compile_for(arch: int, folder: Path = ROOT / "csrc") -> bytes:
    """The cubin for sm_<arch>."""
    files = {path.name: path.read_text() for path in sorted(folder.glob("*.cu*"))}
    return Nvrtc().compile(Sources(files), arch)


def resources(cubin: bytes) -> dict[str, Kernel]:
    """Registers and stack by function, from the sections .nv.info of the ELF file."""
    (at,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names_index = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, at + size * i) for i in range(count)]

    def content(header: tuple[int, ...]) -> bytes:
        return cubin[header[4] : header[4] + header[5]]

    def text(table: bytes, start: int) -> str:
        return table[start : table.index(b"\0", start)].decode()

    names = content(headers[names_index])
    sections = {text(names, header[0]): header for header in headers}
    strings = content(sections[".strtab"])
    symbols = [text(strings, entry[0]) for entry in struct.iter_unpack("<IBBHQQ", content(sections[".symtab"]))]
    found: dict[str, Kernel] = {}
    for name, header in sections.items():
        if not name.startswith(".nv.info"):
            continue
        info, i = content(header), 0
        while i < len(info):
            kind, attribute, value = struct.unpack_from("<BBH", info, i)
            i += 4
            if kind != 4:  # no payload of its own
                continue
            payload = info[i : i + value]
            i += value
            if attribute in (_REGISTERS, _FRAME, _STACK):
                symbol, number = struct.unpack("<II", payload)
                kernel = found.setdefault(symbols[symbol], Kernel())
                attributes = {_REGISTERS: "registers", _FRAME: "frame", _STACK: "stack"}
                setattr(kernel, attributes[attribute], number)
            elif attribute == _PARAMETERS:
                found.setdefault(name.removeprefix(".nv.info."), Kernel()).parameters = struct.unpack_from(
                    "<H", payload, 4
                )[0]
    return {name: kernel for name, kernel in found.items() if name.startswith("sl_")}


def find_disassembler() -> str | None:
    """Nvdisasm: of the package for this Python, or on the PATH."""
    try:
        for path in metadata.files("nvidia-cuda-nvdisasm") or []:
            if path.name == "nvdisasm":
                return str(path.locate())
    except metadata.PackageNotFoundError:
        pass
    return shutil.which("nvdisasm")


def disassemble(cubin: bytes, disassembler: str) -> str:
    """The text of nvdisasm."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([disassembler, "-c", file.name], capture_output=True, check=True, text=True).stdout


def audit(arch: int, disassembler: str | None, folder: Path = ROOT / "csrc") -> dict[str, Kernel]:
    """All kernels for one architecture, with every fault that was found."""
    cubin = compile_for(arch, folder)
    kernels = resources(cubin)
    code = taint.functions(disassemble(cubin, disassembler)) if disassembler else {}
    for name, kernel in kernels.items():
        if kernel.frame or kernel.stack:
            kernel.faults.append(f"{kernel.frame} bytes of frame, {kernel.stack} of stack")
        budget = REGISTER_BUDGET.get(name, 255) if arch == 90 else 255
        if kernel.registers > budget:
            kernel.faults.append(f"{kernel.registers} registers, not {budget}")
        if name in code:
            kernel.faults += taint.check(name, code[name], kernel.parameters)
        elif disassembler:
            kernel.faults.append("the disassembler does not show it")
    return kernels


def main() -> int:
    """Audit, print a line for each kernel, and say with the status whether all is well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disassembler", default=find_disassembler())
    parser.add_argument("architectures", nargs="*", type=int, help="80 for sm_80; by default 80 and 90")
    arguments = parser.parse_args()
    if arguments.disassembler is None:
        print("no nvdisasm: registers and stack only (pip install nvidia-cuda-nvdisasm)")
    faults = 0
    for arch in arguments.architectures or [80, 90]:
        for name, kernel in sorted(audit(arch, arguments.disassembler).items()):
            faults += len(kernel.faults)
            print(
                f"sm_{arch}  {name:16}  {kernel.registers:3} registers  {kernel.stack:2} stack  {'; '.join(kernel.faults) or 'ok'}"
            )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
