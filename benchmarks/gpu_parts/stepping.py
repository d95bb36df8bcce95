"""Engine steps with contexts of any length, without computing a prompt: the KV cache is zeros.

Owns the arrays of such steps. The engine's own device side (`DeviceSteps`) computes them: upload, forward, head, draws,
download, by a graph or eagerly, like the engine. The scheduler and the loop around it are not included.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from actors.engine.batch.step.types import StepRows
from actors.engine.native.forward.context import KVCache
from actors.engine.native.forward.device_steps import DeviceSteps
from actors.engine.native.forward.graphs import CudaGraphCapture
from actors.engine.native.forward.layout import RESERVED_BLOCKS
from benchmarks.gpu_parts.session import BLOCK_TOKENS
from benchmarks.tools.qwen import network
from drafter.protocol import GraphCapture
from models.transformer import Transformer
from policies.speculation.graph_plan import CapturePlan, GraphShape


def cache_bytes(model: Transformer, tokens: int) -> int:
    return tokens * network(model.config, model.embed_tokens.weight.element_size()).kv_token_bytes


@dataclass(frozen=True, slots=True)
class Request:
    """Rows of one request, of which the last `draws` draw (all of them when decoding and verifying)."""

    rows: int
    context: int  # tokens, its rows included
    draws: int


class Stepper:
    """Runs steps of up to `requests` requests with at most `context` tokens and `rows` rows in total."""

    def __init__(
        self, model: Transformer, requests: int, context: int, rows: int, *, graphs: bool | GraphCapture
    ) -> None:
        """graphs: captured by CUDA on a GPU, or by what is given anywhere."""
        weight = model.embed_tokens.weight
        self._model, self._device = model, weight.device
        self._blocks = -(-context // BLOCK_TOKENS)  # of one request
        blocks = requests * self._blocks
        self._cache = KVCache(model.config, blocks + RESERVED_BLOCKS, BLOCK_TOKENS, weight.dtype, weight.device)
        capture: GraphCapture | None = None if isinstance(graphs, bool) else graphs
        if graphs is True and weight.device.type == "cuda":
            capture = CudaGraphCapture()
        self.steps = DeviceSteps(
            model,
            self._cache,
            slots=requests,
            blocks=self._blocks,
            recorded=(),
            keep_rows=False,
            rejection=False,
            trash_slot=blocks * BLOCK_TOKENS,
            graph_capture=capture,
        )
        self.steps.resize(rows, min(rows, 32))  # masks: none here is wider

    def capture(self, *shapes: GraphShape) -> int:
        """Capture graphs of these shapes. Returns their number."""
        self.steps.plan_graphs(CapturePlan(shapes))
        return self.steps.captured

    def uniform(self, batch: int, rows: int, context: int) -> StepRows:
        """Return a step of decoding, or of verifying chains."""
        return self.packed([Request(rows, context, rows)] * batch)

    def packed(self, requests: list[Request]) -> StepRows:
        """Return the arrays of a step, as the engine makes them."""
        counts = np.array([request.rows for request in requests])
        ends = np.array([request.context for request in requests])
        owner = np.arange(len(requests)).repeat(counts)
        starts = counts.cumsum() - counts
        positions = (ends - counts)[owner] + np.arange(counts.sum()) - starts[owner]
        draws = np.array([request.draws for request in requests])
        sampled = int(draws.sum())
        used = -(-int(ends.max()) // BLOCK_TOKENS)
        tables = np.arange(len(requests))[:, None] * self._blocks + np.arange(used)
        arrays: dict[str, Any] = {
            "tokens": np.ones(len(owner), np.int64),
            "positions": positions.astype(np.int64),
            "kv_slots": (owner * self._blocks * BLOCK_TOKENS + positions).astype(np.int64),
            "query_offsets": np.append(0, counts.cumsum()).astype(np.int32),
            "context_lens": ends.astype(np.int32),
            "block_tables": tables.astype(np.int32),
            "noise_keys": np.arange(sampled, dtype=np.int64),
            "noise_positions": np.zeros(sampled, np.int64),
            "temperature": np.ones(sampled, np.float32),
        }
        if sampled < len(owner):
            place = np.arange(len(owner)) - starts[owner]
            arrays["sample_rows"] = np.flatnonzero(place >= (counts - draws)[owner]).astype(np.int64)
        return StepRows(arrays, int(counts.max()), int(ends.max()), sampled, False)

    def run(self, rows: StepRows) -> None:
        """Run one step. Returns when its tokens are on the host."""
        with torch.inference_mode():
            self.steps.run(rows, None)


def fits(model: Transformer, tokens: int) -> bool:
    """Whether a cache of `tokens` tokens fits next to the model, with room for activations."""
    if model.embed_tokens.weight.device.type != "cuda":
        return True
    return cache_bytes(model, tokens) < torch.cuda.mem_get_info()[0] * 0.85
