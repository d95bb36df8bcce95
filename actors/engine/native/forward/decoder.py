"""A Transformer's forward on CUDA as ten kernels per layer (`models.ops.triton`), eager or captured. Owns their order.

It carries the residual stream beside a layer's output, so that one kernel adds and normalises, and computes what
`models.transformer` does, to rounding: norm, qkv, norm and RoPE with cache write, attention (split, merge), o, add and
norm, gate and up, SwiGLU, down. Rows are packed, a request may bring any number of them, nothing waits for the host.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.engine.native.forward.context import KVCache
from actors.engine.native.forward.layout import DeviceStep
from models import ops
from models.ops.triton import operators
from models.tensor_parallel import RankTransformer, SummedProjection
from models.transformer import Block, LowBitProjection, Projection, Transformer


class DecoderForward:
    """`model(tokens, context)` by kernels, for inference. Weights are read where they are."""

    def __init__(self, model: Transformer, recorded: tuple[int, ...] = ()) -> None:
        """recorded: layers whose outputs stand before the final state in every row."""
        self._model, self._recorded = model, recorded
        self._blocks = [block for block in model.blocks if isinstance(block, Block)]
        model.rope.table(model.embed_tokens.weight.device)  # made once, outside of any capture

    @staticmethod
    def supports(model: Transformer) -> bool:
        """Whether the model is ours, unchanged or one rank's part of it, of a dtype with kernels."""
        return type(model) in (Transformer, RankTransformer) and model.embed_tokens.weight.dtype in (
            torch.float32,
            torch.bfloat16,
        )

    def __call__(self, step: DeviceStep, cache: KVCache) -> tuple[Tensor, Tensor]:
        """(rows [T, W] with recorded layers, final states [T, H]); the rows' K/V enter the cache."""
        model, blocks = self._model, self._blocks
        angles = model.rope.table(step.tokens.device)
        eps = model.config.rms_norm_eps
        total = F.embedding(step.tokens, model.embed_tokens.weight)
        normed = operators.rms_norm(total, blocks[0].input_norm.weight, eps)
        outputs: dict[int, Tensor] = {}
        for layer, block in enumerate(blocks):
            keys, values = cache.keys[layer], cache.values[layer]
            q = operators.rope_write(
                _product(normed, block.qkv_proj),
                angles.cos,
                angles.sin,
                step.positions,
                step.kv_slots,
                None if block.q_norm is None else block.q_norm.weight,
                None if block.k_norm is None else block.k_norm.weight,
                eps,
                keys,
                values,
            )
            attended = operators.paged_attention(
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
            )
            out = _product(attended.view(attended.shape[0], -1), block.o_proj)
            normed, total = operators.add_rms_norm(out, total, block.mlp_norm.weight, eps)
            out = _product(operators.swiglu(_product(normed, block.gate_up_proj)), block.down_proj)
            following = model.norm if layer + 1 == len(blocks) else blocks[layer + 1].input_norm
            # The sum is this layer's output: what a recorded layer leaves costs no kernel of its own.
            normed, total = operators.add_rms_norm(out, total, following.weight, eps)
            if layer in self._recorded:
                outputs[layer] = total
        if not self._recorded:
            return normed, normed
        return torch.cat((*(outputs[layer] for layer in self._recorded), normed), dim=-1), normed


def _product(x: Tensor, projection: Projection | LowBitProjection) -> Tensor:
    if isinstance(projection, SummedProjection):
        summed: Tensor = projection(x)
        return summed
    if isinstance(projection, LowBitProjection):
        return ops.low_bit_linear(x, projection.stored, projection.bias)
    return ops.linear(x, projection.weight, projection.bias, invariant=projection.invariant)
