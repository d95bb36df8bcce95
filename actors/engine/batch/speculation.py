"""Choose a strategy by the policy, draft, and make the drafts safe to verify. Owns the drafters and the policy.

Drafts are untrusted: malformed, too long or out-of-vocabulary parts are cut off here. A drafter that raises is disabled
and reported to the driver; new weights re-enable a trained one, until `MAX_FAILURES` failures. None of this affects the
sampled tokens (`verify`).
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.engine.batch.budgeting import Budgeting
from actors.engine.batch.plan import PromptEntry, StepPlan
from actors.engine.batch.siblings import SiblingTexts
from actors.engine.batch.slots import SlotTable
from actors.engine.batch.step.build import StepArrays
from actors.engine.batch.step.types import Int64Array, StepDrafts
from actors.pacing import Pacer
from config.strategy import PLAIN, Strategy
from contracts.engine import SiblingText
from contracts.rollout import DrafterFailed, Event
from drafter.protocol import (
    BatchView,
    Drafter,
    Drafts,
    GraphCapture,
    HiddenSource,
    KVPlaces,
    TargetPasses,
)
from models import weights
from models.manifest import WeightsManifest
from policies.speculation.budget import DraftBudget
from policies.speculation.policy import StrategyPolicy
from policies.speculation.rest import Rest, may_rest
from policies.steps import NO_REQUESTS, Load

_log = logging.getLogger(__name__)
# Rejection sampling draws with the request's noise wherever nothing was drafted, so drafts must use other noise.
_OTHER_NOISE = 0x5DEECE66D
MAX_FAILURES = 3  # of one drafter; then it stays disabled even with new weights


Reserve = Callable[[Int64Array, Int64Array], Int64Array]  # slots, counts [R] -> the counts that fit the KV cache


@dataclass(frozen=True, slots=True)
class _Requests:
    """The constant part of a BatchView, kept while the scheduler keeps its array of slots."""

    slots: Int64Array
    fixed: dict[str, Any]

    @classmethod
    def of(cls, table: SlotTable, slots: Int64Array, other_noise: int) -> "_Requests":
        fixed: dict[str, Any] = {
            "request_ids": table.request_id[slots],
            "prompt_ids": table.prompt_id[slots],
            "slots": slots.copy(),
            "prompt_lengths": table.noise_origin[slots],
            "noise_keys": table.noise_key[slots] ^ other_noise,
            "temperatures": table.temperature[slots],
            "top_k": table.top_k[slots],
            "top_p": table.top_p[slots],
        }
        for array in fixed.values():
            array.flags.writeable = False
        return cls(slots, fixed)


class Speculator:
    """Turns a plan into a strategy and drafts, or None for plain decoding."""

    def __init__(
        self,
        table: SlotTable,
        steps: StepArrays,
        vocab_size: int,
        device: torch.device,
        drafters: Mapping[str, Drafter],
        policy: StrategyPolicy | None,
        *,
        budget: DraftBudget | None = None,
        rejection: bool = False,
        hidden: HiddenSource | None = None,
        kv: KVPlaces | None = None,
        target: TargetPasses | None = None,
        events: list[Event] | None = None,
        timer: Callable[[], float] = perf_counter,
        pacer: Pacer | None = None,
    ) -> None:
        """`events`: where a drafter's failure is reported."""
        self._table, self._steps, self._vocab_size, self._rejection = table, steps, vocab_size, rejection
        self._device, self._drafters = device, dict(drafters)
        self._hidden, self._kv = hidden, kv
        self._timer, self._pacer = timer, pacer
        self._events: list[Event] = [] if events is None else events
        self._failed: dict[str, Drafter] = {}  # those that new weights may bring back
        self._failures: Counter[str] = Counter()
        self._slots: set[int] = set()  # slots with a request
        self._siblings = SiblingTexts()
        self._history = table.tokens.view()
        self._history.flags.writeable = False
        self._other_noise = _OTHER_NOISE if rejection else 0
        self._requests = _Requests.of(table, np.zeros(0, np.int64), self._other_noise)
        self.draft_s, self.caught_up, self.captured = 0.0, False, False  # of the last step
        # Token count and prompts of the requests in those slots.
        self._counted, self._context_tokens, self._prompt_ids = self._requests.slots, 0, NO_REQUESTS
        self._budget, self._load = Budgeting(table, budget), Load(0, 0, 0)
        self.chose_s = 0.0  # of the last step
        self.room: Int64Array | None = None  # draft limits of the last step's decoding requests, under a budget
        self.use(policy)
        for name, drafter in drafters.items():
            if drafter.shares_kv and target is None:
                del self._drafters[name]  # there is nothing that it could compute over
            elif drafter.shares_kv and target is not None:
                drafter.attach(target)

    def use(self, policy: StrategyPolicy | None) -> None:
        self.policy, self.rest = policy, Rest() if may_rest(policy) else None
        self._max_nodes = 0 if policy is None else policy.max_nodes

    @property
    def rests(self) -> bool:
        """Whether the policy is not asked, and told of a sample of the steps."""
        return self.rest is not None and self.rest.on

    # Notifications of drafters. They cost nothing without drafters.

    @property
    def has_drafters(self) -> bool:
        return bool(self._drafters or self._failed)

    def begin(self, slot: int, prompt: PromptEntry | None = None) -> None:
        """Register a request that was loaded into `slot`."""
        self._slots.add(slot)
        if self._hidden is not None:
            self._hidden.begin(slot)
        self._budget.begin(slot)
        for name, drafter in list(self._drafters.items()):
            with self._guarded(name):
                self._begin(drafter, slot)
        for text in self._siblings.of(int(self._table.prompt_id[slot])):
            self._hear(slot, text)

    def _begin(self, drafter: Drafter, slot: int) -> None:
        known, length = int(self._table.noise_origin[slot]), int(self._table.length[slot])
        history = self._history[slot]
        drafter.begin(slot, history[:known], history[known:length])

    def end(self, slot: int, finished: bool) -> None:
        """Remove the request from `slot`."""
        prompt, length = int(self._table.prompt_length[slot]), int(self._table.length[slot])
        history = self._history[slot]
        self._slots.discard(slot)
        self._budget.end(slot, finished)
        for name, drafter in list(self._drafters.items()):
            with self._guarded(name):
                drafter.end(slot, history[:length], prompt, finished)

    def new_target(self, version: int) -> None:
        if self._hidden is not None:
            self._hidden.clear()
        self._siblings.clear()
        self._budget.new_target()
        if self.policy is not None:
            self.policy.new_target()
        for name, drafter in list(self._drafters.items()):
            with self._guarded(name):
                drafter.new_target(version)

    def update(self, name: str, manifest: WeightsManifest, buffer: NDArray[np.uint8]) -> str:
        """Load new weights of a drafter; return why it could not load them, or ""."""
        failed = self._failed.get(name)
        drafter = failed or self._drafters.get(name)
        if drafter is None:
            return f"there is no drafter {name!r}, or it failed {MAX_FAILURES} times"
        if not drafter.trained:
            return f"drafter {name!r} has no weights"
        try:
            drafter.update(manifest.version, dict(weights.unpack(manifest, buffer)))
            if failed is not None:  # it received no notifications since its failure
                for slot in self._slots:
                    self._begin(failed, slot)
                self._drafters[name] = self._failed.pop(name)
                if self.rest is not None:
                    self.rest.wake()
        except (ValueError, weights.WeightsCorruptError) as error:
            return str(error)
        except Exception as error:  # its state is undefined now
            self._give_up(name, error)
            return f"drafter {name!r} failed: {error}"
        self.renewed(name)
        return ""

    def renewed(self, name: str) -> None:
        """Tell the policy that a drafter has new weights."""
        if self.policy is not None:
            self.policy.renewed(name)

    def remember(self, prompts: list[NDArray[np.int32]], responses: list[NDArray[np.int32]]) -> None:
        self._budget.remember(prompts, responses)
        for name, drafter in list(self._drafters.items()):
            with self._guarded(name):
                drafter.remember(prompts, responses)

    def hear(self, texts: Sequence[SiblingText], now_s: float) -> None:
        """Pass texts under way elsewhere to the drafters; those whose prompt has no slot yet when one begins."""
        self._siblings.count(texts, now_s)
        slots = {int(self._table.prompt_id[slot]): slot for slot in self._slots}
        for text in texts:
            if (slot := slots.get(text.prompt_id)) is None:
                self._siblings.hold(text)
            else:
                self._hear(slot, text)

    def _hear(self, slot: int, text: SiblingText) -> None:
        for name, drafter in list(self._drafters.items()):
            with self._guarded(name):
                drafter.hear(slot, text.request_id, text.first, text.tokens)

    def take_heard(self) -> tuple[int, float]:
        """Return the tokens heard of siblings elsewhere since the last call, and the sum of their delays."""
        return self._siblings.take()

    def sibling_gain(self) -> tuple[int, int, int]:
        """Return the sum of the drafters' own (Drafter.sibling_gain)."""
        total = (0, 0, 0)
        for drafter in self._drafters.values():
            drafts, accepted, without = drafter.sibling_gain()
            total = (total[0] + drafts, total[1] + accepted, total[2] + without)
        return total

    def accepted_from(self) -> Mapping[str, int]:
        """Return accepted drafted tokens since the last call, by where drafters found them."""
        found = Counter[str]()
        for drafter in self._drafters.values():
            found.update(drafter.accepted_from())
        return found

    def save(self, directory: str) -> str | None:
        """Save all drafters; return the failures, if any. No drafter is disabled, since a full disk is not its
        fault."""
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return str(error)
        failures = []
        for name, drafter in self._drafters.items():
            try:
                drafter.save(directory)
            except Exception as error:
                failures.append(f"{name}: {error}")
        try:
            self._budget.save(directory)
        except OSError as error:
            failures.append(f"lengths: {error}")
        return "; ".join(failures) or None

    def load(self, directory: str) -> None:
        self._budget.load(directory)
        for name, drafter in list(self._drafters.items()):
            with self._guarded(name):
                drafter.load(directory)

    def plan_graphs(
        self, drafts: Sequence[tuple[int, Strategy]], graph_capture: GraphCapture, truncated: bool = False
    ) -> None:
        """Let drafters that can capture their passes for these numbers of requests and strategies."""
        for name, drafter in list(self._drafters.items()):
            own = [draft for draft in drafts if draft[1].drafter == name]
            with self._guarded(name):
                drafter.plan_graphs(own, graph_capture, truncated)

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """An exception of the drafter in the block ends the drafter, not the engine."""
        try:
            yield
        except Exception as error:
            self._give_up(name, error)

    def _give_up(self, name: str, error: Exception) -> None:
        _log.exception("drafter %s failed; decoding goes on without it", name)
        drafter = self._drafters.pop(name, None) or self._failed.pop(name)
        self._failures[name] += 1
        final = not drafter.trained or self._failures[name] >= MAX_FAILURES
        if not final:
            self._failed[name] = drafter
        if self.policy is not None:
            self.policy.unavailable(name)
        self._events.append(DrafterFailed(name, f"{type(error).__name__}: {error}", final))

    # A step.

    def load_of(self, plan: StepPlan, waiting: int) -> Load:
        """Return the load of the step. While the requests are the same, `drew` keeps the token count."""
        slots = plan.decoding
        if slots is not self._counted:
            self._counted, self._context_tokens = slots, int(self._table.length[slots].sum())
            self._prompt_ids = self._table.prompt_id[slots]
            self._prompt_ids.flags.writeable = False
        self._load = Load(len(slots), waiting, self._context_tokens, self._prompt_ids)
        return self._load

    @property
    def chosen_for(self) -> Load:
        """The load of the last step; of a step with early text, of its requests without checks."""
        return self._load

    @property
    def chosen_slots(self) -> Int64Array:
        """The slots of the requests of `chosen_for`."""
        return self._counted

    def drew(self, new_tokens: int) -> None:
        """Add the step's new tokens to the count."""
        self._context_tokens += new_tokens

    def choose(self, load: Load) -> Strategy:
        """Return the strategy of a step with that load."""
        self.chose_s = 0.0
        if self.policy is None or not load.running or self.rests:
            return PLAIN
        start_s = 0.0 if self.rest is None else self._timer()
        strategy = self.policy.choose(load)
        self.chose_s = 0.0 if self.rest is None else self._timer() - start_s
        if strategy.depth and strategy.drafter not in self._drafters:
            self.policy.unavailable(strategy.drafter)
            return PLAIN
        return strategy

    def draft(self, plan: StepPlan, strategy: Strategy, reserve: Reserve) -> StepDrafts | None:
        """Draft by the strategy, at most what fits the KV cache; None if there is nothing to verify.

        A step with prompt chunks has no trees and no drafts with probabilities.
        """
        self.draft_s, self.caught_up, self.captured, self.room = 0.0, False, False, None
        if strategy.depth == 0 or (plan.prefill_tokens and (strategy.is_tree or self._rejection)):
            return None
        start_s = self._timer()
        drafts = self._draft(plan, strategy, reserve)
        if self._pacer is not None:
            self._paced(self._pacer, strategy, start_s)
        self.draft_s = self._timer() - start_s
        return drafts

    def _paced(self, pacer: Pacer, strategy: Strategy, start_s: float) -> None:
        load = self._load
        device_s = pacer.pace.draft_s(strategy, load.running, load.context_tokens, caught_up=self.caught_up)
        if device_s is None:
            pacer.stretch(strategy.drafter, start_s)
        else:
            pacer.hold(strategy.drafter, start_s, device_s)

    def _draft(self, plan: StepPlan, strategy: Strategy, reserve: Reserve) -> StepDrafts | None:
        drafter, slots = self._drafters[strategy.drafter], plan.decoding  # in a prompt nothing is speculated on
        # One that writes K/V behind those that are there needs the blocks before.
        before = reserve if drafter.shares_kv else None
        batch = self._view(slots, drafter.needs_hidden, strategy, before)
        if self._budget.active or (batch.room < strategy.depth).any():
            self.room = batch.room
            if not batch.room.any():
                return None
        try:
            answer = drafter.propose(batch, strategy)
            self.caught_up = answer.caught_up
            self.captured = drafter.captured
            nodes = min(strategy.tokens_to_verify, self._max_nodes)
            cleaned = self._steps.clean(
                slots, answer.tokens, answer.counts, answer.parents, strategy.depth, nodes, self._vocab_size
            )
        except Exception as error:
            self._give_up(strategy.drafter, error)
            return None
        if cleaned is None:
            return None
        drafts, short_of_blocks = cleaned
        if self._budget.active and (drafts.counts > batch.room).any():
            drafts = drafts.cut(np.minimum(drafts.counts, batch.room))
        if short_of_blocks:
            held = reserve(slots, drafts.counts)
            self.room = np.where(held < drafts.counts, held, batch.room)
            drafts = drafts.cut(held)
        if not drafts.drafted:
            return None
        if plan.prefill_tokens:
            if drafts.parents is not None:
                return None
            counts, decoding = np.zeros(len(plan.slots), np.int64), (plan.rows == 1) & plan.samples
            counts[decoding] = drafts.counts
            tokens = np.full((len(plan.slots), drafts.tokens.shape[1]), -1, np.int64)
            tokens[decoding] = drafts.tokens
            return StepDrafts(counts=counts, tokens=tokens[plan.samples], drafted=drafts.drafted)
        if self._rejection:
            return replace(drafts, distributions=self._distributions(answer, drafts))
        return drafts

    def _distributions(self, answer: Drafts, clean: StepDrafts) -> Tensor | None:
        """Return the distributions of the drafted tokens, cut like the drafts; None if malformed."""
        given: object = answer.distributions
        requests, width = clean.tokens.shape
        if not isinstance(given, Tensor) or clean.parents is not None:
            return None
        if given.layout is not torch.strided or not given.is_floating_point() or given.device != self._device:
            return None
        if given.ndim != 3 or len(given) != requests or given.shape[1] < width or given.shape[2] != self._vocab_size:
            return None
        return given[:, :width]

    def _view(
        self, slots: Int64Array, needs_hidden: bool, strategy: Strategy, reserve: Reserve | None = None
    ) -> BatchView:
        table = self._table
        if self._requests.slots is not slots:
            self._requests = _Requests.of(table, slots, self._other_noise)
        lengths = table.length[slots]
        fixed = self._requests.fixed
        room = table.limit[slots] - lengths - 1
        room = self._budget.room(self._load, fixed["slots"], lengths - table.prompt_length[slots], room, strategy)
        if reserve is not None:
            room = reserve(slots, np.minimum(room, strategy.depth))
        return BatchView(
            history=self._history,
            lengths=lengths,
            vocab_size=self._vocab_size,
            room=room,
            hidden=self._hidden if needs_hidden else None,
            kv=self._kv if needs_hidden else None,
            **fixed,
        )
