"""One packed forward of the running batch, and the draws it yields. Owns the model, the KV cache and step buffers.

Prompt chunks, decoding and verification of drafts are the same thing here: every request brings 1..k rows that follow
what is in the cache, and draws happen at the rows from its last known token on. Nothing waits for the device except
the one copy of the draws at the end. It never decides what runs (scheduler) nor what a draw means (engine).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from actors.engine.batch.plan import StepPlan
from actors.engine.batch.slots import SlotTable
from actors.engine.batch.step.types import Float32Array, Int64Array, StepArrays, StepDrafts, StepRows
from actors.engine.native.forward import rejection
from actors.engine.native.forward.buffers import StepBuffers
from actors.engine.native.forward.context import CachedContext, KVCache
from actors.engine.native.forward.fused import FusedForward
from actors.engine.native.forward.graph_rows import RESERVED_BLOCKS
from actors.engine.native.forward.graphs import GraphedForward
from actors.engine.native.forward.packed_weights import pack_weights
from drafter.protocol import GraphCapture
from models import ops
from models.transformer import Transformer, final_states
from policies.speculation.graph_plan import CapturePlan, context_buckets

_KINDS = np.int64, np.float32, np.float32  # of tokens, logprobs, logprobs_t1


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """The target's draw at each of the N rows that are drawn from, in order."""

    tokens: Int64Array  # [N]
    logprobs: Float32Array  # [N], of the sampling distribution
    logprobs_t1: Float32Array  # [N], at temperature 1 without truncation
    rows: torch.Tensor  # [T, W] as in drafter.training.records, of all rows; nobody writes it again
    offsets: NDArray[np.int32]  # [R + 1], rows of the plan's requests; valid until the next step
    captured: bool = False  # a graph was captured for this step: its time says nothing


