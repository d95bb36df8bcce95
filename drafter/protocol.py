"""The interface between an engine and its drafters. Owns the data types; never drafts, never verifies.

The engine checks everything that a drafter returns: a draft can only make a step slower, never change a token.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.strategy import Strategy
from models.transformer import Transformer

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """Target outputs at consecutive positions, packed by request: rows as in `contracts.records`. Those of request r
    are rows offsets[r]:offsets[r+1], for positions lengths[r] - 1 - n .. lengths[r] - 2 (n rows; 0 if none is kept).
    They are rows index[t] of the source. Nothing is copied before it is gathered, so that the index can go to a GPU
    with a drafter's other uploads."""

    sources: tuple[Tensor, ...]  # each [., width], concatenated; the target's dtype and device
    index: Int64Array  # [T]
    offsets: Int64Array  # [R + 1]

    def source(self) -> Tensor:
        """Return [., width], from which `index` picks rows."""
        return self.sources[0] if len(self.sources) == 1 else torch.cat(self.sources)

    @property
    def rows(self) -> Tensor:
        """[T, width]; on a GPU the host waits for it."""
        source = self.source()
        return source.index_select(0, torch.from_numpy(self.index).to(source.device))


class HiddenSource(Protocol):
    """Hidden states of the last verified tokens of running requests, kept by the engine."""

    def last(self, slots: Int64Array, first_positions: Int64Array) -> HiddenRows:
        """Return the kept states of each slot from `first_positions` on; fewer if fewer are kept, without gaps."""

    def begin(self, slot: int) -> None:
        """Another request takes `slot`, and nothing of it is kept yet."""
        return

    def clear(self) -> None:
        """Drop all states, since the target's weights have changed."""
        return


@dataclass(frozen=True, slots=True)
class KVPlaces:
    """Where a drafter with a KV cache of its own may write: the target's block tables, valid for positions 0 to lengths
    - 1 of each slot. Blocks of a shared prompt are shared here too."""

    block_tables: NDArray[np.int32]  # [slots, M], all slots
    block_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchView:
    """The R decoding requests of this engine step, as read-only arrays. Valid only inside `propose`."""

    request_ids: Int64Array  # [R]
    prompt_ids: Int64Array  # [R]
    slots: Int64Array  # [R], rows of `history`
    history: NDArray[np.int32]  # [slots, max_tokens]; prompt and response of request r: history[slots[r], :lengths[r]]
    lengths: Int64Array  # [R], tokens known (prompt and response)
    prompt_lengths: Int64Array  # [R], of the prompts passed to `begin`
    # [R]; the token after `lengths[r]` is drawn with noise position lengths - prompt_lengths. With `verification:
    # rejection` they are other keys, for the drafter's own draws.
    noise_keys: Int64Array
    temperatures: NDArray[np.float32]  # [R]
    vocab_size: int
    top_k: Int64Array  # [R], 0 is off
    top_p: NDArray[np.float32]  # [R], 1 is off
    # [R], the most tokens to draft: what the request's limit leaves, or its budget; for a drafter that `shares_kv` also
    # what the request's KV blocks hold
    room: Int64Array
    hidden: HiddenSource | None = None  # only for drafters with `needs_hidden`
    kv: KVPlaces | None = None  # only for drafters with `needs_hidden`


@dataclass(frozen=True, slots=True)
class Drafts:
    """Proposed continuations: request r may continue with tokens[r, :counts[r]], a chain or a tree.

    Tree: parents[r, i] < i is the node before node i, -1 the last known token; siblings are distinct. The engine keeps
    the nodes up to the first unusable one, so put the most probable first.
    """

    tokens: Int64Array  # [R, K]
    counts: Int64Array  # [R], 0 <= counts <= K; 0: nothing to propose
    parents: Int64Array | None = None  # [R, K]; None: chains
    # Probabilities that each node was drawn with, over the whole vocabulary, float32 [R, K, V]: only for `verification:
    # rejection` of sampled chains. None: the tokens were chosen, not sampled (one-hot).
    distributions: Tensor | None = field(default=None)
    caught_up: bool = False  # the drafter first processed text that it had skipped


Replay = Callable[[], None]


class GraphCapture(Protocol):
    """Captures work on tensors whose addresses stay."""

    def record(self, compute: Callable[[], None]) -> Replay:
        """Run `compute` to warm up and return a function that repeats it on the present contents of its tensors."""

    def reset(self) -> None:
        """Start a new shared memory pool, since some replays are no longer used. Other replays stay valid."""


