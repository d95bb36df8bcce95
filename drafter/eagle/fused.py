"""An EAGLE network's passes as native calls. Owns which networks use them; computes what `model.py` computes."""

from drafter.eagle.model import Drafting, EagleModel
from models import ops
from models.transformer import Transformer


def fused_passes(model: Drafting, target: Transformer) -> ops.EaglePasses | None:
    """Return the passes; None without a kernel: EAGLE-3, a GPU, or no native extension. The model's products must be
    packed."""
    config, embedding = target.config, target.embed_tokens.weight
    if not isinstance(model, EagleModel) or not ops.EaglePasses.supports(embedding, config.head_dim):
        return None
    block, angles = model.block, target.rope.table(embedding.device)
    layer = block.stack_layer(block.mlp_norm.weight)  # the block has no input norm, and the passes read none
    head = embedding if target.lm_head is None else target.lm_head.weight
    return ops.EaglePasses(
        layer,
        model.fuse.weight,
        embedding,
        head,
        angles.cos,
        angles.sin,
        query_heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        eps=config.rms_norm_eps,
    )
