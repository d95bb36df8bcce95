"""A Transformer's forward on CUDA as ten kernels per layer (`models.ops.triton`), eager or captured.

The residual stream is kept beside a layer's output, so that one kernel adds and normalises. Results equal
`models.transformer` up to rounding. Order: norm, qkv, norm and RoPE with cache write, attention (split, merge), o, add
and norm, gate and up, SwiGLU, down. Where a product's tokens are eight bits, the norm or SwiGLU before it quantises
them; only those of o have a kernel more. Rows are packed, a request may have any number of them, and the host is never
awaited.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actors.engine.native.forward.context import KVCache
from actors.engine.native.forward.layout import DeviceStep
from models import ops
from models.ops.triton import operators
from models.tensor_parallel import RankTransformer, SummedProjection
from models.transformer import Block, LowBitProjection, Projection, Transformer

Operand = Tensor | tuple[Tensor, Tensor]  # tokens of a product, or their eight bits and scales


class DecoderForward:
    """`model(tokens, context)` by kernels, for inference. Weights are read in place."""

    def __init__(self, model: Transformer, recorded: tuple[int, ...] = ()) -> None:
        """recorded: layers whose outputs precede the final state in every row."""
        self._model, self._recorded = model, recorded
        self._blocks = [block for block in model.blocks if isinstance(block, Block)]
        self._direct = operators.is_direct(model.embed_tokens.weight)
        # A CPU multiplies by the weights' panels, which quantise the tokens themselves.
        self._rounds = not model.embed_tokens.weight.is_cpu
        model.rope.table(model.embed_tokens.weight.device)  # made once, outside of any capture

    @staticmethod
    def supports(model: Transformer) -> bool:
        """Return whether the model is ours, unchanged or one rank's part of it, of a dtype with kernels."""
        return type(model) in (Transformer, RankTransformer) and model.embed_tokens.weight.dtype in (
            torch.float32,
            torch.bfloat16,
        )

    def __call__(self, step: DeviceStep, cache: KVCache) -> tuple[Tensor, Tensor]:
        """(rows [T, W] with recorded layers, final states [T, H]); the rows' K/V enter the cache."""
        model, blocks, product = self._model, self._blocks, self._product
        kernels = operators.layer_operators(self._direct)
        angles = model.rope.table(step.tokens.device)
        eps = model.config.rms_norm_eps
        total = F.embedding(step.tokens, model.embed_tokens.weight)
        # The only norm without a residual.
        normed: Operand = operators.rms_norm(total, blocks[0].input_norm.weight, eps)
        outputs: dict[int, Tensor] = {}
        for layer, block in enumerate(blocks):
            keys, values = cache.keys[layer], cache.values[layer]
            parts = block._modules  # an attribute of a module costs ten times as much, and a layer asks for many
            q = kernels.rope_write(
                product(normed, parts["qkv_proj"]),
                angles.cos,
                angles.sin,
                step.positions,
                step.kv_slots,
                _weight(parts.get("q_norm")),
                _weight(parts.get("k_norm")),
                eps,
                keys,
                values,
            )
            attended = kernels.paged_attention(
                q,
                keys,
                values,
                step.block_tables,
                step.query_offsets,
                step.context_lens,
                step.tree_mask,
                cache.block_tokens,
                step.max_query,
                step.max_context,
                q.shape[-1] ** -0.5,
                step.work,
            )
            out = product(attended.view(attended.shape[0], -1), parts["o_proj"])
            gate_up, down = parts["gate_up_proj"], parts["down_proj"]
            normed, total = self._normed(kernels, out, total, parts["mlp_norm"], eps, gate_up)
            out = product(self._gated(kernels, product(normed, gate_up), down), down)
            # The sum is this layer's output: what a recorded layer leaves costs no kernel of its own.
            if layer + 1 < len(blocks):
                following = blocks[layer + 1]._modules
                normed, total = self._normed(kernels, out, total, following["input_norm"], eps, following["qkv_proj"])
            else:
                normed, total = kernels.add_rms_norm(out, total, model.norm.weight, eps)
            if layer in self._recorded:
                outputs[layer] = total
        assert isinstance(normed, Tensor)
        if not self._recorded:
            return normed, normed
        return torch.cat((*(outputs[layer] for layer in self._recorded), normed), dim=-1), normed

    def _product(self, x: Operand, projection: Any) -> Tensor:
        if not isinstance(x, Tensor):
            return ops.low_bit_product(x, projection.stored, projection.bias, self._model.embed_tokens.weight.dtype)
        if type(projection) is Projection:
            weights = projection._parameters
            weight, bias = weights["weight"], weights.get("bias")
            assert weight is not None
            if self._direct and not projection.invariant:
                return F.linear(x, weight, bias)  # what `ops.linear` finds out for itself every time
            return ops.linear(x, weight, bias, invariant=projection.invariant)
        if isinstance(projection, LowBitProjection):
            return ops.low_bit_linear(x, projection.stored, projection.bias)
        assert isinstance(projection, SummedProjection)
        summed: Tensor = projection(x)
        return summed

    def _eight_bits(self, projection: Any) -> torch.dtype | None:
        """Return what kernels before the projection round its tokens to; None: they do not."""
        low_bit = self._rounds and isinstance(projection, LowBitProjection)
        return ops.token_dtype(projection.form) if low_bit else None

    def _normed(
        self, kernels: Any, out: Tensor, residual: Tensor, norm: nn.Module | None, eps: float, projection: Any
    ) -> tuple[Operand, Tensor]:
        """Return the norm of the sum, as the projection takes it, and the sum."""
        rounded = self._eight_bits(projection)
        if rounded is None:
            normed, total = kernels.add_rms_norm(out, residual, _weight(norm), eps)
            return normed, total
        values, scales, total = kernels.add_norm_quantise(out, residual, _weight(norm), eps, rounded)
        return (values, scales), total

    def _gated(self, kernels: Any, gate_up: Tensor, projection: Any) -> Operand:
        """Return SwiGLU, as the projection takes it."""
        rounded = self._eight_bits(projection)
        gated: Operand = kernels.swiglu(gate_up) if rounded is None else kernels.swiglu_quantise(gate_up, rounded)
        return gated


def _weight(norm: nn.Module | None) -> Tensor | None:
    return None if norm is None else norm._parameters["weight"]
