"""What measurements of a model come to: lines of a table, and what to change where something is slow."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..config import LoaderConfig
from .measure import Result
from .tasks import FLOOR, MAPPED, OWNED, SECURE

_LAST = ("touch", "load")
_SPREAD, _MEASURABLE = 1.5, 0.02  # repetitions that differ by more, where they take more seconds than that
_CACHED = 0.95


@dataclass(frozen=True)
class Line:
    """One way of loading everything.

    Attributes:
        name: Of the task.
        opening: Median seconds until the files were open, verified and unlocked; None for the floor.
        seconds: Median seconds until all tensors were there.
        bytes_per_second: Of plaintext.
        over_floor: ``seconds`` divided by the floor's.
        over_safetensors: The same for safetensors' owned copies, where they were measured.
        memory_above: Bytes of anonymous memory at the peak above what the tensors themselves take; for mapped ones, all of
            it. None when nobody looked.
        failure: Why it does not run, or None.
    """

    name: str
    opening: float | None = None
    seconds: float | None = None
    bytes_per_second: float | None = None
    over_floor: float | None = None
    over_safetensors: float | None = None
    memory_above: int | None = None
    failure: str | None = None

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Row:
    """One way of reading a row.

    Attributes:
        name: Of the task.
        opening: Median seconds until its file was open, verified and unlocked.
        seconds: Median seconds of the row alone.
        bytes_read: Bytes asked for by read calls, opening included: other packages map their files, and ask for none.
        failure: Why it does not run, or None.
    """

    name: str
    opening: float | None = None
    seconds: float | None = None
    bytes_read: int | None = None
    failure: str | None = None

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def load_lines(results: Mapping[str, Result], nbytes: int) -> list[Line]:
    """The table of loads.

    Args:
        results: By task name.
        nbytes: Size of all tensors.
    """
    whole = {name: _whole(result) for name, result in results.items()}
    floor, owned = whole.get(FLOOR), whole.get(OWNED)
    return [_load_line(result, whole[name], floor, owned, nbytes) for name, result in results.items()]


def _load_line(result: Result, seconds: float | None, floor: float | None, owned: float | None, nbytes: int) -> Line:
    if seconds is None:
        return Line(result.name, failure=result.failure)
    peak = None if result.memory is None else result.memory.peak
    tensors = 0 if result.name == MAPPED else nbytes
    return Line(
        name=result.name,
        opening=result.median("open") if "open" in result.samples[0].seconds else None,
        seconds=seconds,
        bytes_per_second=nbytes / seconds,
        over_floor=seconds / floor if floor else None,
        over_safetensors=seconds / owned if owned else None,
        memory_above=None if peak is None else max(0, peak["anon"] + peak["shmem"] - tensors),
    )


def _whole(result: Result) -> float | None:
    """Median seconds to the end of the last phase."""
    if result.failure is not None or not result.samples:
        return None
    return result.median(next(phase for phase in _LAST if phase in result.samples[0].seconds))


def row_lines(results: Mapping[str, Result]) -> list[Row]:
    """The table of rows."""
    lines = []
    for name, result in results.items():
        if result.failure is not None:
            lines.append(Row(name, failure=result.failure))
            continue
        seconds = statistics.median(sample.seconds["row"] - sample.seconds["open"] for sample in result.samples)
        read = round(statistics.median(sample.io["read_calls"] for sample in result.samples))
        lines.append(Row(name, result.median("open"), seconds, read))
    return lines


def hints(
    facts: Mapping[str, Any],
    config: LoaderConfig,
    *,
    threads: int,
    algorithm: str | None,
    whole_tensors: bool,
    resident: float | None,
    secure: Result,
) -> list[str]:
    """What to change, each for a fact that was measured or read on this machine.

    Args:
        facts: Of :func:`.machine.facts`.
        config: Settings in force.
        threads: That were used.
        algorithm: AEAD of the model.
        whole_tensors: Whether its tensors are sealed in one piece each.
        resident: Share of the encrypted files in the page cache after the loads that should find them there.
        secure: Those loads.
    """
    found = []
    processors, flags = facts["cores"], facts["cpu_flags"]
    if facts["huge_pages"]["enabled"] == "never":
        found.append(
            "Huge pages are switched off, so the kernel zeroes new memory in pages of 4 KiB: as root, "
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        )
    if processors == 1:
        found.append("This process may use one processor only: reading and decrypting cannot overlap. Give it two.")
    elif threads < processors:
        found.append(
            f"{threads} of {processors} processors decrypt: SECURE_LOADER_THREADS, or threads in config.toml, sets them."
        )
    if facts["cpu"] != "unknown" and "aes" not in flags and algorithm in ("aes256gcm", "aes128gcm"):
        found.append(
            "The processor has no AES instructions: encrypt with a key of keygen --algorithm chacha20poly1305, "
            "which needs none."
        )
    if resident is not None and resident < _CACHED and config.page_cache == "keep":
        found.append(
            f"Only {resident:.0%} of the weight files stay in the page cache between loads: other programs need the memory."
        )
    if config.page_cache != "keep":
        found.append(f"page_cache is {config.page_cache!r}: every load waits for the disk. The default is 'keep'.")
    if config.integrity == "full":
        found.append(
            "integrity is 'full': every byte goes through SHA-256 as well. 'tags' authenticates all of them too."
        )
    if whole_tensors:
        found.append(
            "Each tensor is sealed in one piece (format version 1): it takes one thread, and a row costs the whole tensor. "
            "Encrypt it again with --format-version 2."
        )
    if facts["load_average"] > processors / 2:
        found.append(f"Other programs were running (load average {facts['load_average']}): figures may be too high.")
    times = secure.seconds("load")
    if max(times) > max(_MEASURABLE, _SPREAD * min(times)):
        found.append(
            f"Repetitions took between {min(times):.3f} and {max(times):.3f} s: something else uses the machine. "
            "Repeat when it is idle, or with more --repeat."
        )
    return found


def names(*, threads: int, ciphertext: bool) -> dict[str, str]:
    """What readers see, by name of the task.

    Args:
        threads: Of the floor.
        ciphertext: Whether the floor reads the encrypted files, for want of plain ones.
    """
    what = "pread of the ciphertext" if ciphertext else "plain pread"
    return {
        SECURE: "secure_loader, encrypted",
        FLOOR: f"floor: {what}, {threads} threads" if threads > 1 else f"floor: {what}, 1 thread",
        OWNED: "safetensors, owned copies",
        MAPPED: "safetensors, mapped and touched",
        "cryptotensors": "cryptotensors, encrypted",
    }
