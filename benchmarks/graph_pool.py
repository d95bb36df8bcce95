"""CUDA graphs of the native engine: `python -m benchmarks.graph_pool [--sizes 0.5b 1.5b 7b]`. Needs a CUDA device.

Owns `results/graph_pool.json`. Speed: median time of decoding and verifying steps with graphs on and off, interleaved
in one run, over models of Qwen2.5's shapes with random weights (what a step costs does not depend on them). Drafts are
wrong on purpose: steps are compared, not rollouts. Memory: what the device has less after all target
graphs of a plan were captured, for the bucketed plan (one pool, one output buffer) and for the naive one (a graph per
strategy and batch size, each with logits and hidden states of its own), beside what
`policies.roofline.graphs` predicts.
"""

import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch

from actors.engine.batch.telemetry import EngineStepRecord
from actors.engine.native.engine import NativeEngine
from actors.engine.native.forward.context import KVCache
from actors.engine.native.forward.device_steps import DeviceSteps
from actors.engine.native.forward.graphs import CudaGraphCapture
from actors.engine.native.forward.layout import RESERVED_BLOCKS
from benchmarks.harness import RESULTS, command, write
from benchmarks.tools.contenders import WrongDrafter
from benchmarks.tools.qwen import QWEN, qwen
from benchmarks.tools.targets import requests_of
from config.rollout import EngineOptions
from config.strategy import PLAIN, Strategy
from drafter.protocol import GraphCapture
from models.config import ModelConfig
from models.transformer import Transformer
from policies.roofline.graphs import predict
from policies.speculation.chooser import AdaptivePolicy
from policies.speculation.graph_plan import CapturePlan, batch_buckets, bucketed_plan, naive_plan
from policies.speculation.policy import FixedPolicy

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


def steps_of(
    model: Transformer, strategy: Strategy, running: int, graph_capture: GraphCapture | None
) -> list[EngineStepRecord]:
    """The decoding steps of one wave of `running` requests, after one for warming up (and capturing)."""
    options = EngineOptions(
        max_running=running,
        kv_tokens=running * 2 * (PROMPT_TOKENS + NEW_TOKENS),
        block_tokens=BLOCK_TOKENS,
        max_model_tokens=PROMPT_TOKENS + NEW_TOKENS,
        cuda_graphs=False,  # `graph_capture` says
    )
    records: list[EngineStepRecord] = []
    drafters = {} if strategy == PLAIN else {strategy.drafter: WrongDrafter(strategy.drafter, 1)}
    policy = None if strategy == PLAIN else FixedPolicy(strategy)
    engine = NativeEngine(
        model, options, drafters=drafters, policy=policy, graph_capture=graph_capture, on_step=records.append
    )
    rng = np.random.default_rng(0)
    for wave in range(2):
        records.clear()
        prompts = rng.integers(0, model.config.vocab_size, (running, PROMPT_TOKENS)).astype(np.int32)
        engine.generate(requests_of(prompts, [NEW_TOKENS] * running, first=wave * running))
    return [record for record in records if not record.prefill_tokens and record.running == running]


def speed(model: Transformer, batches: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Off and on interleaved; the best round of each counts, as everything else only adds time."""
    rows = []
    for strategy in (PLAIN, Strategy("suffix", 4), Strategy("suffix", 8)):
        for running in batches:
            times: dict[str, list[float]] = {"off": [], "on": []}
            for _ in range(rounds):
                for name in times:
                    steps = steps_of(model, strategy, running, CudaGraphCapture() if name == "on" else None)
                    times[name].append(median(step.elapsed_s - step.draft_s for step in steps))
            off_s, on_s = min(times["off"]), min(times["on"])
            row = {"strategy": str(strategy), "running": running, "off_ms": round(off_s * 1e3, 3)}
            rows.append(row | {"on_ms": round(on_s * 1e3, 3), "speedup": round(off_s / on_s, 2)})
            print(rows[-1], flush=True)
    return rows


def memory(model: Transformer, max_tokens: int) -> list[dict[str, Any]]:
    """Device memory of all target graphs of an engine with contexts up to max_tokens: bucketed, and naive with one
    pool or many."""
    policy = AdaptivePolicy(STRATEGIES, max_running=MAX_RUNNING, exploration=0.01)
    bucketed = CapturePlan(bucketed_plan(policy.arms_at, batch_buckets(MAX_RUNNING)).of("target"))
    naive = CapturePlan(naive_plan((PLAIN, *STRATEGIES), range(1, MAX_RUNNING + 1)).of("target"))
    each = [CapturePlan((graph,)) for graph in naive.graphs]
    shape = model.config.network(item_bytes=next(model.parameters()).element_size())
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


def main(
    *,
    sizes: Annotated[Sequence[str], "of the model", tuple(QWEN)] = tuple(QWEN),
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32),
    rounds: int = 2,
    context: Annotated[int, "longest, tokens, for the memory part"] = 512,
    out: Path = RESULTS / "graph_pool.json",
) -> None:
    if not torch.cuda.is_available():
        sys.exit("benchmarks.graph_pool measures CUDA graphs, and this machine has no CUDA device")
    models: dict[str, Any] = {}
    for size in sizes:
        config = qwen(size, max_position_embeddings=4096)
        model = random_model(config, "cuda", torch.bfloat16)
        models[size] = {"speed": speed(model, batches, rounds), "memory": memory(model, context)}
        settings = {"memory_context_tokens": context, "rounds": rounds, "seed": 0}
        write(out, "what do CUDA graphs save, and what memory do they take?", {"models": models}, settings=settings)
        del model
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    command(main, timed=False)
