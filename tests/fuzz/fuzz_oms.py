"""Fuzz ``model.sig`` (targets_oms.py says what must hold)."""

from under_atheris import run

if __name__ == "__main__":
    run("fuzz_oms")
