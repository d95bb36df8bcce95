"""Telemetry of engine steps: one record per step for listeners, and windows of steps for the run. Reads no clock."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from actors.engine.batch.plan import PromptEntry
from actors.engine.batch.slots import SlotTable
from config.strategy import PLAIN, Strategy
from contracts.rollout import EarlyUse, EngineWindow, PromptUse, ReasonUse, StrategyUse
from policies.speculation.policy import Reason

WINDOW_S = 0.2
TRACE_S = 0.005  # between two points of a window's trace
MAX_PROMPTS = 256  # in one window

Int64Array = NDArray[np.int64]


class Occupancy(Protocol):
    """A scheduler's occupancy."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def kv_tokens_used(self) -> int: ...
    @property
    def preempted(self) -> int:
        """Number of preemptions so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStepRecord:
    """One engine step."""

    at_s: float  # its start
    running: int  # requests that decoded
    context_tokens: int  # their known tokens
    strategy: Strategy
    drafted: int
    accepted: int
    emitted: int  # new tokens, including requests whose prompt ended in this step
    elapsed_s: float  # of the whole step
    draft_s: float  # part of elapsed_s spent drafting
    prefill_tokens: int
    expected_s: float | None = None  # predicted time before the step; for plain steps, of a sample
    reason: Reason | None = None  # why the policy chose the strategy; None: no policy, or nothing decoded
    checked: int = 0  # verified tokens of early text


@dataclass(slots=True)
class _Use:
    """A StrategyUse under construction. reached, stood: per step, drafted and accepted depth of each request."""

    counts: StrategyUse = field(default_factory=lambda: StrategyUse(strategy=""))
    most_saved_s: float = 0.0
    corrected_s: float = 0.0  # of saved_s, beyond any bound of a step
    reached: list[Int64Array] = field(default_factory=list)
    stood: list[Int64Array] = field(default_factory=list)

    def closed(self, strategy: Strategy) -> StrategyUse:
        counts = self.counts
        counts.strategy = str(strategy)
        counts.saved_s = min(counts.saved_s, self.most_saved_s) + self.corrected_s
        counts.offered, counts.taken = _at_least(self.reached, strategy.depth), _at_least(self.stood, strategy.depth)
        return counts


def _at_least(depths: list[Int64Array], deepest: int) -> tuple[int, ...]:
    """Count the depths that are at least 1, 2, ... deepest."""
    counts = np.bincount(np.concatenate(depths), minlength=deepest + 1) if depths else np.zeros(deepest + 1, np.int64)
    return tuple(int(count) for count in counts[::-1].cumsum()[::-1][1:])


class PromptMeter:
    """Drafted and accepted tokens by prompt. Steps count in the slot table; Python runs per request only when it leaves
    its slot or a window is cut. A SlotWatcher."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._uses: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])

    def begin(self, slot: int, prompt: PromptEntry | None) -> None:
        pass

    def end(self, slot: int, finished: bool) -> None:
        table = self._table
        drafted, accepted = int(table.drafted[slot]), int(table.accepted[slot])
        if drafted and not table.evaluation[slot]:
            use = self._uses[int(table.prompt_id[slot])]
            use[0] += drafted
            use[1] += accepted
        table.drafted[slot] = table.accepted[slot] = 0

    def cut(self) -> tuple[PromptUse, ...]:
        """Return the counts since the last call, for at most MAX_PROMPTS; prompts with the fewest drafted tokens
        wait."""
        for slot in np.flatnonzero(self._table.drafted):
            self.end(int(slot), finished=False)
        most = sorted(self._uses, key=lambda prompt_id: -self._uses[prompt_id][0])[:MAX_PROMPTS]
        return tuple(PromptUse(prompt_id, *self._uses.pop(prompt_id)) for prompt_id in most)


