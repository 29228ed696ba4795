"""Settings: one frozen dataclass, filled from a TOML file, then the environment, then explicit arguments.

========================================  =========================================================================
environment variable                      meaning
========================================  =========================================================================
``SECURE_LOADER_HOME``                    folder with ``keys/``, ``trust/``, ``state/`` and ``config.toml``
``SECURE_LOADER_CONFIG``                  another TOML file
``SECURE_LOADER_KEYS``                    comma-separated key references: paths, ``file:…``, ``env:NAME``, ``https://…``
``SECURE_LOADER_PASSPHRASE_FILE``         file with the passphrase of ``passphrase:…`` references
``SECURE_LOADER_PASSPHRASE``              that passphrase itself; removed once it was read
``SECURE_LOADER_AGE_IDENTITY``            identity file of ``age:…`` references
``SECURE_LOADER_PKCS11_MODULE``           path of the module behind ``pkcs11:…`` references that name none
``SECURE_LOADER_PKCS11_PIN``              PIN of their tokens, where they name no file; removed once it was read
``SECURE_LOADER_KBS_URL``                 the broker of ``kbs:///…`` references: ``https://HOST:PORT``
``SECURE_LOADER_KBS_MODE``                ``attest``, ``token`` or ``cdh``
``SECURE_LOADER_THREADS``                 threads of the shared pool
``SECURE_LOADER_INTEGRITY``               ``tags`` or ``full``
``SECURE_LOADER_PAGE_CACHE``              ``keep``, ``drop`` or ``bypass``
``SECURE_LOADER_DEVICE_KERNELS``          ``auto``, ``cubin``, ``nvrtc``, ``triton`` or ``cpu``
``SECURE_LOADER_REQUIRE_DEVICE_KERNELS``  ``1``: what goes to a GPU is decrypted there, or not at all
``SECURE_LOADER_GPU_DIRECT``              ``auto``, ``on`` or ``off``
``SECURE_LOADER_AUTOLOAD``                ``0`` keeps ``import torch`` from preparing the Transformers hook
========================================  =========================================================================

Settings whose name begins with ``insecure_`` are taken from explicit arguments and TOML only, never from the
environment.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .core.home import home, refuse_foreign
from .core.secrets import looks_like_key
from .errors import ConfigError

CONFIG_VARIABLE = "SECURE_LOADER_CONFIG"
# Two slots of a page are the least that works; beyond the most there is nothing to gain.
MIN_DEVICE_BUFFER, MAX_DEVICE_BUFFER = 64 << 10, 512 << 20
MAX_KEY_TIMEOUT = 600
_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True)
class LoaderConfig:
    """How secure files are opened and read.

    Attributes:
        keys: References to master keys (``file:/path``, ``env:NAME``, plain paths); None takes ``SECURE_LOADER_KEYS``
            and the home folder. Never key material.
        trust: Trust files and folders; None takes the home folder's.
        oms_keys: Public EC keys (PEM files, and folders of them) that count for ``model.sig``; None takes ``trust/oms`` in
            the home folder. Where there are some, a ``model.sig`` must be signed by one of them, and the folder as it says.
        require_oms: Demand a ``model.sig``.
        integrity: ``"tags"``: AEAD tags; ``"full"``: the signed SHA-256 digests as well, against a publisher's own
            licensees, at the price of a hash of every byte.
        clear_tensors: ``"map"`` or ``"copy"`` clear tensors of signed files after their digest was checked. Copy where
            another process may write the file while it is in use.
        threads: Threads of the shared pool; None takes the processors this process may use.
        page_cache: What becomes of the system's copy of a file that was read. ``"keep"``: the next load finds it there.
            ``"drop"``: released behind the reader, for machines short of memory. ``"bypass"``: never made (O_DIRECT);
            every load waits for the disk.
        prefetch_bytes: Plaintext that adapters may decrypt ahead of the model that asks for it; 0 decrypts on demand.
        device_kernels: What decrypts tensors for a GPU: ``"auto"`` takes the first that works, in the order ``"cubin"``,
            ``"nvrtc"``, ``"triton"``; one of these names takes no other; ``"cpu"`` decrypts before the copy. All of them
            authenticate.
        require_device_kernels: Raise where nothing can decrypt on the GPU, instead of decrypting on the CPU.
        device_buffer_bytes: Pinned host memory that one load to a GPU may take on its way there; less where less is loaded.
        gpu_direct: Whether a GPU reads encrypted tensors from the disk itself (GPUDirect Storage), past the host's memory.
            ``"auto"``: where cuFile can, and the page cache does not have them; ``"on"``: or not at all; ``"off"``: never.
        allow_missing_weights: Let a framework initialise weights that the checkpoint does not hold, such as the new head
            of a model that is going to be trained. Weights that the manifest lists must be read all the same.
        key_timeout_seconds: Time for one answer of a key service (name service, connection, TLS and body together) or of a device
            that has keys.
        key_private_hosts: Hosts of network key sources that may have private, loopback or link-local addresses;
            None: none may.
        key_ca_file: PEM file with the only certificates that may vouch for network key sources; None takes the system's.
        key_client_certificate: PEM file with the client certificate to show them.
        key_client_key: PEM file with its private key, kept as a key file is; None looks into the former.
        kbs_url: Address of the Trustee broker of ``kbs:///…`` references, ``https://HOST:PORT``.
        kbs_mode: How a broker learns where this process runs. ``"attest"``: by evidence of the hardware, which this process
            gets; ``"token"``: by a token of an earlier attestation; ``"cdh"``: the guest's Confidential Data Hub does it.
        kbs_evidence: Who supplies evidence under ``"attest"``: for the machine first, then for devices in it. ``"tsm"``, or
            names under the entry point ``secure_loader.evidence_providers``.
        kbs_token_file: File with the token, kept as a key file is.
        kbs_token_key_file: PEM file with the P-256 key that was attested for it, kept as a key file is.
        kbs_cdh_port: Where on 127.0.0.1 the Confidential Data Hub listens.
        harden: Close this process to others of the same user, and switch core dumps off, before a model is opened
            (:func:`secure_loader.harden_process`).
        insecure_allow_plaintext: Accept files that are not encrypted where encrypted ones are demanded.
        insecure_allow_legacy: Accept CryptoTensors files without profile 1, and folders without a manifest.
        insecure_allow_unverified_clear: Hand out clear tensors of such files, which nothing protects.
        insecure_allow_http_loopback: Speak ``http:`` to a key service on this machine itself: development servers.
        insecure_kbs_sample_evidence: Allow ``"sample"`` in ``kbs_evidence``, which proves nothing: brokers of tests.
    """

    keys: tuple[str, ...] | None = None
    trust: tuple[str, ...] | None = None
    oms_keys: tuple[str, ...] | None = None
    require_oms: bool = False
    integrity: str = "tags"
    clear_tensors: str = "map"
    threads: int | None = None
    page_cache: str = "keep"
    prefetch_bytes: int = 2 << 30
    device_buffer_bytes: int = 256 << 20
    device_kernels: str = "auto"
    require_device_kernels: bool = False
    gpu_direct: str = "auto"
    allow_missing_weights: bool = False
    key_timeout_seconds: float = 10
    key_private_hosts: tuple[str, ...] | None = None
    key_ca_file: str | None = None
    key_client_certificate: str | None = None
    key_client_key: str | None = None
    kbs_url: str | None = None
    kbs_mode: str = "attest"
    kbs_evidence: tuple[str, ...] = ("tsm",)
    kbs_token_file: str | None = None
    kbs_token_key_file: str | None = None
    kbs_cdh_port: int = 8006
    harden: bool = False
    insecure_allow_plaintext: bool = False
    insecure_allow_legacy: bool = False
    insecure_allow_unverified_clear: bool = False
    insecure_allow_http_loopback: bool = False
    insecure_kbs_sample_evidence: bool = False

    def __post_init__(self) -> None:
        for name in ("keys", "trust", "oms_keys"):
            object.__setattr__(self, name, _references(name, getattr(self, name)))
        _one_of("integrity", self.integrity, ("tags", "full"))
        _one_of("clear_tensors", self.clear_tensors, ("map", "copy"))
        _one_of("page_cache", self.page_cache, ("keep", "drop", "bypass"))
        _one_of("device_kernels", self.device_kernels, ("auto", "cubin", "nvrtc", "triton", "cpu"))
        _one_of("gpu_direct", self.gpu_direct, ("auto", "on", "off"))
        if type(self.prefetch_bytes) is not int or self.prefetch_bytes < 0:
            raise ConfigError(f"prefetch_bytes must be a number of bytes, not {self.prefetch_bytes!r}")
        size = self.device_buffer_bytes
        if type(size) is not int or not MIN_DEVICE_BUFFER <= size <= MAX_DEVICE_BUFFER:
            raise ConfigError(
                f"device_buffer_bytes must be from {MIN_DEVICE_BUFFER} to {MAX_DEVICE_BUFFER}, not {size!r}"
            )
        if self.threads is not None and (type(self.threads) is not int or not 1 <= self.threads <= 256):
            raise ConfigError(f"threads must be a number from 1 to 256, not {self.threads!r}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.startswith(("insecure_", "allow_", "require_", "harden")) and type(value) is not bool:
                raise ConfigError(f"{field.name} must be true or false, not {value!r}")
        if self.require_device_kernels and self.device_kernels == "cpu":
            raise ConfigError('require_device_kernels contradicts device_kernels = "cpu"')
        if self.gpu_direct == "on" and self.device_kernels == "cpu":
            raise ConfigError('gpu_direct = "on" contradicts device_kernels = "cpu"')
        self._check_network()
        self._check_broker()

    def _check_network(self) -> None:
        seconds = self.key_timeout_seconds
        if type(seconds) not in (int, float) or not 0 < seconds <= MAX_KEY_TIMEOUT:
            raise ConfigError(f"key_timeout_seconds must be above 0 and at most {MAX_KEY_TIMEOUT}, not {seconds!r}")
        for name in ("key_ca_file", "key_client_certificate", "key_client_key", "kbs_token_file", "kbs_token_key_file"):
            value = getattr(self, name)
            if value is not None:
                if not isinstance(value, (str, os.PathLike)) or looks_like_key(os.fspath(value)):
                    raise ConfigError(f"{name} takes the path of a {'PEM ' if name != 'kbs_token_file' else ''}file")
                object.__setattr__(self, name, os.fspath(value))
        if self.key_client_key is not None and self.key_client_certificate is None:
            raise ConfigError("key_client_key is set, and key_client_certificate, which goes with it, is not")
        if self.key_private_hosts is not None:
            object.__setattr__(self, "key_private_hosts", _hosts(self.key_private_hosts))

    def _check_broker(self) -> None:
        _one_of("kbs_mode", self.kbs_mode, ("attest", "token", "cdh"))
        url: Any = self.kbs_url
        if url is not None and (not isinstance(url, str) or looks_like_key(url)):
            # Not shown: it may hold a password.
            raise ConfigError("kbs_url takes the address of a broker, https://HOST:PORT, without a user name or query")
        names: Any = self.kbs_evidence
        names = (names,) if isinstance(names, str) else names
        known = isinstance(names, (list, tuple)) and all(isinstance(n, str) and _NAME.fullmatch(n) for n in names)
        if not known or not names or len(set(names)) != len(names):
            raise ConfigError("kbs_evidence takes names of evidence providers, each once")
        object.__setattr__(self, "kbs_evidence", tuple(names))
        if "sample" in names and not self.insecure_kbs_sample_evidence:
            raise ConfigError("kbs_evidence: sample evidence proves nothing, and needs insecure_kbs_sample_evidence")
        if type(self.kbs_cdh_port) is not int or not 0 < self.kbs_cdh_port < 65536:
            raise ConfigError(f"kbs_cdh_port must be the number of a port, not {self.kbs_cdh_port!r}")

    def replace(self, options: Mapping[str, Any]) -> LoaderConfig:
        """These settings with some replaced.

        Args:
            options: By field name; strings and lists of strings are both fine for ``keys``, ``trust`` and ``oms_keys``.

        Raises:
            ConfigError: An unknown name, or a value of the wrong kind.
        """
        known = {f.name for f in dataclasses.fields(self)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ConfigError(f"unknown setting {unknown[0]!r}; there are {', '.join(sorted(known))}")
        return dataclasses.replace(self, **options)


def load(options: Mapping[str, Any] | None = None) -> LoaderConfig:
    """The settings in force.

    Args:
        options: Explicit settings, which win over the environment, which wins over the TOML file.

    Raises:
        ConfigError: An unknown name or a wrong value, anywhere, or a TOML file that others could have written.
    """
    config = LoaderConfig().replace(_from_toml()).replace(_from_environment())
    return config.replace(options or {})


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting in force.

    Attributes:
        name: Field of :class:`LoaderConfig`.
        value: Its value.
        origin: ``default``, the path of the TOML file, or the name of an environment variable.
    """

    name: str
    value: Any
    origin: str


