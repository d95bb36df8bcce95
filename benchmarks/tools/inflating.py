"""Function-preserving inflation: a larger model with the same logits, for timing large passes with real acceptance.

Owns the arithmetic that makes it exact. It never trains, and no run depends on it.

With hidden size D -> D', the residual stream becomes [x, 0]: every write to it is zero in the new dimensions. RMSNorm
then averages over D' dimensions: mean' = mean D/D', so eps' = eps D/D' and weight' = weight sqrt(D/D') give the same
numbers. Weights that only multiply zeros are random, not zero, so that bytes and arithmetic are those of an ordinary
model. One thing is not exact: Qwen3's query and key norms share eps but keep their size unless head_dim grows as D
does; the error is about eps / mean(q^2), far below float32 resolution of the logits for trained models.
"""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from models.config import ModelConfig, ModelConfigError
from models.layout import hf_layout

# From the demo's shape (Qwen3, hidden 128, 3 layers, 2 heads, 1 KV head, head_dim 64, intermediate 384, vocab 228).
PRESETS: Mapping[str, Mapping[str, int]] = {
    "20m": {"hidden_size": 512, "intermediate_size": 1536, "num_layers": 6, "num_heads": 8, "num_kv_heads": 4},
    "100m": {"hidden_size": 1024, "intermediate_size": 3072, "num_layers": 8, "num_heads": 16, "num_kv_heads": 8},
}


def inflated_config(config: ModelConfig, **sizes: int) -> ModelConfig:
    """Return the config with larger `hidden_size`, `intermediate_size`, `num_layers`, `num_heads`, `num_kv_heads`,
    `head_dim`.

    Raises ModelConfigError for a size that shrinks, fewer query heads per KV head, or a head_dim that is no multiple.
    """
    for name, size in sizes.items():
        if size < getattr(config, name):
            raise ModelConfigError(f"{name}={size} is smaller than the model's {getattr(config, name)}")
    hidden = sizes.get("hidden_size", config.hidden_size)
    target = dataclasses.replace(config, **sizes, rms_norm_eps=config.rms_norm_eps * config.hidden_size / hidden)  # type: ignore[arg-type]
    if target.num_heads // target.num_kv_heads < config.num_heads // config.num_kv_heads:
        raise ModelConfigError("there must be at least as many query heads per KV head as in the model")
    if target.head_dim % config.head_dim:
        raise ModelConfigError(f"head_dim={target.head_dim} is not a multiple of {config.head_dim}: RoPE would differ")
    return target


def inflate(
    config: ModelConfig, tensors: Mapping[str, Tensor], target: ModelConfig, *, seed: int = 0
) -> dict[str, Tensor]:
    """Map Hugging Face tensors of `config` to those of `target` (from inflated_config): same dtype, same logits."""
    generator = torch.Generator().manual_seed(seed)
    plan = _Plan(config, target)
    result: dict[str, Tensor] = {}
    for name, shape in _shapes(target).items():
        noise = torch.randn(shape, generator=generator) * config.initializer_range
        kind = ".".join(name.split(".")[-2:])  # "q_proj.weight"
        if _layer(name) >= config.num_layers:
            values = plan.new_layer(kind, noise)
            dtype = tensors["model.embed_tokens.weight"].dtype
        else:
            values = plan.grown(kind, tensors[name].float(), noise)
            dtype = tensors[name].dtype
        result[name] = values.to(dtype)
    return result


