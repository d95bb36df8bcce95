"""Steps of few requests as replays of captured graphs: decoder and head without a launch per kernel (CUDA).

Owns the captured graphs, their common memory pool and their output buffer. A graph is captured when its shape first
comes up; what no graph of the plan holds runs eagerly, and after a failed capture everything does. Weights are loaded
in place, so graphs outlive them; a new KV cache or new step buffers make them useless (`forget`).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.engine.batch.step.types import StepRows
from actors.engine.native.forward.buffers import StepBuffers
from actors.engine.native.forward.context import KVCache
from actors.engine.native.forward.graph_rows import ZERO, padded_rows, reserved_block
from drafter.protocol import GraphCapture, Replay
from models import ops
from models.ops.static_attention import StaticPages
from models.transformer import Transformer, final_states
from policies.speculation.graph_plan import CapturePlan, GraphShape

_log = logging.getLogger(__name__)


class CudaGraphCapture:
    """torch.cuda.graph over one memory pool. Graphs of a pool must not be replayed at once; an engine's never are."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.reset()

    def reset(self) -> None:
        # A handle whose last graph is gone cannot be captured into again.
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], None]) -> Replay:
        try:
            # What happens once only (kernel choices, library handles, tables) must not be captured: run it first, on
            # the stream of the capture, as the libraries' workspaces belong to a stream.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                compute()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # thread_local: what other threads of the process do is no reason to fail.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                compute()
        except RuntimeError:
            torch.cuda.synchronize()  # the caller goes on without: nothing of this may still be running
            raise
        replay: Replay = graph.replay
        return replay


@dataclass(frozen=True, slots=True)
class GraphedStep:
    """What a replay computed, in the layout of the step's own rows."""

    step: dict[str, Tensor]  # the arrays of the draws, on the device
    rows: Tensor  # [T, W]; nobody writes it again
    logits: Tensor  # [T, V], valid until the next replay
    captured: bool  # the graph was captured for this step, which takes many times a step


@dataclass(frozen=True, slots=True)
class _StaticContext:
    """`models.transformer.AttentionContext` of a captured graph."""

    cache: KVCache
    positions: Tensor
    kv_slots: Tensor
    pages: StaticPages

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        ops.write_kv(k, v, keys, values, self.kv_slots)
        return self.pages.attend(q, keys, values, q.shape[-1] ** -0.5)


class GraphedForward:
    """Forward and logits of whole steps by graphs of `plan`, each at the context lengths in `contexts` (whole blocks).

    The cache holds `blocks` blocks for requests and RESERVED_BLOCKS more.
    """

    def __init__(
        self,
        model: Transformer,
        blocks: int,
        plan: CapturePlan,
        contexts: Sequence[int],
        graph_capture: GraphCapture,
        recorded: tuple[int, ...] = (),
    ) -> None:
        """recorded: layers whose outputs stand before the final state in every row."""
        self._recorded = recorded
        self._model, self._blocks, self._contexts = model, blocks, sorted(contexts)
        self._graph_capture = graph_capture
        self._captured: dict[tuple[GraphShape, int], Replay] = {}
        self._works = True
        self._hidden, self._logits = self._outputs(0)
        self.replace(plan)

    def replace(self, plan: CapturePlan) -> None:
        """Another plan. What is captured is kept, unless the new plan has larger steps than any before."""
        self._plan = plan
        self._fits: dict[tuple[int, int], GraphShape | None] = {}
        rows = max((graph.total_rows for graph in plan.of("target")), default=0)
        if rows > len(self._hidden):
            self._hidden, self._logits = self._outputs(rows)
            self.forget()

    def _outputs(self, rows: int) -> tuple[Tensor, Tensor]:
        """Where graphs leave hidden states and logits: outside of their pool, whose memory they share."""
        weight, config = self._model.embed_tokens.weight.detach(), self._model.config
        width = (len(self._recorded) + 1) * config.hidden_size
        return weight.new_empty(rows, width), weight.new_empty(rows, config.vocab_size)

    @property
    def captured(self) -> int:
        """Graphs captured so far."""
        return len(self._captured)

    def forget(self) -> None:
        """The cache or the step buffers are gone, or move: capture again."""
        self._captured.clear()
        self._graph_capture.reset()

    def run(self, rows: StepRows, buffers: StepBuffers, cache: KVCache) -> GraphedStep | None:
        """The step by a graph; None where none holds it: then nothing has happened."""
        found = self._fit(rows)
        if found is None:
            return None
        graph, context = found
        arrays = padded_rows(rows.arrays, graph, context, cache.block_tokens, self._blocks)
        step = buffers.upload(arrays)
        replay = self._captured.get(found)
        new = replay is None
        if replay is None:
            replay = self._capture(graph, context, step, cache)
            if replay is None:
                return None
        replay()
        real = step.get("sample_rows")
        hidden, logits = self._hidden[: graph.total_rows], self._logits[: graph.total_rows]
        if real is None:
            return GraphedStep(step, hidden.clone(), logits, new)
        return GraphedStep(step, hidden.index_select(0, real), logits.index_select(0, real), new)

    def _fit(self, rows: StepRows) -> tuple[GraphShape, int] | None:
        if not self._works or "sample_rows" in rows.arrays or not rows.sampled:
            return None
        key = len(rows.arrays["context_lens"]), rows.most
        if key not in self._fits:
            self._fits[key] = self._plan.graph_for("target", *key)
        graph = self._fits[key]
        context = next((length for length in self._contexts if length >= rows.max_context), None)
        return None if graph is None or context is None else (graph, context)

    def _capture(self, graph: GraphShape, context: int, step: dict[str, Tensor], cache: KVCache) -> Replay | None:
        model, config, size = self._model, self._model.config, cache.block_tokens
        hidden, logits = self._hidden[: graph.total_rows], self._logits[: graph.total_rows]

        def compute() -> None:
            pages = StaticPages.of(
                step["block_tables"],
                step["query_offsets"].diff(),
                step["context_lens"],
                step.get("tree_mask"),
                rows=graph.rows,
                groups=config.num_heads // config.num_kv_heads,
                block_tokens=size,
                zero_slot=reserved_block(self._blocks, ZERO) * size,
                dtype=hidden.dtype,
            )
            static = _StaticContext(cache, step["positions"], step["kv_slots"], pages)
            out = model(step["tokens"], static, self._recorded)
            hidden.copy_(out)
            logits.copy_(model.logits(final_states(model, out)))

        try:
            replay = self._graph_capture.record(compute)
        except RuntimeError:  # torch.OutOfMemoryError is one
            _log.exception("no CUDA graph of %s at context length %d; decoding goes on without graphs", graph, context)
            self._works = False
            self.forget()
            return None
        self._captured[graph, context] = replay
        _log.debug("captured %s at context length %d", graph, context)
        return replay
