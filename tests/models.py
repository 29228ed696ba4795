"""Models for tests: tiny random ones made here in a moment, and the real ones of ``examples/real_models.py``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal

from examples.real_models import minilm, smollm2

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast

__all__ = ["ARCHITECTURES", "minilm", "smollm2", "tiny_model"]

Architecture = Literal["qwen3", "llama", "qwen3_moe"]
ARCHITECTURES: tuple[Architecture, ...] = ("qwen3", "llama", "qwen3_moe")

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_model(
    folder: Path,
    arch: Architecture = "qwen3",
    *,
    shards: int = 1,
    tie: bool = False,
    dtype: str = "bfloat16",
    layers: int = 2,
    hidden: int = 128,
    seed: int = 0,
) -> Path:
    """Write a random model with a byte-level tokenizer to ``folder``, as ``save_pretrained`` does, in ``shards`` files."""
    import torch
    import transformers

    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    settings = {
        "vocab_size": 320,  # a multiple of 64 above the tokenizer's 259
        "hidden_size": hidden,
        "intermediate_size": hidden * 3,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,  # below that vLLM's CPU attention has no kernel
        "max_position_embeddings": 1024,
        "tie_word_embeddings": tie,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config_class, model_class = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    }[arch]
    if arch == "qwen3_moe":
        settings |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**settings)).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=_shard_size(model, shards))
    written = sorted(folder.glob("*.safetensors"))
    if len(written) != shards:
        raise ValueError(f"{shards} shards asked for, {len(written)} written")
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each byte: nothing to train, nothing it cannot encode."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end_of_text, _, end_of_turn = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=end_of_text,
        eos_token=end_of_turn,
        pad_token=end_of_text,
        additional_special_tokens=list(SPECIAL_TOKENS),
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def weight_files(folder: Path) -> list[Path]:
    """The shards of a model folder, in the order of their names; those of the index where there is one."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return [folder / "model.safetensors"]


def _shard_size(model, shards: int) -> int:
    """A ``max_shard_size`` that upstream's greedy split turns into exactly this many files (or the nearest it can do)."""
    from huggingface_hub import split_torch_state_dict_into_shards

    state = model.state_dict()
    total = sum(tensor.nbytes for tensor in state.values())
    if shards == 1:
        return total + 1

    def off_by(size: int) -> int:
        return abs(len(split_torch_state_dict_into_shards(state, max_shard_size=size).filename_to_tensors) - shards)

    return min((total * step // (shards * 20) for step in range(10, 41)), key=off_by)
