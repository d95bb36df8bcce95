"""Training goes on where it is measured to pay, and stops where it does not, in worlds that are made up."""

import json
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.drafter.acceptance import AcceptanceTally
from policies.drafter.payoff import ADVANCE, BEGINS_S, BLOCK, LEARNS, TrainingPayoff

DRAFTS, DEPTH = 4_000, 4  # of one RL step
LONGEST_REST = 16 * BLOCK


@dataclass(slots=True)
class World:
    """A drafter that comes nearer to `best` with training, and loses `drift` of its acceptance each RL step."""

    share: float = 0.5  # of its tokens that are accepted
    best: float = 0.5
    drift: float = 0.0
    pace: float = 0.1  # of the way to `best`, per RL step of training
    stake_s: float = 5.0  # 0: engines do not use it
    cost_s: float = 0.3
    step_s: float = 1_000.0
    draw: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def run(self, payoff: TrainingPayoff, steps: int) -> list[bool]:
        """Whether each RL step trained."""
        found = []
        for _ in range(steps):
            found.append(payoff.trains)
            payoff.observe(
                stake_s=self.stake_s,
                cost_s=self.cost_s if payoff.trains else 0.0,
                step_s=self.step_s,
                accuracy=self.share + float(self.draw.normal(0, 0.001)) if payoff.trains else None,
                acceptance=self.tally() if self.stake_s else AcceptanceTally(),
            )
            self.share *= 1 - self.drift
            if found[-1]:
                self.share += self.pace * (self.best - self.share)
        return found

    def tally(self) -> AcceptanceTally:
        """Of its drafts: how deep each was accepted."""
        accepted = int(self.draw.binomial(DRAFTS * DEPTH, self.share))
        return AcceptanceTally({f"eagle:{DEPTH}": (DRAFTS * DEPTH, accepted)})


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("world", [World(), World(stake_s=0.0), World(stake_s=0.0, drift=0.01)])
def test_it_stops_where_nothing_is_won(world: World, seed: int) -> None:
    """The drafter is as good as it gets; or engines draft otherwise. At most a quarter of 100 RL steps is trained."""
    world = World(stake_s=world.stake_s, drift=world.drift, draw=np.random.default_rng(seed))
    trained = world.run(TrainingPayoff(begun=True), 100)
    assert all(trained[: 2 * BLOCK])
    assert sum(trained) <= 25
    assert sum(trained[50:]) <= 2 * BLOCK, "probes become rare"


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("drift", [0.01, 0.02])
def test_it_goes_on_where_the_target_drifts(drift: float, seed: int) -> None:
    """Also where training only keeps the level: a rest shows how fast the drafter ages."""
    world = World(best=0.7, drift=drift, cost_s=0.1, draw=np.random.default_rng(seed))
    trained = world.run(TrainingPayoff(begun=True), 100)
    assert sum(trained) >= 75
    always = World(best=0.7)
    for _ in range(100):
        always.share = always.share * (1 - drift) + 0.1 * (0.7 - always.share * (1 - drift))
    assert world.share >= 0.9 * always.share


def test_it_stops_once_the_target_no_longer_drifts() -> None:
    world, payoff = World(best=0.7, drift=0.02), TrainingPayoff(begun=True)
    world.run(payoff, 60)
    world.drift = 0.0
    assert sum(world.run(payoff, 100)[40:]) <= 30


def test_a_fresh_drafter_is_trained_before_engines_use_it() -> None:
    """Its accuracy rises. Bounded: one that engines never use is stopped when LEARNS blocks are over."""
    fresh = World(share=0.02, best=0.9, pace=0.03, stake_s=0.0)
    trained = fresh.run(TrainingPayoff(begun=True), 2 * LEARNS * BLOCK)
    assert all(trained[: (LEARNS - 1) * BLOCK])
    assert sum(trained[LEARNS * BLOCK :]) <= LEARNS * BLOCK // 2


def test_nothing_is_trained_before_there_was_time_for_a_trainer() -> None:
    world, payoff = World(), TrainingPayoff()
    assert not any(world.run(payoff, 2 * BLOCK))
    assert payoff.state_dict() == TrainingPayoff().state_dict(), "it judged nothing"
    assert not payoff.idle(BEGINS_S - 0.1)
    assert payoff.idle(BEGINS_S + 0.1) == "begins: a worker was out of work for 2.1 s"
    assert not payoff.idle(60.0), "said once"
    assert all(world.run(payoff, 2 * BLOCK))


