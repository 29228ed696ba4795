"""``kbs:`` key sources against a strict broker of our own, and what a live Trustee answered to a client like ours."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from secure_loader import encrypt_model, safe_open
from secure_loader.config import LoaderConfig
from secure_loader.core.checkpoint import Checkpoint
from secure_loader.core.keys import evidence
from secure_loader.core.keys.jwe import open_jwe, public_jwk
from secure_loader.core.keys.provider import KeyRequest, KeyRing, key_check_value
from secure_loader.core.keys.rcar import report_data
from secure_loader.core.session import Session
from secure_loader.errors import ConfigError, KeyAccessError, KeySourceDeniedError, KeySourceResponseError
from tests.attacks.kit import KEY, SIGN, arrays, build_file, build_folder, master, refused, trust
from tests.integration.keys.kbs_peer import b64url, brokering, canonical, concat_kdf, unb64url
from tests.integration.keys.services import key_set, request_for

PATH = "models/key/demo"
JWK = json.dumps(KEY.document()).encode()
RECORDED = json.loads((Path(__file__).parent / "data" / "trustee-kbs-0.4.0.json").read_text())
FILE_ID = bytes(range(16))


@pytest.fixture(scope="module")
def running(localhost):
    with brokering(localhost) as peer:
        yield peer


@pytest.fixture
def peer(running):
    running.reset()
    running.resources[PATH] = JWK
    return running


@pytest.fixture(scope="module")
def hub_running():
    with brokering(None) as peer:
        yield peer


@pytest.fixture
def hub(hub_running):
    hub_running.reset()
    hub_running.resources[PATH] = JWK
    return hub_running


@pytest.fixture
def settings(authority, peer):
    """Settings of somebody whose broker is on this machine, and whose hardware is made up."""

    def make(**more) -> LoaderConfig:
        defaults = {
            "key_private_hosts": ["localhost"],
            "key_ca_file": authority.file,
            "key_timeout_seconds": 5,
            "kbs_url": peer.url,
            "kbs_evidence": "sample",
            "insecure_kbs_sample_evidence": True,
        }
        return LoaderConfig(**defaults | more)

    return make


@pytest.fixture
def passport(peer, tmp_path):
    """Settings of somebody who was attested earlier; the key in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    files = {
        "kbs_token_file": peer.issue(key.public_key()).encode() + b"\n",
        "kbs_token_key_file": key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    }
    for name, text in files.items():
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_bytes(text)
    return {"kbs_mode": "token"} | {name: str(tmp_path / name) for name in files}


def asking(key=KEY, **more) -> KeyRequest:
    """What a file of profile 1 asks for."""
    return request_for(key, file_id=FILE_ID, kcv=key_check_value(key.secret, FILE_ID), **more)


def resolve(config: LoaderConfig, reference: str = f"kbs:///{PATH}", request: KeyRequest | None = None):
    return KeyRing([reference], config).resolve(request or asking())


def is_key(unwrapper, key=KEY) -> bool:
    return bytes(unwrapper.secret.reveal()) == bytes(key.secret.reveal())


# --- what a resource may hold --------------------------------------------------------------------------------------


def test_a_jwk(peer, settings):
    assert is_key(resolve(settings()))
    assert peer.paths() == ["/auth", "/attest", f"/resource/{PATH}"]
    assert [c.headers.get("cookie") is None for c in peer.calls] == [True, False, False]
    assert not any("authorization" in c.headers for c in peer.calls)


def test_a_jwk_set(peer, settings):
    peer.resources[PATH] = b"\n " + key_set(master("other", 3), KEY)
    assert is_key(resolve(settings()))


def test_a_key_of_another_name(peer, settings):
    peer.resources[PATH] = key_set(master("other", 3))
    with refused(KeyAccessError, "no master key with kid 'enc-1'", "searched: kbs://"):
        resolve(settings())


@pytest.mark.parametrize("algorithm", ["aes256gcm", "aes128gcm", "chacha20poly1305"])
def test_nothing_but_the_key(algorithm, peer, settings):
    key = master("enc-1", 7, algorithm)
    peer.resources[PATH] = bytes(key.secret.reveal())
    assert is_key(resolve(settings(), request=asking(key)), key)


