"""A Transformer's weights as one `ops.DecoderStack`, for the supported models.

Stack and modules compute the same numbers with the same kernels; the stack saves a step a dozen Python calls per layer.
"""

from typing import Any

from torch import Tensor

from actors.engine.native.forward.context import CachedContext
from models import ops
from models.transformer import Block, LowBitProjection, Transformer


def stack_weights(model: Transformer) -> tuple[list[ops.StackLayer], Tensor, Tensor, Tensor, Tensor]:
    """Return layers, embedding, final norm, and cosines and sines of every position."""
    angles = model.rope.table(model.embed_tokens.weight.device)
    blocks = [block for block in model.blocks if isinstance(block, Block)]
    layers = [block.stack_layer(block.input_norm.weight) for block in blocks]
    return layers, model.embed_tokens.weight, model.norm.weight, angles.cos, angles.sin


def draft_chain(copy: Transformer) -> ops.DraftChain | None:
    """Return native chains of drafts by this copy of a target (`models.low_bit_copy`); None if unsupported."""
    if not FusedForward.supports(copy) or not ops.DraftChain.supports(copy.embed_tokens.weight, copy.config.head_dim):
        return None
    head = copy.lm_head.stored if isinstance(copy.lm_head, LowBitProjection) else copy.head_weight
    return ops.DraftChain(*stack_weights(copy), head, **_shape(copy))


class FusedForward:
    """`model(tokens, context)` as one native call, for inference on CPU. Construct it after `pack_weights`."""

    def __init__(self, model: Transformer) -> None:
        self.stack = ops.DecoderStack(*stack_weights(model), **_shape(model))

    @staticmethod
    def supports(model: Transformer) -> bool:
        """Return whether the model is ours, on CPU and of a dtype, or low-bit format, with kernels."""
        weight = model.embed_tokens.weight
        if model.low_bit is not None and model.low_bit.activations != "int8":
            return False
        return type(model) is Transformer and ops.DecoderStack.supports(weight, model.config.head_dim)

    def weights_changed(self) -> None:
        self.stack.refresh()

    def __call__(self, tokens: Tensor, context: CachedContext) -> Tensor:
        """Map tokens int64 [T] to hidden states after the final norm [T, H]; the rows' K/V are written to the cache."""
        cache = context.cache
        return self.stack(
            tokens,
            context.positions,
            context.kv_slots,
            cache.all_keys,
            cache.all_values,
            context.block_tables,
            context.query_offsets,
            context.context_lens,
            cache.block_tokens,
            tree_mask=context.tree_mask,
        )


def _shape(model: Transformer) -> dict[str, Any]:
    config = model.config
    return {"query_heads": config.num_heads, "kv_heads": config.num_kv_heads, "eps": config.rms_norm_eps}