def test_what_is_dear_must_win_more() -> None:
    cheap, dear = World(share=0.3, best=0.6, cost_s=0.01), World(share=0.3, best=0.6, cost_s=4.0)
    assert sum(cheap.run(TrainingPayoff(begun=True), 60)) > sum(dear.run(TrainingPayoff(begun=True), 60))


def test_a_collapse_ends_a_rest() -> None:
    world, payoff = World(), TrainingPayoff(begun=True)
    world.run(payoff, 3 * BLOCK)
    assert not payoff.trains
    payoff.demand()
    assert all(world.run(payoff, BLOCK))


@given(st.lists(st.tuples(st.floats(0, 20), st.floats(0.1, 60)), min_size=1, max_size=300))
def test_what_has_not_paid_takes_a_hundredth_of_the_time_whatever_it_costs(steps: list[tuple[float, float]]) -> None:
    """Engines do not use the drafter, which learns all the time: without a bound it would train for LEARNS blocks."""
    payoff, spent_s, time_s, dearest_s = TrainingPayoff(begun=True), 0.0, 0.0, 0.0
    for at, (cost_s, step_s) in enumerate(steps):
        cost_s = cost_s if payoff.trains else 0.0
        spent_s, time_s, dearest_s = spent_s + cost_s, time_s + step_s, max(dearest_s, cost_s)
        payoff.observe(
            stake_s=0.0, cost_s=cost_s, step_s=step_s, accuracy=min(0.02 * at, 1.0), acceptance=AcceptanceTally()
        )
        assert spent_s <= ADVANCE * time_s + dearest_s + 1e-9


def test_what_pays_is_no_longer_bounded() -> None:
    """It costs a tenth of each RL step and brings more: once that is measured, all of them train."""
    world = World(share=0.3, best=0.9, drift=0.02, pace=0.3, stake_s=20.0, cost_s=1.0, step_s=10.0)
    payoff = TrainingPayoff(begun=True)
    first = world.run(payoff, 2 * BLOCK * 10)
    assert sum(first) < len(first) / 2
    assert sum(world.run(payoff, 40)) >= 30


def test_it_says_once_that_it_waits() -> None:
    world, payoff = World(stake_s=0.0), TrainingPayoff(begun=True)
    said = [
        payoff.observe(stake_s=0.0, cost_s=0.2, step_s=5.0, accuracy=None, acceptance=world.tally())
        for _ in range(2 * BLOCK)
    ]
    assert said[0] == "waits: it took 0.2 of the RL step's 5 s, and may take 1% until it has paid"
    assert not any(said[1:])
    assert not payoff.trains
    payoff.demand()
    assert payoff.trains, "engines had used it: it collapsed"


def test_its_words_name_the_seconds() -> None:
    payoff, said = TrainingPayoff(begun=True), []
    for _ in range(2 * BLOCK):
        said.append(
            payoff.observe(
                stake_s=1.0,
                cost_s=0.25,
                step_s=100.0,
                accuracy=None,
                acceptance=AcceptanceTally({"eagle:4": (40_000, 20_000)}),
            )
        )
    assert said[:-1] == [""] * (2 * BLOCK - 1)
    assert said[-1] == "stops for 8 RL steps at most: worth 0 s an RL step, it takes 0.25 s"
    assert (payoff.worth_s, payoff.cost_s) == (0.0, 0.25)


@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.floats(0, 5), st.none() | st.floats(0, 1), st.integers(0, 1000)), max_size=200
    ),
    st.integers(0, 200),
)
def test_a_rest_ends_whatever_is_measured__and_a_resumed_run_goes_on_alike(
    steps: list[tuple[float, float, float | None, int]], saved_at: int
) -> None:
    payoff, rest = TrainingPayoff(begun=True), 0
    other: TrainingPayoff | None = None
    for at, (stake_s, cost_s, accuracy, accepted) in enumerate(steps):
        if at >= saved_at and at % BLOCK == 0 and other is None:
            other = TrainingPayoff(begun=True)
            other.load_state_dict(json.loads(json.dumps(payoff.state_dict())))
        rest = 0 if payoff.trains else rest + 1
        assert rest <= LONGEST_REST
        for one in (payoff, other):
            if one is not None:
                one.observe(
                    stake_s=stake_s,
                    cost_s=cost_s,
                    step_s=1_000.0,
                    accuracy=accuracy,
                    acceptance=AcceptanceTally({"eagle:4": (1000, accepted)}),
                )
        assert other is None or other.trains == payoff.trains
