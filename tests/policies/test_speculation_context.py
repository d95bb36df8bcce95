"""What it costs to switch on a drafter that has to catch up: learned by itself, and spread over its stay."""

import pytest

from config.strategy import PLAIN, Strategy
from policies.calibration.costs import CostModel
from policies.speculation.chooser import AdaptivePolicy
from policies.steps import StepKind
from tests.policies.loads import load, outcome
from tests.policies.speculation_sim import World

EAGLE = Strategy.parse("eagle:4")
WORLD = World({"eagle": 0.9}, noise=0.0)
PLAIN_S = WORLD.step_s(PLAIN, 1)


class Engine:
    """Decodes with a drafter that has to catch up after any step without it, for `late_s` per request."""

    def __init__(self, late_s: float, accepted: int = 3) -> None:
        self.policy = AdaptivePolicy(
            [EAGLE], costs=CostModel(WORLD.calibration([EAGLE])), max_running=32, exploration=0.01
        )
        self.late_s, self.accepted = late_s, accepted
        self.late = 0  # steps
        self._behind = True

    def decode(self, running: int, steps: int) -> list[Strategy]:
        chosen = []
        for _ in range(steps):
            strategy = self.policy.choose(load(running))
            chosen.append(strategy)
            late = strategy == EAGLE and self._behind
            self.late += late
            late_s = running * self.late_s if late else 0.0
            drafted = running * strategy.depth
            self.policy.record(
                outcome(
                    strategy,
                    running,
                    drafted,
                    self.accepted * running * bool(drafted),
                    WORLD.step_s(strategy, running) + late_s,
                    kind=StepKind.CAUGHT_UP if late else StepKind.USUAL,
                    draft_s=WORLD.drafting_s(strategy) + late_s,
                )
            )
            self._behind = strategy != EAGLE
        return chosen


@pytest.mark.parametrize("running", [1, 8])
def test_what_switching_on_costs_keeps_no_drafter_away_that_pays(running: int) -> None:
    """One request shows little of it in a step, so that a second look waits until decoding has paid for the first."""
    engine = Engine(late_s=1e-3)
    engine.decode(running, 2500 if running == 1 else 800)
    assert engine.decode(running, 400).count(EAGLE) >= 380
    assert engine.policy.costs.switch_s("eagle") == pytest.approx(running * 1e-3, rel=0.3)


def test_one_that_pays_less_than_its_switching_on_is_not_switched_on_and_off() -> None:
    """Every other step is plain where it would gain 10 % and catching up costs a hundred steps."""
    engine = Engine(late_s=100 * PLAIN_S, accepted=1)
    engine.decode(1, 3000)
    assert engine.late <= 4


def test_a_trial_is_charged_with_what_catching_up_cost() -> None:
    """A drafter that loses is tried again as often as the allowance pays for what switching it on was seen to cost."""
    late = {}
    for name, late_s in (("cheap", 0.0), ("dear", 20 * PLAIN_S)):
        engine = Engine(late_s, accepted=0)
        engine.decode(1, 30_000)
        late[name] = engine.late
    assert 1 <= late["dear"] < late["cheap"]
    assert late["dear"] * 20 <= 60 + 0.01 * 30_000, "in plain steps: the first look, and what the allowance pays"


def test_new_weights_are_tried_again_without_starting_from_nothing() -> None:
    engine = Engine(late_s=0.0)
    engine.decode(1, 2000)
    engine.policy.renewed("eagle")
    assert engine.decode(1, 50).count(EAGLE) >= 40, "it stays in use meanwhile"


def test_new_weights_of_a_drafter_that_lost_are_looked_at() -> None:
    engine = Engine(late_s=0.0, accepted=0)
    engine.decode(1, 3000)
    tried = engine.late
    engine.accepted = 4
    for _ in range(4):
        engine.policy.renewed("eagle")
        last = engine.decode(1, 1000)
    assert engine.late > tried
    assert last[-500:].count(EAGLE) >= 450
