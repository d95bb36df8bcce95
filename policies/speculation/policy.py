"""Interface between an engine and its strategy policy: called in the engine's loop, before and after each step."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from config.strategy import PLAIN, Strategy
from policies.calibration.costs import CostModel
from policies.steps import Load, StepOutcome


class Reason(StrEnum):
    """Why a step decodes the way it does. Reports use it to explain steps without speculation."""

    PAYS_MOST = "pays most"
    TRIAL = "trial"
    PLAIN_IS_FASTER = "plain is faster"
    TOO_MANY = "more requests than max_running"
    NO_DRAFTER = "no drafter"  # no drafter that strategies name is available, or all failed
    RESTS = "rests"  # drafts saved less than choosing takes (policies.speculation.rest)
    UNMEASURED = "unmeasured"  # a step's cost is not known yet, or a draft that could win cannot be paid for yet
    FIXED = "fixed"


class StrategyPolicy(Protocol):
    """Chooses a strategy per engine step. Both calls together cost at most 50 us, and about 1 us while a choice holds.

    Picklable before its first call; clock-free, and random only through its own seed.
    """

    @property
    def max_nodes(self) -> int:
        """The most drafted tokens per request of any strategy that it may choose."""

    def arms_at(self, running: int) -> Sequence[Strategy]:
        """Return every strategy that it may choose for `running` >= 1 requests; plain decoding may be missing."""

    def choose(self, load: Load) -> Strategy:
        """Return the strategy of the next step."""

    @property
    def reason(self) -> Reason:
        """The reason of the last choice."""

    @property
    def advantage(self) -> float | None:
        """The predicted speed of the best drafts relative to plain decoding at the last choice; None: no prediction."""

    def record(self, outcome: StepOutcome) -> None:
        """Take the outcome of the step for which `choose` was last called, of any kind."""

    def unavailable(self, drafter: str) -> None:
        """The drafter failed: do not choose it until it is `renewed`."""

    def renewed(self, drafter: str) -> None:
        """The drafter has new weights, so its old measurements lose their validity."""

    def new_target(self) -> None:
        """The target has new weights, so a copy of it must be made again."""

    def plain_s(self, load: Load) -> float | None:
        """Return the seconds of a plain decoding step of that load; None: never measured, or not recently."""

    def expected_s(self, outcome: StepOutcome) -> float | None:
        """Return the expected seconds of this step, given its rows; None if the policy predicts none."""


class FixedPolicy:
    """Always the same strategy while at most `max_running` requests decode; `PLAIN` means off."""

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
