"""Keeping this process's memory from other processes of the same user, and out of core dumps."""

from __future__ import annotations

import ctypes
import os
import resource

from ..errors import ConfigError

_PR_SET_DUMPABLE = 4


def harden_process() -> None:
    """Leave no core dump, and let no other process of this user look into this one.

    Sets ``PR_SET_DUMPABLE`` to 0 (no core dump, whatever ``core_pattern`` says; no ptrace, no reading of
    ``/proc/PID/mem`` or ``environ`` without ``CAP_SYS_PTRACE``), and ``RLIMIT_CORE`` to 0, which children inherit; the
    former they inherit only until they execute another program. Costs nothing. Debuggers and profilers cannot attach
    any more, and processes can no longer fetch descriptors or CUDA memory from this one by ``pidfd_getfd``.

    Raises:
        ConfigError: The system does not do it.
    """
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (OSError, ValueError) as e:
        raise ConfigError(f"core dumps cannot be switched off: {e}") from None
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise ConfigError(f"this process cannot be closed to others: {os.strerror(ctypes.get_errno())}")