def test_a_bare_key_must_be_proven(peer, settings):
    peer.resources[PATH] = bytes(KEY.secret.reveal())
    with refused(KeySourceResponseError, "a key without a name, and the file has no value to check it against"):
        resolve(settings(), request=request_for(KEY))
    ring = KeyRing([f"kbs:///{PATH}"], settings())
    with refused(KeyAccessError, "key check value differs"):
        ring.resolve(asking(master("enc-1", 9)))
    peer.calls.clear()
    with refused(KeySourceResponseError, "a key without a name"):
        # What proved to be another's is not remembered under this name.
        ring.resolve(request_for(KEY))
    assert len(peer.calls) == 3


# --- how it is asked -----------------------------------------------------------------------------------------------


def test_the_reference_names_the_broker(peer, settings):
    config = settings(kbs_url="https://elsewhere.example")
    assert is_key(resolve(config, f"kbs://localhost:{peer.port}/{PATH}"))
    assert {c.headers["host"] for c in peer.calls} == {f"localhost:{peer.port}"}


def test_the_default_broker_may_come_from_the_environment(peer, monkeypatch):
    from secure_loader.config import load

    monkeypatch.setenv("SECURE_LOADER_KBS_URL", "https://kbs.example:8080")
    monkeypatch.setenv("SECURE_LOADER_KBS_MODE", "cdh")
    assert (load().kbs_url, load().kbs_mode) == ("https://kbs.example:8080", "cdh")


def test_a_file_opens_with_it(peer, settings, tmp_path):
    path = build_file(tmp_path / "model.safetensors")
    for resource in (JWK, bytes(KEY.secret.reveal())):
        peer.resources[PATH] = resource
        with safe_open(path, "numpy", keys=[f"kbs:///{PATH}"], trust=trust(), config=settings(), strict=True) as f:
            assert (f.get_tensor("big") == arrays()["big"]).all()


def test_from_pretrained(peer, settings, tmp_path, tiny_llama_shards):
    """A model folder of three files, by Transformers: every setting goes through its options."""
    import torch
    from transformers import AutoModelForCausalLM

    encrypt_model(tiny_llama_shards, tmp_path / "secure", key=KEY, signing_key=SIGN)
    signer = tmp_path / "signer.json"
    signer.write_text(json.dumps({"name": "publisher", "key": SIGN.verify_key().document()}))
    signer.chmod(0o644)
    config = settings(keys=f"kbs:///{PATH}", trust=str(signer))
    options = {
        f.name: getattr(config, f.name) for f in dataclasses.fields(config) if getattr(config, f.name) != f.default
    }
    secure = AutoModelForCausalLM.from_pretrained(tmp_path / "secure", loader="secure", loader_config=options)
    plain = AutoModelForCausalLM.from_pretrained(tiny_llama_shards)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, secure.state_dict()[name]), name
    assert peer.paths() == ["/auth", "/attest", f"/resource/{PATH}"]


def test_one_chain_for_a_folder(peer, settings, tmp_path):
    folder = build_folder(tmp_path / "model", shards=3)
    checkpoint = Checkpoint(folder, Session(keys=f"kbs:///{PATH}", trust=trust(), config=settings()))
    threads = []
    for name in checkpoint.shards():
        archive = checkpoint.open(name)
        threads.append(threading.Thread(target=archive.unlock))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert peer.paths() == ["/auth", "/attest", f"/resource/{PATH}"]


def test_a_session_that_the_broker_lost_is_begun_once_more(peer, settings):
    lost = []

    def forget(call):
        if not lost:
            lost.append(call.headers["cookie"])
            peer.sessions.clear()

    peer.faults["attest"] = forget
    assert is_key(resolve(settings()))
    assert peer.paths() == 2 * ["/auth", "/attest", f"/resource/{PATH}"]
    assert peer.calls[4].headers["cookie"] != lost[0]
    keys = [json.loads(c.body)["runtime-data"]["tee-pubkey"] for c in (peer.calls[1], peer.calls[4])]
    assert keys[0] != keys[1], "a key for each session"


def test_cookies_of_a_balancer_do_not_count(peer, settings):
    def balance(call):
        call.fields = [("Set-Cookie", "AWSALB=x; Path=/"), *call.fields, ("set-cookie", "a=kbs-session-id=b")]

    peer.faults["auth"] = peer.faults["attest"] = balance
    assert is_key(resolve(settings()))
    assert all(c.headers["cookie"].startswith("kbs-session-id=") for c in peer.calls[1:])


@pytest.mark.parametrize("selected", ["sha256", "sha384", "SHA512"])
def test_the_broker_may_select_a_hash(selected, peer, settings):
    peer.selected = selected
    assert is_key(resolve(settings()))


def test_http_to_a_development_broker(hub, settings):
    config = settings(kbs_url=hub.url, insecure_allow_http_loopback=True)
    assert is_key(resolve(config))


