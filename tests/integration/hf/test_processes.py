"""Threads with different keys, child processes, and a script that imports nothing of ours."""

from __future__ import annotations

import base64
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from importlib import metadata

import pytest
import torch
from transformers import AutoModelForCausalLM

from secure_loader.errors import EncryptedFileError, KeyAccessError

from .conftest import logits, same_weights


def test_threads_with_different_keys(sharded, tied, publisher, stranger, tmp_path):
    other = stranger.encrypt(tied.plain, tmp_path / "other")
    expected = {
        sharded.secure: AutoModelForCausalLM.from_pretrained(sharded.plain),
        other: AutoModelForCausalLM.from_pretrained(tied.plain),
    }
    failures: list[object] = []
    start = threading.Barrier(4)

    def work(folder, owner, thief):
        try:
            start.wait()
            for _ in range(3):
                if not same_weights(AutoModelForCausalLM.from_pretrained(folder, **owner.load), expected[folder]):
                    failures.append("different weights")
                config = {"keys": [thief.master], "trust": [str(owner.trust)]}
                with pytest.raises(KeyAccessError):
                    AutoModelForCausalLM.from_pretrained(folder, loader="secure", loader_config=config)
        except BaseException as e:  # noqa: BLE001 - shown by the main thread
            failures.append(e)

    jobs = [(sharded.secure, publisher, stranger), (other, stranger, publisher)] * 2
    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_plain_reads_while_a_secure_load_runs(sharded, tied, publisher):
    """A session holds for its thread: others read as ever, and may not read what is encrypted."""
    from safetensors.torch import load_file

    stop, failures, rounds = threading.Event(), [], [0]

    def read():
        while not stop.is_set():
            try:
                load_file(tied.plain / "model.safetensors")
                with pytest.raises(EncryptedFileError):
                    load_file(tied.secure / "model.secure.safetensors")
                rounds[0] += 1
            except BaseException as e:  # noqa: BLE001 - shown by the main thread
                failures.append(e)
                return

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(5):
        AutoModelForCausalLM.from_pretrained(sharded.secure, **publisher.load)
    stop.set()
    thread.join()
    assert failures == []
    assert rounds[0] > 0


SCRIPT = """
import sys, torch
{activate}
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], loader="secure")
torch.save(model.state_dict(), sys.argv[2])
"""


@pytest.fixture
def environment(publisher, secure_loader_home):
    """A home folder and an environment variable with the key, as a person would have them."""
    trust = secure_loader_home / "trust"
    trust.mkdir(exist_ok=True)
    (trust / "publisher.json").write_bytes(publisher.trust.read_bytes())
    (trust / "publisher.json").chmod(0o644)
    secret = base64.urlsafe_b64encode(publisher.master.secret.reveal()).rstrip(b"=").decode()
    jwk = {"kty": "oct", "kid": publisher.master.kid, "alg": "A256GCM", "k": secret}
    return os.environ | {
        "MODEL_KEY": json.dumps(jwk),
        "SECURE_LOADER_KEYS": "env:MODEL_KEY",
        "SECURE_LOADER_HOME": str(secure_loader_home),
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }


@pytest.mark.parametrize("activate", ["", "import secure_loader.hf"], ids=["entry point", "import"])
def test_script(activate, tied, environment, tmp_path):
    if not activate:
        _needs_installation()
    script = SCRIPT.format(activate=activate)
    command = [sys.executable, "-W", "error::ImportWarning", "-c", script, str(tied.secure), str(tmp_path / "state.pt")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    plain = AutoModelForCausalLM.from_pretrained(tied.plain).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in plain.items())


def _needs_installation():
    if not [e for e in metadata.entry_points(group="torch.backends") if e.name == "secure_loader"]:
        pytest.skip("secure_loader is not installed in this environment, only on the path")


# Transformers imports torch from here or there, and only then is our entry point called: some of the modules that are
# to be prepared are halfway through by then.
FIRST_IMPORTS = [
    "from transformers import AutoModelForCausalLM",
    "from transformers import AutoTokenizer",
    "from transformers import pipeline",
    "from transformers import LlamaForCausalLM",
    "import transformers.modeling_utils",
    "import transformers.models.auto.modeling_auto",
    "import torch",
]


