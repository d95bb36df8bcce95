"""Tiny random models of families that our own transformer does not compute: vLLM serves them, `AutoModelForCausalLM`
trains them. Head sizes are those that vLLM's attention on the CPU takes (32, or 64)."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3MoeConfig,
)
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
WINDOW = 16  # tokens, where the family has sliding windows: shorter than prompt and response
FAMILIES = ("gemma2", "gemma3", "mistral", "phi3", "mixtral", "qwen3_moe")


def config_of(family: str, vocab_size: int) -> PretrainedConfig:
    """Every term of the family's own that changes numbers is on: windows, soft caps, scales, experts."""
    sizes = _SIZES | {"vocab_size": vocab_size}
    match family:
        case "gemma2":
            return Gemma2Config(**sizes, head_dim=32, query_pre_attn_scalar=32, sliding_window=WINDOW)
        case "gemma3":
            return Gemma3TextConfig(
                **sizes,
                head_dim=32,
                query_pre_attn_scalar=32,
                sliding_window=WINDOW,
                layer_types=["sliding_attention", "full_attention"],
            )
        case "mistral":
            return MistralConfig(**sizes, sliding_window=WINDOW)
        case "phi3":
            return Phi3Config(**sizes)
        case "mixtral":
            return MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
        case "qwen3_moe":
            return Qwen3MoeConfig(
                **sizes,
                head_dim=32,
                moe_intermediate_size=32,
                num_experts=4,
                num_experts_per_tok=2,
                decoder_sparse_step=1,
            )
    raise ValueError(f"no such family: {family}")


def write_family(family: str, directory: Path, *, vocab_size: int = 228, seed: int = 0) -> Path:
    """A checkpoint whose weights are large enough that every term matters; without a tokenizer."""
    torch.manual_seed(seed)
    config = config_of(family, vocab_size)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() > 1 else 0.2))
    model.save_pretrained(directory)
    return directory
