"""The first rollout of a run that knows nothing: whatever the drafters are, it is hardly slower than plain decoding."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.strategy import PLAIN, Strategy
from policies.speculation.chooser import AdaptivePolicy
from policies.speculation.defaults import default_arms
from policies.speculation.ledger import EVER
from policies.steps import Int64Array, Load, StepOutcome
from tests.policies.gpu_world import Drafts, Price, World

FIXED_S = 10e-3


@dataclass(frozen=True, slots=True)
class Device:
    """A pass's price: FIXED_S for the weights, as much again for so many rows."""

    free_rows: float
    overlap: float  # 1: both add up; the larger, the more one hides the other

    def price(self, rows: float, requests: int, context_tokens: int) -> float:
        memory, compute = FIXED_S * (1 + 2e-6 * context_tokens), FIXED_S * rows / self.free_rows
        return float((memory**self.overlap + compute**self.overlap) ** (1 / self.overlap)) + 1e-5 * requests

    @property
    def pass_s(self) -> float:
        """Of one row."""
        return self.price(1, 1, 0)


@dataclass(slots=True)
class Watched:
    """Asks a policy, and sums what drafts lost beside plain decoding."""

    policy: AdaptivePolicy
    price: Price
    decoded_s: float = 0.0
    lost_s: float = 0.0
    most_s: float = 0.0  # that one step lost
    over_s: float = 0.0  # the most that was lost beyond EVER of what was decoded
    used: set[str] = field(default_factory=set)

    def choose(self, load: Load) -> Strategy:
        return self.policy.choose(load)

    def record(self, outcome: StepOutcome) -> None:
        load = outcome.load
        self.policy.record(outcome)
        self.decoded_s += outcome.elapsed_s
        if outcome.strategy.depth:
            plain_s = self.price(load.running, load.running, load.context_tokens)
            lost_s = outcome.elapsed_s - plain_s * (1 + outcome.accepted / load.running)
            self.lost_s += lost_s
            self.most_s = max(self.most_s, lost_s)
            self.used.add(outcome.strategy.drafter)
        self.over_s = max(self.over_s, self.lost_s - EVER * self.decoded_s)

    def plain_s(self, load: Load) -> float | None:
        return self.policy.plain_s(load)

    def expected_s(self, outcome: StepOutcome) -> float | None:
        return self.policy.expected_s(outcome)


def lengths(seed: int, requests: int, middle: float) -> Int64Array:
    """Lognormal, at most 600 tokens."""
    drawn = np.exp(np.random.default_rng(seed).normal(np.log(middle), 0.9, requests))
    return np.clip(drawn, 2, 600).astype(np.int64)


def worth(draw: st.DrawFn, name: str, device: Device) -> Drafts:
    """A drafter of that name, good or not."""
    network = name in ("eagle", "self")
    return Drafts(
        says=1.0 if network else draw(st.floats(0.2, 1.0)),
        stands=draw(st.one_of(st.floats(0.0, 0.3), st.floats(0.5, 0.98))),
        fixed_s=device.pass_s * draw(st.floats(0.01, 0.3)),
        level_s=device.pass_s * draw(st.floats(0.03, 0.6)) if network else 0.0,
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Device, Mapping[str, Drafts], Mapping[str, Drafts] | None, float, Int64Array]:
    """A device, drafters, what they become after so many seconds, and lengths of responses."""
    device = Device(draw(st.sampled_from((0.3, 2.0, 16.0, 120.0))), draw(st.sampled_from((1.0, 1.5, 3.0))))
    names = draw(st.lists(st.sampled_from(("suffix", "ngram", "eagle", "self")), min_size=1, max_size=4, unique=True))
    drafters = {name: worth(draw, name, device) for name in names}
    later = {name: worth(draw, name, device) for name in names} if draw(st.booleans()) else None
    requests, middle = draw(st.sampled_from(((1, 300.0), (4, 100.0), (16, 60.0), (32, 60.0))))
    return device, drafters, later, draw(st.floats(0.2, 4.0)), lengths(draw(st.integers(0, 99)), requests, middle)


@settings(max_examples=60)
@given(cases())
def test_whatever_the_drafters_are_a_first_rollout_is_at_least_098_of_plain_decoding(
    case: tuple[Device, Mapping[str, Drafts], Mapping[str, Drafts] | None, float, Int64Array],
) -> None:
    """But for one engine step. At no time drafts have lost more than EVER of what was decoded, and what one step
    lost."""
    device, drafters, later, turns_s, responses = case
    policy = AdaptivePolicy(default_arms(drafters), max_running=1 << 30, exploration=0.01)
    watched = Watched(policy, device.price)
    world = World(drafters, 0, price=device.price, later=later, turns_s=turns_s)
    found_s = world.rollout(responses, watched.choose, watched)
    plain_s = World({}, 0, price=device.price).rollout(responses, lambda load: PLAIN, None)
    assert watched.over_s <= watched.most_s + 0.005 * found_s
    assert plain_s >= 0.98 * (found_s - watched.most_s)


GOOD = {"suffix": Drafts(0.8, 0.8), "ngram": Drafts(0.6, 0.6)}


@pytest.mark.parametrize(("free_rows", "speed"), [(16.0, 1.15), (120.0, 1.5)])
def test_drafters_that_pay_are_found_within_the_first_rollout(free_rows: float, speed: float) -> None:
    device, responses = Device(free_rows, 1.5), lengths(3, 32, 200.0)
    policy = AdaptivePolicy(default_arms(GOOD), max_running=1 << 30, exploration=0.01)
    found_s = World(GOOD, 0, price=device.price).rollout(responses, policy.choose, policy)
    plain_s = World({}, 0, price=device.price).rollout(responses, lambda load: PLAIN, None)
    assert plain_s >= speed * found_s
