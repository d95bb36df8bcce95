"""Pack weights for the CPU's matrix kernels, at the start and after every update."""

from models import ops
from models.tensor_parallel import RankTransformer
from models.transformer import LowBitProjection, Projection, Transformer


def pack_weights(model: Transformer) -> None:
    """Pack the model's weights. Call it before the first forward and after every change of parameters. No effect on
    other devices."""
    for module in model.modules():
        if isinstance(module, Projection):
            ops.prepack(module.weight)
        elif isinstance(module, LowBitProjection):
            ops.prepack_low_bit(module.stored)
    if isinstance(model, RankTransformer):
        ops.prepack(model.head_part)
    elif model.lm_head is None:
        ops.prepack(model.embed_tokens.weight)
