"""What a user may write into ``--model-loader-extra-config``, checked before anything is opened.

vLLM logs these settings, shows them in process lists and hands them to every worker: they may say where keys are, and
never what they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .. import config as cfg
from ..core.secrets import looks_like_key
from ..errors import ConfigError

_MAPPING_OF_STOCK = {"num_threads": "threads"}
_FLAGS = ("lazy", "enable_multithread_load", "enable_weights_track", "insecure_allow_plaintext_adapters")
_ROTATE = "vLLM has logged its arguments: if this is a real key, replace it"


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """The settings of one loader.

    Attributes:
        config: How files are opened and read.
        lazy: Decrypt a weight when the model copies it, and only the rows that it copies.
        enable_weights_track: As in vLLM: whether weights that the model has and the checkpoint lacks are an error;
            None leaves it to vLLM.
        insecure_allow_plaintext_adapters: Accept LoRA adapters that are not encrypted.
    """

    config: cfg.LoaderConfig
    lazy: bool = True
    enable_weights_track: bool | None = None
    insecure_allow_plaintext_adapters: bool = False

    @classmethod
    def parse(cls, extra: object) -> LoaderOptions:
        """Check the extra config of load format ``secure``.

        Args:
            extra: ``model_loader_extra_config`` as the user gave it.

        Raises:
            ConfigError: Not a mapping, an unknown key, a value of the wrong kind, or key material.
        """
        if not isinstance(extra, Mapping):
            raise ConfigError(f"model_loader_extra_config must be a mapping, not {type(extra).__name__}")
        _refuse_key_material(extra)
        fields = {f.name for f in dataclasses.fields(cfg.LoaderConfig)}
        known = fields | _MAPPING_OF_STOCK.keys() | set(_FLAGS)
        unknown = sorted(str(name) for name in extra.keys() - known)
        if unknown:
            raise ConfigError(
                f"unexpected extra config keys for load format secure: {', '.join(unknown)}",
                hint=f"there are {', '.join(sorted(known))}",
            )
        flags = {name: _flag(name, extra[name]) for name in _FLAGS if name in extra}
        # Chunks are always decrypted by several threads; the stock switch is accepted so that commands can be kept.
        flags.pop("enable_multithread_load", None)
        settings = {name: value for name, value in extra.items() if name in fields}
        for stock, ours in _MAPPING_OF_STOCK.items():
            if stock in extra:
                if ours in extra:
                    raise ConfigError(f"{ours} and {stock} mean the same; give one of them")
                settings[ours] = extra[stock]
        return cls(cfg.load(settings), **flags)

    @property
    def accepts_plaintext_adapters(self) -> bool:
        """Whether adapters need not be encrypted."""
        return self.insecure_allow_plaintext_adapters or self.config.insecure_allow_plaintext

    def for_stock(self) -> dict[str, Any]:
        """What vLLM's own loader class may see of these settings."""
        return {} if self.enable_weights_track is None else {"enable_weights_track": self.enable_weights_track}


def _flag(name: str, value: object) -> bool:
    if type(value) is not bool:
        raise ConfigError(f"{name} must be true or false, not a {type(value).__name__}")
    return value


def _refuse_key_material(extra: Mapping[str, Any]) -> None:
    """Raises ConfigError, without echoing it, when something looks like a key rather than like the place of one."""
    for name, text in _strings(extra):
        if looks_like_key(text):
            raise ConfigError(
                f"{name} looks like key material; only references are taken: a path, file:/path or env:NAME",
                hint=_ROTATE,
            )


def _strings(value: object, name: str = "a key of the extra config") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            # A key of a nested mapping could itself be secret; the outermost name is enough to find the place.
            yield from _strings(item, str(key) if name == "a key of the extra config" else name)
        if "kty" in value or "k" in value:
            yield name, "{"
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _strings(item, name)
