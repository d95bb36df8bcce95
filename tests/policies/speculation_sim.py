"""A decoding engine in virtual time: what a StrategyPolicy is asked and told, in worlds whose best strategy is known.

Owns no policy and no thresholds. Deterministic: a seeded generator draws what is accepted and how long a step takes.
"""

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from policies.speculation.policy import StepKind, StrategyPolicy
from policies.speculation.strategy import PLAIN, Strategy
from tests.policies.loads import load, outcome

CONTEXT_TOKENS = 64  # kept per request for a drafter that is switched on


@dataclass(frozen=True, slots=True)
class World:
    """A pass takes fixed_s + row_s per row; a drafter not named in `accept` has every token rejected.

    accept: by drafter, the probability that a drafted token is accepted, if all before it on its path were.
    A top-k level is accepted with 1 - (1 - p)^k.
    """

    accept: Mapping[str, float] = field(default_factory=dict)
    fixed_s: float = 120e-6
    row_s: float = 10e-6
    draft_s: Mapping[str, float] = field(default_factory=dict)  # by drafter, whole batch; 30 us where not named
    noise: float = 0.05  # standard deviation of a step's time, relative
    stalls: float = 0.0  # share of steps that the machine interrupts for stall_s
    stall_s: float = 5e-3
    pass_s: Mapping[str, float] = field(default_factory=dict)  # by drafter, per level of depth: a network's passes
    catch_up_s: Mapping[str, float] = field(default_factory=dict)  # by drafter, when switched on ...
    catch_up_row_s: float = 0.0  # ... and per token that it has not followed, up to CONTEXT_TOKENS per request

    def step_s(self, strategy: Strategy, running: int) -> float:
        return self.fixed_s + self.drafting_s(strategy) + self.row_s * running * (1 + strategy.tokens_to_verify)

    def drafting_s(self, strategy: Strategy) -> float:
        """Of step_s."""
        once_s = self.draft_s.get(strategy.drafter, 30e-6) if strategy.depth else 0.0
        return once_s + strategy.depth * self.pass_s.get(strategy.drafter, 0.0)

    def level(self, strategy: Strategy) -> float:
        return 1 - (1 - self.accept.get(strategy.drafter, 0.0)) ** strategy.top_k

    def gain(self, strategy: Strategy, running: int) -> float:
        """Expected speed-up against plain decoding."""
        tokens = 1 + sum(self.level(strategy) ** depth for depth in range(1, strategy.depth + 1))
        return tokens * self.step_s(PLAIN, running) / self.step_s(strategy, running)

    def best(self, arms: Iterable[Strategy], running: int) -> Strategy:
        """Of the arms and plain decoding."""
        return max((PLAIN, *arms), key=lambda arm: self.gain(arm, running))

    def accepted(self, strategy: Strategy, running: int, draw: random.Random) -> int:
        """Tokens accepted in one step, over all requests."""
        rate = self.level(strategy)
        if rate <= 0 or strategy.depth == 0:
            return 0
        if rate >= 1:
            return running * strategy.depth
        scale = 1 / math.log(rate)  # the length of a run of successes, by inversion
        return sum(min(int(math.log(1 - draw.random()) * scale), strategy.depth) for _ in range(running))

    def switched_on_s(self, strategy: Strategy, running: int, missed: float) -> float:
        """What a drafter that has not followed `missed` tokens of each request costs in its first step."""
        if strategy.drafter not in self.catch_up_s or not missed:
            return 0.0
        rows = running * min(missed, CONTEXT_TOKENS)
        return self.catch_up_s[strategy.drafter] + rows * self.catch_up_row_s

    def timed_s(self, strategy: Strategy, running: int, draw: random.Random) -> float:
        noisy_s = self.step_s(strategy, running) * max(0.2, 1 + self.noise * draw.gauss(0, 1))
        return noisy_s + (self.stall_s if self.stalls and draw.random() < self.stalls else 0.0)


@dataclass(frozen=True, slots=True)
class Step:
    world: World
    strategy: Strategy
    running: int
    accepted: int
    elapsed_s: float
    switched_on_s: float = 0.0  # of it, for a drafter that had not followed

    @property
    def plain_s(self) -> float:
        """What plain decoding would have taken for the same tokens."""
        return self.world.step_s(PLAIN, self.running) * (1 + self.accepted / self.running)

    @property
    def kind(self) -> tuple[int, Strategy, int]:
        """What its expected speed-up depends on."""
        return id(self.world), self.strategy, self.running


Running = Callable[[float], int]  # requests that run when so many tokens per request were decoded


def constant(running: int) -> Running:
    return lambda tokens: running


