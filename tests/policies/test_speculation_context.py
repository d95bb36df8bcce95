"""What it costs to switch on a drafter that has to catch up: measured, charged, and no measurement of the drafter."""

from policies.speculation.arms import FIRST_WAIT_STEPS, ArmBelief
from policies.speculation.chooser import PLAIN_STEPS, AdaptivePolicy
from policies.speculation.policy import StepKind
from policies.speculation.strategy import PLAIN, Strategy
from tests.policies.loads import load, outcome
from tests.policies.speculation_sim import World

EAGLE = Strategy.parse("eagle:4")
WORLD = World({"eagle": 0.9}, noise=0.0)


class Engine:
    """Decodes with a drafter that has to catch up after any step without it, for `late_s` per request."""

    def __init__(self, late_s: float, accepted: int = 3) -> None:
        self.policy = AdaptivePolicy([EAGLE], max_running=32, exploration=0.01, window=32)
        self.late_s, self.accepted = late_s, accepted
        self.late = 0  # steps
        self._behind = True

    def decode(self, running: int, steps: int) -> list[Strategy]:
        chosen = []
        for _ in range(steps):
            strategy = self.policy.choose(load(running))
            chosen.append(strategy)
            elapsed_s = WORLD.step_s(strategy, running)
            if strategy == EAGLE and self._behind:
                self.late += 1
                self.policy.record(
                    outcome(strategy, running, 0, 0, elapsed_s + running * self.late_s, kind=StepKind.CAUGHT_UP)
                )
            else:
                accepted = self.accepted * running * bool(strategy.depth)
                self.policy.record(outcome(strategy, running, running * strategy.depth, accepted, elapsed_s))
            self._behind = strategy != EAGLE
        return chosen

    def belief(self, running: int) -> ArmBelief:
        beliefs = self.policy.beliefs()
        return next(b for b in beliefs if b.strategy == EAGLE and b.first <= running <= b.last)


def test_what_switching_on_may_cost_keeps_no_drafter_from_its_first_look() -> None:
    """At 5 and more requests the trial of an assumed price was never paid for, however well the drafter drafts."""
    for running in (1, 8, 32):
        engine = Engine(late_s=1e-3)
        assert engine.decode(running, 100).count(EAGLE) >= 3, running


def test_the_step_that_catches_up_is_no_measurement_and_the_trial_goes_on() -> None:
    engine = Engine(late_s=20 * WORLD.step_s(PLAIN, 1))
    first = engine.decode(1, PLAIN_STEPS + 6)
    assert first[PLAIN_STEPS:].count(EAGLE) >= 5  # a trial of 4 requests' worth, and the step that was none
    assert (engine.belief(1).reward or 0.0) > 1.5, "what catching up cost is not the strategy's reward"


def test_after_the_first_look_a_measured_price_is_waited_for() -> None:
    """A drafter that loses is tried again as often as the allowance pays for what switching it on was seen to cost."""
    tries = {}
    for name, late_s in (("cheap", 0.0), ("dear", 20 * WORLD.step_s(PLAIN, 1))):
        engine = Engine(late_s, accepted=0)
        engine.decode(1, 8000)
        tries[name] = engine.late
    assert tries["cheap"] >= 4
    assert 1 <= tries["dear"] < tries["cheap"]
    assert tries["dear"] * 20 * WORLD.step_s(PLAIN, 1) <= 20 * WORLD.step_s(PLAIN, 1) + 0.01 * 8000 * WORLD.step_s(
        PLAIN, 1
    ), "beyond the first look, the allowance pays"


def test_new_weights_are_tried_again_without_starting_from_nothing() -> None:
    engine = Engine(late_s=0.0)
    engine.decode(1, 2000)
    before = engine.belief(1).reward
    engine.policy.renewed("eagle")
    assert before is not None
    assert engine.belief(1).reward is not None
    assert engine.decode(1, 50).count(EAGLE) >= 40, "it stays in use meanwhile"


def test_new_weights_do_not_set_back_what_waits() -> None:
    """Hand-outs that come faster than an arm's turn must not put the turn off for ever."""
    engine = Engine(late_s=0.0, accepted=0)
    engine.decode(1, 3000)
    tried = engine.late
    for _ in range(20):
        engine.policy.renewed("eagle")
        engine.decode(1, FIRST_WAIT_STEPS)
    assert engine.late >= tried + 2
