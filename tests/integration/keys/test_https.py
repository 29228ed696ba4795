"""``https:`` key sources against a real TLS server: who is believed, who we are, and that one request is enough."""

from __future__ import annotations

import gc
import os
import ssl
import threading
import weakref

import pytest

from secure_loader import safe_open
from secure_loader.config import LoaderConfig
from secure_loader.core.archive import Archive
from secure_loader.core.checkpoint import Checkpoint
from secure_loader.core.keys import tls
from secure_loader.core.keys.provider import KeyRing
from secure_loader.core.session import Session
from secure_loader.errors import KeyAccessError, KeySourceResponseError, KeySourceUnreachableError, SecureLoaderError
from tests.attacks.kit import KEY, arrays, build_file, build_folder, master, signing, trust
from tests.integration.keys.services import (
    Authority,
    answer,
    chunked,
    drip,
    key_set,
    raw,
    request_for,
    serving,
)


@pytest.fixture
def settings(authority):
    """Settings of somebody who has a key service on this machine."""

    def make(**more) -> LoaderConfig:
        defaults = {"key_private_hosts": ["localhost", "127.0.0.1"], "key_ca_file": authority.file}
        return LoaderConfig(**defaults | {"key_timeout_seconds": 5} | more)

    return make


def resolve(server, config: LoaderConfig, host: str = "localhost", path: str = "/keys.json"):
    return KeyRing([f"https://{host}:{server.port}{path}"], config).resolve(request_for(KEY))


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "LOCALHOST"])
def test_a_key_of_a_set(authority, localhost, settings, host):
    with serving(localhost, answer(key_set(master("other", 3), KEY))) as server:
        unwrapper = resolve(server, settings(), host)
        assert bytes(unwrapper.secret.reveal()) == bytes(KEY.secret.reveal())
        assert server.names == [None if host == "127.0.0.1" else "localhost"]
        head = server.calls[0].splitlines()
        assert head[0] == "GET /keys.json HTTP/1.1"
        assert f"Host: {host.lower()}:{server.port}" in head
        assert "Accept-Encoding: identity" in head