@pytest.mark.parametrize("first", FIRST_IMPORTS)
def test_the_entry_point_prepares_everything_whatever_comes_first(first, environment):
    _needs_installation()
    script = (
        f"{first}\n"
        "from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel\n"
        "for kind in (AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel):\n"
        "    try:\n        kind.from_pretrained('nowhere', loader='nonsense')\n"
        "    except Exception as e:\n        print(type(e).__name__)\n"
    )
    command = [sys.executable, "-W", "error::ImportWarning", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["ConfigError"] * 5, done.stderr


def test_script_with_the_entry_point_switched_off(tied, environment, tmp_path):
    """Without the hook nothing is found under upstream's names: it fails closed."""
    command = [sys.executable, "-c", SCRIPT.format(activate=""), str(tied.secure), str(tmp_path / "state.pt")]
    environment = environment | {"SECURE_LOADER_AUTOLOAD": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no file named model.safetensors" in done.stderr
    assert not (tmp_path / "state.pt").exists()


def test_activation_after_transformers(tied, environment, tmp_path):
    """Imported last, after others took their copies of safetensors' and Transformers' names."""
    script = (
        "import sys\n"
        "from safetensors import safe_open\nfrom safetensors.torch import load_file\n"
        "from transformers import AutoModelForCausalLM, pipeline\nimport transformers.modeling_utils\n"
        "import accelerate.utils.offload\nimport secure_loader.hf\n"
        "from secure_loader.hf import routing\n"
        "assert safe_open is routing.safe_open and transformers.modeling_utils.safe_open is routing.safe_open\n"
        "assert accelerate.utils.offload.safe_open is routing.offload_safe_open\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], loader='secure')\n"
        "pipeline('text-generation', sys.argv[1], loader='secure')\n"
        "try:\n    load_file(sys.argv[1] + '/model.secure.safetensors')\nexcept Exception as e:\n    print(type(e).__name__)\n"
    )
    environment = environment | {"SECURE_LOADER_AUTOLOAD": "0"}
    command = [sys.executable, "-c", script, str(tied.secure)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "EncryptedFileError"


def _child(folder, trust, key, pipe):
    """What a spawned or forked worker does."""
    import torch
    from transformers import AutoModelForCausalLM

    import secure_loader.hf  # noqa: F401 - activates
    from secure_loader import MasterKey
    from secure_loader.core.aead import ALGORITHMS
    from secure_loader.core.secrets import Secret

    torch.set_num_threads(1)
    master = MasterKey("publisher-master", ALGORITHMS["aes256gcm"], Secret(bytearray(key)))
    config = {"keys": [master], "trust": [trust]}
    model = AutoModelForCausalLM.from_pretrained(folder, loader="secure", loader_config=config)
    pipe.send(model.state_dict()["lm_head.weight"].float().sum().item())
    pipe.close()


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_child_process(method, sharded, publisher):
    model = AutoModelForCausalLM.from_pretrained(sharded.secure, **publisher.load)
    logits(model)
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    arguments = (str(sharded.secure), str(publisher.trust), bytes(publisher.master.secret.reveal()), theirs)
    process = context.Process(target=_child, args=arguments)
    process.start()
    theirs.close()
    assert ours.poll(60)
    assert ours.recv() == model.state_dict()["lm_head.weight"].float().sum().item()
    process.join(30)
    assert process.exitcode == 0


def _fork_while_loading(pipe, folder, load):
    from secure_loader.hf.context import loading

    with loading("secure", load["loader_config"]):
        pipe.send("free")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_fork_while_another_thread_loads(tied, publisher):
    """The child has a lock of its own: it does not wait for a thread that was left behind."""
    from secure_loader.hf.context import loading

    context = multiprocessing.get_context("fork")
    inside, done = threading.Event(), threading.Event()

    def hold():
        with loading("secure", publisher.config):
            inside.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(60)
    ours, theirs = context.Pipe()
    process = context.Process(target=_fork_while_loading, args=(theirs, str(tied.secure), publisher.load))
    process.start()
    try:
        assert ours.poll(30)
    finally:
        done.set()
        thread.join()
        process.join(30)
