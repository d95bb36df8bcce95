"""A low-bit copy of a model, with which it drafts for itself (EfficientRollout, section 4.1).

Copies the matrices of the layers, and a head that is large compared with them. Everything else shares the model's
memory. The caller decides when the model has changed.
"""

from config.formats import FORMATS, LowBitFormat
from models import ops
from models.config import require_low_bit
from models.transformer import Block, LowBitProjection, Transformer

# Every drafted token reads the head. Above this share of the layers' bytes it is stored in eight bits.
LARGEST_HEAD = 0.5


def low_bit_copy(model: Transformer, form: LowBitFormat) -> Transformer:
    """Return `model` with uninitialised memory for the layers' matrices in `form`; `round_again` fills it.

    Embedding, norms and biases are the model's own parameters. So is the head, unless `head_format` returns a format.
    Raises ModelConfigError if the groups of the format do not divide the matrices.
    """
    require_low_bit(model.config, form)
    weight = model.embed_tokens.weight
    copy = Transformer(model.config, dtype=weight.dtype, device="meta", batch_invariant=model.batch_invariant)
    copy.embed_tokens, copy.norm, copy.rope = model.embed_tokens, model.norm, model.rope
    for own, block in _blocks(copy, model):
        own.input_norm, own.mlp_norm, own.q_norm, own.k_norm = (
            block.input_norm,
            block.mlp_norm,
            block.q_norm,
            block.k_norm,
        )
        for name in Block.PROJECTIONS:
            getattr(own, name).bias = getattr(block, name).bias
        own.store_in(form)
    copy.low_bit = form
    head, (vocab, hidden) = head_format(model, form), model.head_weight.shape
    copy.lm_head = model.lm_head
    if head is not None:
        copy.lm_head = LowBitProjection(hidden, vocab, None, form=head, device=weight.device)
    return copy


def round_again(copy: Transformer, model: Transformer) -> None:
    """Fill a `low_bit_copy` of the model from the model's present weights, in place."""
    for own, block in _blocks(copy, model):
        for name in Block.PROJECTIONS:
            ops.requantise(getattr(block, name).weight, getattr(own, name).stored)
    if isinstance(copy.lm_head, LowBitProjection):
        ops.requantise(model.head_weight, copy.lm_head.stored)


def head_format(model: Transformer, form: LowBitFormat) -> LowBitFormat | None:
    """Return the storage format of the copy's head, None for the model's own, by the bytes that a drafted token
    reads."""
    weight = model.head_weight
    layers = sum(
        projection.inputs * projection.outputs * form.container_bits // 8
        for _, block in _blocks(model, model)
        for projection in (getattr(block, name) for name in Block.PROJECTIONS)
    )
    large = weight.numel() * weight.element_size() > LARGEST_HEAD * layers
    return FORMATS["w8a8"] if large and form.activations == "int8" else None


def copy_bytes(copy: Transformer) -> int:
    """Return the memory of a `low_bit_copy` beside its model, in bytes; the kernels use either values or panels."""
    projections = [getattr(own, name) for own, _ in _blocks(copy, copy) for name in Block.PROJECTIONS]
    if isinstance(copy.lm_head, LowBitProjection):
        projections.append(copy.lm_head)
    return sum(part.nbytes for projection in projections for part in projection.stored.parts)


def _blocks(copy: Transformer, model: Transformer) -> list[tuple[Block, Block]]:
    pairs = [(own, block) for own, block in zip(copy.blocks, model.blocks, strict=True)]
    assert all(isinstance(block, Block) for pair in pairs for block in pair)
    return pairs  # type: ignore[return-value]