class TargetPasses(Protocol):
    """Passes of a copy of the target over the target's own KV cache, for the requests of a batch."""

    captured: bool  # a graph was captured in the last `chain`

    def chain(
        self, copy: Transformer, batch: BatchView, depth: int, *, logits: bool = False
    ) -> tuple[Int64Array, Tensor | None]:
        """Draw from `copy` token after token, from the last known one on. Returns tokens [R, depth]; request r has the
        first min(room[r], depth), then -1. With `logits`, also what they were drawn from, [R, depth, V] of any float
        dtype on the target's device: -inf where top-k or top-p exclude a token, undefined after a request's tokens.

        The draw after position p has the noise of the batch's keys at the noise position of the target's draw there.
        Writes K/V of the positions lengths - 1 .. lengths + counts - 2. They are provisional: the target computes those
        positions itself before it reads them. `copy` has the target's configuration; its weights may change in place
        between calls.
        """

    def plan_graphs(
        self,
        copy: Transformer,
        drafts: Sequence[tuple[int, Strategy]],
        graph_capture: GraphCapture,
        truncated: bool = False,
    ) -> None:
        """As `Drafter.plan_graphs`, of chains by `copy`. Nothing on a CPU."""


class Drafter(ABC):
    """Proposes tokens that may follow each request's history. Lives in the engine's process and thread.

    Called for every request: `begin` when it takes a slot, `end` when it leaves. `propose` is called only for the
    steps whose strategy names the drafter: it catches up with what `history` gained since its last call. All methods
    but `propose` do nothing here.
    """

    name: str = ""
    needs_hidden: bool = False
    trained: bool = False  # it has weights that are trained while it runs, on what the target computes: `update`
    hidden_layers: tuple[int, ...] = ()  # target layers (from 0) whose outputs it needs before the final state in a row
    # It computes over the target's KV cache: blocks of what it may draft are reserved before `propose`, and it is not
    # used where the engine lends none.
    shares_kv: bool = False
    captured: bool = False  # a graph was captured in the last `propose`, which takes many times a draft

    def begin(self, slot: int, prompt_tokens: NDArray[np.int32], response_tokens: NDArray[np.int32]) -> None:
        """A request takes `slot`.

        response_tokens: tokens behind its prompt, already sampled before it was re-issued, or an episode's earlier
        turns with their observations."""
        return

    def end(self, slot: int, tokens: NDArray[np.int32], prompt_length: int, finished: bool) -> None:
        """The request leaves `slot`.

        tokens: prompt and response; those of its own turn begin at `prompt_length`. Not `finished`: it was preempted or
        aborted."""
        return

    @abstractmethod
    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        """Return at most strategy.tokens_to_verify tokens per request of the batch, in paths of at most strategy.depth.

        If it raises, the engine continues without this drafter."""

    def new_target(self, version: int) -> None:
        """The target's weights changed in place to `version`, or the engine starts with it."""
        return

    def remember(self, prompts: list[NDArray[np.int32]], responses: list[NDArray[np.int32]]) -> None:
        """Add rollouts that other workers finished."""
        return

    def hear(self, slot: int, request_id: int, first: int, response: NDArray[np.int32]) -> None:
        """Tokens from number `first` on of the response of another worker's request, whose prompt is that of `slot`."""
        return

    def sibling_gain(self) -> tuple[int, int, int]:
        """Return, of a sample of drafts since the last call: their number, how many of their tokens were accepted, and
        how many would have been without siblings under way."""
        return 0, 0, 0

    def accepted_from(self) -> Mapping[str, int]:
        """Return drafted tokens that were accepted since the last call, by where the drafter found them; empty where
        that is not known."""
        return {}

    def save(self, directory: str) -> None:
        """Write the state that would be lost with the process, if there is any."""
        return

    def load(self, directory: str) -> None:
        """Restore the state of `save`. A missing or unreadable file is a warning and changes nothing."""
        return

    def attach(self, target: TargetPasses) -> None:
        """Receive the target's passes, if `shares_kv`. Called once, before drafting and before graphs are planned."""
        return

    def update(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Load other weights of the same network in place, between two engine steps, if `trained`.

        Raises ValueError before any change if they do not fit the network."""
        return

    def plan_graphs(
        self, drafts: Sequence[tuple[int, Strategy]], graph_capture: GraphCapture, truncated: bool = False
    ) -> None:
        """Capture graphs for each (number of requests, strategy), the largest first, and keep them.

        truncated: some requests will have top-k or top-p, so every graph takes both. Called when the engine starts and
        when its strategies change. Replays share the memory of `graph_capture`, so results must lie outside of it. A
        failed capture means drafting without a graph. Never raises."""
        return