def explain() -> list[Setting]:
    """Every setting in force without explicit ones, and where it comes from. Raises as :func:`load`."""
    config, toml, environment = load(), _from_toml(), _from_environment()
    origins = dict.fromkeys(toml, str(toml_path())) | {name: f"SECURE_LOADER_{name.upper()}" for name in environment}
    return [
        Setting(f.name, getattr(config, f.name), origins.get(f.name, "default")) for f in dataclasses.fields(config)
    ]


def toml_path() -> Path:
    """The TOML file that is read if it exists: ``$SECURE_LOADER_CONFIG``, or ``config.toml`` in the home folder."""
    named = os.environ.get(CONFIG_VARIABLE)
    return Path(named) if named else home() / "config.toml"


def _from_toml() -> dict[str, Any]:
    named, path = os.environ.get(CONFIG_VARIABLE), toml_path()
    if not path.exists():
        if named:
            raise ConfigError(f"{CONFIG_VARIABLE} names a file that does not exist", path=path)
        return {}
    try:
        with open(path, "rb") as f:
            # It says where keys come from and whom to trust: who writes it decides what is loaded.
            refuse_foreign(os.fstat(f.fileno()), path, "configuration file")
            doc = tomllib.load(f)
    except ConfigError:
        raise
    except (OSError, ValueError, RecursionError) as e:  # bytes that are no UTF-8 are no TOMLDecodeError
        raise ConfigError(f"cannot be read: {e}", path=path) from None
    unknown = sorted(set(doc) - {"loader"})
    if unknown or not isinstance(doc.get("loader", {}), dict):
        raise ConfigError(f"unknown section {unknown[0]!r}; there is [loader]" if unknown else "loader is no section")
    return dict(doc.get("loader", {}))