class _Plan:
    """The positions of old rows and columns, and the contents of new ones."""

    def __init__(self, old: ModelConfig, new: ModelConfig) -> None:
        self.old, self.new = old, new
        self.norm_scale = (old.hidden_size / new.hidden_size) ** 0.5
        # Scores are divided by sqrt(head_dim), so queries grow to compensate.
        self.query_scale = (new.head_dim / old.head_dim) ** 0.5
        self.head_norm_scale = (old.head_dim / new.head_dim) ** 0.5
        # RoPE: pair i of d turns with theta^(-2i/d), as pair m i of d' = m d does; pairs are (i, i + d/2).
        pairs = torch.arange(old.head_dim // 2) * (new.head_dim // old.head_dim)
        self.rotary_dims = torch.cat((pairs, pairs + new.head_dim // 2))
        old_group, new_group = old.num_heads // old.num_kv_heads, new.num_heads // new.num_kv_heads
        head = torch.arange(old.num_heads)
        self.query_heads = head // old_group * new_group + head % old_group
        self.kv_heads = torch.arange(old.num_kv_heads)

    def new_layer(self, kind: str, noise: Tensor) -> Tensor:
        """Return a layer that adds nothing to the residual stream."""
        if kind.startswith(("o_proj.", "down_proj.")):
            return torch.zeros_like(noise)
        return noise + 1.0 if "norm." in kind else noise

    def grown(self, kind: str, old: Tensor, noise: Tensor) -> Tensor:
        """Return `old` inside the larger tensor. `noise` has its shape and fills the weights that multiply zeros."""
        module, is_weight = kind.split(".")[0], kind.endswith(".weight")
        if module in ("q_norm", "k_norm"):
            scale = self.head_norm_scale * (self.query_scale if module == "q_norm" else 1.0)
            grown = 1.0 + noise
            grown[self.rotary_dims] = old * scale
            return grown
        if module in ("input_layernorm", "post_attention_layernorm", "norm"):
            grown = 1.0 + noise
            grown[: self.old.hidden_size] = old * self.norm_scale
            return grown
        if module == "embed_tokens":
            grown = torch.zeros_like(noise)  # writes to the residual stream
            grown[:, : old.shape[1]] = old
            return grown
        if module in ("q_proj", "k_proj", "v_proj"):
            return self._into_heads(module, old, noise)
        grown = noise.clone()
        rows = torch.arange(old.shape[0])
        if module in ("o_proj", "down_proj"):
            return self._into_residual(module, old, grown) if is_weight else _with(torch.zeros_like(grown), rows, old)
        if module == "up_proj":
            grown[old.shape[0] :] = 0.0  # silu(anything) * 0: the new intermediate dimensions are zero
        return _with(grown, rows, old)  # gate_proj, up_proj, lm_head: new columns multiply zeros

    def _into_heads(self, module: str, old: Tensor, noise: Tensor) -> Tensor:
        """Grow q, k, v: new heads are random, new dimensions of old heads are zero."""
        heads = self.query_heads if module == "q_proj" else self.kv_heads
        dims = torch.arange(self.old.head_dim) if module == "v_proj" else self.rotary_dims
        # With q_norm the scale is in its weight, since the norm would undo it here.
        scale = self.query_scale if module == "q_proj" and not self.old.qk_norm else 1.0
        grown = noise.clone().view(-1, self.new.head_dim, *noise.shape[1:])  # [heads, D, ...]
        grown[heads] = 0.0
        block = old.view(-1, self.old.head_dim, *old.shape[1:]) * scale
        index = heads[:, None], dims[None, :]
        if old.dim() == 1:
            grown[index] = block
        else:
            inside = noise.view(grown.shape)[index].clone()  # new input columns multiply zeros
            inside[..., : old.shape[1]] = block
            grown[index] = inside
        return grown.reshape(noise.shape)

    def _into_residual(self, module: str, old: Tensor, grown: Tensor) -> Tensor:
        """Grow o, down: zero in the rows of new residual dimensions and the columns of new heads; random
        against zeros."""
        hidden = self.old.hidden_size
        if module == "down_proj":  # Every new column multiplies a zero.
            grown[:, : old.shape[1]] = 0.0
            grown[:hidden, : old.shape[1]] = old
            return grown
        columns = grown.view(self.new.hidden_size, self.new.num_heads, self.new.head_dim)
        kept = torch.zeros(self.new.num_heads, dtype=torch.bool)
        kept[self.query_heads] = True
        columns[:, ~kept] = 0.0
        columns[:, self.query_heads, : self.old.head_dim] = 0.0
        columns[:hidden, self.query_heads, : self.old.head_dim] = old.view(hidden, -1, self.old.head_dim)
        return columns.reshape(grown.shape)


def _with(grown: Tensor, rows: Tensor, old: Tensor) -> Tensor:
    if old.dim() == 1:
        grown[rows] = old
    else:
        grown[: old.shape[0], : old.shape[1]] = old
    return grown


def _layer(name: str) -> int:
    """Return the layer number of "model.layers.3. ...", -1 for tensors outside of the layers."""
    return int(name.split(".")[2]) if name.startswith("model.layers.") else -1


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every Hugging Face tensor."""
    from models.transformer import Transformer

    parameters = dict(Transformer(config, device="meta").named_parameters())
    return {
        piece.hf_name: tuple(parameters[piece.parameter][piece.start : piece.stop].shape) for piece in hf_layout(config)
    }
