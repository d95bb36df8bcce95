"""The requests of a simulated RL step: prompts, number of responses, and their natural and actual lengths.

Owns the draws. The budget, its thresholds and the expected lengths are the policies' own. A step's prompts are drawn
without repetition from the pool, epoch by epoch; with given lengths, in the pool's order. A budget spends share *
rollouts_per_prompt * the natural length of the step's prompts, as in a run.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.simulate.lengths import GivenDraws, LengthDraws, draws_of
from planner.simulate.scenario import Scenario
from policies.lengths import LengthModel
from policies.rounds import Race, Rounds, Turn
from policies.token_budget.abort import thresholds
from policies.token_budget.allocation import allocate
from policies.token_budget.cost import ExpectedLengths, Visit
from policies.token_budget.keep import LateModel, best_keep, price_of_equal
from policies.token_budget.spread import SpreadModel, squares, visit_variance
from policies.token_budget.window import LengthWindow


@dataclass(frozen=True, slots=True)
class Asked:
    """One requested response."""

    prompt: int
    tokens: int  # its final length
    expected: float
    given_up: bool = False
    put_off: bool = False  # by its round: it ends here, and is not trained on


@dataclass(slots=True, kw_only=True)
class Workload:
    """The workload of a run; deterministic by its seed."""

    scenario: Scenario
    _draws: LengthDraws = field(init=False)
    _pool: int = field(init=False)
    _rng: np.random.Generator = field(init=False)  # of the order of prompts
    _steps: int = 0
    _solved: NDArray[np.float64] = field(init=False)  # [pool] probability of a reward
    _lengths: LengthModel = field(init=False)
    _order: list[int] = field(default_factory=list)  # the rest of the epoch's order
    _costs: ExpectedLengths = field(init=False)
    _spread: SpreadModel = field(default_factory=SpreadModel)
    _late: LateModel = field(default_factory=LateModel)
    _window: LengthWindow = field(init=False)
    _ended: int = 0
    _rounds: Rounds | None = None  # None: all groups are trained on
    _taken: int = 0  # prompts of the rounds' order
    _put_off: dict[Turn, list[int]] = field(default_factory=dict)  # lengths drawn already

    def __post_init__(self) -> None:
        given, asked = self.scenario.lengths, self.scenario.workload
        self._draws = draws_of(given, asked.pool, asked.rollouts_per_prompt, self.scenario.seed)
        self._pool = len(self._draws.groups) if isinstance(self._draws, GivenDraws) else asked.pool
        seed = self.scenario.seed
        self._rng = np.random.default_rng([seed, 2])
        spread = 2.0  # of the Beta distribution of prompts' success rates
        mean = min(max(asked.solved, 1e-6), 1 - 1e-6)
        self._solved = np.random.default_rng([seed, 8]).beta(mean * spread, (1 - mean) * spread, self._pool)
        self._lengths = LengthModel(given.max_tokens / 2)
        self._costs = ExpectedLengths(given.max_tokens / 2)
        self._window = LengthWindow(self.scenario.abort.window)
        if (rounds := self.scenario.rounds).factor is not None:
            self._rounds = Rounds(
                factor=rounds.factor,
                quantile=rounds.quantile,
                window=rounds.window,
                prompts=self._pool,
                prompts_per_step=asked.prompts_per_step,
                steps=asked.steps,
            )
        if asked.known:
            past, visits = np.random.default_rng([self.scenario.seed, 3]), []
            for prompt in range(self._pool):
                natural = self._draws.lengths(prompt, asked.rollouts_per_prompt, past).tolist()
                own = [Asked(prompt, tokens, 0.0) for tokens in natural]
                self._observe(prompt, own, None, 1.0, past)
                visits.append(Visit(prompt, natural, [1.0] * len(own), [False] * len(own)))
            if self._learns:
                self._costs.observe(visits)

    @property
    def _learns(self) -> bool:
        abort = self.scenario.abort
        return self.scenario.budget.on or (abort.enabled and abort.keep == "auto")

    def step(self) -> list[Asked]:
        """Return the next step's responses, by prompt."""
        if self._rounds is not None:
            self._steps += 1
            return self._round(self._rounds)
        asked, budget = self.scenario.workload, self.scenario.budget
        prompts = self._next(asked.prompts_per_step)
        counts, price = [asked.rollouts_per_prompt] * len(prompts), None
        if budget.on:
            counts, price = self._allocated(prompts)
        limit = thresholds(self.scenario.abort, self._window, self._ended, self.scenario.lengths.max_tokens)
        late = None if limit is None or not self.scenario.abort.enabled else limit.give_up_at
        keeps = self._keeps(prompts, counts, price, late)
        found, visits = [], []
        self._steps += 1
        for prompt, count, keep in zip(prompts, counts, keeps, strict=True):
            rng = np.random.default_rng([self.scenario.seed, 4, self._steps, prompt])
            natural = self._draws.lengths(prompt, count, rng)
            expected = self._lengths.expected_tokens(prompt)
            coins = rng.random((count, 2)) if late is not None else np.ones((count, 2))
            own = [
                self._cut(prompt, int(tokens), expected, late, keep, coin)
                for tokens, coin in zip(natural, coins, strict=True)
            ]
            found += own
            self._observe(prompt, own, late, keep, rng)
            weights = [keep if late is not None and not o.given_up and o.tokens > late else 1.0 for o in own]
            visits.append(Visit(prompt, [o.tokens for o in own], weights, [o.given_up for o in own]))
        if self._learns:
            self._costs.observe(visits)
        return found

    def _round(self, rounds: Rounds) -> list[Asked]:
        """Return the responses of a round by length. Postponed groups end when they are out: no response is longer than
        the longest one trained on and the mark. In their later round they are sampled again; early text is assumed
        useless."""
        plan = rounds.plan(self._turns(rounds.needs))
        natural = [self._put_off.pop(turn, []) or self._drawn(turn) for turn in plan.turns]
        chosen, long, most = list(range(len(natural))), list[int](), self.scenario.lengths.max_tokens
        if plan.races and plan.mark is not None:
            race = Race([len(group) for group in natural], plan.keep, plan.mark)
            for index, group in enumerate(natural):
                for tokens in group:
                    race.ended(index, tokens)
            chosen, long = race.chosen(), race.long()
            most = max(plan.mark, *(max(natural[index]) for index in chosen))
        rounds.settle(plan, {index: max(natural[index]) for index in chosen}, long)
        found = []
        for index, (turn, group) in enumerate(zip(plan.turns, natural, strict=True)):
            expected, put_off = self._lengths.expected_tokens(turn[1]), index not in chosen
            found += [Asked(turn[1], min(tokens, most), expected, put_off=put_off) for tokens in group]
            if put_off:
                self._put_off[turn] = group
            else:
                self._lengths.observe(turn[1], sum(group) / len(group))
        return found

    def _turns(self, count: int) -> list[Turn]:
        first, self._taken = self._taken, self._taken + count
        return [((first + place) // self._pool, prompt) for place, prompt in enumerate(self._next(count))]

    def _drawn(self, turn: Turn) -> list[int]:
        rng = np.random.default_rng([self.scenario.seed, 4, *turn])
        return [int(n) for n in self._draws.lengths(turn[1], self.scenario.workload.rollouts_per_prompt, rng)]

    def _next(self, count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            if not self._order:
                ordered = isinstance(self._draws, GivenDraws)
                self._order = list(range(self._pool)) if ordered else self._rng.permutation(self._pool).tolist()
                self._order.reverse()
            found.append(self._order.pop())
        return found

    def _expected(self, prompts: list[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(spreads of sums over tokens, tokens), [prompts]."""
        tokens = np.array([self._costs.expected_tokens(prompt) for prompt in prompts])
        return np.array([self._spread.spread(prompt) for prompt in prompts]) * np.sqrt(tokens), tokens

    def _keeps(self, prompts: list[int], counts: list[int], price: float | None, late: int | None) -> list[float]:
        """With which probability late responses to each prompt go on, as launch.run.token_budget has it."""
        options, mean = self.scenario.abort, self._window.mean()
        if options.keep != "auto":
            return [options.keep] * len(prompts)
        if late is None or not mean:
            return [1.0] * len(prompts)
        spread, tokens = self._expected(prompts)
        excess = self._window.mean_excess(late)
        if price is None:
            price = price_of_equal(spread, tokens, self.scenario.workload.rollouts_per_prompt)
        if options.price == "time":
            price *= self._window.held_up(late, sum(counts))
        keeps = []
        for prompt, count, own, size in zip(prompts, counts, spread.tolist(), tokens.tolist(), strict=True):
            known = self._late.square(prompt)
            square = own**2 * (late + excess) / mean if known is None else known * size
            keeps.append(best_keep(square, excess, price, count, least=options.min_keep))
        return keeps

    def _allocated(self, prompts: list[int]) -> tuple[list[int], float]:
        asked, budget = self.scenario.workload, self.scenario.budget
        spread, tokens = self._expected(prompts)
        most = budget.max_rollouts or 4 * asked.rollouts_per_prompt
        size = budget.tokens_per_step
        whole = (
            float(size)
            if size is not None
            else (budget.share or 1.0) * asked.rollouts_per_prompt * float(tokens.sum()) * self._costs.natural
        )
        counts, price = allocate(spread, tokens, whole, least=budget.min_rollouts, most=max(most, budget.min_rollouts))
        return [int(count) for count in counts], price

    def _cut(
        self, prompt: int, tokens: int, expected: float, late: int | None, keep: float, coin: NDArray[np.float64]
    ) -> Asked:
        """Cut a late response that is given up: one without a later answer whose coin decides against it."""
        if late is None or tokens <= late:
            return Asked(prompt, tokens, expected)
        given_up = bool(coin[0] < self.scenario.hopeless and coin[1] >= keep)
        return Asked(prompt, late if given_up else tokens, expected, given_up)

    def _observe(self, prompt: int, own: list[Asked], late: int | None, keep: float, rng: np.random.Generator) -> None:
        self._ended += len(own)
        kept = [one for one in own if not one.given_up]
        for one in kept:
            self._window.add(one.tokens, 1 / keep if late is not None and one.tokens > late else 1.0)
        self._lengths.observe(prompt, sum(one.tokens for one in own) / len(own))
        if self._learns and len(own) > 1:
            rewards = (rng.random(len(own)) < self._solved[prompt]).astype(float)
            size = np.array([one.tokens for one in own], float)
            contributed = squares(
                [0.0 if o.given_up else r for o, r in zip(own, rewards, strict=True)], size / size.mean()
            )
            behind = np.array([late is not None and (one.given_up or one.tokens > late) for one in own])
            lost = np.array([one.given_up for one in own])
            if late is not None:
                self._late.observe(prompt, np.where(lost, 0.0, contributed / keep)[behind].tolist())
                contributed[behind] = self._late.square(prompt) or 0.0
            propensities = np.where(behind, keep, 1.0).tolist()
            self._spread.observe(prompt, visit_variance(contributed, propensities), len(own))
