"""EAGLE as a Drafter: catches up with the target's hidden states, then drafts chains or trees, batched over requests.

Owns its network, its K/V and the record of positions seen. It starts a request from the hidden states that the engine
still keeps: one drafter-only pass, never a prefill of the target. Coupled drafts (docs/concepts/drafters.md) use the
same noise as the target's draws, so an accurate drafter is accepted nearly as often as rejection sampling allows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.catalogue import FRESH_WEIGHTS
from config.speculation import EagleOptions
from config.strategy import Strategy
from drafter.eagle.cache import IDLE, CachePlaces, EagleCache, EagleContext
from drafter.eagle.device import DeviceDrafts
from drafter.eagle.files import eagle_at, save_eagle
from drafter.eagle.fused import fused_passes
from drafter.eagle.model import Drafting, draft_logits
from drafter.eagle.tree import TreeNodes, best_nodes, best_of_level, grown_mask
from drafter.eagle.work import Work
from drafter.protocol import BatchView, Drafter, Drafts, GraphCapture
from drafter.published import EagleWeightsError
from models import ops
from models.transformer import Projection, Transformer

Int64Array = NDArray[np.int64]
MAX_FED_ROWS = 64  # drafted rows of a request for which the cache has room


@dataclass(frozen=True, slots=True, kw_only=True)
class _DraftBatch:
    """The requests of some work, for operations on CPU tensors."""

    index: Int64Array  # [R'], their places in the batch
    lengths: Int64Array
    places: CachePlaces
    keys: Tensor  # int64 [R']
    noise_positions: Int64Array  # [R'], of the next token
    temperatures: Tensor
    top_k: Tensor
    top_p: Tensor
    truncated: bool

    @classmethod
    def of(cls, work: Work) -> "_DraftBatch":
        return cls(
            index=work.index,
            lengths=work.lengths,
            places=work.places,
            keys=torch.from_numpy(work.keys),
            noise_positions=work.noise_positions,
            temperatures=torch.from_numpy(work.temperatures),
            top_k=torch.from_numpy(work.top_k),
            top_p=torch.from_numpy(work.top_p),
            truncated=work.truncated,
        )


# Tokens and, for trees, parents [R', K]; the number worth verifying [R']; the distributions of sampled chains [R', K,
# V].
_Found = tuple[Int64Array, Int64Array | None, Int64Array, Tensor | None]


def _nothing(work: Work) -> _Found:
    requests = len(work.index)
    return np.zeros((requests, 0), np.int64), None, np.zeros(requests, np.int64), None


class EagleDrafter(Drafter):
    """Drafts for `target`, whose embedding and head it uses in place.

    hidden_layers: layers of the target (from 0) whose outputs it needs in the rows of `BatchView.hidden`, before the
    final state. EAGLE needs none, EAGLE-3 three.
    coupled: drafts use the target's own noise; otherwise they follow the drafter's confidence, as in the paper.
    sampled: chains are drawn from the drafter's distribution, which is also returned (for rejection sampling).
    on_device: drafts are computed without the host in between (`DeviceDrafts`); by default on a GPU.
    max_tokens: of a sequence; default: the target's limit, or the cache's.
    tree_scale: s of the scores softmax((logits/T + G)/s), which rank a tree's nodes and end a chain.
    Raises EagleWeightsError if `options.path` holds no drafter for this target.
    """

    name = "eagle"
    needs_hidden = True
    trained = True

    def __init__(
        self,
        target: Transformer,
        options: EagleOptions,
        slots: int,
        blocks: int,
        block_tokens: int,
        *,
        seed: int = 0,
        coupled: bool = True,
        sampled: bool = False,
        tree_scale: float = 1.0,
        on_device: bool | None = None,
        max_tokens: int | None = None,
    ) -> None:
        parameter = target.embed_tokens.weight
        self._target, self._device = target, parameter.device
        self._coupled, self._sampled, self._scale = coupled, sampled, tree_scale if coupled else 1.0
        self._min_probability = options.min_probability
        model = eagle_at(
            options.path or FRESH_WEIGHTS,
            target.config,
            seed,
            dtype=parameter.dtype,
            device=self._device,
            batch_invariant=target.batch_invariant,
        )
        self.model: Drafting = model.requires_grad_(False)
        self.hidden_layers = self.model.layers
        self.version, self.captured = 0, False
        self._path_tokens = 1  # most tokens that a request's last step can have added
        self._cache = EagleCache(
            self.model.block.config, slots, blocks, block_tokens, MAX_FED_ROWS, parameter.dtype, self._device
        )
        self._last_position = target.config.max_position_embeddings - 1
        self._pack()
        self._fused = fused_passes(self.model, target)
        self._on_device: DeviceDrafts | None = None
        if self._device.type == "cuda" if on_device is None else on_device:
            if max_tokens is None:
                max_tokens = min(target.config.max_position_embeddings, blocks * block_tokens + 1)
            self._on_device = DeviceDrafts(
                self.model,
                target,
                self._cache,
                self._cache.columns(max_tokens),
                MAX_FED_ROWS,
                noise=coupled,
                sampled=sampled,
                scale=self._scale,
            )

    def plan_graphs(
        self, drafts: Sequence[tuple[int, Strategy]], graph_capture: GraphCapture, truncated: bool = False
    ) -> None:
        """See `Drafter.plan_graphs`."""
        if self._on_device is not None:
            self._on_device.plan(drafts, graph_capture, truncated)

    def update(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Load other weights of the same network in place, between two engine steps. Drops the cache of the old ones.
        Raises EagleWeightsError, before anything changed, if names or shapes are not the network's."""
        own = self.model.state_dict()
        if {name: tensor.shape for name, tensor in own.items()} != {name: t.shape for name, t in tensors.items()}:
            raise EagleWeightsError(
                f"drafter weights version {version} are not those of {self.model.kind} for this target: "
                "drafter.algorithm and rollout.speculation.eagle.path disagree"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])
        self.version = version
        self._pack()
        if self._fused is not None:
            self._fused.refresh()
        self._cache.reset()

    def begin(self, slot: int, prompt_tokens: NDArray[np.int32], response_tokens: NDArray[np.int32]) -> None:
        self._cache.reset(slot)

    def end(self, slot: int, tokens: NDArray[np.int32], prompt_length: int, finished: bool) -> None:
        self._cache.reset(slot)

    def new_target(self, version: int) -> None:
        """Drop its K/V, which came from hidden states of the old target."""
        self._cache.reset()

    def save(self, directory: str) -> None:
        save_eagle(self.model, f"{directory}/eagle")

    def load(self, directory: str) -> None:
        """Do nothing: the weights come with the options or by `update`, and an older copy must not replace them."""

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        """See `Drafter.propose`. Requests without kept states get no draft; no path is longer than MAX_FED_ROWS + 1."""
        shape = (len(batch.slots), strategy.tokens_to_verify)
        tokens, counts = np.zeros(shape, np.int64), np.zeros(shape[0], np.int64)
        parents = np.full(shape, -1, np.int64) if strategy.is_tree else None
        distributions: Tensor | None = None
        caught_up = self.captured = False
        with torch.inference_mode():
            work = self._work(batch)
            if work is not None:
                # More tokens than its own last step can have added.
                caught_up = int(work.rows.max()) > self._path_tokens
                room = batch.room[work.index]
                depth = min(strategy.depth, int(room.max()))  # no pass whose tokens no request may draft
                if self._on_device is None:
                    drawn, before, useful, soft = self._on_host(work, strategy, depth)
                    if soft is not None:
                        distributions = soft.new_zeros((*shape, soft.shape[2]))
                        distributions[torch.from_numpy(work.index), : soft.shape[1]] = soft
                else:
                    drawn, before, useful, distributions, self.captured = self._by_device(batch, work, strategy, depth)
                tokens[work.index, : drawn.shape[1]] = drawn
                counts[work.index] = np.minimum(useful, room)
                if parents is not None and before is not None:
                    parents[work.index, : before.shape[1]] = before
        self._path_tokens = strategy.depth + 1
        return Drafts(tokens, counts, parents, distributions, caught_up)

    def _on_host(self, work: Work, strategy: Strategy, depth: int) -> _Found:
        hidden, batch = self._caught_up(work), _DraftBatch.of(work)
        if depth <= 0:
            return _nothing(work)
        if strategy.is_tree:
            return *self._tree(batch, hidden, strategy, depth), None
        return self._chain(batch, hidden, min(depth, MAX_FED_ROWS + 1))  # the last token is not fed

    # Catching up.

    def _work(self, batch: BatchView) -> Work | None:
        """Return the requests with kept states, and the positions computed by the target since; None if
        there are none."""
        cache, slots, lengths = self._cache, batch.slots, batch.lengths
        if batch.hidden is None or batch.kv is None:
            raise RuntimeError("the engine keeps no hidden states: an EAGLE drafter must be there from its start")
        started = cache.start[slots] != IDLE
        wanted = np.where(started, np.minimum(cache.known[slots], lengths - 2), 0)
        kept = batch.hidden.last(slots, wanted)
        available = np.diff(kept.offsets)
        first = lengths - 1 - available  # position of the first kept state
        going_on = started & (first <= wanted)
        usable = available > 0
        cache.start[slots] = np.where(usable, np.where(going_on, cache.start[slots], first), IDLE)
        index = np.flatnonzero(usable)
        if not len(index):
            return None
        cache.known[slots[index]] = lengths[index] - 1

        rows = available[index]  # [R'] >= 1
        owner = np.repeat(np.arange(len(index)), rows)
        positions = np.arange(len(owner)) - (rows.cumsum() - rows)[owner] + first[index][owner]
        places = cache.places(batch.kv, slots[index], lengths[index])
        return Work(
            index=index,
            lengths=lengths[index],
            places=places,
            rows=rows,
            kept=kept,
            tokens=batch.history[slots[index][owner], positions + 1].astype(np.int64),
            positions=positions,
            slots=places.slots(owner, positions - places.start[owner]),
            keys=batch.noise_keys[index],
            noise_positions=lengths[index] - batch.prompt_lengths[index],
            temperatures=batch.temperatures[index],
            top_k=batch.top_k[index],
            top_p=batch.top_p[index],
        )

    def _caught_up(self, work: Work) -> Tensor:
        """Feed those positions. Returns the output of each request's last one, [R', H]."""
        context = self._cache.context(work.places, work.positions, work.slots, work.rows, work.places.committed)
        out = self._forward(work.tokens, self.model.features(work.kept.rows), context)
        if len(work.tokens) == len(work.index):
            return out
        return out[torch.from_numpy(work.rows.cumsum() - 1).to(self._device)]

    # Drafting.

    def _by_device(self, batch: BatchView, work: Work, strategy: Strategy, depth: int) -> tuple[*_Found, bool]:
        """Draft by passes that feed each other. Also returns distributions of all requests [R, depth, V], and whether a
        graph had to be captured. Always to full depth: tokens without room are not verified."""
        drafts = self._on_device
        assert drafts is not None
        if depth <= 0:
            drafts.catch_up(work)
            return *_nothing(work), False
        found = drafts.draft(work, strategy, len(batch.slots))
        if strategy.is_tree:
            useful = np.isfinite(found.scores).sum(axis=1)
        elif found.soft is not None:
            useful = np.full(len(work.index), found.tokens.shape[1])
        else:
            useful = self._sure(found.scores)
        return found.tokens, found.parents, useful, found.soft, found.captured

    def _chain(self, batch: _DraftBatch, hidden: Tensor, depth: int) -> _Found:
        """Draft a chain. All tokens of sampled chains are verified, since the choice must not depend on
        what was drawn."""
        if self._sampled:
            drawn, soft = self._sampled_chain(batch, hidden, depth)
            return drawn, None, np.full(len(batch.index), depth), soft
        if self._fused is not None and not batch.truncated:
            tokens, scores = self._fused.chain(
                hidden,
                depth,
                self._there(batch.lengths - 1),
                self._there(batch.places.committed),
                self._cache.keys,
                self._cache.values,
                self._there(batch.places.tables),
                batch.places.block_tokens,
                self._temperatures(batch).float(),
                batch.keys,
                self._there(batch.noise_positions),
                scale=self._scale,
                noise=self._coupled,
            )
            return tokens.numpy(), None, self._sure(scores.numpy()), None
        levels = []
        for step in range(depth):
            levels.append(self._top(batch, hidden, 1, batch.noise_positions + step))
            if step + 1 < depth:
                hidden = self._advance(batch, levels[-1][0][:, 0], hidden, step)
        tokens_, scores_ = (np.concatenate(each, axis=1) for each in zip(*levels, strict=True))
        return tokens_, None, self._sure(scores_), None

    def _sure(self, scores: NDArray[np.float32]) -> Int64Array:
        """Turn log-probabilities [R', depth] into the number of leading tokens likely to be the target's own, [R'], at
        least one. Scores include the noise: what it decides clearly, a slightly different target also draws."""
        likely = np.exp(scores.cumsum(axis=1)) >= self._min_probability
        counts: Int64Array = np.maximum(likely.sum(axis=1), 1)
        return counts

    def _sampled_chain(self, batch: _DraftBatch, hidden: Tensor, depth: int) -> tuple[Int64Array, Tensor]:
        drawn, soft = [], []
        for step in range(depth):
            logits = draft_logits(self.model, self._target, self.model.readout(hidden))
            cutoff = self._cutoff(logits, batch, 1)
            noise_positions = self._there(batch.noise_positions + step)
            tokens, _, _ = ops.sample(logits, cutoff, batch.temperatures, batch.keys, noise_positions)
            drawn.append(tokens.cpu().numpy())
            soft.append(_distribution(logits, cutoff, batch.temperatures))
            if step + 1 < depth:
                hidden = self._advance(batch, drawn[-1], hidden, step)
        return np.stack(drawn, axis=1), torch.stack(soft, dim=1)

    def _advance(self, batch: _DraftBatch, tokens: Int64Array, hidden: Tensor, step: int) -> Tensor:
        """Return the features after the `step`-th drafted token of each request, [R', H]."""
        requests, ones = np.arange(len(batch.index)), np.ones(len(batch.index), np.int64)
        local = batch.places.committed + step
        position = np.minimum(batch.lengths - 1 + step, self._last_position)
        context = self._cache.context(batch.places, position, batch.places.slots(requests, local), ones, local + 1)
        return self._forward(tokens, hidden, context)

    def _tree(
        self, batch: _DraftBatch, hidden: Tensor, strategy: Strategy, depth: int
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return `best_nodes` of a tree of `depth` levels. Every level feeds all rows again, with the tree's mask. A
        one-layer pass reads its weights once for any number of rows, and K/V need not follow the branches."""
        requests, k = len(batch.index), strategy.top_k
        tokens, scores = self._top(batch, hidden, k, batch.noise_positions)
        k = tokens.shape[1]
        nodes = TreeNodes(tokens, np.full_like(tokens, -1), scores)
        mask = np.zeros((requests, 0, 0), np.bool_)
        fed_tokens = np.zeros((requests, 0), np.int64)
        fed_hidden = hidden[:, None][:, :0]
        fed_depths = np.zeros(0, np.int64)
        outputs = hidden[:, None]  # [R', rows, H], of the rows fed so far
        every = np.arange(requests)[:, None]
        first = 0
        for level in range(1, depth):
            if mask.shape[1] + k > MAX_FED_ROWS:
                break
            best, parent_rows = best_of_level(nodes, first, k, mask.shape[1])
            mask = grown_mask(mask, parent_rows)
            fed_tokens = np.concatenate((fed_tokens, nodes.tokens[every, best]), axis=1)
            parents = self._there(np.maximum(parent_rows, 0))
            fed_hidden = torch.cat((fed_hidden, outputs[self._there(every), parents]), dim=1)
            fed_depths = np.concatenate((fed_depths, np.full(k, level)))
            outputs = self._feed_tree(batch, fed_tokens, fed_hidden, fed_depths, mask)
            newest = outputs[:, -k:].reshape(requests * k, -1)
            tokens, scores = self._top(batch, newest, k, np.repeat(batch.noise_positions + level, k))
            first = nodes.tokens.shape[1]
            scores = scores.reshape(requests, k, k) + nodes.scores[every, best][:, :, None]
            nodes = nodes.extended(
                tokens.reshape(requests, k * k),
                np.repeat(best, k, axis=1),
                scores.reshape(requests, k * k).astype(np.float32),
            )
        return best_nodes(nodes, strategy.tokens_to_verify)

    def _feed_tree(
        self, batch: _DraftBatch, tokens: Int64Array, hidden: Tensor, depths: Int64Array, mask: NDArray[np.bool_]
    ) -> Tensor:
        """Feed rows [R', F] of the tree, each attending to its ancestors. Returns their outputs [R', F, H]."""
        requests, fed = tokens.shape
        owner = np.repeat(np.arange(requests), fed)
        local = (batch.places.committed[:, None] + np.arange(fed)).reshape(-1)
        position = np.minimum(batch.lengths[:, None] - 2 + depths, self._last_position).reshape(-1)
        context = self._cache.context(
            batch.places,
            position,
            batch.places.slots(owner, local),
            np.full(requests, fed, np.int64),
            batch.places.committed + fed,
            mask.reshape(requests * fed, fed).astype(np.uint8),
        )
        return self._forward(tokens.reshape(-1), hidden.flatten(0, 1), context).view(requests, fed, -1)

    def _top(
        self, batch: _DraftBatch, hidden: Tensor, k: int, noise_positions: Int64Array
    ) -> tuple[Int64Array, NDArray[np.float32]]:
        """Return the k best next tokens of each row and their log-probabilities, [rows, k]."""
        logits = draft_logits(self.model, self._target, self.model.readout(hidden))
        each = len(noise_positions) // len(batch.index)
        tokens, scores = ops.sample_topk(
            logits,
            self._cutoff(logits, batch, each),
            self._temperatures(batch).repeat_interleave(each),
            batch.keys.repeat_interleave(each),
            self._there(noise_positions),
            min(k, logits.shape[1] if self.model.ids is None else len(self.model.ids)),
            scale=self._scale,
            noise=self._coupled,
        )
        return tokens.cpu().numpy(), scores.cpu().numpy()

    # Helpers.

    def _forward(self, tokens: Int64Array, hidden: Tensor, context: EagleContext) -> Tensor:
        if self._fused is not None:
            return self._fused.forward(
                self._there(tokens),
                hidden,
                context.positions,
                context.kv_slots,
                context.keys,
                context.values,
                context.block_tables,
                context.query_offsets,
                context.context_lens,
                context.block_tokens,
                context.tree_mask,
            )
        rotation = (self.model.rope or self._target.rope).at(context.positions)
        embedded = self._target.embed_tokens(self._there(tokens))
        return self.model.advance(embedded, hidden, rotation, context)

    def _temperatures(self, batch: _DraftBatch) -> Tensor:
        """Return the draw temperatures. Without coupling a chain is the most probable one: the draw at
        temperature 0."""
        return batch.temperatures if self._coupled or self._sampled else torch.zeros_like(batch.temperatures)

    def _cutoff(self, logits: Tensor, batch: _DraftBatch, each: int) -> Tensor:
        if not batch.truncated:
            return torch.full((logits.shape[0],), -torch.inf, device=self._device)
        settings = (x.repeat_interleave(each) for x in (batch.temperatures, batch.top_k, batch.top_p))
        return ops.cutoff(logits, *settings)

    def _there(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def _pack(self) -> None:
        for module in self.model.modules():
            if isinstance(module, Projection):
                ops.prepack(module.weight)


def _distribution(logits: Tensor, cutoff: Tensor, temperatures: Tensor) -> Tensor:
    """Return the distribution of a sampled token, float32 [R, V]; at temperature 0 it is one-hot on the best token."""
    wide = logits.float()
    greedy = temperatures == 0
    scaled = (wide / torch.where(greedy, 1.0, temperatures)[:, None]).masked_fill(wide < cutoff[:, None], -torch.inf)
    one_hot = torch.nn.functional.one_hot(wide.argmax(1), wide.shape[1]).float()
    return torch.where(greedy[:, None], one_hot, scaled.softmax(1))
