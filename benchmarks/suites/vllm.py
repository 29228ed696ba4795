"""What vLLM logs as "Loading weights took", through its own loader classes; and one whole engine for each format.

Starting an engine takes half a minute, most of which has nothing to do with weights. So a repetition makes vLLM's
configuration, a process group of one, and the model without weights before the clock starts; what is timed is
``load_weights``, from beginning to end: reading names, opening and verifying included, which vLLM's own figure
(``took``) leaves out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks import data
from benchmarks.data import QWEN3_MODEL, SMOLLM2, TINY_MODEL, Model
from benchmarks.model import OURS, Case, Entry, Goal, Quantity, Size, Suite
from secure_loader.bench.measure import Task, digest

TITLES = {"smollm2": "SmolLM2-135M, 0.27 GB", "qwen3": "Qwen3-shaped, 1.5 GB"}
_MODULES = (
    "torch",
    "vllm",
    "vllm.config",
    "vllm.engine.arg_utils",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3",
    "secure_loader.vllm.loader",
)
_FORMATS = {
    "secure": ("--load-format secure", OURS, "secure", "secure"),
    "plain": ("--load-format auto", "vllm", "auto", "plain"),
}
# The level must let through the line that vLLM's own figure is in; an engine must not start processes of its own.
_SETTINGS = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
_ENGINE = {"max_model_len": 256, "max_num_seqs": 4, "enforce_eager": True, "dtype": "bfloat16"}


def _start(folder: str, load_format: str) -> tuple[Any, Any, Any]:
    """Everything that a load needs: loader, model without weights, configuration."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.utils.torch_utils import set_default_torch_dtype

    from secure_loader.vllm import register

    register()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    config = EngineArgs(model=folder, load_format=load_format, **_ENGINE).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        loader = get_model_loader(config.load_config)
        with set_default_torch_dtype(config.model_config.dtype), torch.device("cpu"):
            model = loader.create_model(vllm_config=config, model_config=config.model_config)
    return loader, model, config


def _weights(started: tuple[Any, Any, Any]) -> tuple[Any, Any]:
    from vllm.config import set_current_vllm_config

    loader, model, config = started
    with set_current_vllm_config(config):
        loader.load_weights(model, config.model_config)
    return loader, model


def _check(found: tuple[Any, Any]) -> dict[str, Any]:
    loader, model = found
    return {
        "digest": digest(dict(model.named_parameters())),
        "took": loader.counter_after_loading_weights - loader.counter_before_loading_weights,
    }


class _Took:
    """Picks vLLM's own figure from its log. A filter: vLLM replaces handlers when an engine starts."""

    seconds: float | None = None

    def __call__(self, record: logging.LogRecord) -> bool:
        if str(record.msg).startswith("Loading weights took") and isinstance(record.args, tuple):
            self.seconds = float(str(record.args[0]))
        return True


def _engine(folder: str, load_format: str) -> tuple[Any, _Took]:
    import vllm

    took = _Took()
    logging.getLogger("vllm.model_executor.model_loader.default_loader").addFilter(took)
    return vllm.LLM(folder, load_format=load_format, **_ENGINE), took


def _check_engine(found: tuple[Any, _Took]) -> dict[str, Any]:
    from vllm import SamplingParams

    llm, took = found
    (output,) = llm.generate(["The capital of France"], SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)
    tokens = json.dumps(list(output.outputs[0].token_ids))
    return {"digest": hashlib.sha256(tokens.encode()).hexdigest()[:16], "took": took.seconds}


def _entry(what: Model, name: str, *, engine: bool = False) -> Entry:
    label, loader, load_format, variant = _FORMATS[name]

    def make() -> Task:
        folder = str(data.path(what, variant))
        files = data.weight_files(what, variant)
        if engine:
            return Task(
                name=name,
                phases={"engine": lambda _: _engine(folder, load_format)},
                check=_check_engine,
                files=files,
                timeout=180,
            )
        return Task(
            name=name,
            prepare=lambda: _start(folder, load_format),
            phases={"weights": _weights},
            check=_check,
            files=files,
            memory=int(what.nbytes * 1.1) + (64 << 20),
        )

    return Entry(
        name=name,
        label=label,
        loader=loader,
        make=make,
        modules=_MODULES,
        environment=_SETTINGS,
        data=((what, variant),),
        parameters={"bytes": what.nbytes},
    )


def _case(name: str, title: str, entries: Sequence[Entry], *, repetitions: int | None = None, watch: bool) -> Case:
    return Case(name=name, title=title, entries=entries, reference="plain", repetitions=repetitions, watch=watch)


def _cases(size: Size) -> tuple[Case, ...]:
    models = {"smollm2": SMOLLM2, "qwen3": QWEN3_MODEL} if size == "full" else {"qwen3": TINY_MODEL}
    cases = [
        _case(name, TITLES[name], [_entry(what, kind) for kind in _FORMATS], watch=True)
        for name, what in models.items()
    ]
    what = SMOLLM2 if size == "full" else TINY_MODEL
    engines = [_entry(what, kind, engine=True) for kind in _FORMATS]
    return (*cases, _case("engine", "A whole engine, once, SmolLM2-135M", engines, repetitions=1, watch=False))


SUITE = Suite(
    name="vllm",
    title="vLLM: Loading weights took",
    cases=_cases,
    goals=(
        *(
            Goal(
                what=f'vLLM "Loading weights took", {title}',
                against="`--load-format auto`",
                measured=Quantity(case, "secure", "seconds.weights"),
                reference=Quantity(case, "plain", "seconds.weights"),
                bound=1.2,
            )
            for case, title in TITLES.items()
        ),
        Goal(
            what='"Loading weights took" in the log of a whole engine, SmolLM2 (one run)',
            against="`--load-format auto`",
            measured=Quantity("engine", "secure", "check.took"),
            reference=Quantity("engine", "plain", "check.took"),
            bound=None,
        ),
    ),
)
