"""Tiny random transformers models: the oracle of every test here, and the checkpoints that we load."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()

VOCAB = 101
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_SIZES, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5),
    "llama3-rope-biases": LlamaConfig(
        **_SIZES,
        num_attention_heads=3,
        num_key_value_heads=1,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=_LLAMA3,
        tie_word_embeddings=True,
    ),
    "mistral": MistralConfig(
        **_SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5, sliding_window=None
    ),
    "qwen2": Qwen2Config(**_SIZES, num_attention_heads=6, num_key_value_heads=2),
    "qwen2-tied-mha": Qwen2Config(
        **_SIZES,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    ),
    "qwen3": Qwen3Config(**_SIZES, num_attention_heads=4, num_key_value_heads=1, head_dim=32),
    "qwen3-tied-biases": Qwen3Config(
        **_SIZES,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
        attention_bias=True,
    ),
}
FAMILIES = ("llama3-rope-biases", "qwen2", "qwen3")  # one of each


def reference(name: str, seed: int = 0) -> Any:
    """A transformers model with weights large enough that every term matters, norms and biases included."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() > 1 else 0.3))
    return model


def saved(name: str, directory: Path, seed: int = 0) -> Any:
    """The reference, also written to `directory`."""
    model = reference(name, seed)
    model.save_pretrained(directory)
    return model


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed))
