"""What vLLM 0.32 computes with an exported drafter, written from its sources without our models: the export's oracle.

EagleLlamaForCausalLM (llama_eagle.py), Eagle3LlamaForCausalLM (llama_eagle3.py), Eagle3Qwen3ForCausalLM
(qwen3_eagle3.py); one sequence, causal, float64.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class VllmDrafter:
    """Reads config.json and tensors as vLLM does: every tensor must be used, and none may be missing."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.config = config
        self.eagle3 = "Eagle3" in config["architectures"][0]
        self.qk_norm = self.eagle3 and config["model_type"] == "qwen3"
        self.tensors = {name.replace("midlayer.", "layers.0."): tensor.double() for name, tensor in tensors.items()}
        assert set(self.tensors) == self.expected_names()

    def expected_names(self) -> set[str]:
        names = {"fc.weight", "layers.0.post_attention_layernorm.weight"}
        names |= {f"layers.0.self_attn.{p}_proj.weight" for p in "qkvo"}
        names |= {f"layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
        attention_bias = self.config["attention_bias"]
        if attention_bias if self.eagle3 else self.config["qkv_bias"]:
            names |= {f"layers.0.self_attn.{p}_proj.bias" for p in "qkv"}
        if attention_bias and not self.qk_norm:
            names.add("layers.0.self_attn.o_proj.bias")
        if self.config.get("mlp_bias"):
            names |= {f"layers.0.mlp.{p}_proj.bias" for p in ("gate", "up", "down")}
        if self.qk_norm:
            names |= {f"layers.0.self_attn.{p}_norm.weight" for p in "qk"}
        if self.eagle3:
            names |= {"norm.weight", "lm_head.weight"} | {
                f"layers.0.{norm}.weight" for norm in ("input_layernorm", "hidden_norm")
            }
        return names

    def combine(self, rows: Tensor) -> Tensor:
        """Target states in the order of their layer ids, [T, 3H] -> [T, H]; EAGLE's are left as they are."""
        return rows.double() @ self.tensors["fc.weight"].T if self.eagle3 else rows.double()

    def forward(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(what the head takes, what is fed back), [T, H] each."""
        if not self.eagle3:
            x = torch.cat((embeds.double(), hidden), -1) @ self.tensors["fc.weight"].T
            out = self._layer(x, residual=x)
            return out, out
        x = torch.cat((self._norm("input_layernorm", embeds.double()), self._norm("hidden_norm", hidden)), -1)
        out = self._layer(x, residual=hidden)
        return _rms(out, self.tensors["norm.weight"], self.config["rms_norm_eps"]), out

    def _layer(self, x: Tensor, residual: Tensor) -> Tensor:
        residual = residual + self._attention(x)
        normed = self._norm("post_attention_layernorm", residual)
        gate, up = (self._linear(f"mlp.{p}_proj", normed) for p in ("gate", "up"))
        return residual + self._linear("mlp.down_proj", F.silu(gate) * up)

    def _attention(self, x: Tensor) -> Tensor:
        heads, groups = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        size = self.config["head_dim"]
        q, k, v = (self._linear(f"self_attn.{p}_proj", x).view(len(x), -1, size) for p in "qkv")
        if self.qk_norm:
            q, k = (self._norm(f"self_attn.{p}_norm", t) for p, t in (("q", q), ("k", k)))
        q, k = self._rope(q), self._rope(k)
        k, v = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * size**-0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        return self._linear("self_attn.o_proj", mixed.reshape(len(x), -1))

    def _rope(self, x: Tensor) -> Tensor:
        """Half-split rotation at positions 0, 1, ...; plain RoPE only."""
        assert self.config["rope_parameters"]["rope_type"] == "default"
        half = x.shape[-1] // 2
        theta = self.config["rope_parameters"]["rope_theta"]
        angles = torch.arange(len(x)).double()[:, None] * theta ** (-torch.arange(half).double() / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"layers.0.{name}.weight"], self.tensors.get(f"layers.0.{name}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return _rms(x, self.tensors[f"layers.0.{name}.weight"], self.config["rms_norm_eps"])


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight
