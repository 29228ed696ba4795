"""A hardened process leaves no core and lets nobody look in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import ctypes, json, os, resource, sys
import secure_loader
from secure_loader.config import load
if sys.argv[1] == "function":
    secure_loader.harden_process()
elif sys.argv[1] == "setting":
    secure_loader.Session(config=load({"harden": True}))
else:
    secure_loader.Session(config=load())
libc = ctypes.CDLL(None)
PR_GET_DUMPABLE = 3
print(json.dumps({"dumpable": libc.prctl(PR_GET_DUMPABLE, 0, 0, 0, 0), "core": resource.getrlimit(resource.RLIMIT_CORE)}))
sys.stdout.flush()
sys.stdin.read(1)
if sys.argv[2] == "die":
    os.abort()
"""


def start(how: str, then: str = "live", **options) -> tuple[subprocess.Popen, dict]:
    child = subprocess.Popen(
        [sys.executable, "-c", CODE, how, then], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
    )
    return child, json.loads(child.stdout.readline())


@pytest.mark.parametrize("how", ["function", "setting"])
def test_no_core_and_not_dumpable(how):
    child, said = start(how)
    child.communicate("x", timeout=20)
    assert said == {"dumpable": 0, "core": [0, 0]}


def test_nothing_is_changed_unless_it_is_asked_for():
    child, said = start("nothing")
    child.communicate("x", timeout=20)
    assert said["dumpable"] == 1


def test_it_leaves_no_core(tmp_path):
    """Where the limit of this process allows one at all; elsewhere the flags above have to do."""
    child, _ = start("function", "die", cwd=tmp_path)
    child.communicate("x", timeout=20)
    status = child.returncode
    assert status == -6
    assert list(tmp_path.iterdir()) == []


def test_its_memory_is_closed_to_its_own_user():
    """The kernel gives the files of such a process to root."""
    child, _ = start("function")
    try:
        other, _ = start("nothing")
        try:
            hardened, usual = (Path(f"/proc/{c.pid}/environ").stat() for c in (child, other))
            assert hardened.st_uid == 0
            assert usual.st_uid == os.geteuid()
            if os.geteuid():
                with pytest.raises(PermissionError):
                    Path(f"/proc/{child.pid}/environ").read_bytes()
        finally:
            other.communicate("x", timeout=20)
    finally:
        child.communicate("x", timeout=20)
