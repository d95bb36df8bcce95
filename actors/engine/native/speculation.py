"""Asks the policy, then the drafter, and makes what it answers safe to verify. Owns the drafters and the policy.

A draft may be anything: what is malformed, too long or outside the vocabulary is cut off here. A drafter that raises is
heard once in the log and never asked again. Tokens never depend on any of it (`verify`).
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from actors.engine.native.hidden import HiddenStore
from actors.engine.native.scheduler import Scheduler, StepPlan
from actors.engine.native.slots import SlotTable
from actors.engine.native.verify import CleanDrafts, clean_drafts
from drafter.protocol import BatchView, Drafter, Drafts, KVPlaces
from policies.speculation.policy import StrategyPolicy
from policies.speculation.strategy import PLAIN, Strategy

Int64Array = NDArray[np.int64]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """Drafts of one step, already behind the last known tokens in the token table."""

    counts: Int64Array  # [R], per request of the plan
    tokens: Int64Array  # [S, K], of the plan's sampling requests, padded with -1
    parents: Int64Array | None  # [S, K]; None: chains. Trees only where every request of the plan decodes.
    depths: Int64Array | None  # [S, K], with parents
    distributions: Tensor | None = None  # [S, K, V]
    drafted: int = 0

    @property
    def reached(self) -> Int64Array:
        """How deep the draft of each sampling request is, [S]."""
        kept = self.tokens >= 0
        depths: Int64Array = kept.sum(axis=1) if self.depths is None else (kept * self.depths).max(axis=1)
        return depths


class Speculator:
    """Turns a plan into a strategy and drafts, or None: then the step is plain decoding."""

    def __init__(
        self,
        table: SlotTable,
        vocab_size: int,
        drafters: Mapping[str, Drafter],
        policy: StrategyPolicy | None,
        *,
        rejection: bool = False,
        hidden: HiddenStore | None = None,
        kv: KVPlaces | None = None,
    ) -> None:
        self._table, self._vocab_size, self._rejection = table, vocab_size, rejection
        self._drafters = dict(drafters)
        self._hidden, self._kv = hidden, kv
        self._history = table.tokens.view()
        self._history.flags.writeable = False
        self.draft_s = 0.0  # of the last step
        self.use(policy)

    def use(self, policy: StrategyPolicy | None) -> None:
        self.policy = policy
        self._max_nodes = 0 if policy is None else policy.max_nodes

    # What drafters are told. Costs nothing where there are none.

    @property
    def has_drafters(self) -> bool:
        return bool(self._drafters)

    def begin(self, slot: int) -> None:
        """A request was loaded into `slot`."""
        prompt, length = int(self._table.prompt_length[slot]), int(self._table.length[slot])
        history = self._history[slot]
        if self._hidden is not None:
            self._hidden.begin(slot)
        self._tell(lambda drafter: drafter.begin(slot, history[:prompt], history[prompt:length]))

    def end(self, slot: int, finished: bool) -> None:
        """The request in `slot` leaves it."""
        prompt, length = int(self._table.prompt_length[slot]), int(self._table.length[slot])
        history = self._history[slot]
        self._tell(lambda drafter: drafter.end(slot, history[:length], prompt, finished))

    def new_target(self, version: int) -> None:
        if self._hidden is not None:
            self._hidden.clear()
        self._tell(lambda drafter: drafter.new_target(version))

    def remember(self, prompts: list[NDArray[np.int32]], responses: list[NDArray[np.int32]]) -> None:
        self._tell(lambda drafter: drafter.remember(prompts, responses))

    def save(self, directory: str) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._tell(lambda drafter: drafter.save(directory))

    def load(self, directory: str) -> None:
        self._tell(lambda drafter: drafter.load(directory))

    def _tell(self, call: Callable[[Drafter], None]) -> None:
        for name, drafter in list(self._drafters.items()):
            try:
                call(drafter)
            except Exception:
                self._give_up(name)

    def _give_up(self, name: str) -> None:
        _log.exception("drafter %s failed and is not used again; decoding goes on", name)
        self._drafters.pop(name, None)
        if self.policy is not None:
            self.policy.unavailable(name)

    # A step.

    def choose(self, running: int) -> Strategy:
        """The strategy of a step in which `running` requests decode."""
        if self.policy is None or not running:
            return PLAIN
        strategy = self.policy.choose(running)
        if strategy.depth and strategy.drafter not in self._drafters:
            self.policy.unavailable(strategy.drafter)
            return PLAIN
        return strategy

    def draft(self, plan: StepPlan, strategy: Strategy, scheduler: Scheduler) -> StepDrafts | None:
        """Drafts by the strategy, at most what fits the KV cache; None where there is nothing to verify.

        Beside prompt chunks there are no trees and no drafts with probabilities.
        """
        self.draft_s = 0.0
        if strategy.depth == 0 or (plan.prefill_tokens and (strategy.is_tree or self._rejection)):
            return None
        start_s = perf_counter()
        drafts = self._draft(plan, strategy, scheduler)
        self.draft_s = perf_counter() - start_s
        return drafts

    def _draft(self, plan: StepPlan, strategy: Strategy, scheduler: Scheduler) -> StepDrafts | None:
        table, drafter = self._table, self._drafters[strategy.drafter]
        slots = plan.slots
        if plan.prefill_tokens:  # A request still in its prompt has nothing to speculate on.
            decoding = (plan.rows == 1) & plan.samples  # [R]
            slots = slots[decoding]
        try:
            answer = drafter.propose(self._view(slots, drafter.needs_hidden), strategy)
            clean = clean_drafts(
                answer.tokens,
                answer.counts,
                answer.parents,
                len(slots),
                strategy.depth,
                min(strategy.tokens_to_verify, self._max_nodes),
                self._vocab_size,
            )
        except Exception:
            self._give_up(strategy.drafter)
            return None
        if clean is None or (plan.prefill_tokens and clean.parents is not None):
            return None
        counts = scheduler.reserve_drafts(slots, clean.counts)
        if not counts.any():
            return None
        clean = clean.cut(counts)
        width = clean.tokens.shape[1]
        kept = clean.tokens >= 0
        places = table.length[slots][:, None] + np.arange(width)
        table.tokens[slots.repeat(counts), places[kept]] = clean.tokens[kept]
        drafted = int(counts.sum())
        if not plan.prefill_tokens:
            distributions = self._distributions(answer, clean) if self._rejection else None
            return StepDrafts(counts, clean.tokens, clean.parents, clean.depths, distributions, drafted)
        all_counts = np.zeros(len(plan.slots), np.int64)
        all_counts[decoding] = counts
        tokens = np.full((len(plan.slots), width), -1, np.int64)
        tokens[decoding] = clean.tokens
        return StepDrafts(all_counts, tokens[plan.samples], None, None, None, drafted)

    def _distributions(self, answer: Drafts, clean: CleanDrafts) -> Tensor | None:
        """What the drafted tokens were drawn with, cut like the drafts."""
        given = answer.distributions
        requests, width = clean.tokens.shape
        if given is None or clean.parents is not None:
            return None
        if given.ndim != 3 or len(given) != requests or given.shape[1] < width or given.shape[2] != self._vocab_size:
            return None
        return given[:, :width]

    def _view(self, slots: Int64Array, needs_hidden: bool) -> BatchView:
        table = self._table
        lengths = table.length[slots]
        return BatchView(
            request_ids=table.request_id[slots],
            prompt_ids=table.prompt_id[slots],
            slots=slots.copy(),
            history=self._history,
            lengths=lengths,
            prompt_lengths=table.prompt_length[slots],
            noise_keys=table.noise_key[slots],
            temperatures=table.temperature[slots],
            vocab_size=self._vocab_size,
            top_k=table.top_k[slots],
            top_p=table.top_p[slots],
            room=table.limit[slots] - lengths - 1,
            hidden=self._hidden if needs_hidden else None,
            kv=self._kv if needs_hidden else None,
        )
