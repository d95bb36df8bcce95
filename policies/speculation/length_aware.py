"""Draft budgets by length (DAS 4.2): requests that may delay the batch draft more, others less. Owns the rule.

A pass over n rows costs base + row * n. Every request pays for its rows. The base is shared among the requests by how
likely each delays the batch; that share is its *price of a pass*. It drafts to the depth d at which its tokens are
cheapest,

    (price + row * (1 + drafted(d))) / (1 + accepted(d)).

With the optimal prices, which add up to the base, this is the optimum of the paper's (6), with an accepted token in
place of a row (docs/concepts/speculation.md, "Budgets by length"). A price is the derivative of the batch's length in
passes, max_i T_i. Only a distribution of each length is known. So the maximum is replaced by a power mean, with
derivative (T_i / max T) ** POWER, averaged over quantiles of the remaining length. While requests wait for a slot,
every pass counts for all of them, and all prices are equal.
"""

import numpy as np
from numpy.typing import NDArray

from config.strategy import Strategy
from policies.calibration.costs import CostModel
from policies.speculation.acceptance import AcceptanceModel
from policies.speculation.budget import Int32Array, Int64Array
from policies.speculation.length_statistics import LengthClass, LengthStatistics, problem_key
from policies.steps import Load

FloatArray = NDArray[np.float64]

POWER = 4.0  # of the power mean that replaces the maximum: larger trusts the lengths more
QUANTILES = 16  # of the length of a response
EVERY_STEPS = 16  # steps for which a division holds with the same requests; more if steps are short:
_DIVISION_S, _SHARE = 400e-6, 0.005  # the time that one takes, and the share of all time that it may take
_MOST_STEPS = 64  # longest time of a division; if it would have to hold longer, there is none
SLACK = 0.003  # of the cheapest token: draft as deep as this allows, since drafts also measure acceptance
_ALL = 1 << 40  # as much as the strategy drafts
_ROUNDS = 5  # of bisection for the rows of a pass
MIN_RUNNING = 4  # with fewer requests, nearly all of the time is the longest one's


