"""Heads in the forms of others, written by hand, and what such a head computes over a text: pass after pass."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from drafter.eagle import Drafting
from models.rope import RopeTable
from models.transformer import AttentionContext


class _Chain:
    """Pass k sees pass 1 up to its own row, and of later passes its own rows alone."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._keys.append(k)
        self._values.append(v)
        rows, groups = len(q), q.shape[1] // k.shape[1]
        keys, values = (torch.stack(each).repeat_interleave(groups, 2) for each in (self._keys, self._values))
        scores = torch.einsum("thd,pshd->tphs", q, keys) * q.shape[-1] ** -0.5
        seen = torch.eye(rows, dtype=torch.bool)[:, None].repeat(1, len(keys), 1)
        seen[:, 0] = torch.ones(rows, rows, dtype=torch.bool).tril()
        weights = scores.masked_fill(~seen[:, :, None], -torch.inf).permute(0, 2, 1, 3).flatten(2).softmax(-1)
        mixed: Tensor = torch.einsum("thx,xhd->thd", weights, values.flatten(0, 1))
        return mixed


def chain_logits(model: Drafting, embedding: Tensor, hidden: Tensor, tokens: Tensor, passes: int) -> list[Tensor]:
    """Logits [T, draft vocabulary] of each pass: pass k feeds row i with token i + k and what pass k - 1 put out there.

    hidden: [T, 3H]; the last k rows of pass k + 1 are fed with token 0 and mean nothing."""
    context: AttentionContext = _Chain()  # type: ignore[assignment]
    rope = model.rope or RopeTable(model.config)
    features, found = model.features(hidden), []
    for index in range(passes):
        fed = torch.cat((tokens[index:], tokens.new_zeros(index)))
        rotation = rope.at(torch.arange(len(tokens)) + index)
        features = model.advance(F.embedding(fed, embedding), features, rotation, context)
        assert model.lm_head is not None
        found.append(model.lm_head(model.readout(features)))
    return found


H, HEADS, KV, D, MLP = 32, 2, 1, 8, 40  # of the head: its target has 4 heads of 16 and an MLP of 48
IDS = [2, 3, 5]  # vLLM's: the outputs of the target's layers 1, 2 and 4
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def layer_config(kind: str, vocab: int, hidden: int) -> dict[str, Any]:
    return {
        "model_type": kind,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": MLP,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": D,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "rope_scaling": None,
        "attention_bias": False,
    }


def head_tensors(
    kind: str, layer: str, vocab: int, tokens: Tensor | None, flags: dict[str, bool], hidden: int = H
) -> dict[str, Tensor]:
    """Random ones under the names of others, with d2t and t2d where `tokens` are those that can be drafted."""
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.2 + (1.0 if len(shape) == 1 else 0.0)

    rows = vocab if tokens is None else len(tokens)
    tensors = {
        "fc.weight": random(hidden, 3 * hidden),
        f"{layer}hidden_norm.weight": random(hidden),
        f"{layer}input_layernorm.weight": random(hidden),
        f"{layer}post_attention_layernorm.weight": random(hidden),
        f"{layer}self_attn.q_proj.weight": random(HEADS * D, 2 * hidden),
        f"{layer}self_attn.k_proj.weight": random(KV * D, 2 * hidden),
        f"{layer}self_attn.v_proj.weight": random(KV * D, 2 * hidden),
        f"{layer}self_attn.o_proj.weight": random(hidden, HEADS * D),
        f"{layer}mlp.gate_proj.weight": random(MLP, hidden),
        f"{layer}mlp.up_proj.weight": random(MLP, hidden),
        f"{layer}mlp.down_proj.weight": random(hidden, MLP),
        "norm.weight": random(hidden),
        "lm_head.weight": random(rows, hidden),
    }
    if kind == "qwen3":
        tensors |= {f"{layer}self_attn.{name}_norm.weight": random(D) for name in "qk"}
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = random(3 * hidden)
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{index}.weight": random(hidden) for index in range(3)}
    if tokens is not None:
        can = torch.zeros(vocab, dtype=torch.bool)
        can[tokens] = True
        tensors |= {"d2t": tokens - torch.arange(rows), "t2d": can}
    return tensors


def write_head(
    out: Path,
    form: str,
    vocab: int,
    tokens: Tensor | None = None,
    kind: str = "llama",
    *,
    hidden: int = H,
    ids: list[int] = IDS,
    **flags: bool,
) -> dict[str, Tensor]:
    """A head for a target of width `hidden` and at least five layers, as `form` publishes it: speculators, specforge or
    authors (a file of torch's, no layer ids: those of six layers are 2, 3 and 3). Returns its tensors."""
    out.mkdir(parents=True)
    rows = vocab if tokens is None else len(tokens)
    layer = "layers.0." if form == "speculators" else "midlayer."
    tensors = head_tensors(kind, layer, vocab, tokens, flags, hidden)
    config: dict[str, Any] = layer_config(kind, vocab, hidden)
    if form == "speculators":
        config = {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "speculators_config": {"algorithm": "eagle3"},
            "transformer_layer_config": config,
            "eagle_aux_hidden_state_layer_ids": ids,
            **{flag: flags.get(flag, False) for flag in FLAGS},
        }
    elif form == "specforge":
        config |= {"architectures": ["LlamaForCausalLMEagle3"], **flags}
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    else:
        config |= {"architectures": ["LlamaForCausalLM"]}
    config["draft_vocab_size"] = rows
    (out / "config.json").write_text(json.dumps(config))
    if form == "authors":
        torch.save(tensors, out / "pytorch_model.bin")
    else:
        save_file(tensors, out / "model.safetensors")
    return tensors
