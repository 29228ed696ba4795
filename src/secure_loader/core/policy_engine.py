"""Asking the policy engine: one short-lived child process for each answer.

The engine is native code that parses and evaluates what a publisher wrote. It was seen to crash on recursion, to take
exponential time on brackets, and to answer wrongly for inputs made in Python. So it never runs in this process, gets text
only, has little memory and time, can open neither files nor sockets, and shows with every answer that it is right about a
corpus of cases. Whatever goes wrong, the answer is no.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from ..errors import ConfigError, PolicyDeniedError
from .policy_corpus import CORPUS

RULE = "data.model.allow"
MAX_POLICY = 64 * 1024
SECONDS = 5.0
INSTALL = "pip install 'secure-loader[policy]'"
# The engine's allocator would ask for a gibibyte of addresses at once, which is more than the child may have: any policy of
# more than some twenty lines would be denied for lack of memory.
_ENVIRONMENT = {"MIMALLOC_ARENA_RESERVE": "32MiB"}
_CHILD = os.path.join(os.path.dirname(__file__), "policy_child.py")


@dataclass(frozen=True, slots=True)
class Facts:
    """What a policy is made of.

    Attributes:
        package: Its package; must be ``model``.
        default: What ``allow`` is by default: a boolean, ``"other"``, or None where nothing says.
        rules: Names of its other rules, the first 32.
        forbidden: What no local policy may use, and this one does.
        clock: Whether it reads the engine's clock instead of the input's time.
    """

    package: str
    default: bool | str | None
    rules: tuple[str, ...]
    forbidden: tuple[str, ...]
    clock: bool


def check_text(text: str) -> None:
    """Refuse what no engine has to see.

    Raises:
        PolicyDeniedError: Larger than 64 KiB, or with a character that hides what comes after it.
    """
    if len(text) > MAX_POLICY or len(text.encode("utf-8", "surrogatepass")) > MAX_POLICY:
        raise PolicyDeniedError(f"the local policy is larger than {MAX_POLICY} bytes ({RULE})")
    if "\0" in text:  # the engine takes it for the end of the text
        raise PolicyDeniedError(f"the local policy holds a NUL character ({RULE})")


def decide(text: str, document: str) -> None:
    """Let a policy pass that says ``true``.

    Args:
        text: Rego.
        document: The input, as JSON text: the engine's binding turns Python's False into a number, which is true.

    Raises:
        PolicyDeniedError: The policy says anything else, cannot be evaluated, or there is no engine that can be relied on.
    """
    answer = _ask(text, document)
    if answer != "true":
        raise PolicyDeniedError(f"the local policy does not allow this load: {RULE} {_shown(answer)}")


def examine(text: str) -> Facts:
    """Parse a policy.

    Raises:
        ConfigError: It is no policy, or there is no engine.
    """
    try:
        answer = _ask(text, None)
    except PolicyDeniedError as e:
        raise ConfigError(e.message, hint=e.hint) from None
    if not answer.startswith("{"):
        raise ConfigError(f"the policy {_shown(answer)}")
    facts = _facts(answer)
    if facts is None:
        raise ConfigError("the policy cannot be looked at: the process of its engine said something else")
    return facts


def _facts(answer: str) -> Facts | None:
    """None for what our own program in the child would not say: the engine may have had the better of it."""
    try:
        doc: Any = json.loads(answer)
        package, default, clock = doc["package"], doc["default"], doc["clock"]
        names = [doc[what] for what in ("rules", "forbidden")]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    lists = all(isinstance(many, list) and all(isinstance(n, str) for n in many) for many in names)
    known = default is None or type(default) is bool or default == "other"
    if not isinstance(package, str) or type(clock) is not bool or not lists or not known:
        return None
    return Facts(package, default, tuple(names[0]), tuple(names[1]), clock)


def _ask(text: str, document: str | None) -> str:
    check_text(text)
    import subprocess  # not at the top: files with the trivial policy need none

    request = {"engine": _engine(), "corpus": CORPUS, "policy": text, "input": document}
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and file; the policy goes by stdin
            [sys.executable, "-I", "-S", _CHILD],
            input=json.dumps(request).encode("ascii"),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
            env=_ENVIRONMENT,
            cwd="/",
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"took longer than {SECONDS:.0f} seconds"
    except OSError as e:
        return f"cannot be evaluated: no child process can be started ({e.strerror or e})"
    if done.returncode < 0:
        return _stopped(-done.returncode)
    if done.returncode:
        return f"cannot be evaluated: the child process ended with {done.returncode}"
    return done.stdout.decode("utf-8", "replace")


def _engine() -> str:
    """The folder that holds the engine's package. It is found, and not imported, here."""
    spec = find_spec("regorus")
    if spec is None or spec.origin is None:
        raise PolicyDeniedError(
            f"the file carries a local policy, and no engine that can evaluate it is installed ({RULE})", hint=INSTALL
        )
    return os.path.dirname(os.path.dirname(os.path.abspath(spec.origin)))


def _stopped(number: int) -> str:
    if number in (signal.SIGKILL, signal.SIGXCPU):
        return "took more than 2 seconds of processor time, or the system stopped it"
    what = "ran out of memory" if number == signal.SIGABRT else "crashed the engine: endless recursion?"
    return f"{what} (signal {number})"


def _shown(answer: str) -> str:
    text = answer.strip() or "has no answer"
    return "".join(c if c.isprintable() else " " for c in text[:400])