# --- with a token --------------------------------------------------------------------------------------------------


def test_a_token(peer, settings, passport):
    assert is_key(resolve(settings(**passport)))
    assert peer.paths() == [f"/resource/{PATH}"]
    assert "cookie" not in peer.calls[0].headers


def test_a_token_of_another_key(peer, settings, passport):
    other = peer.issue(ec.generate_private_key(ec.SECP256R1()).public_key())
    Path(passport["kbs_token_file"]).write_text(other)
    with refused(KeySourceResponseError, "was encrypted to another key, or altered"):
        resolve(settings(**passport))


def test_token_files_that_cannot_be_used(peer, settings, passport, tmp_path):
    token, key = (Path(passport[name]) for name in ("kbs_token_file", "kbs_token_key_file"))
    good = token.read_text(), key.read_bytes()
    for text in ("", "a.b", "a.b.c d", '{"token":"a.b.c"}', "a.b.c\nd.e.f", "a.b.ü"):
        token.write_text(text)
        with refused(KeyAccessError, "attestation token file does not hold a JWT", place=token):
            resolve(settings(**passport))
    token.write_text(good[0])
    p384 = ec.generate_private_key(ec.SECP384R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for data in (b"", b"no key", good[1][:60], p384, good[1].replace(b"PRIVATE", b"PUBLIC")):
        key.write_bytes(data)
        with refused(KeyAccessError, "attested key file does not hold a P-256 private key", place=key):
            resolve(settings(**passport))
    key.write_bytes(good[1])
    for path, what in ((token, "attestation token file"), (key, "attested key file")):
        path.chmod(0o644)
        with refused(KeyAccessError, f"{what} can be read by others", place=path):
            resolve(settings(**passport))
        path.chmod(0o600)
    with refused(KeyAccessError, "needs kbs_token_file and kbs_token_key_file"):
        resolve(settings(**passport | {"kbs_token_file": None}))
    assert peer.calls == []


# --- by the guest's own service ------------------------------------------------------------------------------------


def test_the_confidential_data_hub(hub, settings):
    config = settings(kbs_mode="cdh", kbs_cdh_port=hub.port, kbs_url=None)
    for resource in (JWK, bytes(KEY.secret.reveal())):
        hub.resources[PATH] = resource
        assert is_key(resolve(config))
    assert [c.path for c in hub.calls] == 2 * [f"/cdh/resource/{PATH}"]
    assert {c.headers["host"] for c in hub.calls} == {f"127.0.0.1:{hub.port}"}


# --- evidence ------------------------------------------------------------------------------------------------------


@pytest.fixture
def configfs(tmp_path, monkeypatch):
    """As the kernel does it: a folder that is made is filled, and what is read follows from what was written. There is no
    hardware here, so its signature is made up."""
    folder, threads = tmp_path / "report", {}
    folder.mkdir()
    files = {"provider": b"tdx_guest\n", "generation": b"1\n"}
    make, remove = os.mkdir, os.rmdir

    def mkdir(path, mode=0o777, **more):
        make(path, mode, **more)
        if Path(path).parent == folder:
            for name, data in files.items():
                (Path(path) / name).write_bytes(data)
            (Path(path) / "inblob").touch()
            os.mkfifo(Path(path) / "outblob")
            threads[path] = threading.Thread(target=sign, args=(Path(path),))
            threads[path].start()

    def sign(entry):
        fd = os.open(entry / "outblob", os.O_WRONLY)
        os.write(fd, b"TD quote " + (entry / "inblob").read_bytes())
        os.close(fd)

    def rmdir(path, **more):
        if Path(path).parent == folder:
            # Where nobody wanted a signature, whoever waits to write it is let go.
            fd = os.open(Path(path) / "outblob", os.O_RDONLY | os.O_NONBLOCK)
            threads.pop(path).join()
            os.close(fd)
            for entry in Path(path).iterdir():
                entry.unlink()
        remove(path, **more)

    monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setattr(os, "rmdir", rmdir)
    monkeypatch.setattr(evidence.TsmProvider.__init__, "__defaults__", (folder, tmp_path / "CCEL"))
    yield files
    assert threads == {}
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("log", [None, b"events"])
def test_tdx(log, peer, settings, configfs, tmp_path):
    if log is not None:
        (tmp_path / "CCEL").write_bytes(log)
    assert is_key(resolve(settings(kbs_evidence="tsm")))
    assert json.loads(peer.calls[0].body)["tee"] == "tdx"
    found = peer.evidence[0]["primary_evidence"]["cc_eventlog"]
    assert found == (None if log is None else base64.b64encode(log).decode())


def test_cca(peer, settings, configfs):
    configfs["provider"] = b"arm_cca_guest\n"
    assert is_key(resolve(settings(kbs_evidence="tsm")))
    assert json.loads(peer.calls[0].body)["tee"] == "cca"


def test_reports_that_nobody_would_understand(peer, settings, configfs):
    configfs["provider"] = b"sev_guest\n"
    with refused(KeyAccessError, "reports of 'sev_guest' are not in a form", 'kbs_mode = "cdh" or "token"'):
        resolve(settings(kbs_evidence="tsm"))
    assert peer.calls == []


def test_an_entry_that_somebody_else_wrote_to(peer, settings, configfs):
    configfs["generation"] = b"2\n"
    with refused(KeyAccessError, "another process wrote to our entry"):
        resolve(settings(kbs_evidence="tsm"))
    assert peer.paths() == ["/auth"]


def test_a_machine_that_cannot_attest_itself(peer, settings, monkeypatch, tmp_path):
    monkeypatch.setattr(evidence.TsmProvider.__init__, "__defaults__", (tmp_path / "none", tmp_path / "none"))
    with refused(KeyAccessError, "cannot attest itself", "kbs_evidence = tsm needs a confidential guest"):
        resolve(settings(kbs_evidence="tsm"))
    assert peer.calls == []


PLUGIN = """
class Device:
    def tee(self):
        return "sampledevice"
    def evidence(self, report_data):
        import base64
        return {"svn": "2", "report_data": base64.b64encode(report_data).decode()}
class Odd(Device):
    def evidence(self, report_data):
        return {report_data}
class Surrogate(Device):
    def evidence(self, report_data):
        return {"quote": "\\ud800"}
class Cycle(Device):
    def evidence(self, report_data):
        found = []
        found.append(found)
        return found
class Large(Device):
    def evidence(self, report_data):
        return "x" * (1 << 20)
class Broken(Device):
    def evidence(self, report_data):
        raise ZeroDivisionError("hunter2")
class Same(Device):
    def tee(self):
        return "sample"
"""


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    """Evidence providers of another package."""
    info = tmp_path / "devices-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: devices\nVersion: 1.0\n")
    points = [
        f"{name.lower()} = kbs_test_devices:{name}"
        for name in ("Device", "Odd", "Surrogate", "Cycle", "Large", "Broken", "Same")
    ]
    points.append("sample = kbs_test_devices:Broken")
    (info / "entry_points.txt").write_text("\n".join(["[secure_loader.evidence_providers]", *points, ""]))
    (tmp_path / "kbs_test_devices.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_device_of_another_package(peer, settings, plugins):
    assert is_key(resolve(settings(kbs_evidence=["sample", "device"])))
    assert json.loads(peer.evidence[0]["additional_evidence"]).keys() == {"sampledevice"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("odd", "Odd returns evidence that is no JSON"),
        ("surrogate", "Surrogate returns evidence that is no JSON"),
        ("cycle", "Cycle returns evidence that is no JSON"),
        ("large", "Large returns more than 1048576 bytes"),
        ("broken", "an evidence provider failed: ZeroDivisionError"),
        ("same", "give no name, or one name twice"),
    ],
)
def test_providers_that_fail(name, words, peer, settings, plugins):
    with refused(KeyAccessError, words):
        resolve(settings(kbs_evidence=["sample", name]))


