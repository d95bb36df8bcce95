"""What the simulator takes from policies and sources, beside those themselves."""

import math
from pathlib import Path

import numpy as np
import pytest

from config.strategy import PLAIN, Strategy
from launch.config.issues import ConfigError
from planner.simulate import Scenario
from planner.simulate.acceptance import AcceptanceState
from planner.simulate.costs import MeasuredCosts, RooflineCosts, costs_of, read_sweep
from planner.simulate.scenario import Acceptance, Speculation, SpotTraining
from planner.simulate.shapes import SHAPES
from planner.simulate.speculation import Adaptive
from planner.simulate.study import sized, sweep_values
from policies.calibration.costs import CostModel
from policies.calibration.document import Calibration, CalibrationKey, DraftCost, PassCost
from policies.roofline.devices import DEVICES
from policies.roofline.timing import step_time
from policies.speculation.chooser import AdaptivePolicy
from policies.steps import Load, StepKind, StepOutcome

KEY = CalibrationKey(model="m", precision="p", device="d")
ARMS = [Strategy("eagle", 2), Strategy("eagle", 4), Strategy("eagle", 8)]
SWEEP = Path(__file__).parents[2] / ".." / "shared" / "data" / "a100_decode_sweep_qwen2.5_7b.csv"


def calibration() -> Calibration:
    passes = [
        PassCost(
            requests=requests,
            rows=requests * per,
            context_tokens=1000 * requests,
            seconds=5e-3 + 2e-4 * requests * per,
            count=5,
        )
        for requests in (1, 2, 4, 8, 16, 32)
        for per in (1, 3, 5, 9)
    ]
    drafts = [
        DraftCost(strategy=str(arm), requests=requests, seconds=6e-4 * arm.depth, count=5)
        for arm in ARMS
        for requests in (1, 4, 16, 32)
    ]
    return Calibration.measured(KEY, passes, drafts)


@pytest.mark.parametrize("per_token", [0.4, 0.6, 0.8])
def test_the_adaptive_choice_is_that_of_the_policy_once_it_has_learned(per_token: float) -> None:
    options = Speculation(
        mode="adaptive",
        strategies=tuple(map(str, ARMS)),
        max_running=32,
        acceptance={"eagle": Acceptance(per_token=per_token)},
    )
    costs = MeasuredCosts(calibration())
    state = AcceptanceState(options.acceptance, SpotTraining())
    ours = Adaptive(options, costs, state)
    policy = AdaptivePolicy(ARMS, costs=CostModel(calibration()), max_running=32, exploration=0.0)
    rng = np.random.default_rng(0)
    for arm in ARMS:  # it has seen thousands of drafts of each
        for _ in range(300):
            stood = (rng.random((16, arm.depth)) < per_token).cumprod(1).sum(1)
            outcome = StepOutcome(
                kind=StepKind.USUAL,
                strategy=arm,
                load=Load(16, 0, 16_000),
                prompt_tokens=0,
                drafted=16 * arm.depth,
                accepted=int(stood.sum()),
                elapsed_s=1e-2,
                draft_s=1e-3,
                reached=np.full(16, arm.depth),
                stood=stood,
            )
            policy.acceptance.learn(arm, [outcome])
    for running in (1, 2, 4, 8, 16, 32, 33):
        load = Load(running, 0, 1000 * running)
        for _ in range(3):  # the first may be a trial
            theirs = policy.choose(load)
            policy.renewed("none")
        mine = ours.choose(running, 1000.0 * running)
        rate = {arm: _rate(costs, state, arm, running) for arm in (mine, theirs)}
        assert rate[mine] >= 0.97 * rate[theirs], (running, mine, theirs)
        assert (mine == PLAIN) == (theirs == PLAIN) or abs(rate[mine] / rate[theirs] - 1) < 0.05


def _rate(costs: MeasuredCosts, state: AcceptanceState, arm: Strategy, running: int) -> float:
    rows = round(running * (1 + state.drafted(arm)))
    seconds = costs.step_s(running, rows, 1000.0 * running) + costs.draft_s(arm, running, 1000.0 * running)
    return running * (1 + state.accepted(arm)) / seconds


def test_a_drafter_loses_with_every_update_and_wins_back_by_training() -> None:
    training = SpotTraining(enabled=True, drift=0.5, floor=0.6, recovery_micro_steps=100)
    state = AcceptanceState({"eagle": Acceptance(per_token=0.8)}, training)
    arm = Strategy("eagle", 2)
    assert state.accepted(arm) == pytest.approx(0.8 + 0.64)
    for _ in range(50):
        state.updated()
    assert state.quality == pytest.approx(0.6)
    state.trained(100)
    assert state.quality == pytest.approx(1 - 0.4 * math.exp(-1))
    assert state.accepted(PLAIN) == state.drafted(PLAIN) == 0


