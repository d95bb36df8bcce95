"""The strategy of an engine at a load, by the policies' own rules. Owns the adapters to virtual time.

static    the first strategy while at most max_running requests decode: policies.speculation.policy.FixedPolicy
adaptive  the most tokens per second by costs and acceptance, with AdaptivePolicy's arms and margin, as it chooses
          after learning them; its trials cost exploration's 1 % of decode time, which is left out
roofline  policies.speculation.toggle.RooflinePolicy itself, one per engine, called once per segment
"""

import math
from dataclasses import dataclass, field
from typing import cast

from config.strategy import PLAIN, Strategy
from planner.simulate.acceptance import AcceptanceState
from planner.simulate.costs import SimulatedCosts
from planner.simulate.scenario import Speculation
from policies.calibration.costs import CostModel
from policies.calibration.roofline import FreeRows
from policies.speculation.chooser import MARGIN, AdaptivePolicy
from policies.speculation.policy import FixedPolicy, StrategyPolicy
from policies.speculation.toggle import RooflinePolicy
from policies.steps import Load, StepKind, StepOutcome

_MOST_FREE = 1024  # rows
_OCTAVE = 8  # loads per octave that a choice is made for


@dataclass(slots=True)
class Adaptive:
    """The best arm. One for all engines of a run, since its result depends on the load alone."""

    options: Speculation
    costs: SimulatedCosts
    state: AcceptanceState
    _policy: AdaptivePolicy = field(init=False)
    _known: dict[tuple[int, int], Strategy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        arms = self.options.arms
        known = CostModel(free=FreeRows(float(self._free_rows())))
        self._policy = AdaptivePolicy(arms, costs=known, max_running=self.options.max_running, exploration=0.0)

    def _free_rows(self) -> int:
        """The power of two of rows whose pass takes twice as long as one row's, or less."""
        rows, most_s = 1, 2 * self.costs.step_s(1, 1, 0)
        while rows < _MOST_FREE and self.costs.step_s(1, 2 * rows, 0) <= most_s:
            rows *= 2
        return rows

    def choose(self, running: int, context_tokens: float) -> Strategy:
        if running > self.options.max_running:
            return PLAIN
        key = round(_OCTAVE * math.log2(running)), round(_OCTAVE / 4 * math.log2(max(context_tokens, 1.0)))
        if (known := self._known.get(key)) is None:
            near = max(round(2 ** (key[0] / _OCTAVE)), 1)
            known = self._known[key] = self._best(near, 2.0 ** (key[1] * 4 / _OCTAVE))
        return known

    def accepted(self, strategy: Strategy) -> float:
        return self.state.accepted(strategy)

    def drafted(self, strategy: Strategy) -> float:
        return self.state.drafted(strategy)

    def renewed(self) -> None:
        """Note that acceptance has changed."""
        self._known.clear()

    def _best(self, running: int, context_tokens: float) -> Strategy:
        plain = running / self.costs.step_s(running, running, context_tokens)
        best, most = PLAIN, plain * (1 + MARGIN)
        for arm in self._policy.arms_at(running):
            rows = running * (1 + self.state.drafted(arm))
            seconds = self.costs.step_s(running, rows, context_tokens)
            seconds += self.costs.draft_s(arm, running, context_tokens)
            rate = running * (1 + self.state.accepted(arm)) / seconds
            if rate > most:
                best, most = arm, rate
        return best


@dataclass(slots=True)
class Told:
    """A policy of one engine, called once per segment."""

    policy: StrategyPolicy
    state: AcceptanceState

    def choose(self, running: int, context_tokens: float) -> Strategy:
        load = Load(running, 0, round(context_tokens))
        strategy = self.policy.choose(load)
        self.policy.record(
            StepOutcome(
                kind=StepKind.USUAL,
                strategy=strategy,
                load=load,
                prompt_tokens=0,
                drafted=round(running * self.drafted(strategy)),
                accepted=round(running * self.accepted(strategy)),
                elapsed_s=0.0,
                draft_s=0.0,
            )
        )
        return strategy

    def accepted(self, strategy: Strategy) -> float:
        return self.state.accepted(strategy)

    def drafted(self, strategy: Strategy) -> float:
        return self.state.drafted(strategy)


SimulatedSpeculator = Adaptive | Told  # called by an engine before each segment


@dataclass(frozen=True, slots=True)
class _Truth:
    """The costs in the form that a policy expects; it learns nothing from steps."""

    costs: SimulatedCosts
    doubt: float = 0.0

    def step_s(self, requests: int, rows: int, context_tokens: int) -> float:
        return self.costs.step_s(requests, rows, context_tokens)

    def draft_s(self, strategy: Strategy, requests: int) -> float:
        return self.costs.draft_s(strategy, requests, 1024.0 * requests)

    def observe(self, step: StepOutcome) -> None:
        pass


def speculators(
    options: Speculation, costs: SimulatedCosts, state: AcceptanceState, engines: int
) -> list[SimulatedSpeculator]:
    """Return one for each engine; they may be the same object."""
    arms = options.arms
    match options.mode:
        case "off":
            return [Told(FixedPolicy(PLAIN), state)] * engines
        case "static":
            return [Told(FixedPolicy(arms[0], options.max_running), state)] * engines
        case "adaptive":
            return [Adaptive(options, costs, state)] * engines
        case "roofline":
            truth = cast(CostModel, _Truth(costs))
            return [
                Told(
                    RooflinePolicy(
                        [arm for arm in arms if arm.depth],
                        margin=options.margin,
                        near_ceiling=0.85,
                        patience=2,
                        max_running=options.max_running,
                        costs=truth,
                    ),
                    state,
                )
                for _ in range(engines)
            ]
