"""The child process that decides: what it may, what it is told, and which engines it takes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import regorus

from secure_loader.core import policy_engine
from secure_loader.core.policy_corpus import CORPUS
from secure_loader.core.policy_engine import decide, examine
from secure_loader.errors import ConfigError, PolicyDeniedError

HEAD = "package model\nimport rego.v1\ndefault allow := false\n"
# A package that loads the real engine under another name, so that a test can change one thing about it.
REAL = f"""
import ctypes
import errno
import importlib.util
spec = importlib.util.spec_from_file_location("real.regorus", {next(Path(regorus.__file__).parent.glob("regorus*.so")).as_posix()!r})
real = importlib.util.module_from_spec(spec)
spec.loader.exec_module(real)
class Engine:
    def __init__(self): self.real = real.Engine()
    def add_policy(self, name, text): self.real.add_policy(name, text)
    def set_input_json(self, text): self.real.set_input_json(text)
    def get_ast_as_json(self): return self.real.get_ast_as_json()
    def eval_rule_as_json(self, rule): return self.real.eval_rule_as_json(rule)
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Install an engine of one's own: the real one, and some lines after it."""

    def install(code: str) -> None:
        (tmp_path / "regorus").mkdir()
        (tmp_path / "regorus" / "__init__.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "regorus")

    return install


def test_the_corpus_is_about_what_went_wrong_elsewhere():
    names = {name for name, *_ in CORPUS}
    assert {"false is not there", "null is there", "2^53", "nanoseconds", "time", "sets", "every"} <= names
    assert {"undefined", "conflicting values", "a number", "the one-liner"} <= names
    found = [value for *_, value in CORPUS]
    assert found.count("true") > 20
    assert found.count("false") > 20
    assert found.count("error") > 8
    for _, _, given, _ in CORPUS:
        json.loads(given)


def test_the_real_engine_under_another_name_decides(engine):
    engine(REAL)
    decide(HEAD + "allow if input.x", '{"x": true}')


@pytest.mark.parametrize(
    ("change", "why"),
    [
        # What was seen: False given as 0.0, times that are undefined, numbers as floats; and what could be.
        (
            "real_set = Engine.set_input_json\nEngine.set_input_json = lambda self, text: real_set(self, text.replace('false', '0.0'))",
            "true",
        ),
        (
            "real_add = Engine.add_policy\nEngine.add_policy = lambda self, n, text: real_add(self, n, text.replace('time.parse_rfc3339_ns', 'count'))",
            "time",
        ),
        (
            "real_set = Engine.set_input_json\nEngine.set_input_json = lambda self, text: real_set(self, text.replace('9007199254740992', '9007199254740993'))",
            "2^53",
        ),
        (
            "real_add = Engine.add_policy\nEngine.add_policy = lambda self, n, text: real_add(self, n, text.replace('every x in', 'some x in'))",
            "every",
        ),
        ("Engine.eval_rule_as_json = lambda self, rule: 'true'", "true"),
        ("Engine.eval_rule_as_json = lambda self, rule: 'false'", "true"),
        ("Engine.eval_rule_as_json = lambda self, rule: 1 / 0", "true"),
        ("del Engine.set_input_json", "true"),
        ("def __init__(self): self.real = real.Engine(); self.real.set_rego_v0(True)\nEngine.__init__ = __init__", ""),
    ],
)
def test_an_engine_that_fails_the_corpus_is_refused(engine, change, why):
    engine(REAL + change)
    with pytest.raises(PolicyDeniedError, match=re.escape(f"the engine is wrong about '{why}")):
        decide(HEAD + "allow if true", "{}")
    with pytest.raises(ConfigError, match=re.escape(f"the engine is wrong about '{why}")):
        examine(HEAD + "allow if true")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise ImportError('no such library')", "the engine cannot be imported"),
        ("import os; os.write(1, b'true'); os._exit(0)", "has no answer"),
        ("print('true', flush=True)\nraise SystemExit(0)", "has no answer"),
        ("raise RuntimeError('true')", "ended with 1"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "processor time"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            r"crashed the engine: endless recursion\? \(signal 11\)",
        ),
        ("import ctypes; ctypes.string_at(0)", "crashed the engine"),
        ("import time; time.sleep(60)", "took longer than 1 seconds"),
        ("while True: pass", "took longer than 1 seconds"),
    ],
)
def test_an_engine_that_cannot_answer_denies(engine, monkeypatch, code, why):
    monkeypatch.setattr(policy_engine, "SECONDS", 1.0)
    engine(code)
    with pytest.raises(PolicyDeniedError, match=why):
        decide(HEAD + "allow if true", "{}")


