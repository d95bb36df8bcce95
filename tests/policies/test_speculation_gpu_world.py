"""The adaptive choice and Algorithm 1 at an A100's costs of a 7B model, beside a choice that knows the world."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from actors.engine.calibrated import free_rows
from config.speculation import SpeculationOptions
from config.strategy import Strategy
from experiments.pacing import pace_of
from policies.calibration.costs import CostModel
from policies.speculation.build import build_policy
from policies.speculation.chooser import AdaptivePolicy
from policies.speculation.defaults import default_arms
from tests.params import long
from tests.policies.gpu_world import EAGLE, SELF, USUAL, Burst, Drafts, oracle, plain, processor_s, rollouts
from tests.policies.speculation_sim import arms

ROLLOUTS, SEEDS = 6, (0, 1, 2)
FREE = free_rows("cpu", pace_of("A100", scale=1.0))
TLT = arms("eagle:4", "eagle:2", "eagle:8", "eagle:4x3/12", "ngram:6")
REPEATED = {"suffix": Drafts(0.9, 0.8), "ngram": Drafts(0.6, 0.6)}  # text that retrieval drafts well
RETRIEVAL = {"suffix": Drafts(0.75, 0.75), "ngram": Drafts(0.6, 0.65)}
MIXED = {**RETRIEVAL, "eagle": replace(EAGLE, stands=0.62), "self": SELF}
WORLDS = {"tlt": (TLT, USUAL), "all": (default_arms(USUAL), USUAL), "repeated": (default_arms(REPEATED), REPEATED)}


def adaptive(chosen: Sequence[Strategy]) -> AdaptivePolicy:
    """As an engine on an A100 begins, with default settings."""
    return AdaptivePolicy(chosen, costs=CostModel(free=FREE), max_running=1 << 30, exploration=0.01)


@pytest.mark.parametrize("world", WORLDS)
def test_the_adaptive_choice_has_97_percent_of_the_oracle(world: str) -> None:
    """First rollouts among them, and cold. With the caps of a processor, repeated text had 0.87."""
    chosen, drafters = WORLDS[world]
    best = [oracle(chosen, drafters, seed, ROLLOUTS) for seed in SEEDS]
    found = [rollouts(adaptive(chosen), drafters, seed, ROLLOUTS)[0] for seed in SEEDS]
    assert sum(map(sum, best)) >= 0.97 * sum(map(sum, found))
    assert sum(one[0] for one in best) >= 0.88 * sum(one[0] for one in found)


def test_algorithm_1_has_85_percent_of_the_oracle_with_its_defaults() -> None:
    """TLT's arms. With buckets from 1, 2, 4 ... requests on it was 0.80."""
    best_s = found_s = 0.0
    for seed in SEEDS:
        policy = build_policy(SpeculationOptions(mode="paper", strategies=tuple(map(str, TLT))), ("eagle", "ngram"))
        assert policy is not None
        best_s += sum(oracle(TLT, USUAL, seed, ROLLOUTS))
        found_s += sum(rollouts(policy, USUAL, seed, ROLLOUTS)[0])
    assert best_s >= 0.85 * found_s


BURSTS = (
    Burst(1.0, 2.0, 0.1),
    Burst(1.0, 2.0, 0.03, passes=False),
    Burst(12.0, 2.0, 1.0),
    Burst(12.0, 2.0, 0.1, passes=False),
)


@pytest.mark.parametrize("only", ["", *long("eagle")])
def test_a_burst_of_the_machine_puts_no_drafter_out_for_long(only: str) -> None:
    """Two seconds in which passes or drafts are late, over six rollouts of 5 to 10 s; their lateness itself left out.
    With losses in full and a hundredfold rest it was 0.68, at worst 0.49."""
    drafters = {only: EAGLE} if only else MIXED
    chosen = default_arms(drafters)
    quiet_s = sum(rollouts(adaptive(chosen), drafters, 0, ROLLOUTS)[0])
    kept = []
    for burst in BURSTS:
        each_s, world = rollouts(adaptive(chosen), drafters, 0, ROLLOUTS, (burst,))
        kept.append(quiet_s / (sum(each_s) - world.late_s))
    assert min(kept) >= 0.85
    assert sum(kept) / len(kept) >= 0.92


# Of an EAGLE head: nothing stands; and it is late in three of ten steps; good, but too late too often. A copy whose
# level takes longer than a step of the target.
HOSTILE = {
    "useless": {"eagle": replace(EAGLE, stands=0.02)},
    "hostile": {"eagle": replace(EAGLE, stands=0.02, late=0.3, late_s=0.2)},
    "late": {"eagle": replace(EAGLE, stands=0.95, late=0.15, late_s=0.3)},
    "dear": {"self": replace(SELF, level_s=12e-3, each_s=2.4e-4)},
    "lying": {"suffix": Drafts(1.0, 0.05)},
}


@pytest.mark.parametrize("drafter", HOSTILE)
def test_a_drafter_that_does_not_pay_costs_at_most_three_per_cent(drafter: str) -> None:
    """Beside plain decoding, of all rollouts."""
    drafters, chosen = HOSTILE[drafter], default_arms(HOSTILE[drafter])
    for seed in (0, 1):
        plain_s, found_s = plain(seed, ROLLOUTS), rollouts(adaptive(chosen), drafters, seed, ROLLOUTS)[0]
        assert sum(plain_s) >= 0.97 * sum(found_s)


@pytest.mark.parametrize("drafter", HOSTILE)
def test_nor_in_the_first_rollout_in_which_it_is_new(drafter: str) -> None:
    """Where only a spell's loss was bounded, the late one cost six to eight per cent by seed."""
    drafters, chosen = HOSTILE[drafter], default_arms(HOSTILE[drafter])
    for seed in range(8):
        (plain_s,), (found_s,) = plain(seed, 1), rollouts(adaptive(chosen), drafters, seed, 1)[0]
        assert plain_s >= 0.97 * found_s, seed


# The same where drafted rows are paid for: text that repeats nothing, a head, and a copy that takes as long as its
# target.
ON_A_PROCESSOR = {
    "ngram": Drafts(1.0, 0.05),
    "suffix": Drafts(1.0, 0.05),
    "eagle": replace(EAGLE, stands=0.02, level_s=3e-4, each_s=2e-4),
    "self": replace(SELF, level_s=2e-3, each_s=2.4e-3),
}


@pytest.mark.parametrize("drafter", ["ngram", *long("suffix", "eagle", "self")])
def test_nor_does_it_on_a_processor(drafter: str) -> None:
    drafters = {drafter: ON_A_PROCESSOR[drafter]}
    policy = AdaptivePolicy(default_arms(drafters), max_running=1 << 30, exploration=0.01)
    found_s = rollouts(policy, drafters, 0, 3, price=processor_s)[0]
    assert sum(plain(0, 3, processor_s)) >= 0.98 * sum(found_s)


@pytest.mark.parametrize("drafter", ["useless", *long("hostile", "late", "dear")])
def test_beside_retrieval_too(drafter: str) -> None:
    drafters = {**RETRIEVAL, **HOSTILE[drafter]}
    without = [rollouts(adaptive(default_arms(RETRIEVAL)), RETRIEVAL, seed, ROLLOUTS)[0] for seed in SEEDS]
    beside = [rollouts(adaptive(default_arms(drafters)), drafters, seed, ROLLOUTS)[0] for seed in SEEDS]
    assert sum(map(sum, without)) >= 0.97 * sum(map(sum, beside))
