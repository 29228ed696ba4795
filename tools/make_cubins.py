"""Compiles csrc/ into the cubins that the wheel carries. ``make cubins`` calls it, with the NVRTC that release builds use."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from secure_loader.core.device import cubins, nvrtc, sources


def main() -> int:
    """Write the cubins, or with ``--check`` compare those that are there with what would be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a byte would change")
    check = parser.parse_args().check
    compiler = nvrtc.Nvrtc()
    source = sources.read()
    index = cubins.Index(source.fingerprint, compiler.version, list(nvrtc.OPTIONS))
    made = [cubins.Cubin(arch, compiler.compile(source, arch)) for arch in cubins.ARCHITECTURES]
    if not check:
        cubins.write(index, made)
        print(f"{len(made)} cubins, {sum(len(c.image) for c in made):,} bytes, NVRTC {compiler.version}")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch)
        cubins.write(index, made, fresh)
        differ = sorted(name for name in _names(fresh) | _names(cubins.IMAGES) if not _same(name, fresh))
    print(f"differ from what NVRTC {compiler.version} makes: {', '.join(differ)}" if differ else "no byte differs")
    return len(differ) > 0


def _names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()} if folder.is_dir() else set()


def _same(name: str, fresh: Path) -> bool:
    one, other = fresh / name, cubins.IMAGES / name
    return one.is_file() and other.is_file() and one.read_bytes() == other.read_bytes()


if __name__ == "__main__":
    sys.exit(main())
