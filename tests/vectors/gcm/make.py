"""Trim NIST's vectors to what the kernels take: ``python -m tests.vectors.gcm.make cryptography_vectors-*.whl``.

Kept are keys of 128 and 256 bits, IVs of 96 bits and tags of 128 bits: of each group the first five of the decryption files,
and the first three of the encryption files.
"""

from __future__ import annotations

import gzip
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
NAMES = ("gcmDecrypt128", "gcmDecrypt256", "gcmEncryptExtIV128", "gcmEncryptExtIV256")


def trimmed(text: str, keep: int) -> list[str]:
    """The lines of the wanted groups, with at most ``keep`` vectors each."""
    lines: list[str] = []
    group: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("["):
            name, _, value = line.strip("[]").partition(" = ")
            group[name] = value
        elif line.startswith("Count = "):
            wanted = group["IVlen"] == "96" and group["Taglen"] == "128" and int(line[8:]) < keep
            if wanted:
                lines.append(line)
        elif line and not line.startswith("#") and wanted:
            lines.append(line)
    return lines


def main(wheel: str) -> None:
    lines = []
    with zipfile.ZipFile(wheel) as archive:
        for name in NAMES:
            text = archive.read(f"cryptography_vectors/ciphers/AES/GCM/{name}.rsp").decode()
            lines += [f"# {name}", *trimmed(text, 5 if "Decrypt" in name else 3)]
    # No time and no name in the header: the same bytes every time.
    (HERE / "nist.rsp.gz").write_bytes(gzip.compress("\n".join(lines).encode(), 9, mtime=0))


if __name__ == "__main__":
    main(sys.argv[1])
