"""The whole way on a real language model: encrypt it, have it refused to strangers, let it answer. `make demo` runs this.

Everything happens in build/demo and in the package's own programs, with the commands that are printed. ``--plain`` leaves
encryption out: it shows whether Transformers and vLLM themselves work on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import real_models
from serving import Server, ServerError

ROOT = Path(__file__).resolve().parent.parent
WORK = Path("build/demo")  # relative to ROOT, so that the printed commands are short and can be typed again
HOME, STRANGER, NOBODY = WORK / "home", WORK / "stranger", WORK / "nobody"
ENCRYPTED = WORK / "SmolLM2-encrypted"
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
REPETITIONS = 3
# Exit codes of the command line that the demo relies on.
OK, VERIFICATION_FAILED, KEY_UNAVAILABLE = 0, 3, 5
PYTHON_ERROR = 1


class DemoError(Exception):
    """A step did not do what it should."""


@dataclass(frozen=True)
class Result:
    """What a command gave."""

    stdout: str
    stderr: str
    seconds: float


def heading(text: str) -> None:
    """Announce a step."""
    print(f"\n\033[1m== {text}\033[0m" if sys.stdout.isatty() else f"\n== {text}", flush=True)


def show(command: list[str], home: Path | None = None, *, note: str = "") -> None:
    """Print a command as its user would type it."""
    setting = f"SECURE_LOADER_HOME={home} " if home else ""
    typed = setting + shlex.join(command).replace(str(Path.home()) + "/", "~/")
    print(f"$ {typed}{note}", flush=True)


def indent(text: str) -> None:
    """Print what a command said."""
    for line in text.strip().splitlines():
        print(f"  {line}", flush=True)


def environment(home: Path | None) -> dict[str, str]:
    """Ours without anybody's settings: offline, quiet, and this environment's programs first."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith("SECURE_LOADER_")}
    settings |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{settings.get('PATH', '')}",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    for name in ("VLLM_PLUGINS", "TORCH_DEVICE_BACKEND_AUTOLOAD"):  # either can switch our entry points off
        settings.pop(name, None)
    if home is not None:
        settings["SECURE_LOADER_HOME"] = str(ROOT / home)
    return settings


def run(command: list[str], home: Path | None = None, *, expect: int = OK, quiet: bool = False) -> Result:
    """Run a command as printed and insist on its exit code."""
    if not quiet:
        show(command, home)
    start = time.monotonic()
    try:
        done = subprocess.run(
            command,
            env=environment(home),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    except FileNotFoundError:
        raise DemoError(f"{command[0]}: no such program") from None
    except subprocess.TimeoutExpired:
        raise DemoError(f"{shlex.join(command)}: not done after ten minutes") from None
    if done.returncode != expect:
        raise DemoError(
            f"{shlex.join(command)}\nended with {done.returncode}, expected {expect}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    return Result(done.stdout, done.stderr, time.monotonic() - start)


def refused(command: list[str], home: Path, code: int, because: str) -> None:
    """Run a command that must be refused, and show how it says so.

    Args:
        command: What the user types.
        home: SECURE_LOADER_HOME.
        code: The exit code it must end with.
        because: What the error must say; refused for another reason is a failure of the demo.
    """
    result = run(command, home, expect=code)
    # The command line names itself; a traceback ends with the full name of the exception.
    start = "secure_loader." if code == PYTHON_ERROR else "secure-loader: error:"
    lines = result.stderr.strip().splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith(start)), None)
    if first is None or because not in "\n".join(lines[first:]):
        raise DemoError(f"refused, but not by secure-loader, or not because of {because!r}:\n{result.stderr[-4000:]}")
    error = lines[first:]
    indent("\n".join(error))
    print(f"  refused (exit code {code})", flush=True)


def make_keys_and_encrypt(source: Path) -> None:
    """What the publisher does."""
    heading("Make keys and encrypt")
    indent(run(["secure-loader", "keygen", "demo"], HOME).stdout)
    result = run(["secure-loader", "encrypt", str(source), str(ENCRYPTED)], HOME)
    indent(result.stdout)
    print(f"  {result.seconds:.1f} s", flush=True)

    heading("Verify and inspect: neither needs a key")
    indent(run(["secure-loader", "verify", str(ENCRYPTED)], HOME).stdout)
    indent(run(["secure-loader", "inspect", str(ENCRYPTED)], NOBODY).stdout)


def show_refusals() -> None:
    """Who does not get in, and what is not accepted."""
    heading("Somebody who trusts the publisher but has no key")
    show(["cp", "-r", str(HOME / "trust"), f"{STRANGER}/"])
    shutil.copytree(HOME / "trust", STRANGER / "trust")
    stolen = WORK / "stolen"
    refused(["secure-loader", "decrypt", str(ENCRYPTED), str(stolen)], STRANGER, KEY_UNAVAILABLE, "no master key")
    if list(stolen.glob("*.safetensors")):
        raise DemoError(f"{stolen} holds weights although decrypting was refused")

    heading("Somebody who does not know the publisher")
    refused(["secure-loader", "verify", str(ENCRYPTED)], NOBODY, VERIFICATION_FAILED, "trust store")

    heading("A copy with one bit of a weight flipped")
    tampered = WORK / "tampered-weight"
    shutil.copytree(ENCRYPTED, tampered)
    weights = max(tampered.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    with weights.open("r+b") as file:
        position = weights.stat().st_size * 2 // 3
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0x01]))
    print(f"  flipped bit 0 of byte {position:,} of {weights}", flush=True)
    refused(["secure-loader", "verify", "--full", str(tampered)], HOME, VERIFICATION_FAILED, "signed digest")
    refused(
        ["python", "examples/ask_transformers.py", str(tampered), "secure"], HOME, PYTHON_ERROR, "AuthenticationError"
    )

    heading("A copy with another config.json")
    tampered = WORK / "tampered-config"
    shutil.copytree(ENCRYPTED, tampered)
    config = json.loads((tampered / "config.json").read_text())
    (tampered / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1.0}))
    refused(["secure-loader", "verify", str(tampered)], HOME, VERIFICATION_FAILED, "config.json")

    heading('Forgetting loader="secure" gives an error, not ciphertext for weights')
    refused(["python", "examples/ask_transformers.py", str(ENCRYPTED)], HOME, PYTHON_ERROR, "EncryptedFileError")


