"""Whole simulated runs: what holds of any, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.config.issues import ConfigError
from planner.simulate import Scenario, load_scenario, simulate
from planner.simulate.study import ablation
from planner.simulate.workload import Asked, Workload

SMALL = Scenario(name="small").but(
    fleet__nodes=2,
    fleet__gpus_per_node=4,
    workload__prompts_per_step=32,
    workload__pool=64,
    workload__steps=3,
    lengths__median=300,
    lengths__max_tokens=2048,
    costs__source="table",
    engine__max_running=16,
)
EAGLE = {"eagle": {"per_token": 0.75}}


def test_the_same_scenario_has_the_same_outcome_and_another_seed_another() -> None:
    first = simulate(SMALL)
    assert simulate(SMALL) == first
    assert simulate(SMALL.but(seed=1)).tokens != first.tokens


def test_the_simulator_loads_neither_ray_nor_torch() -> None:
    code = "import sys, planner.simulate; print('ray' in sys.modules, 'torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]


def test_rounds_learn_from_as_many_tokens_in_less_time_and_are_the_products_own() -> None:
    plain = SMALL.but(workload__pool=256, workload__steps=8, lengths__between=0.9, engine__max_running=64)
    short, outcome = simulate(plain.but(rounds__factor=1.5, rounds__quantile=0.67)), simulate(plain)
    assert [step.responses for step in short.steps] == [step.responses for step in outcome.steps]
    assert short.rollout_s < outcome.rollout_s
    assert min(step.longest for step in short.steps) < min(step.longest for step in outcome.steps)
    with pytest.raises(ConfigError, match="leave budget and abort out"):
        plain.but(rounds__factor=1.5, budget__share=0.5)
    assert simulate(plain.but(workload__probe_first=True)).tokens == outcome.tokens


@settings(max_examples=25, deadline=None)
@given(
    nodes=st.integers(1, 6),
    running=st.integers(1, 40),
    sigma=st.floats(0, 2),
    mode=st.sampled_from(["off", "static", "adaptive", "roofline"]),
    training=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_response_is_sampled_once_and_worker_seconds_add_up(
    nodes: int, running: int, sigma: float, mode: str, training: bool, seed: int
) -> None:
    scenario = SMALL.but(
        seed=seed,
        fleet__nodes=nodes,
        engine__max_running=running,
        lengths__sigma=sigma,
        workload__steps=2,
        speculation__mode=mode,
        speculation__strategies=["eagle:2", "eagle:4"],
        speculation__training__enabled=training,
        speculation__acceptance=EAGLE,
    )
    found = simulate(scenario)
    for step in found.steps:
        assert step.responses == 32 * 8
        assert 0 <= step.tail_s <= step.rollout_s
        assert step.idle_s + step.training_s <= found.workers * step.rollout_s * (1 + 1e-9)
    assert found.wall_s == pytest.approx(sum(step.step_s for step in found.steps))
    assert found.ettr == 1.0


def test_drafting_shortens_a_rollout_where_passes_cost_more_than_rows() -> None:
    plain = simulate(SMALL)
    drafting = simulate(SMALL.but(speculation__mode="adaptive", speculation__acceptance=EAGLE))
    assert drafting.rollout_s < 0.7 * plain.rollout_s
    assert drafting.tokens == plain.tokens


def test_drafter_training_happens_on_idle_workers_and_keeps_what_is_accepted() -> None:
    options: dict[str, Any] = {
        "speculation__mode": "adaptive",
        "speculation__acceptance": EAGLE,
        "speculation__training__drift": 0.3,
        "speculation__training__micro_step_s": 0.05,
        "speculation__training__start_s": 0.2,
        "workload__steps": 6,
    }
    without = simulate(SMALL.but(**options))
    trained = simulate(SMALL.but(**options, speculation__training__enabled=True))
    assert without.training_share == 0
    assert trained.training_share > 0
    assert trained.steps[-1].quality > without.steps[-1].quality + 0.05
    assert trained.rollout_s < without.rollout_s


def test_looking_ahead_shortens_steps_by_what_stands_and_changes_no_response() -> None:
    apart = SMALL.but(workload__steps=5, fleet__layout="disaggregated")
    without = simulate(apart)
    stands = simulate(apart.but(lookahead__enabled=True, lookahead__differs=1e9))
    differs = simulate(apart.but(lookahead__enabled=True, lookahead__differs=200))
    never = simulate(apart.but(lookahead__enabled=True, lookahead__differs=1e-6))
    assert [one.tokens for one in stands.steps] == [one.tokens for one in without.steps]
    assert stands.steps[0].rollout_s == without.steps[0].rollout_s, "nobody looked ahead before"
    assert stands.rollout_s < differs.rollout_s < without.rollout_s
    assert never.rollout_s == pytest.approx(without.rollout_s, rel=1e-3)
    tail = simulate(SMALL.but(workload__steps=5, fleet__layout="colocated"))
    ahead = simulate(
        SMALL.but(workload__steps=5, fleet__layout="colocated", lookahead__enabled=True, lookahead__differs=1e9)
    )
    assert without.rollout_s - stands.rollout_s > tail.rollout_s - ahead.rollout_s > 0, "the tail's seconds alone"


def test_prompts_are_allocated_as_in_a_run_though_their_responses_are_longer() -> None:
    """Equal rewards: a sum over tokens varies by the root of their number, which is what a token costs too. By rewards
    alone (DUET) long responses get the fewer."""
    scenario = SMALL.but(workload__steps=30, workload__solved=0.5, lengths__between=0.9, budget__share=0.5)
    workload, asked = Workload(scenario=scenario), list[Asked]()
    for _ in range(30):
        asked += workload.step()
    tokens = {prompt: [one.tokens for one in asked if one.prompt == prompt] for prompt in {o.prompt for o in asked}}
    ordered = sorted(tokens.values(), key=lambda one: sum(one) / len(one))
    quarter = len(ordered) // 4
    short, long = (sum(map(len, part)) for part in (ordered[:quarter], ordered[-quarter:]))
    assert 0.8 <= long / short <= 1.25


def test_a_budget_spends_its_share_of_the_tokens() -> None:
    whole = simulate(SMALL.but(workload__steps=8))
    half = simulate(SMALL.but(workload__steps=8, budget__share=0.5))
    assert half.tokens == pytest.approx(0.5 * whole.tokens, rel=0.15)


def test_giving_up_shortens_the_longest_responses_once_lengths_are_known() -> None:
    late = SMALL.but(abort__enabled=True, hopeless=1.0, abort__keep=0.01, workload__steps=4)
    assert simulate(late).tail_s < simulate(SMALL.but(workload__steps=4)).tail_s


def test_late_responses_go_on_by_the_runs_rule_and_by_time_fewer_do() -> None:
    """By tokens next to nobody is given up, as in a run; every late one was taken for a tenth."""
    late = SMALL.but(abort__enabled=True, hopeless=1.0, workload__steps=8)
    tenth, tokens, seconds = (
        simulate(late.but(**change)).tokens for change in ({"abort__keep": 0.1}, {}, {"abort__price": "time"})
    )
    assert tenth < seconds < tokens


def test_an_ablation_runs_each_technique_without_and_alone() -> None:
    scenario = SMALL.but(
        speculation__mode="adaptive", speculation__acceptance=EAGLE, budget__share=0.6, lookahead__enabled=True
    )
    found = ablation(scenario)
    assert [one.name for one in found.techniques] == ["speculation", "token budget", "lookahead"]
    assert found.none == simulate(SMALL)
    assert all(one.last > 1 and one.first > 1 for one in found.techniques)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("fleet.gpus_per_worker=3", "does not divide"),
        ("fleet.nodes=0", "fleet.nodes"),
        ("fleet.device=H900", "no GPU is known as 'H900'"),
        ("model=Qwen2.5-32B fleet.device=A10G fleet.gpus_per_worker=1", "do not fit"),
        ("model=Qwen2.5-32B fleet.gpus_per_worker=4 fleet.layout=colocated", "a learner of 8 ranks does not fit H100"),
        ("lengths.max_tokens=100000000", "holds no response"),
        ("model=GPT-9", "is none of"),
        ("fleet.nods=4", "no such key"),
        ("costs.source=sweep", "needs costs.file"),
        ("rounds.factor=1.5 lookahead.enabled=true", "leave lookahead out"),
        ("speculation.strategies=[eagle]", "eagle"),
        ("nonsense", "not an override"),
    ],
)
def test_what_no_cluster_could_run_is_named(override: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("fleet: {nodes: 1}\n")
    with pytest.raises(ConfigError) as refused:
        simulate(load_scenario(tmp_path / "s.yaml", override.split(" ")))
    assert says in str(refused.value)


def test_lengths_come_from_a_run_s_record_in_its_order(tmp_path: Path) -> None:
    rows = [{"step": step, "lengths": [10 * step + i for i in range(1, 9)]} for step in (1, 2)]
    (tmp_path / "lengths.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scenario = SMALL.but(
        lengths__file=str(tmp_path), workload__prompts_per_step=2, workload__rollouts_per_prompt=4, workload__steps=2
    )
    assert [step.tokens for step in simulate(scenario).steps] == [sum(row["lengths"]) for row in rows]


@pytest.mark.parametrize(("workers", "slower"), [(1, 1.0), (2, 1.0), (3, 1.5), (6, 3.0)])
def test_engines_that_share_cores_are_as_much_slower_as_measured(workers: int, slower: float) -> None:
    even = SMALL.but(
        fleet__nodes=1,
        fleet__gpus_per_node=workers,
        workload__prompts_per_step=workers,
        workload__rollouts_per_prompt=4,
        lengths__given=[[200] * 4],
        learning__tokens_s=1e5,
    )
    shared = even.but(costs__shared=[1.0, 1.0, 1.5])
    assert simulate(shared).rollout_s == pytest.approx(slower * simulate(even).rollout_s, rel=1e-3)


def test_an_engine_is_as_fast_as_alone_once_the_others_have_ended() -> None:
    uneven = SMALL.but(
        fleet__nodes=1,
        fleet__gpus_per_node=2,
        workload__prompts_per_step=2,
        workload__rollouts_per_prompt=1,
        workload__prompt_tokens=1,
        workload__known=False,
        lengths__given=[[100], [300]],
    )
    rates = {"costs__fixed_s": 0.01, "costs__row_s": 1e-12}
    alone = simulate(uneven.but(**rates)).rollout_s
    both = simulate(uneven.but(**rates, costs__shared=[1.0, 2.0])).rollout_s
    assert (alone, both) == (pytest.approx(3.0, rel=1e-3), pytest.approx(2.0 + 2.0, rel=1e-3))


def test_what_an_engine_takes_for_drafting_is_added_to_steps_that_draft_alone() -> None:
    plain, drafting = SMALL, SMALL.but(speculation__mode="static", speculation__acceptance=EAGLE)
    for scenario, same in ((plain, True), (drafting, False)):
        taken = simulate(scenario.but(costs__drafting_s=0.005)).rollout_s
        assert (taken == simulate(scenario).rollout_s) == same