@pytest.mark.parametrize(
    "script",
    [
        chunked(key_set(KEY)[:10], key_set(KEY)[10:]),
        raw(b"HTTP/1.1 200 OK\r\n\r\n" + key_set(KEY)),
        raw(b"HTTP/1.0 200 OK\r\n\r\n" + key_set(KEY)),
        raw(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\n" + key_set(KEY)),
        answer(key_set(KEY), Content_Encoding="identity"),
        answer(key_set(KEY) + b" " * (65536 - len(key_set(KEY)))),
        drip(key_set(KEY), pause=0.001, head=b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(key_set(KEY))),
    ],
    ids="chunked close-ends http-1.0 continue identity largest drip".split(),
)
def test_every_legal_way_to_answer(localhost, settings, script):
    with serving(localhost, script) as server:
        assert resolve(server, settings()) is not None


def test_a_file_opens_with_it(tmp_path, localhost, settings):
    path = build_file(tmp_path / "model.safetensors")
    with serving(localhost, answer(key_set(KEY))) as server:
        keys = [f"https://localhost:{server.port}/keys.json"]
        with safe_open(path, "numpy", keys=keys, trust=trust(), config=settings(), strict=True) as f:
            assert (f.get_tensor("big") == arrays()["big"]).all()
            assert (f.get_tensor("small") == arrays()["small"]).all()
        assert len(server.calls) == 1


def test_one_request_for_a_whole_folder_and_none_afterwards(tmp_path, localhost, settings):
    folder = build_folder(tmp_path / "model", shards=4)
    with serving(localhost, answer(key_set(KEY))) as server:
        session = Session(keys=f"https://localhost:{server.port}/keys.json", trust=trust(), config=settings())
        checkpoint = Checkpoint(folder, session)
        errors = []

        def load(name: str) -> None:
            try:
                with Archive(checkpoint.open(name), "numpy") as f:
                    f.get_tensors()
            except SecureLoaderError as e:
                errors.append(e)

        assert server.connections == 0, "nothing is asked before a tensor is"
        threads = [threading.Thread(target=load, args=(name,)) for name in checkpoint.shards()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert server.connections == 1
        Session(keys=f"https://localhost:{server.port}/keys.json", trust=trust(), config=settings())
        assert server.connections == 1


def test_what_was_fetched_goes_with_the_ring(localhost, settings):
    with serving(localhost, answer(key_set(KEY))) as server:
        ring = KeyRing([f"https://localhost:{server.port}/"], settings())
        memory = ring.resolve(request_for(KEY)).secret._data
        assert bytes(memory) == bytes(KEY.secret.reveal())
        gone = weakref.ref(ring)
        del ring
        gc.collect()
        assert gone() is None
        assert bytes(memory) == bytes(32), "overwritten"


def test_a_key_that_is_put_there_later_is_found_by_the_same_ring(localhost, settings):
    with serving(localhost, answer(key_set(master("other", 3)))) as server:
        ring = KeyRing([f"https://localhost:{server.port}/"], settings())
        with pytest.raises(KeyAccessError, match=r"no master key with kid 'enc-1' .searched: https://localhost"):
            ring.resolve(request_for(KEY))
        server.script = answer(b"", "503 Busy")
        with pytest.raises(KeySourceUnreachableError, match=r"out of order .HTTP 503"):
            ring.resolve(request_for(KEY))
        server.script = answer(key_set(KEY))
        assert ring.resolve(request_for(KEY)) is not None


def test_the_same_key_here_and_there_is_one_key_and_another_is_refused(localhost, settings):
    with serving(localhost, answer(key_set(KEY))) as server:
        url = f"https://localhost:{server.port}/"
        assert KeyRing([KEY, url], settings()).resolve(request_for(KEY)) is not None
        with pytest.raises(KeyAccessError, match="two different keys go by the kid"):
            KeyRing([master(KEY.kid, 0x77), url], settings()).resolve(request_for(KEY))


def test_system_roots_are_the_default(monkeypatch, authority, localhost, settings):
    with serving(localhost, answer(key_set(KEY))) as server:
        with pytest.raises(KeySourceUnreachableError, match="certificate is refused: unable to get local issuer"):
            resolve(server, settings(key_ca_file=None))
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        assert resolve(server, settings(key_ca_file=None)) is not None
        assert len(server.calls) == 1, "nothing was asked of the one that was not believed"


def test_a_folder_of_system_roots_is_looked_into_when_one_is_needed(
    tmp_path, monkeypatch, authority, localhost, settings
):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    for number in range(16):
        (tmp_path / f"{number:08x}.0").write_bytes(localhost.certificate.read_bytes())
    assert not tls.Tls().context().cert_store_stats()["x509"], "nothing is read before it is needed"
    with serving(localhost, answer(key_set(KEY))) as server:
        with pytest.raises(KeySourceUnreachableError, match="certificate is refused: unable to get local issuer"):
            resolve(server, settings(key_ca_file=None))
        (tmp_path / f"{authority.openssl_hash():08x}.0").write_bytes(authority.file.read_bytes())
        assert resolve(server, settings(key_ca_file=None)) is not None


def test_a_pinned_authority_counts_alone(tmp_path, monkeypatch, authority, localhost, settings):
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    other = Authority(tmp_path, "other")
    with serving(localhost, answer(key_set(KEY))) as server:
        with pytest.raises(KeySourceUnreachableError, match="certificate is refused"):
            resolve(server, settings(key_ca_file=other.file))
        assert resolve(server, settings(key_ca_file=localhost.certificate)) is not None, "the server's own, pinned"


@pytest.mark.parametrize(
    ("names", "days", "message"),
    [
        (("localhost",), -1, "certificate has expired"),
        (("example.org",), 7, "Hostname mismatch, certificate is not valid for 'localhost'"),
        (("127.0.0.1",), 7, "Hostname mismatch"),
        (("*.localhost",), 7, "Hostname mismatch"),
    ],
)
def test_certificates_that_do_not_verify(authority, settings, names, days, message):
    with (
        serving(authority.issue(*names, days=days), answer(key_set(KEY))) as server,
        pytest.raises(KeySourceUnreachableError, match=f"certificate is refused: {message}"),
    ):
        resolve(server, settings())
    assert server.calls == []


def test_a_common_name_is_no_name_of_a_host(authority, settings):
    """It is free text to many authorities, and no constraint on names need hold for it (RFC 9525, 6.3)."""
    with (
        serving(authority.issue(subject="localhost"), answer(key_set(KEY))) as server,
        pytest.raises(KeySourceUnreachableError, match="certificate is refused: Hostname mismatch"),
    ):
        resolve(server, settings())


def test_a_client_certificate_does_not_vouch_for_a_server(authority, settings):
    with (
        serving(authority.issue("localhost", client=True), answer(key_set(KEY))) as server,
        pytest.raises(KeySourceUnreachableError, match="certificate is refused: unsuitable certificate purpose"),
    ):
        resolve(server, settings())


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated:DeprecationWarning")
def test_old_tls_is_refused(localhost, settings):
    with (
        serving(localhost, answer(key_set(KEY)), version=ssl.TLSVersion.TLSv1_1) as server,
        pytest.raises(KeySourceUnreachableError, match="TLS failed: TLSV1_ALERT_PROTOCOL_VERSION"),
    ):
        resolve(server, settings())
    assert server.calls == []


def test_tls_1_2_is_not(localhost, settings):
    with serving(localhost, answer(key_set(KEY)), version=ssl.TLSVersion.TLSv1_2) as server:
        assert resolve(server, settings()) is not None


def test_a_client_certificate(tmp_path, authority, localhost, settings):
    me = authority.issue("loader", client=True)
    stranger = Authority(tmp_path, "strangers").issue("loader", client=True)
    with serving(localhost, answer(key_set(KEY)), clients=authority) as server:
        shown = {"key_client_certificate": me.certificate, "key_client_key": me.key}
        assert resolve(server, settings(**shown)) is not None
        both = tmp_path / "both.pem"
        both.touch(0o600)
        both.write_bytes(me.certificate.read_bytes() + me.key.read_bytes())
        assert resolve(server, settings(key_client_certificate=both)) is not None
        assert len(server.calls) == 2
        for wrong in ({}, {"key_client_certificate": stranger.certificate, "key_client_key": stranger.key}):
            with pytest.raises(KeySourceUnreachableError):
                resolve(server, settings(**wrong))
        assert len(server.calls) == 2


def test_a_client_key_is_kept_as_a_key_is(authority, localhost, settings):
    me = authority.issue("loader", client=True)
    locked = authority.issue("loader", client=True, passphrase=b"secret")
    with serving(localhost, answer(key_set(KEY)), clients=authority) as server:
        with pytest.raises(KeyAccessError, match="the client certificate or its key cannot be used"):
            resolve(server, settings(key_client_certificate=locked.certificate, key_client_key=locked.key))
        with pytest.raises(KeyAccessError, match="the client certificate or its key cannot be used"):
            resolve(server, settings(key_client_certificate=me.certificate, key_client_key=locked.key))
        me.key.chmod(0o644)
        with pytest.raises(KeyAccessError, match=r"client key can be read by others .mode 0644"):
            resolve(server, settings(key_client_certificate=me.certificate, key_client_key=me.key))
        assert server.connections == 0


def test_the_client_key_that_was_checked_is_the_one_that_is_used(tmp_path, monkeypatch, authority, localhost, settings):
    """Whatever stands under its name a moment later; and neither file may be one that never ends."""
    me = authority.issue("loader", client=True)
    read = tls.read_private

    def then_replaced(path, what):
        found = read(path, what)
        path.write_text("something else")
        return found

    shown = {"key_client_certificate": me.certificate, "key_client_key": me.key}
    with serving(localhost, answer(key_set(KEY)), clients=authority) as server:
        monkeypatch.setattr(tls, "read_private", then_replaced)
        assert resolve(server, settings(**shown)) is not None
        monkeypatch.undo()
        with pytest.raises(KeyAccessError, match="the client certificate or its key cannot be used"):
            resolve(server, settings(**shown))
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe, 0o600)
        for wrong in ({"key_client_certificate": pipe, "key_client_key": me.key}, {"key_client_certificate": pipe}):
            with pytest.raises(KeyAccessError, match="regular file"):
                resolve(server, settings(**wrong))
        assert len(server.calls) == 1


def test_a_file_of_roots_that_others_may_write(tmp_path, authority, localhost, settings):
    roots = tmp_path / "roots.pem"
    roots.write_bytes(authority.file.read_bytes())
    link = tmp_path / "link.pem"
    link.symlink_to(roots)
    with serving(localhost, answer(key_set(KEY))) as server:
        roots.chmod(0o644)
        assert resolve(server, settings(key_ca_file=link)) is not None, "as Kubernetes mounts them"
        for content, mode, message in (
            (authority.file.read_bytes(), 0o664, "could have been written by others"),
            (b"no certificate", 0o644, "holds no certificates"),
            (b"\xff", 0o644, "is not PEM"),
            (b" " * (2 << 20), 0o644, "is larger than 1048576 bytes"),
        ):
            roots.write_bytes(content)
            roots.chmod(mode)
            with pytest.raises(KeyAccessError, match=message):
                resolve(server, settings(key_ca_file=roots))
        with pytest.raises(KeyAccessError, match="no such file"):
            resolve(server, settings(key_ca_file=tmp_path / "nowhere.pem"))
        assert server.connections == 1


def test_session_secrets_of_tls_are_not_written_down(tmp_path, monkeypatch, localhost, settings):
    monkeypatch.setenv("SSLKEYLOGFILE", str(tmp_path / "log"))
    with serving(localhost, answer(key_set(KEY))) as server:
        assert resolve(server, settings()) is not None
    assert not (tmp_path / "log").exists()


def test_proxies_of_the_environment_are_not_asked(monkeypatch, localhost, settings):
    with serving(localhost, answer(key_set(KEY))) as server:
        for name in ("https_proxy", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        assert resolve(server, settings()) is not None


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (answer(key_set(signing(KEY.kid))), "'enc-1' is not a symmetric key"),
        (answer(key_set(KEY).replace(b"A256GCM", b"RSA-OAEP")), "key 'enc-1' is for 'RSA-OAEP'"),
        (answer(key_set(KEY).replace(b'"oct"', b'"RSA"')), "none of oct, OKP and AKP"),
        (answer(key_set(KEY).replace(b'"enc"', b'"sig"')), "not meant for this use"),
        (answer(b'{"keys": []}'), "holds no keys"),
        (answer(b"[]"), "is not a JWK"),
        (answer(b""), "is not valid JSON|not complete JSON"),
    ],
)
def test_keys_are_checked_as_those_of_files_are(localhost, settings, script, message):
    with serving(localhost, script) as server, pytest.raises(KeySourceResponseError, match=message):
        resolve(server, settings())


def test_the_check_value_is_compared(localhost, settings):
    with serving(localhost, answer(key_set(KEY))) as server:
        ring = KeyRing([f"https://localhost:{server.port}/"], settings())
        with pytest.raises(KeyAccessError, match="not the one that encrypted the file"):
            ring.resolve(request_for(KEY, file_id=bytes(16), kcv=bytes(16)))
