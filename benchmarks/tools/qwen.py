"""Qwen2.5's shapes by size, for predictions, compilation and measurements without a checkpoint."""

from dataclasses import replace
from typing import Any

from config.formats import FORMATS
from config.network import Network
from models.config import ModelConfig

# Fields of ModelConfig.
QWEN: dict[str, dict[str, Any]] = {
    "0.5b": {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_layers": 24, "num_heads": 14}
    | {"num_kv_heads": 2, "head_dim": 64, "tied": True},
    "1.5b": {"vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960, "num_layers": 28, "num_heads": 12}
    | {"num_kv_heads": 2, "head_dim": 128, "tied": True},
    "7b": {"vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_layers": 28, "num_heads": 28}
    | {"num_kv_heads": 4, "head_dim": 128},
}
# Planned for (examples/cluster), but not measured.
LARGE: dict[str, dict[str, Any]] = {
    "32b": {"vocab_size": 152_064, "hidden_size": 5120, "intermediate_size": 27_648, "num_layers": 64, "num_heads": 40}
    | {"num_kv_heads": 8, "head_dim": 128},
}


def qwen(size: str, **changed: Any) -> ModelConfig:
    """Return the model of that size. `changed`: fields with other values."""
    fields: dict[str, Any] = {"family": "qwen2", "max_position_embeddings": 32_768, "qkv_bias": True}
    return ModelConfig(**fields | (QWEN | LARGE)[size] | changed)


def network(config: ModelConfig, item_bytes: int = 2, quantization: str = "none") -> Network:
    """Return a model in the predictor's form, for an engine with that rollout.quantization."""
    return replace(config, item_bytes=item_bytes, low_bits=FORMATS.get(quantization))
