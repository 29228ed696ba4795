"""Follow secrets through the machine code of a kernel: none may decide a branch, an address, or whether memory is touched.

Labels flow from instruction to instruction along the control flow, through registers, uniform registers and predicates, until nothing changes:

* a pointer that came in as a kernel parameter carries the parameter's name;
* what is read through `chunks` or `work` is public, and so are the rounds of a schedule and the length of a key;
* what is read through `schedules`, `keys` or `partial`, from shared memory, or at an address that was itself read (the bytes of a chunk) is
  secret, and so is all that is made of it.

What it does not see: instructions whose duration depends on operands. Integer and logic instructions of NVIDIA's GPUs have none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

SECRET = "secret"
PARAMETERS = {
    "sl_gcm_open": {0: "chunks", 8: "work", 24: "schedules", 32: "partial"},
    "sl_gcm_seal": {0: "chunks", 8: "work", 24: "schedules", 32: "partial"},
    "sl_ctr": {0: "chunks", 8: "work", 24: "schedules"},
    "sl_gcm_finish": {0: "chunks", 16: "schedules", 24: "partial", 32: "verdicts"},
    "sl_gcm_tag": {0: "chunks", 16: "schedules", 24: "partial", 32: "tags"},
    "sl_expand_keys": {0: "keys", 8: "schedules"},
}
PUBLIC_FIELDS = {("schedules", 0x780), ("keys", 0x20)}  # SlSchedule::rounds, SlKey::nbytes
PUBLIC_STRUCTS = {"chunks", "work"}

_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?)\s*;", re.ASCII)
_REGISTER = re.compile(r"\b(UR|R|UP|P)(\d+)((?:\.[A-Za-z0-9_]+)*)")
_PREDICATE = re.compile(r"^!?U?P[T\d]$")
_TARGET = re.compile(r"`\(([^)]+)\)")
_BANK = re.compile(r"c\[0x0\]\[(0x[0-9a-f]+)\]")

Labels = dict[str, frozenset[str]]
NOTHING: frozenset[str] = frozenset()


@dataclass
class Instruction:
    """One line of nvdisasm, taken apart."""

    where: str
    guard: str | None
    op: str
    operands: list[str]

    @property
    def name(self) -> str:
        return self.op.partition(".")[0]


def functions(text: str) -> dict[str, list[Instruction | str]]:
    """Instructions and labels by function, in order."""
    found: dict[str, list[Instruction | str]] = {}
    current: list[Instruction | str] = []
    for line in text.splitlines():
        if section := re.match(r"\s*\.section\s+\.text\.(\w+)", line):
            current = found.setdefault(section[1], [])
        elif label := re.match(r"^([.$\w]+):", line):
            current.append(label[1])
        elif match := _LINE.match(line):
            operands = [part.strip() for part in re.split(r",(?![^\[(]*[\])])", match[4])] if match[4] else []
            current.append(Instruction(match[1], match[2], match[3], operands))
    return found


def _registers(operand: str, *, wide: bool = False) -> Iterator[str]:
    """Registers that an operand names; with ``.64`` or ``wide`` the next one as well."""
    for kind, number, suffix in _REGISTER.findall(operand):
        yield kind + number
        if kind in ("R", "UR") and (wide or ".64" in suffix):
            yield f"{kind}{int(number) + 1}"


def _split(i: Instruction) -> tuple[list[str], list[str]]:
    """Operands that are written, and those that are read."""
    n = i.name
    if n in (
        "ST",
        "STG",
        "STS",
        "STL",
        "BRA",
        "EXIT",
        "BAR",
        "BSYNC",
        "RET",
        "CALL",
        "WARPSYNC",
        "NOP",
        "RED",
        "MEMBAR",
        "BRX",
        "JMX",
    ):
        return [], i.operands
    if n in ("PLOP3", "UPLOP3", "ISETP", "UISETP", "R2P"):
        return i.operands[:2], i.operands[2:]
    count = 1
    if i.operands and _PREDICATE.match(i.operands[0]):
        count = 2  # SHFL.BFLY PT, R3, ...; LOP3.LUT P0, RZ, ...
    while count < len(i.operands) and _PREDICATE.match(i.operands[count]) and n not in ("SEL", "USEL"):
        count += 1  # a carry out
    return i.operands[:count], i.operands[count:]


def _width(i: Instruction) -> int:
    """Registers of the first operand that is written."""
    if ".128" in i.op:
        return 4
    wide = i.name in ("IMAD", "UIMAD") and ".WIDE" in i.op or i.name == "CS2R" and ".32" not in i.op
    return 2 if ".64" in i.op or wide else 1


def _merge(a: Labels, b: Labels) -> Labels:
    """What holds whichever way came. What holds only under a guard has to be known on both."""
    names = {name for name in a.keys() | b.keys() if "@" not in name or (name in a and name in b)}
    return {name: a.get(name, NOTHING) | b.get(name, NOTHING) for name in names}


class _Audit:
    def __init__(self, name: str, code: list[Instruction | str], base: int) -> None:
        self.parameters = {base + offset: label for offset, label in PARAMETERS[name].items()}
        self.code = [item for item in code if isinstance(item, Instruction)]
        self.labels: dict[str, int] = {}
        at = 0
        for item in code:
            if isinstance(item, str):
                self.labels[item] = at
            else:
                at += 1
        self.faults: dict[str, None] = {}

    def fault(self, i: Instruction, what: str) -> None:
        self.faults[f"{i.where} {i.op} {', '.join(i.operands)}: {what}"] = None

    def target(self, i: Instruction) -> int:
        match = _TARGET.search(i.operands[-1])
        if match is None or match[1] not in self.labels:
            self.fault(i, "where it goes is not known")
            return len(self.code)
        return self.labels[match[1]]

    def step(self, i: Instruction, state: Labels) -> Labels:
        """What is known behind an instruction."""

        def of(names: Iterable[str]) -> frozenset[str]:
            return frozenset().union(*(state.get(f"{n}@{i.guard}", state.get(n, NOTHING)) for n in names))

        guard = of(_registers(i.guard)) if i.guard else NOTHING
        written, read = _split(i)
        addresses = [part for part in i.operands if "[" in part and not part.startswith("c[")]
        constants = [part for part in i.operands if part.startswith(("c[", "-c["))]
        if any(re.search(r"c\[[^\]]*\]\[U?R", part) for part in constants):
            self.fault(i, "constant memory by index")
        if i.name in ("LDL", "STL", "LDLM"):
            self.fault(i, "local memory")
        if i.name in ("BRX", "BRXU", "JMX", "JMXU"):
            self.fault(i, "a jump through a register")
        if i.name in ("BRA", "EXIT", "BAR", "WARPSYNC", "RET", "CALL") and SECRET in guard | of(
            n for part in read for n in _registers(part)
        ):
            self.fault(i, "a secret decides where it goes")
        wide = i.operands[-1] if ".WIDE" in i.op else None  # the addend
        value = guard | of(n for part in read for n in _registers(part, wide=part is wide))
        if addresses:
            # desc[UR12][R2.64+0x4]: the first part describes memory, the second is the address
            inner = re.findall(r"\[([^\]]*)\]", addresses[0])[-1]
            where = of(_registers(inner))
            if SECRET in where | guard:
                self.fault(i, "a secret decides what it touches")
            if i.name in ("LDG", "LD"):
                value = self.loaded(where, inner)
            elif i.name == "LDS":
                value = frozenset({SECRET})
        for part in constants:
            if bank := _BANK.search(part):
                # Both halves of a pointer carry its name.
                at = int(bank[1], 16)
                value |= {self.parameters[a] for a in (at, at - 4) if a in self.parameters}
        return self.write(i, written, value, state)

    def loaded(self, where: frozenset[str], inner: str) -> frozenset[str]:
        offset = re.search(r"\+(0x[0-9a-f]+)", inner)
        at = int(offset[1], 16) if offset else 0
        private = where & {"schedules", "keys", "partial"}
        if len(private) == 1 and (*private, at) in PUBLIC_FIELDS:
            return NOTHING
        return NOTHING if where & PUBLIC_STRUCTS and not private else frozenset({SECRET})

    def write(self, i: Instruction, written: list[str], value: frozenset[str], state: Labels) -> Labels:
        state = dict(state)
        for part in written:
            for register in _registers(part):
                kind, number = re.match(r"(\D+)(\d+)", register).groups()
                for n in range(_width(i) if kind in ("R", "UR") else 1):
                    self.put(f"{kind}{int(number) + n}", i.guard, value, state)
        return state

    def put(self, register: str, guard: str | None, value: frozenset[str], state: Labels) -> None:
        """A register written under a guard holds either; under the same guard, and only there, it holds this (``R6@P0``)."""
        for key in [key for key in state if "@" in key]:
            name, _, condition = key.partition("@")
            if condition.lstrip("!") == register or name == register:
                del state[key]
        if guard:
            state[f"{register}@{guard}"] = value
            value = value | state.get(register, NOTHING)
        state[register] = value

    def function(self, start: int) -> list[Instruction] | None:
        """What is called: instructions up to a RET, one behind the other. None where a CALL is but a long jump."""
        for end, i in enumerate(self.code[start:], start):
            if i.name == "RET":
                return self.code[start:end]
            if i.name in ("BRA", "CALL", "EXIT"):
                return None
        return None

    def call(self, function: list[Instruction], state: Labels) -> Labels:
        """Behind a call: whatever the function writes is secret. That it does nothing but compute is checked."""
        state = dict(state)
        for i in function:
            if any("[" in part for part in i.operands):
                self.fault(i, "a function may only compute")
            state = self.write(i, _split(i)[0], frozenset({SECRET}), state)
        return state

    def run(self) -> list[str]:
        states: dict[int, Labels] = {0: {}}
        todo = [0]
        while todo:
            at = todo.pop()
            i = self.code[at]
            after = self.step(i, states[at])
            ways = [at + 1]
            if i.name == "BRA":
                ways = [self.target(i)] + ([at + 1] if i.guard or len(i.operands) > 1 else [])
            elif i.name == "CALL":
                target = self.target(i)
                function = self.function(target)
                if function is None:
                    ways.append(target)
                else:
                    after = self.call(function, after)
            elif i.name == "RET":
                self.fault(i, "a return that belongs to no function")
                ways = []
            elif i.name == "EXIT" and not i.guard:
                ways = []
            for way in ways:
                if way >= len(self.code):
                    continue
                old = states.get(way)
                if old is None:
                    states[way] = after
                else:
                    merged = _merge(old, after)
                    if merged == old:
                        continue
                    states[way] = merged
                todo.append(way)
        return list(self.faults)


def check(name: str, code: list[Instruction | str], base: int) -> list[str]:
    """What is wrong with a kernel, an entry for each instruction.

    Args:
        name: Of the kernel.
        code: What `functions` gave for it.
        base: Where its parameters begin in constant bank 0.
    """
    return _Audit(name, code, base).run()