def test_no_engine_is_no_permission(monkeypatch):
    monkeypatch.setattr(policy_engine, "find_spec", lambda name: None)
    with pytest.raises(PolicyDeniedError, match="no engine") as caught:
        decide(HEAD + "allow if true", "{}")
    assert caught.value.hint == "pip install 'secure-loader[policy]'"
    with pytest.raises(ConfigError, match="no engine") as refused:
        examine(HEAD + "allow if true")
    assert refused.value.hint == caught.value.hint


def test_no_process_is_no_permission(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    with pytest.raises(PolicyDeniedError, match="no child process can be started"):
        decide(HEAD + "allow if true", "{}")


PROBE = """
def about():
    import resource
    def tries(what):
        try: what()
        except OSError as e: return e.errno
        return 0
    import socket
    limits = {n: resource.getrlimit(getattr(resource, "RLIMIT_" + n))[1] for n in ("AS", "CPU", "CORE", "NOFILE", "FSIZE")}
    private = next(l.split()[1] for l in status.splitlines() if l.startswith("NoNewPrivs"))
    return [limits, dict(os.environ), tries(lambda: open("/etc/passwd")), tries(socket.socket), private]
import os, socket
fd = os.open("/proc/self/status", os.O_RDONLY)
class Engine(Engine):
    def eval_rule_as_json(self, rule):
        global status
        value = self.real.eval_rule_as_json(rule)
        if self.probe:
            status = os.pread(fd, 1 << 16, 0).decode()
            raise RuntimeError(json.dumps(about()))
        return value
    def add_policy(self, name, text):
        self.probe = "probe" in text
        self.real.add_policy(name, text)
import contextlib
import json
"""


def test_what_the_child_may(engine, monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    monkeypatch.setattr(policy_engine, "_shown", lambda answer: answer)
    engine(REAL + PROBE)
    child = Path(policy_engine._CHILD)
    source = child.read_text().replace("[:200]", "")  # all of it, this once
    (copy := Path(sys.path[0]) / "child.py").write_text(source)
    monkeypatch.setattr(policy_engine, "_CHILD", str(copy))
    with pytest.raises(PolicyDeniedError) as caught:
        decide(HEAD + "allow if probe\nprobe if true", "{}")
    limits, environment, file, socket, private = json.loads(caught.value.message.partition("evaluated: ")[2])
    assert limits == {"AS": 512 << 20, "CPU": 2, "CORE": 0, "NOFILE": 0, "FSIZE": 0}
    # Python sets the first itself, the second is for the engine's allocator.
    assert environment.keys() <= {"LC_CTYPE", "MIMALLOC_ARENA_RESERVE"}
    assert (file, socket) == (24, 24)  # EMFILE
    assert private == "1"


REACH = """
import json
def tries(what):
    try: return what()
    except OSError as e: return e.errno
parent, address, folder = os.getppid(), int(sys.argv[1]), sys.argv[2]
libc = ctypes.CDLL(None, use_errno=True)
class Span(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
def look():
    seen = ctypes.create_string_buffer(16)
    here, there = Span(ctypes.addressof(seen), 16), Span(address, 16)
    if libc.process_vm_readv(parent, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) < 0:
        raise OSError(ctypes.get_errno(), "")
    return seen.raw.decode()
confine()
print(json.dumps([
    tries(look), tries(lambda: os.kill(parent, 0)), tries(lambda: os.unlink(folder + "/a")),
    tries(lambda: os.rename(folder + "/a", folder + "/b")), tries(lambda: os.mkdir(folder + "/c")),
]))
"""


def test_what_the_child_can_reach_without_a_descriptor(tmp_path):
    """The memory of the process that asks, which holds keys, and names of files."""
    version = ctypes.CDLL(None).syscall(444, None, 0, 1)
    if version < 1:
        pytest.skip("this kernel has no Landlock")
    source = Path(policy_engine._CHILD).read_text().removesuffix("main()\n")
    secret = ctypes.create_string_buffer(b"sixteen secrets.")
    (tmp_path / "a").touch()
    words = [sys.executable, "-I", "-S", "-c", source + REACH, str(ctypes.addressof(secret)), str(tmp_path)]
    memory, kill, *files = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
    assert memory == errno.EPERM
    assert kill == (errno.EPERM if version >= 6 else None)
    assert files == [errno.EACCES] * 3


@pytest.mark.parametrize("rules", [20, 200, 1200])
def test_long_policies_fit_into_the_childs_memory(rules):
    lines = [f"allow if {{ input.a == {i}; input.b.c > 3 }}" for i in range(rules)]
    text = "\n".join(["package model", "import rego.v1", "default allow := false", *lines])
    assert len(text) < 64 * 1024
    assert examine(text).package == "model"
    decide(text, json.dumps({"a": rules - 1, "b": {"c": 4}}))
    with pytest.raises(PolicyDeniedError, match="is false"):
        decide(text, json.dumps({"a": rules, "b": {"c": 4}}))


def test_the_child_does_not_see_this_environment(monkeypatch):
    monkeypatch.setenv("PYTHONSTARTUP", "/nonexistent")
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")
    monkeypatch.setenv("LD_PRELOAD", "")
    decide(HEAD + "allow if true", "{}")


def test_nothing_but_true_on_stdout_allows(monkeypatch):
    for answer in (b"", b"true\n", b" true", b"TRUE", b"true true", b"1", b"{}", b"\xff"):
        done = subprocess.CompletedProcess([], 0, answer, b"")
        monkeypatch.setattr(subprocess, "run", lambda *a, done=done, **k: done)
        with pytest.raises(PolicyDeniedError):
            decide(HEAD, "{}")
    for code in (1, -9, -11, 255):
        done = subprocess.CompletedProcess([], code, b"true", b"")
        monkeypatch.setattr(subprocess, "run", lambda *a, done=done, **k: done)
        with pytest.raises(PolicyDeniedError):
            decide(HEAD, "{}")


def test_the_input_is_text_to_the_engine():
    decide(
        HEAD + "allow if { input.x == false; not input.x; input.y == null; input.z == 1767225600000000001 }",
        json.dumps({"x": False, "y": None, "z": 1767225600000000001}),
    )


def test_messages_move_no_cursor():
    with pytest.raises(PolicyDeniedError) as caught:
        decide("package model\nallow := \x1b[31m", "{}")
    assert caught.value.message.isprintable()


def test_no_unmet_rule_shows_a_value():
    with pytest.raises(PolicyDeniedError) as caught:
        decide(HEAD + 'allow if secret == "x"\nsecret := input.env.TOKEN', json.dumps({"env": {"TOKEN": "hush"}}))
    assert "hush" not in str(caught.value)
    assert caught.value.message.endswith("data.model.allow is false")


def test_facts():
    facts = examine(
        "package model\nimport rego.v1\ndefault allow := false\nallow if a\na if time.now_ns() > b\nb := 1\nf(x) := x\ns contains 1"
    )
    assert (facts.package, facts.default, facts.rules) == ("model", False, ("a", "b"))
    assert (facts.forbidden, facts.clock) == ((), True)
    assert examine("package a.b\nallow := true").package == "a.b"
    assert examine("package model\nallow := true").default is None
    assert examine("package model\ndefault allow := 1").default == "other"
    assert examine("package model\ndefault allow := true").default is True


@pytest.mark.parametrize(
    "answer",
    [
        "{",
        "{}",
        "{" * 5000,
        '{"package": 5, "default": null, "rules": [], "forbidden": [], "clock": false}',
        '{"package": "model", "default": 1, "rules": [], "forbidden": [], "clock": false}',
        '{"package": "model", "default": false, "rules": "http.send", "forbidden": [], "clock": false}',
        '{"package": "model", "default": false, "rules": [], "forbidden": [1], "clock": false}',
        '{"package": "model", "default": false, "rules": [], "forbidden": [], "clock": 0}',
    ],
)
def test_facts_that_our_own_program_would_not_state(monkeypatch, answer):
    """Whoever breaks out of the engine speaks for the child process."""
    monkeypatch.setattr(policy_engine, "_ask", lambda *_: answer)
    with pytest.raises(ConfigError, match="said something else"):
        examine("package model")


def children() -> set[int]:
    """Of this process, alive or not yet waited for."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name, in brackets, may hold anything; state and parent come behind it.
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(path.parent.name))
    return found


def test_no_child_is_left():
    before = children()  # other tests' helpers
    decide(HEAD + "allow if true", "{}")
    assert children() <= before
