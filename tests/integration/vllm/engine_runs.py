"""Runs vLLM engines, one after the other, in a process of their own: ``python -m tests.integration.vllm.engine_runs``.

Jobs come as JSON on standard input, results go as JSON to the file named by the only argument. Starting Python and
importing vLLM costs several times what a tiny engine does, so a test module asks for all of its runs at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROMPTS = ("The capital of France", "def main(")


def run(jobs: dict[str, dict[str, Any]], scratch: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run jobs in a new process.

    Args:
        jobs: By name; ``llm`` holds the arguments of ``vllm.LLM``, the rest is read by :func:`_answers`.
        scratch: For the result and the log.
        environment: Added to this process's.

    Returns:
        Results by name, and the whole log as ``log``.
    """
    result, log = scratch / "results.json", scratch / "log"
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | environment
    with log.open("wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", __spec__.name, str(result)],
            input=json.dumps(jobs).encode(),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=Path(__file__).parents[3],
            timeout=300,
            check=False,
        )
    text = log.read_text(errors="replace")
    if done.returncode != 0 or not result.exists():
        raise RuntimeError(f"engine runs ended with {done.returncode}:\n{text[-4000:]}")
    return json.loads(result.read_text()) | {"log": text}


def _answers(job: dict[str, Any]) -> dict[str, Any]:
    import vllm

    settings = {"max_model_len": 256, "max_num_seqs": 4, "enforce_eager": True} | job["llm"]
    try:
        llm = vllm.LLM(**settings)
        if job.get("embed"):
            return {"vectors": [output.outputs.embedding for output in llm.embed(list(PROMPTS))]}
        answers = {"first": _generate(llm)}
        if job.get("reload"):
            llm.collective_rpc("reload_weights")
            answers["reloaded"] = _generate(llm)
        for number, (name, path) in enumerate(job.get("adapters", {}).items(), 1):
            answers[name] = _with_adapter(llm, number, name, path)
    except Exception as e:  # noqa: BLE001 - whatever it is, it is the answer
        return _refusal(e)
    return answers


def _generate(llm: Any, adapter: Any = None) -> list[Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=8, temperature=0, logprobs=2)
    outputs = [request.outputs[0] for request in llm.generate(list(PROMPTS), sampling, lora_request=adapter)]
    # Random models like to repeat one token; the probabilities tell weights apart where tokens do not.
    return [[list(o.token_ids), [[lp[t].logprob for t in sorted(lp)] for lp in o.logprobs]] for o in outputs]


def _with_adapter(llm: Any, number: int, name: str, path: str) -> Any:
    from vllm.lora.request import LoRARequest

    request = LoRARequest(name, number, path)
    try:
        # By itself first: an adapter that fails within generate() leaves requests in the engine that never end.
        llm.llm_engine.add_lora(request)
        return _generate(llm, request)
    except Exception as e:  # noqa: BLE001 - whatever it is, it is the answer
        return _refusal(e)


def _refusal(error: BaseException) -> dict[str, Any]:
    return {"error": type(error).__name__, "message": str(error)}


if __name__ == "__main__":
    given = json.load(sys.stdin)
    Path(sys.argv[1]).write_text(json.dumps({name: _answers(job) for name, job in given.items()}))
