"""Fuzz the signed manifest of a folder (targets.py says what must hold)."""

from under_atheris import run

if __name__ == "__main__":
    run("fuzz_manifest")
