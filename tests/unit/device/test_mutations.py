"""The planted faults still fit the source, and some of them are run; ``make mutations`` runs all."""

from __future__ import annotations

import pytest

from tests.unit.device.mutations import FAULTS, plant, run


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_fault_can_be_planted(fault, tmp_path):
    plant(fault, tmp_path)


@pytest.mark.parametrize("number", [2, 12, 16])
def test_a_fault_is_caught(shim, number):  # with `shim`, it is skipped where there is no compiler
    outcome = run(FAULTS[number - 1])
    assert outcome.caught
    assert "Error" in outcome.by  # by the proof, rather than by a crash
