"""Tiny checkpoints of the speculators that vLLM computes itself, in the forms in which they are published."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.config import read_config
from models.directory import SafetensorsDirectory

LAYERS = "model.layers."


def with_mtp(target: Path, *, copied: int) -> None:
    """Make `target`, a qwen2 checkpoint, a MiMo with one MTP layer: its decoder block is the target's layer `copied`,
    which it gets the target's last hidden state."""
    config, named = read_config(target), tensors_of(target)
    width = config["hidden_size"]
    layer = f"{LAYERS}{copied}."
    head = {
        f"model.mtp_layers.0.{name.removeprefix(layer)}": value.clone()
        for name, value in named.items()
        if name.startswith(layer)
    }
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        head[f"model.mtp_layers.0.{name}.weight"] = torch.ones(width)
    eye = torch.eye(width)
    head["model.mtp_layers.0.input_proj.weight"] = torch.cat([0.1 * eye, eye], 1)  # of the hidden state, and the token
    write(target, {**config, "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}, named | head)


def dflash(target: Path, out: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a DFlash speculator of two layers for a qwen3 target, as its authors publish them."""
    config = read_config(target)
    own = {"mask_token_id": config["vocab_size"] - 1, "target_layer_ids": [0, config["num_hidden_layers"] - 2]}
    whole = {
        **config,
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 2,
        "block_size": 5,
        "dflash_config": own,
    }
    write(out, whole | changes, _head(config, layers=2, fused=2, inputs=1, seed=seed))
    return out


def peagle(target: Path, out: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a P-EAGLE speculator of one layer for a qwen3 target, as speculators publishes them."""
    config = read_config(target)
    layer = {key: value for key, value in config.items() if key != "architectures"} | {"num_hidden_layers": 1}
    whole = {
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "speculators_config": {
            "algorithm": "peagle",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"name_or_path": str(target), "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": config["vocab_size"],
        "mask_token_id": config["vocab_size"] - 1,
        "eagle_aux_hidden_state_layer_ids": [1, 2, config["num_hidden_layers"] - 1],
    }
    named = _head(config, layers=1, fused=3, inputs=2, seed=seed)
    named["mask_hidden"] = torch.zeros(1, 3 * config["hidden_size"])
    named["lm_head.weight"] = tensors_of(target)["model.embed_tokens.weight"]
    write(out, whole | changes, named)
    return out


def tensors_of(directory: Path) -> dict[str, Tensor]:
    with SafetensorsDirectory(directory) as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


def write(directory: Path, config: Mapping[str, Any], named: Mapping[str, Tensor]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in named.items()}, directory / "model.safetensors")


def _head(config: Mapping[str, Any], *, layers: int, fused: int, inputs: int, seed: int) -> dict[str, Tensor]:
    """Random decoder layers whose attention reads `inputs` states, behind a fusion of `fused` layers of the target."""
    width, heads, dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    kv, middle = config["num_key_value_heads"] * dim, config["intermediate_size"]
    shapes = {
        "self_attn.q_proj": (heads * dim, inputs * width),
        "self_attn.k_proj": (kv, inputs * width),
        "self_attn.v_proj": (kv, inputs * width),
        "self_attn.o_proj": (width, heads * dim),
        "mlp.gate_proj": (middle, width),
        "mlp.up_proj": (middle, width),
        "mlp.down_proj": (width, middle),
    }
    norms = {"input_layernorm": width, "post_attention_layernorm": width}
    norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim} | ({"hidden_norm": width} if inputs > 1 else {})
    source = torch.Generator().manual_seed(seed)
    named = {
        "fc.weight": 0.05 * torch.randn((width, fused * width), generator=source),
        "norm.weight": torch.ones(width),
    }
    if inputs == 1:
        named["hidden_norm.weight"] = torch.ones(width)
    for layer in range(layers):
        for name, shape in shapes.items():
            named[f"layers.{layer}.{name}.weight"] = 0.05 * torch.randn(shape, generator=source)
        named |= {f"layers.{layer}.{name}.weight": torch.ones(size) for name, size in norms.items()}
    return named
