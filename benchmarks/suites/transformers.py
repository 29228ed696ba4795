"""``from_pretrained`` and a first forward pass over 16 tokens: a plain load only maps its file, the pass reads it."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks import data, peers
from benchmarks.data import QWEN3_MODEL, SMOLLM2, TINY_MODEL, Model
from benchmarks.loaders import ready
from benchmarks.model import OURS, Case, Entry, Goal, Quantity, Size, Suite
from secure_loader.bench.measure import Task, digest

_MODULES = ("torch", "safetensors.torch", "transformers.modeling_utils", "transformers.models.auto.modeling_auto")
_NO_HOOK = {"SECURE_LOADER_AUTOLOAD": "0"}
TITLES = {"smollm2": "SmolLM2-135M, 0.27 GB", "qwen3": "Qwen3-shaped, 1.5 GB"}


def use_cryptotensors() -> None:
    """Put its ``safe_open`` where Transformers looks for safetensors'; it does not know all of the arguments."""
    import safetensors

    stock = safetensors.safe_open

    def safe_open(filename: Any, framework: str, **_: Any) -> Any:
        assert framework == "pt"
        return peers.cryptotensors_open(filename)

    for name, module in list(sys.modules.items()):
        # vars(): getattr would make lazy modules import what is not there.
        if name.startswith("transformers.") and vars(module).get("safe_open") is stock:
            module.safe_open = safe_open  # type: ignore[attr-defined]


def _entry(what: Model, name: str, label: str, loader: str, variant: str) -> Entry:
    def make() -> Task:
        folder = data.path(what, variant)

        def prepare() -> None:
            ready()
            if name == "cryptotensors":
                use_cryptotensors()

        def load(_: Any) -> Any:
            import torch
            from transformers import AutoModelForCausalLM

            options = {"loader": "secure"} if name == "secure" else {}
            return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)

        def forward(model: Any) -> Any:
            import torch

            with torch.inference_mode():
                return model, model(input_ids=torch.arange(16).unsqueeze(0)).logits

        def check(found: Any) -> str:
            model, logits = found
            return digest({"logits": logits} | model.state_dict())

        return Task(
            name=name,
            prepare=prepare,
            phases={"load": load, "forward": forward},
            check=check,
            files=data.weight_files(what, variant),
            memory=int(what.nbytes * 1.1) + (128 << 20),
        )

    more = {"secure": ("secure_loader.hf",), "cryptotensors": ("cryptotensors.torch",)}.get(name, ())
    return Entry(
        name=name,
        label=label,
        loader=loader,
        make=make,
        modules=(*_MODULES, *more),
        environment={} if name == "secure" else _NO_HOOK,
        data=((what, variant),),
        parameters={"bytes": what.nbytes},
    )


def _cases(size: Size) -> tuple[Case, ...]:
    models = {"smollm2": SMOLLM2, "qwen3": QWEN3_MODEL} if size == "full" else {"qwen3": TINY_MODEL}
    return tuple(
        Case(
            name=name,
            title=TITLES[name],
            entries=(
                _entry(what, "secure", 'loader="secure", encrypted', OURS, "secure"),
                _entry(what, "plain", "plain Transformers", "transformers", "plain"),
                _entry(what, "cryptotensors", "cryptotensors, encrypted", "cryptotensors", "cryptotensors"),
            ),
            reference="plain",
            watch=True,
        )
        for name, what in models.items()
    )


SUITE = Suite(
    name="transformers",
    title="Transformers: from_pretrained and first forward pass",
    cases=_cases,
    goals=tuple(
        Goal(
            what=f'`from_pretrained(loader="secure")` + first forward pass, {title}',
            against="plain `from_pretrained` + first forward pass",
            measured=Quantity(case, "secure", "seconds.forward"),
            reference=Quantity(case, "plain", "seconds.forward"),
            bound=1.25,
        )
        for case, title in TITLES.items()
    ),
)
