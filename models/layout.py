"""Layout of Hugging Face tensors as rows of fused parameters: the one table behind loading, saving and hand-off."""

from dataclasses import dataclass

from config.formats import LowBitFormat, part_names
from models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Slice:
    """Hugging Face tensor `hf_name` = rows [start, stop) of our parameter; all rows if stop is None."""

    hf_name: str
    parameter: str
    start: int = 0
    stop: int | None = None


def hf_layout(config: ModelConfig, low_bit: LowBitFormat | None = None) -> list[Slice]:
    """Return every tensor of a checkpoint, in the order of the forward pass; slices of one parameter are adjacent.

    `low_bit`: the format of the blocks' matrices. Each then has scales, and zero points if the format has them
    (models.low_bit).
    """
    slices = [Slice("model.embed_tokens.weight", "embed_tokens.weight")]
    for layer in range(config.num_layers):
        slices += _block(config, f"model.layers.{layer}.", f"blocks.{layer}.", low_bit)
    slices.append(Slice("model.norm.weight", "norm.weight"))
    if not config.tied:
        slices.append(Slice("lm_head.weight", "lm_head.weight"))
    return slices


def _block(config: ModelConfig, theirs: str, ours: str, low_bit: LowBitFormat | None) -> list[Slice]:
    slices = [Slice(f"{theirs}input_layernorm.weight", f"{ours}input_norm.weight")]
    matrix = ("weight",) if low_bit is None else part_names("weight", low_bit)

    def fused(parameter: str, parts: dict[str, int], bias: bool) -> None:
        for kind in (*matrix, "bias") if bias else matrix:
            start = 0
            for hf_name, rows in parts.items():
                slices.append(Slice(f"{theirs}{hf_name}.{kind}", f"{ours}{parameter}.{kind}", start, start + rows))
                start += rows

    query, kv, hidden, mlp = config.query_size, config.kv_size, config.hidden_size, config.intermediate_size
    fused("qkv_proj", {"self_attn.q_proj": query, "self_attn.k_proj": kv, "self_attn.v_proj": kv}, config.qkv_bias)
    if config.qk_norm:
        slices.append(Slice(f"{theirs}self_attn.q_norm.weight", f"{ours}q_norm.weight"))
        slices.append(Slice(f"{theirs}self_attn.k_norm.weight", f"{ours}k_norm.weight"))
    fused("o_proj", {"self_attn.o_proj": hidden}, config.output_bias)
    slices.append(Slice(f"{theirs}post_attention_layernorm.weight", f"{ours}mlp_norm.weight"))
    fused("gate_up_proj", {"mlp.gate_proj": mlp, "mlp.up_proj": mlp}, config.mlp_bias)
    fused("down_proj", {"mlp.down_proj": hidden}, config.mlp_bias)
    return slices