class WindowMeter:
    """Sums steps; `cut` turns them into an EngineWindow. A window starts with its first step."""

    def __init__(self, prompts: PromptMeter) -> None:
        self._prompts = prompts
        self.engine_steps = 0
        self.evaluation = False  # of the current window
        self._start_s = 0.0
        self._prefill_tokens = self._decode_tokens = self._preempted_before = 0
        self._uses: dict[Strategy, _Use] = {}
        self._reasons: dict[Reason, ReasonUse] = {}
        self._reason, self._choices = Reason.FIXED, ReasonUse(Reason.FIXED)  # of the last step
        self._strategy, self._use = PLAIN, _Use()  # of the last step
        self._early: EarlyUse | None = None
        self._trace: list[tuple[float, int, str]] = []
        self._traced: tuple[float, int, str] = (-TRACE_S, 0, PLAIN.drafter)

    def count(
        self,
        now_s: float,
        prefill_tokens: int,
        emitted: int,
        decoding: int,
        running: int,
        strategy: Strategy,
        timed_s: float,
    ) -> None:
        """Count a step that began at now_s; timed_s: its seconds, 0 if they do not count for the strategy."""
        if self.engine_steps == 0:
            self._start_s = now_s
        self.engine_steps += 1
        self._prefill_tokens += prefill_tokens
        self._decode_tokens += emitted
        if strategy is not self._strategy or not self._uses:
            self._strategy, self._use = strategy, self._uses.setdefault(strategy, _Use())
        counts = self._use.counts
        counts.engine_steps += 1
        counts.request_steps += decoding
        counts.seconds += timed_s
        before_s, running_before, drafter_before = self._traced
        if (running != running_before or strategy.drafter != drafter_before) and now_s - before_s >= TRACE_S:
            self._note(now_s, running, strategy.drafter)

    def count_choice(self, reason: Reason, advantage: float | None) -> None:
        """Add the last step's reason; and the predicted speedup of the best drafts over plain decoding."""
        if reason is not self._reason or not self._reasons:
            self._reason, self._choices = reason, self._reasons.setdefault(reason, ReasonUse(str(reason)))
        choices = self._choices
        choices.engine_steps += 1
        if advantage is not None:
            choices.judged += 1
            choices.advantage += advantage

    def count_expected(self, expected_s: float, elapsed_s: float) -> None:
        """Add the last step's predicted and measured time."""
        counts = self._use.counts
        counts.expected_s += expected_s
        counts.measured_s += elapsed_s
        counts.missed_s += abs(expected_s - elapsed_s)

    def count_drafting(self, drafted: int, accepted: int, draft_s: float, saved_s: float, most_s: float) -> None:
        """Add the last step's drafting. `most_s`: upper bound of its saved time; a window reports at most the sum of
        these."""
        self._use.most_saved_s += most_s
        counts = self._use.counts
        counts.drafted += drafted
        counts.accepted += accepted
        counts.draft_s += draft_s
        counts.saved_s += saved_s

    def count_correction(self, strategy: Strategy, seconds: float) -> None:
        """Add to what the strategy's steps since the last correction saved."""
        self._uses.setdefault(strategy, _Use()).corrected_s += seconds

    def count_early(self, use: EarlyUse) -> None:
        """Add the last step's verification of early text."""
        self._early = use if self._early is None else self._early.plus(use)

    def count_depths(self, reached: Int64Array, stood: Int64Array) -> None:
        """Add the last step's drafted and accepted depth of each request [R]."""
        self._use.reached.append(reached)
        self._use.stood.append(stood)

    def due(self, now_s: float) -> bool:
        return self.engine_steps > 0 and now_s - self._start_s >= WINDOW_S

    def cut(self, now_s: float, occupancy: Occupancy) -> EngineWindow:
        _, running, drafter = self._traced
        current = self._strategy.drafter if occupancy.running else PLAIN.drafter
        if (occupancy.running, current) != (running, drafter):
            self._note(now_s, occupancy.running, current)
        window = EngineWindow(
            start_s=self._start_s,
            end_s=now_s,
            engine_steps=self.engine_steps,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            running=occupancy.running,
            waiting=occupancy.waiting,
            kv_tokens_used=occupancy.kv_tokens_used,
            preempted=occupancy.preempted - self._preempted_before,
            strategies=tuple(use.closed(strategy) for strategy, use in self._uses.items()),
            trace=tuple(self._trace),
            evaluation=self.evaluation,
            prompts=self._prompts.cut(),
            reasons=tuple(self._reasons.values()),
            early=self._early,
        )
        self.engine_steps = self._prefill_tokens = self._decode_tokens = 0
        self._preempted_before = occupancy.preempted
        self._uses, self._trace, self._reasons, self._early = {}, [], {}, None
        return window

    def _note(self, now_s: float, running: int, drafter: str) -> None:
        self._traced = (now_s, running, drafter)
        self._trace.append(self._traced)
