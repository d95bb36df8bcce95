"""The kernels of one engine step on CUDA, from the engine's own code on meta tensors.

Owns the translation to the predictor's kernels. What lies in the KV cache has no values here, so attention's bytes and
its blocks are those of the shape that is asked about; all else is what the dispatcher saw.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actors.engine.batch.slots import SlotTable
from actors.engine.native.forward.context import KVCache
from actors.engine.native.forward.device_chains import DeviceChains
from actors.engine.native.forward.device_steps import DeviceSteps
from actors.engine.native.forward.layout import RESERVED_BLOCKS
from benchmarks.gpu_parts.session import BLOCK_TOKENS
from benchmarks.tools.qwen import network
from config.formats import FORMATS
from config.network import Network
from config.strategy import Strategy
from drafter.protocol import Replay
from models.config import ModelConfig
from models.low_bit_copy import low_bit_copy
from models.ops.triton.operators import LAUNCHES
from models.transformer import Transformer
from policies.roofline.kernels import SPLIT_TOKENS, Kernel, Part, attention, projection
from policies.speculation.graph_plan import CapturePlan, GraphShape
from tests.policies.op_trace import OpTrace, TracedOp, tensor_bytes

_EARLY = LAUNCHES.keys() - {"head", "sample", "sample_topk", "cutoff", "draft_inputs", "tree_feed", "tree_best"}
_PARTS: dict[str, Part] = {"head": "weights", "linear": "weights", "sample": "sampling", "paged_attention": "kv"}


class _Traced:
    """A graph capture that runs nothing: what would be captured is traced."""

    def __init__(self, trace: OpTrace) -> None:
        self._trace = trace

    def record(self, compute: Callable[[], None]) -> Replay:
        with self._trace:
            compute()
        return lambda: None

    def reset(self) -> None:
        pass


def traced_step(config: ModelConfig, batch: int, rows: int, context: int, quantization: str = "none") -> list[Kernel]:
    """What the graph of `batch` requests with `rows` rows each launches; chains where rows > 1."""
    net, form = network(config, quantization=quantization), FORMATS.get(quantization)
    own: dict[str, Callable[..., TracedOp]] = {
        "paceline::paged_attention": partial(_attention, net, batch, rows, context),
        "paceline::rope_write": _rope,
    }
    trace = OpTrace({f"paceline::{name}": count for name, count in LAUNCHES.items()}, own)
    model = Transformer(config, dtype=torch.bfloat16, device="meta", batch_invariant=False, low_bit=form)
    model.requires_grad_(False)
    blocks = 64
    cache = KVCache(config, blocks + RESERVED_BLOCKS, BLOCK_TOKENS, torch.bfloat16, "meta")
    steps = DeviceSteps(
        model,
        cache,
        slots=batch,
        blocks=-(-context // BLOCK_TOKENS),
        recorded=(),
        keep_rows=False,
        rejection=False,
        trash_slot=blocks * BLOCK_TOKENS,
        graph_capture=_Traced(trace),
    )
    steps.resize(batch * rows, rows)
    steps.plan_graphs(CapturePlan((GraphShape(kind="target", batch=batch, rows=rows),)))
    return [_kernel(op, net, batch, rows, context) for op in trace.ops]


def traced_chain(config: ModelConfig, batch: int, depth: int, context: int, quantization: str) -> list[Kernel]:
    """What a draft of `depth` tokens by a copy of the target in few bits launches, for `batch` requests of so much
    context before the first draw."""
    net, form = network(config, quantization=quantization), FORMATS[quantization]
    own: dict[str, Callable[..., TracedOp]] = {
        "paceline::paged_attention": partial(_attention, net, batch, 1, context),
        "paceline::rope_write": _rope,
    }
    trace = OpTrace({f"paceline::{name}": count for name, count in LAUNCHES.items()}, own)
    target = Transformer(config, dtype=torch.bfloat16, device="meta", batch_invariant=False).requires_grad_(False)
    copy = low_bit_copy(target, form)
    blocks = 64
    cache = KVCache(config, blocks + RESERVED_BLOCKS, BLOCK_TOKENS, torch.bfloat16, "meta")
    table = SlotTable(batch, context + depth, -(-context // BLOCK_TOKENS))
    chains = DeviceChains(table, cache, torch.device("meta"), trash_slot=blocks * BLOCK_TOKENS, keep_logits=False)
    chains.plan_graphs(copy, [(batch, Strategy("self", depth))], _Traced(trace))
    return [_kernel(op, net, batch, 1, context) for op in trace.ops]


def _attention(net: Network, batch: int, rows: int, context: int, *given: Any) -> TracedOp:
    """Bytes by the shape that is asked about; launches are the kernel's own plan for it."""
    from models.ops.triton.launch import plan_paged_attention  # needs Triton

    asked = attention(net, batch, rows, context, SPLIT_TOKENS)
    work = given[11] if len(given) > 11 else None  # which an operator's call leaves out where it is None
    launched = len(plan_paged_attention(*[*given[:11], work, torch.empty_like(given[0])]))
    return TracedOp("paceline::paged_attention", asked.read_bytes, asked.write_bytes, asked.flops, launched)


def _rope(qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, *_: Any) -> TracedOp:
    """Rows of the tables and of the caches, not all of them."""
    tables = 2 * len(positions) * cos.shape[1] * cos.element_size()
    read = tensor_bytes(qkv) + tables + tensor_bytes(positions) + tensor_bytes(slots)
    return TracedOp("paceline::rope_write", read, tensor_bytes(qkv), 0.0, LAUNCHES["rope_write"])


def _kernel(op: TracedOp, net: Network, batch: int, rows: int, context: int) -> Kernel:
    name = op.name.partition("::")[2] or op.name
    part: Part = "weights" if op.product is not None else _PARTS.get(name, "rest")
    low = name == "low_bit_linear" and op.product is not None
    m, n, k = op.product if op.product is not None and low else (0, 0, 0)
    listed = list(projection(net, name, m, n, k))[-1] if low else None  # its rate; bytes are the trace's
    return Kernel(
        name=name,
        part=part,
        read_bytes=op.read_bytes,
        write_bytes=op.write_bytes,
        flops=op.flops,
        launches=op.launches,
        product=op.product,
        speed=1.0 if listed is None else listed.speed,
        unpacked=0 if listed is None else listed.unpacked,
        walk=attention(net, batch, rows, context, SPLIT_TOKENS).walk if part == "kv" else None,
        stream=None if listed is None else listed.stream,
        early=name in _EARLY,
    )
