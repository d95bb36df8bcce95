"""When a plain step is worth its time, though drafts promise more: while all is drafted, nothing shows its price."""

import math

from policies.calibration.costs import CostModel
from policies.steps import StepKind, StepOutcome

CLOSE = 3.0  # times the doubt of the price, a logarithm: a lead beyond that stands whatever a plain step takes
LEAST_DOUBT, MOST_DOUBT = 0.1, 0.3  # below the first nothing is checked; beyond the second what is saved is not known
CHECK_STEPS = 16  # with drafts, between two checks


class PlainCheck:
    """The plain price of one engine."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._steps = 0  # with drafts, since a plain one
        self._evaluating = False  # evaluations try nothing

    def saw(self, outcome: StepOutcome) -> None:
        """Take a step of any kind."""
        self._evaluating = outcome.kind is StepKind.EVALUATION
        if outcome.strategy.depth:
            self._steps += 1
        elif outcome.kind is StepKind.USUAL:
            self._steps = 0

    def due(self, lead: float) -> bool:
        """Whether to decode plainly once. `lead` >= 1: the chosen drafts' tokens per second over plain decoding's.

        True counts as a check: prompts in its step may hide the price, and the next check waits all the same."""
        if self._evaluating or self._steps < CHECK_STEPS:
            return False
        if self._costs.doubt <= min(max(math.log(lead) / CLOSE, LEAST_DOUBT), MOST_DOUBT):
            return False
        self._steps = 0
        return True
