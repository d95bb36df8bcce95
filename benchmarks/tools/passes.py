"""Seconds of a bare forward with sampling, by requests and rows: the bounds' pass cost. Uses the engine's kernels."""

from collections.abc import Sequence
from statistics import median
from time import perf_counter

import torch

from actors.engine.native.forward.context import CachedContext, KVCache
from actors.engine.native.forward.fused import FusedForward
from actors.engine.native.forward.packed_weights import pack_weights
from benchmarks.tools.targets import Target
from models import ops

ROWS = (1, 2, 3, 4, 5, 7, 9, 11, 13, 17)  # of every request
MOST_ROWS = 256  # of all; beyond, costs are extrapolated
CONTEXT = 96  # tokens of every request, drafts included: the middle of a demo response
_BLOCK = 16


def pass_seconds(target: Target, requests: int, repeats: int = 5) -> dict[int, float]:
    """Median seconds of one forward by total rows: `requests` requests with as many rows each as ROWS says."""
    model = target.model
    pack_weights(model)
    forward = FusedForward(model) if FusedForward.supports(model) else model
    blocks = -(-CONTEXT // _BLOCK)
    cache = KVCache(model.config, requests * blocks, _BLOCK, next(model.parameters()).dtype, "cpu")
    found = {}
    with torch.inference_mode():
        for each in _fitting(requests):
            count = requests * each
            tables = torch.arange(requests * blocks, dtype=torch.int32).view(requests, blocks)
            positions = torch.arange(CONTEXT - each, CONTEXT).repeat(requests)
            owner = torch.arange(requests).repeat_interleave(each)
            context = CachedContext(
                cache=cache,
                positions=positions,
                kv_slots=tables[owner, positions // _BLOCK].long() * _BLOCK + positions % _BLOCK,
                block_tables=tables,
                query_offsets=torch.arange(0, count + 1, each, dtype=torch.int32),
                context_lens=torch.full((requests,), CONTEXT, dtype=torch.int32),
                max_query=each,
                max_context=CONTEXT,
            )
            tokens = torch.arange(count) % model.config.vocab_size
            least, ones = torch.full((count,), -torch.inf), torch.ones(count)
            times = []
            for _ in range(repeats + 1):
                start_s = perf_counter()
                logits = model.logits(forward(tokens, context))
                ops.sample(logits, least, ones, tokens, positions)
                times.append(perf_counter() - start_s)
            found[count] = median(times[1:])
    return found


def _fitting(requests: int) -> Sequence[int]:
    """At least two, so that there is a slope."""
    return [each for each in ROWS if each <= 2 or requests * each <= MOST_ROWS]
