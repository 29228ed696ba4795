"""The child process in which a policy is decided. Run by path as ``python -I -S``; nothing imports it.

On stdin comes one JSON object: ``engine``, the folder of the engine's package; ``corpus``, what the engine has to get right
first; ``policy``, a Rego text; and ``input``, a JSON text, or null to look at the policy without evaluating it.
On stdout goes exactly ``true``, or a line that says why not; without input, a JSON object that says what is in the policy.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys

TYPE_CHECKING = False  # as typing's, which takes as long to import as the engine does
if TYPE_CHECKING:
    from typing import Any

MEMORY, SECONDS = 512 << 20, 2
RULE = "data.model.allow"
NO_NEW_PRIVILEGES = 38  # PR_SET_NO_NEW_PRIVS
# Landlock's system calls have these numbers on every architecture. All that its first version knows of files; signals.
LANDLOCK_CREATE, LANDLOCK_RESTRICT = 444, 446
LANDLOCK_FILES, LANDLOCK_SIGNALS = (1 << 13) - 1, 2
# What the engine does not do and answers with "undefined" cannot be told from "no": `not http.send(…)` would allow.
FORBIDDEN = ("http.send", "opa.", "rand.", "net.", "uuid.rfc4122")
# Beyond it the engine calculates with floating point, where different numbers are equal.
LARGEST = 1 << 63
SHOWN = 8


def main() -> None:
    """Answer the request on stdin."""
    answer = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    request = json.loads(sys.stdin.buffer.read())
    sys.path.append(request["engine"])
    try:
        import regorus
    except ImportError as e:
        text = f"cannot be decided: the engine cannot be imported ({line(e)})"
    else:
        confine()
        try:
            text = respond(regorus.Engine, request)
        except BaseException as e:  # noqa: BLE001 - a panic of the engine is no Exception; whatever it was, it is no "true"
            text = f"cannot be evaluated: {line(e)}"
    os.write(answer, text.encode("utf-8", "replace"))


def confine() -> None:
    """From here on: no new files or sockets, no new privileges, bounded memory and time, no core dump.

    Where the kernel has Landlock (Linux 5.13, most distributions), no files are removed or renamed either, and other
    processes are neither looked into nor, from Linux 6.12 on, sent signals: none of which takes a descriptor.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    handled = (ctypes.c_uint64 * 3)(LANDLOCK_FILES, 0, LANDLOCK_SIGNALS)
    for size in (24, 8):  # an older kernel takes only the first of the three
        rules = libc.syscall(ctypes.c_long(LANDLOCK_CREATE), handled, ctypes.c_size_t(size), ctypes.c_ulong(0))
        if rules >= 0:
            libc.syscall(ctypes.c_long(LANDLOCK_RESTRICT), ctypes.c_long(rules), ctypes.c_ulong(0))
            break
    for what, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_CPU, SECONDS),
        (resource.RLIMIT_NOFILE, 0),
    ):
        resource.setrlimit(what, (limit, limit))


def respond(engine: Any, request: dict[str, Any]) -> str:
    """What goes to stdout."""
    for name, policy, given, expected in request["corpus"]:
        found = outcome(engine, policy, given)
        if found != expected:
            return f"cannot be decided: the engine is wrong about {name!r}: {found} instead of {expected}"
    made = engine()
    made.add_policy("policy", request["policy"])
    facts = examine(json.loads(made.get_ast_as_json())[0]["ast"])
    if request["input"] is None:
        return json.dumps(facts)
    if facts["package"] != "model":
        return f"is in package {facts['package']}, not model"
    if facts["forbidden"]:
        return f"uses {', '.join(facts['forbidden'])}, which no local policy may"
    made.set_input_json(request["input"])
    value = made.eval_rule_as_json(RULE)
    return value if value == "true" else refusal(made, value, facts["rules"])


def outcome(engine: Any, policy: str, given: str) -> str:
    """Value of the rule as JSON, ``undefined`` or ``error``."""
    try:
        made = engine()
        made.add_policy("policy", policy)
        made.set_input_json(given)
        value = json.loads(made.eval_rule_as_json(RULE))
    except Exception:  # noqa: BLE001 - which error it is differs from engine to engine
        return "error"
    return "undefined" if value == "<undefined>" else json.dumps(value)


def refusal(engine: Any, value: str, rules: list[str]) -> str:
    """Why not: what the rule is instead of true, and which other rules are not true."""
    text = {"false": "false", '"<undefined>"': "undefined"}.get(value, "not a boolean")
    unmet = [rule for rule in rules if not holds(engine, rule)]
    return f"is {text}" + (f"; not met: {', '.join(unmet[:SHOWN])}" if unmet else "")


def holds(engine: Any, rule: str) -> bool:
    """False for a rule that is false or undefined. Only for the message: the answer is no already."""
    try:
        return engine.eval_rule_as_json(f"data.model.{rule}") not in ("false", '"<undefined>"')
    except Exception:  # noqa: BLE001 - a function, or a rule that fails
        return True


def examine(ast: dict[str, Any]) -> dict[str, Any]:
    """What a policy is made of: its package, its rules, how ``allow`` defaults, and what it must not use."""
    rules: list[str] = []
    default: object = None
    for rule in ast["rules"]:
        if "Default" in rule:
            name, value = dotted(rule["Default"]["refr"]), rule["Default"]["value"]
            if name == "allow":
                default = value["Bool"]["value"] if "Bool" in value else "other"
        else:
            name = dotted(rule["Spec"]["head"].get("Compr", {}).get("refr"))
        if name and "." not in name and name != "allow" and name not in rules:
            rules.append(name)
    used, odd = look(ast)
    return {
        "package": dotted(ast["package"]["refr"]) or "(none)",
        "default": default,
        "rules": rules[:32],
        "forbidden": sorted({name[:40] for name in used if name.startswith(FORBIDDEN)} | odd)[:SHOWN],
        "clock": "time.now_ns" in used,
    }


def look(ast: Any) -> tuple[set[str], set[str]]:
    """The dotted names that a policy uses, and what else in it makes an answer unsure."""
    used: set[str] = set()
    odd: set[str] = set()
    stack = [ast]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack += node
        elif isinstance(node, dict):
            used.add(dotted(node) or "")
            number = node.get("Number")
            if isinstance(number, dict) and not abs(number["value"]) < LARGEST:
                odd.add("numbers of 2^63 and more")
            if "Call" in node and dotted(node["Call"]["fcn"]) is None:
                odd.add("functions whose names are computed")
            stack += node.values()
    return used, odd


def dotted(node: Any) -> str | None:
    """``a.b.c`` of a reference, however it is spelt; None for anything else, and where an index is computed."""
    names: list[str] = []
    while isinstance(node, dict):
        if "Var" in node:
            return ".".join([node["Var"]["value"], *reversed(names)])
        if "RefDot" in node:
            node = node["RefDot"]
            names.append(node["field"][1])
        elif "RefBrack" in node and "String" in node["RefBrack"]["index"]:
            node = node["RefBrack"]
            names.append(node["index"]["String"]["value"])
        else:
            return None
        node = node["refr"]
    return None


def line(error: BaseException) -> str:
    """An error in one line: without the engine's excerpt of the text and its backtrace."""
    text = str(error).partition("Stack backtrace")[0]
    place = text.partition("--> policy:")[2].partition("\n")[0].partition(":")[0]
    message = text.rpartition("error: ")[2].strip().partition("\n")[0] or type(error).__name__
    return (f"line {place}: " if place.isdigit() else "") + message[:200]


main()
