"""A decoding engine in virtual time: what a StrategyPolicy is asked and told, in worlds whose best strategy is known.

Owns no policy and no thresholds. Deterministic: a seeded generator draws what is accepted and how long a step takes.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from config.strategy import PLAIN, Strategy
from policies.calibration.document import Calibration, CalibrationKey, DraftCost, PassCost
from policies.speculation.policy import StrategyPolicy
from policies.steps import Int64Array, Load, StepKind, StepOutcome

SIBLING = 0.8  # of a level's failures remain, for every further child
CONTEXT_TOKENS = 64  # kept per request for a drafter that is switched on


@dataclass(frozen=True, slots=True)
class World:
    """A pass takes fixed_s + row_s per row; a drafter not named in `accept` has every token rejected.

    accept: by drafter, the probability that a drafted token is accepted, if all before it on its path were.
    Siblings of a tree save little of what fails: the runners-up of a draft that is wrong are mostly wrong too.
    """

    accept: Mapping[str, float] = field(default_factory=dict)
    fixed_s: float = 120e-6
    row_s: float = 10e-6
    draft_s: Mapping[str, float] = field(default_factory=dict)  # by drafter, whole batch; 30 us where not named
    noise: float = 0.05  # standard deviation of a step's time, relative
    stalls: float = 0.0  # share of steps that the machine interrupts for stall_s
    stall_s: float = 5e-3
    late: Mapping[str, float] = field(default_factory=dict)  # by drafter, in how many of its steps it takes late_s more
    late_s: float = 0.0
    pass_s: Mapping[str, float] = field(default_factory=dict)  # by drafter, per level of depth: a network's passes
    catch_up_s: Mapping[str, float] = field(default_factory=dict)  # by drafter, when switched on ...
    catch_up_row_s: float = 0.0  # ... and per token that it has not followed, up to CONTEXT_TOKENS per request
    prepare_s: Mapping[str, float] = field(default_factory=dict)  # by drafter, at its first draft for new weights
    says: Mapping[str, float] = field(default_factory=dict)  # by drafter, in how many steps it has something to say: 1
    problems: Mapping[int, float] = field(default_factory=dict)  # by problem, what of `accept` it has: 1

    def level(self, strategy: Strategy, problem: int = 0) -> float:
        rate = self.accept.get(strategy.drafter, 0.0) * self.problems.get(problem, 1.0)
        return rate * (1 + (1 - rate) * (1 - SIBLING ** (strategy.top_k - 1)))

    def says_of(self, strategy: Strategy) -> float:
        return self.says.get(strategy.drafter, 1.0) if strategy.depth else 0.0

    def drafting_s(self, strategy: Strategy) -> float:
        if not strategy.depth:
            return 0.0
        return self.draft_s.get(strategy.drafter, 30e-6) + strategy.depth * self.pass_s.get(strategy.drafter, 0.0)

    def step_s(self, strategy: Strategy, running: int) -> float:
        rows = running * (1 + self.says_of(strategy) * strategy.tokens_to_verify)
        return self.drafting_s(strategy) + self.fixed_s + self.row_s * rows

    def gain(self, strategy: Strategy, running: int) -> float:
        """Expected speed-up against plain decoding, where all requests are of problem 0."""
        rate = self.level(strategy)
        tokens = 1 + self.says_of(strategy) * sum(rate**depth for depth in range(1, strategy.depth + 1))
        return tokens * self.step_s(PLAIN, running) / self.step_s(strategy, running)

    def best(self, arms: Iterable[Strategy], running: int) -> Strategy:
        """Of the arms and plain decoding."""
        return max((PLAIN, *arms), key=lambda arm: self.gain(arm, running))

    def drafts(
        self, strategy: Strategy, prompt_ids: Int64Array, draw: np.random.Generator
    ) -> tuple[Int64Array, Int64Array]:
        """(reached, stood) of one step, [R]."""
        reached = np.where(draw.random(len(prompt_ids)) < self.says_of(strategy), strategy.depth, 0)
        rates = np.array([self.level(strategy, problem) for problem in prompt_ids.tolist()])
        with np.errstate(divide="ignore"):  # the length of a run of successes, by inversion
            runs = np.log(1 - draw.random(len(prompt_ids))) / np.log(rates)
        return reached, np.minimum(np.where(rates < 1, np.minimum(runs, 1 << 20), 1 << 20).astype(np.int64), reached)

    def switched_on_s(self, strategy: Strategy, running: int, missed: float) -> float:
        """What a drafter that has not followed `missed` tokens of each request costs in its first step."""
        if strategy.drafter not in self.catch_up_s or not missed:
            return 0.0
        rows = running * min(missed, CONTEXT_TOKENS)
        return self.catch_up_s[strategy.drafter] + rows * self.catch_up_row_s

    def calibration(self, arms: Iterable[Strategy] = ()) -> Calibration:
        """What a calibration of this machine says, drafting included."""
        sizes = (1, 2, 4, 8, 16, 32, 64)
        passes = [
            PassCost(requests=r, rows=r * n, context_tokens=100 * r, seconds=self.fixed_s + self.row_s * r * n, count=9)
            for r in sizes
            for n in (1, 2, 3, 5, 9, 17)
        ]
        drafts = [
            DraftCost(strategy=str(arm), requests=r, seconds=self.drafting_s(arm), count=9)
            for arm in arms
            for r in sizes
        ]
        return Calibration.measured(CalibrationKey(model="m", precision="p", device="d"), passes, drafts)


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


Problems = Callable[[int], Int64Array]  # by number of running requests: of which problem each is
ONE_PROBLEM: Problems = lambda running: np.zeros(running, np.int64)  # noqa: E731


@dataclass(slots=True)
class Simulation:
    """Drives one policy; `run` may be called again, with another world."""

    policy: StrategyPolicy
    seed: int = 0
    problems: Problems = ONE_PROBLEM
    steps: list[Step] = field(default_factory=list)
    tokens: float = 0.0  # per request
    _followed: dict[str, float] = field(default_factory=dict)  # by drafter: tokens when it last drafted
    _ready: set[str] = field(default_factory=set)  # drafters, for the target's weights
    _prompt_ids: dict[int, Int64Array] = field(default_factory=dict)
    _draw: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._draw = np.random.default_rng(self.seed)

    def run(
        self, world: World, running: Running, steps: int, *, prefill_every: int = 0, evaluation: bool = False
    ) -> list[Step]:
        """Returns what was done. Every prefill_every-th step holds prompt chunks of 300 rows."""
        done = []
        for index in range(steps):
            done.append(
                self._step(world, running(self.tokens), bool(prefill_every) and index % prefill_every == 0, evaluation)
            )
        self.steps += done
        return done

    def new_target(self) -> None:
        """Other weights from now on."""
        self._ready.clear()
        self.policy.new_target()

    def _step(self, world: World, count: int, prefill: bool, evaluation: bool) -> Step:
        prompt_ids = self._prompt_ids.get(count)
        if prompt_ids is None:
            prompt_ids = self._prompt_ids[count] = self.problems(count)
        at = Load(count, 0, 100 * count, prompt_ids)
        strategy = self.policy.choose(at)
        reached, stood = world.drafts(strategy, prompt_ids, self._draw)
        drafted = int((reached > 0).sum()) * strategy.tokens_to_verify
        late_s = world.switched_on_s(strategy, count, self.tokens - self._followed.get(strategy.drafter, 0.0))
        if strategy.depth and strategy.drafter not in self._ready:
            late_s += world.prepare_s.get(strategy.drafter, 0.0)
            self._ready.add(strategy.drafter)
        drafting_s = world.drafting_s(strategy) + late_s
        if (often := world.late.get(strategy.drafter, 0.0)) and self._draw.random() < often:
            drafting_s += world.late_s
        noise = max(0.2, 1 + world.noise * self._draw.normal())
        rows = count + drafted + 300 * prefill
        elapsed_s = drafting_s + (world.fixed_s + world.row_s * rows) * noise
        elapsed_s += world.stall_s if world.stalls and self._draw.random() < world.stalls else 0.0
        kind = StepKind.CAUGHT_UP if late_s else StepKind.DISTURBED if prefill else StepKind.USUAL
        self.policy.record(
            StepOutcome(
                kind=StepKind.EVALUATION if evaluation else kind,
                strategy=strategy,
                load=at,
                prompt_tokens=300 * prefill,
                drafted=drafted,
                accepted=int(stood.sum()),
                elapsed_s=elapsed_s,
                draft_s=drafting_s,
                prompt_ids=prompt_ids if drafted else None,
                reached=reached if drafted else None,
                stood=stood if drafted else None,
            )
        )
        self.tokens += 1 + int(stood.sum()) / count
        self._followed[strategy.drafter] = self.tokens
        return Step(world, strategy, count, int(stood.sum()), elapsed_s, late_s)


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