def test_a_provider_that_does_not_exist(settings):
    with refused(ConfigError, "there is no evidence provider 'sgx'; there are ", "sample, tsm"):
        resolve(settings(kbs_evidence="sgx"))


def test_sample_evidence_must_be_called_insecure(monkeypatch):
    with pytest.raises(ConfigError, match="needs insecure_kbs_sample_evidence"):
        LoaderConfig(kbs_evidence=("tsm", "sample"))
    assert LoaderConfig().kbs_evidence == ("tsm",)


@pytest.mark.parametrize(
    "setting",
    [
        {"kbs_mode": "sample"}, {"kbs_evidence": ()}, {"kbs_evidence": ["tsm", "tsm"]}, {"kbs_evidence": [1]},
        {"kbs_evidence": "../x"}, {"kbs_cdh_port": 0}, {"kbs_cdh_port": True}, {"kbs_cdh_port": 65536}, {"kbs_url": 1},
        {"kbs_url": "https://me:hunter2@kbs.example"}, {"kbs_token_file": 3}, {"kbs_token_key_file": b"x"},
    ],
)  # fmt: skip
def test_settings_that_make_no_sense(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))) as caught:
        LoaderConfig(**setting)
    assert "hunter2" not in str(caught.value)


# --- what a live broker said ---------------------------------------------------------------------------------------


