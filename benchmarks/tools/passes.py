"""Seconds of a bare forward with sampling, by rows: the pass cost of the bounds. Uses the engine's own kernels."""

from collections.abc import Sequence
from statistics import median
from time import perf_counter

import torch

from actors.engine.native.context import CachedContext, KVCache
from actors.engine.native.fused import FusedForward
from actors.engine.native.packed_weights import pack_weights
from benchmarks.tools.targets import Target
from models import ops

ROWS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 17, 24, 32, 48, 64, 96, 128, 192, 256)
CONTEXT = 80  # tokens of every request: the middle of a demo response
_BLOCK = 16


def pass_seconds(target: Target, rows: Sequence[int] = ROWS, budget_s: float = 0.05) -> dict[int, float]:
    """Median seconds of one forward with `n` rows of as many requests, for every n in `rows`; at least 3 repeats."""
    model = target.model
    pack_weights(model)
    forward = FusedForward(model) if FusedForward.supports(model) else model
    blocks = -(-CONTEXT // _BLOCK)
    cache = KVCache(model.config, max(rows) * blocks, _BLOCK, next(model.parameters()).dtype, "cpu")
    found = {}
    with torch.inference_mode():
        for count in rows:
            tables = torch.arange(count * blocks, dtype=torch.int32).view(count, blocks)
            positions = torch.full((count,), CONTEXT - 1)
            context = CachedContext(
                cache,
                positions,
                tables[:, -1].long() * _BLOCK + (CONTEXT - 1) % _BLOCK,
                tables,
                torch.arange(count + 1, dtype=torch.int32),
                torch.full((count,), CONTEXT, dtype=torch.int32),
                1,
                CONTEXT,
            )
            tokens = torch.arange(count) % model.config.vocab_size
            least, ones = torch.full((count,), -torch.inf), torch.ones(count)
            times: list[float] = []
            while len(times) < 4 or sum(times) < budget_s:
                start_s = perf_counter()
                logits = model.logits(forward(tokens, context))
                ops.sample(logits, least, ones, tokens, positions)
                times.append(perf_counter() - start_s)
            found[count] = median(times[1:])
    return found
