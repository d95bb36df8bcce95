"""What CUDA graphs take: the memory that the device has less after all target graphs of a plan were captured, for the
bucketed plan (one pool, one output buffer) and for the naive one (a graph per strategy and batch size, each with logits
and hidden states of its own), beside what `policies.roofline.graphs` predicts."""

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from actors.engine.native.forward.context import KVCache
from actors.engine.native.forward.device_steps import DeviceSteps
from actors.engine.native.forward.graphs import CudaGraphCapture
from actors.engine.native.forward.layout import RESERVED_BLOCKS
from config.strategy import PLAIN, Strategy
from models.config import ModelConfig
from models.transformer import Transformer
from policies.roofline.graphs import predict
from policies.speculation.chooser import AdaptivePolicy
from policies.speculation.graph_plan import CapturePlan, batch_buckets, bucketed_plan, naive_plan

# Four strategies, as in Table 5 of TLT.
STRATEGIES = tuple(Strategy.parse(text) for text in ("suffix:4", "suffix:8", "suffix:6x2/12", "suffix:8x2/16"))
BLOCK_TOKENS, PROMPT_TOKENS, NEW_TOKENS, MAX_RUNNING = 16, 64, 96, 32


def random_model(config: ModelConfig, device: str, dtype: torch.dtype) -> Transformer:
    """N(0, 0.02) matrices, made where they stay."""
    model = Transformer(config, dtype=dtype, device=device, batch_invariant=False)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return model


def memory(model: Transformer, max_tokens: int) -> list[dict[str, Any]]:
    """Device memory of all target graphs of an engine with contexts up to max_tokens: bucketed, and naive with one
    pool or many."""
    policy = AdaptivePolicy(STRATEGIES, max_running=MAX_RUNNING, exploration=0.01)
    bucketed = CapturePlan(bucketed_plan(policy.arms_at, batch_buckets(MAX_RUNNING)).of("target"))
    naive = CapturePlan(naive_plan((PLAIN, *STRATEGIES), range(1, MAX_RUNNING + 1)).of("target"))
    each = [CapturePlan((graph,)) for graph in naive.graphs]
    shape = replace(model.config, item_bytes=next(model.parameters()).element_size())
    rows = []
    for name, plans, one_pool in (
        ("bucketed", [bucketed], True),
        ("naive", each, True),
        ("naive, own pools", each, False),
    ):
        drawing = name == "bucketed"
        found = _captured_bytes(model, plans, max_tokens, one_pool=one_pool, drawing=drawing)
        whole = bucketed if drawing else naive
        predicted = predict(whole, shape, drawing=drawing, shared_pool=one_pool)
        row = {"plan": name, "graphs": len(whole.graphs), "bytes": found, "predicted_bytes": predicted.total_bytes}
        rows.append(row)
        print(row, flush=True)
    return rows


def _captured_bytes(
    model: Transformer, plans: Sequence[CapturePlan], max_tokens: int, *, one_pool: bool, drawing: bool
) -> int:
    """Each plan with buffers of its own; not `drawing`: with logits kept, too."""
    weight = next(model.parameters())
    blocks = MAX_RUNNING * 2
    cache = KVCache(model.config, blocks + RESERVED_BLOCKS, BLOCK_TOKENS, weight.dtype, weight.device)
    shared = CudaGraphCapture() if one_pool else None
    kept = []
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    for plan in plans:
        steps = DeviceSteps(
            model,
            cache,
            slots=MAX_RUNNING,
            blocks=max_tokens // BLOCK_TOKENS,
            recorded=(),
            keep_rows=True,
            rejection=not drawing,
            trash_slot=blocks * BLOCK_TOKENS,
            graph_capture=shared or CudaGraphCapture(),
        )
        kept.append(steps)
        largest = max(plan.graphs, key=lambda graph: graph.total_rows)
        steps.resize(largest.total_rows, max(graph.most_rows for graph in plan.graphs))
        steps.plan_graphs(plan)
        if steps.captured != len(plan.graphs):
            raise SystemExit(f"{len(plan.graphs) - steps.captured} graphs were not captured: see the log above")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return before - torch.cuda.mem_get_info()[0]
