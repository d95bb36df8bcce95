"""The engine in virtual time, beside a loop over every engine step."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.strategy import PLAIN, Strategy
from planner.simulate.costs import TableCosts
from planner.simulate.engine import Engine, Running

COSTS = TableCosts(fixed_s=8e-3, row_s=5e-5, context_s=2e-7, level_s=1e-3)
DRAFT = Strategy("eagle", 4)


@dataclass
class Always:
    strategy: Strategy = PLAIN
    per_token: float = 0.0

    def choose(self, running: int, context_tokens: float) -> Strategy:
        return self.strategy

    def accepted(self, strategy: Strategy) -> float:
        return sum(self.per_token**depth for depth in range(1, strategy.depth + 1))

    def drafted(self, strategy: Strategy) -> float:
        return float(strategy.tokens_to_verify)


@dataclass
class Loop:
    """The oracle: one engine step after the other, in whole tokens; what is accepted is drawn."""

    slots: int
    lengths: list[int]
    prompt: int
    chooser: Always
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def run(self) -> tuple[float, list[float]]:
        now_s, waiting, ends = 0.0, list(enumerate(self.lengths)), [0.0] * len(self.lengths)
        running: dict[int, int] = {}
        while waiting or running:
            while waiting and len(running) < self.slots:
                request, _ = waiting.pop(0)
                running[request] = 0
                now_s += COSTS.prefill_s(self.prompt)
            strategy = self.chooser.strategy
            context = sum(self.prompt + tokens for tokens in running.values())
            rows = len(running) * (1 + strategy.tokens_to_verify)
            now_s += COSTS.step_s(len(running), rows, context) + COSTS.draft_s(strategy, len(running), context)
            for request in list(running):
                gained = 1
                while gained <= strategy.depth and self.rng.random() < self.chooser.per_token:
                    gained += 1
                running[request] += gained
                if running[request] >= self.lengths[request]:
                    del running[request]
                    ends[request] = now_s
        return now_s, ends


def through(
    chooser: Always, slots: int, lengths: list[int], prompt: int, **options: float
) -> tuple[Engine, list[float]]:
    """Requests are given as slots become free, as the dispatcher does."""
    ends = [0.0] * len(lengths)
    waiting = list(range(len(lengths)))
    engine = Engine(costs=COSTS, speculator=chooser, slots=slots, **options)
    now_s = 0.0

    def ended(one: Running) -> None:
        ends[one.request] = now_s

    engine.on_end = ended
    while waiting or engine.running:
        while waiting and engine.running < slots:
            request = waiting.pop(0)
            engine.admit(
                Running(request=request, prompt=request, prompt_tokens=prompt, tokens=0.0, length=lengths[request])
            )
        now_s = engine.next_s()
        assert now_s < math.inf
        engine.advance(now_s)
    return engine, ends


def drawn(seed: int, count: int) -> list[int]:
    return np.clip(np.random.default_rng(seed).lognormal(5.5, 1.0, count), 1, 4000).astype(int).tolist()


@pytest.mark.parametrize("slots", [4, 16, 64])
def test_plain_decoding_takes_what_a_loop_over_its_steps_takes(slots: int) -> None:
    lengths = drawn(slots, 3 * slots)
    whole_s, ends = Loop(slots, lengths, 100, Always()).run()
    _, found = through(Always(), slots, lengths, 100)
    assert max(found) == pytest.approx(whole_s, rel=2e-3)
    assert np.abs(np.array(found) / ends - 1).max() < 0.01


@pytest.mark.parametrize("slots", [1, 8, 32])
def test_drafting_takes_what_a_loop_that_draws_each_acceptance_takes_within_five_percent(slots: int) -> None:
    lengths, chooser = drawn(7 + slots, 3 * slots + 4), Always(DRAFT, 0.7)
    times = [Loop(slots, lengths, 100, chooser, np.random.default_rng(seed)).run()[0] for seed in range(8)]
    _, found = through(chooser, slots, lengths, 100)
    assert max(found) == pytest.approx(np.mean(times), rel=0.05)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=40),
    slots=st.integers(1, 20),
    kv_tokens=st.integers(3200, 20_000),
)
def test_whatever_fits_every_token_is_sampled_once_and_every_request_ends(
    lengths: list[int], slots: int, kv_tokens: int
) -> None:
    engine, ends = through(Always(), slots, lengths, 100, kv_tokens=float(kv_tokens))
    assert all(end > 0 for end in ends)
    assert engine.spent.tokens == pytest.approx(sum(lengths), rel=1e-4, abs=0.1)
    assert engine.running == engine.decoding == 0


def test_a_cache_that_is_too_small_sends_the_youngest_back_and_computes_it_again() -> None:
    roomy, _ = through(Always(), 8, [1000] * 8, 100)
    small, ends = through(Always(), 8, [1000] * 8, 100, kv_tokens=4000.0)
    assert not roomy.spent.preempted
    assert small.spent.preempted > 0
    assert small.spent.prefill_s > roomy.spent.prefill_s
    assert max(ends) > 1000 * COSTS.step_s(8, 8, 0)


def test_what_is_taken_back_has_the_tokens_it_had() -> None:
    engine = Engine(costs=COSTS, speculator=Always(), slots=4)
    for request in range(3):
        engine.admit(Running(request=request, prompt=0, prompt_tokens=50, tokens=10.0 * request, length=500))
    engine.advance(0.9 * engine.next_s())
    tokens = [engine.tokens_of(request) for request in range(3)]
    assert tokens[0] > 40
    assert [each - tokens[0] for each in tokens] == pytest.approx([0, 10, 20])
    assert engine.take_back() == [0, 1, 2]
    assert engine.running == 0
    assert engine.next_s() == math.inf
