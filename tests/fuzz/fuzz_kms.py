"""Fuzz the answers of cloud key services (every.py says where what must hold is written)."""

from under_atheris import run

if __name__ == "__main__":
    run("fuzz_kms")
