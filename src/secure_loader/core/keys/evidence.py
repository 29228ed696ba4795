"""Evidence of where this process runs, for a broker that hands keys to attested machines only.

An evidence provider signs 48 to 64 bytes that the broker's nonce and our public key go into. ``tsm`` and ``sample`` are
built in; others are found by the entry-point group ``secure_loader.evidence_providers``, where the entry point's name is
what the setting ``kbs_evidence`` calls it.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from ...errors import ConfigError, KeyAccessError

ENTRY_POINTS = "secure_loader.evidence_providers"
TSM_REPORTS = Path("/sys/kernel/config/tsm/report")
EVENT_LOG = Path("/sys/firmware/acpi/tables/data/CCEL")
REPORT_DATA = 64
_MAX_BLOB = 1 << 20


class EvidenceProvider(Protocol):
    """Has a piece of hardware sign for this process."""

    def tee(self) -> str:
        """What the broker's protocol calls the hardware: ``tdx``, ``snp``, ``cca``, ``nvidia``, …

        Raises:
            KeyAccessError: There is no such hardware here.
        """
        ...

    def evidence(self, report_data: bytes) -> Any:
        """What it signs, in the form that the broker's verifier for it reads.

        Args:
            report_data: 32 to 64 bytes that have to be inside.

        Returns:
            JSON, parsed.

        Raises:
            KeyAccessError: It does not sign.
        """
        ...


class SampleProvider:
    """Claims to be what Trustee calls its sample attester. It proves nothing: for tests, against brokers of tests."""

    def tee(self) -> str:
        """See :meth:`EvidenceProvider.tee`."""
        return "sample"

    def evidence(self, report_data: bytes) -> Any:
        """See :meth:`EvidenceProvider.evidence`."""
        return {"svn": "1", "report_data": _b64(report_data)}


class TsmProvider:
    """Reports of the kernel's Trusted Security Module interface (configfs-tsm, Linux 6.7): Intel TDX and Arm CCA.

    AMD's reports come by the same way, but Trustee wants them taken apart, in a form that changes with its version; in an
    SEV-SNP guest let the guest components attest, and use the modes ``cdh`` or ``token``.

    Args:
        reports: Folder of the interface.
        event_log: ACPI table with the boot's event log; goes along with TDX quotes where it can be read.
    """

    def __init__(self, reports: Path = TSM_REPORTS, event_log: Path = EVENT_LOG) -> None:
        self._reports, self._event_log = reports, event_log

    def tee(self) -> str:
        """See :meth:`EvidenceProvider.tee`."""
        with self._entry() as entry:
            return _tee_of(entry)

    def evidence(self, report_data: bytes) -> Any:
        """See :meth:`EvidenceProvider.evidence`."""
        with self._entry() as entry:
            tee = _tee_of(entry)
            _write(entry / "inblob", report_data.ljust(REPORT_DATA, b"\0"))
            blob = _read(entry / "outblob")
            # The kernel counts what is written: somebody else's inblob may have gone between.
            if _read(entry / "generation").strip() != b"1":
                raise KeyAccessError("another process wrote to our entry of the TSM interface", path=entry)
        if tee == "cca":
            return {"token": list(blob)}
        log = _read(self._event_log) if os.access(self._event_log, os.R_OK) else None
        return {"cc_eventlog": None if log is None else _b64(log), "quote": _b64(blob)}

    @contextlib.contextmanager
    def _entry(self) -> Iterator[Path]:
        """An entry of our own, which the kernel fills."""
        entry = self._reports / f"secure-loader-{secrets.token_hex(8)}"
        try:
            os.mkdir(entry, 0o700)
        except OSError as e:
            raise KeyAccessError(
                f"this machine cannot attest itself: {e.strerror}",
                path=self._reports,
                hint="kbs_evidence = tsm needs a confidential guest with Linux 6.7 and configfs, and the right to write there",
            ) from None
        try:
            yield entry
        finally:
            with contextlib.suppress(OSError):
                os.rmdir(entry)


_TSM_TEES = {b"tdx_guest": "tdx", b"arm_cca_guest": "cca"}


def _tee_of(entry: Path) -> str:
    name = _read(entry / "provider").strip()
    if name not in _TSM_TEES:
        raise KeyAccessError(
            f"reports of {name[:40].decode('ascii', 'replace')!r} are not in a form that we can hand to a broker",
            hint='let the guest components attest: kbs_mode = "cdh" or "token"',
        )
    return _TSM_TEES[name]


def _write(path: Path, data: bytes) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            # One write is one attribute to configfs.
            written = os.write(fd, data)
        finally:
            os.close(fd)
    except OSError as e:
        raise KeyAccessError(f"the TSM interface takes no request: {e.strerror}", path=path) from None
    if written != len(data):
        raise KeyAccessError("the TSM interface takes a part of the request", path=path)


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb") as f:
            data = f.read(_MAX_BLOB + 1)
    except OSError as e:
        raise KeyAccessError(f"evidence cannot be read: {e.strerror}", path=path) from None
    if not 0 < len(data) <= _MAX_BLOB:
        raise KeyAccessError(f"evidence is empty, or larger than {_MAX_BLOB} bytes", path=path)
    return data


BUILT_IN: dict[str, type[EvidenceProvider]] = {"tsm": TsmProvider, "sample": SampleProvider}


def evidence_provider(name: str) -> EvidenceProvider:
    """The evidence provider of a name.

    Raises:
        ConfigError: There is none, or there are several.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    hits = list(entry_points(group=ENTRY_POINTS, name=name))
    if len(hits) != 1:
        known = sorted({*BUILT_IN, *(e.name for e in entry_points(group=ENTRY_POINTS))})
        many = f"{len(hits)} packages claim" if hits else "there is no"
        raise ConfigError(f"{many} evidence provider {name!r}; there are {', '.join(known)}")
    made: EvidenceProvider = hits[0].load()()
    return made


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
