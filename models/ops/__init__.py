"""The transformer's operations, each in plain torch (`reference`), most as a native CPU kernel and a Triton one too.

In a batch-invariant operation, a row's result never depends on other rows. Callers see one function per operation,
which selects a kernel or torch per call, by device, dtype and gradients.
"""

from models.ops.adapted import LowRank, adapted_linear, merge, merge_rows
from models.ops.attention import packed_attention, paged_attention
from models.ops.chain import DraftChain
from models.ops.eagle import EaglePasses
from models.ops.low_bit import (
    low_bit_linear,
    low_bit_product,
    mirrored_linear,
    prepack_low_bit,
    requantise,
    token_dtype,
)
from models.ops.matmul import head, linear, prepack
from models.ops.native import product_dtype
from models.ops.sampling import cutoff, log_softmax, sample, sample_topk, softmax_terms
from models.ops.segments import Segments
from models.ops.stack import DecoderStack, StackLayer
from models.ops.tokenwise import add_rms_norm, apply_rope, rms_norm, rope_write, split_qkv, swiglu, write_kv

__all__ = [
    "DecoderStack",
    "DraftChain",
    "EaglePasses",
    "LowRank",
    "Segments",
    "StackLayer",
    "adapted_linear",
    "add_rms_norm",
    "apply_rope",
    "cutoff",
    "head",
    "linear",
    "log_softmax",
    "low_bit_linear",
    "low_bit_product",
    "merge",
    "merge_rows",
    "mirrored_linear",
    "packed_attention",
    "paged_attention",
    "prepack",
    "prepack_low_bit",
    "product_dtype",
    "requantise",
    "rms_norm",
    "rope_write",
    "sample",
    "sample_topk",
    "softmax_terms",
    "split_qkv",
    "swiglu",
    "token_dtype",
    "write_kv",
]
