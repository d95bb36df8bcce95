"""A model of draft acceptance and its change from RL step to RL step. Chooses no strategy.

Accepted tokens of a chain of depth d are sum over j <= d of P_1 ... P_j, each level with the drafter's own P times its
quality. A tree's siblings recover little: if the best candidate is wrong, the runners-up mostly are too.

With every update of the target, a trained drafter loses the share `drift` of its quality above the floor. Training
recovers 63 % of what is missing to 1 in `recovery_micro_steps`. The other drafters keep their numbers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from config.catalogue import CATALOGUE, TRAINED
from config.strategy import Strategy
from planner.simulate.scenario import Acceptance, SpotTraining

SIBLING = 0.8  # share of a level's failures that remains, per further child


@dataclass(slots=True)
class AcceptanceState:
    """The acceptance of all drafters at one moment."""

    given: Mapping[str, Acceptance]
    training: SpotTraining
    quality: float = field(init=False)  # of the trained drafter; 1: as given

    def __post_init__(self) -> None:
        training = self.training
        self.quality = 1.0 - training.stale * (1.0 - training.floor)

    def accepted(self, strategy: Strategy) -> float:
        """Return tokens per request and engine step beyond the one of plain decoding."""
        if not strategy.depth:
            return 0.0
        of = self._of(strategy.drafter)
        quality = self.quality if strategy.drafter == TRAINED else 1.0
        lives, total = of.speaks, 0.0
        for depth in range(strategy.depth):
            level = of.by_depth[min(depth, len(of.by_depth) - 1)] if of.by_depth else of.per_token
            level *= quality
            lives *= level * (1 + (1 - level) * (1 - SIBLING ** (strategy.top_k - 1)))
            total += lives
        return total

    def drafted(self, strategy: Strategy) -> float:
        """Return the rows per request and engine step that drafts add."""
        return strategy.tokens_to_verify * (self._of(strategy.drafter).speaks if strategy.depth else 0.0)

    def updated(self) -> None:
        """The target has new weights."""
        training = self.training
        self.quality = training.floor + (self.quality - training.floor) * (1 - training.drift)

    def trained(self, micro_steps: float) -> None:
        """The drafter has trained for this many micro-steps."""
        missing = (1 - self.quality) * math.exp(-micro_steps / self.training.recovery_micro_steps)
        self.quality = 1 - missing

    def _of(self, drafter: str) -> Acceptance:
        found = self.given.get(drafter)
        return Acceptance(per_token=CATALOGUE[drafter].accepts) if found is None else found