def claims(token: str) -> dict:
    return json.loads(unb64url(token.split(".")[1]))


ATTESTED = [body["token"] for step, body in RECORDED if step == "attest"]
RESOURCE = next(body for step, body in RECORDED if step == "resource")


@pytest.mark.parametrize("token", ATTESTED, ids=range(len(ATTESTED)))
def test_report_data_is_what_a_live_broker_verified(token):
    """Its tokens repeat what went into the hash, and the hash."""
    for submodule in claims(token)["submods"].values():
        content = submodule["ear.veraison.annotated-evidence"]
        bound = content["runtime_data_claims"]
        assert base64.b64encode(report_data(bound, "sha384")).decode() == content["report_data"]
        assert canonical(bound).encode() == json.dumps(bound, separators=(",", ":"), sort_keys=True).encode()
        assert bound["tee-pubkey"].keys() == public_jwk(ec.generate_private_key(ec.SECP256R1()).public_key()).keys()
        assert bound["tee-pubkey"]["alg"] == "ECDH-ES+A256KW"


def test_a_resource_as_a_live_broker_encrypts_it(peer, settings):
    """Right in every part; the private half of that key was not kept."""
    key = ec.generate_private_key(ec.SECP256R1())
    with pytest.raises(KeyAccessError, match="was encrypted to another key"):
        open_jwe(json.dumps(RESOURCE).encode(), key)
    resolve(settings())
    ours = peer.calls[2].json()
    assert ours.keys() == RESOURCE.keys()
    header, recorded = (json.loads(unb64url(doc["protected"])) for doc in (ours, RESOURCE))
    assert header.keys() == recorded.keys()
    assert header["epk"].keys() == recorded["epk"].keys()
    assert (header["alg"], header["enc"]) == (recorded["alg"], recorded["enc"])
    assert [len(ours[n]) for n in ("encrypted_key", "iv", "tag")] == [
        len(RESOURCE[n]) for n in ("encrypted_key", "iv", "tag")
    ]


@pytest.mark.parametrize("body", [body for step, body in RECORDED if step == "auth"], ids=range(3))
def test_a_challenge_as_a_live_broker_sends_it(body, peer, settings):
    """We take it, and send its nonce back."""
    peer.faults["auth"] = lambda call: call.say(body)
    with refused(KeySourceDeniedError, "does not accept the evidence"):
        resolve(settings())
    sent = json.loads(peer.calls[1].body)
    assert sent["runtime-data"]["nonce"] == body["nonce"]


def test_a_token_as_a_live_broker_issues_it(peer, settings):
    peer.faults["attest"] = lambda call: call.say({"token": ATTESTED[0]})
    assert is_key(resolve(settings()))


def test_canonical_json():
    """RFC 8785, 3.2.2.2 and 3.2.3: what strings may look like, and the order of names."""
    text = '\u20ac$\u000f\nA\'B"\\\\"/\u007f\u2028'
    content = {"nonce": text, "tee-pubkey": {"y": "1", "x": "2"}, "additional-evidence": ""}
    literal = '"\u20ac$\\u000f\\nA\'B\\"\\\\\\\\\\"/\u007f\u2028"'
    wanted = '{"additional-evidence":"","nonce":' + literal + ',"tee-pubkey":{"x":"2","y":"1"}}'
    assert canonical(content) == wanted
    assert report_data(content, "sha256") == hashlib.sha256(wanted.encode()).digest()


def test_the_peer_derives_keys_as_the_rfc_does():
    """RFC 7518, appendix C."""
    alice = ec.derive_private_key(
        int.from_bytes(unb64url("0_NxaRPUMQoAJt50Gz8YiTr8gRTwyEaCumd-MToTmIo"), "big"), ec.SECP256R1()
    )
    x, y = (
        int.from_bytes(unb64url(n), "big")
        for n in ("weNJy2HscCSM6AEDTDg04biOvhFhyyWvOHQfeF_PxMQ", "e8lnCO-AlStT-NJVX-crhB7QRYhiix03illJOVAOyck")
    )
    bob = ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key()
    key = concat_kdf(alice.exchange(ec.ECDH(), bob), b"A128GCM", b"Alice", b"Bob", 128)
    assert b64url(key) == "VqqN6vgjbSBcIijNcacQGg"
