"""The kernels on the CPU, where there is a compiler."""

from __future__ import annotations

import os

import pytest

from tests.unit.device.shim import Shim, build, compiler


def skip_or_fail(reason: str) -> None:
    """Skip, but never in CI: there the tools are installed, and a test that did not run has to be seen."""
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(f"CI has to have it: {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def shim() -> Shim:
    if compiler() is None:
        skip_or_fail("no g++: the kernels cannot run on the CPU")
    return Shim(build())
