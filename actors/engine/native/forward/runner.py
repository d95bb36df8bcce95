"""One packed forward of the running batch, and its draws. Owns the model and the KV cache.

Prompt chunks, decoding and verification of drafts are handled alike: every request has 1..k rows behind its cached
tokens, and draws are made at the rows from its last known token on. On CPU they run here, on other devices in
`device_steps`. The scheduler chooses the rows; the engine interprets the draws.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from actors.engine.batch.plan import StepPlan
from actors.engine.batch.slots import SlotTable
from actors.engine.batch.step.build import StepArrays
from actors.engine.batch.step.types import Int64Array, StepDrafts, StepRows
from actors.engine.native.forward import rejection
from actors.engine.native.forward.chains import CpuChains
from actors.engine.native.forward.context import CachedContext, KVCache, MakeMemory
from actors.engine.native.forward.device_chains import DeviceChains
from actors.engine.native.forward.device_steps import DeviceSteps
from actors.engine.native.forward.draws import Draws, nothing_drawn
from actors.engine.native.forward.fused import FusedForward
from actors.engine.native.forward.kv_memory import kv_memory
from actors.engine.native.forward.layout import RESERVED_BLOCKS
from actors.engine.native.forward.packed_weights import pack_weights
from actors.engine.native.ranks.leader import Followers
from actors.engine.native.ranks.orders import CopyBlocks, Move, Order, Resize, Step
from contracts.engine import Sleep, Wake
from contracts.rollout import GraphsFailed
from drafter.protocol import GraphCapture, TargetPasses
from models import ops
from models.tensor_parallel import RankGroupError
from models.transformer import Transformer, final_states
from policies.speculation.graph_plan import CapturePlan


class ModelRunner:
    """Runs `model` over the slots of `table`.

    At most `chunk_tokens` rows of prompts, plus one decoding row and `max_nodes` drafted ones per slot. With a
    `graph_capture`, steps that fit a planned graph are replayed (`graphs`)."""

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
        keep_rows: bool = True,
        make_memory: MakeMemory = kv_memory,
        checked_rows: int = 0,
        truncated: bool = False,
        followers: Followers | None = None,
        follows: bool = False,
    ) -> None:
        """recorded: layers whose outputs stand before the final state in `Draws.rows`. keep_rows: somebody reads them.
        make_memory: what holds the KV cache. checked_rows: of early text in a step. truncated: some draws will have
        top-k or top-p. followers: the other ranks of this model, which do what this one does. follows: it is one of
        them, and draws nothing."""
        self._followers, self._follows = followers, follows
        self._recorded = recorded
        self._steps, self._rejection, self._checked_rows = steps, rejection, checked_rows
        parameter = next(model.parameters())
        device = parameter.device
        self.model, self._table, self._chunk_tokens = model, table, chunk_tokens
        self._awake = True
        # Padding rows write behind the blocks of requests.
        reserved = 0 if device.type == "cpu" and graph_capture is None else RESERVED_BLOCKS
        self._cache = KVCache(
            model.config, blocks + reserved, block_tokens, parameter.dtype, device, make_memory=make_memory
        )
        self._device_steps: DeviceSteps | None = None
        if reserved:
            self._device_steps = DeviceSteps(
                model,
                self._cache,
                slots=len(table.length),
                blocks=table.block_tables.shape[1],
                recorded=recorded,
                keep_rows=keep_rows,
                rejection=rejection,
                trash_slot=blocks * block_tokens,
                graph_capture=graph_capture,
                truncated=truncated,
                follows=follows,
            )
        # passes of a drafter over this cache
        self._device_chains: DeviceChains | None = None
        if reserved:
            self._device_chains = DeviceChains(
                table, self._cache, device, trash_slot=blocks * block_tokens, keep_logits=rejection
            )
        self.passes: TargetPasses = self._device_chains or CpuChains(table, self._cache)
        self._arrays: Mapping[str, NDArray[np.generic]] | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self.resize(max_nodes)
        pack_weights(model)
        self._low_bit, self._fused = model.low_bit, self._fuse()

    def _fuse(self) -> FusedForward | None:
        return FusedForward(self.model) if FusedForward.supports(self.model) and not self._recorded else None

    def resize(self, max_nodes: int) -> None:
        """Allocate buffers for up to `max_nodes` drafted tokens per request and step."""
        self._tell(Resize(max_nodes))
        slots = len(self._table.length)
        max_rows = slots * (1 + max_nodes) + self._checked_rows + self._chunk_tokens
        self._no_cutoff = torch.full((max_rows,), -torch.inf)
        self._steps.resize(max_rows, slots * (1 + max_nodes) ** 2)
        if self._device_steps is not None:
            self._device_steps.resize(max_rows, 1 + max_nodes)

    def plan_graphs(self, plan: CapturePlan) -> None:
        """Set the planned graphs and capture the missing ones. No effect without a graph_capture."""
        if self._device_steps is not None:
            self._device_steps.plan_graphs(plan)

    def graphs_failed(self) -> GraphsFailed | None:
        """Return why steps are replayed as graphs no more, once."""
        return None if self._device_steps is None else self._device_steps.graphs_failed()

    def sleep(self) -> None:
        """Release the KV cache's memory; its contents are lost."""
        if self._awake:
            self._awake = False
            if self._followers is not None:
                self._followers.ask(Sleep())
            self._cache.sleep()

    def wake(self) -> None:
        """Allocate the KV cache again. Graphs are captured again only if its address changed."""
        if not self._awake:
            self._awake = True
            if self._followers is not None:
                self._followers.ask(Wake())
            if not self._cache.wake() and self._device_steps is not None and self._device_chains is not None:
                self._device_chains.forget()
                self._device_steps.moved()
                self._device_chains.capture()

    def weights_changed(self) -> None:
        """Pack the model's parameters again for the CPU's matrix kernels, after they were written in place or their
        format changed."""
        pack_weights(self.model)
        if self.model.low_bit != self._low_bit:
            self._low_bit, self._fused = self.model.low_bit, self._fuse()
            if self._device_steps is not None:
                self._device_steps.moved()
        elif self._fused is not None:
            self._fused.weights_changed()

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy a plan's KV blocks, before its drafts and its `run` read them."""
        self.copy_block_pairs(np.array(copies, np.int64).T)

    def copy_block_pairs(self, pairs: Int64Array) -> None:
        """Same as `copy_blocks`: [2, N], blocks (from, to)."""
        if not self._awake:
            raise RuntimeError("the engine sleeps: wake it before it steps")
        self._tell(CopyBlocks(pairs))
        with torch.inference_mode():
            if self._device_steps is None:
                self._cache.copy_blocks(*torch.from_numpy(pairs))
            else:
                self._device_steps.copy_blocks(pairs)

    def run(self, plan: StepPlan, drafts: StepDrafts | None) -> Draws:
        """Compute the plan's rows, then the drafted tokens' rows. The caller has put the drafts into the token table
        behind the last known token."""
        if not self._awake:
            raise RuntimeError("the engine sleeps: wake it before it steps")
        rows = self._steps.rows(plan, drafts)
        self._tell(Step(rows))
        return self._computed(rows, drafts)

    def follow(self, rows: StepRows) -> None:
        """Compute the rows of a step that rank 0 runs."""
        self._computed(rows, None)

    def _computed(self, rows: StepRows, drafts: StepDrafts | None) -> Draws:
        device_steps = self._device_steps
        try:
            with torch.inference_mode():
                return self._run(rows, drafts) if device_steps is None else device_steps.run(rows, drafts)
        except RankGroupError as error:
            if self._followers is None:
                raise
            self._followers.explain(error)

    def _tell(self, order: Order) -> None:
        if self._followers is not None:
            self._followers.tell(order)

    def compact(self, moves: Int64Array) -> None:
        """Move the K/V of accepted tree nodes: [2, N], slots (from, to)."""
        self._tell(Move(moves))
        if self._device_steps is None:
            self._cache.move(moves)
        else:
            self._device_steps.move(moves)

    # CPU path.

    def _run(self, rows: StepRows, drafts: StepDrafts | None) -> Draws:
        if rows.arrays is not self._arrays:  # the same arrays may return with other values
            self._arrays = rows.arrays
            self._tensors = {name: torch.from_numpy(array) for name, array in rows.arrays.items()}
        step = self._tensors
        context = CachedContext(
            cache=self._cache,
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
        hidden = final_states(self.model, computed)
        offsets: Any = rows.arrays["query_offsets"]
        if not rows.sampled:
            return nothing_drawn(computed, offsets)
        if "sample_rows" in step:
            hidden = hidden[step["sample_rows"]]
        logits = self.model.logits(hidden)
        if self._follows:
            return nothing_drawn(computed, offsets)
        drawn = self._draw(logits, step, rows, drafts)
        tokens, logprobs, logprobs_t1 = (part.numpy() for part in drawn)
        return Draws(tokens=tokens, logprobs=logprobs, logprobs_t1=logprobs_t1, rows=computed, offsets=offsets)

    def _draw(
        self, logits: torch.Tensor, step: dict[str, torch.Tensor], rows: StepRows, drafts: StepDrafts | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens [N] and their two log-probabilities, from logits [N, V]."""
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
        """Return draws by rejection sampling instead of coupled ones, for chains; every row is drawn from."""
        widths = drafts.counts + 1
        starts, columns = widths.cumsum() - widths, np.arange(drafts.tokens.shape[1] + 1)
        filled = torch.from_numpy(columns < widths[:, None])
        rows = torch.from_numpy(np.minimum(starts[:, None] + columns, len(logits) - 1))  # [R, K+1]
        first = rows[:, 0]
        draws = rejection.rejection_draws(
            logits[rows],
            least[rows],
            step["temperature"][first],
            step["noise_keys"][first],
            step["noise_positions"][first],
            torch.from_numpy(drafts.tokens),
            drafts.distributions,
        )
        tokens = draws[filled]
        return tokens, *rejection.target_logprobs(logits, least, step["temperature"], tokens)
