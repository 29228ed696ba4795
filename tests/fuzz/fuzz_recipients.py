"""Fuzz what is wrapped for identities (targets_recipients.py says what must hold)."""

from under_atheris import run

if __name__ == "__main__":
    run("fuzz_recipients")