def long_tail(requests: int, middle: float = 42.0, spread: float = 0.95, longest: int = 400) -> Running:
    """Waves of requests with log-normal lengths (as the demo's: median 42, 90 % below 143); the last one runs alone."""
    shares = ((i + 0.5) / requests for i in range(requests))
    lengths = sorted(min(middle * math.exp(spread * _normal_quantile(share)), longest) for share in shares)

    def running(tokens: float) -> int:
        within = tokens % lengths[-1]
        return max(sum(length > within for length in lengths), 1)

    return running


def _normal_quantile(share: float) -> float:
    """Within 0.02 of the normal distribution's: a logistic one of the same spread."""
    return math.log(share / (1 - share)) / 1.702


@dataclass(slots=True)
class Simulation:
    """Drives one policy; `run` may be called again, with another world."""

    policy: StrategyPolicy
    seed: int = 0
    steps: list[Step] = field(default_factory=list)
    tokens: float = 0.0  # per request
    _followed: dict[str, float] = field(default_factory=dict)  # by drafter: tokens when it last drafted
    _draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def run(self, world: World, running: Running, steps: int, *, prefill_every: int = 0) -> list[Step]:
        """Returns what was done. Every prefill_every-th step holds prompt chunks: it is skipped, not recorded."""
        done = []
        for index in range(steps):
            count = running(self.tokens)
            strategy = self.policy.choose(load(count))
            accepted = world.accepted(strategy, count, self._draw)
            elapsed_s = world.timed_s(strategy, count, self._draw)
            late_s = world.switched_on_s(strategy, count, self.tokens - self._followed.get(strategy.drafter, 0.0))
            elapsed_s += late_s
            if late_s:
                draft_s = world.drafting_s(strategy) + late_s
                kind = StepKind.CAUGHT_UP
                self.policy.record(outcome(strategy, count, 0, 0, elapsed_s, kind=kind, draft_s=draft_s))
            elif prefill_every and index % prefill_every == 0:
                elapsed_s += 3e-3
                self.policy.record(outcome(strategy, count, 0, 0, elapsed_s, kind=StepKind.DISTURBED))
            else:
                drafted, draft_s = strategy.tokens_to_verify * count, world.drafting_s(strategy)
                self.policy.record(outcome(strategy, count, drafted, accepted, elapsed_s, draft_s=draft_s))
            self.tokens += 1 + accepted / count
            self._followed[strategy.drafter] = self.tokens
            done.append(Step(world, strategy, count, accepted, elapsed_s, late_s))
        self.steps += done
        return done


def arms(*texts: str) -> tuple[Strategy, ...]:
    return tuple(Strategy.parse(text) for text in texts)


def share(steps: Sequence[Step], strategy: Strategy) -> float:
    return sum(step.strategy == strategy for step in steps) / len(steps)


def share_near_best(steps: Sequence[Step], candidates: Sequence[Strategy], within: float = 0.97) -> float:
    """Of steps whose strategy has at least so much of the best expected speed-up."""
    worth = worth_of(steps, lambda running: candidates)
    return sum(worth[step.kind] >= within for step in steps) / len(steps)


def worth_of(
    steps: Sequence[Step], candidates: Callable[[int], Sequence[Strategy]]
) -> dict[tuple[int, Strategy, int], float]:
    """Expected speed-up over the best candidate's, for every kind of step."""
    worth = {}
    for step in steps:
        if step.kind not in worth:
            best = step.world.best(candidates(step.running), step.running)
            gain = step.world.gain(step.strategy, step.running)
            worth[step.kind] = gain / step.world.gain(best, step.running)
    return worth


def bound_share(steps: Sequence[Step], candidates: Callable[[int], Sequence[Strategy]]) -> float:
    """Expected speed over that of an engine which always knows the best of the candidates (for so many running)."""
    worth = worth_of(steps, candidates)
    needed = {step.kind: step.world.step_s(step.strategy, step.running) for step in steps}
    spent_s = sum(needed[step.kind] + step.switched_on_s for step in steps)
    return sum(needed[step.kind] * worth[step.kind] for step in steps) / spent_s


def speedup(steps: Sequence[Step]) -> float:
    """Against plain decoding of the same tokens."""
    return sum(step.plain_s for step in steps) / sum(step.elapsed_s for step in steps)


def elapsed_s(steps: Sequence[Step]) -> float:
    return sum(step.elapsed_s for step in steps)


def lost_s(steps: Sequence[Step], candidates: Sequence[Strategy]) -> float:
    """Expected seconds beyond what the best strategy takes for as many tokens."""
    worth = worth_of(steps, lambda running: candidates)
    return sum(step.world.step_s(step.strategy, step.running) * (1 - worth[step.kind]) for step in steps)


def quiet(world: World) -> World:
    """The same without noise."""
    return replace(world, noise=0.0, stalls=0.0)
