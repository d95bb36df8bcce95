"""Interruptions and lost learners: nothing is lost but time, and the time is booked."""

from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.errors import PacelineError
from planner.simulate import Scenario, simulate
from planner.simulate.clock import Clock
from planner.simulate.elastic import Elastic
from planner.simulate.places import Places
from planner.simulate.run import SimulatedRun, simulate_beside

CALM = Scenario(name="cloud").but(
    fleet__nodes=4,
    fleet__gpus_per_node=2,
    workload__prompts_per_step=16,
    workload__pool=64,
    workload__steps=6,
    lengths__median=600,
    lengths__max_tokens=4096,
    costs__source="table",
    engine__max_running=8,
    learning__checkpoint_every=100,
    spot__capacity_s=2,
    spot__boot_s=10,
    spot__start_s=5,
    spot__load_s=3,
)


@settings(max_examples=25, deadline=None)
@given(
    every_s=st.floats(15, 90),
    notice_s=st.sampled_from([0.0, 1.0, 120.0]),
    takes=st.sampled_from(["node", "worker"]),
    layout=st.sampled_from(["colocated", "disaggregated"]),
    failures=st.sampled_from([0.0, 500.0]),
    training=st.booleans(),
    seed=st.integers(0, 99),
)
def test_whatever_is_taken_every_response_ends_once_and_worker_seconds_add_up(
    every_s: float, notice_s: float, takes: str, layout: str, failures: float, training: bool, seed: int
) -> None:
    scenario = CALM.but(
        seed=seed,
        fleet__layout=layout,
        spot__every_s=every_s if layout == "disaggregated" else 4 * every_s,
        spot__notice_s=notice_s,
        spot__takes=takes,
        workload__steps=3,
        learning__failures_per_day=failures,
        learning__restart_s=1,
        learning__detect_s=1,
        learning__load_s=1,
        speculation__mode="adaptive",
        speculation__training__enabled=training,
    )
    run = SimulatedRun(scenario)
    found = run.outcome()
    calm = simulate(scenario.undisturbed(3))
    assert [step.tokens for step in found.steps] == [step.tokens for step in calm.steps]
    assert found.wall_s >= 0.95 * calm.wall_s  # moved, a request may find a better place
    sampled = sum(seat.engine.spent.tokens for seat in run.seats.values())
    if notice_s:
        assert sampled == pytest.approx(found.tokens, rel=0, abs=found.moved + 5.0)  # a fraction of a token each
    else:
        assert sampled >= found.tokens - 1.0 * len(found.steps)
    assert 0 <= found.ettr <= 1
    assert found.down_s <= found.workers * found.wall_s * (1 + 1e-9)
    for step in found.steps:
        assert -1e-6 <= step.idle_s <= found.workers * step.rollout_s * (1 + 1e-9)


def test_interruptions_that_leave_no_time_for_anything_are_named() -> None:
    with pytest.raises(PacelineError, match="come faster than"):
        simulate(CALM.but(spot__every_s=0.5, spot__notice_s=0))


def test_one_interruption_costs_its_place_the_time_until_a_successor_is_ready() -> None:
    found = simulate(CALM.but(spot__trace_s=[4.0], spot__takes="worker", spot__react_s=1))
    assert found.interruptions == 1
    assert found.down_s == pytest.approx(2 + 10 + 5 + 3 - 1)
    assert found.ettr == pytest.approx(1 - (found.down_s + found.again_s) / (8 * found.wall_s))


def test_with_a_notice_no_token_is_sampled_twice() -> None:
    run = SimulatedRun(CALM.but(spot__trace_s=[4.0, 15.0], spot__notice_s=120, spot__takes="node"))
    found = run.outcome()
    assert found.moved > 5
    sampled = sum(seat.engine.spent.tokens for seat in run.seats.values())
    assert sampled == pytest.approx(found.tokens, rel=0, abs=found.moved + 1.0)


def test_without_a_notice_tokens_are_sampled_again_up_to_the_last_prefix_that_was_told() -> None:
    warned = simulate(CALM.but(spot__trace_s=[4.0], spot__notice_s=120))
    silent = simulate(CALM.but(spot__trace_s=[4.0], spot__notice_s=0))
    assert silent.moved > 0
    assert silent.again_s > warned.again_s > 0
    assert silent.ettr < warned.ettr


def test_a_lost_learner_repeats_the_updates_since_its_checkpoint_while_rollouts_go_on() -> None:
    calm = simulate(CALM)
    step_s = calm.step_s
    lossy = CALM.but(
        learning__failures_per_day=86_400 / (4 * step_s),
        learning__detect_s=0.1,
        learning__restart_s=1,
        learning__load_s=1,
        workload__steps=12,
    )
    found = simulate(lossy)
    assert found.learner_failures > 0
    assert found.held_s == pytest.approx(8 * sum(step.stall_s for step in found.steps))
    often = simulate(lossy.but(learning__checkpoint_every=2, learning__checkpoint_s=0))
    assert sum(step.stall_s for step in often.steps) < sum(step.stall_s for step in found.steps)


def test_goodput_says_what_the_same_steps_take_undisturbed() -> None:
    found = simulate_beside(CALM.but(spot__every_s=15))
    assert found.goodput is not None
    assert 0.3 < found.goodput < 1
    assert simulate_beside(CALM).goodput is None


def test_workers_that_come_and_go_cost_less_and_no_time_where_learning_is_long() -> None:
    scenario = CALM.but(
        learning__tokens_s=60.0,
        fleet__idle_timeout_s=5,
        spot__capacity_s=5,
        spot__boot_s=30,
        spot__start_s=10,
        workload__steps=5,
    )
    fixed = simulate(scenario)
    run = SimulatedRun(scenario.but(fleet__min_workers=2))
    elastic = run.outcome()
    assert run.elastic.left > 0
    assert run.elastic.joined > 0
    assert elastic.tokens == fixed.tokens
    assert elastic.wall_s <= 1.02 * fixed.wall_s
    assert elastic.cost < 0.95 * fixed.cost
    assert elastic.worker_hours < 0.8 * fixed.worker_hours
    assert elastic.down_s == 0
    whole_s = elastic.workers * sum(step.rollout_s for step in elastic.steps)
    assert run._worker_rollout_s < 0.99 * whole_s, "places that were let go are not idle"


class Three:
    """Places of one worker that is up, and work for as many as there may be."""

    def __init__(self) -> None:
        self.up = ["rollout-0"]
        self.demand = 0.0

    def standing(self) -> tuple[list[str], list[tuple[float, str]]]:
        return self.up, []

    def waiting(self) -> tuple[int, float]:
        return int(self.demand), self.demand * 1000

    def tokens_per_s(self) -> float:
        return 10.0

    def let_go(self, name: str) -> None:
        self.up.remove(name)

    def ready(self, name: str) -> None:
        self.up.append(name)

    def node_of(self, name: str) -> int:
        return 0


def test_a_rising_demand_asks_for_further_places_while_the_first_are_coming() -> None:
    three, clock = Three(), Clock()
    elastic = Elastic(scenario=CALM.but(fleet__min_workers=1), clock=clock, places=cast(Places, three))
    for name in ("rollout-1", "rollout-2"):
        three.up.append(name)
        elastic._let_go(name)
    three.demand = 1.0
    elastic.rollout_begins(0.0, 5)
    assert list(elastic._coming) == ["rollout-1"]
    three.demand = 50.0
    elastic._look()
    assert list(elastic._coming) == ["rollout-1", "rollout-2"]
    clock.run(lambda: False, 60.0)
    assert elastic.gone_s < 120.0
    assert elastic.joined == 2
