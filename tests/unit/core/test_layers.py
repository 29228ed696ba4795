"""Inside core, lower never imports higher; and importing the package costs next to nothing."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import secure_loader

PACKAGE = Path(secure_loader.__file__).parent

# From the bottom up; modules on one line do not import each other.
LAYERS = (
    "errors",
    "core.types core.base64_text core.keys.addresses core.secrets core.hardening core.report core.memory core.threads core.forks core.audit core.policy_child core.keys.pkcs11_child core.policy_corpus core.device.sources core.device.driver core.keys.asking core.keys.evidence",
    "core.pool core.device.triton_sbox core.device.triton_place",
    "core.strict_json core.home core.keys.lift core.keys.scrypt_file core.policy_engine core.device.nvrtc core.device.cubins core.device.device core.device.layout",
    "core.header core.recipient core.keys.carried core.device.batch core.device.torch_device config core.device.triton_aes",
    "core.aead core.keys.hybrid core.keys.mldsa core.device.abi core.device.host_tags core.device.selftest core.source core.device.triton_ghash",
    "core.device.workspace core.device.direct core.envelope core.atomic core.index core.tensors core.device.triton_gcm core.device.triton_tables",
    "core.trust_toml core.output core.device.launch core.device.cache core.keys.jwk core.slicing core.device.triton_kernels",
    "core.copying core.device.cuda core.keys.held core.keys.jwe core.trust_chain core.signing",
    "core.trust_rules",
    "core.device.choice core.keys.provider core.trust core.rollback core.pipeline",
    "core.unwrapping core.device.plan core.policy_clock core.policy_input",
    "core.device.ring core.device.straight core.policy",
    "core.device.transfer core.policy_lint",
    "core.device.engine",
    "core.keys.local core.manifest core.trust_files core.archive",
    "core.keys.ec core.keys.generate core.keys.descriptor core.keys.age core.keys.tls core.keys.tokens core.staging core.seal core.session core.survey core.prefetch core.device.ahead",
    "core.oms",
    "core.oms_check",
    "core.checkpoint core.keys.net core.keys.passphrase",
    "core.inspection core.environment core.keys.fetch core.keys.helper core.keys.tpm2_wire",
    "core.keys.vault_api core.keys.bearer core.keys.rcar",
    "core.oms_sign core.keys.https core.keys.vault core.keys.wrapping core.keys.kbs",
    "core.keys.recipients core.keys.kbs_publish core.keys.transit core.keys.awskms core.keys.gcpkms core.keys.azurekv core.keys.pkcs11 core.keys.tpm2",
    "core.writer",
    "core.single core.export core.rekey",
    "core.rewrap",
)
FOREIGN = {"cryptography", "tqdm"}
FRAMEWORKS = {"torch", "numpy", "ml_dtypes"}
# Which module talks to which optional package.
OPTIONAL = {
    "core.keys.age": {"pyrage"},
    "core.keys.awskms": {"botocore"},
    "core.device.choice": {"torch"},
    "core.device.direct": {"cuda"},
    "core.device.driver": {"cuda"},
    "core.device.nvrtc": {"cuda"},
    "core.device.selftest": {"torch"},
    "core.device.torch_device": {"torch"},
    "core.device.triton_sbox": {"triton"},
    "core.device.triton_aes": {"triton"},
    "core.device.triton_ghash": {"triton"},
    "core.device.triton_gcm": {"triton"},
    "core.device.triton_kernels": {"torch"},
    "core.device.triton_place": {"torch"},
    "core.policy_child": {"regorus"},
}


def modules() -> dict[str, Path]:
    found = {".".join(p.relative_to(PACKAGE).with_suffix("").parts): p for p in PACKAGE.glob("core/**/*.py")}
    found = {name: path for name, path in found.items() if not name.endswith("__init__")}
    return found | {"errors": PACKAGE / "errors.py", "config": PACKAGE / "config.py"}


def imports(name: str, path: Path) -> tuple[set[str], set[str]]:
    """Our own modules and foreign packages that a module imports anywhere, even inside functions."""
    known, ours, foreign = modules(), set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            foreign |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            foreign.add(node.module.partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = name.split(".")[: -node.level]
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                whole = ".".join([*base, alias.name])
                ours.add(whole if whole in known else ".".join(base) or "errors")  # the version, of the package itself
    return ours, {f for f in foreign if f not in sys.stdlib_module_names}


def test_every_module_has_its_layer():
    assert sorted(" ".join(LAYERS).split()) == sorted(modules())


def test_lower_never_imports_higher():
    height = {name: i for i, line in enumerate(LAYERS) for name in line.split()}
    upward = [
        f"{name} imports {other}"
        for name, path in modules().items()
        for other in imports(name, path)[0]
        if height[other] >= height[name]
    ]
    assert upward == []


def test_who_imports_what_from_outside():
    used = {name: imports(name, path)[1] for name, path in modules().items()}
    allowed = {name: FOREIGN | FRAMEWORKS | OPTIONAL.get(name, set()) for name in used}
    assert {name: fs - allowed[name] for name, fs in used.items() if fs - allowed[name]} == {}
    assert {name for name, fs in used.items() if fs & FRAMEWORKS} <= {"core.tensors", *OPTIONAL}


def test_tensors_is_the_only_file_that_names_frameworks_to_import():
    for name, path in modules().items():
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        for call in calls:
            called = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if (
                called in ("import_module", "_import", "__import__")
                and call.args
                and isinstance(call.args[0], ast.Constant)
            ):
                assert name == "core.tensors" or call.args[0].value.startswith("."), f"{name}: {call.args[0].value}"


MEASURE = """
import json, sys, time
start = time.perf_counter()
import secure_loader
print(json.dumps([time.perf_counter() - start, sorted({m.partition(".")[0] for m in sys.modules})]))
"""


def measure(code: str) -> list:
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)


def test_importing_the_package_is_quick_and_light():
    best = min((measure(MEASURE) for _ in range(3)), key=lambda m: m[0])
    assert best[0] < 0.05
    assert not {"torch", "numpy", "transformers", "vllm", "safetensors", "cryptography", "tqdm"} & set(best[1])


def test_opening_a_file_needs_no_framework_but_the_one_asked_for():
    code = MEASURE.replace("import secure_loader\n", "from secure_loader import *\nencrypt_model, safe_open, Session\n")
    assert not {"torch", "numpy", "transformers", "vllm", "safetensors", "tqdm"} & set(measure(code)[1])


def test_public_names_resolve():
    assert set(secure_loader.__all__) <= set(dir(secure_loader))
    for name in secure_loader.__all__:
        assert getattr(secure_loader, name) is not None
