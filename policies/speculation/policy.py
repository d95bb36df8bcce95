"""The seam between an engine and what chooses its strategies: called in its loop, before and after each step."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from config.strategy import PLAIN, Strategy
from policies.calibration.costs import CostModel
from policies.steps import Load, StepOutcome


class Reason(StrEnum):
    """Why a step decodes the way it does: what a report says where speculation was off."""

    PAYS_MOST = "pays most"
    TRIAL = "trial"
    PLAIN_IS_FASTER = "plain is faster"
    TOO_MANY = "more requests than max_running"
    NO_DRAFTER = "no drafter"  # none of those that strategies name is at hand, or all failed
    UNMEASURED = "unmeasured"  # what a step costs is not known yet
    FIXED = "fixed"


class StrategyPolicy(Protocol):
    """Chooses per engine step. Both calls together cost at most 50 us, and about 1 us while nothing is reconsidered.

    Picklable before its first call; clock-free and random only through its own seed.
    """

    @property
    def max_nodes(self) -> int:
        """The most drafted tokens per request of any strategy it may choose."""

    def arms_at(self, running: int) -> Sequence[Strategy]:
        """Every strategy that it may choose for `running` >= 1 requests; plain decoding may be missing."""

    def choose(self, load: Load) -> Strategy:
        """The strategy of the step at hand."""

    @property
    def reason(self) -> Reason:
        """Of the last choice."""

    @property
    def advantage(self) -> float | None:
        """At the last choice, the predicted speed of the best drafts beside plain decoding's; None: nothing was."""

    def record(self, outcome: StepOutcome) -> None:
        """What the step brought for which `choose` was asked last, of whatever kind."""

    def unavailable(self, drafter: str) -> None:
        """The drafter failed: do not choose it until it is `renewed`."""

    def renewed(self, drafter: str) -> None:
        """The drafter has new weights: what was measured of it is past."""

    def new_target(self) -> None:
        """The target has new weights: a copy of it has to be made anew."""

    def plain_s(self, load: Load) -> float | None:
        """Seconds of a plain decoding step of that load; None: never measured, or not lately."""

    def expected_s(self, outcome: StepOutcome) -> float | None:
        """Seconds that this step, with the rows it had, should have taken; None: the policy predicts none."""


class FixedPolicy:
    """Always the same strategy while at most `max_running` requests decode; `PLAIN` is 'off'."""

    def __init__(self, strategy: Strategy, max_running: int = 1 << 30, costs: CostModel | None = None) -> None:
        self._strategy, self._max_running, self._costs = strategy, max_running, costs
        self._failed, self._reason = False, Reason.FIXED

    @property
    def max_nodes(self) -> int:
        return self._strategy.tokens_to_verify

    def arms_at(self, running: int) -> Sequence[Strategy]:
        return () if running > self._max_running else (self._strategy,)

    def choose(self, load: Load) -> Strategy:
        if self._failed:
            self._reason = Reason.NO_DRAFTER
        else:
            self._reason = Reason.TOO_MANY if load.running > self._max_running else Reason.FIXED
        return self._strategy if self._reason is Reason.FIXED else PLAIN

    @property
    def reason(self) -> Reason:
        return self._reason

    @property
    def advantage(self) -> float | None:
        return None

    def record(self, outcome: StepOutcome) -> None:
        if self._costs is not None:
            self._costs.observe(outcome)

    def unavailable(self, drafter: str) -> None:
        self._failed = self._failed or drafter == self._strategy.drafter

    def renewed(self, drafter: str) -> None:
        self._failed = self._failed and drafter != self._strategy.drafter

    def new_target(self) -> None:
        pass

    def plain_s(self, load: Load) -> float | None:
        return None

    def expected_s(self, outcome: StepOutcome) -> float | None:
        return None if self._costs is None else self._costs.expected_s(outcome)
