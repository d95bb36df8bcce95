"""One step on a device: one upload of small arrays, forward, head and draws, one download, one wait.

The same computation runs eagerly and inside graphs (`graphs`). Without kernels (no Triton, another model), it is
torch's operations, always eager. The scheduler chooses the rows, the engine interprets the draws.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actors.engine.batch.step.types import Int64Array, StepDrafts, StepRows
from actors.engine.native.forward.context import CachedContext, KVCache
from actors.engine.native.forward.decoder import DecoderForward
from actors.engine.native.forward.draws import Draws, nothing_drawn
from actors.engine.native.forward.graphs import StepGraphs
from actors.engine.native.forward.layout import DeviceStep, StepLayout, StepShape
from actors.engine.native.forward.rejected_rows import drafted_rows, reject
from contracts.rollout import GraphsFailed
from drafter.protocol import GraphCapture
from models import ops
from models.ops.triton import operators_take
from models.ops.triton.work import SPLIT_TOKENS, WorkList
from models.staging import Download, Upload
from models.transformer import Transformer, final_states
from policies.speculation.graph_plan import CapturePlan

_log = logging.getLogger(__name__)
_WORDS = 4  # int32 words per draw: token (2) and its two log-probabilities
Forward = Callable[[DeviceStep, KVCache], tuple[Tensor, Tensor]]


class DeviceSteps:
    """Runs steps of at most `slots` requests on the device of `model`. With a `graph_capture`, steps that fit a planned
    graph are replayed."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        *,
        slots: int,
        blocks: int,
        recorded: tuple[int, ...],
        keep_rows: bool,
        rejection: bool,
        trash_slot: int,
        graph_capture: GraphCapture | None,
        truncated: bool = False,
        follows: bool = False,
    ) -> None:
        """blocks: columns of a block table. keep_rows: somebody reads `Draws.rows`. trash_slot: the first K/V slot
        behind those of requests. truncated: some draws will have top-k or top-p. follows: of a rank that draws nothing.
        """
        self._model, self._cache = model, cache
        self._slots, self._blocks, self._trash_slot = slots, blocks, trash_slot
        self._keep_rows, self._rejection, self._follows = keep_rows, rejection, follows
        weight = model.embed_tokens.weight.detach()
        self._device = weight.device
        self._width = (len(recorded) + 1) * model.config.hidden_size
        by_kernels = has_kernels(model)
        if not by_kernels:
            _log.warning(
                "decoding on %s runs on torch's operations, several times slower than by kernels, and without graphs",
                self._device,
            )
        self._forward = forward_of(model, recorded)
        self._work: WorkList | None = None
        if by_kernels and blocks * cache.block_tokens > SPLIT_TOKENS:
            config = model.config
            self._work = WorkList.of(config.num_heads, config.num_kv_heads, weight.dtype)
        self._graphs: StepGraphs | None = None
        if graph_capture is not None and by_kernels:
            self._graphs = StepGraphs(
                self._replayed,
                graph_capture,
                blocks=blocks,
                block_tokens=cache.block_tokens,
                trash_slot=trash_slot,
                truncated=truncated,
                work=self._work,
            )
        self._kept, self._logits = self._outputs(0, 0)

    def resize(self, max_rows: int, mask_width: int) -> None:
        """Allocate buffers for steps of this many rows, with masks of this width."""
        most = StepShape(
            requests=self._slots,
            rows=max_rows,
            draws=max_rows,
            blocks=self._blocks,
            most=max_rows,
            max_context=1,
            mask_width=mask_width,
            truncated=True,
            picked=True,
        )
        if self._graphs is not None:
            self._graphs.forget()
        size_bytes = StepLayout(most, self._trash_slot, self._cache.block_tokens, self._work).size_bytes
        self._upload = Upload(size_bytes, self._device)
        # block copies before a step, moves of accepted nodes and drafted rows after it
        self._moves = Upload(8 * 5 * max(max_rows, 2 * self._slots), self._device, buffers=4)
        self._results = torch.empty(_WORDS * max_rows, dtype=torch.int32, device=self._device)
        self._download = Download(_WORDS * max_rows, self._device)
        self._no_cutoff = torch.full((max_rows,), -torch.inf, device=self._device)

    @property
    def captured(self) -> int:
        """Number of captured graphs."""
        return 0 if self._graphs is None else self._graphs.captured

    def graphs_failed(self) -> GraphsFailed | None:
        """Return why graphs are used no more, once."""
        if self._graphs is None or self._graphs.failure is None:
            return None
        failure, self._graphs.failure = self._graphs.failure, None
        return failure

    def plan_graphs(self, plan: CapturePlan) -> None:
        """Set the planned graphs, and capture the missing ones."""
        if self._graphs is None:
            return
        self._graphs.replace(plan)
        rows = max((graph.total_rows for graph in plan.of("target")), default=0)
        draws = max((graph.drawn_rows for graph in plan.of("target")), default=0)
        if rows > len(self._kept) or (self._rejection and draws > len(self._logits)):
            self._kept, self._logits = self._outputs(rows, draws)
            self._graphs.forget()
        self._capture()

    def _capture(self) -> None:
        if self._graphs is not None:
            with torch.inference_mode():
                self._graphs.capture_all(self._upload)

    def _outputs(self, rows: int, draws: int) -> tuple[Tensor, Tensor]:
        """Allocate the graphs' outputs, outside of their pool: kept rows and, for rejection sampling, logits."""
        weight, vocab = self._model.embed_tokens.weight.detach(), self._model.config.vocab_size
        logits = torch.empty(draws if self._rejection else 0, vocab, dtype=torch.float32, device=self._device)
        return weight.new_empty(rows, self._width if self._keep_rows else 0), logits

    def moved(self) -> None:
        """Capture again: the KV cache, or the weights, have moved."""
        if self._graphs is not None:
            self._graphs.forget()
            self._capture()

    def copy_blocks(self, copies: Int64Array) -> None:
        """Copy KV blocks, [2, N] (from, to)."""
        self._cache.copy_blocks(*self._moves.numbers(copies))

    def move(self, moves: Int64Array) -> None:
        """Copy K/V slots, [2, N] (from, to)."""
        self._cache.move_slots(*self._moves.numbers(moves))

    def run(self, rows: StepRows, drafts: StepDrafts | None) -> Draws:
        """Return the step's rows, and the draws from them."""
        offsets: Any = rows.arrays["query_offsets"]
        rejected = self._rejection and drafts is not None and drafts.parents is None
        drafted = self._moves.numbers(drafted_rows(rows, drafts)) if rejected and drafts is not None else None
        distributions = None if drafts is None else drafts.distributions
        found = None if self._graphs is None else self._graphs.find(rows)
        captured = False
        if found is not None and self._graphs is not None:
            graph = self._graphs.take(found, self._upload)
            graph.write(self._upload, rows)
            captured = graph.replay is None and self._graphs.capture(graph)
            if graph.replay is not None:
                graph.replay()
                total, step = graph.layout.shape.draws, graph.step
                if drafted is not None:
                    self._reject(self._logits[:total], step, drafted, distributions)
                count = len(rows.arrays["tokens"])
                kept = self._kept[:count].clone() if self._keep_rows else self._kept[:0]
                if not rows.sampled:
                    return nothing_drawn(kept, offsets, captured)
                return self._fetch(rows.sampled, total, kept, offsets, captured)
        block_tokens = self._cache.block_tokens
        layout = StepLayout(StepShape.of(rows, block_tokens), self._trash_slot, block_tokens, self._work)
        self._upload.send(layout.write(layout.host(self._upload.hosts[self._upload.begin()]), rows))
        step = layout.device(self._upload.device)
        computed, hidden = self._forward(step, self._cache)
        if not rows.sampled:
            return nothing_drawn(computed, offsets)
        if step.sample_rows is not None:
            hidden = hidden.index_select(0, step.sample_rows)
        logits = self._model.logits(hidden)
        if self._follows:
            return nothing_drawn(computed, offsets)
        self._draw(logits, step)
        if drafted is not None:
            self._reject(logits, step, drafted, distributions)
        return self._fetch(rows.sampled, rows.sampled, computed, offsets, captured)

    def _replayed(self, step: DeviceStep) -> None:
        """The body of a graph."""
        computed, hidden = self._forward(step, self._cache)
        if step.sample_rows is not None:
            hidden = hidden.index_select(0, step.sample_rows)
        logits = self._model.logits(hidden)
        self._draw(logits, step)
        if self._keep_rows:
            self._kept[: len(computed)].copy_(computed)
        if self._rejection:
            self._logits[: len(logits)].copy_(logits)

    def _cutoff(self, logits: Tensor, step: DeviceStep) -> Tensor:
        if step.top_k is None or step.top_p is None:
            return self._no_cutoff[: len(logits)]
        return ops.cutoff(logits, step.temperature, step.top_k, step.top_p)

    def _draw(self, logits: Tensor, step: DeviceStep) -> None:
        """Write tokens and log-probabilities to the results: three kernels, one more with truncation."""
        cutoff = self._cutoff(logits, step)
        drawn = ops.sample(logits, cutoff, step.temperature, step.noise_keys, step.noise_positions)
        words = [part.view(torch.int32) for part in drawn]
        torch.cat(words, out=self._results[: _WORDS * len(logits)])

    def _reject(self, logits: Tensor, step: DeviceStep, drafted: Tensor, distributions: Tensor | None) -> None:
        """Replace the coupled draws in the results by those of rejection sampling."""
        count = len(logits)
        words = self._results[: _WORDS * count]
        tokens, logprobs = words[: 2 * count].view(torch.int64), words[2 * count :].view(torch.float32)
        drawn = tokens, logprobs[:count], logprobs[count:]
        reject(logits, self._cutoff(logits, step), step, drawn, drafted, distributions)

    def _fetch(self, draws: int, total: int, rows: Tensor, offsets: Any, captured: bool) -> Draws:
        """Download the first `draws` of `total` results: the step's one wait."""
        words = self._download.fetch(self._results[: _WORDS * total])
        return Draws(
            tokens=words[: 2 * total].view("int64")[:draws],
            logprobs=words[2 * total : 3 * total].view("float32")[:draws],
            logprobs_t1=words[3 * total :].view("float32")[:draws],
            rows=rows,
            offsets=offsets,
            captured=captured,
        )


def has_kernels(model: Transformer) -> bool:
    """Return whether kernels compute this model's forward on its device, so that graphs can be captured."""
    weight = model.embed_tokens.weight.detach()
    return DecoderForward.supports(model) and (weight.is_cpu or operators_take(weight))


def forward_of(model: Transformer, recorded: tuple[int, ...] = ()) -> Forward:
    """Return the forward, by kernels if possible, else by the model: (rows with recorded layers, final states)."""
    return DecoderForward(model, recorded) if has_kernels(model) else partial(reference_forward, model, recorded)


def reference_forward(
    model: Transformer, recorded: tuple[int, ...], step: DeviceStep, cache: KVCache
) -> tuple[Tensor, Tensor]:
    """The model's own forward, where kernels are missing."""
    context = CachedContext(
        cache=cache,
        positions=step.positions,
        kv_slots=step.kv_slots,
        block_tables=step.block_tables,
        query_offsets=step.query_offsets,
        context_lens=step.context_lens,
        max_query=step.max_query,
        max_context=step.max_context,
        tree_mask=step.tree_mask,
    )
    computed = model(step.tokens, context, recorded)
    return computed, final_states(model, computed)