class LengthAwareBudget:
    """See the module docstring; implements DraftBudget. Trees are verified whole, whatever they cost."""

    def __init__(self, costs: CostModel, acceptance: AcceptanceModel, slots: int, seed: int = 0) -> None:
        """`slots`: size of the running batch."""
        self._costs, self._acceptance = costs, acceptance
        self._statistics = LengthStatistics()
        # Each request has another quantile of its length in every column, fixed while it runs.
        strata = np.tile((np.arange(QUANTILES) + 0.5) / QUANTILES, (slots, 1))
        self._quantiles = np.random.default_rng(seed).permuted(strata, axis=1).T
        self._keys = np.full(slots, -1, np.int64)  # of the problems; -1: an evaluation's, or none
        self._classes = np.full(slots, int(LengthClass.UNKNOWN), np.int64)
        self._entered = np.zeros(slots, np.int64)  # tokens of a request when it entered
        self._longest_limit = 0
        self._standing: tuple[Int64Array, Strategy] | None = None  # the requests and strategy of the present division
        self._division = np.full(slots, _ALL)  # by slot
        self._every, self._left = EVERY_STEPS, 0
        self._least = 0  # steps for which a division holds, even if requests change

    def begin(self, slot: int, prompt_tokens: Int32Array, drawn: int, limit: int) -> None:
        key = problem_key(prompt_tokens)
        self._keys[slot], self._classes[slot] = key, self._statistics.class_of(key)
        self._entered[slot], self._division[slot] = drawn, _ALL
        self._longest_limit = max(self._longest_limit, limit)

    def end(self, slot: int, drawn: int, *, finished: bool, ended: bool) -> None:
        key, initial = int(self._keys[slot]), LengthClass(int(self._classes[slot]))
        if key >= 0:
            self._statistics.add(key, initial, drawn, entered=int(self._entered[slot]), finished=finished, ended=ended)
        self._keys[slot], self._classes[slot] = -1, LengthClass.UNKNOWN
        self._division[slot] = _ALL

    def remember(self, prompts: list[Int32Array], responses: list[Int32Array]) -> None:
        """Assume this worker's limits for other workers' rollouts."""
        for prompt, response in zip(prompts, responses, strict=True):
            key = problem_key(prompt)
            ended = len(response) < self._longest_limit or not self._longest_limit
            self._statistics.add(key, self._statistics.class_of(key), len(response), ended=ended)

    def new_target(self) -> None:
        self._statistics.settle()
        self._standing, self._left = None, 0

    def save(self, directory: str) -> None:
        self._statistics.save(directory)

    def load(self, directory: str) -> None:
        self._statistics.load(directory)

    def budgets(
        self, load: Load, slots: Int64Array, drawn: Int64Array, room: Int64Array, strategy: Strategy
    ) -> Int64Array:
        if load.running < MIN_RUNNING or strategy.is_tree:
            return room
        standing = self._standing
        same = standing is not None and standing[0] is load.prompt_ids and standing[1] == strategy
        if self._left > 0 and (same or self._every - self._left < self._least):
            self._left -= 1
        else:
            depths = self._divide(load, slots, drawn, room, strategy)
            self._division[slots] = _ALL if depths is None or self._every > _MOST_STEPS else depths
            self._standing, self._left = (load.prompt_ids, strategy), self._every
        given: Int64Array = np.minimum(self._division[slots], room)
        return given

    def _divide(
        self, load: Load, slots: Int64Array, drawn: Int64Array, room: Int64Array, strategy: Strategy
    ) -> Int64Array | None:
        """Return the depths; None if lengths or costs are unknown."""
        requests, left = load.running, self.left(slots, drawn, room)
        if left is None:
            return None
        reached, stood = self._acceptance.survival(strategy, load.prompt_ids)
        drafted = np.concatenate([np.zeros((requests, 1)), reached.cumsum(1)], axis=1)
        tokens = 1 + np.concatenate([np.zeros((requests, 1)), stood.cumsum(1)], axis=1)
        shares = np.full(requests, 1 / requests) if load.waiting else waiting_shares(left)
        fewest, most = float(requests), requests + float(drafted[:, -1].sum())
        depths: Int64Array | None = None
        for _ in range(_ROUNDS):  # more rows in a pass make each row dearer, so fewer are drafted
            rows = (fewest + most) / 2
            costs = self._tangent(load, rows)
            if costs is None:
                return None
            base_s, row_s = costs
            depths = cheapest_depths(shares * base_s, row_s, drafted, tokens)
            if requests + float(np.take_along_axis(drafted, depths[:, None], 1).sum()) > rows:
                fewest = rows
            else:
                most = rows
        return depths

    def left(self, slots: Int64Array, drawn: Int64Array, room: Int64Array) -> FloatArray | None:
        """Return [S, R]: remaining tokens of each request, in S scenarios; None if unknown."""
        if not self._statistics.known:
            return None
        return self._statistics.remaining(self._classes[slots], drawn, room + 1, self._quantiles[:, slots])

    def _tangent(self, load: Load, rows: float) -> tuple[float, float] | None:
        """Return (seconds of a pass without its rows, per row) near this number of rows."""
        half = max(load.running / 2, 1.0)
        low, high = max(int(rows - half), load.running), int(rows + half) + 1
        ends = [self._costs.step_s(load.running, at, load.context_tokens) for at in (low, high)]
        if ends[0] is None or ends[1] is None:
            return None
        row_s = max((ends[1] - ends[0]) / (high - low), 1e-3 * ends[1] / high)
        self._least = round(_DIVISION_S / (_SHARE * max(ends[0], 1e-6)))
        self._every = max(EVERY_STEPS, self._least)
        return max((ends[0] + ends[1]) / 2 - row_s * (low + high) / 2, 0.0), row_s


def waiting_shares(left: FloatArray) -> FloatArray:
    """Return [R], with sum 1: each request's share of a pass's base. left: [S, R] tokens, in S scenarios."""
    nearness = (left / left.max(1, keepdims=True)) ** POWER
    shares: FloatArray = (nearness / nearness.sum(1, keepdims=True)).mean(0)
    return shares


def cheapest_depths(
    prices_s: FloatArray, row_s: float, drafted: FloatArray, tokens: FloatArray, slack: float = SLACK
) -> Int64Array:
    """Return [R]: the depth of each request's cheapest token, or the deepest within `slack` of it. drafted, tokens: [R,
    1 + D], rows drafted and tokens gained by a pass that drafts to depths 0, 1, ...; prices_s: [R]."""
    cost = (prices_s[:, None] + row_s * (1 + drafted)) / tokens
    good = cost <= (1 + slack) * cost.min(1, keepdims=True)
    last: Int64Array = good.shape[1] - 1 - np.argmax(good[:, ::-1], axis=1)
    return last
