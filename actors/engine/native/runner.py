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

from actors.engine.native import rejection, sampler
from actors.engine.native.buffers import StepBuffers
from actors.engine.native.context import CachedContext, KVCache
from actors.engine.native.fused import FusedForward
from actors.engine.native.packed_weights import pack_weights
from actors.engine.native.scheduler import StepPlan
from actors.engine.native.slots import SlotTable
from actors.engine.native.speculation import StepDrafts
from models import ops
from models.transformer import Transformer

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Draws:
    """The target's draws, by sampling request (in the plan's order) and drafted position; padded where fewer."""

    tokens: Int64Array  # [R, K+1]
    logprobs: NDArray[np.float32]  # [R, K+1], of the sampling distribution
    logprobs_t1: NDArray[np.float32]  # [R, K+1], at temperature 1 without truncation
    hidden: torch.Tensor  # [T, H], after the final norm, of all rows; nobody writes it again
    offsets: NDArray[np.int32]  # [requests of the plan + 1], their rows

    def along(self, path: Int64Array) -> "Draws":
        """Column path[r, j] of request r in place of its column j; path [R, K+1]."""
        rows = np.arange(len(path))[:, None]
        along = (self.tokens[rows, path], self.logprobs[rows, path], self.logprobs_t1[rows, path])
        return Draws(*along, self.hidden, self.offsets)


@dataclass(frozen=True, slots=True)
class _Sampling:
    """What drawing for these slots needs, and no step changes: kept while the scheduler keeps its array of slots."""

    slots: Int64Array
    noise_keys: Int64Array
    response_start: Int64Array  # position of the first response token
    temperature: NDArray[np.float32]
    top_k: Int64Array
    top_p: NDArray[np.float32]
    truncated: bool

    @classmethod
    def of(cls, table: SlotTable, slots: Int64Array) -> "_Sampling":
        top_k, top_p = table.top_k[slots], table.top_p[slots]
        truncated = bool(((top_k > 0) | (top_p < 1)).any())
        keys, start, temperature = table.noise_key[slots], table.prompt_length[slots], table.temperature[slots]
        return cls(slots, keys, start, temperature, top_k, top_p, truncated)


