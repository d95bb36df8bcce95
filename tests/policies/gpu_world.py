"""Rollouts of a 7B model on an A100 in virtual time: what choices of strategies are worth there, beside an oracle's.

Owns no policy. A pass and EAGLE's and the copy's drafts take what the published sweep of an A100 was fitted to
(benchmarks/results/roofline_sweep.json; TLT Tables 2 and 7 agree). Acceptance is made up. Deterministic by its seeds.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from config.strategy import PLAIN, Strategy
from policies.speculation.policy import StrategyPolicy
from policies.speculation.savings import Savings
from policies.steps import Int64Array, Load, StepKind, StepOutcome

REQUESTS, LONGEST, PROMPT = 64, 2048, 150
CHUNK = 4  # prompts of a step
SIBLINGS = 1.6  # a tree's level fails as often as a chain's to that power


def pass_s(rows: float, requests: int, context_tokens: int) -> float:
    """One pass of the target."""
    memory, compute = 9.7e-3 + 2.58e-8 * context_tokens, 5.4e-5 * rows
    return float((memory**1.5 + compute**1.5) ** (1 / 1.5)) + 1e-5 * requests


def processor_s(rows: float, requests: int, context_tokens: int) -> float:
    """One pass where eight rows take nearly eight times one."""
    return 5e-4 + 2e-3 * rows + 2e-8 * context_tokens


Price = Callable[[float, int, int], float]  # seconds of a pass, by rows, requests and context


@dataclass(frozen=True, slots=True)
class Drafts:
    """Of one drafter: how often it has something to say, how often a token stands, seconds."""

    says: float
    stands: float
    fixed_s: float = 2e-4
    level_s: float = 0.0  # per level of depth
    each_s: float = 0.0  # and for every request
    late: float = 0.0  # in how many of its steps it takes late_s more
    late_s: float = 0.0

    def seconds(self, requests: int, depth: int) -> float:
        """Of drafting so deep."""
        return self.fixed_s + depth * (self.level_s + self.each_s * requests)


EAGLE = Drafts(1.0, 0.78, level_s=1.2e-3, each_s=1.5e-5)
SELF = Drafts(1.0, 0.98, level_s=4.3e-3, each_s=9e-5)
USUAL: Mapping[str, Drafts] = {"suffix": Drafts(0.5, 0.5), "ngram": Drafts(0.3, 0.4), "eagle": EAGLE, "self": SELF}


@dataclass(frozen=True, slots=True)
class Burst:
    """A machine that does something else: every draft that begins within takes so much longer, and every pass."""

    begins_s: float
    seconds: float
    late_s: float
    passes: bool = True  # else drafts alone


@dataclass(slots=True)
class World:
    """One engine and its clock. With a policy it books what drafts save, as an engine does."""

    drafters: Mapping[str, Drafts]
    seed: int = 0
    bursts: Sequence[Burst] = ()
    slots: int = 1 << 30  # so many run at a time
    prompts: bool = False  # they take passes: CHUNK requests begin in a step
    uneven: float = 0.0  # standard deviation, over problems, of the logarithm of drafts that fail
    price: Price = pass_s
    slow: float = 1.0  # what the machine takes now for what took 1
    later: Mapping[str, Drafts] | None = None  # the drafters from `turns_s` on
    turns_s: float = 0.0
    now_s: float = 0.0
    late_s: float = 0.0  # of the rollouts so far, in bursts
    saved_s: float = 0.0  # as booked
    used_s: dict[str, float] = field(default_factory=dict)  # by strategy
    _draw: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._draw = np.random.default_rng(self.seed)

    def stands(self, strategy: Strategy) -> float:
        """P a level stands, if those above it did."""
        chance = self.drafters[strategy.drafter].stands
        return 1 - (1 - chance) ** SIBLINGS if strategy.is_tree else chance

    def worth(self, strategy: Strategy, requests: int, context_tokens: int) -> float:
        """Expected tokens per second."""
        if not strategy.depth:
            return requests / self.price(requests, requests, context_tokens)
        one, chance = self.drafters[strategy.drafter], self.stands(strategy)
        tokens = 1 + one.says * sum(chance**level for level in range(1, strategy.depth + 1))
        rows = requests * (1 + one.says * strategy.tokens_to_verify)
        seconds = (
            self.price(rows, requests, context_tokens) + one.seconds(requests, strategy.depth) + one.late * one.late_s
        )
        return requests * tokens / seconds

    def rollout(self, lengths: Int64Array, choose: Callable[[Load], Strategy], policy: StrategyPolicy | None) -> float:
        """Seconds until every response has its length. Eight responses to a prompt."""
        count = len(lengths)
        done, begun, batch = np.zeros(count, np.int64), np.zeros(count, bool), np.zeros(0, np.int64)
        began_s, ids = self.now_s, np.arange(count) // 8
        fails = np.exp(np.random.default_rng(self.seed + 1).normal(0, self.uneven, count // 8 + 1))[ids]
        known = np.full(count, PROMPT)  # tokens, as an engine's slots have them
        savings, chunk = Savings(known), CHUNK if self.prompts else count
        while (done < lengths).any():
            free = self.slots - int((begun & (done < lengths)).sum())
            coming = np.flatnonzero(~begun)[: min(free, chunk)]
            for one in coming:
                savings.begin(int(one))
            begun[coming] = True
            running = begun & (done < lengths)
            running[coming] &= not self.prompts
            live, rows = np.flatnonzero(running), len(coming) * PROMPT * self.prompts
            requests, context_tokens = len(live), int(done[live].sum()) + len(live) * PROMPT
            if len(batch) != requests or not np.array_equal(batch, ids[live]):
                batch = ids[live]
            load = Load(requests, int((~begun).sum()), context_tokens, batch)
            strategy = choose(load) if requests else PLAIN
            reached, stood, nodes, draft_s = self._drafts(strategy, requests, fails[live])
            target_s = self.price(requests + nodes + rows, requests, context_tokens) * self._draw.normal(1, 0.02)
            late_s = [self._late_s(passes=False) * (strategy.depth > 0), self._late_s(passes=True)]
            draft_s = draft_s * self.slow + late_s[0]
            seconds = draft_s + target_s * self.slow + late_s[1]
            self.late_s += sum(late_s)
            before = done.copy()
            done[live] = np.minimum(done[live] + 1 + stood, lengths[live])
            done[coming] = np.maximum(done[coming], self.prompts)
            if policy is not None and requests:
                outcome = StepOutcome(
                    kind=StepKind.DISTURBED if rows else StepKind.USUAL,
                    strategy=strategy,
                    load=load,
                    prompt_tokens=rows,
                    drafted=nodes,
                    accepted=int((done - before)[live].sum()) - requests,
                    elapsed_s=seconds,
                    draft_s=draft_s,
                    prompt_ids=batch,
                    reached=reached if strategy.depth else None,
                    stood=stood if strategy.depth else None,
                )
                if strategy.depth:
                    self.saved_s += savings.book(outcome, policy, usual=not rows)[0]
                else:
                    savings.passed(load)
                policy.record(outcome)
            known[:] = PROMPT + done
            for one in np.flatnonzero((done >= lengths) & (before < lengths)):
                savings.end(int(one))
            self.now_s += seconds
            self.used_s[str(strategy)] = self.used_s.get(str(strategy), 0.0) + seconds
        if policy is not None:
            self.saved_s += sum(
                savings.settle(lambda running, tokens: policy.plain_s(Load(running, 0, tokens))).values()
            )
        return self.now_s - began_s

    def _drafts(
        self, strategy: Strategy, requests: int, fails: NDArray[np.float64]
    ) -> tuple[Int64Array, Int64Array, int, float]:
        nothing = np.zeros(requests, np.int64)
        if self.later is not None and self.now_s >= self.turns_s:
            self.drafters, self.later = self.later, None
        if not strategy.depth:
            return nothing, nothing, 0, 0.0
        one = self.drafters[strategy.drafter]
        says = self._draw.random(requests) < one.says
        stands = np.maximum(1 - (1 - self.stands(strategy)) * fails, 0)[:, None]
        stood = (self._draw.random((requests, strategy.depth)) < stands).cumprod(1).sum(1) * says
        seconds = one.seconds(requests, strategy.depth) * self._draw.normal(1, 0.03)
        if one.late and self._draw.random() < one.late:
            seconds += one.late_s
        return np.where(says, strategy.depth, 0), stood, int(says.sum()) * strategy.tokens_to_verify, seconds

    def _late_s(self, *, passes: bool) -> float:
        now = [one for one in self.bursts if one.begins_s <= self.now_s < one.begins_s + one.seconds]
        return sum(one.late_s for one in now if one.passes or not passes)


def lengths(seed: int, rollouts: int) -> list[Int64Array]:
    """Lognormal, of a median of 270 tokens; the longest of 64 is cut at 2,048."""
    draw = np.random.default_rng(seed)
    return [np.minimum(LONGEST, np.exp(draw.normal(5.6, 0.9, REQUESTS))).astype(np.int64) for _ in range(rollouts)]


def rollouts(
    policy: StrategyPolicy,
    drafters: Mapping[str, Drafts],
    seed: int,
    count: int,
    bursts: Sequence[Burst] = (),
    trained: Iterable[str] = ("eagle",),
    price: Price = pass_s,
) -> tuple[list[float], World]:
    """Seconds of each, with new weights of target and trained drafters behind it."""
    world, each = World(drafters, seed, bursts, price=price), []
    for one in lengths(seed, count):
        each.append(world.rollout(one, policy.choose, policy))
        policy.new_target()
        for drafter in trained:
            if drafter in drafters:
                policy.renewed(drafter)
    return each, world


def plain(seed: int, count: int, price: Price = pass_s) -> list[float]:
    """Seconds of each without drafts."""
    world = World({}, seed, price=price)
    return [world.rollout(one, lambda load: PLAIN, None) for one in lengths(seed, count)]


def oracle(arms: Sequence[Strategy], drafters: Mapping[str, Drafts], seed: int, count: int) -> list[float]:
    """Seconds of each for a choice that knows the world."""
    world, every = World(drafters, seed), (PLAIN, *arms)

    def best(load: Load) -> Strategy:
        return max(every, key=lambda arm: world.worth(arm, load.running, load.context_tokens))

    return [world.rollout(one, best, None) for one in lengths(seed, count)]