def _from_environment() -> dict[str, Any]:
    options: dict[str, Any] = {}
    threads = os.environ.get("SECURE_LOADER_THREADS")
    if threads:
        if not threads.isdecimal():
            raise ConfigError(f"SECURE_LOADER_THREADS must be a number, not {threads!r}")
        options["threads"] = int(threads)
    for name in ("integrity", "page_cache", "device_kernels", "gpu_direct", "kbs_url", "kbs_mode"):
        value = os.environ.get(f"SECURE_LOADER_{name.upper()}")
        if value:
            options[name] = value
    require = os.environ.get("SECURE_LOADER_REQUIRE_DEVICE_KERNELS")
    if require:
        if require not in ("0", "1"):
            raise ConfigError(f"SECURE_LOADER_REQUIRE_DEVICE_KERNELS must be 0 or 1, not {require!r}")
        options["require_device_kernels"] = require == "1"
    return options


def _hosts(value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(h, str) and _HOST.fullmatch(h) for h in items):
        raise ConfigError("key_private_hosts takes names and addresses of hosts, without scheme, port or brackets")
    return tuple(h.lower() for h in items)


def _references(name: str, value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, Mapping) or not isinstance(value, (str, os.PathLike, Iterable)):
        raise ConfigError(f"{name} takes references (paths, file:…, env:NAME), not {type(value).__name__}")
    items = (value,) if isinstance(value, (str, os.PathLike)) else tuple(value)
    for item in items:
        # Not a convenience: settings travel through logs and process lists, a key must not.
        if not isinstance(item, (str, os.PathLike)):
            raise ConfigError(f"{name} takes references (paths, file:…, env:NAME), not {type(item).__name__}")
        if looks_like_key(os.fspath(item)):
            raise ConfigError(f"{name} takes references (paths, file:…, env:NAME), never key material itself")
    return tuple(os.fspath(item) for item in items)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
