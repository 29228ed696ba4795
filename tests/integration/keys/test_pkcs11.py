"""``pkcs11:`` keys on SoftHSM, and on a module with faults: they wrap and unwrap where they are, or it is said why not."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

import secure_loader
from secure_loader import encrypt_model
from secure_loader.cli import main
from secure_loader.config import LoaderConfig
from secure_loader.core.aead import ALGORITHMS
from secure_loader.core.archive import Archive
from secure_loader.core.checkpoint import Checkpoint
from secure_loader.core.keys import pkcs11
from secure_loader.core.keys.pkcs11 import Pkcs11Provider, parse_uri
from secure_loader.core.keys.provider import KeyRequest, KeyRing, key_check_value
from secure_loader.core.recipient import Recipient, WrapContext
from secure_loader.core.secrets import looks_like_key
from secure_loader.core.session import Session
from secure_loader.errors import (
    ConfigError,
    KeyAccessError,
    KeySourceDeniedError,
    KeySourceResponseError,
    KeySourceUnreachableError,
)
from tests.attacks.kit import KEY, SIGN, assert_no_secret, build_folder, build_source, master, refused, shard, trust
from tests.integration.keys.devices import PIN, SOFTHSM, SoftHsm, faulty_module

CONTEXT = WrapContext(KEY.kid, KEY.algorithm.name, "demo/model")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> SoftHsm:
    """Two tokens; on the first some keys."""
    made = SoftHsm(tmp_path_factory.mktemp("softhsm"))
    for label in ("models", "other"):
        made.token(label)
    made.key("llm-kek", "--id", "01", "--sensitive")
    made.key("llm-kek", "--id", "01", "--sensitive", token="other")
    made.key("small", "--sensitive", kind="AES:16")
    return made


@pytest.fixture
def hsm(tokens, monkeypatch) -> SoftHsm:
    monkeypatch.setenv("SOFTHSM2_CONF", str(tokens.settings))
    monkeypatch.setattr(pkcs11, "_refused", set())
    return tokens


@pytest.fixture(scope="module")
def faults(tmp_path_factory) -> Path:
    return faulty_module(tmp_path_factory.mktemp("faults"))


@pytest.fixture
def fault(hsm, faults, tmp_path, monkeypatch):
    """Chooses a fault; returns the reference of a key behind it."""
    logins = tmp_path / "logins"
    logins.touch()
    monkeypatch.setenv("SOFTHSM", str(SOFTHSM))
    monkeypatch.setenv("LOGINS", str(logins))

    def choose(name: str = "") -> str:
        monkeypatch.setenv("FAULT", name)
        return where(hsm, module=faults)

    choose.logins = lambda: len(logins.read_text().splitlines())
    return choose


def where(hsm: SoftHsm, key: str = "token=models;object=llm-kek", module: Path = SOFTHSM) -> str:
    return f"{key}?module-path={module}&pin-source=file:{hsm.pin}"


def service(**more) -> Pkcs11Provider:
    made = Pkcs11Provider()
    made.configure(LoaderConfig(**more))
    return made


def asking(*recipients: Recipient, context: WrapContext = CONTEXT, key=KEY) -> KeyRequest:
    file_id = bytes(16)
    kcv = key_check_value(key.secret, file_id)
    return KeyRequest(context.kid, ALGORITHMS[context.algorithm], context.model_id, file_id, kcv, recipients)


def resolve(reference: str, request: KeyRequest, **more):
    return KeyRing([f"pkcs11:{reference}"], LoaderConfig(**more)).resolve(request)


def is_key(unwrapper, key=KEY) -> bool:
    return bytes(unwrapper.secret.reveal()) == bytes(key.secret.reveal())


# --- keys ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kek", ["llm-kek", "small"])
@pytest.mark.parametrize("algorithm", ["aes256gcm", "aes128gcm", "chacha20poly1305"])
def test_what_is_wrapped_is_unwrapped(hsm, kek, algorithm):
    key = master(algorithm=algorithm)
    context = dataclasses.replace(CONTEXT, algorithm=algorithm)
    reference = where(hsm, f"token=models;object={kek}")
    entry = service().wrap(reference, key.secret, context)
    assert (entry.alg, entry.kid) == ("pkcs11", f"token=models;object={kek}")
    assert len(entry.wrapped) == 12 + len(key.secret) + 16
    assert bytes(key.secret.reveal()) not in entry.wrapped
    assert is_key(resolve(reference, asking(entry, context=context, key=key)), key)
    again = service().wrap(reference, key.secret, context)
    assert again.wrapped[:12] != entry.wrapped[:12], "a nonce is used once"


def test_names_of_a_key(hsm):
    """Whoever loads may say more or less than who published, where it is the same."""
    entry = service().wrap(where(hsm, "object=llm-kek;token=models;id=%01"), KEY.secret, CONTEXT)
    assert entry.kid == "token=models;object=llm-kek;id=%01"
    slot = next(text for text in hsm.run("softhsm2-util", "--show-slots").split("\nSlot ") if " models" in text)
    serial = re.search(r"Serial number: +(\w+)", slot)
    for name in (
        "token=models;id=%01",
        "token=models;object=llm%2dkek;type=secret-key",
        f"serial={serial[1]};object=llm-kek",
        "token=models;manufacturer=SoftHSM%20project;model=SoftHSM%20v2;object=llm-kek",
    ):
        assert is_key(resolve(where(hsm, name), asking(entry))), name
    for name in ("token=other;object=llm-kek", "token=models;object=small", "token=models;object=llm-kek;id=%02"):
        with refused(KeyAccessError, "no master key with kid"):
            resolve(where(hsm, name), asking(entry))


@pytest.mark.parametrize(
    "other", [{"kid": "enc-2"}, {"algorithm": "chacha20poly1305"}, {"model_id": "demo/other"}, {"model_id": ""}]
)
def test_an_entry_is_for_one_key_of_one_model(hsm, other):
    entry = service().wrap(where(hsm), KEY.secret, CONTEXT)
    with refused(KeySourceDeniedError, "was wrapped with another, or for another model"):
        resolve(where(hsm), asking(entry, context=dataclasses.replace(CONTEXT, **other)))


def test_an_altered_entry(hsm):
    entry = service().wrap(where(hsm), KEY.secret, CONTEXT)
    for at in (0, 12, -1):
        wrapped = bytearray(entry.wrapped)
        wrapped[at] ^= 1
        with refused(KeySourceDeniedError, "the key does not open it"):
            resolve(where(hsm), asking(dataclasses.replace(entry, wrapped=bytes(wrapped))))
    for wrapped in (b"x", entry.wrapped[:27], entry.wrapped[:-1], entry.wrapped + b"x", bytes(8192)):
        with refused(KeySourceDeniedError, "the key does not open it"):
            resolve(where(hsm), asking(dataclasses.replace(entry, wrapped=wrapped)))


def test_the_same_name_on_another_token(hsm):
    """An entry that somebody moved to another key of the same label."""
    entry = service().wrap(where(hsm), KEY.secret, CONTEXT)
    moved = dataclasses.replace(entry, kid="token=other;object=llm-kek")
    with refused(KeySourceDeniedError, "the key does not open it"):
        resolve(where(hsm, moved.kid), asking(moved))


def test_several_that_could_be_meant(hsm):
    hsm.key("twice", "--id", "10", "--sensitive")
    hsm.key("twice", "--id", "11", "--sensitive")
    with refused(KeyAccessError, "the token has several such AES keys"):
        service().wrap(where(hsm, "token=models;object=twice"), KEY.secret, CONTEXT)
    with refused(KeyAccessError, "2 tokens could be meant"):
        service().wrap(where(hsm, "object=llm-kek"), KEY.secret, CONTEXT)
    entries = [service().wrap(where(hsm, f"token=models;id=%{i}"), KEY.secret, CONTEXT) for i in (10, 11)]
    assert is_key(resolve(where(hsm, "token=models;id=%11"), asking(*entries)))


def test_what_is_not_there(hsm):
    with refused(KeySourceResponseError, "pkcs11:token=models;object=nothing", "has no such AES key"):
        service().wrap(where(hsm, "token=models;object=nothing"), KEY.secret, CONTEXT)
    with refused(KeySourceUnreachableError, "there is no such token"):
        service().wrap(where(hsm, "token=nothing;object=llm-kek"), KEY.secret, CONTEXT)


def test_a_key_that_can_be_read_protects_nothing(hsm):
    hsm.key("clear", "--extractable")
    with refused(KeyAccessError, "hands the key out in clear (CKA_SENSITIVE is false)"):
        service().wrap(where(hsm, "token=models;object=clear"), KEY.secret, CONTEXT)


# --- PINs ----------------------------------------------------------------------------------------------------------


def test_a_pin_in_a_variable(hsm, monkeypatch):
    reference = f"token=models;object=llm-kek?module-path={SOFTHSM}"
    with refused(KeyAccessError, "the token asks for a PIN, and there is none"):
        service().wrap(reference, KEY.secret, CONTEXT)
    monkeypatch.setenv(pkcs11.PIN_VARIABLE, PIN)
    entry = service().wrap(reference, KEY.secret, CONTEXT)
    assert pkcs11.PIN_VARIABLE not in os.environ, "it is removed, and remembered"
    assert is_key(resolve(reference, asking(entry)))
    secure_loader.forget_keys()
    with refused(KeyAccessError, "the token asks for a PIN, and there is none"):
        resolve(reference, asking(entry))


def test_a_wrong_pin_is_tried_once(hsm, fault, tmp_path):
    reference = fault()
    entry = service().wrap(reference, KEY.secret, CONTEXT)
    wrong = tmp_path / "wrong"
    wrong.touch(0o600)
    wrong.write_text("hunter2")
    bad = reference.replace(str(hsm.pin), str(wrong))
    before = fault.logins()
    with refused(KeySourceDeniedError, "the token refuses the PIN (CKR_PIN_INCORRECT)"):
        resolve(bad, asking(entry))
    for _ in range(3):  # other files, other loads
        with refused(KeySourceDeniedError, "the token refused this PIN before; it is not tried again"):
            resolve(bad, asking(entry))
    assert fault.logins() == before + 1
    wrong.write_text(PIN)
    assert is_key(resolve(bad, asking(entry))), "another PIN is tried"


def test_many_files_and_threads_with_a_wrong_pin(hsm, fault, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.touch(0o600)
    wrong.write_text("hunter2")
    bad = fault().replace(str(hsm.pin), str(wrong))
    requests = [asking(Recipient("pkcs11", "token=models;object=llm-kek", bytes([i] * 60))) for i in range(6)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        errors = [pool.submit(resolve, bad, request) for request in requests]
        kinds = {type(e.exception(timeout=30)) for e in errors}
    assert kinds == {KeySourceDeniedError}
    assert fault.logins() == 1


@pytest.mark.parametrize(
    ("name", "words"), [("final try", "would lock the token, so none is tried"), ("locked", "the token is locked")]
)
def test_the_last_try_is_left_to_somebody_else(fault, name, words):
    with refused(KeySourceDeniedError, words):
        service().wrap(fault(name), KEY.secret, CONTEXT)
    assert fault.logins() == 0


def test_pin_files_are_kept_as_keys_are(hsm, tmp_path):
    pin = tmp_path / "pin"
    pin.write_text(PIN)
    pin.chmod(0o644)
    reference = where(hsm).replace(str(hsm.pin), str(pin))
    with refused(KeyAccessError, "PIN file can be read by others (mode 0644)", place=pin):
        service().wrap(reference, KEY.secret, CONTEXT)
    pin.chmod(0o600)
    for text in ("", "\n", "a\nb", "x" * 300):
        pin.write_text(text)
        with refused(KeyAccessError, "does not hold a PIN"):
            service().wrap(reference, KEY.secret, CONTEXT)
    with refused(KeyAccessError, "pin-source of a pkcs11: reference is no absolute path"):
        service().wrap(reference.replace(str(pin), "pin"), KEY.secret, CONTEXT)
    pin.unlink()
    with refused(KeyAccessError, "PIN file cannot be read: No such file"):
        service().wrap(reference, KEY.secret, CONTEXT)


def test_a_pin_in_a_reference(hsm):
    reference = f"{where(hsm)}&pin-value={PIN}"
    with refused(KeyAccessError, "holds the PIN itself"):
        service().wrap(reference, KEY.secret, CONTEXT)
    assert looks_like_key(f"pkcs11:{reference}")
    for refuse in (lambda: KeyRing([f"pkcs11:{reference}"]), lambda: LoaderConfig(keys=(f"pkcs11:{reference}",))):
        with pytest.raises(ConfigError, match="never key material") as caught:
            refuse()
        assert PIN not in str(caught.value)


def test_pins_and_keys_show_nowhere(hsm, fault, faults):
    """Whatever goes wrong: not in the message, not in local variables of ours that crash reporters print."""
    entry = service().wrap(where(hsm), KEY.secret, CONTEXT)
    reference = where(hsm, module=faults)
    asks = (lambda: service().wrap(reference, KEY.secret, CONTEXT), lambda: resolve(reference, asking(entry)))
    for name, ask in itertools.product(("crash", "exit", "removed", "locked", "short"), asks):
        fault(name)
        with pytest.raises(KeyAccessError) as caught:
            ask()
        frames = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
        shown = "".join(str(f.locals) for f in frames.stack if "/secure_loader/" in f.filename) + str(caught.value)
        assert PIN not in shown
        assert str(hsm.pin) not in str(caught.value)
        assert_no_secret(shown)


# --- modules -------------------------------------------------------------------------------------------------------


def test_a_module_by_variable(hsm, monkeypatch):
    reference = f"token=models;object=llm-kek?pin-source={hsm.pin}"
    with refused(KeyAccessError, "no PKCS#11 module is named"):
        service().wrap(reference, KEY.secret, CONTEXT)
    monkeypatch.setenv(pkcs11.MODULE_VARIABLE, str(SOFTHSM))
    assert is_key(resolve(reference, asking(service().wrap(reference, KEY.secret, CONTEXT))))


def test_modules_that_are_none(hsm, tmp_path):
    module = tmp_path / "module.so"
    with refused(KeyAccessError, "the module must be a file, with its whole path"):
        service().wrap(where(hsm, module=module), KEY.secret, CONTEXT)
    with refused(KeyAccessError, "the module must be a file, with its whole path"):
        service().wrap(where(hsm, module=Path("libsofthsm2.so")), KEY.secret, CONTEXT)
    module.write_text("hunter2")
    with refused(KeyAccessError, "the module cannot be used", "module.so"):
        service().wrap(where(hsm, module=module), KEY.secret, CONTEXT)
    libc = next(
        Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so" in line
    )
    with refused(KeyAccessError, "the module cannot be used", "C_GetFunctionList"):
        service().wrap(where(hsm, module=libc), KEY.secret, CONTEXT)
    module.chmod(0o666)
    with refused(KeyAccessError, "PKCS#11 module could have been written by others", place=module):
        service().wrap(where(hsm, module=module), KEY.secret, CONTEXT)


def test_a_module_that_hangs_then_works_again(hsm, fault):
    entry = service().wrap(fault(), KEY.secret, CONTEXT)
    start = time.monotonic()
    with refused(KeySourceUnreachableError, "key source pkcs11:token=models;object=llm-kek: no answer within 0.3 s"):
        resolve(fault("hang"), asking(entry), key_timeout_seconds=0.3)
    assert time.monotonic() - start < 5
    assert is_key(resolve(fault(), asking(entry)))


def test_many_threads_and_a_module_that_hangs(hsm, fault):
    """Each with files of its own to open: none waits for the deadlines of the others as well."""
    entry, reference, found = service().wrap(fault(), KEY.secret, CONTEXT), fault("hang"), []

    def ask():
        start = time.monotonic()
        with pytest.raises(KeySourceUnreachableError, match=r"no answer within 0\.5 s"):
            resolve(reference, asking(entry), key_timeout_seconds=0.5)
        found.append(time.monotonic() - start)

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    assert max(found) < 5  # one after the other they take 6 s
    assert is_key(resolve(fault(), asking(entry)))


@pytest.mark.parametrize(
    "said", ["", "-", "-{}", '-{"kind": "no", "text": "", "pin": false}', "-[", "-" + "[" * 2000, "-\\xff"]
)
def test_a_process_that_says_something_else(hsm, fault, tmp_path, monkeypatch, said):
    """Code of the module is in it, and may have the better of ours."""
    child = tmp_path / "child.py"
    child.write_text(f"import os; os.write(1, {said!r}.encode('latin-1'))")
    monkeypatch.setattr(pkcs11, "_CHILD", str(child))
    with refused(KeySourceResponseError if said else KeySourceUnreachableError, "the process with the module"):
        service().wrap(fault(), KEY.secret, CONTEXT)


def test_a_process_that_shows_the_pin_and_hangs(hsm, fault):
    """Another one waits for it, but not longer than its deadline."""
    reference = fault("hang")
    script = (
        "import sys; from tests.integration.keys.test_pkcs11 import *; "
        "print('asking', flush=True); service().wrap(sys.argv[1], KEY.secret, CONTEXT)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, reference],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[3],
    )
    try:
        assert process.stdout.readline() == b"asking\n"
        time.sleep(0.3)
        with refused(KeySourceUnreachableError, "no answer within 0.5 s"):
            service(key_timeout_seconds=0.5).wrap(fault(), KEY.secret, CONTEXT)
        assert fault.logins() == 0
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 1
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()
    # The module ignores alarms, and nobody is there to end it.
    for _ in range(500):
        if not Path(f"/proc/{children[0]}").exists():
            break
        time.sleep(0.01)
    else:
        pytest.fail("the process with the module lives on")
    assert is_key(resolve(fault(), asking(service().wrap(fault(), KEY.secret, CONTEXT))))


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("crash", KeySourceUnreachableError, "the process with the module crashed (signal 6)"),
        ("exit", KeySourceUnreachableError, "the process with the module ended without an answer"),
        ("removed", KeySourceUnreachableError, "C_Login fails (CKR_DEVICE_REMOVED)"),
        ("no gcm", KeySourceResponseError, "AES-GCM fails (CKR_MECHANISM_INVALID)"),
        ("own nonce", KeySourceResponseError, "does not open what it has just wrapped"),
        ("short", KeySourceResponseError, "does not open what it has just wrapped"),
    ],
)
def test_modules_with_faults(fault, name, kind, words):
    with refused(kind, words):
        service().wrap(fault(name), KEY.secret, CONTEXT)


def test_a_key_of_the_wrong_length(fault):
    entry = service().wrap(fault(), KEY.secret, CONTEXT)
    with refused(KeyAccessError, "has 5 bytes instead of 32"):
        resolve(fault("short"), asking(entry))


def test_a_module_that_never_ends(fault):
    """What it has said counts; it is ended."""
    reference = fault("never ends")
    entry = service().wrap(reference, KEY.secret, CONTEXT)
    assert is_key(resolve(reference, asking(entry)))


def test_nothing_of_the_module_is_in_this_process(hsm):
    service().wrap(where(hsm), KEY.secret, CONTEXT)
    assert "softhsm" not in Path("/proc/self/maps").read_text()


def test_variables_of_ours_are_not_for_the_module(hsm, fault, tmp_path, monkeypatch):
    monkeypatch.setenv("SECURE_LOADER_PASSPHRASE", "hunter2")
    seen = tmp_path / "environ"
    monkeypatch.setenv("LOGINS", str(seen))
    for name in ("VAULT_TOKEN", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "DB_PASSWORD"):
        monkeypatch.setenv(name, "private-word")
    monkeypatch.setenv("MODEL_KEY", json.dumps(KEY.document()))
    service().wrap(fault("copy environment"), KEY.secret, CONTEXT)
    assert b"FAULT=copy environment" in seen.read_bytes()
    assert b"private-word" not in seen.read_bytes()
    assert b"MODEL_KEY" not in seen.read_bytes()
    assert b"hunter2" not in seen.read_bytes()


# --- references ----------------------------------------------------------------------------------------------------


def test_spellings_of_one_uri():
    uri = parse_uri("type=secret-key;object=a%20b%3b;id=%00%fF;token=%c3%bc?pin-source=/p%26q&module-path=/x%3By")
    assert uri.token == {"token": "ü"}
    assert uri.object == {"object": "a b;", "id": "00ff"}
    assert uri.name == "token=%C3%BC;object=a%20b%3B;id=%00%FF"
    assert (uri.module, uri.pin) == ("/x;y", "/p&q")
    assert parse_uri(uri.name).object == uri.object


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("", "is no PKCS#11 URI"),
        ("token=models", "names no secret key"),
        ("object=k;type=private", "names no secret key"),
        ("object=k;object=k", "says object twice"),
        ("object=k;slot-id=1", "says slot-id, which is not understood"),
        ("object=k?module-name=opensc", "says module-name, which is not understood"),
        ("object=k?module-path=/a&module-path=/b", "says module-path twice"),
        ("object=", "is no PKCS#11 URI"),
        ("object=a b", "is no PKCS#11 URI"),
        ("object=a%0", "is no PKCS#11 URI"),
        ("object=a%0a", "holds characters in object that cannot be shown"),
        ("object=%ff", "holds characters in object that cannot be shown"),
        ("hunter2", "is no PKCS#11 URI"),
    ],
)
def test_references_that_are_none(reference, words):
    with refused(KeyAccessError, words):
        parse_uri(reference)


@given(st.text(min_size=1), st.text(min_size=1), st.binary(min_size=1))
def test_names_survive_their_spelling(token, label, number):
    quoted = ";".join(f"{n}={quote(v, safe='')}" for n, v in (("token", token), ("object", label), ("id", number)))
    try:
        uri = parse_uri(quoted)
    except KeyAccessError:
        assert not (token + label).isprintable()
    else:
        assert (uri.token, uri.object) == ({"token": token}, {"object": label, "id": number.hex()})
        assert parse_uri(uri.name) == uri


@given(st.text(alphabet="abdeijknopt=;?&%0f1\u00e9 ") | st.text())
def test_any_text_is_a_uri_or_refused(text):
    with contextlib.suppress(KeyAccessError):
        uri = parse_uri(text)
        assert parse_uri(uri.name).name == uri.name


def test_a_file_may_name_anything(hsm):
    """kids of other entries are what somebody wrote, and not for us."""
    entry = service().wrap(where(hsm), KEY.secret, CONTEXT)
    others = [Recipient("pkcs11", kid, b"x") for kid in ("", "hunter2", "token=models", "object=%ff") if kid]
    assert is_key(resolve(where(hsm), asking(entry, *others)))


# --- models --------------------------------------------------------------------------------------------------------


def test_a_model_for_a_token(hsm, fault, tmp_path):
    """One request opens a folder of three files."""
    reference = f"pkcs11:{fault()}"
    source = build_source(tmp_path / "plain", shards=3)
    encrypt_model(source, tmp_path / "secure", signing_key=SIGN, model_id="demo/model", recipients=[reference])
    before = fault.logins()
    checkpoint = Checkpoint(tmp_path / "secure", Session(keys=[reference], trust=trust(), config=LoaderConfig()))
    found = {}
    for name in checkpoint.shards():
        with Archive(checkpoint.open(name), "numpy") as f:
            found |= f.get_tensors()
    assert len(found) == 6
    assert fault.logins() == before + 1
    with refused(KeyAccessError, "no master key with kid"):
        other = Session(
            keys=[f"pkcs11:{where(hsm, 'token=other;object=llm-kek')}"], trust=trust(), config=LoaderConfig()
        )
        with Archive(Checkpoint(tmp_path / "secure", other).open(name), "numpy") as f:
            f.get_tensors()


def test_processes_that_open_one_token_at_once(hsm, tmp_path):
    folder = build_folder(tmp_path / "secure", recipients=[f"pkcs11:{where(hsm)}"])
    (tmp_path / "trust.json").write_text(json.dumps(SIGN.verify_key().document()))
    script = (
        "import sys; from secure_loader import safe_open\n"
        "with safe_open(sys.argv[1], 'numpy', keys=[sys.argv[2]], trust=sys.argv[3], strict=True) as f: print(sorted(f.get_tensors()))"
    )
    words = [sys.executable, "-c", script, shard(folder), f"pkcs11:{where(hsm)}"]
    running = [
        subprocess.Popen([*words, tmp_path / "trust.json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in running:
        out, error = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "['layer1.a', 'layer1.b']\n"), error


def test_the_commands_of_the_guide(hsm, tmp_path, secure_loader_home, monkeypatch):
    """What docs/keys.md says, word for word, but for the place of the PIN."""
    text = (Path(__file__).parents[3] / "docs" / "keys.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text.split("### PKCS#11\n")[1].split("\n### ")[0], re.DOTALL)
    assert len(blocks) == 2
    build_source(tmp_path / "model")
    hsm.token("production")
    monkeypatch.chdir(tmp_path)
    assert main(["keygen", "alice"]) == 0
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for block in blocks:
        script = block.replace("/etc/secure_loader/pin", str(hsm.pin))
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert PIN not in done.stdout + done.stderr
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        assert (tmp_path / "model-again" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