class ModelRunner:
    """Runs `model` over the slots of `table`: at most `chunk_tokens` rows of prompts beside a decoding row and
    `max_nodes` drafted ones per slot."""

    def __init__(
        self,
        model: Transformer,
        table: SlotTable,
        blocks: int,
        block_tokens: int,
        chunk_tokens: int,
        max_nodes: int,
        *,
        rejection: bool = False,
    ) -> None:
        self._rejection = rejection
        parameter = next(model.parameters())
        self.device, self._dtype = parameter.device, parameter.dtype
        self.model, self._table = model, table
        self._blocks, self._block_tokens = blocks, block_tokens
        self._chunk_tokens = chunk_tokens
        self._sampling = _Sampling.of(table, np.zeros(0, np.int64))
        self._cache: KVCache | None = None
        self.resize(max_nodes)
        pack_weights(model)
        self._fused = FusedForward(model) if FusedForward.supports(model) else None
        self.wake()

    def resize(self, max_nodes: int) -> None:
        """Make room for up to `max_nodes` drafted tokens per request and step."""
        slots, width = self._table.block_tables.shape
        max_rows = slots * (1 + max_nodes) + self._chunk_tokens
        rows = ("tokens", "positions", "kv_slots", "sample_rows", "noise_keys", "noise_positions", "temperature")
        capacity = dict.fromkeys((*rows, "top_k", "top_p"), max_rows)
        capacity["tree_mask"] = max_rows * (1 + max_nodes) // 8 + 1  # bytes
        capacity |= {"query_offsets": slots + 1, "context_lens": slots, "block_tables": slots * width}
        self._buffers = StepBuffers(capacity, self.device)
        self._no_cutoff = torch.full((max_rows,), -torch.inf, device=self.device)
        self._arange = np.arange(max_rows + 1)
        self._offsets = np.arange(max_rows + 1, dtype=np.int32)

    def wake(self) -> None:
        """(Re)allocate the KV cache."""
        if self._cache is None:
            config = self.model.config
            self._cache = KVCache(config, self._blocks, self._block_tokens, self._dtype, str(self.device))

    def sleep(self) -> None:
        """Release the KV cache's memory; what it held is lost."""
        self._cache = None
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

    def compact(self, slots: Int64Array, lengths: Int64Array, path: Int64Array, emitted: Int64Array) -> None:
        """Bring the K/V of accepted tree nodes into place: node column path[r, j] of request r, which lies at sequence
        position lengths[r] - 1 + path[r, j], to lengths[r] - 1 + j, for 0 < j < emitted[r]."""
        step = self._arange[: path.shape[1]]
        row, place = ((path != step) & (step > 0) & (step < emitted[:, None])).nonzero()
        if not len(row) or self._cache is None:
            return
        table, size = self._table.block_tables, self._block_tokens
        last = lengths[row] - 1
        moves = np.stack((last + path[row, place], last + place))
        moves = table[slots[row], moves // size].astype(np.int64) * size + moves % size
        source, target = torch.from_numpy(moves).to(self.device)
        with torch.inference_mode():
            self._cache.move(source, target)

    def _run(self, plan: StepPlan, drafts: StepDrafts | None) -> Draws:
        table, cache = self._table, self._cache
        if cache is None:
            raise RuntimeError("the engine sleeps: wake it before it steps")
        if plan.copies:
            copies = torch.tensor(plan.copies, device=self.device)
            cache.copy_blocks(copies[:, 0], copies[:, 1])

        slots = plan.slots
        draft_counts = None if drafts is None else drafts.counts
        first = table.computed[slots]  # [R] position of each request's first row
        plain = draft_counts is None and plan.prefill_tokens == 0  # One row each, and every row is drawn from.
        if plain:
            total, rows, most_rows = len(slots), plan.rows, 1
            row_slots, positions, offsets = slots, first, self._offsets[: total + 1]
        else:
            rows = plan.rows if draft_counts is None else plan.rows + draft_counts
            ends = rows.cumsum()
            total, most_rows = int(ends[-1]), int(rows.max())
            owner = self._arange[: len(slots)].repeat(rows)  # [T] request of each row
            row_slots = slots[owner]
            positions = self._arange[:total] + (first + rows - ends)[owner]
            offsets = np.zeros(len(slots) + 1, np.int32)
            offsets[1:] = ends
        contexts = (first + rows).astype(np.int32)
        max_context = int(contexts.max())
        blocks = -(-max_context // self._block_tokens)
        block_tables = table.block_tables[slots, :blocks]
        in_block = positions % self._block_tokens
        kv_slots = table.block_tables[row_slots, positions // self._block_tokens] * np.int64(self._block_tokens)
        kv_slots += in_block
        row_tokens = table.tokens[row_slots, positions].astype(np.int64)
        tree_mask = None
        if drafts is not None and drafts.parents is not None and drafts.depths is not None:
            tree_mask, depths = _tree(drafts.counts, drafts.parents, drafts.depths)
            positions = first[owner] + depths  # K/V slots follow one another, positions follow the branch.
        arrays: dict[str, NDArray[np.generic]] = {
            "tokens": row_tokens,
            "positions": positions,
            "kv_slots": kv_slots,
            "query_offsets": offsets,
            "context_lens": contexts,
            "block_tables": block_tables,
        }
        sample_rows: Int64Array | None = None  # all
        sample_slots, sample_positions = row_slots, positions
        if not plain and tree_mask is None:
            sampled = positions >= table.length[row_slots] - 1  # [T]
            if not sampled.all():
                sample_rows = np.flatnonzero(sampled)
                arrays["sample_rows"] = sample_rows
                sample_slots, sample_positions = row_slots[sample_rows], positions[sample_rows]
        if self._sampling.slots is not sample_slots:
            self._sampling = _Sampling.of(table, sample_slots)
        sampling = self._sampling
        arrays["noise_keys"] = sampling.noise_keys
        arrays["noise_positions"] = sample_positions + 1 - sampling.response_start
        arrays["temperature"] = sampling.temperature
        if sampling.truncated:
            arrays["top_k"], arrays["top_p"] = sampling.top_k, sampling.top_p
        if tree_mask is not None:
            arrays["tree_mask"] = tree_mask
        step = self._buffers.upload(arrays)

        context = CachedContext(
            cache,
            step["positions"],
            step["kv_slots"],
            step["block_tables"],
            step["query_offsets"],
            step["context_lens"],
            most_rows,
            max_context,
            step.get("tree_mask"),
        )
        forward = self.model if self._fused is None else self._fused
        hidden = all_hidden = forward(step["tokens"], context)
        count = len(sample_slots)
        if not count:
            nothing = np.zeros((0, 1), np.float32)
            return Draws(np.zeros((0, 1), np.int64), nothing, nothing, hidden, offsets)
        if sample_rows is not None:
            hidden = hidden[step["sample_rows"]]
        logits = self.model.logits(hidden)
        least = self._no_cutoff[:count]
        if sampling.truncated:
            least = sampler.cutoff(logits, step["temperature"], step["top_k"], step["top_p"])
        drawn = ops.sample(logits, least, step["temperature"], step["noise_keys"], step["noise_positions"])
        if self._rejection and drafts is not None and drafts.parents is None:
            drawn = self._rejected(logits, least, step, drafts)
        tokens, logprobs, logprobs_t1 = self._to_host(*drawn)
        if draft_counts is None:
            return Draws(tokens[:, None], logprobs[:, None], logprobs_t1[:, None], all_hidden, offsets)
        widths = draft_counts[plan.samples] + 1
        filled = self._arange[: int(widths.max())] < widths[:, None]  # [R, K+1]
        spread = (_spread(tokens, filled), _spread(logprobs, filled), _spread(logprobs_t1, filled))
        return Draws(*spread, all_hidden, offsets)

    def _rejected(
        self, logits: torch.Tensor, least: torch.Tensor, step: dict[str, torch.Tensor], drafts: StepDrafts
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draws by rejection sampling in place of coupled ones, for chains; every row is drawn from."""
        widths = drafts.counts + 1
        starts, columns = widths.cumsum() - widths, self._arange[: int(widths.max())]
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

    def _to_host(
        self, tokens: torch.Tensor, logprobs: torch.Tensor, logprobs_t1: torch.Tensor
    ) -> tuple[Int64Array, NDArray[np.float32], NDArray[np.float32]]:
        if self.device.type == "cpu":
            return tokens.numpy(), logprobs.numpy(), logprobs_t1.numpy()
        # One copy for the three: float64 holds every token id and float32 exactly.
        packed = torch.stack((tokens.double(), logprobs.double(), logprobs_t1.double())).cpu().numpy()
        return packed[0].astype(np.int64), packed[1].astype(np.float32), packed[2].astype(np.float32)


def _tree(counts: Int64Array, parents: Int64Array, depths: Int64Array) -> tuple[NDArray[np.uint8], Int64Array]:
    """(mask [T, K+1]: which rows of its request each row sees; depths [T]) of the rows of R trees, roots included."""
    requests, width = parents.shape
    sees = np.zeros((requests, width + 1, width + 1), np.uint8)
    sees[:, 0, 0] = 1
    every = np.arange(requests)
    for i in range(width):
        sees[:, i + 1] = sees[every, parents[:, i] + 1]
        sees[:, i + 1, i + 1] = 1
    filled = np.arange(width + 1) <= counts[:, None]
    all_depths = np.concatenate((np.zeros((requests, 1), np.int64), depths), axis=1)
    return sees[filled], all_depths[filled]


def _spread(flat: NDArray[Any], filled: NDArray[np.bool_]) -> NDArray[Any]:
    """Values of the True places of `filled`, row by row, in an array of its shape."""
    spread = np.zeros(filled.shape, flat.dtype)
    spread[filled] = flat
    return spread
