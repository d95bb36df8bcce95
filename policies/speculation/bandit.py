"""Mode paper: the Bucketed-Epsilon-Greedy selector of TLT, Algorithm 1, followed exactly.

Where the paper is silent: without thresholds neighbouring groups are joined until every bucket has two arms, and each
bucket holds twice the requests of the one before it, the last from half of the limit on; with fewer thresholds than
groups the last groups share the last bucket; an arm without a measurement counts as infinitely good, so it is tried.
"""

import random
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from statistics import median

from config.speculation import ELASTIC
from config.strategy import PLAIN, Strategy
from policies.calibration.costs import CostModel
from policies.speculation.elastic import ElasticSwitch
from policies.speculation.policy import Reason
from policies.steps import Load, StepKind, StepOutcome


class BegMabPolicy:
    """Strategies grouped by tokens to verify, descending, onto ascending batch buckets [t_i, t_(i+1) - 1].

    thresholds: t_1 = 1 < t_2 < ...; None: powers of two up to half of `max_running`, for buckets of at least two arms.
    Raises ValueError for others.
    """

    def __init__(
        self,
        strategies: Sequence[Strategy],
        *,
        thresholds: Sequence[int] | None,
        epsilon: float,
        window: int,
        max_running: int,
        seed: int,
        costs: CostModel | None = None,
    ) -> None:
        ordered = sorted(strategies, key=lambda strategy: -strategy.tokens_to_verify)
        groups = [list(group) for _, group in groupby(ordered, key=lambda strategy: strategy.tokens_to_verify)]
        if thresholds is None:
            groups = _joined(groups)
        self._thresholds = _doubling(len(groups), max_running) if thresholds is None else list(thresholds)
        ascending = all(a < b for a, b in zip(self._thresholds, self._thresholds[1:], strict=False))
        if not self._thresholds or self._thresholds[0] != 1 or not ascending:
            raise ValueError("rollout.speculation.batch_thresholds must ascend from 1")
        if len(self._thresholds) > len(groups):
            raise ValueError(
                f"rollout.speculation.batch_thresholds names {len(self._thresholds)} buckets for {len(groups)} groups "
                "of strategies with equal tokens to verify: one threshold per group at most"
            )
        last = len(self._thresholds) - 1
        self._groups = [*groups[:last], [strategy for group in groups[last:] for strategy in group]]
        self._rewards: dict[Strategy, deque[float]] = {strategy: deque(maxlen=window) for strategy in strategies}
        self._epsilon, self._random = epsilon, random.Random(seed)
        self._max_running = max_running
        self._switch, self._costs = ElasticSwitch(max_running), costs or CostModel()
        self._failed: set[str] = set()
        self._reason = Reason.PAYS_MOST

    @property
    def max_nodes(self) -> int:
        return max((strategy.tokens_to_verify for strategy in self._rewards), default=0)

    def arms_at(self, running: int) -> Sequence[Strategy]:
        if running > self._max_running:
            return ()
        return self._groups[bisect_right(self._thresholds, running) - 1]

    def choose(self, load: Load) -> Strategy:
        running = load.running
        if not self._switch.on(running):
            self._reason = Reason.TOO_MANY
            return PLAIN
        self._reason = Reason.PAYS_MOST
        valid = self._groups[bisect_right(self._thresholds, running) - 1]
        if self._failed:
            valid = [strategy for strategy in valid if strategy.drafter not in self._failed]
        if len(valid) <= 1:
            self._reason = Reason.PAYS_MOST if valid else Reason.NO_DRAFTER
            return valid[0] if valid else PLAIN
        if self._random.random() < self._epsilon:
            self._reason = Reason.TRIAL
            return self._random.choice(valid)
        return max(valid, key=self._median)

    @property
    def reason(self) -> Reason:
        return self._reason

    @property
    def advantage(self) -> float | None:
        return None

    def _median(self, strategy: Strategy) -> float:
        rewards = self._rewards[strategy]
        return median(rewards) if rewards else float("inf")

    def record(self, outcome: StepOutcome) -> None:
        strategy, running, elapsed_s = outcome.strategy, outcome.load.running, outcome.elapsed_s
        self._costs.observe(outcome)
        if outcome.kind is not StepKind.USUAL:
            return
        if strategy in self._rewards and elapsed_s > 0:
            accept_length = outcome.accepted / running + 1
            self._rewards[strategy].append(accept_length * running / elapsed_s)

    def unavailable(self, drafter: str) -> None:
        self._failed.add(drafter)

    def renewed(self, drafter: str) -> None:
        self._failed.discard(drafter)  # the paper's window forgets old measurements by itself

    def new_target(self) -> None:
        pass

    def plain_s(self, load: Load) -> float | None:
        return self._costs.known_s(load.running, load.running, load.context_tokens)

    def expected_s(self, outcome: StepOutcome) -> float | None:
        return self._costs.expected_s(outcome)


def _joined(groups: list[list[Strategy]]) -> list[list[Strategy]]:
    """Join neighbouring groups until each has two arms: one arm gives no choice, and no drafter to fall back on."""
    joined: list[list[Strategy]] = []
    for group in groups:
        if joined and len(joined[-1]) < 2:
            joined[-1] += group
        else:
            joined.append(list(group))
    if len(joined) > 1 and len(joined[-1]) < 2:
        joined[-2:] = [joined[-2] + joined[-1]]
    return joined


def _doubling(buckets: int, max_running: int) -> list[int]:
    """Where each begins. Many tokens are verified up to where a GPU computes their rows for free: some requests, not
    one."""
    most = min(max_running, ELASTIC)
    return [1, *(max(1 << i, most >> (buckets - i)) for i in range(1, buckets))]
