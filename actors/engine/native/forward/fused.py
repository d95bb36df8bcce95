"""A Transformer's weights as one `ops.DecoderStack`. Owns which models go through it.

Both it and the modules compute the same numbers with the same kernels; the stack spares a step a dozen calls from
Python per layer.
"""

from torch import Tensor

from actors.engine.native.forward.context import CachedContext
from models import ops
from models.transformer import Block, Transformer


class FusedForward:
    """`model(tokens, context)` as one native call, for inference on CPU. Build it after `pack_weights`."""

    def __init__(self, model: Transformer) -> None:
        config = model.config
        angles = model.rope.table(model.embed_tokens.weight.device)
        blocks = [block for block in model.blocks if isinstance(block, Block)]
        self.stack = ops.DecoderStack(
            [block.stack_layer(block.input_norm.weight) for block in blocks],
            model.embed_tokens.weight,
            model.norm.weight,
            angles.cos,
            angles.sin,
            query_heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            eps=config.rms_norm_eps,
        )

    @staticmethod
    def supports(model: Transformer) -> bool:
        """Whether the model is ours, on CPU and of a dtype, or format of few bits, with kernels."""
        weight = model.embed_tokens.weight
        if model.low_bit is not None and "cpu" not in model.low_bit.devices:
            return False
        return type(model) is Transformer and ops.DecoderStack.supports(weight, model.config.head_dim)

    def weights_changed(self) -> None:
        self.stack.refresh()

    def __call__(self, tokens: Tensor, context: CachedContext) -> Tensor:
        """tokens int64 [T] -> hidden states after the final norm [T, H]; the rows' K/V enter the cache."""
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