class ModelRunner:
    """Runs `model` over the slots of `table`: at most `chunk_tokens` rows of prompts beside a decoding row and
    `max_nodes` drafted ones per slot. With a `graph_capture`, steps that fit a graph of the plan are replayed
    (`graphs`)."""

    def __init__(
        self,
        model: Transformer,
        table: SlotTable,
        blocks: int,
        block_tokens: int,
        chunk_tokens: int,
        max_nodes: int,
        *,
        steps: StepArrays,
        rejection: bool = False,
        graph_capture: GraphCapture | None = None,
        recorded: tuple[int, ...] = (),
    ) -> None:
        """recorded: layers whose outputs stand before the final state in `Draws.rows`."""
        self._recorded = recorded
        self._steps, self._rejection = steps, rejection
        self._graphs: GraphedForward | None = None
        parameter = next(model.parameters())
        self.device, self._dtype = parameter.device, parameter.dtype
        self.model, self._table = model, table
        self._blocks, self._block_tokens = blocks, block_tokens
        self._chunk_tokens = chunk_tokens
        self._cache: KVCache | None = None
        self.resize(max_nodes)
        pack_weights(model)
        self._fused = FusedForward(model) if FusedForward.supports(model) and not recorded else None
        if graph_capture is not None:
            contexts = context_buckets(table.block_tables.shape[1] * block_tokens, block_tokens)
            self._graphs = GraphedForward(model, blocks, CapturePlan(()), contexts, graph_capture, recorded)
        self.wake()

    def resize(self, max_nodes: int) -> None:
        """Make room for up to `max_nodes` drafted tokens per request and step."""
        slots, width = self._table.block_tables.shape
        max_rows = slots * (1 + max_nodes) + self._chunk_tokens
        mask_bytes = slots * (1 + max_nodes) ** 2
        rows = ("tokens", "positions", "kv_slots", "sample_rows", "noise_keys", "noise_positions", "temperature")
        capacity = dict.fromkeys((*rows, "top_k", "top_p"), max_rows)
        capacity |= {"query_offsets": slots + 1, "context_lens": slots, "block_tables": slots * width}
        capacity["tree_mask"] = -(-mask_bytes // 8)
        self._buffers = StepBuffers(capacity, self.device)
        self._no_cutoff = torch.full((max_rows,), -torch.inf, device=self.device)
        self._steps.resize(max_rows, mask_bytes)
        if self._graphs is not None:
            self._graphs.forget()

    def plan_graphs(self, plan: CapturePlan) -> None:
        """Which graphs may be captured from now on. Does nothing without a graph_capture."""
        if self._graphs is not None:
            self._graphs.replace(plan)

    def wake(self) -> None:
        """(Re)allocate the KV cache."""
        if self._cache is None:
            config = self.model.config
            blocks = self._blocks + (0 if self._graphs is None else RESERVED_BLOCKS)
            self._cache = KVCache(config, blocks, self._block_tokens, self._dtype, str(self.device))

    def sleep(self) -> None:
        """Release the KV cache's memory; what it held is lost."""
        self._cache = None
        if self._graphs is not None:
            self._graphs.forget()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def weights_changed(self) -> None:
        """The model's parameters were written in place: pack them again for the CPU's matrix kernels."""
        pack_weights(self.model)
        if self._fused is not None:
            self._fused.weights_changed()

    def run(self, plan: StepPlan, drafts: StepDrafts | None) -> Draws:
        """Compute the plan's rows, and behind them those of drafted tokens, which the caller has put into the token
        table behind the last known one."""
        with torch.inference_mode():
            return self._run(plan, drafts)

    def compact(self, moves: Int64Array) -> None:
        """Bring the K/V of accepted tree nodes into place: [2, N], slots (from, to)."""
        assert self._cache is not None
        self._cache.move(moves)

    def _run(self, plan: StepPlan, drafts: StepDrafts | None) -> Draws:
        cache = self._cache
        if cache is None:
            raise RuntimeError("the engine sleeps: wake it before it steps")
        if plan.copies:
            copies = torch.tensor(plan.copies, device=self.device)
            cache.copy_blocks(copies[:, 0], copies[:, 1])
        rows = self._steps.rows(plan, drafts)
        graphed = None if self._graphs is None else self._graphs.run(rows, self._buffers, cache)
        if graphed is not None:
            offsets: Any = rows.arrays["query_offsets"]
            drawn = self._draw(graphed.logits, graphed.step, rows, drafts)
            return self._draws(drawn, graphed.rows, offsets, graphed.captured)
        step = self._buffers.upload(rows.arrays)
        context = CachedContext(
            cache=cache,
            positions=step["positions"],
            kv_slots=step["kv_slots"],
            block_tables=step["block_tables"],
            query_offsets=step["query_offsets"],
            context_lens=step["context_lens"],
            max_query=rows.most,
            max_context=rows.max_context,
            tree_mask=step.get("tree_mask"),
        )
        if self._fused is None:
            computed = self.model(step["tokens"], context, self._recorded)
        else:
            computed = self._fused(step["tokens"], context)
        hidden = drawn_from = final_states(self.model, computed)
        offsets = rows.arrays["query_offsets"]
        if not rows.sampled:
            nothing = np.zeros(0, np.float32)
            return Draws(
                tokens=np.zeros(0, np.int64), logprobs=nothing, logprobs_t1=nothing, rows=computed, offsets=offsets
            )
        if "sample_rows" in step:
            drawn_from = hidden[step["sample_rows"]]
        drawn = self._draw(self.model.logits(drawn_from), step, rows, drafts)
        return self._draws(drawn, computed, offsets)

    def _draw(
        self, logits: torch.Tensor, step: dict[str, torch.Tensor], rows: StepRows, drafts: StepDrafts | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens [N] and their two log-probabilities, from logits [N, V]."""
        least = self._no_cutoff[: rows.sampled]
        if rows.truncated:
            least = ops.cutoff(logits, step["temperature"], step["top_k"], step["top_p"])
        drawn = ops.sample(logits, least, step["temperature"], step["noise_keys"], step["noise_positions"])
        if self._rejection and drafts is not None and drafts.parents is None:
            drawn = self._rejected(logits, least, step, drafts)
        return drawn

    def _rejected(
        self, logits: torch.Tensor, least: torch.Tensor, step: dict[str, torch.Tensor], drafts: StepDrafts
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draws by rejection sampling in place of coupled ones, for chains; every row is drawn from."""
        widths = drafts.counts + 1
        starts, columns = widths.cumsum() - widths, np.arange(drafts.tokens.shape[1] + 1)
        filled = torch.from_numpy(columns < widths[:, None]).to(self.device)
        rows = torch.from_numpy(np.minimum(starts[:, None] + columns, len(logits) - 1)).to(self.device)  # [R, K+1]
        first = rows[:, 0]
        draws = rejection.rejection_draws(
            logits[rows],
            least[rows],
            step["temperature"][first],
            step["noise_keys"][first],
            step["noise_positions"][first],
            torch.from_numpy(drafts.tokens).to(self.device),
            drafts.distributions,
        )
        tokens = draws[filled]
        return tokens, *rejection.target_logprobs(logits, least, step["temperature"], tokens)

    def _draws(
        self,
        drawn: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rows: torch.Tensor,
        offsets: NDArray[np.int32],
        captured: bool = False,
    ) -> Draws:
        """What was drawn, on the host."""
        if self.device.type == "cpu":
            tokens, logprobs, logprobs_t1 = (part.numpy() for part in drawn)
        else:
            # One copy for the three: float64 holds every token id and float32 exactly.
            packed = torch.stack([part.double() for part in drawn]).cpu().numpy()
            tokens, logprobs, logprobs_t1 = (part.astype(kind) for part, kind in zip(packed, _KINDS, strict=True))
        return Draws(
            tokens=tokens, logprobs=logprobs, logprobs_t1=logprobs_t1, rows=rows, offsets=offsets, captured=captured
        )