def check_answer(answer: str) -> None:
    """Print an answer, and insist on the right one."""
    indent(answer)
    if answer.strip() != ANSWER:
        raise DemoError(f"expected {ANSWER!r}, got {answer!r}")


def ask_transformers(folder: Path, loader: list[str], home: Path | None) -> None:
    """Load in a fresh process that imports nothing of ours, and ask."""
    heading(f"Transformers: {QUESTION}")
    result = run(["python", "examples/ask_transformers.py", str(folder), *loader], home)
    check_answer(result.stdout)
    print(f"  {result.seconds:.1f} s with all imports", flush=True)


def ask_vllm(folder: Path, arguments: list[str], home: Path | None) -> None:
    """Start a real server, ask over HTTP, stop it."""
    heading(f"vLLM: {QUESTION}")
    server = Server(folder, *arguments, log=WORK / "vllm.log", environment=environment(home))
    show(list(server.command), home, note=" &")
    with server:
        print(f"  serving after {server.started_in:.0f} s (log: {server.log})", flush=True)
        show(["curl", f"http://127.0.0.1:{server.port}/v1/chat/completions", "-d", "..."])
        check_answer(server.ask(QUESTION))
    seconds = server.weights_seconds()
    if seconds is not None:
        print(f"  in its log: Loading weights took {seconds} seconds", flush=True)
    print("  server stopped", flush=True)


def measure(candidates: dict[str, tuple[Path, list[str], Path | None]]) -> None:
    """A small table: each load in a process of its own, the kinds in turn, medians."""
    heading("Loading, measured")
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in candidates}
    for _ in range(REPETITIONS):
        for name, (folder, loader, home) in candidates.items():
            command = ["python", "examples/measure_load.py", str(folder), *loader]
            runs[name].append(json.loads(run(command, home, quiet=True).stdout))
    print(f"  {'':8}{'load':>9}{'load and first token':>23}{'weight files':>17}{'peak memory':>14}{'before load':>14}")
    for name, (folder, _, _) in candidates.items():
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        load, seconds, peak, base = (
            statistics.median(one[what] for one in runs[name]) for what in ("load", "seconds", "peak", "base")
        )
        print(
            f"  {name:8}{load:7.2f} s{seconds:21.2f} s{size:17,}{peak / 1e6:11.0f} MB{base / 1e6:11.0f} MB", flush=True
        )
    print(
        f"  Transformers on the CPU, files in the page cache, median of {REPETITIONS} fresh processes. A plain load only maps its\n"
        "  file and reads it when it is first used, hence the first token. Memory is VmHWM, mapped file pages included."
    )


def demo(*, plain: bool) -> None:
    """All steps, in order."""
    heading("Get SmolLM2-135M-Instruct (converted once, then kept outside this folder)")
    show(["python", "examples/real_models.py", "smollm2"])
    if not any(real_models.cache_root().glob("SmolLM2*/config.json")):
        print("  converting it now, half a minute ...", flush=True)
    source = real_models.smollm2()
    indent(str(source).replace(str(Path.home()) + "/", "~/"))
    shutil.rmtree(WORK, ignore_errors=True)
    for folder in (HOME, STRANGER, NOBODY):
        folder.mkdir(parents=True, mode=0o700)
    candidates: dict[str, tuple[Path, list[str], Path | None]] = {"plain": (source, [], None)}
    if plain:
        ask_transformers(source, [], None)
        ask_vllm(source, [], None)
    else:
        make_keys_and_encrypt(source)
        show_refusals()
        ask_transformers(ENCRYPTED, ["secure"], HOME)
        ask_vllm(ENCRYPTED, ["--load-format", "secure"], HOME)
        candidates["secure"] = (ENCRYPTED, ["secure"], HOME)
    measure(candidates)


def main() -> int:
    """Run the demo; 0 if every step did what it should."""
    parser = argparse.ArgumentParser(description="Encrypt a real language model and let it answer.")
    parser.add_argument("--plain", action="store_true", help="leave encryption out: does the rest work here?")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    # However we are asked to stop, leave by way of the exceptions that stop the server.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda signum, _: sys.exit(128 + signum))
    start = time.monotonic()
    try:
        demo(plain=arguments.plain)
    except (DemoError, ServerError) as error:
        print(f"\ndemo: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted; nothing is left running", file=sys.stderr)
        return 130
    print(f"\nEverything did what it should, in {time.monotonic() - start:.0f} s. Look around in {WORK}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