def test_between_the_lines_of_its_grid_a_roofline_is_within_a_percent() -> None:
    net, device = SHAPES["Qwen2.5-7B"], DEVICES["H100"]
    costs = RooflineCosts(net=net, device=device)
    for requests, context in ((1, 700), (8, 3333), (64, 1500), (128, 9000)):
        exact = step_time(net, device, requests, 1, context).ms / 1e3
        assert costs.step_s(requests, requests, float(requests * context)) == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("requests", [1, 8])
def test_a_drafter_that_speaks_in_some_steps_costs_its_share_of_them(requests: int) -> None:
    roofline = RooflineCosts(net=SHAPES["Qwen2.5-7B"], device=DEVICES["A10G"])
    for costs in (roofline, MeasuredCosts(calibration())):
        none, always = (costs.step_s(requests, requests * per, 1000.0 * requests) for per in (1, 5))
        seldom = AcceptanceState({"eagle": Acceptance(speaks=0.1)}, SpotTraining()).drafted(Strategy("eagle", 4))
        taken = costs.step_s(requests, requests * (1 + seldom), 1000.0 * requests)
        assert taken - none == pytest.approx(0.1 * (always - none), rel=0.5)
        assert taken > none


def test_more_gpus_to_a_worker_make_steps_shorter_by_less_than_their_number() -> None:
    net, device = SHAPES["Qwen2.5-32B"], DEVICES["H100"]
    one, four = (RooflineCosts(net=net, device=device, gpus=gpus) for gpus in (1, 4))
    ratio = one.step_s(32, 32, 64_000.0) / four.step_s(32, 32, 64_000.0)
    assert 1.5 < ratio < 4


@pytest.mark.skipif(not SWEEP.exists(), reason="the A100 sweep is not here (../shared/data)")
def test_a_measured_sweep_is_met_at_its_own_cells() -> None:
    found = read_sweep(SWEEP)
    costs = MeasuredCosts(found)
    errors = [
        abs(costs.step_s(one.requests, one.rows, float(one.context_tokens)) / one.seconds - 1) for one in found.passes
    ]
    assert np.median(errors) < 0.05
    assert np.quantile(errors, 0.9) < 0.2


def test_a_file_that_is_no_sweep_and_a_drafter_nobody_measured_are_named(tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_text("a,b\n1,2\n")
    given = Scenario().but(costs__source="sweep", costs__file=str(tmp_path / "s.csv"))
    with pytest.raises(ConfigError, match="no sweep"):
        costs_of(given)
    with pytest.raises(ConfigError, match="nothing was measured of drafter ngram"):
        MeasuredCosts(calibration()).draft_s(Strategy("ngram", 3), 1, 1.0)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("nodes=1,2,4,...,64", [1, 2, 4, 8, 16, 32, 64]),
        ("nodes=1,8,...,512", [1, 8, 64, 512]),
        ("nodes=10,20,30,...,60", [10, 20, 30, 40, 50, 60]),
        ("nodes=3,5", [3, 5]),
    ],
)
def test_a_sweep_goes_on_as_it_began(text: str, values: list[int]) -> None:
    assert sweep_values(text) == ("fleet.nodes", [str(value) for value in values])


@pytest.mark.parametrize("text", ["nodes", "nodes=", "nodes=1,...,5", "nodes=1,2,...,7", "nodes=4,2,...,1"])
def test_what_is_no_sweep_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="is no sweep"):
        sweep_values(text)


@pytest.mark.parametrize(
    ("key", "values", "scaled", "says"),
    [
        ("fleet.nodes", ["1", "a"], True, "fleet.nodes=a"),
        ("fleet.nodes", ["1", "0"], False, "fleet.nodes=0"),
        ("fleet.gpus_per_worker", ["1", "3"], False, "fleet.gpus_per_worker=3"),
        ("engine.kv_tokens", ["100000", "10"], False, "engine.kv_tokens=10"),
        ("workload.prompts_per_step", ["8"], True, "--weak"),
        ("gpus", ["8"], False, "no such key"),
    ],
)
def test_a_sweep_with_a_wrong_value_is_refused_before_anything_runs(
    key: str, values: list[str], scaled: bool, says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        sized(Scenario(), key, values, scaled=scaled)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"speculation__acceptance": {"eagel": {}}}, "did you mean eagle"),
        ({"speculation__strategies": ["foo:3"]}, "no drafter is called 'foo'"),
    ],
)
def test_a_drafter_that_nobody_knows_is_named(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Scenario().but(**given)
